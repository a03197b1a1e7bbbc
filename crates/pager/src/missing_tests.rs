//! What becomes of pages whose requests fail, and that none is lost.

use std::rc::Rc;
use std::time::Duration;

use super::*;
use crate::requests::tests::{LIMITS, PAGE, POLICY, run};

#[path = "missing_tests/model.rs"]
mod model;

const PAGES: u64 = 128;

struct NoSource;

impl Source for NoSource {
    fn submit(&self, _: crate::Request) {}
}

/// A region's book, its map, and the time.
struct Book {
    missing: Missing,
    map: Rc<PageMap>,
    now: Instant,
}

impl Book {
    fn new() -> Self {
        let requests = Requests::new(LIMITS, POLICY, PAGE);
        Self {
            missing: Missing::new(requests, Some(Arc::new(NoSource))),
            map: Rc::new(PageMap::new(PAGES).unwrap()),
            now: Instant::now(),
        }
    }

    fn fault_in(&mut self, page: u64, window: PageRange, wish: Wish) -> Result<bool, PageState> {
        self.missing
            .request(&self.map, PageIndex(page), window, wish)
    }

    fn fault(&mut self, page: u64) -> Result<bool, PageState> {
        self.fault_in(page, run(page, 1), Wish::Asleep)
    }

    fn ahead(&mut self, first: u64, count: u64) -> Option<PageRange> {
        let window = run(first, count);
        self.missing
            .request_ahead(&self.map, PageIndex(first), window)
    }

    fn submit(&mut self) -> Option<Submission> {
        self.missing.next_submission(self.now)
    }

    /// The next request, whenever it is due.
    fn next(&mut self) -> Option<Submission> {
        loop {
            if let Some(submission) = self.submit() {
                return Some(submission);
            }
            self.now = self.missing.requests.next_deadline(self.now)?;
        }
    }

    fn miss(&mut self, id: RequestId, miss: Miss) -> AfterMiss {
        self.missing
            .missed(&self.map, id, miss, self.now)
            .unwrap()
            .1
    }

    /// Content comes, and is installed but for those pages for which `miss` says why not. Returns whether a thread is
    /// woken.
    fn answer(
        &mut self,
        id: RequestId,
        bad: impl Fn(u64) -> bool,
        miss: Miss,
    ) -> (AfterMiss, bool) {
        let job = self.missing.requests.answer(id).unwrap();
        let (mut woken, mut installed, mut failed) = (false, false, false);
        for page in job.pages.iter() {
            let Some(guard) = self.map.claim_arrived(PageRange::single(page)) else {
                continue;
            };
            let entries = self.missing.take(guard.pages());
            if bad(page.0) {
                failed = true;
                woken |= !self.missing.put_back(&self.map, guard, entries).is_empty();
            } else {
                installed = true;
                woken |= guard.finish(pagetide_memory::Settled::Present).is_wanted();
                woken |= entries.iter().any(|entry| entry.wish.is_asleep());
            }
        }
        let miss = failed.then_some(miss);
        let after = self
            .missing
            .answered(&self.map, job, installed, miss, self.now);
        (after, woken)
    }

    fn deliver(&mut self, id: RequestId) -> bool {
        self.answer(id, |_| false, Miss::Failed).1
    }

    fn state(&self, page: u64) -> PageState {
        self.map.state(PageIndex(page)).unwrap()
    }

    fn set_aside(&self) -> Vec<u64> {
        let runs = self.missing.set_aside_runs();
        runs.flat_map(|run| run.iter().map(|page| page.0)).collect()
    }

    /// Submits everything until nothing is left to do. A request that has a page of `bad` fails; any other is
    /// answered. Returns the failures.
    fn fetch(&mut self, bad: impl Fn(u64) -> bool) -> u32 {
        let mut failures = 0;
        while let Some(submission) = self.next() {
            if submission.pages.iter().any(|page| bad(page.0)) {
                assert!(!self.miss(submission.id, Miss::Failed).stalled);
                failures += 1;
            } else {
                self.deliver(submission.id);
            }
        }
        failures
    }
}

