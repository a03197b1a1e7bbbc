//! The smallest VMM that exercises every path: a VM, its vCPU threads, and a bare guest that
//! touches every page of its memory, measures each touch and checks what it reads.
//!
//! A [`Machine`] is built once and runs many times. Faults that leave the guest go to a
//! [`FaultHandler`] on the thread of the vCPU that faulted; faults that a userfaultfd serves never
//! come here. Whatever fails, a vCPU, its handler or something outside ([`Stopper`]), ends the
//! run with the first cause, and a run in which nothing moves is ended, too.
//!
//! ```no_run
//! use std::sync::Arc;
//! use pagetide_testbed::{Machine, MachineConfig, NoFaults, Order, Touch, Workload};
//!
//! let mut machine = Machine::new(MachineConfig::new(2, 16 << 20))?;
//! let workload = Workload::new(Touch::ReadZero, Order::Random { seed: 1 });
//! let outcome = machine.run(&workload, Arc::new(NoFaults))?;
//! println!("{:?}", outcome.elapsed);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod arch;
mod config;
mod control;
mod cycler;
mod endless;
mod error;
mod guest;
mod handler;
mod layout;
#[cfg(target_arch = "x86_64")]
pub mod linux;
mod low_memory;
mod machine;
mod metronome;
mod order;
mod outcome;
mod page_tables;
pub mod pattern;
mod run;
mod stage_two;
mod vcpu_thread;
mod verify;
mod walkers;
mod window;
mod workload;
#[cfg(target_arch = "x86_64")]
mod x86_64;

pub use config::{ConfigError, MachineConfig};
pub use control::Stopper;
pub use cycler::{Cycler, CyclerConfig, Cycling};
pub use endless::EndlessError;
pub use error::MachineError;
pub use handler::{FaultHandler, Handled, HandlerError, NoFaults, UnexpectedFault};
pub use layout::{DATA_GPA, DATA_SLOT, LOW_SLOT};
pub use machine::Machine;
pub use metronome::Metronome;
pub use order::{Order, Permutation};
pub use outcome::{FailureCause, LatencyLog, RunFailure, RunOutcome, VcpuOutcome, VcpuState};
pub use pattern::Seed;
pub use stage_two::StageTwo;
pub use verify::{Content, Expected, Verified, VerifyError};
pub use walkers::{Hole, MAX_WALK, MAX_WALKERS, Walkers, WalkersConfig, Walking};
pub use workload::{Touch, Workload};
