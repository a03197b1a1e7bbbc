//! What one run of a population benchmark gives.

use std::time::Duration;

/// What one run gave.
#[derive(Debug, Clone, Copy, Default)]
pub struct Sample {
    /// From the vCPUs' release until the last one has written to its last page.
    pub guest: Duration,
    /// From the beginning of the population to its end; zero without one.
    pub population: Duration,
    /// Threads, or vCPUs, that populated.
    pub threads: u32,
    /// Bytes that they dealt with.
    pub populated_bytes: u64,
    /// Second-stage mappings of 4 KiB that the population made, by KVM's count.
    pub mappings_4k: u64,
    /// Those of 2 MiB.
    pub mappings_2m: u64,
    /// Those of 1 GiB.
    pub mappings_1g: u64,
    /// Second-stage mappings of any size that there are when everything was written to.
    pub mappings_after: u64,
    /// Second-stage faults that vCPUs took while the population went on.
    pub population_exits: u64,
    /// Second-stage faults that vCPUs took in the run that writes to everything.
    pub exits: u64,
    /// Pages that prefetch brought in.
    pub prefetched_pages: u64,
    /// Faults that a pager served.
    pub pager_faults: u64,
}
