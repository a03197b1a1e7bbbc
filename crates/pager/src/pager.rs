//! The pager: page maps, userfaultfds and what they share.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use pagetide_kvm::{Access, FaultExit};
use pagetide_memory::{
    GuestAddress, GuestRange, HostAddress, PageIndex, PageMap, PageRange, PoisonMap, Region,
    Removal, ResetError,
};
use pagetide_uapi::userfaultfd::{InstallError, Mode, PageFault, Userfaultfd, Wake};

use crate::arrivals::Arrivals;
use crate::builder::{BuildError, PagerBuilder};
use crate::counters::Counters;
use crate::error::{Failure, ReaderError, ResolveError};
use crate::fault::{Delivery, Fault, RegionId};
use crate::populate::HandOver;
use crate::prefetch::Progress;
use crate::pulse::Pulse;
use crate::resolver::{Resolver, WAIT_SLICE, Worker, poison_page};
use crate::site::{PagedRegion, Span};
use crate::source::PageSource;

/// What a pager was told when it was built.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    pub(crate) mode: Mode,
    pub(crate) in_page_cache: bool,
    pub(crate) fault_around_pages: u64,
    pub(crate) no_progress_limit: u32,
    pub(crate) owner_timeout: Duration,
    pub(crate) can_poison: bool,
}

/// Called once, with the first failure of a reader thread or of prefetch.
type OnFailure = Box<dyn FnMut(&Failure) + Send>;

/// Brings the pages of some regions in as they are touched. Shared by all threads that resolve
/// faults; see the [crate's documentation](crate) for how it is used and in which order things stop.
pub struct Pager {
    /// First, so that they are closed, and all registrations with them, before memory is unmapped.
    uffds: Vec<Userfaultfd>,
    /// In the order of their gpas.
    regions: Vec<PagedRegion>,
    /// Indexes into `regions`, in the order of their guest mappings.
    by_hva: Vec<usize>,
    pub(crate) source: Box<dyn PageSource>,
    pub(crate) settings: Settings,
    /// What was lost before this pager was made.
    lost: PoisonMap,
    stopped: AtomicBool,
    failure: OnceLock<Failure>,
    on_failure: Mutex<Option<OnFailure>>,
    counted: Mutex<Counters>,
    pub(crate) pulse: Pulse,
    pub(crate) arrivals: Arrivals,
    /// Who populates, if anybody does.
    hand_over: Mutex<Option<Arc<HandOver>>>,
}

impl Pager {
    /// A pager that brings pages in as `mode` says, with content from `source`.
    pub fn builder(mode: Mode, source: impl PageSource + 'static) -> PagerBuilder {
        PagerBuilder::new(mode, Box::new(source))
    }

    pub(crate) fn new(
        uffds: Vec<Userfaultfd>,
        regions: Vec<PagedRegion>,
        source: Box<dyn PageSource>,
        settings: Settings,
        lost: PoisonMap,
    ) -> Self {
        let mut by_hva: Vec<_> = (0..regions.len()).collect();
        by_hva.sort_by_key(|&index| regions[index].hva);
        Self {
            uffds,
            regions,
            by_hva,
            source,
            settings,
            lost,
            stopped: AtomicBool::new(false),
            failure: OnceLock::new(),
            on_failure: Mutex::new(None),
            counted: Mutex::new(Counters::default()),
            pulse: Pulse::default(),
            arrivals: Arrivals::default(),
            hand_over: Mutex::new(None),
        }
    }

    /// Registers every span with its userfaultfd, and empties the guest mappings (MINOR).
    pub(crate) fn register(&self) -> Result<(), BuildError> {
        for paged in &self.regions {
            for span in &paged.spans {
                let Some(uffd) = self.uffds.get(span.uffd) else {
                    continue;
                };
                // SAFETY: register requires memory that is the caller's and stays mapped for as
                // long as the userfaultfd is open, and that nobody relies on its zeroes. It is the
                // guest mapping of a region that self keeps, and drops after the userfaultfds (field
                // order); a Region promises nothing about what its pages hold.
                unsafe { uffd.register(paged.user_range(span.pages), self.settings.mode) }?;
            }
            if self.settings.mode == Mode::Minor {
                paged
                    .region
                    .zap_guest(paged.region.all_pages())
                    .map_err(BuildError::Zap)?;
            }
        }
        Ok(())
    }

