//! What one run of a benchmark of memory errors gives.

use std::time::Duration;

use super::report::Mappings;

/// What one run gave.
#[derive(Debug, Clone, Default)]
pub struct Sample {
    /// The time that was measured; zero if the guest did not live to see its end.
    pub elapsed: Duration,
    /// Words of 64 bits that all vCPUs read, compared and wrote in that time.
    pub words: u64,
    /// The rate of each second of it, words per microsecond.
    pub seconds_words_per_us: Vec<f64>,
    /// Errors that were made.
    pub errors: u64,
    /// Those of them that the kernel could not handle when they were made.
    pub errors_unhandled: u64,
    /// Errors that could not be made, because an earlier one had taken the memory already.
    pub errors_in_lost_memory: u64,
    /// Stage-2 mappings before the first error.
    pub before: Mappings,
    /// Stage-2 mappings at the end.
    pub after: Mappings,
    /// Bytes that vCPUs could not use any more.
    pub unusable_bytes: u64,
    /// Bytes that the kernel counts as corrupted because of this run's errors.
    pub corrupted_bytes: u64,
    /// What ended the guest, if something did.
    pub died_of: Option<String>,
}
