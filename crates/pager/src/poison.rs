//! Memory that is lost to uncorrected errors, now or before the VM was restored.

use pagetide_memory::{GuestRange, PageIndex, PageRange, PageState, Region, Removal};

use crate::counters::Counters;
use crate::error::{AddError, WAIT_SLICE};
use crate::pager::Pager;
use crate::region::PagedRegion;

impl Pager {
    /// Records that the home gpas `lost` were lost to an uncorrected error, which SIGBUS has reported
    /// to the VMM: pages that are lost as a whole are poisoned. (A page with an error in only a part of
    /// it, which the kernel's policy preserves, is not.) Waits for installations in progress. Returns
    /// the number of newly poisoned pages.
    pub fn record_poison(&self, lost: GuestRange) -> u64 {
        let mut poisoned = 0;
        for region in self.table().iter() {
            let page_bytes = 1 << region.page_shift();
            let from = lost.start().0.max(region.gpa.0) - region.gpa.0;
            let to = lost
                .end()
                .0
                .min(region.gpa_end().0)
                .saturating_sub(region.gpa.0);
            let first = from.div_ceil(page_bytes);
            for page in first..(to / page_bytes).max(first) {
                poisoned += u64::from(self.poison_page(region, PageIndex(page)));
            }
        }
        self.count(&Counters {
            poisoned,
            ..Counters::default()
        });
        poisoned
    }

    /// Poisons a page; returns whether it was not poisoned before.
    fn poison_page(&self, region: &PagedRegion, page: PageIndex) -> bool {
        loop {
            // Marking wakes whoever sleeps there.
            match region.poison(page).0 {
                Removal::Done { .. } => {
                    let _ = self.poison_everywhere(region, PageRange::single(page));
                    return true;
                }
                Removal::Poisoned | Removal::Outside => return false,
                Removal::Installing => {
                    region.map.wait_for_owner(page, WAIT_SLICE);
                }
            }
        }
    }

    /// Poisons the pages that were lost before the region was added, in the page map and in memory.
    pub(crate) fn reinstate_poison(
        &self,
        region: &PagedRegion,
        is_resumed: bool,
    ) -> Result<(), AddError> {
        let page_size = region.memory.shape().page_size;
        let range = region.gpa_range(region.all_pages());
        let mut pages: Vec<PageIndex> = range
            .into_iter()
            .flat_map(|range| region.lost.pages_in(range, page_size))
            .collect();
        if is_resumed {
            let is_poisoned =
                |&page: &PageIndex| region.map.state(page) == Some(PageState::Poisoned);
            pages.extend(region.all_pages().iter().filter(is_poisoned));
        }
        for page in pages {
            if let (Removal::Done { .. }, _) = region.poison(page) {
                self.count(&Counters {
                    poisoned: 1,
                    ..Counters::default()
                });
            }
            let single = PageRange::single(page);
            if let Some(local) = region.memory.local() {
                // Existing mappings are removed first: content that a MISSING region should not have,
                // or the marker of an earlier pager, which outlives that pager's userfaultfd.
                self.unmap(region, local, single)?;
            }
            let _ = self.poison_everywhere(region, single);
        }
        Ok(())
    }

    /// Removes the mappings of local pages.
    pub(crate) fn unmap(
        &self,
        region: &PagedRegion,
        local: &Region,
        pages: PageRange,
    ) -> Result<(), AddError> {
        let unmapped = self.with_events_read(region, || match local.service() {
            Some(_) => local.zap_guest(pages),
            None => local.punch(pages),
        });
        unmapped.map_err(AddError::NoThread)?.map_err(AddError::Zap)
    }
}
