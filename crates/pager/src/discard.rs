//! Discarding memory, for example for a balloon.

use pagetide_memory::{GuestAddress, PageIndex, PageRange, Removal};

use crate::counters::Counters;
use crate::error::{DiscardError, WAIT_SLICE};
use crate::fault::RegionId;
use crate::install::wake;
use crate::pager::Pager;
use crate::region::PagedRegion;

impl Pager {
    /// As [`Self::discard`], for the pages that lie wholly in `bytes` bytes from the home gpa `gpa` on: balloons and free
    /// page reporting name memory so. Parts of pages, and what is in no region, are left out.
    ///
    /// # Errors
    /// The first [`DiscardError`]; the pages before it were discarded.
    pub fn discard_gpas(&self, gpa: GuestAddress, bytes: u64) -> Result<u64, DiscardError> {
        let end = gpa.0.saturating_add(bytes);
        let mut discarded = 0;
        for region in self.table().iter().filter(|region| !region.is_closed()) {
            let shift = region.page_shift();
            let offset = |at: u64| at.clamp(region.gpa.0, region.gpa_end().0) - region.gpa.0;
            let first = offset(gpa.0).div_ceil(1 << shift);
            let behind = offset(end) >> shift;
            if first < behind {
                let pages = PageRange::new(PageIndex(first), behind - first);
                discarded += self.discard(region.id, pages)?;
            }
        }
        Ok(discarded)
    }

    /// Returns pages to the host: after the call they read as zeroes, and content that arrives for them
    /// is dropped. Concurrent writes to these pages are either preserved or lost. Poisoned pages stay
    /// poisoned. Returns the number of discarded pages.
    ///
    /// The order: first each page becomes Removed in the page map, after waiting for an installation in
    /// progress; then the memory is returned. A fault in between finds the page Removed, and the
    /// mapping that it makes is removed with the rest.
    ///
    /// # Errors
    /// [`DiscardError`]. If the memory could not be returned, the pages are Removed nevertheless, and
    /// may have their previous content.
    pub fn discard(&self, id: RegionId, pages: PageRange) -> Result<u64, DiscardError> {
        let table = self.table();
        let region = table.region(id).filter(|region| !region.is_closed());
        let region = region.ok_or(DiscardError::NoSuchRegion { region: id })?;
        if pages.is_empty() || pages.end().0 > region.map.pages() {
            return Err(DiscardError::NoSuchPages { pages });
        }
        if !region.memory.can_discard() {
            return Err(DiscardError::NotOurs);
        }
        let mut removed = 0;
        let mut counters = Counters::default();
        let mut result = Ok(());
        let mut run = PageRange::new(pages.first(), 0);
        for page in pages.iter() {
            let is_removed = loop {
                let (removal, wanted) = region.remove(page);
                match removal {
                    Removal::Done { .. } => {
                        if wanted.is_wanted()
                            && let Some(served) = region.served(page)
                        {
                            let single = PageRange::single(page);
                            wake(
                                region,
                                served,
                                &served.channel.lock_installs(),
                                &mut counters,
                                single,
                            );
                        }
                        break true;
                    }
                    Removal::Installing => {
                        region.map.wait_for_owner(page, WAIT_SLICE);
                    }
                    Removal::Poisoned | Removal::Outside => break false,
                }
            };
            if is_removed {
                removed += 1;
                run = PageRange::new(run.first(), run.count() + 1);
                continue;
            }
            // Poisoned pages are not punched, because they would read as zeroes.
            if !run.is_empty() {
                result = result.and(self.give_back(region, run));
            }
            run = PageRange::new(PageIndex(page.0 + 1), 0);
        }
        if !run.is_empty() {
            result = result.and(self.give_back(region, run));
        }
        self.count(&counters);
        result.map(|()| removed)
    }
    /// Returns memory to the host.
    fn give_back(&self, region: &PagedRegion, pages: PageRange) -> Result<(), DiscardError> {
        self.with_events_read(region, || region.memory.discard(pages))
            .map_err(DiscardError::NoThread)?
    }
}
