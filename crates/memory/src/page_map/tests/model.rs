//! Compares the map with a simple model, in histories of one thread.

use proptest::prelude::*;

use super::*;

/// One step of a history.
#[derive(Clone, Debug)]
enum Step {
    ClaimRun(u64, u64),
    ClaimArrived(u64, u64),
    Pend(u64, u64),
    Unpend(u64, u64),
    Finish(usize, Settled),
    Abandon(usize),
    Drop(usize),
    Split(usize, u64),
    WantWake(u64),
    Remove(u64),
    Poison(u64),
    Handover,
}

fn step() -> impl Strategy<Value = Step> {
    let page = 0u64..10;
    let window = (0u64..10, 1u64..9);
    let settled = prop_oneof![
        Just(Settled::Present),
        Just(Settled::Zero),
        Just(Settled::Poisoned)
    ];
    let guard = any::<usize>;
    prop_oneof![
        4 => window.clone().prop_map(|(page, window)| Step::ClaimRun(page, window)),
        4 => window.clone().prop_map(|(first, count)| Step::ClaimArrived(first, count)),
        6 => window.clone().prop_map(|(page, window)| Step::Pend(page, window)),
        2 => window.prop_map(|(first, count)| Step::Unpend(first, count)),
        3 => (guard(), settled).prop_map(|(at, settled)| Step::Finish(at, settled)),
        2 => guard().prop_map(Step::Abandon),
        2 => guard().prop_map(Step::Drop),
        2 => (guard(), 0u64..9).prop_map(|(at, count)| Step::Split(at, count)),
        6 => page.clone().prop_map(Step::WantWake),
        2 => page.clone().prop_map(Step::Remove),
        1 => page.prop_map(Step::Poison),
        1 => Just(Step::Handover),
    ]
}

/// A page in the model.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Page {
    state: PageState,
    /// Its state before the claim.
    origin: PageState,
    wake: bool,
}

const FRESH: Page = Page {
    state: PageState::Absent,
    origin: PageState::Absent,
    wake: false,
};

struct Model(Vec<Page>);

impl Model {
    fn get(&mut self, page: PageIndex) -> Option<&mut Page> {
        self.0.get_mut(page.as_usize())
    }

    fn state(&self, page: PageIndex) -> Option<PageState> {
        self.0.get(page.as_usize()).map(|page| page.state)
    }

    /// `page` and the Absent pages of `window` that form a run with it.
    fn run(&self, page: PageIndex, window: PageRange) -> PageRange {
        let absent = |page: &PageIndex| {
            window.contains(*page) && self.state(*page) == Some(PageState::Absent)
        };
        if !window.contains(page) {
            return PageRange::single(page);
        }
        let before = (0..page.0).rev().map(PageIndex).take_while(absent).count();
        let after = (page.0 + 1..).map(PageIndex).take_while(absent).count();
        let first = page.0 - to_u64(before);
        range(first, to_u64(before + 1 + after))
    }

    fn claim(&mut self, pages: PageRange) {
        for page in pages.iter() {
            let page = self.get(page).unwrap();
            page.origin = std::mem::replace(&mut page.state, PageState::Installing);
        }
    }

    /// Ends a claim. `end` gets each page, with its state from before the claim restored, and returns
    /// whether its wake-up is returned.
    fn leave(&mut self, pages: PageRange, end: impl Fn(&mut Page) -> bool) -> bool {
        pages.iter().fold(false, |wanted, page| {
            let page = self.get(page).unwrap();
            page.state = page.origin;
            let returned = end(page) && page.wake;
            page.wake &= !returned;
            wanted | returned
        })
    }
}

fn claimable(state: PageState) -> bool {
    matches!(state, PageState::Absent | PageState::Pending)
}