#[test]
fn a_page_is_requested_once_and_urgently_once() {
    let mut book = Book::new();
    assert_eq!(book.ahead(2, 4), Some(run(2, 4)));
    assert_eq!(book.ahead(3, 4), None);
    assert_eq!(book.fault(3), Ok(true));
    assert_eq!(book.fault(3), Ok(false));
    // Around a fault, only pages that nobody has asked for.
    assert_eq!(book.fault_in(7, run(0, 8), Wish::Touched), Ok(true));
    assert_eq!(book.fault_in(6, run(0, 8), Wish::Touched), Ok(false));
    let urgent = [book.submit().unwrap(), book.submit().unwrap()];
    assert_eq!(urgent.map(|request| request.pages), [run(3, 1), run(6, 2)]);
    let bulk = book.submit().unwrap();
    assert_eq!(bulk.pages, run(2, 4));
    // Prefetch's request brings the page first: the other one is over.
    assert!(book.deliver(bulk.id), "the thread that slept is woken");
    assert_eq!(book.fault(3), Err(PageState::Present));
    assert!(book.miss(urgent[0].id, Miss::Failed).is_moot);
    assert!(!book.deliver(urgent[1].id), "no thread sleeps there");
    assert_eq!(book.submit(), None);
    assert_eq!(book.missing.pages.iter().count(), 0);
}

#[test]
fn a_failed_run_is_narrowed_to_the_pages_that_threads_wait_for() {
    for miss in [Miss::Failed, Miss::PoisonedAmongOthers] {
        let mut book = Book::new();
        assert_eq!(book.fault_in(6, run(4, 4), Wish::Asleep), Ok(true));
        // Another thread touches a neighbour.
        assert_eq!(book.fault_in(4, run(4, 4), Wish::Touched), Ok(false));
        let request = book.submit().unwrap();
        assert_eq!(request.pages, run(4, 4));
        assert_eq!(book.miss(request.id, miss), AfterMiss::default());
        let states = [4, 5, 6, 7].map(|page| book.state(page));
        let (absent, pending) = (PageState::Absent, PageState::Pending);
        assert_eq!(states, [pending, absent, pending, absent]);
        if miss == Miss::Failed {
            assert_eq!(book.submit(), None);
            book.now += POLICY.first_backoff;
        }
        let again = [book.submit().unwrap(), book.submit().unwrap()];
        assert_eq!(again.map(|request| request.pages), [run(4, 1), run(6, 1)]);
        assert_eq!(book.submit(), None);
        assert!(!book.deliver(again[0].id) && book.deliver(again[1].id));
    }
}

#[test]
fn after_the_last_attempt_the_region_is_stalled_until_it_is_resumed() {
    let mut book = Book::new();
    book.fault(1).unwrap();
    for attempt in 1..=POLICY.attempts {
        let request = book.next().unwrap();
        let after = book.miss(request.id, Miss::Failed);
        assert_eq!(after.stalled, attempt == POLICY.attempts);
    }
    assert_eq!(book.fault(2), Ok(true));
    assert_eq!(book.next(), None);
    // It is stalled once; all attempts are there again after a resume.
    book.missing.requests.resume();
    let (first, second) = (book.submit().unwrap(), book.submit().unwrap());
    assert_eq!((first.pages, second.pages), (run(1, 1), run(2, 1)));
    assert!(!book.miss(first.id, Miss::Failed).stalled);
    assert!(book.deliver(second.id));
    let last = book.next().unwrap();
    assert!(book.deliver(last.id));
}

#[test]
fn urgent_content_that_cannot_be_installed_stalls_the_region_and_wakes_nobody() {
    let mut book = Book::new();
    book.fault_in(5, run(4, 4), Wish::Asleep).unwrap();
    let request = book.submit().unwrap();
    let miss = Miss::NotInstalled { is_lack: true };
    let (_, woken) = book.answer(request.id, |page| page >= 5, miss);
    assert!(!woken && book.missing.requests.is_stalled());
    assert_eq!(book.next(), None);
    let states = [4, 5, 6].map(|page| book.state(page));
    let expected = [PageState::Present, PageState::Pending, PageState::Absent];
    assert_eq!(states, expected);
    book.missing.requests.resume();
    let again = book.submit().unwrap();
    assert_eq!(again.pages, run(5, 1));
    assert!(book.deliver(again.id));
}

#[test]
fn content_that_comes_while_the_process_changes_its_memory_is_no_failure() {
    let mut book = Book::new();
    book.fault(5).unwrap();
    book.ahead(8, 4).unwrap();
    for _ in 0..2 * POLICY.attempts {
        for _ in 0..2 {
            let request = book.next().unwrap();
            book.answer(request.id, |_| true, Miss::Busy);
        }
    }
    assert!(!book.missing.requests.is_stalled() && book.set_aside().is_empty());
    assert_eq!(book.fetch(|_| false), 0);
    assert_eq!(book.map.counts().present, 5);
}

