//! Demand paging: how fast absent guest memory comes in, by the way that faults are delivered.

mod machines;
mod notes;
mod pages;
mod plan;
pub mod preflight;
mod published;
mod report;
mod run;
mod sample;

pub use machines::Machines;
pub use plan::{
    Access, Delivery, MAX_FAULT_AROUND, MAX_READERS, MAX_VCPUS, Mode, Order, Plan, PlanError,
    Series, Uffds,
};
pub use published::{Published, PublishedRate, SOURCE as PUBLISHED_SOURCE};
pub use report::{PagingReport, Point, Ratio, RunRecord, SCHEMA};
pub use run::Collected;
pub use sample::Sample;
