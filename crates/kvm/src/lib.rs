//! VMs whose memory slots keep their memory mapped and change atomically, vCPUs whose memory faults are
//! values, and kicks from any thread.
//!
//! `kvm-ioctls` makes the ioctls that it supports. This crate adds what it lacks:
//!
//! - EHWPOISON and the access bits of `KVM_EXIT_MEMORY_FAULT`, the slot flag
//!   `KVM_MEM_ABSENT_MAPPING_FAULT`, `KVM_PRE_FAULT_MEMORY`, and kicks;
//! - errors that name the slot, the range and the capability;
//! - population of stage-2 tables ([`Vm::populate`], [`Populator`]) and statistics ([`Stats`]);
//! - [`SlotTransaction`]: changes of several slots without an intermediate layout that a vCPU could
//!   see, by `KVM_SET_USER_MEMORY_REGION_LIST` or by stopping every vCPU
//!   (`docs/design/slot-transactions.md`);
//! - [`poison`]: uncorrected memory errors, by SIGBUS and by machine checks for the guest.
//!
//! [`Vm::adopt`] adopts a VM that the program created itself; [`FaultExit::of`], [`Capabilities::of`]
//! and [`populate_vm`] work without a [`Vm`].
//!
//! ```no_run
//! use pagetide_kvm::{Exit, Kvm, Signals};
//!
//! let kvm = Kvm::open()?;
//! let vm = kvm.create_vm(Signals::install()?)?;
//! let mut vcpu = vm.create_vcpu(0)?;
//! let mut here = vcpu.bind()?;
//! if let Exit::Fault(fault) = here.run()? {
//!     println!("{fault}");
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

// The tests' guest refers to this crate by its name, as other crates do.
#[cfg(test)]
extern crate self as pagetide_kvm;

mod adopt;
mod commit;
mod exit;
mod fault;
mod gate;
mod home;
mod kick;
mod plan;
pub mod poison;
mod populate;
mod pre_fault;
mod registers;
mod run_page;
mod signals;
mod slot;
mod slot_calls;
mod stats;
mod sync;
mod system;
mod transaction;
mod vcpu;
mod vm;

pub use adopt::AdoptError;
pub use commit::{CommitError, Committed, FailedChange, Method, Undone};
pub use exit::Exit;
pub use fault::{Access, FaultExit};
pub use home::Home;
pub use kick::VcpuKick;
pub use plan::PlanError;
pub use populate::{
    PopulateError, PopulateFlags, Populated, Population, PopulationError, PopulationProgress,
    Populator, PopulatorMethod, Unfinished, WorkerError, populate_vm,
};
pub use pre_fault::PreFaultError;
pub use signals::{Signals, SignalsError, kick_signal};
pub use slot::{Slot, SlotError, SlotFlags, SlotLayout};
pub use stats::{Stats, StatsError};
pub use system::{Kvm, OpenError};
pub use transaction::{SlotRef, SlotTransaction};
pub use vcpu::{BindError, BoundVcpu, RunError, Vcpu};
pub use vm::{Capabilities, CreateVcpuError, CreateVmError, Vm};

use std::io;

/// The kernel's error as an `io::Error`, which prints the errno's text.
fn os_error(errno: vmm_sys_util::errno::Error) -> io::Error {
    io::Error::from_raw_os_error(errno.errno())
}
