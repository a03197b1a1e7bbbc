//! The pager's state of a region.

use std::ops::Deref;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pagetide_memory::{
    GuestAddress, GuestRange, PageIndex, PageMap, PageRange, PageState, PoisonMap, Removal,
    WakeWanted,
};
use pagetide_uapi::userfaultfd::{Mode, UserRange};

use crate::channel::{Channel, InstallLock};
use crate::config::{Holes, InstalledBy, MapperConfig, ObserverConfig};
use crate::error::WAIT_SLICE;
use crate::fault::RegionId;
use crate::memory::{Memory, Place};
use crate::missing::Missing;
use crate::populate::Mapper;
use crate::source::{LocalSource, Source};
use crate::space::Spaces;

/// The origin of a region's content, in the engine's form.
pub(crate) enum Supply {
    PageCache(Holes),
    Local(Arc<dyn LocalSource>),
    /// The source is beside the requests to it ([`Missing`]).
    Source,
}

/// An event count: incremented when a request was answered, or when something else permits prefetch to
/// continue. All regions of a pager share one, because prefetch waits for whichever region has room
/// first.
#[derive(Debug, Default)]
pub(crate) struct EventCount {
    count: Mutex<u64>,
    changed: Condvar,
}

impl EventCount {
    fn lock(&self) -> MutexGuard<'_, u64> {
        self.count.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn notify(&self) {
        *self.lock() += 1;
        self.changed.notify_all();
    }

    /// The number of events so far.
    pub(crate) fn count(&self) -> u64 {
        *self.lock()
    }

    /// Sleeps until there are more than `seen` events, or `timeout` has passed.
    pub(crate) fn wait(&self, seen: u64, timeout: Duration) {
        let is_unchanged = |count: &mut u64| *count == seen;
        let waited = self
            .changed
            .wait_timeout_while(self.lock(), timeout, is_unchanged);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }
}

impl std::fmt::Debug for Supply {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::PageCache(_) => "PageCache",
            Self::Local(_) => "Local",
            Self::Source => "Source",
        })
    }
}

/// A run of a region's pages, and the channel that serves it.
#[derive(Debug)]
pub(crate) struct Served {
    pub(crate) pages: PageRange,
    pub(crate) channel: Arc<Channel>,
}

/// A region and the pager's state of it. The fields of [`Parts`] are the region's own by `Deref`.
#[derive(Debug)]
pub(crate) struct PagedRegion {
    parts: Parts,
    pub(crate) gpa: GuestAddress,
    hva: u64,
    shift: u32,
    pub(crate) mode: Mode,
    population_ended: AtomicBool,
    /// A lost page could not be marked as poisoned.
    unmarked: AtomicBool,
    /// The number of entries of `served`, from the first on, that this pager has registered with its own
    /// userfaultfds.
    registered: AtomicUsize,
    closed: AtomicBool,
    /// The address spaces of other processes that share the memory.
    pub(crate) spaces: Spaces,
    missing: Mutex<Missing>,
}

/// The parameters of a region.
#[derive(Debug)]
pub(crate) struct Parts {
    pub(crate) id: RegionId,
    pub(crate) map: PageMap,
    pub(crate) supply: Supply,
    /// In the order of their pages, without gaps.
    pub(crate) served: Vec<Served>,
    pub(crate) fault_around_pages: u64,
    pub(crate) no_progress_limit: u32,
    pub(crate) can_poison: bool,
    pub(crate) trusts_existing: bool,
    pub(crate) mapper: Option<MapperConfig>,
    pub(crate) observer: Option<ObserverConfig>,
    pub(crate) installed_by: InstalledBy,
    /// The memory that was lost before the region was added.
    pub(crate) lost: PoisonMap,
    pub(crate) memory: Box<dyn Memory>,
}

impl Deref for PagedRegion {
    type Target = Parts;

    #[inline]
    fn deref(&self) -> &Parts {
        &self.parts
    }
}

impl PagedRegion {
    pub(crate) fn new(parts: Parts, missing: Missing) -> Self {
        let shape = parts.memory.shape();
        Self {
            gpa: shape.gpa,
            hva: shape.range.start().as_u64(),
            shift: shape.page_size.shift(),
            mode: shape.mode,
            parts,
            population_ended: AtomicBool::new(false),
            unmarked: AtomicBool::new(false),
            registered: AtomicUsize::new(0),
            closed: AtomicBool::new(false),
            spaces: Spaces::default(),
            missing: Mutex::new(missing),
        }
    }

