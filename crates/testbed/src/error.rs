//! Why a bare machine cannot be made, or why its guest failed.

use std::io;
use std::time::Duration;

use pagetide_memory::{AccessError, FaultInError, GuestAddress, RegionError};
use pagetide_vmm::{PoolFailure, SetupError};

use crate::config::ConfigError;
use crate::verify::VerifyError;

/// Why a machine cannot be made, or cannot be prepared for a run.
#[derive(Debug, thiserror::Error)]
pub enum MachineError {
    /// The payloads are machine code for x86-64.
    #[error(
        "the test guests, which are x86-64 code, are not available on {}",
        std::env::consts::ARCH
    )]
    UnsupportedArchitecture,
    /// The configuration is impossible.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// KVM cannot be used, or refused a part of the set-up.
    #[error(transparent)]
    Setup(#[from] SetupError),
    /// A workload for one vCPU alone, in a machine whose latency logs are too small for it.
    #[error("a vCPU cannot walk all of memory alone in a machine that was not made for it")]
    NoRoomAlone,
    /// The data region cannot be allocated.
    #[error("data memory")]
    Data(#[source] RegionError),
    /// Low memory, for the guest's own code, tables and logs, cannot be allocated.
    #[error("memory for the guest's code, page tables and logs")]
    LowMemory(#[source] RegionError),
    /// Memory cannot be made present.
    #[error("the guest's memory cannot be made present")]
    Populate(#[source] FaultInError),
    /// The host cannot access the guest's memory, which would be an error in the layout.
    #[error("the guest's memory at {gpa}")]
    Access {
        /// Where.
        gpa: GuestAddress,
        /// The region's error.
        #[source]
        source: AccessError,
    },
    /// The host CPUs to pin to are unknown.
    #[error("cannot read which host CPUs this thread may use")]
    Affinity(#[source] io::Error),
    /// The thread of this vCPU did not end in an earlier run.
    #[error("vCPU {vcpu} was lost in an earlier run: its thread did not end")]
    LostVcpu {
        /// The vCPU.
        vcpu: u32,
    },
}

impl MachineError {
    /// For `map_err`, of an access to memory.
    pub(crate) fn access(gpa: u64) -> impl FnOnce(AccessError) -> Self {
        let gpa = GuestAddress(gpa);
        move |source| Self::Access { gpa, source }
    }
}

/// The first failure of a run, or what a guest did to memory.
#[derive(Debug, thiserror::Error)]
pub enum GuestError {
    /// A vCPU or a hook failed, a thread did not end, or a stopper stopped the run with a cause.
    #[error(transparent)]
    Vcpus(#[from] PoolFailure),
    /// The guest's processor raised an exception.
    #[error(
        "vCPU {vcpu}: exception {vector} in the guest, error code {error_code:#x}, rip {rip:#x}, \
         cr2 {cr2:#x}"
    )]
    Exception {
        /// The vCPU.
        vcpu: u32,
        /// The exception's vector.
        vector: u64,
        /// Its error code, 0 if it has none.
        error_code: u64,
        /// The instruction.
        rip: u64,
        /// The address of the last page fault.
        cr2: u64,
    },
    /// The guest read another word than it should have.
    #[error(
        "vCPU {vcpu} read {count} wrong words, first at gpa {gpa}: found {found:#x}, expected \
         {expected:#x}"
    )]
    WrongWord {
        /// The vCPU.
        vcpu: u32,
        /// How many words were wrong.
        count: u64,
        /// The address of the first of them.
        gpa: GuestAddress,
        /// What the guest read there.
        found: u64,
        /// What it should have read.
        expected: u64,
    },
    /// A vCPU reported its end before it had touched every page.
    #[error("vCPU {vcpu} touched {touched} of {pages} pages and reported its end")]
    Incomplete {
        /// The vCPU.
        vcpu: u32,
        /// Pages touched.
        touched: u64,
        /// Pages of its walk.
        pages: u64,
    },
    /// No vCPU, or not the one that was waited for, made progress for too long.
    #[error(
        "{} made no progress for {} s",
        vcpu.map_or_else(|| "the guest".to_owned(), |vcpu| format!("vCPU {vcpu}")),
        timeout.as_secs_f64()
    )]
    Stalled {
        /// The vCPU that was waited for; None for all of them.
        vcpu: Option<u32>,
        /// For how long.
        timeout: Duration,
    },
    /// The guest lost memory where its code does not expect that.
    #[error(
        "vCPU {vcpu} lost the memory at {gpa}{}",
        rip.map_or_else(String::new, |rip| format!(" (rip {rip:#x})"))
    )]
    UnexpectedLoss {
        /// The vCPU.
        vcpu: u32,
        /// The address.
        gpa: GuestAddress,
        /// The instruction pointer, if it could be read.
        rip: Option<u64>,
    },
    /// Memory does not hold what it should at the end.
    #[error("at the end of the run")]
    Verify(#[from] VerifyError),
    /// The machine cannot be prepared, or the host cannot access its memory.
    #[error("the machine is not ready")]
    Machine(#[from] MachineError),
}
