//! What one run of a paging benchmark gives.

use std::time::Duration;

use super::report::RunRecord;
use crate::latency::LatencyLog;
use crate::units::float;

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
