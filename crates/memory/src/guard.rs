//! Support for SIGBUS handlers: whether an address is guest memory, and how a thread leaves a copy
//! whose access failed.
//!
//! The public functions are async-signal-safe: they take no lock and allocate nothing. In a process
//! without a handler (`pagetide-kvm` has one), a copy that meets an uncorrected error ends the process,
//! as does one that meets the end of a file which another process has truncated
//! ([`FileView`](crate::FileView)). A handler must let both kinds of copies escape; the latter raise
//! SIGBUS with the code `BUS_ADRERR` at an address for which [`is_guest_memory`] holds.

mod copy;
mod ranges;

pub use copy::{Escape, escape_from_copy};
pub use ranges::is_guest_memory;

pub(crate) use copy::{CopyFailure, copy_in, copy_out, fill_zeroes};
pub(crate) use ranges::Listed;
