//! The place of prefetch in a region, past the pages that were set aside.

use pagetide_memory::{PageIndex, PageRange, PageState};

use crate::region::{PagedRegion, Requesting};
use crate::walk::{Step, Walk};

/// The place of a walk over a region.
pub(super) struct Place {
    pub(super) walk: Walk,
    /// The page that it waits for.
    pub(super) pending: Option<PageIndex>,
    /// [`reconsidered`] when the walk's lap began.
    reconsidered: u64,
}

/// How often pages of a region were taken back that had been set aside.
fn reconsidered(region: &PagedRegion) -> u64 {
    let count = |requesting: &Requesting| requesting.lock().requests.set_aside().reconsidered();
    region.requesting().map_or(0, count)
}

/// The run of pages from `page` on that were set aside.
pub(super) fn set_aside(region: &PagedRegion, page: PageIndex) -> Option<PageRange> {
    let run = region
        .requesting()?
        .lock()
        .requests
        .set_aside()
        .run_of(page)?;
    Some(PageRange::new(page, run.end().0 - page.0))
}

impl Place {
    pub(super) fn new(region: &PagedRegion) -> Self {
        Self {
            walk: Walk::new(region.map.pages()),
            pending: None,
            reconsidered: reconsidered(region),
        }
    }

    /// The next step, past pages that were set aside.
    pub(super) fn step(&mut self, region: &PagedRegion) -> Step {
        let is_pending = |&page: &PageIndex| {
            let state = region.map.state(page);
            matches!(state, Some(PageState::Requested(_) | PageState::Installing))
        };
        // A whole lap found no other work, so that another lap is not needed yet.
        if let Some(page) = self.pending.take().filter(is_pending) {
            return Step::Pending(page);
        }
        loop {
            let step = self.walk.step(|pages| region.map.next_unsettled(pages));
            match step {
                Step::Absent(page) => match set_aside(region, page) {
                    Some(run) => self.walk.leave_out(run.end()),
                    None => return step,
                },
                Step::Done if self.walk.has_left_out() => {
                    let now = reconsidered(region);
                    if now == self.reconsidered {
                        return step;
                    }
                    self.reconsidered = now;
                    self.walk.go_to(PageIndex(0));
                }
                Step::Pending(_) | Step::Done => return step,
            }
        }
    }
}
