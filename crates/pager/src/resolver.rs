//! The path of a fault from its delivery to its resolution.
//!
//! ```text
//! Resolver::resolve
//!   └─ ResolverState::resolve        find the userfaultfd that serves the page
//!        └─ ResolverState::attempt   by the origin of the content:
//!             page cache        claim the run ─────────────────────► ResolverState::install
//!             local source      fill the buffer ─► arrival::arrive: claim ─► Installer::install
//!             source            available now: as a local source; otherwise request the run, then wait
//!                               or leave the wake to the installer
//!             not missing       wait; or settled.rs: wake, zero, map again, poison
//! ```

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use pagetide_memory::{
    Access, Claim as Claimed, GuestAddress, Hold, PageIndex, PageRange, PageState, Urgency,
};
use pagetide_uapi::userfaultfd::InstallError;

use crate::activity::ShardIndex;
use crate::again::Again;
use crate::arrival::{Arrived, Purpose, arrive};
use crate::channel::InstallLock;
use crate::claim::Claim;
use crate::config::Holes;
use crate::content::{absent_run, content_of, fill_buffer, fill_buffer_now, is_gone, mapped_now};
use crate::counters::Counters;
use crate::error::{Failure, InstallFailure, ResolveError};
use crate::fault::{Delivery, Fault, RegionId, Resolution};
use crate::install::{Installed, Installer};
use crate::log_limit::log_limited;
use crate::memory::Body;
use crate::pager::Pager;
use crate::region::{PagedRegion, Served, Supply};
use crate::source::{Filled, LocalSource, Room, Source};
use crate::table::Table;
use crate::tracker::Tracker;

/// Resolves faults on their own thread: a vCPU's, a reader's, an event loop's.
///
/// Its state (counters, a buffer, the pages of recurring faults) belongs to that thread, so threads do
/// not write to each other's cache lines.
#[derive(Debug)]
pub struct Resolver {
    pager: Arc<Pager>,
    vcpu: Option<u32>,
    hold: Arc<Hold<Table>>,
    state: ResolverState,
}

/// Per-thread resolver state.
#[derive(Debug, Default)]
pub(crate) struct ResolverState {
    pub(crate) counters: Counters,
    pub(crate) tracker: Tracker,
    /// The buffer for local content; empty until it is needed.
    buffer: Vec<u8>,
    shard: ShardIndex,
}

/// The region and the channel of a fault.
#[derive(Clone, Copy)]
pub(crate) struct Site<'a> {
    pub(crate) pager: &'a Pager,
    pub(crate) region: &'a PagedRegion,
    pub(crate) served: &'a Served,
}

impl Pager {
    /// Creates a resolver for one thread: `vcpu` is the number of the vCPU whose exits it resolves.
    pub fn resolver(&self, vcpu: Option<u32>) -> Option<Resolver> {
        Some(Resolver::new(self.weak().upgrade()?, vcpu))
    }
}

impl Resolver {
    pub(crate) fn new(pager: Arc<Pager>, vcpu: Option<u32>) -> Self {
        Self {
            hold: pager.tables.hold(),
            pager,
            vcpu,
            state: ResolverState::default(),
        }
    }

    /// The pager whose faults it resolves.
    pub fn pager(&self) -> &Arc<Pager> {
        &self.pager
    }

    /// Counts a write to a protected page.
    pub(crate) fn count_write(&mut self) {
        self.state.counters.protected_writes += 1;
    }

    /// Counts a read of a userfaultfd that returned `messages` faults.
    pub(crate) fn count_read(&mut self, messages: usize, is_empty: bool) {
        let counters = &mut self.state.counters;
        counters.reads += 1;
        counters.messages += messages as u64;
        counters.empty_reads += u64::from(is_empty);
    }

    /// Its counts so far.
    pub fn counters(&self) -> &Counters {
        &self.state.counters
    }

    /// Resolves the fault of a KVM_RUN exit at the home gpa `gpa`. After `Ok` the vCPU may enter the
    /// guest again (but see [`Resolution::Poisoned`]); after an error it must not.
    ///
    /// Waits until the content arrives, or until [`Pager::stop`].
    #[inline]
    pub fn resolve_exit(
        &mut self,
        gpa: GuestAddress,
        access: Access,
    ) -> Result<Resolution, ResolveError> {
        let Self {
            pager,
            vcpu,
            hold,
            state,
        } = self;
        pager
            .tables
            .with(hold, |table| {
                let outside = || ResolveError::Outside { gpa };
                let (region, page) = table.locate(gpa).ok_or_else(outside)?;
                let fault = Fault {
                    region: region.id,
                    page,
                    gpa,
                    access,
                    vcpu: *vcpu,
                    delivery: Delivery::Exit,
                };
                state.resolve(pager, region, &fault)
            })
            .map_err(|failure| *failure)
    }

