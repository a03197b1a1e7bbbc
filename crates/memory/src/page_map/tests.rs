mod in_file;
mod model;
mod racing;

use std::sync::atomic::AtomicU64;
use std::thread;

use super::*;
use crate::convert::to_usize;

const PAGE: PageIndex = PageIndex(3);
const LONG: Duration = Duration::from_secs(60);

fn map() -> PageMap {
    PageMap::new(8).unwrap()
}

fn range(first: u64, count: u64) -> PageRange {
    PageRange::new(PageIndex(first), count)
}

fn claim(map: &PageMap, page: PageIndex) -> Claim<'_> {
    map.claim_run(page, PageRange::single(page))
}

fn pend(map: &PageMap, page: PageIndex) -> Pend {
    map.pend_run(page, PageRange::single(page))
}

fn won(claim: Claim<'_>) -> ClaimGuard<'_> {
    match claim {
        Claim::Won(guard) => guard,
        other => panic!("{other:?}"),
    }
}

fn lost(claim: Claim<'_>) -> PageState {
    match claim {
        Claim::Lost(state) => state,
        other => panic!("{other:?}"),
    }
}

fn done(before: PageState) -> Removal {
    Removal::Done { before }
}

#[test]
fn each_end_of_a_claim_has_its_state() {
    type End = fn(ClaimGuard<'_>) -> WakeWanted;
    let ends: [(End, Option<PageState>); 5] = [
        (
            |guard| guard.finish(Settled::Present),
            Some(PageState::Present),
        ),
        (|guard| guard.finish(Settled::Zero), Some(PageState::Zero)),
        (
            |guard| guard.finish(Settled::Poisoned),
            Some(PageState::Poisoned),
        ),
        (|guard| guard.abandon(), None),
        (
            |guard| {
                drop(guard);
                WakeWanted::No
            },
            None,
        ),
    ];
    for (end, settled) in ends {
        for is_pending in [false, true] {
            let map = map();
            if is_pending {
                assert_eq!(pend(&map, PAGE), Pend::Made(PageRange::single(PAGE)));
            }
            let before = map.state(PAGE).unwrap();
            assert_eq!(before == PageState::Pending, is_pending);
            let guard = won(claim(&map, PAGE));
            assert_eq!(map.state(PAGE), Some(PageState::Installing));
            assert_eq!(lost(claim(&map, PAGE)), PageState::Installing);
            assert!(map.claim_arrived(PageRange::single(PAGE)).is_none());
            assert_eq!(guard.has_pending(), is_pending);
            assert_eq!(pend(&map, PAGE), Pend::Lost(PageState::Installing));
            assert_eq!(end(guard), WakeWanted::No);
            assert_eq!(map.state(PAGE), Some(settled.unwrap_or(before)));
            if let Some(state) = settled {
                assert!(state.is_settled());
                assert_eq!(lost(claim(&map, PAGE)), state);
                assert_eq!(pend(&map, PAGE), Pend::Lost(state));
            }
        }
    }
}

#[test]
fn a_page_is_removed_and_poisoned_unless_it_has_an_owner() {
    let map = map();
    assert_eq!(map.remove(PAGE), done(PageState::Absent));
    assert_eq!(lost(claim(&map, PAGE)), PageState::Removed);
    assert_eq!(map.remove(PAGE), done(PageState::Removed));
    assert_eq!(map.poison(PAGE), done(PageState::Removed));
    assert_eq!(map.poison(PAGE), Removal::Poisoned);
    assert_eq!(map.remove(PAGE), Removal::Poisoned);

    let other = PageIndex(4);
    let guard = won(claim(&map, other));
    assert_eq!(map.remove(other), Removal::Installing);
    assert_eq!(map.poison(other), Removal::Installing);
    let _ = guard.finish(Settled::Present);
    assert_eq!(map.remove(other), done(PageState::Present));

    // The content will find the page removed.
    let asked = PageIndex(5);
    let _ = pend(&map, asked);
    assert_eq!(map.remove(asked), done(PageState::Pending));
    assert!(map.claim_arrived(PageRange::single(asked)).is_none());
}

#[test]
fn pages_outside_the_map_are_refused() {
    let map = map();
    for page in [PageIndex(8), PageIndex(u64::MAX)] {
        assert!(matches!(claim(&map, page), Claim::Outside));
        assert_eq!(pend(&map, page), Pend::Outside);
        assert_eq!(map.state(page), None);
        assert_eq!(map.want_wake(page), None);
        assert_eq!(map.wait(page, LONG), None);
        assert_eq!(map.remove(page), Removal::Outside);
        assert_eq!(map.poison(page), Removal::Outside);
        assert!(map.claim_arrived(PageRange::new(page, 3)).is_none());
        map.unpend(PageRange::new(page, 3));
        assert_eq!(map.next_absent(PageRange::new(page, 3)), None);
    }
    assert!(matches!(
        PageMap::new(u64::MAX),
        Err(PageMapError::OutOfMemory { .. })
    ));
}

#[test]
fn a_run_stops_at_the_window_the_map_and_owned_pages() {
    for by_entry in [false, true] {
        let map = PageMap::new(10).unwrap();
        let run = |page, window| {
            if by_entry {
                match map.pend_run(PageIndex(page), window) {
                    Pend::Made(pages) => pages,
                    other => panic!("{other:?}"),
                }
            } else {
                let guard = won(map.claim_run(PageIndex(page), window));
                let pages = guard.pages();
                std::mem::forget(guard);
                pages
            }
        };
        let _ = won(claim(&map, PageIndex(2))).finish(Settled::Present);
        assert_eq!(run(4, PageRange::window(PageIndex(4), 8)), range(3, 5));
        assert_eq!(run(9, PageRange::window(PageIndex(9), 8)), range(8, 2));
        assert_eq!(run(0, range(5, 2)), range(0, 1));
        let counts = map.counts();
        assert_eq!(counts.pending + counts.installing, 8);
    }
}

#[test]
fn pending_neighbours_are_not_claimed() {
    let map = map();
    let _ = map.pend_run(PageIndex(4), range(4, 2));
    let guard = won(map.claim_run(PageIndex(2), range(0, 8)));
    assert_eq!((guard.pages(), guard.has_pending()), (range(0, 4), false));
    // The page itself is claimed although it is Pending: its content is available.
    let asked = won(map.claim_run(PageIndex(5), range(0, 8)));
    assert_eq!((asked.pages(), asked.has_pending()), (range(5, 3), true));
    assert_eq!(map.state(PageIndex(4)), Some(PageState::Pending));
    assert_eq!(asked.abandon(), WakeWanted::No);
    assert_eq!(map.state(PageIndex(5)), Some(PageState::Pending));
    assert_eq!(map.state(PageIndex(6)), Some(PageState::Absent));
}

#[test]
fn a_page_becomes_pending_once() {
    let map = map();
    assert_eq!(map.pend_run(PAGE, range(2, 3)), Pend::Made(range(2, 3)));
    assert_eq!(pend(&map, PAGE), Pend::Lost(PageState::Pending));
    let rest = map.pend_run(PageIndex(7), range(0, 8));
    assert_eq!(rest, Pend::Made(range(5, 3)));
}

#[test]
fn content_that_arrives_is_claimed_where_it_is_missing() {
    let map = PageMap::new(12).unwrap();
    let _ = map.pend_run(PageIndex(1), range(1, 2));
    let _ = pend(&map, PageIndex(3));
    let _ = won(claim(&map, PageIndex(4))).finish(Settled::Present);
    let _ = map.remove(PageIndex(5));
    let owned = won(claim(&map, PageIndex(8)));
    let mut runs = Vec::new();
    let mut rest = range(0, 10);
    while let Some(guard) = map.claim_arrived(rest) {
        let pages = guard.pages();
        runs.push(pages);
        rest = PageRange::new(pages.end(), rest.end().0 - pages.end().0);
        let _ = guard.finish(Settled::Present);
    }
    assert_eq!(runs, [range(0, 4), range(6, 2), range(9, 1)]);
    assert!(map.claim_arrived(range(0, 10)).is_none());
    // A range that leaves the map is clipped to it.
    let last = map.claim_arrived(range(9, 100)).unwrap();
    assert_eq!(last.pages(), range(10, 2));
    drop((last, owned));
}

#[test]
fn pages_that_are_withdrawn_can_become_pending_again() {
    let map = map();
    let _ = map.pend_run(PageIndex(0), range(0, 6));
    let arrived = won(claim(&map, PageIndex(2)));
    map.unpend(range(0, 5));
    let states: Vec<_> = (0..6).map(|page| map.state(PageIndex(page))).collect();
    let absent = PageState::Absent;
    let (owned, pending) = (PageState::Installing, PageState::Pending);
    let expected = [absent, absent, owned, absent, absent, pending];
    assert_eq!(states, expected.map(Some));
    // Content that arrives nevertheless is installed.
    let late = map.claim_arrived(range(3, 2)).unwrap();
    assert_eq!(late.pages(), range(3, 2));
    drop((late, arrived));
    assert_eq!(pend(&map, PageIndex(0)), Pend::Made(range(0, 1)));
}

fn map_range(map: &PageMap) -> PageRange {
    range(0, map.pages())
}

#[test]
fn the_next_unsettled_page_is_found() {
    let map = map();
    let next = |pages| map.next_unsettled(pages);
    let absent = |page| Some((PageIndex(page), PageState::Absent));
    assert_eq!(next(range(0, 8)), absent(0));
    assert_eq!(next(range(5, u64::MAX)), absent(5));
    assert_eq!(next(range(8, 1)), None);
    assert_eq!(next(range(u64::MAX, 1)), None);
    for page in [0, 1, 4] {
        let _ = won(claim(&map, PageIndex(page))).finish(Settled::Present);
    }
    let _ = map.remove(PageIndex(2));
    assert_eq!(next(range(0, 8)), absent(3));
    assert_eq!(next(range(0, 3)), None);
    let guard = won(claim(&map, PAGE));
    assert_eq!(next(range(0, 8)), Some((PAGE, PageState::Installing)));
    assert_eq!(map.next_absent(range(0, 8)), Some(PageIndex(5)));
    assert_eq!(guard.finish(Settled::Zero), WakeWanted::No);
    assert_eq!(next(range(0, 8)), absent(5));
    let _ = pend(&map, PageIndex(5));
    assert_eq!(next(range(0, 8)), Some((PageIndex(5), PageState::Pending)));
    assert_eq!(map.next_absent(range(0, 8)), Some(PageIndex(6)));
    assert_eq!(map.next_absent(range(0, 6)), None);
}

#[test]
fn the_parts_of_a_split_run_settle_separately() {
    let map = map();
    let run = won(map.claim_run(PageIndex(0), range(0, 8)));
    let (head, tail) = run.split_at(3);
    assert_eq!(map.want_wake(PageIndex(1)), Some(PageState::Installing));
    assert_eq!(map.want_wake(PageIndex(7)), Some(PageState::Installing));
    assert_eq!(head.finish(Settled::Present), WakeWanted::Yes);
    let (nothing, tail) = tail.split_at(0);
    assert_eq!(nothing.finish(Settled::Zero), WakeWanted::No);
    assert_eq!(tail.abandon(), WakeWanted::Yes);
    let expected = StateCounts {
        present: 3,
        absent: 5,
        ..StateCounts::default()
    };
    assert_eq!(map.counts(), expected);
}

#[test]
fn an_owner_accepts_a_wake() {
    let map = map();
    for is_pending in [false, true] {
        let page = PageIndex(u64::from(is_pending));
        if is_pending {
            let _ = pend(&map, page);
        }
        let before = map.state(page);
        assert_eq!(map.want_wake(page), before);
        assert!(!map.is_wake_wanted(page));
        // Each end of the claim returns it.
        for is_given_back in [true, false] {
            let guard = won(claim(&map, page));
            assert_eq!(map.want_wake(page), Some(PageState::Installing));
            assert_eq!(map.want_wake(page), Some(PageState::Installing));
            assert!(map.is_wake_wanted(page));
            let wanted = match is_given_back {
                true => guard.abandon(),
                false => guard.finish(Settled::Present),
            };
            assert_eq!(wanted, WakeWanted::Yes);
            assert!(!map.is_wake_wanted(page));
        }
        assert_eq!(map.want_wake(page), Some(PageState::Present));
        assert!(!map.is_wake_wanted(page));
    }
}

/// Waits until a thread has begun to wait for `page`: its wait cannot be ended before.
fn until_parked(map: &PageMap, page: PageIndex) {
    while map.cell(page).unwrap().load(Ordering::Relaxed) & WAITERS == 0 {
        thread::yield_now();
    }
}

#[test]
fn each_end_of_an_owner_ends_the_wait() {
    type End = fn(ClaimGuard<'_>) -> WakeWanted;
    let ends: [(End, PageState); 3] = [
        (|guard| guard.finish(Settled::Present), PageState::Present),
        (|guard| guard.abandon(), PageState::Absent),
        (
            |guard| {
                drop(guard);
                WakeWanted::No
            },
            PageState::Absent,
        ),
    ];
    for (end, state) in ends {
        for is_pending in [false, true] {
            let map = map();
            if is_pending {
                let _ = pend(&map, PAGE);
            }
            let guard = won(claim(&map, PAGE));
            thread::scope(|scope| {
                // A thread that comes later would wait on.
                let count = if is_pending { 1 } else { 4 };
                let waiters: Vec<_> = (0..count)
                    .map(|_| scope.spawn(|| map.wait(PAGE, LONG)))
                    .collect();
                until_parked(&map, PAGE);
                let wake = end(guard);
                assert_eq!(wake, WakeWanted::No, "a parked thread needs no UFFDIO_WAKE");
                let state = match state {
                    // A waiter checks again whether its wish is in the book.
                    PageState::Absent if is_pending => PageState::Pending,
                    state => state,
                };
                for waiter in waiters {
                    assert_eq!(waiter.join().unwrap(), Some(state));
                }
            });
        }
    }
}

#[test]
fn each_end_of_an_entry_ends_the_wait() {
    type End = fn(&PageMap);
    let ends: [(End, PageState); 4] = [
        (
            |map| {
                let guard = map.claim_arrived(range(0, 8)).unwrap();
                let _ = guard.finish(Settled::Present);
            },
            PageState::Present,
        ),
        (|map| map.unpend(range(0, 8)), PageState::Absent),
        (
            |map| assert_eq!(map.remove(PAGE), done(PageState::Pending)),
            PageState::Removed,
        ),
        (
            |map| assert_eq!(map.poison(PAGE), done(PageState::Pending)),
            PageState::Poisoned,
        ),
    ];
    for (end, state) in ends {
        let map = map();
        let _ = pend(&map, PAGE);
        thread::scope(|scope| {
            let waiter = scope.spawn(|| map.wait(PAGE, LONG));
            until_parked(&map, PAGE);
            end(&map);
            assert_eq!(waiter.join().unwrap(), Some(state));
        });
    }
}

#[test]
fn waiting_ends_when_all_threads_are_woken() {
    let map = map();
    let _ = pend(&map, PAGE);
    let epoch = map.epoch();
    thread::scope(|scope| {
        let waiter = scope.spawn(|| map.wait(PAGE, LONG));
        until_parked(&map, PAGE);
        map.notify_all();
        assert_eq!(waiter.join().unwrap(), Some(PageState::Pending));
    });
    // A thread that read the epoch before does not wait at all.
    assert_eq!(map.wait_since(PAGE, epoch, LONG), Some(PageState::Pending));
}

#[test]
fn waiting_ends_with_the_timeout() {
    let map = map();
    let _guard = won(claim(&map, PAGE));
    let start = Instant::now();
    assert_eq!(
        map.wait(PAGE, Duration::from_millis(20)),
        Some(PageState::Installing)
    );
    assert!(start.elapsed() >= Duration::from_millis(20));
    assert_eq!(map.wait(PageIndex(0), LONG), Some(PageState::Absent));
}

/// Memory that is only claimed costs nothing: a client of a server may claim a lot.
#[test]
fn a_map_takes_memory_where_it_is_touched() {
    // As for 1 TiB.
    const PAGES: u64 = 256 << 20;
    let before = resident_bytes();
    let map = PageMap::new(PAGES).unwrap();
    for page in [0, PAGES / 2, PAGES - 1].map(PageIndex) {
        let _ = won(claim(&map, page)).finish(Settled::Present);
        assert_eq!(map.state(page), Some(PageState::Present));
    }
    assert_eq!(map.state(PageIndex(PAGES / 3)), Some(PageState::Absent));
    let grown = resident_bytes().saturating_sub(before);
    assert!(grown < PAGES / 16, "{grown} bytes");
    assert_eq!(PageMap::new(0).unwrap().pages(), 0);
    assert!(matches!(
        PageMap::new(u64::MAX),
        Err(PageMapError::OutOfMemory { pages: u64::MAX })
    ));
}

fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib: u64 = line
        .unwrap()
        .trim()
        .strip_suffix(" kB")
        .unwrap()
        .parse()
        .unwrap();
    kib << 10
}
