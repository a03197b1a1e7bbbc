//! Histories of faults, prefetch, answers and failures: no page is lost, and no thread sleeps for ever.

use std::collections::BTreeSet;
use std::rc::Rc;

use pagetide_memory::Settled;
use proptest::prelude::*;

use super::*;

const FEW: u64 = 24;

#[derive(Clone, Copy, Debug)]
enum Step {
    Prefetch(u64, u64),
    /// A fault on a page, with a window around it.
    Fault(u64, u64, bool),
    Submit,
    /// The request with this number, of those in flight, is answered; the pages of a number are not installed.
    Answer(usize, u64, Miss),
    Miss(usize, Miss),
    /// Some other content for a run, as of a push. It may fail. Meanwhile an answer may come, and a thread may fall
    /// asleep on one of the pages.
    Claim(u64, u64, bool, Option<usize>, Option<u64>),
    Remove(u64),
    Wait(u64),
    Expire,
    Resume,
    Recall,
    DropBulk,
    Reconsider,
}

fn miss() -> impl Strategy<Value = Miss> {
    prop_oneof![
        Just(Miss::NotInstalled { is_lack: true }),
        Just(Miss::NotInstalled { is_lack: false }),
        Just(Miss::Busy),
    ]
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let run = || (0..FEW, 1..20u64);
    let index = || 0..20usize;
    let step = prop_oneof![
        4 => run().prop_map(|(first, count)| Step::Prefetch(first, count)),
        4 => (0..FEW, 0..4u32, any::<bool>())
            .prop_map(|(page, shift, asleep)| Step::Fault(page, 1 << shift, asleep)),
        8 => Just(Step::Submit),
        5 => (index(), 0..6u64, miss()).prop_map(|(at, bad, miss)| Step::Answer(at, bad, miss)),
        4 => (index(), prop_oneof![Just(Miss::Failed), Just(Miss::PoisonedAmongOthers)])
            .prop_map(|(at, miss)| Step::Miss(at, miss)),
        3 => (run(), any::<bool>(), prop::option::of(index()), prop::option::of(0..FEW)).prop_map(
            |((first, count), fails, at, asleep)| Step::Claim(first, count, fails, at, asleep)
        ),
        1 => (0..FEW).prop_map(Step::Remove),
        3 => (0..400u64).prop_map(Step::Wait),
        1 => Just(Step::Expire),
        1 => Just(Step::Resume),
        1 => Just(Step::Recall),
        1 => Just(Step::DropBulk),
        1 => Just(Step::Reconsider),
    ];
    prop::collection::vec(step, 0..120)
}

struct Model {
    book: Book,
    flying: Vec<RequestId>,
    /// Pages on which a thread sleeps.
    asleep: BTreeSet<u64>,
    /// Pages for which an exit waits.
    touched: BTreeSet<u64>,
}

impl Model {
    fn new() -> Self {
        let mut book = Book::new();
        book.map = Rc::new(PageMap::new(FEW).unwrap());
        Self {
            book,
            flying: Vec::new(),
            asleep: BTreeSet::new(),
            touched: BTreeSet::new(),
        }
    }

    fn take(&mut self, at: usize) -> Option<RequestId> {
        (!self.flying.is_empty()).then(|| self.flying.remove(at % self.flying.len()))
    }

    fn submit(&mut self) -> bool {
        let submission = self.book.submit();
        self.flying
            .extend(submission.map(|submission| submission.id));
        submission.is_some()
    }

    /// Threads on these pages are woken.
    fn settled(&mut self, pages: PageRange, entries: &Entries) -> Result<(), TestCaseError> {
        for page in pages.iter() {
            let asleep = entries
                .iter()
                .any(|entry| entry.pages.contains(page) && entry.wish.is_asleep());
            prop_assert_eq!(asleep, self.asleep.remove(&page.0), "page {}", page);
            self.touched.remove(&page.0);
        }
        Ok(())
    }

    fn install(&mut self, pages: PageRange, fails: bool) -> Result<(), TestCaseError> {
        let map = Rc::clone(&self.book.map);
        let mut rest = pages;
        while let Some(guard) = map.claim_arrived(rest) {
            let run = guard.pages();
            let entries = self.book.missing.take(run);
            // A thread falls asleep on the page meanwhile.
            let asleep = (fails && run.first().0 % 2 == 0).then_some(run.first());
            if fails {
                if let Some(page) = asleep {
                    let _ = map.want_wake(page);
                }
                let woken = self.book.missing.put_back(&map, guard, entries);
                if let Some(page) = asleep.filter(|page| !woken.contains(page)) {
                    self.asleep.insert(page.0);
                }
            } else {
                let _ = guard.finish(Settled::Present);
                self.settled(run, &entries)?;
            }
            rest = PageRange::new(run.end(), rest.end().0 - run.end().0);
        }
        Ok(())
    }

    fn answer(&mut self, id: RequestId, bad: u64, miss: Miss) -> Result<(), TestCaseError> {
        let job = self.book.missing.requests.answer(id).unwrap();
        let mut failed = false;
        for page in job.pages.iter() {
            let is_bad = bad > 0 && page.0 % 6 >= bad;
            failed |= is_bad && !self.book.state(page.0).is_settled();
            self.install(PageRange::single(page), is_bad)?;
        }
        let miss = failed.then_some(miss);
        let (map, now) = (&self.book.map, self.book.now);
        self.book.missing.answered(map, job, !failed, miss, now);
        Ok(())
    }

