//! Guest memory as the rest of Pagetide sees it: addresses and pages as types, regions with the
//! mappings that the host has of them, and the map that says which page is where.
//!
//! Nothing in this crate issues an ioctl. What is here:
//!
//! - [`GuestAddress`] (a gpa), [`HostAddress`] (an hva), [`PageIndex`] (a page's number within its
//!   region), [`PageSize`], and the checked ranges [`GuestRange`], [`HostRange`], [`PageRange`];
//! - [`Backing`]: what kind of memory a region is made of;
//! - [`Region`]: one range of guest memory, its memfd and its two mappings;
//! - [`Access`]: what the guest tried to do to a page;
//! - [`FileView`]: a mapping of another process's memory file;
//! - [`PageMap`]: one atomic state per page, the truth about which pages are present, which a source
//!   was asked for, and who is installing which; [`PageMapImage`]: that truth as bytes;
//! - [`PoisonMap`]: which memory was lost to uncorrected errors, kept over restarts;
//!   [`FailurePolicy`]: how much one error takes;
//! - [`guard`]: what a handler of SIGBUS asks.

mod access;
mod address;
mod backing;
mod convert;
mod exclusive;
mod file_view;
pub mod guard;
mod mapping;
mod page;
mod page_map;
mod poison_map;
mod policy;
mod range;
mod region;
mod room;
mod snapshot;
mod sync;

pub use access::Access;
pub use address::{GuestAddress, HostAddress};
pub use backing::{Backing, ParseBackingError};
pub use exclusive::Exclusive;
pub use file_view::{FileAccessError, FileView, FileViewError};
pub use page::{PageIndex, PageRange, PageSize};
pub use page_map::{
    Claim, ClaimGuard, ImportError, PageMap, PageMapError, PageMapImage, PageState, Removal,
    Request, ResetError, Settled, StateCounts, Urgency, WakeWanted,
};
pub use poison_map::{LoadError, ParsePoisonError, PoisonMap, PoisonMapFull, SaveError};
pub use policy::{FailurePolicy, ParsePolicyError};
pub use range::{GuestRange, HostRange, RangeError};
pub use region::{
    AccessError, ContentError, FaultInAccess, FaultInError, Lost, Region, RegionError,
    ServiceAccess,
};
pub use snapshot::{Hold, Snapshots};
