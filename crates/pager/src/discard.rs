//! Memory that its owner gives up, as a balloon does.

use pagetide_memory::{PageRange, Removal};

use crate::counters::Counters;
use crate::error::{DiscardError, WAIT_SLICE};
use crate::fault::RegionId;
use crate::install::wake;
use crate::pager::Pager;

impl Pager {
    /// Gives pages back to the host: when it returns, they read as zeroes, and content that arrives for
    /// them is dropped. Writes to these pages that come while it runs are kept or lost. Poisoned pages
    /// stay poisoned. Returns how many pages it gave up.
    ///
    /// The order: each page is Removed in the page map first, waiting for its installation where one
    /// has begun; then the memory is given back. A fault in between finds the page Removed, and what
    /// it has mapped is taken away again with the rest.
    ///
    /// # Errors
    /// [`DiscardError`]. If the memory could not be given back the pages are Removed all the same, and
    /// may hold their former content.
    pub fn discard(&self, id: RegionId, pages: PageRange) -> Result<u64, DiscardError> {
        let table = self.table();
        let region = table.region(id).filter(|region| !region.is_closed());
        let region = region.ok_or(DiscardError::NoSuchRegion { region: id })?;
        if pages.is_empty() || pages.end().0 > region.map.pages() {
            return Err(DiscardError::NoSuchPages { pages });
        }
        if !region.target.can_punch() {
            return Err(DiscardError::NotOurs);
        }
        let mut removed = 0;
        let mut counters = Counters::default();
        let mut result = Ok(());
        let mut run = PageRange::new(pages.first(), 0);
        for page in pages.iter() {
            let is_removed = loop {
                match region.map.remove(page) {
                    Removal::Done { wake: wanted, .. } => {
                        if wanted.is_wanted()
                            && let Some(served) = region.served(page)
                        {
                            let single = PageRange::single(page);
                            wake(
                                region,
                                served,
                                &served.channel.order(),
                                &mut counters,
                                single,
                            );
                        }
                        break true;
                    }
                    Removal::Installing => {
                        region.map.wait(page, WAIT_SLICE);
                    }
                    Removal::Poisoned | Removal::Outside => break false,
                }
            };
            if is_removed {
                removed += 1;
                run = PageRange::new(run.first(), run.count() + 1);
                continue;
            }
            // Poison is not punched: the page would read as zeroes.
            if !run.is_empty() {
                result = result.and(self.with_events_read(region, || region.target.punch(run)));
            }
            run = PageRange::new(pagetide_memory::PageIndex(page.0 + 1), 0);
        }
        if !run.is_empty() {
            result = result.and(self.with_events_read(region, || region.target.punch(run)));
        }
        self.count(&counters);
        result.map(|()| removed)
    }
}
