//! What a benchmark runs on, as far as the benchmark has to know: something that does one run and
//! says how long it took.

use std::time::Duration;

use super::plan::{Plan, Series};
use super::report::RunRecord;
use crate::latency::LatencyLog;
use crate::rounds::RunFailure;
use crate::units::float;

/// One run to do.
#[derive(Debug, Clone, Copy)]
pub struct Job<'a> {
    /// Everything that is the same in all runs.
    pub plan: &'a Plan,
    /// Number of vCPUs.
    pub vcpus: u32,
    /// Which series.
    pub series: Series,
    /// Selects the content of memory, so that no run can be satisfied by an earlier one's.
    pub seed: u64,
}

/// What one run gave.
#[derive(Debug)]
pub struct Sample {
    /// From the vCPUs' release to the last one's end.
    pub elapsed: Duration,
    /// Pages made present (for `none`: touched).
    pub pages: u64,
    /// Faults resolved by vCPUs' own threads, after exits.
    pub exits: u64,
    /// Faults resolved by reader threads, after userfaultfd messages.
    pub messages: u64,
    /// Latencies of the touches that faulted (for `none`: of all); nothing where nobody knows which
    /// ones faulted.
    pub latency: LatencyLog,
}

/// Does runs.
pub trait Rig {
    /// Does one run and verifies afterwards that every page holds what it should.
    ///
    /// # Errors
    /// The run hung or failed, or memory does not hold what it should.
    fn run(&mut self, job: &Job<'_>) -> Result<Sample, RunFailure>;
}

impl RunRecord {
    /// Thousand pages per second, all vCPUs together.
    #[must_use]
    pub fn rate_kpages_per_s(&self) -> f64 {
        // Pages per nanosecond times 1e9, divided by a thousand.
        float(self.pages) / float(self.elapsed_ns) * 1e6
    }

    /// Nanoseconds per page, all vCPUs together.
    #[must_use]
    pub fn ns_per_page(&self) -> f64 {
        float(self.elapsed_ns) / float(self.pages)
    }
}
