//! The book compared with a plain list of pages, in histories of one thread.

use std::rc::Rc;

use proptest::prelude::*;

use super::*;
use crate::page_map::{Claim, Settled};

const PAGES: u64 = 12;

fn run(first: u64, count: u64) -> PageRange {
    PageRange::new(PageIndex(first), count)
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Touch(u64, u64, Wish),
    Plan(u64, u64),
    SetJob(u64, u64, Option<u8>, Option<u8>),
    Withdraw(u64, u64),
    /// Claims a run, and then installs it, or gives it back; a thread sleeps on the page meanwhile.
    Claim(u64, End, Option<u64>),
    Remove(u64),
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    Finish,
    PutBack,
    Keep,
}

fn step() -> impl Strategy<Value = Step> {
    let window = || (0..PAGES, 1..6u64);
    let wish = prop_oneof![
        Just(Wish::Touched),
        Just(Wish::Asleep),
        Just(Wish::AsleepForGood)
    ];
    let job = || prop_oneof![Just(None), (0..3u8).prop_map(Some)];
    let end = prop_oneof![Just(End::Finish), Just(End::PutBack), Just(End::Keep)];
    prop_oneof![
        4 => (window(), wish).prop_map(|((page, count), wish)| Step::Touch(page, count, wish)),
        3 => window().prop_map(|(page, count)| Step::Plan(page, count)),
        3 => (window(), job(), job())
            .prop_map(|((first, count), from, to)| Step::SetJob(first, count, from, to)),
        1 => window().prop_map(|(first, count)| Step::Withdraw(first, count)),
        4 => (0..PAGES, end, prop::option::of(0..PAGES))
            .prop_map(|(first, end, asleep)| Step::Claim(first, end, asleep)),
        1 => (0..PAGES).prop_map(Step::Remove),
    ]
}

/// A page: its entry, if it has one.
type Page = Option<(Wish, Option<u8>)>;

struct Model {
    map: Rc<PageMap>,
    book: MissingPages<u8>,
    pages: Vec<Page>,
    settled: Vec<bool>,
}

impl Model {
    fn new() -> Self {
        let pages = usize::try_from(PAGES).unwrap();
        Self {
            map: Rc::new(PageMap::new(PAGES).unwrap()),
            book: MissingPages::default(),
            pages: vec![None; pages],
            settled: vec![false; pages],
        }
    }

    fn page(&mut self, page: PageIndex) -> &mut Page {
        &mut self.pages[page.as_usize()]
    }

    fn is_absent(&self, page: PageIndex) -> bool {
        !self.settled[page.as_usize()] && self.pages[page.as_usize()].is_none()
    }

