//! Which page prefetch brings in next.
//!
//! It walks all regions upwards, in laps: from where it stands to the last page, then from the first
//! page back to where it started. A fault elsewhere makes it start a lap there, since pages behind a
//! page that was just needed are likely to be next. A lap that found nothing to do is the last one;
//! a lap that met pages in other threads' hands is followed by another, as their owners may fail and
//! give them back.

use pagetide_memory::{PageIndex, PageRange, PageState};

use crate::fault::RegionId;

/// What to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Bring in this page, and what is absent behind it.
    Absent(RegionId, PageIndex),
    /// Nothing is absent, but this page is in somebody else's hands: wait for it, then look again.
    InFlight(RegionId, PageIndex),
    /// Every page is settled.
    Done,
}

/// A walk over the pages of some regions.
#[derive(Debug)]
pub(crate) struct Walk {
    /// How many pages each region has.
    pages: Vec<u64>,
    region: usize,
    page: u64,
    /// How many pages of this lap have not been looked at.
    left: u64,
    /// A page that this lap met in other hands.
    in_flight: Option<(RegionId, PageIndex)>,
}

impl Walk {
    /// A walk from the first page on, over regions of so many pages each.
    pub(crate) fn new(pages: Vec<u64>) -> Self {
        let mut walk = Self {
            pages,
            region: 0,
            page: 0,
            left: 0,
            in_flight: None,
        };
        walk.start_lap();
        walk
    }

    fn start_lap(&mut self) {
        self.left = self.pages.iter().sum();
        self.in_flight = None;
    }

    /// Starts a lap at `page`, if there is such a page.
    pub(crate) fn go_to(&mut self, region: RegionId, page: PageIndex) {
        if self
            .pages
            .get(region.0)
            .is_some_and(|&pages| page.0 < pages)
        {
            (self.region, self.page) = (region.0, page.0);
            self.start_lap();
        }
    }

    /// The next thing to do. `find` gives the first page of a run of a region's pages that is Absent
    /// or InFlight. A page that was returned is looked at again by the next step: so whatever became
    /// of it, it is not forgotten.
    pub(crate) fn step(
        &mut self,
        find: impl Fn(RegionId, PageRange) -> Option<(PageIndex, PageState)>,
    ) -> Step {
        while self.left > 0 {
            let region = RegionId(self.region);
            let in_region = self.pages.get(self.region).copied().unwrap_or(0);
            let rest = in_region.saturating_sub(self.page).min(self.left);
            match find(region, PageRange::new(PageIndex(self.page), rest)) {
                Some((page, PageState::InFlight)) => {
                    self.in_flight.get_or_insert((region, page));
                    self.advance_to(page.0 + 1);
                }
                Some((page, _)) => {
                    self.advance_to(page.0);
                    return Step::Absent(region, page);
                }
                None => self.advance_to(self.page + rest),
            }
            if self.page >= in_region {
                self.page = 0;
                self.region = (self.region + 1) % self.pages.len().max(1);
            }
        }
        let Some((region, page)) = self.in_flight else {
            return Step::Done;
        };
        self.start_lap();
        Step::InFlight(region, page)
    }