    /// Resolves the fault in a message of a userfaultfd.
    #[inline]
    pub(crate) fn resolve_message(
        &mut self,
        region: RegionId,
        page: PageIndex,
        access: Access,
    ) -> Result<Resolution, ResolveError> {
        let Self {
            pager, hold, state, ..
        } = self;
        pager
            .tables
            .with(hold, |table| {
                let outside = || ResolveError::Outside {
                    gpa: GuestAddress(0),
                };
                let found = table.region(region).ok_or_else(outside)?;
                let fault = Fault {
                    region,
                    page,
                    gpa: found.gpa_of(page),
                    access,
                    vcpu: None,
                    delivery: Delivery::Uffd,
                };
                state.resolve(pager, found, &fault)
            })
            .map_err(|failure| *failure)
    }

    /// Resolves a fault. The resolution or the error decides whether the faulting thread may retry.
    /// With [`Delivery::Exit`] this waits until the page is present; with [`Delivery::Uffd`] it never
    /// waits, and the thread that installs the page wakes the sleeping thread.
    #[inline]
    pub fn resolve(&mut self, fault: &Fault) -> Result<Resolution, ResolveError> {
        let Self {
            pager, hold, state, ..
        } = self;
        pager
            .tables
            .with(hold, |table| {
                let outside = || ResolveError::Outside { gpa: fault.gpa };
                let region = table.region(fault.region).ok_or_else(outside)?;
                state.resolve(pager, region, fault)
            })
            .map_err(|failure| *failure)
    }
}

impl Drop for Resolver {
    fn drop(&mut self) {
        self.pager.count(&self.state.counters);
    }
}

impl ResolverState {
    #[inline]
    pub(crate) fn resolve(
        &mut self,
        pager: &Pager,
        region: &PagedRegion,
        fault: &Fault,
    ) -> Result<Resolution, Failure> {
        self.counters.faults += 1;
        let outside = || ResolveError::Outside { gpa: fault.gpa };
        let served = region.served(fault.page).ok_or_else(outside)?;
        let site = Site {
            pager,
            region,
            served,
        };
        match self.attempt(&site, fault)? {
            Some(resolution) => Ok(resolution),
            None => self.attempt_again(&site, fault),
        }
    }

    /// Retries after the page has changed during an attempt, which normally happens a few times at
    /// most. The limit keeps a process that only discards memory from blocking this thread: a vCPU has
    /// nothing else to do, and a thread that serves others sees to those and comes back.
    #[cold]
    fn attempt_again(&mut self, site: &Site<'_>, fault: &Fault) -> Result<Resolution, Failure> {
        let mut again = match fault.delivery {
            Delivery::Exit => Again::with_patience(),
            Delivery::Uffd => Again::for_a_turn(),
        };
        loop {
            if site.region.is_closed() {
                return Err(ResolveError::Removed { fault: *fault }.into());
            }
            if let Some(resolution) = self.attempt(site, fault)? {
                return Ok(resolution);
            }
            again.pause().map_err(|source| ResolveError::Install {
                fault: *fault,
                source,
            })?;
        }
    }

    /// One attempt. `None`: the page changed meanwhile, retry.
    #[inline]
    fn attempt(&mut self, site: &Site<'_>, fault: &Fault) -> Result<Option<Resolution>, Failure> {
        match &site.region.supply {
            Supply::PageCache(holes) => {
                let lock = site.served.channel.lock_installs();
                let window = site.region.window(site.served, fault.page);
                match site.region.map.claim_run(fault.page, window) {
                    Claimed::Won(guard) => {
                        let claim = Claim::new(site.region, guard);
                        self.install(site, fault, lock, claim, *holes)
                    }
                    Claimed::Lost(state) => {
                        drop(lock);
                        self.not_missing(site, fault, state)
                    }
                    Claimed::Outside => Err(ResolveError::Outside { gpa: fault.gpa }.into()),
                }
            }
            Supply::Local(source) => self.fill(site, fault, &**source),
            Supply::Source => {
                if let Some(source) = site.region.source()
                    && let Some(resolution) = self.fill_now(site, fault, &*source)?
                {
                    return Ok(Some(resolution));
                }
                self.request(site, fault)
            }
        }
    }

