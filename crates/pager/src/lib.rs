//! The demand-paging engine: receives faults and installs pages.
//!
//! ```text
//!  guest touches a missing page                     prefetch                  a peer pushes a page
//!    ├─ KVM_RUN exits ─► the vCPU's own thread ─┐      │                              │
//!    └─ userfaultfd ─► a reader, an event loop ─┤      │                              │
//!                                               ▼      ▼                              │
//!         Resolver ─► PageMap ─ content is local? ── yes ─────────────────────────────┤
//!                                   │ no                                              │
//!                       the book of missing pages ─► Source::submit                   │
//!                                   └─────► Request::complete, in any order ──────────┤
//!                                                                                     ▼
//!                     arrival: claim ─► Installing ─► UFFDIO_CONTINUE or COPY ─► Present ─► wake
//! ```
//!
//! One engine serves every delivery, any source and any address space. It depends neither on KVM nor on
//! the origin of content, starts no thread, and performs no I/O except for installing pages:
//!
//! - [`Pager`] serves regions, which can be added and removed at any time: [`Pager::add`] takes a
//!   [`RegionConfig`] with the memory ([`RegionConfig::local`], [`RegionConfig::foreign`]), the
//!   [`Mode`], the [`Contents`] and the policies.
//! - [`Resolver`] resolves faults on the faulting thread; [`Serving`] serves the pager's descriptor
//!   from an event loop, [`Readers`] by threads.
//! - A [`Source`] receives requests for pages and answers them later; [`Pool`] adapts a
//!   [`BlockingSource`]. A [`LocalSource`] has its content immediately.
//! - [`Prefetch`] fetches pages before first touch; a [`Mapper`] maps installed pages in stage 2.
//!
//! A page's *home gpa* is its region's gpa plus the page's offset. It differs from the guest's address
//! if a slot transaction has mapped the page elsewhere.
//!
//! # Fail closed
//!
//! If a page's content is unavailable, nothing is installed. A source that fails, and memory that takes no
//! content, stall their region: threads that touch a missing page wait until the owner resumes the region,
//! replaces its source or abandons it ([`Notice::Stalled`], [`Notice::NotInstalled`]). A page that only prefetch has asked for stalls nothing: it is set
//! aside, and the first thread that touches it requests it. When a pager is dropped or a region removed, the missing pages
//! are poisoned first, so that no access ever reads zeroes in place of content.
//!
//! # Order of shutdown
//!
//! 1. The vCPUs. One that waits for a page in an exit returns after [`Pager::stop`]; one that sleeps in
//!    a userfaultfd returns when its page arrives or is poisoned ([`Pager::abandon`]).
//! 2. [`Prefetch`], then [`Readers`] and other threads that serve the pager's descriptor.
//! 3. The pager, when its last [`Arc`](std::sync::Arc) is dropped: missing pages are poisoned. That takes a page table entry
//!    for each. Memory that is unmapped next needs none: drop all else that has a `Region` before the pager, and call
//!    [`Pager::remove_with_memory`] for memory that the VMM has mapped.
//! 4. The memory.
//!
//! # Back-pressure
//!
//! Prefetch works ahead of the vCPUs and competes with their faults for CPUs, for the source, and for
//! the kernel's locks. It therefore compares its own rate with that of the faults: if over the last 100
//! ms faults installed or requested more pages than prefetch did, at a rate of at least 1000 a second,
//! it sleeps before its next batch for as long as the last batch took, at most 50 ms. After a sleep it
//! always processes one batch, so it always progresses. The counter `yields` counts its pauses.

mod activity;
mod add;
mod adopt;
mod again;
mod arrival;
mod blocking;
mod channel;
mod children;
mod chunks;
mod claim;
mod close;
mod config;
mod content;
mod control;
mod counters;
mod delivered;
mod discard;
mod dispatch;
mod error;
mod events;
mod fault;
mod install;
mod kept_open;
mod lack;
#[doc(hidden)]
pub mod log_limit;
mod mark;
mod memory;
mod missing;
mod notice;
mod others;
mod pace;
mod pager;
mod poison;
mod poller;
mod populate;
mod prefetch;
mod presence;
mod region;
mod requests;
mod resolver;
mod serving;
mod settled;
mod source;
mod space;
mod spaces;
mod table;
mod tracker;
mod unread;
#[cfg(feature = "vm-memory")]
mod vm_memory;
mod waiting;
mod walk;

pub use adopt::{AddMemoryError, MappedMemory, add_mapped_memory};
pub use blocking::{Attendance, BlockingSource, Pool, PoolConfig};
pub use close::{Exported, ExportedPart, ExportedSpace};
pub use config::{
    Contents, Holes, InFlightLimits, InstalledBy, Observer, RegionConfig, RetryPolicy, UffdLayout,
};
pub use control::SourceStatus;
pub use counters::Counters;
pub use error::{
    AddError, AttachError, DiscardError, ExportError, InstallFailure, PrefetchError, PresenceError,
    PushError, RegionChangeError, ResolveError, ServeError,
};
pub use fault::{Delivery, Fault, RegionId, Resolution};
pub use kept_open::kept_open;
pub use memory::Memfd;
pub use notice::Notice;
pub use pager::{Pager, Progress};
pub use pagetide_memory::{Access, Urgency};
pub use pagetide_uapi::userfaultfd::Mode;
pub use populate::Mapper;
pub use prefetch::{Prefetch, PrefetchConfig, PrefetchEnd, PrefetchPlan};
pub use resolver::Resolver;
pub use serving::{ReaderConfig, Readers, Serving, Waited};
pub use source::{
    Content, Filled, Helper, LocalSource, PatternSource, ReadAt, Request, RequestId, Room, Source,
    SourceError,
};
pub use space::AddressSpaceId;
#[cfg(feature = "vm-memory")]
pub use vm_memory::add_guest_memory;