    fn advance_to(&mut self, page: u64) {
        self.left = self.left.saturating_sub(page - self.page);
        self.page = page;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    use PageState::{Absent, InFlight, Present};

    type Map = Vec<Vec<PageState>>;

    fn walk(map: &Map) -> Walk {
        Walk::new(map.iter().map(|pages| pages.len() as u64).collect())
    }

    fn step(walk: &mut Walk, map: &Map) -> Step {
        walk.step(|region, pages| {
            let state = |page: PageIndex| map[region.0][usize::try_from(page.0).unwrap()];
            let mut found = pages.iter().map(|page| (page, state(page)));
            found.find(|&(_, state)| matches!(state, Absent | InFlight))
        })
    }

    fn settle(map: &mut Map, region: RegionId, page: PageIndex) {
        map[region.0][usize::try_from(page.0).unwrap()] = Present;
    }

    /// The order in which absent pages come.
    fn order(walk: &mut Walk, map: &mut Map) -> Vec<(usize, u64)> {
        let mut order = Vec::new();
        while let Step::Absent(region, page) = step(walk, map) {
            settle(map, region, page);
            order.push((region.0, page.0));
        }
        order
    }

    #[test]
    fn it_goes_upwards_from_the_last_fault_and_around() {
        let mut map = vec![vec![Absent; 3], vec![Absent; 2]];
        let mut walk = walk(&map);
        assert_eq!(
            step(&mut walk, &map),
            Step::Absent(RegionId(0), PageIndex(0))
        );
        settle(&mut map, RegionId(0), PageIndex(0));
        walk.go_to(RegionId(0), PageIndex(2));
        let expected = [(0, 2), (1, 0), (1, 1), (0, 1)];
        assert_eq!(order(&mut walk, &mut map), expected);
        assert_eq!(step(&mut walk, &map), Step::Done);
    }

    #[test]
    fn a_page_that_is_given_back_is_not_forgotten() {
        let mut map = vec![vec![Present, InFlight, Present]];
        let mut walk = walk(&map);
        let wait = Step::InFlight(RegionId(0), PageIndex(1));
        assert_eq!(step(&mut walk, &map), wait);
        assert_eq!(step(&mut walk, &map), wait);
        map[0][1] = Absent;
        assert_eq!(
            step(&mut walk, &map),
            Step::Absent(RegionId(0), PageIndex(1))
        );
        map[0][1] = InFlight;
        assert_eq!(step(&mut walk, &map), wait);
        map[0][1] = Present;
        assert_eq!(step(&mut walk, &map), Step::Done);
    }

    #[test]
    fn places_that_do_not_exist_are_not_gone_to() {
        let mut map = vec![vec![Absent; 2]];
        let mut walk = walk(&map);
        walk.go_to(RegionId(1), PageIndex(0));
        walk.go_to(RegionId(0), PageIndex(2));
        assert_eq!(order(&mut walk, &mut map), [(0, 0), (0, 1)]);
        assert_eq!(Walk::new(Vec::new()).step(|_, _| None), Step::Done);
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
        fn done_means_that_all_is_settled(sizes in prop::collection::vec(1usize..8, 1..4), events in events()) {
            let mut map: Map = sizes.iter().map(|&size| vec![Absent; size]).collect();
            let places: Vec<_> = (0..map.len())
                .flat_map(|region| (0..sizes[region]).map(move |page| (region, page)))
                .collect();
            let mut walk = walk(&map);
            let settled = |map: &Map| map.iter().flatten().all(|&state| state == Present);
            for event in events {
                let at = |index: usize| places[index % places.len()];
                match event {
                    Event::Step | Event::Race => match step(&mut walk, &map) {
                        Step::Absent(region, page) => {
                            let page = usize::try_from(page.0).unwrap();
                            prop_assert_eq!(map[region.0][page], Absent);
                            map[region.0][page] = match event {
                                Event::Race => InFlight,
                                _ => Present,
                            };
                        }
                        Step::InFlight(..) => {}
                        Step::Done => prop_assert!(settled(&map)),
                    },
                    Event::Claim(index) => {
                        let (region, page) = at(index);
                        if map[region][page] == Absent {
                            map[region][page] = InFlight;
                        }
                    }
                    Event::Finish(index) | Event::Abandon(index) => {
                        let (region, page) = at(index);
                        if map[region][page] == InFlight {
                            map[region][page] = match event {
                                Event::Finish(_) => Present,
                                _ => Absent,
                            };
                        }
                    }
                    Event::Jump(index) => {
                        let (region, page) = at(index);
                        walk.go_to(RegionId(region), PageIndex(page as u64));
                    }
                }
            }
            for _ in 0..4 * places.len() {
                match step(&mut walk, &map) {
                    Step::Absent(region, page) | Step::InFlight(region, page) => {
                        settle(&mut map, region, page);
                    }
                    Step::Done => break,
                }
            }
            prop_assert_eq!(step(&mut walk, &map), Step::Done);
            prop_assert!(settled(&map));
        }
    }
}
