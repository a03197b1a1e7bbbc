//! Population: how fast the second-stage tables fill before vCPUs ask for them, and what that saves
//! the guest.

mod ahead;
mod machines;
mod notes;
mod plan;
mod published;
mod report;
mod run;
mod sample;

pub use machines::Machines;
pub use plan::{MAX_THREADS, MAX_VCPUS, Method, Plan, PlanError, Series};
pub use published::{Published, SOURCE as PUBLISHED_SOURCE};
pub use report::{Point, PopulateReport, Ratio, RunRecord, SCHEMA};
pub use sample::Sample;