    fn step(&mut self, step: Step) -> Result<(), TestCaseError> {
        match step {
            Step::Prefetch(first, count) => drop(self.book.ahead(first, count)),
            Step::Fault(page, window, is_asleep) => {
                let wish = if is_asleep {
                    Wish::Asleep
                } else {
                    Wish::Touched
                };
                let window = PageRange::window(PageIndex(page), window);
                match self.book.fault_in(page, window, wish) {
                    Ok(_) if is_asleep => drop(self.asleep.insert(page)),
                    Ok(_) => drop(self.touched.insert(page)),
                    Err(state) => prop_assert!(state.is_settled()),
                }
            }
            Step::Submit => drop(self.submit()),
            Step::Answer(at, bad, miss) => {
                if let Some(id) = self.take(at) {
                    self.answer(id, bad, miss)?;
                }
            }
            Step::Miss(at, miss) => {
                if let Some(id) = self.take(at) {
                    self.book.miss(id, miss);
                }
            }
            Step::Claim(first, count, fails, at, asleep) => {
                let map = Rc::clone(&self.book.map);
                let Some(guard) = map.claim_arrived(run(first, count)) else {
                    return self.check();
                };
                let pages = guard.pages();
                let entries = self.book.missing.take(pages);
                // A request is answered meanwhile.
                if let Some(id) = at.and_then(|at| self.take(at)) {
                    self.answer(id, 0, Miss::Busy)?;
                }
                let asleep = asleep.map(|nth| PageIndex(pages.first().0 + nth % pages.count()));
                if let Some(page) = asleep {
                    prop_assert_eq!(map.want_wake(page), Some(PageState::Installing));
                }
                if fails {
                    let woken = self.book.missing.put_back(&map, guard, entries);
                    if let Some(page) = asleep.filter(|page| !woken.contains(page)) {
                        self.asleep.insert(page.0);
                    }
                    prop_assert!(woken.iter().all(|&page| Some(page) == asleep));
                } else {
                    prop_assert_eq!(guard.finish(Settled::Present).is_wanted(), asleep.is_some());
                    self.settled(pages, &entries)?;
                }
            }
            Step::Remove(page) => {
                let single = run(page, 1);
                let _ = self.book.map.remove(PageIndex(page));
                let entries = self.book.missing.take(single);
                self.settled(single, &entries)?;
            }
            Step::Wait(ms) => self.book.now += Duration::from_millis(ms),
            Step::Expire => {
                self.book.now += POLICY.deadline;
                while let Some(id) = self.book.missing.requests.next_expired(self.book.now) {
                    self.book.miss(id, Miss::Failed);
                }
                self.flying.clear();
            }
            Step::Resume => self.book.missing.requests.resume(),
            Step::Recall => {
                self.flying.clear();
                self.book.missing.requests.recall();
            }
            Step::DropBulk => {
                let cancelled = self.book.missing.drop_bulk(&self.book.map);
                self.flying.retain(|id| !cancelled.contains(id));
            }
            Step::Reconsider => self.book.missing.reconsider(&self.book.map),
        }
        self.check()
    }

    /// Each page is in one place, and so is each thread that waits.
    fn check(&self) -> Result<(), TestCaseError> {
        let missing = &self.book.missing;
        for page in 0..FEW {
            let entry = missing.pages.entry(PageIndex(page));
            let state = self.book.state(page);
            prop_assert_eq!(
                entry.is_some(),
                state == PageState::Pending,
                "page {}",
                page
            );
            let wish = entry.map(|entry| entry.wish);
            let is_asleep = wish.is_some_and(Wish::is_asleep);
            prop_assert_eq!(is_asleep, self.asleep.contains(&page), "page {}", page);
            if self.touched.contains(&page) {
                prop_assert!(wish.is_some_and(Wish::is_waiting), "page {}", page);
            }
            match entry.map(|entry| (entry.job, entry.wish.is_waiting())) {
                Some((Some(job), is_waiting)) => {
                    prop_assert!(missing.requests.is_alive(job), "page {page} is lost");
                    prop_assert!(!is_waiting || job.urgency == Urgency::Urgent);
                }
                Some((None, is_waiting)) => prop_assert!(!is_waiting, "page {page} is lost"),
                None => {}
            }
        }
        Ok(())
    }
}

proptest! {
    /// In every history, what a thread waits for is requested; and when the source finally answers, it arrives.
    #[test]
    fn no_page_is_lost(steps in steps()) {
        let mut model = Model::new();
        for step in steps {
            model.step(step)?;
        }
        model.book.missing.requests.resume();
        model.book.missing.reconsider(&model.book.map);
        model.book.now += POLICY.longest_backoff;
        loop {
            while model.submit() {}
            let Some(id) = model.take(0) else { break };
            model.answer(id, 0, Miss::Busy)?;
            model.check()?;
        }
        prop_assert_eq!(model.book.missing.pages.iter().count(), 0);
        prop_assert!(model.asleep.is_empty() && model.touched.is_empty());
        let requests = &model.book.missing.requests;
        prop_assert_eq!((requests.waiting(), requests.in_flight_bytes()), (0, 0));
    }
}
