//! Why vCPUs that run for ever went wrong.

use std::time::Duration;

use pagetide_memory::{AccessError, GuestAddress};
use pagetide_vmm::PoolFailure;

use crate::error::MachineError;

/// Why vCPUs that run for ever went wrong, or what they did to memory.
#[derive(Debug, thiserror::Error)]
pub enum EndlessError {
    /// A vCPU did nothing for too long.
    #[error("vCPU {vcpu} made no step in {} s{}", limit.as_secs(), at(*rip))]
    Stalled {
        /// The vCPU.
        vcpu: u32,
        /// How long it was waited for.
        limit: Duration,
        /// Its instruction pointer, if it could be read.
        rip: Option<u64>,
    },
    /// A vCPU or one of its hooks failed, or its thread did not come back.
    #[error(transparent)]
    Vcpus(#[from] PoolFailure),
    /// The guest's processor raised an exception.
    #[error(
        "vCPU {vcpu}: exception {vector}, error code {error_code:#x}, cr2 {cr2:#x}, rip {rip:#x}"
    )]
    Exception {
        /// The vCPU.
        vcpu: u32,
        /// The exception.
        vector: u64,
        /// Its error code.
        error_code: u64,
        /// The address, for page faults.
        cr2: u64,
        /// Where.
        rip: u64,
    },
    /// The machine's own memory cannot be accessed, which would be an error in the layout.
    #[error(transparent)]
    Machine(#[from] MachineError),
    /// The data cannot be accessed, which would be an error in the layout.
    #[error("data memory")]
    Data(#[from] AccessError),
    /// The guest lost memory in a place where its code does not expect that.
    #[error("vCPU {vcpu} lost the memory at {gpa}{}", at(*rip))]
    UnexpectedLoss {
        /// The vCPU.
        vcpu: u32,
        /// The address.
        gpa: GuestAddress,
        /// The instruction pointer, if it could be read.
        rip: Option<u64>,
    },
    /// A guest found a word that nobody wrote there.
    #[error(
        "vCPU {vcpu} read {found:#x} at {gpa} in place of {expected:#x}; {count} such words in all"
    )]
    WrongWord {
        /// The vCPU.
        vcpu: u32,
        /// The page.
        gpa: GuestAddress,
        /// What it read.
        found: u64,
        /// What the page holds.
        expected: u64,
        /// How many such words all vCPUs found.
        count: u64,
    },
    /// Memory does not hold what it should at the end.
    #[error("the word at {gpa} is {found:#x} at the end, and should be {expected:#x}")]
    WrongEnd {
        /// Where.
        gpa: GuestAddress,
        /// What is there.
        found: u64,
        /// What should be.
        expected: u64,
    },
}

fn at(rip: Option<u64>) -> String {
    rip.map_or_else(String::new, |rip| format!(" (rip {rip:#x})"))
}