    /// All pages.
    pub(crate) fn all_pages(&self) -> PageRange {
        PageRange::new(PageIndex(0), self.map.pages())
    }

    /// The runs of pages whose states are such, at the moment of the look.
    pub(crate) fn runs(
        &self,
        is_it: impl Fn(PageState) -> bool,
    ) -> impl Iterator<Item = PageRange> {
        let has = move |&page: &PageIndex| self.map.state(page).is_some_and(&is_it);
        let mut rest = self.all_pages();
        std::iter::from_fn(move || {
            let first = rest.iter().find(&has)?;
            let behind = PageRange::new(first, rest.end().0 - first.0);
            let end = behind
                .iter()
                .find(|page| !has(page))
                .unwrap_or(behind.end());
            rest = PageRange::new(end, behind.end().0 - end.0);
            Some(PageRange::new(first, end.0 - first.0))
        })
    }

    /// The end of its range of home gpas.
    pub(crate) fn gpa_end(&self) -> GuestAddress {
        GuestAddress(self.gpa.0 + (self.map.pages() << self.shift))
    }

    /// The page at an offset into the region, if the region contains it.
    #[inline]
    pub(crate) fn page_at(&self, offset: u64) -> Option<PageIndex> {
        let page = PageIndex(offset >> self.shift);
        (page.0 < self.map.pages()).then_some(page)
    }

    /// The home gpa of a page of this region.
    #[inline]
    pub(crate) fn gpa_of(&self, page: PageIndex) -> GuestAddress {
        GuestAddress(self.gpa.0 + (page.0 << self.shift))
    }

    /// Pages as a range of home gpas; `None` for an empty run.
    pub(crate) fn gpa_range(&self, pages: PageRange) -> Option<GuestRange> {
        GuestRange::new(self.gpa_of(pages.first()), self.bytes_of(pages)).ok()
    }

    /// Bytes in a run of pages of this region.
    #[inline]
    pub(crate) fn bytes_of(&self, pages: PageRange) -> u64 {
        pages.count() << self.shift
    }

    /// Whole pages of this region in `bytes`.
    pub(crate) fn pages_in(&self, bytes: u64) -> u64 {
        bytes >> self.shift
    }

    pub(crate) fn page_shift(&self) -> u32 {
        self.shift
    }

    /// The channel that serves `page`, and its run of pages.
    #[inline]
    pub(crate) fn served(&self, page: PageIndex) -> Option<&Served> {
        let index = match self.served.len() {
            1 => 0,
            _ => self.served.partition_point(|part| part.pages.end() <= page),
        };
        let served = self.served.get(index)?;
        served.pages.contains(page).then_some(served)
    }

    /// The pages that a fault on `page` may install. The run stays within one registration, because the
    /// kernel installs within one mapping only.
    #[inline]
    pub(crate) fn window(&self, served: &Served, page: PageIndex) -> PageRange {
        match self.fault_around_pages {
            1 => PageRange::single(page),
            pages => PageRange::window(page, pages).intersection(served.pages),
        }
    }

    /// The addresses at which `served` was added.
    pub(crate) fn home_of(&self, served: &Served) -> Range<u64> {
        let start = self.hva + (served.pages.first().0 << self.shift);
        start..start + (served.pages.count() << self.shift)
    }