    /// Poisons the pages that were lost before, in the page maps and in the guest mappings.
    pub(crate) fn reinstate_poison(&self) -> Result<(), BuildError> {
        self.mark_lost();
        if !self.settings.can_poison {
            return Ok(());
        }
        for paged in &self.regions {
            for gpa in self.lost_pages(paged) {
                let at = paged.region.page_of_gpa(gpa);
                let Some((page, uffd)) =
                    at.and_then(|page| Some((page, self.uffd(paged.span(page)?)?)))
                else {
                    continue;
                };
                let range = paged.user_range(PageRange::single(page));
                // What is there goes first: content that a MISSING region should not have, or the marker
                // of an earlier pager, which outlives its userfaultfd.
                let region = &paged.region;
                let zapped = match region.service() {
                    Some(_) => region.zap_guest(PageRange::single(page)),
                    None => region.punch(PageRange::single(page)),
                };
                zapped.map_err(BuildError::Zap)?;
                poison_page(uffd, range, Wake::Wake)
                    .map_err(|source| BuildError::Poison { gpa, source })?;
            }
        }
        Ok(())
    }

    fn lost_pages(&self, paged: &PagedRegion) -> impl Iterator<Item = GuestAddress> {
        self.lost
            .pages_in(paged.region.range(), paged.region.page_size())
    }

    /// Poisons them in the page maps, whose pages are absent now.
    fn mark_lost(&self) {
        let mut poisoned = 0;
        for paged in &self.regions {
            for gpa in self.lost_pages(paged) {
                let page = paged.region.page_of_gpa(gpa);
                let removal = page.map(|page| paged.map.poison(page));
                poisoned += u64::from(matches!(removal, Some(Removal::Done(_))));
            }
        }
        self.lock_counted().poisoned += poisoned;
    }

    /// Takes note that `lost` was lost to an uncorrected error, as SIGBUS has told the VMM: pages that
    /// are lost as a whole are poisoned in the page map. (Of a page that is kept apart from its error
    /// the rest is good.) Waits for pages that are being brought in. Returns how many pages are
    /// poisoned that were not.
    pub fn record_poison(&self, lost: GuestRange) -> u64 {
        let mut poisoned = 0;
        for paged in &self.regions {
            let size = paged.region.page_size().bytes();
            let region = paged.region.range();
            if lost.start() >= region.end() || lost.end() <= region.start() {
                continue;
            }
            let start = lost.start().0.max(region.start().0).next_multiple_of(size);
            let end = lost.end().0.min(region.end().0);
            let mut gpa = start;
            while gpa < end && end - gpa >= size {
                if let Some(page) = paged.region.page_of_gpa(GuestAddress(gpa))
                    && self.poison_when_idle(&paged.map, page)
                {
                    poisoned += 1;
                    self.put_marker(paged, page);
                }
                gpa += size;
            }
        }
        self.lock_counted().poisoned += poisoned;
        poisoned
    }

    /// Sees to it that a page whose content is lost does not read as zeroes once the userfaultfd is
    /// closed. A page that is mapped keeps its mapping, to which the hardware has its own answer.
    fn put_marker(&self, paged: &PagedRegion, page: PageIndex) {
        if !self.settings.can_poison {
            return;
        }
        let Some(uffd) = paged.span(page).and_then(|span| self.uffd(span)) else {
            return;
        };
        let range = paged.user_range(PageRange::single(page));
        match poison_page(uffd, range, Wake::Wake) {
            Ok(()) | Err(InstallError::Exists { .. }) => {}
            Err(error) => tracing::error!(%error, %range, "UFFDIO_POISON"),
        }
    }

    /// Whether the page is poisoned now and was not.
    fn poison_when_idle(&self, map: &PageMap, page: PageIndex) -> bool {
        loop {
            match map.poison(page) {
                Removal::Done(_) => return true,
                Removal::Poisoned | Removal::Outside => return false,
                // Its owner has written to the page, or will touch it and see for itself.
                Removal::InFlight if self.is_stopped() => return false,
                Removal::InFlight => {
                    map.wait(page, WAIT_SLICE);
                }
            }
        }
    }

    pub(crate) fn paged(&self, region: RegionId) -> Option<&PagedRegion> {
        self.regions.get(region.0)
    }

    pub(crate) fn uffds(&self) -> &[Userfaultfd] {
        &self.uffds
    }

