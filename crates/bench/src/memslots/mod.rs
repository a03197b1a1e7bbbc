//! Memory slots: what a change of the layout costs running vCPUs, by the method of the change.

mod changes;
mod machines;
mod metronome;
mod plan;
mod published;
pub mod view;

pub use machines::Machines;
pub use plan::{BOOT_UPDATES, Guest, MAX_COMMITS, MAX_VCPUS, Method, Op, Plan, Series};
pub use published::{Published, PublishedTime, SOURCE as PUBLISHED_SOURCE};
