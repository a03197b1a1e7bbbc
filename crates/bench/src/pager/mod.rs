//! The demand-paging engine and its server against the shortest loop that does the same: latency and
//! rate of faults, prefetch, and the replay of a working set. Needs no KVM.

mod guest;
mod image;
mod machines;
mod one_cpu;
mod paging;
mod plan;
mod raw;
pub mod view;

pub use machines::Machines;
pub use plan::{Cache, MAX_THREADS, Order, Part, Plan, Series, Via, Way};