    /// The address of `pages`, or of as many of them, from the first on, as are contiguous. `None` if
    /// the first is not mapped any more.
    #[inline]
    pub(crate) fn place<'a>(
        &self,
        served: &'a Served,
        lock: &InstallLock<'_>,
        pages: PageRange,
    ) -> Option<Place<'a>> {
        let home = self.hva + (pages.first().0 << self.shift);
        let (start, pages) = if served.channel.has_events {
            lock.find(self.id, pages, home)?
        } else {
            (home, pages)
        };
        let bytes = pages.count() << self.shift;
        Some(Place {
            uffd: &served.channel.uffd,
            range: UserRange { start, bytes },
            pages,
        })
    }

    /// Waits for the installations that are in progress, which take a few system calls. One that begins behind the place of
    /// this walk sees that the region is closed, if it is; and prefetch, which walks likewise, is not followed.
    pub(crate) fn settle_installing(&self) {
        let mut rest = self.all_pages();
        let mut installing = Vec::new();
        while let Some(page) = self.map.next_installing(rest) {
            installing.push(page);
            (_, rest) = rest.split_at(page.0 + 1 - rest.first().0);
        }
        for page in installing {
            while self.map.state(page) == Some(PageState::Installing) {
                self.map.wait_for_owner(page, WAIT_SLICE);
            }
        }
    }

    /// The book of its missing pages.
    pub(crate) fn missing(&self) -> MutexGuard<'_, Missing> {
        // No foreign code runs with the lock held, so no code panics under it.
        self.missing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the content is requested from a source.
    pub(crate) fn has_source(&self) -> bool {
        matches!(self.supply, Supply::Source)
    }

    /// The source, if the content comes from one.
    pub(crate) fn source(&self) -> Option<Arc<dyn Source>> {
        match self.has_source() {
            true => self.missing().source.clone(),
            false => None,
        }
    }

    /// Makes a page Removed. Returns whether that was possible, and whether threads that sleep on it are to be woken.
    pub(crate) fn remove(&self, page: PageIndex) -> (Removal, WakeWanted) {
        self.taken_out(page, self.map.remove(page))
    }

    /// Makes a page Poisoned, likewise.
    pub(crate) fn poison(&self, page: PageIndex) -> (Removal, WakeWanted) {
        self.taken_out(page, self.map.poison(page))
    }

    /// The entry of a page that was settled is taken out of the book.
    fn taken_out(&self, page: PageIndex, removal: Removal) -> (Removal, WakeWanted) {
        let before = PageState::Pending;
        if removal != (Removal::Done { before }) {
            return (removal, WakeWanted::No);
        }
        let taken = self.missing().take(PageRange::single(page));
        let is_asleep = taken.iter().any(|entry| entry.wish.is_asleep());
        (removal, WakeWanted::from(is_asleep))
    }

    /// Whether content that is there before its installation counts as the page's: it is the page cache's own,
    /// or the region's owner has declared so.
    pub(crate) fn may_exist(&self) -> bool {
        matches!(self.supply, Supply::PageCache(_)) || self.trusts_existing
    }

    /// The same for one page, which a predecessor may have installed.
    pub(crate) fn may_exist_at(&self, page: PageIndex) -> bool {
        self.may_exist() || self.map.was_begun(page)
    }

    /// The mapper for installed pages, unless it has failed.
    pub(crate) fn mapper(&self) -> Option<&Arc<dyn Mapper>> {
        let config = self.mapper.as_ref()?;
        (!self.population_ended.load(Ordering::Relaxed)).then_some(&config.mapper)
    }

    /// Records that a lost page could not be marked as poisoned, for now or for good.
    pub(crate) fn note_unmarked(&self) {
        self.unmarked.store(true, Ordering::Release);
    }

    /// Whether some lost page may be unmarked.
    pub(crate) fn has_unmarked(&self) -> bool {
        self.unmarked.load(Ordering::Acquire)
    }

    pub(crate) fn count_registered(&self) {
        self.registered.fetch_add(1, Ordering::Relaxed);
    }

    /// The runs that were registered and must be unregistered. No other run may be: some kernels let
    /// one userfaultfd unregister a range of another.
    pub(crate) fn registered(&self) -> &[Served] {
        let count = self.registered.load(Ordering::Relaxed);
        self.served.get(..count).unwrap_or_default()
    }

    /// Records that the mapper has failed. True for the first call.
    pub(crate) fn end_population(&self) -> bool {
        !self.population_ended.swap(true, Ordering::Relaxed)
    }

    /// Whether the region was removed: content for it is dropped, and no thread waits for it.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Whether a page that was just claimed must not be installed any more. The closing thread first
    /// sets the flag, and then waits until no page is Installing; an installing thread has made the
    /// page Installing before it reads the flag. A fence on both sides ensures that at least one of the
    /// two sees the other.
    #[inline]
    pub(crate) fn is_closed_to_installers(&self) -> bool {
        // Installing into local memory while its region closes is harmless: no successor has the
        // memory.
        if self.memory.local().is_none() {
            fence(Ordering::SeqCst);
        }
        self.closed.load(Ordering::Relaxed)
    }

    /// Closes the region. True for the first call.
    pub(crate) fn close(&self) -> bool {
        let is_first = !self.closed.swap(true, Ordering::AcqRel);
        fence(Ordering::SeqCst);
        is_first
    }
}