/// Another claim has the page when the content comes, and gives it back after the job has ended.
#[test]
fn an_entry_that_outlives_its_job_gets_another() {
    for is_ahead in [false, true] {
        let mut book = Book::new();
        match is_ahead {
            true => drop(book.ahead(3, 1)),
            false => assert_eq!(book.fault(3), Ok(true)),
        }
        let request = book.submit().unwrap();
        let guard = book.map.claim_arrived(run(3, 1)).unwrap();
        let entries = book.missing.take(guard.pages());
        let job = book.missing.requests.answer(request.id).unwrap();
        let after = book.missing.answered(&book.map, job, false, None, book.now);
        assert!(after.is_moot);
        let wanted = book.missing.put_back(&book.map, guard, entries);
        assert!(wanted.is_empty());
        if is_ahead {
            assert_eq!(book.state(3), PageState::Absent);
            assert_eq!(book.submit(), None);
            continue;
        }
        let again = book.submit().unwrap();
        assert!(book.deliver(again.id));
    }
}

#[test]
fn one_bad_page_of_a_bulk_request_is_set_aside_and_the_rest_arrives() {
    for page in [0, 7, 15] {
        let mut book = Book::new();
        book.ahead(0, 16);
        book.ahead(16, 16);
        let failures = book.fetch(|at| at == page);
        // Four halvings take none of the page's attempts.
        assert_eq!(failures, 4 + POLICY.attempts, "page {page}");
        assert_eq!(book.set_aside(), [page]);
        assert!(!book.missing.requests.is_stalled() && !book.missing.requests.breaker.is_open());
        assert_eq!(book.map.counts().present, 31);
        assert_eq!(book.ahead(page, 1), None);
        assert!(book.missing.leaves_out(run(page, 1)) && book.missing.has_no_job(PageIndex(page)));
        // A thread that touches it has all attempts.
        assert_eq!(book.fault(page), Ok(true));
        assert!(book.set_aside().is_empty());
        for attempt in 1..=POLICY.attempts {
            let request = book.next().unwrap();
            let after = book.miss(request.id, Miss::Failed);
            assert_eq!(after.stalled, attempt == POLICY.attempts);
        }
    }
}

#[test]
fn another_prefetch_tries_again_what_was_set_aside() {
    let mut book = Book::new();
    book.ahead(0, 16);
    book.fetch(|page| page == 3 || page == 4);
    assert_eq!(book.set_aside(), [3, 4]);
    assert!(book.missing.leaves_out(run(4, 9)) && !book.missing.leaves_out(run(5, 9)));
    let before = book.missing.reconsidered();
    book.missing.begin_prefetch(&book.map);
    assert_ne!(book.missing.reconsidered(), before);
    assert!(book.set_aside().is_empty());
    assert_eq!(book.ahead(3, 8), Some(run(3, 2)));
    book.fetch(|_| true);
    assert_eq!(book.set_aside(), [3, 4]);
}

#[test]
fn lost_pages_are_identified_without_counting_as_failures() {
    let mut book = Book::new();
    book.ahead(0, 16);
    let (mut asked, mut poisoned) = (0, Vec::new());
    while let Some(request) = book.submit() {
        asked += 1;
        let has_it = request.pages.contains(PageIndex(11));
        if has_it && request.pages.count() > 1 {
            let after = book.miss(request.id, Miss::PoisonedAmongOthers);
            assert_eq!(after, AfterMiss::default());
            continue;
        }
        if has_it {
            poisoned.push(request.pages);
        }
        book.deliver(request.id);
    }
    assert_eq!(poisoned, [run(11, 1)]);
    assert_eq!(asked, 9);
}

