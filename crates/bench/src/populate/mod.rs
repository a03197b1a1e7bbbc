//! Population: how fast the stage-2 tables fill before vCPUs access memory, and what that saves the
//! guest.

mod ahead;
mod machines;
mod plan;
mod published;
pub mod view;

pub use machines::Machines;
pub use plan::{MAX_THREADS, MAX_VCPUS, Method, Plan, Series};
pub use published::{Published, SOURCE as PUBLISHED_SOURCE};
