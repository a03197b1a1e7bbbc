//! The demand-paging engine: faults in, pages installed.
//!
//! ```text
//!  guest touches an absent page
//!    ├─ KVM_RUN exits (delivery: exit) ──► that vCPU's own thread: Resolver::resolve_exit ─┐
//!    └─ userfaultfd message (delivery: uffd) ──► a reader thread ──────────────────────────┤
//!                                                                                           ▼
//!    PageMap: Absent ─claim─► InFlight ─► PageSource fetches ─► UFFDIO_CONTINUE or COPY ─► Present
//!               └ lost the claim: an exit waits for the owner, a reader leaves the wake to it
//! ```
//!
//! One engine, two deliveries, any source. Both deliveries are always served: also when vCPUs' own
//! faults exit, KVM's and the VMM's accesses to guest memory come by userfaultfd.
//!
//! - [`Pager`] owns the page maps and the userfaultfds of some regions; [`PagerBuilder`] makes one.
//! - [`Resolver`] is what a vCPU's thread brings along; [`ExitResolvers`] keeps one per vCPU.
//! - [`Readers`] are the threads that serve the userfaultfds.
//! - [`PageSource`] is where content comes from.
//!
//! It fails closed: if a page cannot be had, nothing is installed and the fault's error goes up.
//! Those who wait in a userfaultfd stay asleep; closing it, which dropping the [`Pager`] does, would
//! let them go on with zeroes. So stop whatever runs on the memory first, then drop the pager.

mod builder;
mod counters;
mod error;
mod fault;
mod install;
mod pager;
mod readers;
mod resolver;
mod source;
mod tracker;

pub use builder::{BuildError, PagerBuilder, UffdLayout};
pub use counters::Counters;
pub use error::{Failure, ReaderError, ResolveError, SpawnError};
pub use fault::{Delivery, Fault, RegionId, Resolution};
pub use pager::Pager;
pub use pagetide_kvm::{Access, FaultExit};
pub use pagetide_uapi::userfaultfd::Mode;
pub use readers::{ReaderConfig, Readers};
pub use resolver::{ExitResolvers, Resolver, Worker};
pub use source::{
    ContentIn, Fetch, Fetched, PageCacheSource, PageSource, PatternSource, SourceError,
};
