//! Why a Linux guest could not be made, or why its run failed.

use std::io;
use std::time::Duration;

use pagetide_kvm::poison::{CpuidFull, MachineCheckError};
use pagetide_kvm::{CreateVcpuError, CreateVmError, OpenError, SlotError};
use pagetide_memory::RegionError;

use crate::failure::{PoolFailure, SetupError};

use super::config::LinuxConfigError;
use super::devices::DeviceError;
use super::image::KernelError;
use super::initrd::InitrdError;
use super::memory::RamError;

/// Why a Linux guest could not be made. Nothing ran.
#[derive(Debug, thiserror::Error)]
pub enum LinuxError {
    /// The configuration cannot be.
    #[error(transparent)]
    Config(#[from] LinuxConfigError),
    /// No kernel.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// No initrd.
    #[error(transparent)]
    Initrd(#[from] InitrdError),
    /// /dev/kvm cannot be used.
    #[error(transparent)]
    Kvm(#[from] OpenError),
    /// No VM.
    #[error(transparent)]
    CreateVm(#[from] CreateVmError),
    /// No vCPU.
    #[error(transparent)]
    CreateVcpu(#[from] CreateVcpuError),
    /// The memory cannot be had.
    #[error("memory of the guest")]
    Memory(#[source] RegionError),
    /// The memory cannot be filled.
    #[error(transparent)]
    Ram(#[from] RamError),
    /// A memory slot was refused.
    #[error(transparent)]
    Slot(#[from] SlotError),
    /// KVM refused a part of the set-up.
    #[error(transparent)]
    Setup(#[from] SetupError),
    /// The guest cannot be told that machine checks can be survived.
    #[error(transparent)]
    Cpuid(#[from] CpuidFull),
    /// A vCPU cannot have registers for machine checks.
    #[error(transparent)]
    MachineChecks(#[from] MachineCheckError),
}

/// Why the run of a Linux guest failed; what a guest does by itself is a
/// [`LinuxEnd`](super::LinuxEnd).
#[derive(Debug, thiserror::Error)]
pub enum LinuxRunError {
    /// A vCPU or one of its hooks failed, or somebody stopped the run with a cause.
    #[error(transparent)]
    Vcpus(#[from] PoolFailure),
    /// A device failed on the host's side.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The guest had not ended when its time was up.
    #[error("the guest had not ended after {limit:?}; instruction pointers: {rips:#x?}")]
    TimeLimit {
        /// The limit.
        limit: Duration,
        /// Where the vCPUs were, by number, for those whose threads came back.
        rips: Vec<u64>,
    },
    /// The console's input cannot be watched.
    #[error("cannot watch the console's input")]
    Input(#[source] io::Error),
    /// The thread of the console's input could not be started.
    #[error("cannot start a thread for the console's input")]
    InputThread(#[source] io::Error),
    /// Threads did not come back from KVM_RUN.
    #[error("{threads} threads of vCPUs did not come back within {grace:?}")]
    Lost {
        /// How many.
        threads: usize,
        /// How long they had.
        grace: Duration,
    },
}
