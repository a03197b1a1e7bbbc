//! A region as the pager serves it.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pagetide_memory::{GuestAddress, GuestRange, PageIndex, PageMap, PageRange, PoisonMap};
use pagetide_uapi::userfaultfd::{Mode, UserRange, Userfaultfd};

use crate::channel::{Channel, Order};
use crate::config::{Holes, SinkConfig};
use crate::fault::RegionId;
use crate::populate::Mapper;
use crate::requests::Requests;
use crate::source::{LocalSource, Source};
use crate::target::Target;

/// Where a region's content comes from, as the engine needs to know it.
pub(crate) enum Supply {
    PageCache(Holes),
    Local(Arc<dyn LocalSource>),
    Source(Box<Requesting>),
}

/// The requests of a region, and whom they go to.
pub(crate) struct Requesting {
    state: Mutex<RequestState>,
    bell: Arc<Bell>,
}

/// Rings when a request was answered, or something else happened that lets prefetch go on. One for all
/// regions of a pager, since prefetch waits for whichever has room first.
#[derive(Debug, Default)]
pub(crate) struct Bell {
    rings: Mutex<u64>,
    rang: Condvar,
}

impl Bell {
    fn lock(&self) -> MutexGuard<'_, u64> {
        self.rings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn ring(&self) {
        *self.lock() += 1;
        self.rang.notify_all();
    }

    /// How often it rang.
    pub(crate) fn rings(&self) -> u64 {
        *self.lock()
    }

    /// Sleeps until it rang more often than `heard`, or `timeout` has passed.
    pub(crate) fn wait(&self, heard: u64, timeout: Duration) {
        let silent = |rings: &mut u64| *rings == heard;
        let waited = self.rang.wait_timeout_while(self.lock(), timeout, silent);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }
}

pub(crate) struct RequestState {
    pub(crate) requests: Requests,
    pub(crate) source: Arc<dyn Source>,
    /// A thread is submitting; others leave what they want to it.
    pub(crate) is_submitting: bool,
}

impl Requesting {
    pub(crate) fn new(requests: Requests, source: Arc<dyn Source>, bell: Arc<Bell>) -> Self {
        let state = RequestState {
            requests,
            source,
            is_submitting: false,
        };
        Self {
            state: Mutex::new(state),
            bell,
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, RequestState> {
        // No source is called with the lock held, so nothing panics under it.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn notify(&self) {
        self.bell.ring();
    }
}

impl std::fmt::Debug for Supply {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::PageCache(_) => "PageCache",
            Self::Local(_) => "Local",
            Self::Source(_) => "Source",
        })
    }
}

/// Which channel serves which pages of a region.
#[derive(Debug)]
pub(crate) struct Served {
    pub(crate) pages: PageRange,
    pub(crate) channel: Arc<Channel>,
}

/// A region and what the pager knows about it.
#[derive(Debug)]
pub(crate) struct PagedRegion {
    pub(crate) id: RegionId,
    pub(crate) map: PageMap,
    pub(crate) mode: Mode,
    pub(crate) supply: Supply,
    /// In the order of their pages, without gaps.
    pub(crate) served: Vec<Served>,
    pub(crate) gpa: GuestAddress,
    hva: u64,
    shift: u32,
    pub(crate) fault_around_pages: u64,
    pub(crate) no_progress_limit: u32,
    pub(crate) can_poison: bool,
    pub(crate) trusts_existing: bool,
    pub(crate) sink: Option<SinkConfig>,
    /// What was lost before the region was added.
    pub(crate) lost: PoisonMap,
    population_ended: AtomicBool,
    /// A lost page could not be marked as poisoned.
    unmarked: AtomicBool,
    /// How many of `served` this region has registered with its own userfaultfds, from the first on.
    registered: AtomicUsize,
    closed: AtomicBool,
    pub(crate) target: Target,
}

/// What a region is made of besides what its target and its page map say.
pub(crate) struct Parts {
    pub(crate) id: RegionId,
    pub(crate) map: PageMap,
    pub(crate) mode: Mode,
    pub(crate) supply: Supply,
    pub(crate) served: Vec<Served>,
    pub(crate) fault_around_pages: u64,
    pub(crate) no_progress_limit: u32,
    pub(crate) can_poison: bool,
    pub(crate) trusts_existing: bool,
    pub(crate) sink: Option<SinkConfig>,
    pub(crate) lost: PoisonMap,
    pub(crate) target: Target,
}

/// Where a run of pages is to be installed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place<'a> {
    pub(crate) uffd: &'a Userfaultfd,
    pub(crate) range: UserRange,
    pub(crate) pages: PageRange,
}