#[test]
fn a_source_that_never_answers_ends_the_bulk_work() {
    let mut book = Book::new();
    let begun = book.now;
    for first in (0..64).step_by(16) {
        book.ahead(first, 16);
    }
    let failures = book.fetch(|_| true);
    assert!(book.missing.requests.breaker.is_open() && !book.missing.requests.is_stalled());
    assert_eq!(book.set_aside(), (0..64).collect::<Vec<_>>());
    assert!(failures < 64 * POLICY.attempts && book.now - begun < POLICY.deadline);
    // What comes later is tried once.
    assert!(book.missing.requests.has_bulk_room(16));
    book.ahead(100, 8);
    assert_eq!(book.fetch(|_| true), 1);
    assert!(book.set_aside().contains(&107));
    // An answer to anything closes the breaker, and all pages are tried again.
    let before = book.missing.reconsidered();
    book.fault(120).unwrap();
    let request = book.submit().unwrap();
    assert!(book.deliver(request.id));
    assert!(book.set_aside().is_empty() && book.missing.reconsidered() != before);
    book.ahead(0, 64);
    book.fetch(|_| true);
    // Another prefetch has all attempts again.
    book.missing.begin_prefetch(&book.map);
    assert!(!book.missing.requests.breaker.is_open() && book.set_aside().is_empty());
    book.ahead(0, 64);
    assert_eq!(book.fetch(|_| false), 0);
    assert_eq!(book.map.counts().present, 65);
}

/// The memory takes nothing, although the source answers.
#[test]
fn memory_that_takes_nothing_is_tried_seldom() {
    let mut book = Book::new();
    for first in (0..64).step_by(16) {
        book.ahead(first, 16);
    }
    let miss = Miss::NotInstalled { is_lack: true };
    let mut tried = 0;
    while let Some(request) = book.next() {
        tried += 1;
        book.answer(request.id, |_| true, miss);
    }
    assert!(book.missing.requests.breaker.is_open() && !book.missing.requests.is_stalled());
    assert_eq!(book.set_aside(), (0..64).collect::<Vec<_>>());
    assert!(tried < 64 * POLICY.attempts, "{tried}");
    // A thread's own request shows that it takes content again.
    book.fault(5).unwrap();
    let request = book.submit().unwrap();
    assert!(book.deliver(request.id));
    assert!(!book.missing.requests.breaker.is_open() && book.set_aside().is_empty());
}

/// Pages that other code has mapped say nothing of the memory for others.
#[test]
fn pages_that_are_not_the_pagers_do_not_open_the_breaker() {
    let mut book = Book::new();
    book.ahead(0, 100);
    let miss = Miss::NotInstalled { is_lack: false };
    while let Some(request) = book.next() {
        book.answer(request.id, |_| true, miss);
        assert!(!book.missing.requests.breaker.is_open());
    }
    assert_eq!(book.set_aside(), (0..100).collect::<Vec<_>>());
    assert!(book.missing.is_first_not_installed() && !book.missing.is_first_not_installed());
}

#[test]
fn what_only_prefetch_has_asked_for_is_dropped_with_it() {
    let mut book = Book::new();
    book.ahead(10, 16);
    book.fault(12).unwrap();
    let urgent = book.submit().unwrap();
    let bulk = book.submit().unwrap();
    book.ahead(40, 4);
    // Its content is being installed.
    let job = book.missing.requests.answer(bulk.id).unwrap();
    let guard = book.map.claim_arrived(run(14, 1)).unwrap();
    let entries = book.missing.take(guard.pages());
    assert_eq!(book.missing.drop_bulk(&book.map), []);
    let pending: Vec<_> = book.missing.pages.iter().map(|entry| entry.pages).collect();
    assert_eq!(pending, [run(12, 1)]);
    let _ = book.missing.put_back(&book.map, guard, entries);
    assert_eq!(book.state(14), PageState::Absent);
    let miss = Some(Miss::NotInstalled { is_lack: true });
    let after = book.missing.answered(&book.map, job, false, miss, book.now);
    assert_eq!(after, AfterMiss::default());
    assert!(book.deliver(urgent.id));
    assert_eq!(book.submit(), None);
}

#[test]
fn threads_without_a_job_are_woken_by_a_resume_but_not_those_on_foreign_pages() {
    let mut book = Book::new();
    for (page, wish) in [
        (3, Wish::Asleep),
        (4, Wish::AsleepForGood),
        (5, Wish::Asleep),
    ] {
        let left = book.missing.leave_asleep(&book.map, PageIndex(page), wish);
        assert_eq!(left, Ok(()));
    }
    book.missing.leave_at_settled(PageIndex(9));
    book.fault(7).unwrap();
    // A claim that fails wakes none of them.
    let guard = book.map.claim_arrived(run(3, 3)).unwrap();
    let entries = book.missing.take(guard.pages());
    let wanted = book.missing.put_back(&book.map, guard, entries);
    assert!(wanted.is_empty());
    let resumed = book.missing.take_resumable(&book.map);
    assert_eq!(resumed, [run(3, 1), run(5, 1), run(9, 1)]);
    assert_eq!([3, 4, 5, 7].map(|page| book.state(page)), {
        let (absent, pending) = (PageState::Absent, PageState::Pending);
        [absent, pending, absent, pending]
    });
    assert_eq!(book.missing.take_resumable(&book.map), []);
}

