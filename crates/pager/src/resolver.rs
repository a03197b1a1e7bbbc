//! The whole way of a fault, from its delivery to its resolution.
//!
//! ```text
//! Resolver::resolve
//!   └─ Work::resolve          find the userfaultfd that serves the page
//!        └─ Work::attempt     by where the content is:
//!             page cache        claim the run ─────────────────────────► Work::install
//!             local source      fill the buffer ─► arrival::arrive: claim ─► Installer::install
//!             source            request the run, then wait or leave the wake to the installer
//!             not missing       wait; or settled.rs: wake, zero, map again, poison
//! ```

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use pagetide_memory::{
    Access, Claim, ClaimGuard, GuestAddress, Hold, PageIndex, PageRange, PageState, Request,
    Urgency,
};
use pagetide_uapi::userfaultfd::InstallError;

use crate::activity::Seat;
use crate::arrival::{Arrived, For, arrive};
use crate::channel::Order;
use crate::config::Holes;
use crate::counters::Counters;
use crate::error::{Failure, InstallFailure, ResolveError, WAIT_SLICE, message_of};
use crate::fault::{Delivery, Fault, RegionId, Resolution};
use crate::install::{Body, Installed, Installer, MAX_TRIES, Sleepers};
use crate::pager::Pager;
use crate::region::{PagedRegion, Served, Supply};
use crate::requests::Wanted;
use crate::settled::is_poison;
use crate::source::{Filled, LocalSource, SourceError};
use crate::table::Table;
use crate::tracker::Tracker;

/// Resolves faults on the thread that has it: a vCPU's own, a reader's, an event loop's.
///
/// What it keeps from fault to fault (counters, a buffer, which pages came again) is that thread's
/// alone, so threads do not write to each other's cache lines.
#[derive(Debug)]
pub struct Resolver {
    pager: Arc<Pager>,
    vcpu: Option<u32>,
    hold: Arc<Hold<Table>>,
    work: Work,
}

/// What a thread keeps from fault to fault.
#[derive(Debug, Default)]
pub(crate) struct Work {
    pub(crate) counters: Counters,
    pub(crate) tracker: Tracker,
    /// Where local content is put together; empty until it is needed.
    buffer: Vec<u8>,
    seat: Seat,
}

/// Where a fault is.
#[derive(Clone, Copy)]
pub(crate) struct Site<'a> {
    pub(crate) pager: &'a Pager,
    pub(crate) region: &'a PagedRegion,
    pub(crate) served: &'a Served,
}

impl Resolver {
    pub(crate) fn new(pager: Arc<Pager>, vcpu: Option<u32>) -> Self {
        Self {
            hold: pager.tables.hold(),
            pager,
            vcpu,
            work: Work::default(),
        }
    }

    /// The pager whose faults it resolves.
    pub fn pager(&self) -> &Arc<Pager> {
        &self.pager
    }

    /// A read of a userfaultfd gave `messages` faults.
    pub(crate) fn count_read(&mut self, messages: usize, is_empty: bool) {
        let counters = &mut self.work.counters;
        counters.reads += 1;
        counters.messages += messages as u64;
        counters.empty_reads += u64::from(is_empty);
    }

    /// What it counted so far.
    pub fn counters(&self) -> &Counters {
        &self.work.counters
    }

    /// Resolves the fault behind an exit of KVM_RUN at the home gpa `gpa`: with `Ok` the guest may be
    /// entered again (but see [`Resolution::Poisoned`]); with an error it must not.
    ///
    /// Waits for as long as the content takes to arrive, or until [`Pager::stop`].
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
            work,
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
                work.resolve(pager, region, &fault)
            })
            .map_err(|failure| *failure)
    }

    /// Resolves the fault behind a message of a userfaultfd.
    #[inline]
    pub(crate) fn resolve_message(
        &mut self,
        region: RegionId,
        page: PageIndex,
        access: Access,
    ) -> Result<Resolution, ResolveError> {
        let Self {
            pager, hold, work, ..
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
                work.resolve(pager, found, &fault)
            })
            .map_err(|failure| *failure)
    }

    /// Resolves a fault: afterwards whoever faulted may try again, or must not at all. With
    /// [`Delivery::Exit`] this waits until the page is there; with [`Delivery::Uffd`] it never waits,
    /// and whoever installs the page wakes the thread that sleeps.
    #[inline]
    pub fn resolve(&mut self, fault: &Fault) -> Result<Resolution, ResolveError> {
        let Self {
            pager, hold, work, ..
        } = self;
        pager
            .tables
            .with(hold, |table| {
                let outside = || ResolveError::Outside { gpa: fault.gpa };
                let region = table.region(fault.region).ok_or_else(outside)?;
                work.resolve(pager, region, fault)
            })
            .map_err(|failure| *failure)
    }
}

impl Drop for Resolver {
    fn drop(&mut self) {
        self.pager.count(&self.work.counters);
    }
}

impl Work {
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