    fn step(&mut self, step: Step) -> Result<(), TestCaseError> {
        let all = run(0, PAGES);
        match step {
            Step::Touch(page, count, wish) => {
                let (page, window) = (PageIndex(page), run(page, count));
                let was_absent = self.is_absent(page);
                let before = self.pages[page.as_usize()];
                match self.book.touch(&self.map, page, window, wish) {
                    Touch::New(pages) => {
                        prop_assert!(was_absent && pages.contains(page));
                        for near in pages.iter() {
                            prop_assert!(self.is_absent(near));
                            *self.page(near) = Some((Wish::Near, None));
                        }
                        *self.page(page) = Some((wish, None));
                    }
                    Touch::Known(entry) => {
                        prop_assert_eq!(Some((entry.wish, entry.job)), before);
                        *self.page(page) = before.map(|(its, job)| (its.max(wish), job));
                    }
                    Touch::Lost(state) => prop_assert!(state.is_settled()),
                    Touch::Outside => panic!("{page}"),
                }
            }
            Step::Plan(page, count) => {
                let (page, window) = (PageIndex(page), run(page, count));
                let is_absent = self.is_absent(page);
                let planned = self.book.plan(&self.map, page, window);
                prop_assert_eq!(planned.is_some(), is_absent);
                for page in planned.iter().flat_map(|pages| pages.iter()) {
                    *self.page(page) = Some((Wish::Ahead, None));
                }
            }
            Step::SetJob(first, count, from, to) => {
                self.book.set_job(run(first, count), from, to);
                for page in run(first, count).intersection(all).iter() {
                    if let Some((_, job)) = self.page(page)
                        && *job == from
                    {
                        *job = to;
                    }
                }
            }
            Step::Withdraw(first, count) => {
                let taken = self.book.withdraw(&self.map, run(first, count));
                self.take(run(first, count).intersection(all), &taken)?;
            }
            Step::Claim(first, end, asleep) => {
                let map = Rc::clone(&self.map);
                let Some(guard) = map.claim_arrived(run(first, PAGES)) else {
                    return Ok(());
                };
                let pages = guard.pages();
                let before: Vec<_> = pages.iter().map(|page| *self.page(page)).collect();
                let had_entry = before.iter().any(Option::is_some);
                prop_assert_eq!(guard.has_pending(), had_entry);
                let taken = self.book.take(pages);
                let middle = PageIndex(pages.first().0 + pages.count() / 2);
                let (head, tail) = split_entries(taken, middle);
                let is_head = |entry: &Entry<u8>| entry.pages.end() <= middle;
                prop_assert!(head.iter().all(is_head) && !tail.iter().any(is_head));
                let taken = [head, tail].concat();
                let asleep = asleep.map(PageIndex).filter(|&page| pages.contains(page));
                if let Some(page) = asleep {
                    prop_assert_eq!(self.map.want_wake(page), Some(PageState::Installing));
                }
                let mut raised = Vec::new();
                let wanted = match end {
                    End::Finish => guard.finish(Settled::Present).is_wanted(),
                    End::PutBack => {
                        let left = self.book.put_back(guard, taken.clone());
                        prop_assert!(left.wake.iter().all(|&page| Some(page) == asleep));
                        raised = left.raised;
                        !left.wake.is_empty()
                    }
                    End::Keep => {
                        raised = self.book.keep(guard, taken.clone());
                        false
                    }
                };
                if end == End::Finish {
                    prop_assert_eq!(wanted, asleep.is_some());
                    self.take(pages, &taken)?;
                    for page in pages.iter() {
                        self.settled[page.as_usize()] = true;
                    }
                    return self.check();
                }
                let Some(page) = asleep else {
                    prop_assert!(!wanted && raised.is_empty());
                    return self.check();
                };
                let its = self.page(page);
                let is_new = match *its {
                    Some((wish, _)) => !wish.is_waiting(),
                    None => end == End::Keep,
                };
                prop_assert_eq!(raised, if is_new { vec![page] } else { Vec::new() });
                match its {
                    Some((wish, _)) => *wish = (*wish).max(Wish::Asleep),
                    None if end == End::Keep => *its = Some((Wish::Asleep, None)),
                    None => prop_assert!(wanted),
                }
            }
            Step::Remove(page) => {
                let page = PageIndex(page);
                let _ = self.map.remove(page);
                let taken = self.book.take(PageRange::single(page));
                self.take(PageRange::single(page), &taken)?;
                self.settled[page.as_usize()] = true;
            }
        }
        self.check()
    }

    /// These entries were taken out, and no others.
    fn take(&mut self, pages: PageRange, taken: &[Entry<u8>]) -> Result<(), TestCaseError> {
        let mut found = vec![None; self.pages.len()];
        for entry in taken {
            for page in entry.pages.iter() {
                found[page.as_usize()] = Some((entry.wish, entry.job));
            }
        }
        for page in pages.iter() {
            prop_assert_eq!(found[page.as_usize()], self.page(page).take());
        }
        Ok(())
    }

    fn check(&mut self) -> Result<(), TestCaseError> {
        let mut end = 0;
        for entry in self.book.iter() {
            prop_assert!(entry.pages.first().0 >= end && !entry.pages.is_empty());
            end = entry.pages.end().0;
        }
        for page in run(0, PAGES).iter() {
            let entry = self.book.entry(page).map(|entry| (entry.wish, entry.job));
            prop_assert_eq!(entry, *self.page(page), "page {}", page);
            let state = self.map.state(page).unwrap();
            prop_assert_eq!(state == PageState::Pending, entry.is_some());
            prop_assert_eq!(state.is_settled(), self.settled[page.as_usize()]);
            let within = self.book.within(PageRange::single(page)).next();
            prop_assert_eq!(within.map(|entry| (entry.wish, entry.job)), entry);
        }
        Ok(())
    }
}

proptest! {
    /// A page is Pending if, and only if, it is in the book, with what was entered last.
    #[test]
    fn the_book_and_the_map_agree(steps in prop::collection::vec(step(), 1..120)) {
        let mut model = Model::new();
        for step in steps {
            model.step(step)?;
        }
    }
}

/// A claim by a fault takes no neighbours that are Pending.
#[test]
fn a_claim_takes_the_entry_of_its_page_alone() {
    let map = PageMap::new(4).unwrap();
    let mut book = MissingPages::<u8>::default();
    let planned = book.plan(&map, PageIndex(0), run(0, 4));
    assert_eq!(planned, Some(run(0, 4)));
    let Claim::Won(guard) = map.claim_run(PageIndex(2), run(0, 4)) else {
        panic!("nobody owns it");
    };
    assert_eq!(guard.pages(), run(2, 1));
    let taken = book.take(guard.pages());
    assert_eq!(taken.len(), 1);
    assert_eq!(taken[0].pages, run(2, 1));
    let left: Vec<_> = book.iter().map(|entry| entry.pages).collect();
    assert_eq!(left, [run(0, 2), run(3, 1)]);
    assert_eq!(book.put_back(guard, taken), PutBack::default());
    assert_eq!(map.counts().pending, 4);
}
