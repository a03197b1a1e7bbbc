//! Memory errors under a running guest: what they take from its speed and its memory, by what the kernel
//! does with the huge page around them.

mod errors;
mod machines;
mod notes;
mod plan;
mod published;
mod report;
mod run;
mod sample;

pub use machines::Machines;
pub use plan::{MAX_SECONDS, MAX_VCPUS, Plan, PlanError, Series};
pub use published::{Published, PublishedRate, SOURCE as PUBLISHED_SOURCE};
pub use report::{Mappings, MemcyclerReport, Point, Ratio, RunRecord, SCHEMA};
pub use sample::Sample;
