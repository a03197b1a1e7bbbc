//! Bare guests on the small VMM ([`pagetide_vmm`]): a guest that touches every page of its memory, measures each
//! touch and checks what it reads ([`Machine`]), and guests that work on their memory until the host stops them
//! ([`Walkers`], [`Cycler`]).
//!
//! A [`Machine`] is made once and runs any number of times. Faults that exit go to the caller's
//! [`VcpuHooks`](pagetide_vmm::VcpuHooks), on the thread of the vCPU that faulted; faults that a userfaultfd
//! delivers do not exit. The first failure of a vCPU, a hook or the user of a [`Stopper`](pagetide_vmm::Stopper)
//! ends the run, and so does a lack of progress.
//!
//! ```no_run
//! use std::sync::Arc;
//! use pagetide_testbed::{Machine, MachineConfig, Order, Touch, Workload};
//! use pagetide_vmm::NoFaults;
//!
//! let mut machine = Machine::new(MachineConfig::new(2, 16 << 20))?;
//! let workload = Workload::new(Touch::ReadZero, Order::Random { seed: 1 });
//! let outcome = machine.run(&workload, Arc::new(NoFaults))?;
//! println!("{:?}", outcome.elapsed);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod arch;
mod bare;
mod config;
mod cycler;
mod endless;
mod error;
mod layout;
mod low_memory;
mod machine;
mod order;
mod outcome;
pub mod pattern;
mod payload;
mod run;
mod stage_two;
mod verify;
mod walk;
mod walkers;
mod window;
mod workload;
#[cfg(target_arch = "x86_64")]
mod x86_64;

pub use config::{ConfigError, MachineConfig};
pub use cycler::{Cycler, CyclerConfig, Cycling};
pub use error::{GuestError, MachineError};
pub use layout::{DATA_GPA, DATA_SLOT, LOW_SLOT};
pub use machine::Machine;
pub use order::{Order, Permutation};
pub use outcome::{LatencyLog, RunFailure, RunOutcome, VcpuOutcome, VcpuState};
pub use pattern::Seed;
pub use run::next_touch;
pub use stage_two::StageTwo;
pub use verify::{Content, Expected, Verified, VerifyError};
pub use walkers::{Hole, MAX_WALK, MAX_WALKERS, Walkers, WalkersConfig, Walking};
pub use workload::{Touch, Workload};
