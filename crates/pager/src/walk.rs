//! The order in which prefetch fetches a region's pages.
//!
//! It walks upwards, in laps: from its position to the last page, then from the first page back to its
//! start. Faults near each other start a new lap there, because the pages after recently needed pages are
//! likely to be needed next; faults at random places do not. A lap without work is the last one; after a lap that met pages of other
//! threads another follows, because their owners may fail and give them back.
//!
//! A settled page stays settled. The walk therefore records which stretches are settled as a whole, and
//! a lap over a terabyte of present pages takes microseconds.

use pagetide_memory::{PageIndex, PageRange};

/// The number of pages in a stretch.
const STRETCH: u64 = 4096;

/// The next action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Fetch this page, and the absent pages after it.
    Absent(PageIndex),
    /// No page is absent, but this page is requested or being installed: wait for it, then continue.
    Pending(PageIndex),
    /// Every page is settled, except for those that were left out.
    Done,
}

/// The first page of a run that is not settled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// It is to be fetched.
    Absent(PageIndex),
    /// It is requested or being installed, as are the pages after it up to the second.
    Pending(PageIndex, PageIndex),
    /// It is left out in this lap, as are the pages after it up to the second.
    LeftOut(PageIndex, PageIndex),
}

/// A walk over the pages of a region.
#[derive(Debug)]
pub(crate) struct Walk {
    /// The number of pages of the region.
    pages: u64,
    page: u64,
    /// The number of pages of this lap that have not been visited.
    left: u64,
    /// The stretches that are settled as a whole.
    settled: Vec<bool>,
    /// A page that was requested or being installed when this lap visited it.
    pending: Option<PageIndex>,
    /// Whether this lap has left pages out.
    has_left_out: bool,
}

impl Walk {
    /// A walk from the first page on.
    pub(crate) fn new(pages: u64) -> Self {
        let stretches = usize::try_from(pages.div_ceil(STRETCH)).unwrap_or(usize::MAX);
        Self {
            pages,
            page: 0,
            left: pages,
            settled: vec![false; stretches],
            pending: None,
            has_left_out: false,
        }
    }

    fn start_lap(&mut self) {
        self.left = self.pages;
        self.pending = None;
        self.has_left_out = false;
    }

    /// Whether the lap that [`Step::Done`] has ended left pages out.
    pub(crate) fn has_left_out(&self) -> bool {
        self.has_left_out
    }

    /// Starts a lap at `page`, if there is such a page.
    pub(crate) fn go_to(&mut self, page: PageIndex) {
        if page.0 < self.pages {
            self.page = page.0;
            self.start_lap();
        }
    }

    /// The next action. `find` returns the first page of a run that is not settled. The next step
    /// visits a returned page again, so no page is skipped, whatever happened to it.
    pub(crate) fn step(&mut self, find: impl Fn(PageRange) -> Option<Found>) -> Step {
        while self.left > 0 {
            let stretch_end = (self.page / STRETCH + 1) * STRETCH;
            let to = self.pages.min(stretch_end);
            let rest = to.saturating_sub(self.page).min(self.left);
            let found = if self.is_settled() {
                None
            } else {
                find(PageRange::new(PageIndex(self.page), rest))
            };
            match found {
                Some(Found::Absent(page)) => {
                    self.advance_to(page.0);
                    return Step::Absent(page);
                }
                Some(Found::Pending(page, end)) => {
                    self.pending.get_or_insert(page);
                    self.advance_to(end.0.clamp(page.0 + 1, to));
                }
                Some(Found::LeftOut(page, end)) => {
                    self.has_left_out = true;
                    self.advance_to(end.0.clamp(page.0 + 1, to));
                }
                None => {
                    if self.page.is_multiple_of(STRETCH) && self.page + rest == to {
                        self.remember();
                    }
                    self.advance_to(self.page + rest);
                }
            }
            if self.page >= self.pages {
                self.page = 0;
            }
        }
        let Some(page) = self.pending else {
            return Step::Done;
        };
        self.start_lap();
        Step::Pending(page)
    }

    fn stretch(&mut self) -> Option<&mut bool> {
        let index = usize::try_from(self.page / STRETCH).ok()?;
        self.settled.get_mut(index)
    }

    fn is_settled(&mut self) -> bool {
        self.stretch().is_some_and(|settled| *settled)
    }

    fn remember(&mut self) {
        if let Some(settled) = self.stretch() {
            *settled = true;
        }
    }