    /// Installs a run whose content is in the page cache.
    #[inline]
    fn install(
        &mut self,
        site: &Site<'_>,
        fault: &Fault,
        lock: InstallLock<'_>,
        claim: Claim<'_>,
        holes: Holes,
    ) -> Result<Option<Resolution>, Failure> {
        self.begin(site, fault);
        let mut installer = Installer {
            region: site.region,
            served: site.served,
            lock: &lock,
            counters: &mut self.counters,
            wake: fault.delivery.wake(),
            ahead: None,
        };
        let installed = installer.install(claim, Body::PageCache, Some(fault.page));
        // The code below may read events, or install another page.
        drop(lock);
        match installed {
            Ok(installed) => self.installed(site, fault, installed),
            Err(InstallFailure::Kernel(InstallError::NoContent)) if holes == Holes::AreZero => {
                self.fill_hole(site, fault)
            }
            Err(source) => Err(ResolveError::Install {
                fault: *fault,
                source,
            }
            .into()),
        }
    }

    /// Installs zeroes for a page that the file lacks.
    #[cold]
    fn fill_hole(&mut self, site: &Site<'_>, fault: &Fault) -> Result<Option<Resolution>, Failure> {
        self.arrive(site, fault, PageRange::single(fault.page), Body::Zero)
    }

    /// Translates the result of an installation into the fault's resolution.
    #[inline]
    fn installed(
        &mut self,
        site: &Site<'_>,
        fault: &Fault,
        installed: Installed,
    ) -> Result<Option<Resolution>, Failure> {
        Ok(Some(match installed {
            Installed::Piece(pages) => {
                if fault.delivery == Delivery::Exit {
                    site.pager
                        .populate_after_exit(site.region, pages, &mut self.counters);
                } else if pages.count() > 1 {
                    site.pager.populate(site.region, pages, &mut self.counters);
                }
                Resolution::Installed { pages }
            }
            Installed::Exists => {
                if fault.delivery == Delivery::Exit {
                    self.fault_in(site, fault)?;
                }
                Resolution::Exists
            }
            Installed::Poisoned => return self.poisoned(site, fault).map(Some),
            Installed::Unmapped { page, is_gone } => {
                site.pager.unmapped(site.region, page, is_gone);
                if page != fault.page && !is_gone {
                    return Ok(None);
                }
                Resolution::Unmapped
            }
            Installed::Closed => return Err(ResolveError::Removed { fault: *fault }.into()),
            Installed::EventsFirst => {
                site.pager.read_events(&site.served.channel);
                return Ok(None);
            }
        }))
    }

    /// Fetches the absent pages around the fault from a local source, and installs them. The content is
    /// fetched before the pages are claimed: a source that fails or panics blocks no other thread.
    fn fill(
        &mut self,
        site: &Site<'_>,
        fault: &Fault,
        source: &dyn LocalSource,
    ) -> Result<Option<Resolution>, Failure> {
        let map = &site.region.map;
        let outside = || ResolveError::Outside { gpa: fault.gpa };
        match map.state(fault.page).ok_or_else(outside)? {
            // Pending: an earlier fault could not be resolved.
            PageState::Absent | PageState::Pending => {}
            state => return self.not_missing(site, fault, state),
        }
        self.begin(site, fault);
        let window = site.region.window(site.served, fault.page);
        let mut pages = absent_run(site.region, fault.page, window);
        let mut buffer = std::mem::take(&mut self.buffer);
        let filled = loop {
            let filled = fill_buffer(site.region, source, pages, &mut buffer);
            // A neighbour's failure must not affect this fault.
            if pages.count() > 1 && !matches!(filled, Ok(Filled::Bytes | Filled::Zero)) {
                pages = PageRange::single(fault.page);
                continue;
            }
            break filled;
        };
        let result = match filled {
            Ok(Filled::Bytes) => {
                let content = content_of(site.region, pages, &buffer);
                self.arrive(site, fault, pages, content)
            }
            Ok(Filled::Zero) => self.arrive(site, fault, pages, Body::Zero),
            Ok(Filled::Poisoned) => self.arrive(site, fault, pages, Body::Poisoned),
            Err(source) => Err(ResolveError::Content {
                fault: *fault,
                source,
            }
            .into()),
        };
        Room::trim(&mut buffer);
        self.buffer = buffer;
        result
    }