    /// The page changed while it was looked at. It does so a few times at most as a rule. A process that
    /// does nothing but discard must not keep this thread from others' faults.
    #[cold]
    fn attempt_again(&mut self, site: &Site<'_>, fault: &Fault) -> Result<Resolution, Failure> {
        for _ in 0..MAX_TRIES {
            if site.region.is_closed() {
                return Err(ResolveError::Removed { fault: *fault }.into());
            }
            if let Some(resolution) = self.attempt(site, fault)? {
                return Ok(resolution);
            }
        }
        let source = InstallFailure::Busy { tries: MAX_TRIES };
        Err(ResolveError::Install {
            fault: *fault,
            source,
        }
        .into())
    }

    /// One look at the page. `None`: the page changed meanwhile, look again.
    #[inline]
    fn attempt(&mut self, site: &Site<'_>, fault: &Fault) -> Result<Option<Resolution>, Failure> {
        match &site.region.supply {
            Supply::PageCache(holes) => {
                let order = site.served.channel.order();
                let window = site.region.window(site.served, fault.page);
                match site.region.map.claim_run(fault.page, window) {
                    Claim::Won(claim) => self.install(site, fault, order, claim, *holes),
                    Claim::Lost(state) => {
                        drop(order);
                        self.not_missing(site, fault, state)
                    }
                    Claim::Outside => Err(ResolveError::Outside { gpa: fault.gpa }.into()),
                }
            }
            Supply::Local(source) => self.fill(site, fault, &**source),
            Supply::Source(_) => self.request(site, fault),
        }
    }

    /// Installs a run whose content is in the page cache.
    #[inline]
    fn install(
        &mut self,
        site: &Site<'_>,
        fault: &Fault,
        order: Order<'_>,
        claim: ClaimGuard<'_>,
        holes: Holes,
    ) -> Result<Option<Resolution>, Failure> {
        self.tracker.progress();
        site.pager
            .activity
            .beat(&self.seat, fault.region, fault.page);
        let mut installer = Installer {
            region: site.region,
            served: site.served,
            order: &order,
            counters: &mut self.counters,
            sleepers: sleepers(fault),
            ahead: None,
        };
        let installed = installer.install(claim, Body::PageCache, Some(fault.page));
        // What follows may read events, or install something else.
        drop(order);
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

    /// A page that the file has not: it is zero.
    #[cold]
    fn fill_hole(&mut self, site: &Site<'_>, fault: &Fault) -> Result<Option<Resolution>, Failure> {
        self.arrive(site, fault, PageRange::single(fault.page), Body::Zero)
    }

    /// What became of an installation, for the fault that it was for.
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
                    self.populate(site, fault)?;
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

    /// Has a local source fill what is absent around the fault, and installs it. The content is there
    /// before the pages are claimed: a source that fails or panics holds nothing up.
    fn fill(
        &mut self,
        site: &Site<'_>,
        fault: &Fault,
        source: &dyn LocalSource,
    ) -> Result<Option<Resolution>, Failure> {
        let map = &site.region.map;
        let outside = || ResolveError::Outside { gpa: fault.gpa };
        match map.state(fault.page).ok_or_else(outside)? {
            PageState::Absent => {}
            state => return self.not_missing(site, fault, state),
        }
        self.tracker.progress();
        site.pager
            .activity
            .beat(&self.seat, fault.region, fault.page);
        let window = site.region.window(site.served, fault.page);
        let mut pages = absent_run(site.region, fault.page, window);
        let mut buffer = std::mem::take(&mut self.buffer);
        let filled = loop {
            let filled = fill_buffer(site.region, source, pages, &mut buffer);
            // A neighbour's trouble is not this fault's.
            if pages.count() > 1 && !matches!(filled, Ok(Filled::Bytes | Filled::Zero)) {
                pages = PageRange::single(fault.page);
                continue;
            }
            break filled;
        };
        let result = match filled {
            Ok(Filled::Bytes) => self.arrive(site, fault, pages, Body::Bytes(&buffer)),
            Ok(Filled::Zero) => self.arrive(site, fault, pages, Body::Zero),
            Ok(Filled::Poisoned) => self.arrive(site, fault, pages, Body::Poisoned),
            Err(source) => Err(ResolveError::Content {
                fault: *fault,
                source,
            }
            .into()),
        };
        self.buffer = buffer;
        result
    }

    /// Claims what is still missing of `pages` and installs it.
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
            For::Fault(fault.page, sleepers(fault)),
        );
        match arrived {
            Ok(Arrived::Wanted(installed)) => self.installed(site, fault, installed),
            // Another thread was faster.
            Ok(Arrived::Others) => Ok(None),
            Err(source) => Err(ResolveError::Install {
                fault: *fault,
                source,
            }
            .into()),
        }
    }

    /// Requests the page and what is absent around it, or has the request for it made urgent.
    fn request(&mut self, site: &Site<'_>, fault: &Fault) -> Result<Option<Resolution>, Failure> {
        let map = &site.region.map;
        let window = site.region.window(site.served, fault.page);
        let pages = match map.request_run(fault.page, window, Urgency::Urgent) {
            Request::Made(pages) => pages,
            Request::Upgraded => PageRange::single(fault.page),
            Request::Lost(state) => return self.not_missing(site, fault, state),
            Request::Outside => return Err(ResolveError::Outside { gpa: fault.gpa }.into()),
        };
        self.tracker.progress();
        site.pager
            .activity
            .beat(&self.seat, fault.region, fault.page);
        self.counters.requests += 1;
        if fault.delivery == Delivery::Uffd {
            // Before the source is asked, which may answer at once.
            map.want_wake(fault.page);
        }
        let wanted = Wanted {
            pages,
            fault: Some(fault.page),
        };
        site.pager.want(site.region, wanted);
        self.wait(site, fault)
    }

    /// What to do about a page that is neither Absent nor to be requested. `None`: look again.
    #[cold]
    fn not_missing(
        &mut self,
        site: &Site<'_>,
        fault: &Fault,
        state: PageState,
    ) -> Result<Option<Resolution>, Failure> {
        match state {
            PageState::Absent => Ok(None),
            PageState::Requested(_) | PageState::Installing => {
                self.counters.lost_claims += 1;
                self.wait(site, fault)
            }
            PageState::Present | PageState::Zero => {
                self.counters.already_present += 1;
                match self.present(site, fault, state) {
                    Err(error) if is_poison(&error) => self.lost_since(site, fault).map(Some),
                    resolved => resolved,
                }
            }
            PageState::Removed => self.zero(site, fault),
            PageState::Poisoned => self.poisoned(site, fault).map(Some),
        }
    }

    /// Somebody installs the page: an exit waits for that, a thread in the userfaultfd is woken then.
    fn wait(&mut self, site: &Site<'_>, fault: &Fault) -> Result<Option<Resolution>, Failure> {
        let map = &site.region.map;
        if fault.delivery == Delivery::Uffd {
            return Ok(match map.want_wake(fault.page) {
                Some(PageState::Requested(Urgency::Urgent) | PageState::Installing) => {
                    Some(Resolution::LeftToInstaller)
                }
                // Among others that it is only requested in bulk: that is not waited for.
                _ => None,
            });
        }
        self.counters.waits += 1;
        loop {
            match map.wait(fault.page, WAIT_SLICE) {
                Some(PageState::Requested(Urgency::Urgent) | PageState::Installing) => {}
                Some(PageState::Present | PageState::Zero) => return Ok(Some(Resolution::Waited)),
                // The request was withdrawn, and prefetch may have made another since; or the page is
                // not what it was: look again.
                Some(_) => return Ok(None),
                None => return Err(ResolveError::Outside { gpa: fault.gpa }.into()),
            }
            if site.pager.is_stopped() {
                return Err(ResolveError::Stopped { fault: *fault }.into());
            }
            if site.region.is_closed() {
                return Err(ResolveError::Removed { fault: *fault }.into());
            }
            // Deadlines pass also where nobody serves the pager's descriptor.
            site.pager.tick();
        }
    }
}