    fn advance_to(&mut self, page: u64) {
        self.left = self.left.saturating_sub(page - self.page);
        self.page = page;
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use proptest::prelude::*;

    use pagetide_memory::PageState;

    use super::*;

    use PageState::{Absent, Present};

    const PENDING: PageState = PageState::Installing;

    fn walk(map: &[PageState]) -> Walk {
        Walk::new(map.len() as u64)
    }

    fn step(walk: &mut Walk, map: &[PageState]) -> Step {
        walk.step(|pages| {
            let state = |page: PageIndex| map[usize::try_from(page.0).unwrap()];
            let page = pages.iter().find(|&page| !state(page).is_settled())?;
            Some(match state(page) {
                Absent => Found::Absent(page),
                PageState::Pending => Found::LeftOut(page, PageIndex(page.0 + 1)),
                _ => Found::Pending(page, PageIndex(page.0 + 1)),
            })
        })
    }

    fn settle(map: &mut [PageState], page: PageIndex) {
        map[usize::try_from(page.0).unwrap()] = Present;
    }

    /// The order in which absent pages are returned.
    fn order(walk: &mut Walk, map: &mut [PageState]) -> Vec<u64> {
        let mut order = Vec::new();
        while let Step::Absent(page) = step(walk, map) {
            settle(map, page);
            order.push(page.0);
        }
        order
    }

    #[test]
    fn it_walks_upwards_from_the_last_fault_and_wraps() {
        let mut map = vec![Absent; 5];
        let mut walk = walk(&map);
        assert_eq!(step(&mut walk, &map), Step::Absent(PageIndex(0)));
        settle(&mut map, PageIndex(0));
        walk.go_to(PageIndex(3));
        assert_eq!(order(&mut walk, &mut map), [3, 4, 1, 2]);
        assert_eq!(step(&mut walk, &map), Step::Done);
    }

    #[test]
    fn a_page_that_is_given_back_is_visited_again() {
        let mut map = vec![Present, PENDING, Present];
        let mut walk = walk(&map);
        let wait = Step::Pending(PageIndex(1));
        assert_eq!(step(&mut walk, &map), wait);
        assert_eq!(step(&mut walk, &map), wait);
        map[1] = Absent;
        assert_eq!(step(&mut walk, &map), Step::Absent(PageIndex(1)));
        map[1] = PENDING;
        assert_eq!(step(&mut walk, &map), wait);
        map[1] = Present;
        assert_eq!(step(&mut walk, &map), Step::Done);
    }

    #[test]
    fn pages_outside_the_region_are_not_visited() {
        let mut map = vec![Absent; 2];
        let mut walk = walk(&map);
        walk.go_to(PageIndex(2));
        walk.go_to(PageIndex(u64::MAX));
        assert_eq!(order(&mut walk, &mut map), [0, 1]);
        assert_eq!(Walk::new(0).step(|_| None), Step::Done);
    }

    /// A fault starts a lap. Over a nearly complete terabyte each lap would visit 2^28 pages, so it
    /// must skip the stretches that are settled.
    #[test]
    fn a_fault_does_not_revisit_settled_stretches() {
        const PAGES: u64 = 1 << 28;
        let last = PageIndex(PAGES - 1);
        let looked_at = Cell::new(0);
        let find = |pages: PageRange| {
            let found = pages
                .contains(last)
                .then_some(Found::Pending(last, PageIndex(PAGES)));
            let seen = found.map_or(pages.count(), |_| last.0 - pages.first().0 + 1);
            looked_at.set(looked_at.get() + seen);
            found
        };
        let mut walk = Walk::new(PAGES);
        assert_eq!(walk.step(find), Step::Pending(last));
        assert_eq!(looked_at.take(), PAGES);
        for page in [0, 1, STRETCH - 1, PAGES / 2, PAGES - 2] {
            walk.go_to(PageIndex(page));
            assert_eq!(walk.step(find), Step::Pending(last));
            // Only the stretch of the last page, in two parts if the lap starts within it.
            assert!(looked_at.take() <= 2 * STRETCH, "from page {page}");
        }
    }

    #[derive(Clone, Copy, Debug)]
    enum Event {
        /// Fetch the page that the walk returns.
        Step,
        /// A fault claims the walk's page, and then succeeds or fails.
        Race,
        Claim(usize),
        Finish(usize),
        Abandon(usize),
        Jump(usize),
    }

    fn events() -> impl Strategy<Value = Vec<Event>> {
        let event = prop_oneof![
            Just(Event::Step),
            Just(Event::Race),
            (0usize..24).prop_map(Event::Claim),
            (0usize..24).prop_map(Event::Finish),
            (0usize..24).prop_map(Event::Abandon),
            (0usize..24).prop_map(Event::Jump),
        ];
        prop::collection::vec(event, 0..200)
    }

    proptest! {
        /// For any concurrent faults: when the walk is done, every page is settled, and without
        /// interference it ends.
        #[test]
        fn done_means_that_all_pages_are_settled(pages in 1usize..24, events in events()) {
            let mut map = vec![Absent; pages];
            let mut walk = walk(&map);
            let settled = |map: &[PageState]| map.iter().all(|&state| state == Present);
            for event in events {
                match event {
                    Event::Step | Event::Race => match step(&mut walk, &map) {
                        Step::Absent(page) => {
                            let page = usize::try_from(page.0).unwrap();
                            prop_assert_eq!(map[page], Absent);
                            map[page] = match event {
                                Event::Race => PENDING,
                                _ => Present,
                            };
                        }
                        Step::Pending(..) => {}
                        Step::Done => prop_assert!(settled(&map)),
                    },
                    Event::Claim(index) => {
                        if map[index % pages] == Absent {
                            map[index % pages] = PENDING;
                        }
                    }
                    Event::Finish(index) | Event::Abandon(index) => {
                        if map[index % pages] == PENDING {
                            map[index % pages] = match event {
                                Event::Finish(_) => Present,
                                _ => Absent,
                            };
                        }
                    }
                    Event::Jump(index) => walk.go_to(PageIndex((index % pages) as u64)),
                }
            }
            for _ in 0..4 * pages {
                match step(&mut walk, &map) {
                    Step::Absent(page) | Step::Pending(page) => settle(&mut map, page),
                    Step::Done => break,
                }
            }
            prop_assert_eq!(step(&mut walk, &map), Step::Done);
            prop_assert!(settled(&map));
        }
    }
}