    pub(crate) fn uffd(&self, span: Span) -> Option<&Userfaultfd> {
        self.uffds.get(span.uffd)
    }

    /// The gpa of a page, 0 if there is no such region.
    pub(crate) fn gpa_of(&self, region: RegionId, page: PageIndex) -> GuestAddress {
        self.paged(region)
            .map_or(GuestAddress(0), |paged| paged.gpa_of(page))
    }

    /// Whole pages of a region in `bytes`, 0 if there is no such region.
    pub(crate) fn pages_in(&self, region: RegionId, bytes: u64) -> u64 {
        self.paged(region).map_or(0, |paged| paged.pages_in(bytes))
    }

    /// The regions, in the order of their gpas.
    pub fn regions(&self) -> impl ExactSizeIterator<Item = &Arc<Region>> {
        self.regions.iter().map(|paged| &paged.region)
    }

    /// The page map of a region.
    pub fn page_map(&self, region: RegionId) -> Option<&PageMap> {
        self.paged(region).map(|paged| &paged.map)
    }

    /// How many pages of all regions are present. Looks at every page, at a byte each.
    pub fn progress(&self) -> Progress {
        let mut progress = Progress::default();
        for paged in &self.regions {
            let counts = paged.map.counts();
            progress.present += counts.present + counts.zero;
            progress.poisoned += counts.poisoned;
            progress.total += paged.map.pages();
        }
        progress
    }

    /// How pages are brought in.
    pub fn mode(&self) -> Mode {
        self.settings.mode
    }

    /// The region and page of `gpa`.
    #[inline]
    pub fn locate(&self, gpa: GuestAddress) -> Option<(RegionId, PageIndex)> {
        let index = match self.regions.len() {
            1 => 0,
            _ => self
                .regions
                .partition_point(|paged| paged.gpa <= gpa)
                .checked_sub(1)?,
        };
        let paged = self.regions.get(index)?;
        Some((RegionId(index), paged.page_at(gpa.offset_from(paged.gpa)?)?))
    }

    /// The region and page of `hva`, an address in a guest mapping.
    pub fn locate_host(&self, hva: HostAddress) -> Option<(RegionId, PageIndex)> {
        let after = self
            .by_hva
            .partition_point(|&index| self.regions[index].hva <= hva);
        let index = *self.by_hva.get(after.checked_sub(1)?)?;
        let paged = self.regions.get(index)?;
        let offset = hva.as_u64().checked_sub(paged.hva.as_u64())?;
        Some((RegionId(index), paged.page_at(offset)?))
    }

    /// The fault behind an exit of vCPU `vcpu`.
    #[inline]
    pub fn fault_of_exit(&self, vcpu: u32, exit: &FaultExit) -> Result<Fault, ResolveError> {
        if !exit.is_resolvable() || exit.private {
            return Err(ResolveError::NotResolvable { exit: *exit });
        }
        let Some((region, page)) = self.locate(exit.gpa) else {
            return Err(ResolveError::Outside { gpa: exit.gpa });
        };
        let delivery = Delivery::Exit;
        Ok(Fault {
            region,
            page,
            gpa: exit.gpa,
            access: exit.access,
            vcpu: Some(vcpu),
            delivery,
        })
    }

    /// The fault behind a message of a userfaultfd.
    pub fn fault_of_message(&self, message: &PageFault) -> Option<Fault> {
        let hva = usize::try_from(message.address).ok().map(HostAddress)?;
        let (region, page) = self.locate_host(hva)?;
        let gpa = self.paged(region)?.gpa_of(page);
        let access = if message.write {
            Access::Write
        } else {
            Access::Read
        };
        Some(Fault {
            region,
            page,
            gpa,
            access,
            vcpu: None,
            delivery: Delivery::Uffd,
        })
    }

    /// What the thread of vCPU `vcpu` brings along to resolve its exits.
    pub fn resolver(self: &Arc<Self>, vcpu: u32) -> Resolver {
        Resolver::new(Arc::clone(self), vcpu)
    }

