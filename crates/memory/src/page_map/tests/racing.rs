//! Threads that race for the same pages.

use std::sync::Barrier;

use super::*;

/// How a racing thread ends its claims.
#[derive(Clone, Copy)]
struct Failing {
    /// One of this many claims is given back; 0: none.
    every: u64,
}

/// Checks that each page is installed exactly once, that no thread waits forever, and that each
/// recorded wake-up is issued for its own page.
fn race(pages: u64, threads: u64, around: u64, failing: Failing) {
    let map = PageMap::new(pages).unwrap();
    let counters = || -> Vec<AtomicU64> { (0..pages).map(|_| AtomicU64::new(0)).collect() };
    let (installs, content) = (counters(), counters());
    // Wake-ups recorded and issued, by page. One wake-up may serve several records.
    let (promised, given) = (counters(), counters());
    let attempts = AtomicU64::new(0);
    let start = Barrier::new(to_usize(threads));
    let count_wake = |pages: PageRange, wake: WakeWanted| {
        // Pages are finished one at a time, so that each wake-up is for one page.
        assert_eq!(pages.count(), 1);
        if wake.is_wanted() {
            given[pages.first().as_usize()].fetch_add(1, Ordering::Relaxed);
        }
    };
    let own = |guard: ClaimGuard<'_>| {
        let fails = failing.every != 0
            && attempts
                .fetch_add(1, Ordering::Relaxed)
                .is_multiple_of(failing.every);
        let mut rest = guard;
        while !rest.pages().is_empty() {
            let (one, after) = rest.split_at(1);
            rest = after;
            let page = one.pages();
            let at = page.first().as_usize();
            let wake = if fails {
                one.abandon()
            } else {
                installs[at].fetch_add(1, Ordering::Relaxed);
                content[at].store(page.first().0 + 1, Ordering::Relaxed);
                one.finish(Settled::Present)
            };
            count_wake(page, wake);
        }
    };
    let work = |thread: u64| {
        start.wait();
        for step in 0..pages {
            let page = PageIndex((step + thread % 2) % pages);
            let window = PageRange::window(page, around);
            while map.state(page) != Some(PageState::Present) {
                if thread.is_multiple_of(2) {
                    // A fault on a page that comes from a source: the request, then its arrival.
                    match map.pend_run(page, window) {
                        Pend::Made(pages) => {
                            if step.is_multiple_of(5) {
                                map.unpend(PageRange::single(page));
                            }
                            let mut rest = pages;
                            while let Some(guard) = map.claim_arrived(rest) {
                                let end = guard.pages().end();
                                rest = PageRange::new(end, rest.end().0 - end.0);
                                own(guard);
                            }
                            // Pages that another thread gave back meanwhile are delivered again by that
                            // thread.
                            continue;
                        }
                        Pend::Lost(_) => {}
                        Pend::Outside => panic!("{page}"),
                    }
                }
                match map.claim_run(page, window) {
                    Claim::Won(guard) => own(guard),
                    Claim::Lost(PageState::Installing) => {
                        let is_reader = thread.is_multiple_of(3);
                        if is_reader && map.want_wake(page) == Some(PageState::Installing) {
                            promised[page.as_usize()].fetch_add(1, Ordering::Relaxed);
                        }
                        map.wait(page, Duration::from_millis(1));
                    }
                    Claim::Lost(_) => {}
                    Claim::Outside => panic!("{page}"),
                }
            }
            // A thread that sees Present also sees the content.
            assert_eq!(content[page.as_usize()].load(Ordering::Relaxed), page.0 + 1);
        }
    };
    thread::scope(|scope| {
        let work = &work;
        for thread in 0..threads {
            scope.spawn(move || work(thread));
        }
    });
    for page in map_range(&map).iter() {
        let of = |counters: &[AtomicU64]| counters[page.as_usize()].load(Ordering::Relaxed);
        assert_eq!(of(&installs), 1, "page {page}");
        let (promised, given) = (of(&promised), of(&given));
        assert!(
            given <= promised && (given > 0) == (promised > 0),
            "page {page}: {given} of {promised} wakes"
        );
        assert!(!map.is_wake_wanted(page), "page {page}");
    }
    assert_eq!(map.counts().present, pages);
}

#[test]
fn racing_threads_install_each_page_once_and_issue_each_wake() {
    race(20_000, 4, 1, Failing { every: 0 });
    race(20_000, 4, 16, Failing { every: 0 });
    race(20_000, 8, 4, Failing { every: 3 });
}

#[test]
fn a_waiter_is_always_woken() {
    // One owner and one waiter meet at the same page repeatedly; a lost wake-up would show as a wait of
    // LONG. The sum of all waits may exceed LONG where processors are slow or busy.
    const ROUNDS: u32 = 10_000;
    let map = PageMap::new(1).unwrap();
    let page = PageIndex(0);
    let meet = Barrier::new(2);
    thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..ROUNDS {
                let guard = won(claim(&map, page));
                meet.wait();
                drop(guard);
                meet.wait();
            }
        });
        for _ in 0..ROUNDS {
            meet.wait();
            let begun = Instant::now();
            assert_eq!(map.wait(page, LONG), Some(PageState::Absent));
            assert!(begun.elapsed() < LONG, "the waiter was not woken");
            meet.wait();
        }
    });
}
