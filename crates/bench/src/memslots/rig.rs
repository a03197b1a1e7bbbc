//! What a memslot benchmark runs on, as far as the benchmark has to know.

use std::time::Duration;

use super::plan::{Guest, Series};
use crate::latency::LatencyLog;
use crate::rounds::RunFailure;

/// One run to do.
#[derive(Debug, Clone, Copy)]
pub struct Job {
    /// Number of vCPUs.
    pub vcpus: u32,
    /// What to measure.
    pub series: Series,
    /// What the guest does.
    pub guest: Guest,
    /// Measured commits.
    pub commits: u32,
}

/// What one run gave.
#[derive(Debug)]
pub struct Sample {
    /// From the first commit's beginning until after the last one.
    pub elapsed: Duration,
    /// Clock readings of all vCPUs in that time: the work that the guest got done.
    pub steps: u64,
    /// Time of each measured commit, as its caller sees it.
    pub commit: LatencyLog,
    /// All of them together.
    pub commit_total: Duration,
    /// The part of each commit that the transaction itself tells: how long the gate was closed
    /// (quiesce), or the time of the ioctls.
    pub inside: LatencyLog,
    /// For each measured commit, or each stretch of time without one: the longest time that a vCPU
    /// was kept from the guest.
    pub kept: LatencyLog,
    /// Accesses to memory that left the guest as if there were none, during measured commits.
    pub holes: u64,
    /// Whether time that a vCPU waited for a processor is taken off `kept`.
    pub knows_stolen_time: bool,
}

/// Does runs.
pub trait Rig {
    /// Does one run and verifies afterwards that memory holds what it should.
    ///
    /// # Errors
    /// The run hung or failed, a guest read what nobody wrote, memory does not hold what it should,
    /// or a guest saw a hole where the method promises that there is none.
    fn run(&mut self, job: &Job) -> Result<Sample, RunFailure>;
}
