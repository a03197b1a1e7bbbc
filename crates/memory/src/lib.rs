//! Guest memory: addresses and pages as types, regions with their mappings in this process, and the
//! state of each page.
//!
//! This crate issues no ioctl. It has:
//!
//! - [`GuestAddress`] (a gpa), [`HostAddress`] (an hva), [`PageIndex`] (a page's number within its
//!   region), [`PageSize`], and the checked ranges [`GuestRange`], [`HostRange`], [`PageRange`];
//! - [`Backing`]: the kind of memory behind a region;
//! - [`Region`]: a range of guest memory, its memfd and its two mappings;
//! - [`Access`]: the kind of access that caused a fault;
//! - [`MemoryFile`]: a part of another process's memory file; [`FileView`]: a mapping of one;
//! - [`PageMap`]: one atomic state per page, the single record of which pages are present, and which a thread is
//!   installing; [`PageMapImage`]: the states as bytes;
//! - [`MissingPages`]: the book of missing pages that somebody has asked for;
//! - [`PoisonMap`]: the memory lost to uncorrected errors, preserved across restarts;
//!   [`FailurePolicy`]: how much memory one error costs;
//! - [`guard`]: support for SIGBUS handlers.

mod access;
mod address;
mod backing;
mod convert;
mod exclusive;
mod file_view;
pub mod guard;
mod mapping;
mod memory_file;
mod missing;
mod page;
mod page_map;
mod poison_map;
mod policy;
mod range;
mod region;
mod snapshot;
mod sync;

pub use access::Access;
pub use address::{GuestAddress, HostAddress};
pub use backing::{Backing, ParseBackingError};
pub use exclusive::Exclusive;
pub use file_view::{FileAccessError, FileView, FileViewError};
pub use memory_file::{MemoryFile, MemoryFileAccessError, MemoryFileError};
pub use missing::{Entry, MissingPages, PutBack, Touch, Urgency, Wish, split_entries};
pub use page::{PageIndex, PageRange, PageSize};
#[cfg(not(loom))]
pub use page_map::MapFile;
pub use page_map::{
    Claim, ClaimGuard, ImportError, PageMap, PageMapError, PageMapImage, PageState, Pend, Removal,
    Settled, StateCounts, WakeWanted,
};
pub use poison_map::{LoadError, ParsePoisonError, PoisonMap, PoisonMapFull, SaveError};
pub use policy::{FailurePolicy, ParsePolicyError};
pub use range::{GuestRange, HostRange, RangeError};
pub use region::{
    AccessError, ContentError, FaultInAccess, FaultInError, Lost, Region, RegionError,
    ServiceAccess,
};
pub use snapshot::{Hold, Snapshots};