impl PagedRegion {
    pub(crate) fn new(parts: Parts) -> Self {
        Self {
            id: parts.id,
            map: parts.map,
            mode: parts.mode,
            supply: parts.supply,
            served: parts.served,
            gpa: parts.target.gpa(),
            hva: parts.target.range().start().as_u64(),
            shift: parts.target.page_size().shift(),
            fault_around_pages: parts.fault_around_pages,
            no_progress_limit: parts.no_progress_limit,
            can_poison: parts.can_poison,
            trusts_existing: parts.trusts_existing,
            sink: parts.sink,
            lost: parts.lost,
            population_ended: AtomicBool::new(false),
            unmarked: AtomicBool::new(false),
            registered: AtomicUsize::new(0),
            closed: AtomicBool::new(false),
            target: parts.target,
        }
    }

    /// All pages.
    pub(crate) fn all_pages(&self) -> PageRange {
        PageRange::new(PageIndex(0), self.map.pages())
    }

    /// Its range of home gpas.
    pub(crate) fn gpa_end(&self) -> GuestAddress {
        GuestAddress(self.gpa.0 + (self.map.pages() << self.shift))
    }

    /// The page at an offset into the region, if that is within it.
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

    /// Pages as a range of home gpas; `None` if there are none.
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

    /// Which channel serves `page`, with the pages that it serves.
    #[inline]
    pub(crate) fn served(&self, page: PageIndex) -> Option<&Served> {
        let index = match self.served.len() {
            1 => 0,
            _ => self.served.partition_point(|part| part.pages.end() <= page),
        };
        let served = self.served.get(index)?;
        served.pages.contains(page).then_some(served)
    }

    /// The pages that a fault on `page` may bring in. A run must not leave its registration: the
    /// kernel installs within one mapping only.
    #[inline]
    pub(crate) fn window(&self, served: &Served, page: PageIndex) -> PageRange {
        match self.fault_around_pages {
            1 => PageRange::single(page),
            pages => PageRange::window(page, pages).intersection(served.pages),
        }
    }

    /// Where `pages` are, or as many of them from the first on as lie one behind the other. `None` if
    /// the first is not mapped any more.
    #[inline]
    pub(crate) fn place<'a>(
        &self,
        served: &'a Served,
        order: &Order<'_>,
        pages: PageRange,
    ) -> Option<Place<'a>> {
        let (start, pages) = if served.channel.has_events {
            order.find(self.id, pages)?
        } else {
            (self.hva + (pages.first().0 << self.shift), pages)
        };
        let bytes = pages.count() << self.shift;
        Some(Place {
            uffd: &served.channel.uffd,
            range: UserRange { start, bytes },
            pages,
        })
    }

    /// The requests, if the content comes from a source.
    pub(crate) fn requesting(&self) -> Option<&Requesting> {
        match &self.supply {
            Supply::Source(requesting) => Some(requesting),
            Supply::PageCache(_) | Supply::Local(_) => None,
        }
    }

    /// Whether a page that is mapped before it was installed may be taken for present: its content is
    /// the page cache's own, or the owner of the region says so.
    pub(crate) fn may_exist(&self) -> bool {
        matches!(self.supply, Supply::PageCache(_)) || self.trusts_existing
    }

    /// Who maps installed pages in stage 2, unless that has failed.
    pub(crate) fn sink(&self) -> Option<&Arc<dyn Mapper>> {
        let config = self.sink.as_ref()?;
        (!self.population_ended.load(Ordering::Relaxed)).then_some(&config.sink)
    }

    /// A lost page could not be marked as poisoned, for now or for good.
    pub(crate) fn note_unmarked(&self) {
        self.unmarked.store(true, Ordering::Release);
    }

    /// Whether a lost page may not be marked as poisoned.
    pub(crate) fn has_unmarked(&self) -> bool {
        self.unmarked.load(Ordering::Acquire)
    }

    pub(crate) fn count_registered(&self) {
        self.registered.fetch_add(1, Ordering::Relaxed);
    }

    /// What was registered, and has to be unregistered. Nothing else may be: some kernels let one
    /// userfaultfd unregister what another serves.
    pub(crate) fn registered(&self) -> &[Served] {
        let count = self.registered.load(Ordering::Relaxed);
        self.served.get(..count).unwrap_or_default()
    }

    /// The sink has failed. True for the first who says so.
    pub(crate) fn end_population(&self) -> bool {
        !self.population_ended.swap(true, Ordering::Relaxed)
    }

    /// Whether the region was removed: what arrives for it is dropped, and nobody waits for it.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Whether a page that was just claimed must not be installed any more. Whoever closes a region
    /// says so first and then waits until no page is Installing; whoever installs has made the page
    /// Installing before this look. A fence on both sides lets one of the two see the other.
    #[inline]
    pub(crate) fn is_closed_to_installers(&self) -> bool {
        // Local memory that is installed while its region closes does no harm: no successor has it.
        if self.target.local().is_none() {
            fence(Ordering::SeqCst);
        }
        self.closed.load(Ordering::Relaxed)
    }

    /// True for the first who closes it.
    pub(crate) fn close(&self) -> bool {
        let is_first = !self.closed.swap(true, Ordering::AcqRel);
        fence(Ordering::SeqCst);
        is_first
    }
}
