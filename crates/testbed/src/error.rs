//! Why a machine could not be made.

use std::io;

use pagetide_kvm::{CreateVcpuError, CreateVmError, OpenError, SlotError};
use pagetide_memory::{AccessError, FaultInError, GuestAddress, RegionError};
use pagetide_vmm::SetupError;

use crate::config::ConfigError;

/// Why a machine could not be made or made ready for a run.
#[derive(Debug, thiserror::Error)]
pub enum MachineError {
    /// The guest's workload is machine code for x86-64.
    #[error(
        "the test guest exists for x86_64 only, not for {}",
        std::env::consts::ARCH
    )]
    UnsupportedArchitecture,
    /// /dev/kvm cannot be used.
    #[error(transparent)]
    Kvm(#[from] OpenError),
    /// The configuration cannot be.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// No VM.
    #[error(transparent)]
    CreateVm(#[from] CreateVmError),
    /// No vCPU.
    #[error(transparent)]
    CreateVcpu(#[from] CreateVcpuError),
    /// A workload for one vCPU alone, in a machine whose latency logs are too small for it.
    #[error("a vCPU cannot walk all of memory alone in a machine that was not made for it")]
    NoRoomAlone,
    /// A memory slot was refused.
    #[error(transparent)]
    Slot(#[from] SlotError),
    /// The data region cannot be had.
    #[error("data memory")]
    Data(#[source] RegionError),
    /// Low memory, for the guest's own code, tables and logs, cannot be had.
    #[error("memory for the guest's code, page tables and logs")]
    LowMemory(#[source] RegionError),
    /// Low memory cannot be made present.
    #[error("memory for the guest's code, page tables and logs cannot be made present")]
    PopulateLowMemory(#[source] FaultInError),
    /// An access to low memory failed, which would be an error in the layout.
    #[error("low memory at {gpa}")]
    AccessLowMemory {
        /// Where.
        gpa: GuestAddress,
        /// What the region says.
        #[source]
        source: AccessError,
    },
    /// A KVM operation of the set-up failed.
    #[error(transparent)]
    Setup(#[from] SetupError),
    /// The host CPUs to pin to are unknown.
    #[error("cannot read which host CPUs this thread may use")]
    Affinity(#[source] io::Error),
    /// An earlier run lost this vCPU: its thread did not come back.
    #[error("vCPU {vcpu} was lost in an earlier run: its thread did not come back")]
    LostVcpu {
        /// The vCPU.
        vcpu: u32,
    },
}
