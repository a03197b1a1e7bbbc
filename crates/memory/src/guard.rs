//! What a handler of SIGBUS needs to know about guest memory: which addresses are, and how to get a
//! copy out of the one that has failed.
//!
//! All functions here that say so are async-signal-safe: they take no lock and allocate nothing.
//! Without a handler (`pagetide-kvm` has one) nothing changes: a copy that meets an uncorrected
//! error ends the process. So does one that meets the end of a file which another process has truncated
//! ([`FileView`](crate::FileView)): a handler lets those copies escape in the same way, for a SIGBUS
//! with the code `BUS_ADRERR` at an address that [`is_guest_memory`].

mod copy;
mod ranges;

pub use copy::{Escape, escape_from_copy};
pub use ranges::is_guest_memory;

pub(crate) use copy::{CopyFailure, copy_in, copy_out, fill_zeroes};
pub(crate) use ranges::Listed;