    /// Ends every wait for a page, now and later, with [`ResolveError::Stopped`]. For when the VM
    /// has to stop for any reason. Prefetch and population end.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        self.arrivals.close();
    }

    pub(crate) fn set_hand_over(&self, hand_over: Option<Arc<HandOver>>) {
        *self.lock_hand_over() = hand_over;
    }

    pub(crate) fn hand_over(&self) -> Option<Arc<HandOver>> {
        self.lock_hand_over().clone()
    }

    fn lock_hand_over(&self) -> MutexGuard<'_, Option<Arc<HandOver>>> {
        // Nothing but an assignment happens under the lock.
        self.hand_over
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether [`Pager::stop`] was called, or a reader thread or prefetch has failed.
    pub fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    /// The first failure of a reader thread or of prefetch. The page that it was about stays absent,
    /// and whoever waits for it asleep.
    pub fn failure(&self) -> Option<&Failure> {
        self.failure.get()
    }

    /// Has `callback` called at the first failure of a reader thread or of prefetch, or now if there
    /// was one. It replaces the one set before. It must get every vCPU out of KVM_RUN; it must not
    /// block, nor set another callback.
    pub fn on_failure(&self, callback: impl FnMut(&Failure) + Send + 'static) {
        let mut slot = self.lock_on_failure();
        let callback = slot.insert(Box::new(callback));
        if let Some(failure) = self.failure.get() {
            call(callback, failure);
        }
    }

    /// Forgets the callback.
    pub fn clear_on_failure(&self) {
        self.lock_on_failure().take();
    }

    fn lock_on_failure(&self) -> MutexGuard<'_, Option<OnFailure>> {
        self.on_failure
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Records the failure of a reader, or of prefetch. Returns the first one, which may be an earlier one.
    pub(crate) fn fail(&self, error: ReaderError) -> Failure {
        let failure = Failure(Arc::new(error));
        // The callback's lock is held over recording it, so that on_failure, which takes it too,
        // either is seen here or sees the failure.
        let mut slot = self.lock_on_failure();
        if self.failure.set(failure.clone()).is_ok() {
            tracing::error!(%failure, "the pager stops");
            self.stop();
            if let Some(callback) = slot.as_mut() {
                call(callback, &failure);
            }
        }
        self.failure.get().cloned().unwrap_or(failure)
    }

    /// What was counted by threads that are done: readers that were stopped, resolvers that were
    /// dropped, prefetch that has ended.
    pub fn counted(&self) -> Counters {
        *self.lock_counted()
    }

    pub(crate) fn count(&self, counters: &Counters) {
        self.lock_counted().add(counters);
    }

    fn lock_counted(&self) -> MutexGuard<'_, Counters> {
        self.counted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes every page absent again, for another run: to be called while nothing runs on the
    /// memory and no fault is being resolved, after [`Region::zap_guest`] or [`Region::punch`]. What
    /// was counted is forgotten, and so is [`Pager::stop`]; a failure is not. Pages that were lost before
    /// the pager was made stay poisoned; those that were lost since do not, as emptying the memory
    /// has got rid of them.
    pub fn reset(&self) -> Result<(), ResetError> {
        for paged in &self.regions {
            paged.map.reset()?;
        }
        self.arrivals.clear();
        if self.failure.get().is_none() {
            self.stopped.store(false, Ordering::Release);
        }
        *self.lock_counted() = Counters::default();
        self.mark_lost();
        // Emptying the memory has taken the markers as well.
        for paged in &self.regions {
            let pages = self.lost_pages(paged);
            pages
                .filter_map(|gpa| paged.region.page_of_gpa(gpa))
                .for_each(|page| self.put_marker(paged, page));
        }
        Ok(())
    }

    /// Resolves a fault: afterwards whoever faulted may try again, or must not at all.
    ///
    /// `worker` belongs to the calling thread. With [`Delivery::Exit`] this may wait for another
    /// thread to bring the page in; with [`Delivery::Uffd`] it never waits for one.
    pub fn resolve(
        &self,
        worker: &mut Worker,
        fault: &Fault,
    ) -> Result<crate::Resolution, ResolveError> {
        worker.resolve(self, fault)
    }
}

/// Calls a callback of somebody else's, whose panic is not ours.
fn call(callback: &mut OnFailure, failure: &Failure) {
    if catch_unwind(AssertUnwindSafe(|| callback(failure))).is_err() {
        tracing::error!("the callback for failures panicked");
    }
}

impl std::fmt::Debug for Pager {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pager")
            .field("regions", &self.regions.len())
            .field("userfaultfds", &self.uffds.len())
            .field("settings", &self.settings)
            .field("failure", &self.failure.get())
            .finish_non_exhaustive()
    }
}