    /// Installs the absent pages around the fault if the source has their content without waiting.
    /// `None`: it has to be requested.
    fn fill_now(
        &mut self,
        site: &Site<'_>,
        fault: &Fault,
        source: &dyn Source,
    ) -> Result<Option<Resolution>, Failure> {
        let region = site.region;
        let is_idle = match region.map.state(fault.page) {
            Some(PageState::Absent) => true,
            // An earlier fault could not be resolved, or prefetch has set the page aside.
            Some(PageState::Pending) => region.missing().has_no_job(fault.page),
            _ => false,
        };
        if !is_idle {
            return Ok(None);
        }
        let window = region.window(site.served, fault.page);
        let mut pages = absent_run(region, fault.page, window);
        if let Some(content) = mapped_now(region, source, pages, Urgency::Urgent) {
            self.begin(site, fault);
            return self.arrive(site, fault, pages, content);
        }
        let mut buffer = std::mem::take(&mut self.buffer);
        let mut filled = fill_buffer_now(region, source, pages, Urgency::Urgent, &mut buffer);
        if filled.is_none() && pages.count() > 1 {
            // The source may lack only a neighbour.
            pages = PageRange::single(fault.page);
            filled = fill_buffer_now(region, source, pages, Urgency::Urgent, &mut buffer);
        }
        let content = match filled {
            Some(Filled::Bytes) => Some(content_of(region, pages, &buffer)),
            Some(Filled::Zero) => Some(Body::Zero),
            Some(Filled::Poisoned) | None => None,
        };
        let result = match content {
            Some(content) => {
                self.begin(site, fault);
                self.arrive(site, fault, pages, content)
            }
            None => Ok(None),
        };
        Room::trim(&mut buffer);
        self.buffer = buffer;
        result
    }

    /// Records a fault on a missing page.
    #[inline]
    pub(crate) fn begin(&mut self, site: &Site<'_>, fault: &Fault) {
        self.tracker.progress();
        site.pager
            .activity
            .record(&self.shard, fault.region, fault.page);
        if let Some(observer) = &site.region.observer {
            // The thread's other faults must not be lost.
            let touched = catch_unwind(AssertUnwindSafe(|| observer.0.touched(fault)));
            if touched.is_err() {
                log_limited!(error, %fault, "an observer panicked");
            }
        }
    }

    /// Claims those of `pages` that are still missing, and installs them.
    fn arrive(
        &mut self,
        site: &Site<'_>,
        fault: &Fault,
        pages: PageRange,
        content: Body<'_>,
    ) -> Result<Option<Resolution>, Failure> {
        let counters = &mut self.counters;
        let arrived = arrive(
            site.pager,
            site.region,
            counters,
            pages,
            content,
            Purpose::Fault(fault.page, fault.delivery.wake()),
        );
        match arrived {
            Ok(Arrived::Wanted(installed)) => self.installed(site, fault, installed),
            // Another thread has settled the page.
            Ok(Arrived::Others) => Ok(None),
            // No failure. A thread that serves others comes back to it; an exit tries again here.
            Err(InstallFailure::Busy { .. }) if fault.delivery == Delivery::Exit => Ok(None),
            // The content has gone since the source found it: a request reports why.
            Err(source) if is_gone(&source, content) => Ok(None),
            Err(source) => Err(ResolveError::Install {
                fault: *fault,
                source,
            }
            .into()),
        }
    }

    /// Handles a page that is neither Absent nor to be requested. `None`: retry.
    #[cold]
    pub(crate) fn not_missing(
        &mut self,
        site: &Site<'_>,
        fault: &Fault,
        state: PageState,
    ) -> Result<Option<Resolution>, Failure> {
        match state {
            PageState::Absent | PageState::Pending => Ok(None),
            PageState::Installing => {
                self.counters.lost_claims += 1;
                self.wait(site, fault)
            }
            PageState::Present | PageState::Zero => {
                self.counters.already_present += 1;
                match self.present(site, fault, state) {
                    Err(error) if error.is_poison() => self.lost_since(site, fault).map(Some),
                    resolved => resolved,
                }
            }
            PageState::Removed => self.zero(site, fault),
            PageState::Poisoned => self.poisoned(site, fault).map(Some),
        }
    }
}