/// The owner may wake a thread for one page of its claim, and not for another.
#[test]
fn a_claim_that_fails_wakes_no_thread_on_a_foreign_page() {
    let mut book = Book::new();
    let wish = Wish::AsleepForGood;
    let left = book.missing.leave_asleep(&book.map, PageIndex(3), wish);
    assert_eq!(left, Ok(()));
    let map = Rc::clone(&book.map);
    let guard = map.claim_arrived(run(3, 2)).unwrap();
    let entries = book.missing.take(guard.pages());
    assert_eq!(map.want_wake(PageIndex(4)), Some(PageState::Installing));
    let woken = book.missing.put_back(&map, guard, entries);
    assert_eq!(woken, [PageIndex(4)]);
}

/// Nothing else would bring it.
#[test]
fn a_page_on_which_a_thread_falls_asleep_during_a_claim_is_requested_urgently() {
    for is_set_aside in [false, true] {
        let mut book = Book::new();
        book.ahead(3, 1);
        if is_set_aside {
            book.fetch(|_| true);
            assert_eq!(book.set_aside(), [3]);
        }
        let map = Rc::clone(&book.map);
        let guard = map.claim_arrived(run(3, 1)).unwrap();
        let entries = book.missing.take(guard.pages());
        assert_eq!(map.want_wake(PageIndex(3)), Some(PageState::Installing));
        assert_eq!(book.missing.put_back(&map, guard, entries), []);
        let request = book.submit().unwrap();
        assert_eq!(request.job.urgency, Urgency::Urgent);
        assert!(book.deliver(request.id));
    }
}

/// The fault found the page Absent, and could not install what the source had at once. Prefetch came in between.
#[test]
fn a_thread_that_is_left_asleep_does_not_rely_on_prefetch() {
    let mut book = Book::new();
    book.ahead(3, 4);
    let left = book
        .missing
        .leave_asleep(&book.map, PageIndex(4), Wish::Asleep);
    assert_eq!(left, Ok(()));
    let request = book.submit().unwrap();
    assert_eq!(
        (request.pages, request.job.urgency),
        (run(4, 1), Urgency::Urgent)
    );
    assert!(book.deliver(request.id));
}

#[test]
fn prefetch_requests_what_a_thread_was_left_asleep_on_but_no_foreign_page() {
    let mut book = Book::new();
    for (page, wish) in [(3, Wish::Asleep), (4, Wish::AsleepForGood)] {
        let left = book.missing.leave_asleep(&book.map, PageIndex(page), wish);
        assert_eq!(left, Ok(()));
    }
    assert_eq!(book.missing.outlook(PageIndex(3)), Outlook::Missing);
    let foreign = book.missing.outlook(PageIndex(4));
    assert_eq!(foreign, Outlook::LeftOut(PageIndex(5)));
    assert_eq!(book.ahead(4, 1), None);
    assert_eq!(book.ahead(3, 8), Some(run(3, 1)));
    let request = book.submit().unwrap();
    assert_eq!(request.job.urgency, Urgency::Urgent);
    assert!(book.deliver(request.id));
}

#[test]
fn a_neighbour_that_cannot_be_installed_stalls_nothing() {
    let mut book = Book::new();
    book.fault_in(5, run(4, 4), Wish::Asleep).unwrap();
    let request = book.submit().unwrap();
    let miss = Miss::NotInstalled { is_lack: false };
    let (after, woken) = book.answer(request.id, |page| page != 5, miss);
    assert!(woken && !after.stalled && !book.missing.requests.is_stalled());
    assert_eq!(book.map.counts().absent, PAGES - 1);
}

/// They are to be woken: a thread that settles such a page meanwhile finds no entry.
#[test]
fn a_book_that_is_emptied_names_its_sleepers() {
    let mut book = Book::new();
    book.fault(3).unwrap();
    book.fault_in(5, run(5, 1), Wish::Touched).unwrap();
    book.ahead(8, 4);
    let request = book.submit().unwrap();
    let (cancelled, asleep) = book.missing.clear(&book.map);
    assert_eq!((cancelled, asleep), (vec![request.id], vec![run(3, 1)]));
    assert_eq!(book.map.counts().absent, PAGES);
}
