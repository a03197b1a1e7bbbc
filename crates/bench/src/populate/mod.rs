//! Population: how fast the second-stage tables fill before vCPUs ask for them, and what that saves
//! the guest.

mod machines;
mod notes;
mod plan;
mod published;
mod report;
mod rig;
mod run;

pub use machines::{Machines, PrepareError};
pub use plan::{MAX_THREADS, MAX_VCPUS, Method, Plan, PlanError, Series};
pub use published::{Published, SOURCE as PUBLISHED_SOURCE};
pub use report::{PlanRecord, Point, PopulateReport, Ratio, RunRecord, SCHEMA};
pub use rig::{Job, Rig, Sample};
pub use run::run;
