//! The demand-paging engine: faults in, pages installed.
//!
//! ```text
//!  guest touches a missing page                     prefetch                  a peer pushes a page
//!    ├─ KVM_RUN exits ─► the vCPU's own thread ─┐      │                              │
//!    └─ userfaultfd ─► a reader, an event loop ─┤      │                              │
//!                                               ▼      ▼                              │
//!         Resolver ─► PageMap ─ content is local? ── yes ─────────────────────────────┤
//!                                   │ no                                              │
//!                       Requested(urgent | bulk) ─► Source::submit                    │
//!                                   └─────► Request::complete, in any order ──────────┤
//!                                                                                     ▼
//!                     arrival: claim ─► Installing ─► UFFDIO_CONTINUE or COPY ─► Present ─► wake
//! ```
//!
//! One engine for every delivery, any source and any address space. It knows neither KVM nor where
//! content comes from, starts no thread and performs no I/O but to install pages:
//!
//! - [`Pager`] serves regions, which come and go: [`Pager::add`] with a [`RegionConfig`] that says
//!   which memory ([`RegionConfig::local`], [`RegionConfig::foreign`]), in which [`Mode`], with which
//!   [`Contents`] and policies.
//! - [`Resolver`] resolves faults on the thread that has them; [`Serving`] serves the pager's
//!   descriptor from an event loop, [`Readers`] by threads.
//! - A [`Source`] is asked for pages and answers some time later; [`Pool`] adapts a [`BlockingSource`].
//!   A [`LocalSource`] has its content at once.
//! - [`Prefetch`] brings pages in before they are touched; a [`Mapper`] has what was installed
//!   mapped in stage 2.
//!
//! # Fail closed
//!
//! If a page cannot be had, nothing is installed. A source that fails stalls its region: whoever
//! touches a missing page waits until the owner resumes the region, replaces its source or abandons it
//! ([`Notice::Stalled`]). A pager that is dropped, and a region that is removed, poisons what is
//! missing first, so that nobody ever reads zeroes in place of content.
//!
//! # In which order things stop
//!
//! 1. The vCPUs. One that waits for a page by an exit comes back after [`Pager::stop`]; one that sleeps
//!    in a userfaultfd comes back when its page comes, or is poisoned ([`Pager::abandon`]).
//! 2. [`Prefetch`], then [`Readers`] and whatever else serves the pager's descriptor.
//! 3. The pager, when its last [`Arc`](std::sync::Arc) is dropped: missing pages are poisoned.
//! 4. The memory.
//!
//! # Back-pressure
//!
//! Prefetch works ahead of the vCPUs and competes with their faults for CPUs, for the source, and for
//! the kernel's locks. So it compares itself with the faults: if over the last 100 ms more faults
//! brought a page in than it installed pages, and those faults were at least 1000 a second, it sleeps
//! before its next batch for as long as the last one took, but for 50 ms at most. After a sleep it
//! always does one batch, so it never stands still. How often it gave way is counted (`yields`).

mod activity;
mod add;
mod arrival;
mod blocking;
mod channel;
mod close;
mod config;
mod counters;
mod discard;
mod dispatch;
mod error;
mod events;
mod fault;
mod install;
mod notice;
mod pace;
mod pager;
mod poison;
mod poller;
mod populate;
mod prefetch;
mod region;
mod requests;
mod resolver;
mod serving;
mod settled;
mod source;
mod table;
mod target;
mod tracker;
#[cfg(feature = "vm-memory")]
mod vm_memory;
mod walk;

pub use blocking::{BlockingSource, Pool, PoolConfig, ReadAt};
pub use close::{Exported, ExportedPart};
pub use config::{Contents, Holes, InFlightLimits, RegionConfig, RetryPolicy, UffdLayout};
pub use counters::Counters;
pub use dispatch::SourceStatus;
pub use error::{
    AddError, DiscardError, ExportError, InstallFailure, PrefetchError, PushError,
    RegionChangeError, ResolveError, ServeError,
};
pub use fault::{Delivery, Fault, RegionId, Resolution};
pub use notice::Notice;
pub use pager::{Pager, Progress};
pub use pagetide_memory::{Access, Urgency};
pub use pagetide_uapi::userfaultfd::Mode;
pub use populate::Mapper;
pub use prefetch::{Prefetch, PrefetchConfig, PrefetchEnd};
pub use requests::RequestId;
pub use resolver::Resolver;
pub use serving::{ReaderConfig, Readers, Serving};
pub use source::{Content, Filled, LocalSource, PatternSource, Request, Source, SourceError};
pub use target::Memfd;
#[cfg(feature = "vm-memory")]
pub use vm_memory::{AddMemoryError, add_guest_memory};
