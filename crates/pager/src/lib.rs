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
//! - [`Prefetch`] brings in what nobody has asked for yet; [`IncrementalPopulator`] has what came that
//!   way mapped in the second-stage tables, through a [`PopulateSink`], which
//!   an `Arc<Vm>` is.
//!
//! It fails closed: if a page cannot be had, nothing is installed and the fault's error goes up.
//! Those who wait in a userfaultfd stay asleep; closing it, which dropping the [`Pager`] does, would
//! let them go on with zeroes. So stop whatever runs on the memory first, then drop the pager.
//!
//! # Back-pressure
//!
//! Prefetch and population work ahead of the vCPUs and compete with their faults for CPUs, for the
//! source, and for the kernel's locks. So each of the two compares itself with the faults: if over the
//! last 100 ms more faults brought a page in than it dealt with pages (installed or mapped them), and
//! those faults were at least 1000 a second, it sleeps before its next batch for as long as the last one
//! took, but for 50 ms at most. After a sleep it always does one batch, so it never stands still; and
//! having had nothing to do does not count as falling behind. How often it gave way is counted
//! (`yields`).

mod arrivals;
mod builder;
mod content;
mod counters;
mod error;
mod fault;
mod install;
mod pace;
mod pager;
mod populate;
mod prefetch;
mod pulse;
mod ranges;
mod readers;
mod resolver;
mod site;
mod source;
mod tracker;
mod vm_sink;
mod walk;

pub use builder::{BuildError, PagerBuilder, UffdLayout};
pub use counters::{Counters, PopulateCounters};
pub use error::{Failure, ReaderError, ResolveError, SpawnError, StartError};
pub use fault::{Delivery, Fault, RegionId, Resolution};
pub use pager::Pager;
pub use pagetide_kvm::{Access, FaultExit};
pub use pagetide_uapi::userfaultfd::Mode;
pub use populate::{
    IncrementalPopulator, PopulateConfig, PopulateEnd, PopulateFailure, PopulateSink,
};
pub use prefetch::{Prefetch, PrefetchConfig, PrefetchEnd, Progress};
pub use readers::{ReaderConfig, Readers};
pub use resolver::{ExitResolvers, Resolver, Worker};
pub use source::{
    ContentIn, Fetch, Fetched, PageCacheSource, PageSource, PatternSource, SourceError,
};