proptest! {
    #[test]
    fn the_map_follows_its_table(steps in prop::collection::vec(step(), 1..200)) {
        const PAGES: u64 = 9;
        let mut map = PageMap::new(PAGES).unwrap();
        let mut model = Model(vec![FRESH; to_usize(PAGES)]);
        // A guard borrows the map; between steps only the guard's pages are stored.
        let mut owned: Vec<PageRange> = Vec::new();
        for step in steps {
            let take = |owned: &mut Vec<PageRange>, at: usize| {
                (!owned.is_empty()).then(|| owned.swap_remove(at % owned.len()))
            };
            match step {
                Step::ClaimRun(page, window) => {
                    let page = PageIndex(page);
                    let window = PageRange::window(page, window);
                    let expected = model.run(page, window);
                    match map.claim_run(page, window) {
                        Claim::Outside => prop_assert!(page.0 >= PAGES),
                        Claim::Lost(state) => {
                            prop_assert_eq!(Some(state), model.state(page));
                            prop_assert!(!claimable(state));
                        }
                        Claim::Won(guard) => {
                            prop_assert!(claimable(model.state(page).unwrap()));
                            prop_assert_eq!(guard.pages(), expected);
                            std::mem::forget(guard);
                            model.claim(expected);
                            owned.push(expected);
                        }
                    }
                }
                Step::ClaimArrived(first, count) => {
                    let pages = range(first, count);
                    let may = |page: &PageIndex| model.state(*page).is_some_and(claimable);
                    let first = pages.iter().find(may);
                    let expected = first.map(|first| {
                        let run = (first.0..pages.end().0).map(PageIndex).take_while(may);
                        PageRange::new(first, to_u64(run.count()))
                    });
                    let guard = map.claim_arrived(pages);
                    prop_assert_eq!(guard.as_ref().map(ClaimGuard::pages), expected);
                    std::mem::forget(guard);
                    if let Some(run) = expected {
                        model.claim(run);
                        owned.push(run);
                    }
                }
                Step::Pend(page, window) => {
                    let page = PageIndex(page);
                    let window = PageRange::window(page, window);
                    let run = model.run(page, window);
                    let expected = match model.state(page) {
                        None => Pend::Outside,
                        Some(PageState::Absent) => {
                            for page in run.iter() {
                                model.get(page).unwrap().state = PageState::Pending;
                            }
                            Pend::Made(run)
                        }
                        Some(state) => Pend::Lost(state),
                    };
                    prop_assert_eq!(map.pend_run(page, window), expected);
                }
                Step::Unpend(first, count) => {
                    for page in range(first, count).iter() {
                        match model.get(page) {
                            Some(page) if page.state == PageState::Pending => *page = FRESH,
                            Some(page) if page.origin == PageState::Pending => {
                                page.origin = PageState::Absent;
                            }
                            _ => {}
                        }
                    }
                    map.unpend(range(first, count));
                }
                Step::Finish(at, settled) => {
                    let Some(pages) = take(&mut owned, at) else { continue };
                    let wake = model.leave(pages, |page| {
                        page.state = PageState::of(settled.byte());
                        true
                    });
                    let guard = ClaimGuard::new(&map, pages, true);
                    prop_assert_eq!(guard.finish(settled).is_wanted(), wake);
                }
                Step::Abandon(at) => {
                    let Some(pages) = take(&mut owned, at) else { continue };
                    let wake = model.leave(pages, |_| true);
                    prop_assert_eq!(ClaimGuard::new(&map, pages, true).abandon().is_wanted(), wake);
                }
                Step::Drop(at) => {
                    let Some(pages) = take(&mut owned, at) else { continue };
                    model.leave(pages, |_| true);
                    drop(ClaimGuard::new(&map, pages, true));
                }
                Step::Split(at, count) => {
                    let Some(pages) = take(&mut owned, at) else { continue };
                    let (head, tail) = ClaimGuard::new(&map, pages, true).split_at(count);
                    owned.extend([head.pages(), tail.pages()]);
                    std::mem::forget((head, tail));
                }
                Step::WantWake(page) => {
                    let page = PageIndex(page);
                    let expected = model.state(page);
                    if let Some(page) = model.get(page) {
                        page.wake |= page.state == PageState::Installing;
                    }
                    prop_assert_eq!(map.want_wake(page), expected);
                }
                Step::Remove(page) | Step::Poison(page) => {
                    let page = PageIndex(page);
                    let (removal, to) = match step {
                        Step::Remove(_) => (map.remove(page), PageState::Removed),
                        _ => (map.poison(page), PageState::Poisoned),
                    };
                    let expected = match model.get(page) {
                        None => Removal::Outside,
                        Some(page) if page.state == PageState::Installing => Removal::Installing,
                        Some(page) if page.state == PageState::Poisoned => Removal::Poisoned,
                        Some(page) => {
                            let before = std::mem::replace(page, Page { state: to, ..FRESH });
                            done(before.state)
                        }
                    };
                    prop_assert_eq!(removal, expected);
                }
                Step::Handover => {
                    owned.clear();
                    for page in &mut model.0 {
                        let state = if page.state.is_settled() {
                            page.state
                        } else {
                            PageState::Absent
                        };
                        *page = Page { state, ..FRESH };
                    }
                    let image = PageMapImage::decode(&map.image().encode()).unwrap();
                    map = PageMap::new(PAGES).unwrap();
                    map.import(&image).unwrap();
                }
            }
            for (index, page) in model.0.iter().enumerate() {
                let index = PageIndex(to_u64(index));
                prop_assert_eq!(map.state(index), Some(page.state));
                prop_assert_eq!(map.is_wake_wanted(index), page.wake);
            }
        }
    }
}
