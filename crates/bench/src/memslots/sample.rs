//! What one run of a memslot benchmark gives.

use std::time::Duration;

use crate::latency::LatencyLog;

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
    /// The same of every vCPU: the longest time that it was kept itself.
    pub kept_each: LatencyLog,
    /// Accesses to memory that left the guest as if there were none, during measured commits.
    pub holes: u64,
    /// Whether time that a vCPU waited for a processor is taken off what vCPUs were kept.
    pub knows_stolen_time: bool,
}
