//! Bare guests on the small VMM ([`pagetide_vmm`]), which exercise every path: a guest that touches
//! every page of its memory, measures each touch and checks what it reads, and guests that work on
//! their memory until they are told to end.
//!
//! A [`Machine`] is built once and runs many times. Faults that leave the guest go to the caller's
//! [`VcpuHooks`](pagetide_vmm::VcpuHooks) on the thread of the vCPU that faulted; faults that a
//! userfaultfd serves never come here. Whatever fails, a vCPU, a hook or something outside
//! ([`Stopper`](pagetide_vmm::Stopper)), ends the run with the first cause, and a run in which
//! nothing moves is ended, too.
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
mod config;
mod cycler;
mod endless;
mod error;
mod guest;
mod layout;
mod low_memory;
mod machine;
mod order;
mod outcome;
pub mod pattern;
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
pub use endless::EndlessError;
pub use error::MachineError;
pub use layout::{DATA_GPA, DATA_SLOT, LOW_SLOT};
pub use machine::Machine;
pub use order::{Order, Permutation};
pub use outcome::{FailureCause, LatencyLog, RunFailure, RunOutcome, VcpuOutcome, VcpuState};
pub use pattern::Seed;
pub use run::next_touch;
pub use stage_two::StageTwo;
pub use verify::{Content, Expected, Verified, VerifyError};
pub use walkers::{Hole, MAX_WALK, MAX_WALKERS, Walkers, WalkersConfig, Walking};
pub use workload::{Touch, Workload};
