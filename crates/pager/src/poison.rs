//! Memory that is lost to uncorrected errors, now or before the VM was restored.

use pagetide_memory::{GuestRange, PageIndex, PageRange, PageState, Region, Removal};

use crate::again::Again;
use crate::close::{STEP_PAGES, steps};
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
        let (mut poisoned, mut looks) = (0, Looks::default());
        for region in self.table().iter() {
            let page_bytes = 1 << region.page_shift();
            let from = lost.start().0.max(region.gpa.0) - region.gpa.0;
            let to = lost
                .end()
                .0
                .min(region.gpa_end().0)
                .saturating_sub(region.gpa.0);
            let first = from.div_ceil(page_bytes);
            let count = (to / page_bytes).saturating_sub(first);
            for step in steps(PageRange::new(PageIndex(first), count)) {
                let mut newly = Runs::default();
                for page in step.iter() {
                    if self.poison_in_map(region, page) {
                        newly.push(page);
                    }
                }
                poisoned += newly.pages();
                // Marking wakes whoever sleeps there.
                self.mark_runs(region, newly, &mut looks);
            }
        }
        self.count(&Counters {
            poisoned,
            ..Counters::default()
        });
        poisoned
    }

    /// Poisons a page in the map; returns whether it was not poisoned before.
    fn poison_in_map(&self, region: &PagedRegion, page: PageIndex) -> bool {
        loop {
            match region.poison(page).0 {
                Removal::Done { .. } => return true,
                Removal::Poisoned | Removal::Outside => return false,
                Removal::Installing => {
                    region.map.wait_for_owner(page, WAIT_SLICE);
                }
            }
        }
    }

    /// Marks pages that are poisoned in the map. After so many that are not mapped, the fault of a thread marks the rest, or
    /// the end of the region.
    fn mark_runs(&self, region: &PagedRegion, runs: Runs, looks: &mut Looks) {
        for run in runs.0 {
            let is_marked = match looks.are_spent() {
                true => {
                    region.note_unmarked();
                    false
                }
                false => self.poison_in_time(region, run, &mut looks.again),
            };
            if !is_marked {
                // A thread that sleeps there has to fault again.
                self.wake_runs(region, &[run]);
            }
        }
    }

    /// Poisons the pages that were lost before the region was added, in the page map and in memory.
    pub(crate) fn reinstate_poison(
        &self,
        region: &PagedRegion,
        is_resumed: bool,
    ) -> Result<(), AddError> {
        let mut looks = Looks::default();
        let mut mark = |runs: Runs| -> Result<(), AddError> {
            if let Some(local) = region.memory.local() {
                for &run in &runs.0 {
                    // Existing mappings are removed first: content that a MISSING region should not have,
                    // or the marker of an earlier pager, which outlives that pager's userfaultfd.
                    self.unmap(region, local, run)?;
                }
            }
            self.mark_runs(region, runs, &mut looks);
            Ok(())
        };
        if is_resumed {
            let poisoned = region.runs(|state| state == PageState::Poisoned);
            for step in poisoned.flat_map(steps) {
                mark(Runs(vec![step]))?;
            }
        }
        let page_size = region.memory.shape().page_size;
        for step in steps(region.all_pages()) {
            let Some(range) = region.gpa_range(step) else {
                continue;
            };
            let mut newly = Runs::default();
            for page in region.lost.pages_in(range, page_size) {
                // Counted from the beginning of the range on.
                let page = PageIndex(step.first().0 + page.0);
                if let (Removal::Done { .. }, _) = region.poison(page) {
                    newly.push(page);
                }
            }
            let poisoned = newly.pages();
            mark(newly)?;
            self.count(&Counters {
                poisoned,
                ..Counters::default()
            });
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

/// Pages, neighbours together.
#[derive(Default)]
struct Runs(Vec<PageRange>);

impl Runs {
    /// Adds a page behind all others.
    fn push(&mut self, page: PageIndex) {
        match self.0.last_mut() {
            Some(run) if run.end() == page => *run = PageRange::new(run.first(), run.count() + 1),
            _ => self.0.push(PageRange::single(page)),
        }
    }

    fn pages(&self) -> u64 {
        self.0.iter().map(|run| run.count()).sum()
    }
}

/// Looks at pages, of which a process may have mapped none.
struct Looks {
    again: Again,
    holes: u64,
}

impl Default for Looks {
    fn default() -> Self {
        Self {
            again: Again::in_all(),
            holes: 0,
        }
    }
}

impl Looks {
    fn are_spent(&mut self) -> bool {
        self.holes += self.again.take_holes();
        self.holes >= STEP_PAGES
    }
}
