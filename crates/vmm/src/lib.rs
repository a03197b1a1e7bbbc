//! The small VMM: threads that run vCPUs, and what a guest needs around them.
//!
//! A [`VcpuPool`] runs each vCPU on a thread of its own until the vCPU leaves, until a [`Stopper`] stops
//! the pool, or until something fails: the first failure stops all vCPUs. [`VcpuHooks`] say what happens at
//! an exit. [`Paging`] is the implementation that resolves memory faults by a pager, and the only place
//! where an exit of KVM becomes a fault of the pager. [`linux`] boots a Linux guest.
//!
//! ```no_run
//! use std::sync::Arc;
//! use std::time::Duration;
//! use pagetide_kvm::Kvm;
//! use pagetide_vmm::{NoFaults, PoolConfig, Stopper, VcpuPool};
//!
//! let vm = Kvm::open()?.create_vm(pagetide_kvm::Signals::install()?)?;
//! let vcpus = vec![vm.create_vcpu(0)?];
//! let stopper = Stopper::default();
//! let pool = VcpuPool::start(vcpus, Arc::new(NoFaults), &stopper, &PoolConfig::default())?;
//! pool.wait(Duration::from_secs(1));
//! stopper.end();
//! let end = pool.join(Duration::from_secs(10));
//! println!("{} vCPUs have ended", end.vcpus.len());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod control;
mod failure;
mod hooks;
#[cfg(target_arch = "x86_64")]
pub mod linux;
pub mod page_tables;
mod paging;
mod pool;
mod setup;
#[cfg(target_arch = "x86_64")]
pub mod x86_64;

pub use control::Stopper;
pub use failure::PoolFailure;
pub use hooks::{Handled, HookError, Next, NoFaults, UnexpectedFault, VcpuHooks};
pub use paging::{Paging, StageTwo, UnresolvableExit, stop_when_in_trouble};
pub use pool::{PoolConfig, PoolEnd, PoolVcpu, VcpuCounts, VcpuPool};
pub use setup::{SetupError, SizeError};
