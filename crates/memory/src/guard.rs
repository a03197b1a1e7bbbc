//! What a handler of SIGBUS needs to know about guest memory: which addresses are, and how to get a
//! copy out of the one that has failed.
//!
//! All functions here that say so are async-signal-safe: they take no lock and allocate nothing.
//! Without a handler (`pagetide-kvm` has one) nothing changes: a copy that meets an uncorrected
//! error ends the process.

mod copy;
mod ranges;

pub use copy::{Escape, escape_from_copy};
pub use ranges::is_guest_memory;

pub(crate) use copy::{CopyFailure, copy_in, copy_out};
pub(crate) use ranges::Listed;
