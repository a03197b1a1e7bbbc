//! What a population benchmark runs on, as far as the benchmark has to know.

use std::time::Duration;

use super::plan::Series;
use crate::rounds::RunFailure;
use crate::units::ByteSize;

/// One run to do.
#[derive(Debug, Clone, Copy)]
pub struct Job {
    /// Number of vCPUs.
    pub vcpus: u32,
    /// What to measure.
    pub series: Series,
    /// Memory of all vCPUs together.
    pub memory: ByteSize,
    /// Selects the content of memory, so that no run can be satisfied by an earlier one's.
    pub seed: u64,
}

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
}

/// Does runs.
pub trait Rig {
    /// Does one run and verifies afterwards that memory holds what it should.
    ///
    /// # Errors
    /// The run hung or failed, or memory does not hold what it should.
    fn run(&mut self, job: &Job) -> Result<Sample, RunFailure>;
}
