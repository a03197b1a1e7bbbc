//! The place of prefetch in a region, past the pages that were set aside.

use pagetide_memory::{PageIndex, PageRange, PageState};

use crate::missing::Outlook;
use crate::region::PagedRegion;
use crate::walk::{Found, Step, Walk};

/// The place of a walk over a region.
pub(super) struct Place {
    pub(super) walk: Walk,
    /// The page that it waits for.
    pub(super) pending: Option<PageIndex>,
    /// [`Missing::reconsidered`](crate::missing::Missing::reconsidered) when the walk's lap began.
    reconsidered: u64,
}

impl Place {
    pub(super) fn new(region: &PagedRegion) -> Self {
        Self {
            walk: Walk::new(region.map.pages()),
            pending: None,
            reconsidered: region.missing().reconsidered(),
        }
    }

    /// The next step, past pages that were set aside.
    pub(super) fn step(&mut self, region: &PagedRegion) -> Step {
        let is_coming = |&page: &PageIndex| match region.map.state(page) {
            Some(PageState::Pending) => {
                matches!(region.missing().outlook(page), Outlook::Coming(_))
            }
            state => state == Some(PageState::Installing),
        };
        // A whole lap found no other work, so that another lap is not needed yet.
        if let Some(page) = self.pending.take().filter(is_coming) {
            return Step::Pending(page);
        }
        loop {
            let step = self.walk.step(|pages| find(region, pages));
            if step != Step::Done || !self.walk.has_left_out() {
                return step;
            }
            let now = region.missing().reconsidered();
            if now == self.reconsidered {
                return step;
            }
            self.reconsidered = now;
            self.walk.go_to(PageIndex(0));
        }
    }
}

/// The first page of a run that is to be fetched.
pub(super) fn next_missing(region: &PagedRegion, pages: PageRange) -> Option<PageIndex> {
    let mut rest = pages;
    loop {
        let end = match find(region, rest)? {
            Found::Absent(page) => return Some(page),
            Found::Pending(_, end) | Found::LeftOut(_, end) => end.min(rest.end()),
        };
        rest = PageRange::new(end, rest.end().0 - end.0);
    }
}

/// The first page of a run that is not settled.
fn find(region: &PagedRegion, pages: PageRange) -> Option<Found> {
    let (page, state) = region.map.next_unsettled(pages)?;
    Some(match state {
        PageState::Absent => Found::Absent(page),
        PageState::Pending => match region.missing().outlook(page) {
            Outlook::LeftOut(end) => Found::LeftOut(page, end),
            Outlook::Missing => Found::Absent(page),
            Outlook::Coming(end) => Found::Pending(page, end),
        },
        _ => Found::Pending(page, PageIndex(page.0 + 1)),
    })
}
