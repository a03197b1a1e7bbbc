//! Where a page is: its region, its page map, its userfaultfd.

use std::sync::Arc;

use pagetide_memory::{
    ClaimGuard, GuestAddress, GuestRange, HostAddress, PageIndex, PageMap, PageRange, Region,
    Settled, WakeWanted,
};
use pagetide_uapi::userfaultfd::{UserRange, Userfaultfd};

use crate::counters::Counters;
use crate::fault::RegionId;
use crate::pager::Pager;

/// Which userfaultfd serves which pages of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) pages: PageRange,
    /// Index into the pager's userfaultfds.
    pub(crate) uffd: usize,
}

/// A region, and what the pager knows about it.
#[derive(Debug)]
pub(crate) struct PagedRegion {
    pub(crate) region: Arc<Region>,
    pub(crate) map: PageMap,
    /// In the order of their pages, without gaps.
    pub(crate) spans: Vec<Span>,
    /// Copies of what the region would tell, next to each other for the resolve path.
    pub(crate) gpa: GuestAddress,
    pub(crate) hva: HostAddress,
    bytes: u64,
    shift: u32,
}

impl PagedRegion {
    pub(crate) fn new(region: Arc<Region>, map: PageMap, spans: Vec<Span>) -> Self {
        Self {
            gpa: region.gpa(),
            hva: region.guest().start(),
            bytes: region.bytes(),
            shift: region.page_size().shift(),
            region,
            map,
            spans,
        }
    }

    /// The page at an offset into the region, if that is within it.
    #[inline]
    pub(crate) fn page_at(&self, offset: u64) -> Option<PageIndex> {
        (offset < self.bytes).then_some(PageIndex(offset >> self.shift))
    }

    /// Where pages of this region are in the guest mapping. The pages are the region's own: they
    /// come from its page map.
    #[inline]
    pub(crate) fn user_range(&self, pages: PageRange) -> UserRange {
        UserRange {
            start: self.hva.as_u64() + (pages.first().0 << self.shift),
            bytes: pages.count() << self.shift,
        }
    }

    /// The gpa of a page of this region.
    #[inline]
    pub(crate) fn gpa_of(&self, page: PageIndex) -> GuestAddress {
        GuestAddress(self.gpa.0 + (page.0 << self.shift))
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

    /// Which userfaultfd serves `page`, and the run of pages that it serves. `None` if the region
    /// has no such page.
    #[inline]
    pub(crate) fn span(&self, page: PageIndex) -> Option<Span> {
        let index = match self.spans.len() {
            1 => 0,
            _ => self.spans.partition_point(|span| span.pages.end() <= page),
        };
        self.spans
            .get(index)
            .copied()
            .filter(|span| span.pages.contains(page))
    }
}

/// Where a fault is: the parts of a pager that concern it.
#[derive(Clone, Copy)]
pub(crate) struct Site<'p> {
    pub(crate) pager: &'p Pager,
    pub(crate) paged: &'p PagedRegion,
    pub(crate) uffd: &'p Userfaultfd,
}

impl<'p> Site<'p> {
    /// Where `page` is, and the pages that are served together with it.
    #[inline]
    pub(crate) fn of(pager: &'p Pager, region: RegionId, page: PageIndex) -> Option<(Self, Span)> {
        let paged = pager.paged(region)?;
        let span = paged.span(page)?;
        let uffd = pager.uffd(span)?;
        Some((Self { pager, paged, uffd }, span))
    }

    /// Settles a claim, and gives the wakes that were left to its owner.
    #[inline]
    pub(crate) fn finish(&self, counters: &mut Counters, run: ClaimGuard<'_>, settled: Settled) {
        let pages = run.pages();
        let wanted = run.finish(settled);
        self.wake_wanted(counters, pages, wanted);
    }

    /// Gives a claim back. Those who sleep in the userfaultfd are woken to fault again: then it is
    /// somebody else's turn to try, or to fail.
    pub(crate) fn abandon(&self, counters: &mut Counters, run: ClaimGuard<'_>) {
        let pages = run.pages();
        let wanted = run.abandon();
        self.wake_wanted(counters, pages, wanted);
    }

    /// Has installed pages mapped in the second-stage tables now, if there is a populator.
    pub(crate) fn populate(&self, pages: PageRange) {
        if !self.pager.arrivals.is_open() {
            return;
        }
        if let (Some(hand_over), Some(range)) = (self.pager.hand_over(), self.range_of(pages)) {
            hand_over.populate(self.pager, range);
        }
    }

    /// Hands installed pages to the populator's thread, if there is one.
    #[inline]
    pub(crate) fn populate_later(&self, pages: PageRange) {
        if !self.pager.arrivals.is_open() {
            return;
        }
        if let Some(range) = self.range_of(pages) {
            self.pager.arrivals.give(range);
        }
    }

    /// Where pages are in guest memory; None if there are none.
    fn range_of(&self, pages: PageRange) -> Option<GuestRange> {
        let start = self.paged.gpa_of(pages.first());
        GuestRange::new(start, self.paged.bytes_of(pages)).ok()
    }

    #[inline]
    fn wake_wanted(&self, counters: &mut Counters, pages: PageRange, wanted: WakeWanted) {
        if wanted.is_wanted() {
            self.wake(counters, self.paged.user_range(pages));
        }
    }

    /// UFFDIO_WAKE. It fails only for a range that is no range, which none of these is.
    pub(crate) fn wake(&self, counters: &mut Counters, range: UserRange) {
        counters.wakes += 1;
        if let Err(error) = self.uffd.wake(range) {
            tracing::error!(%error, %range, "UFFDIO_WAKE");
        }
    }
}
