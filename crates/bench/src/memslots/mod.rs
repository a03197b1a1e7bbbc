//! Changing a VM's memory slots while its vCPUs run: what a commit takes, and how long it keeps
//! vCPUs from the guest, by the method of the change.

mod changes;
mod machines;
mod metronome;
mod notes;
mod plan;
mod published;
mod report;
mod run;
mod sample;

pub use machines::Machines;
pub use plan::{BOOT_UPDATES, Guest, MAX_COMMITS, MAX_VCPUS, Method, Op, Plan, PlanError, Series};
pub use published::{Published, PublishedTime, SOURCE as PUBLISHED_SOURCE};
pub use report::{Growth, MemslotsReport, Point, Ratio, RunRecord, SCHEMA};
pub use run::Collected;
pub use sample::Sample;