fn sleepers(fault: &Fault) -> Sleepers {
    match fault.delivery {
        Delivery::Exit => Sleepers::Unlikely,
        Delivery::Uffd => Sleepers::Some,
    }
}

/// The pages connected to `page` that are absent now, within `window`.
fn absent_run(region: &PagedRegion, page: PageIndex, window: PageRange) -> PageRange {
    let is_absent = |page: u64| region.map.state(PageIndex(page)) == Some(PageState::Absent);
    let mut first = page.0;
    while first > window.first().0 && is_absent(first - 1) {
        first -= 1;
    }
    let mut end = page.0 + 1;
    while end < window.end().0 && is_absent(end) {
        end += 1;
    }
    PageRange::new(PageIndex(first), end - first)
}

/// Has a local source fill `buffer` with the content of `pages`.
pub(crate) fn fill_buffer(
    region: &PagedRegion,
    source: &dyn LocalSource,
    pages: PageRange,
    buffer: &mut Vec<u8>,
) -> Result<Filled, SourceError> {
    let wanted = region.bytes_of(pages);
    let bytes = usize::try_from(wanted).map_err(|_| SourceError::WrongSize { given: 0, wanted })?;
    if buffer.len() < bytes {
        let more = bytes - buffer.len();
        let reserved = buffer.try_reserve_exact(more);
        reserved.map_err(|error| SourceError::Unavailable(Box::new(error)))?;
    }
    buffer.resize(bytes, 0);
    // A source's own code, whose panic is not ours: other faults of the thread must not be lost.
    let gpa = region.gpa_of(pages.first());
    catch_unwind(AssertUnwindSafe(|| source.fill(gpa, buffer))).unwrap_or_else(|panic| {
        let message = message_of(&*panic);
        Err(SourceError::Panicked { message })
    })
}
