//! Demand paging: how fast absent guest memory comes in, by the way that faults are delivered.

mod machines;
mod pages;
mod plan;
pub mod preflight;
mod published;
mod view;

pub use machines::Machines;
pub use plan::{
    Access, Delivery, MAX_FAULT_AROUND, MAX_READERS, MAX_VCPUS, Mode, Order, Plan, Series, Uffds,
};
pub use published::{Published, PublishedRate, SOURCE as PUBLISHED_SOURCE};
pub use view::{
    ELAPSED, EXITS, INSTRUCTIONS, INSTRUCTIONS_OVER_UFFD, LATENCY, MESSAGES, PAGES, RATE,
    RATE_OVER_UFFD, RATE_PER_VCPU,
};
