//! Memory errors under a running guest: what they take from its speed and its memory, by what the kernel
//! does with the huge page around them.

mod errors;
mod machines;
mod plan;
mod published;
pub mod view;

pub use machines::Machines;
pub use plan::{MAX_SECONDS, MAX_VCPUS, Plan, Series};
pub use published::{Published, PublishedRate, SOURCE as PUBLISHED_SOURCE};
