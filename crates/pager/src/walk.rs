//! Which page of a region prefetch brings in next.
//!
//! It walks upwards, in laps: from where it stands to the last page, then from the first page back to
//! where it started. A fault elsewhere makes it start a lap there, since pages behind a
//! page that was just needed are likely to be next. A lap that found nothing to do is the last one;
//! a lap that met pages in other threads' hands is followed by another, as their owners may fail and
//! give them back.
//! A page that is settled stays so. So the walk remembers which stretches it found settled as a whole,
//! and a lap over a terabyte that is there already takes microseconds.

use pagetide_memory::{PageIndex, PageRange, PageState};

/// Pages in a stretch that is remembered to be settled.
const STRETCH: u64 = 4096;

/// What to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Bring in this page, and what is absent behind it.
    Absent(PageIndex),
    /// Nothing is absent, but this page is requested or being installed: wait for it, then look again.
    Pending(PageIndex),
    /// Every page is settled.
    Done,
}

/// A walk over the pages of a region.
#[derive(Debug)]
pub(crate) struct Walk {
    /// How many pages the region has.
    pages: u64,
    page: u64,
    /// How many pages of this lap have not been looked at.
    left: u64,
    /// Which stretches were found settled as a whole.
    settled: Vec<bool>,
    /// A page that this lap met requested or being installed.
    pending: Option<PageIndex>,
}

impl Walk {
    /// A walk from the first page on, over that many pages.
    pub(crate) fn new(pages: u64) -> Self {
        let stretches = usize::try_from(pages.div_ceil(STRETCH)).unwrap_or(usize::MAX);
        Self {
            pages,
            page: 0,
            left: pages,
            settled: vec![false; stretches],
            pending: None,
        }
    }

    fn start_lap(&mut self) {
        self.left = self.pages;
        self.pending = None;
    }

    /// Starts a lap at `page`, if there is such a page.
    pub(crate) fn go_to(&mut self, page: PageIndex) {
        if page.0 < self.pages {
            self.page = page.0;
            self.start_lap();
        }
    }

    /// The next thing to do. `find` gives the first page of a run that is not settled. A page that was
    /// returned is looked at again by the next step: so whatever became of it, it is not forgotten.
    pub(crate) fn step(
        &mut self,
        find: impl Fn(PageRange) -> Option<(PageIndex, PageState)>,
    ) -> Step {
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
                Some((page, PageState::Absent)) => {
                    self.advance_to(page.0);
                    return Step::Absent(page);
                }
                Some((page, _)) => {
                    self.pending.get_or_insert(page);
                    self.advance_to(page.0 + 1);
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

    use super::*;

    use PageState::{Absent, Present};

    const PENDING: PageState = PageState::Installing;

    fn walk(map: &[PageState]) -> Walk {
        Walk::new(map.len() as u64)
    }

    fn step(walk: &mut Walk, map: &[PageState]) -> Step {
        walk.step(|pages| {
            let state = |page: PageIndex| map[usize::try_from(page.0).unwrap()];
            let mut found = pages.iter().map(|page| (page, state(page)));
            found.find(|&(_, state)| !state.is_settled())
        })
    }

    fn settle(map: &mut [PageState], page: PageIndex) {
        map[usize::try_from(page.0).unwrap()] = Present;
    }

    /// The order in which absent pages come.
    fn order(walk: &mut Walk, map: &mut [PageState]) -> Vec<u64> {
        let mut order = Vec::new();
        while let Step::Absent(page) = step(walk, map) {
            settle(map, page);
            order.push(page.0);
        }
        order
    }

    #[test]
    fn it_goes_upwards_from_the_last_fault_and_around() {
        let mut map = vec![Absent; 5];
        let mut walk = walk(&map);
        assert_eq!(step(&mut walk, &map), Step::Absent(PageIndex(0)));
        settle(&mut map, PageIndex(0));
        walk.go_to(PageIndex(3));
        assert_eq!(order(&mut walk, &mut map), [3, 4, 1, 2]);
        assert_eq!(step(&mut walk, &map), Step::Done);
    }

    #[test]
    fn a_page_that_is_given_back_is_not_forgotten() {
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
    fn places_that_do_not_exist_are_not_gone_to() {
        let mut map = vec![Absent; 2];
        let mut walk = walk(&map);
        walk.go_to(PageIndex(2));
        walk.go_to(PageIndex(u64::MAX));
        assert_eq!(order(&mut walk, &mut map), [0, 1]);
        assert_eq!(Walk::new(0).step(|_| None), Step::Done);
    }

    /// A fault starts a lap, and over a terabyte that is nearly there each lap would look at 2^28
    /// pages: it must not look again at what it found settled.
    #[test]
    fn a_fault_does_not_have_all_settled_pages_looked_at_again() {
        const PAGES: u64 = 1 << 28;
        let last = PageIndex(PAGES - 1);
        let looked_at = Cell::new(0);
        let find = |pages: PageRange| {
            let found = pages.contains(last).then_some((last, PENDING));
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
            // The stretch of the last page alone, in two parts if the lap starts within it.
            assert!(looked_at.take() <= 2 * STRETCH, "from page {page}");
        }
    }

    #[derive(Clone, Copy, Debug)]
    enum Event {
        /// Bring in what the walk says.
        Step,
        /// The walk's page is claimed by a fault, which then succeeds or fails.
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
        /// Whatever faults do meanwhile: when the walk says that it is done, everything is settled,
        /// and it gets there as soon as nobody interferes.
        #[test]
        fn done_means_that_all_is_settled(pages in 1usize..24, events in events()) {
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
