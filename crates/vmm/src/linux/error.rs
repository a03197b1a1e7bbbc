//! Why a Linux guest cannot be made, or why its run failed.

use std::io;
use std::time::Duration;

use pagetide_kvm::poison::{CpuidFull, MachineCheckError};
use pagetide_memory::{AccessError, GuestAddress, RegionError};
use pagetide_pager::{AddError, ServeError};
use vm_memory::GuestMemoryError;
use vm_memory::mmap::FromRangesError;

use crate::failure::PoolFailure;
use crate::setup::SetupError;

use super::config::LinuxConfigError;
use super::content::ContentError;
use super::devices::DeviceError;
use super::image::LoadError;

/// Why a Linux guest cannot be made. Nothing ran.
#[derive(Debug, thiserror::Error)]
pub enum LinuxError {
    /// The configuration is impossible.
    #[error(transparent)]
    Config(#[from] LinuxConfigError),
    /// The kernel or the initrd cannot be loaded.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The content file cannot be written, or is another guest's.
    #[error(transparent)]
    Content(#[from] ContentError),
    /// There is no address space for a scratch mapping, in which the kernel is loaded.
    #[error("scratch memory for the kernel")]
    NoScratch(#[from] FromRangesError),
    /// The scratch mapping cannot be accessed, which would be an error in the layout.
    #[error("scratch memory of the kernel")]
    Scratch(#[from] GuestMemoryError),
    /// KVM cannot be used, or refused a part of the set-up.
    #[error(transparent)]
    Setup(#[from] SetupError),
    /// The guest's memory cannot be allocated.
    #[error("memory of the guest")]
    Memory(#[source] RegionError),
    /// The guest's memory cannot be written.
    #[error("cannot write guest memory at {gpa}")]
    Write {
        /// Where.
        gpa: GuestAddress,
        /// The region's error.
        #[source]
        source: AccessError,
    },
    /// This kernel's vCPUs do not exit for absent memory.
    #[error(
        "this kernel lacks KVM_CAP_ABSENT_MAPPING_FAULT, with which vCPUs exit for absent memory; \
         userfaultfd works without it (uffd)"
    )]
    NoExits,
    /// The pager cannot serve the guest's memory.
    #[error("memory of the guest cannot be paged")]
    Region(#[from] AddError),
    /// The pager cannot run.
    #[error("the pager cannot run")]
    Serve(#[from] ServeError),
    /// CPUID has no room for the entries about machine checks.
    #[error(transparent)]
    Cpuid(#[from] CpuidFull),
    /// A vCPU's registers for machine checks cannot be set up.
    #[error(transparent)]
    MachineChecks(#[from] MachineCheckError),
}

/// Why the run of a Linux guest failed. How a guest ends by itself is a [`LinuxEnd`](super::LinuxEnd).
#[derive(Debug, thiserror::Error)]
pub enum LinuxRunError {
    /// A vCPU or a hook failed, or a [`Stopper`](crate::Stopper) stopped the run with a cause.
    #[error(transparent)]
    Vcpus(#[from] PoolFailure),
    /// A device failed on the host's side.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The guest had not ended within its time limit.
    #[error("the guest had not ended after {limit:?}; instruction pointers: {rips:#x?}")]
    TimeLimit {
        /// The limit.
        limit: Duration,
        /// The instruction pointers of the vCPUs whose threads have ended, by vCPU number.
        rips: Vec<u64>,
    },
    /// The console's input cannot be read.
    #[error("cannot read the console's input")]
    Input(#[source] io::Error),
    /// The thread of the console's input cannot be started.
    #[error("cannot start a thread for the console's input")]
    InputThread(#[source] io::Error),
    /// Threads did not return from KVM_RUN.
    #[error("{threads} threads of vCPUs did not end within {grace:?}")]
    Lost {
        /// How many.
        threads: usize,
        /// How long they had.
        grace: Duration,
    },
}
