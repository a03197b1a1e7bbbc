use std::sync::Barrier;
use std::sync::atomic::AtomicU64;
use std::thread;

use proptest::prelude::*;

use super::*;

const PAGE: PageIndex = PageIndex(3);
const LONG: Duration = Duration::from_secs(60);

fn map() -> PageMap {
    PageMap::new(8).unwrap()
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

#[test]
fn every_way_out_of_a_claim() {
    for (settled, state) in [
        (Settled::Present, PageState::Present),
        (Settled::Zero, PageState::Zero),
        (Settled::Poisoned, PageState::Poisoned),
    ] {
        let map = map();
        let guard = won(map.claim(PAGE));
        assert_eq!(map.state(PAGE), Some(PageState::InFlight));
        assert_eq!(lost(map.claim(PAGE)), PageState::InFlight);
        assert_eq!(guard.finish(settled), WakeWanted::No);
        assert_eq!(map.state(PAGE), Some(state));
        assert_eq!(lost(map.claim(PAGE)), state);
    }
    let map = map();
    assert_eq!(won(map.claim(PAGE)).abandon(), WakeWanted::No);
    assert_eq!(map.state(PAGE), Some(PageState::Absent));
    drop(won(map.claim(PAGE)));
    assert_eq!(map.state(PAGE), Some(PageState::Absent));
}

#[test]
fn a_removed_page_is_claimed_as_such_and_goes_back_as_such() {
    let map = map();
    assert_eq!(map.remove(PAGE), Removal::Done(PageState::Absent));
    assert_eq!(lost(map.claim(PAGE)), PageState::Removed);
    assert_eq!(lost(map.claim_removed(PageIndex(0))), PageState::Absent);
    let guard = won(map.claim_removed(PAGE));
    assert_eq!(guard.origin(), Origin::Removed);
    drop(guard);
    assert_eq!(map.state(PAGE), Some(PageState::Removed));
    assert_eq!(
        won(map.claim_removed(PAGE)).finish(Settled::Zero),
        WakeWanted::No
    );
    assert_eq!(map.remove(PAGE), Removal::Done(PageState::Zero));
}

#[test]
fn nobody_takes_a_page_from_its_owner() {
    let map = map();
    let guard = won(map.claim(PAGE));
    assert_eq!(map.remove(PAGE), Removal::InFlight);
    assert_eq!(map.poison(PAGE), Removal::InFlight);
    assert_eq!(map.reset(), Err(ResetError { page: PAGE }));
    let _ = guard.finish(Settled::Present);
    assert_eq!(map.poison(PAGE), Removal::Done(PageState::Present));
    assert_eq!(map.remove(PAGE), Removal::Poisoned);
    assert_eq!(map.reset(), Ok(()));
    assert_eq!(
        map.counts(),
        StateCounts {
            absent: 8,
            ..StateCounts::default()
        }
    );
}

#[test]
fn pages_that_are_not_there() {
    let map = map();
    for page in [PageIndex(8), PageIndex(u64::MAX)] {
        assert!(matches!(map.claim(page), Claim::Outside));
        assert!(matches!(map.claim_removed(page), Claim::Outside));
        assert!(matches!(
            map.claim_run(page, PageRange::window(page, 8)),
            Claim::Outside
        ));
        assert_eq!(map.state(page), None);
        assert_eq!(map.want_wake(page), None);
        assert_eq!(map.wait(page, LONG), None);
        assert_eq!(map.remove(page), Removal::Outside);
        assert_eq!(map.poison(page), Removal::Outside);
    }
    assert!(matches!(
        PageMap::new(u64::MAX),
        Err(PageMapError::OutOfMemory { .. })
    ));
}

#[test]
fn a_run_stops_at_the_window_the_map_and_pages_of_others() {
    let map = PageMap::new(10).unwrap();
    let _present = won(map.claim(PageIndex(2))).finish(Settled::Present);
    let run = won(map.claim_run(PageIndex(4), PageRange::window(PageIndex(4), 8)));
    assert_eq!(run.pages(), PageRange::new(PageIndex(3), 5));
    let last = won(map.claim_run(PageIndex(9), PageRange::window(PageIndex(9), 8)));
    assert_eq!(last.pages(), PageRange::new(PageIndex(8), 2));
    let elsewhere = won(map.claim_run(PageIndex(0), PageRange::new(PageIndex(5), 2)));
    assert_eq!(elsewhere.pages(), PageRange::single(PageIndex(0)));
    assert_eq!(map.counts().in_flight, 8);
}

#[test]
fn the_next_page_to_bring_in_is_found() {
    let map = map();
    let range = |first, count| PageRange::new(PageIndex(first), count);
    let next = |pages| map.next_unsettled(pages);
    let absent = |page| Some((PageIndex(page), PageState::Absent));
    assert_eq!(next(range(0, 8)), absent(0));
    assert_eq!(next(range(5, u64::MAX)), absent(5));
    assert_eq!(next(range(8, 1)), None);
    assert_eq!(next(range(u64::MAX, 1)), None);
    for page in [0, 1, 4] {
        let _ = won(map.claim(PageIndex(page))).finish(Settled::Present);
    }
    let _ = map.remove(PageIndex(2));
    assert_eq!(next(range(0, 8)), absent(3));
    assert_eq!(next(range(0, 3)), None);
    let guard = won(map.claim(PAGE));
    assert_eq!(next(range(0, 8)), Some((PAGE, PageState::InFlight)));
    assert_eq!(guard.finish(Settled::Zero), WakeWanted::No);
    assert_eq!(next(range(0, 8)), absent(5));
}

#[test]
fn a_split_run_settles_piece_by_piece() {
    let map = map();
    let run = won(map.claim_run(PageIndex(0), PageRange::window(PageIndex(0), 8)));
    let (head, tail) = run.split_at(3);
    assert_eq!(map.want_wake(PageIndex(1)), Some(PageState::InFlight));
    assert_eq!(map.want_wake(PageIndex(7)), Some(PageState::InFlight));
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
fn a_wake_is_promised_only_by_an_owner() {
    let map = map();
    assert_eq!(map.want_wake(PAGE), Some(PageState::Absent));
    let guard = won(map.claim(PAGE));
    assert!(!map.is_wake_wanted(PAGE));
    assert_eq!(map.want_wake(PAGE), Some(PageState::InFlight));
    assert_eq!(map.want_wake(PAGE), Some(PageState::InFlight));
    assert!(map.is_wake_wanted(PAGE));
    assert_eq!(guard.finish(Settled::Present), WakeWanted::Yes);
    assert!(!map.is_wake_wanted(PAGE));
    assert_eq!(map.want_wake(PAGE), Some(PageState::Present));
    // What was asked of one owner is not asked of the next.
    map.reset().unwrap();
    assert_eq!(
        won(map.claim(PAGE)).finish(Settled::Present),
        WakeWanted::No
    );
}

#[test]
fn waiting_ends_with_the_owner_however_it_ends() {
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
        let map = map();
        let guard = won(map.claim(PAGE));
        thread::scope(|scope| {
            let waiters: Vec<_> = (0..4)
                .map(|_| scope.spawn(|| map.wait(PAGE, LONG)))
                .collect();
            // Only a wait that began can be ended; the flag shows that one did.
            while map.cells[3].load(Ordering::Relaxed) & WAITERS == 0 {
                thread::yield_now();
            }
            assert_eq!(
                end(guard),
                WakeWanted::No,
                "a waiter is no userfaultfd reader"
            );
            for waiter in waiters {
                assert_eq!(waiter.join().unwrap(), Some(state));
            }
        });
    }
}

#[test]
fn waiting_ends_with_the_timeout() {
    let map = map();
    let _guard = won(map.claim(PAGE));
    let start = Instant::now();
    assert_eq!(
        map.wait(PAGE, Duration::from_millis(20)),
        Some(PageState::InFlight)
    );
    assert!(start.elapsed() >= Duration::from_millis(20));
    assert_eq!(map.wait(PageIndex(0), LONG), Some(PageState::Absent));
}

/// Threads race for the same pages, with and without fault-around, some failing; each page must be
/// brought in exactly once, nobody may be left waiting, and each wake asked for must be given.
fn race(pages: u64, threads: u64, around: u64, fail_every: u64) {
    let map = PageMap::new(pages).unwrap();
    let installs: Vec<AtomicU64> = (0..pages).map(|_| AtomicU64::new(0)).collect();
    let content: Vec<AtomicU64> = (0..pages).map(|_| AtomicU64::new(0)).collect();
    let (wakes_promised, wakes_given) = (AtomicU64::new(0), AtomicU64::new(0));
    let attempts = AtomicU64::new(0);
    let start = Barrier::new(to_usize(threads));
    thread::scope(|scope| {
        for thread in 0..threads {
            let (map, installs, content, start) = (&map, &installs, &content, &start);
            let (wakes_promised, wakes_given) = (&wakes_promised, &wakes_given);
            let attempts = &attempts;
            scope.spawn(move || {
                start.wait();
                for step in 0..pages {
                    let page = PageIndex((step + thread % 2) % pages);
                    loop {
                        let guard = match map.claim_run(page, PageRange::window(page, around)) {
                            Claim::Won(guard) => guard,
                            Claim::Lost(PageState::Present) => break,
                            Claim::Lost(PageState::InFlight) => {
                                if thread % 3 == 0
                                    && map.want_wake(page) == Some(PageState::InFlight)
                                {
                                    wakes_promised.fetch_add(1, Ordering::Relaxed);
                                }
                                map.wait(page, LONG);
                                continue;
                            }
                            Claim::Lost(PageState::Absent) => continue,
                            other => panic!("{other:?}"),
                        };
                        assert!(guard.pages().contains(page));
                        let fails = fail_every != 0
                            && attempts
                                .fetch_add(1, Ordering::Relaxed)
                                .is_multiple_of(fail_every);
                        let wake = if fails {
                            guard.abandon()
                        } else {
                            for page in guard.pages().iter() {
                                let at = page.as_usize();
                                installs[at].fetch_add(1, Ordering::Relaxed);
                                content[at].store(page.0 + 1, Ordering::Relaxed);
                            }
                            guard.finish(Settled::Present)
                        };
                        if wake.is_wanted() {
                            wakes_given.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                    // Present means that the content, too, can be seen.
                    assert_eq!(content[page.as_usize()].load(Ordering::Relaxed), page.0 + 1);
                }
            });
        }
    });
    assert!(
        installs
            .iter()
            .all(|count| count.load(Ordering::Relaxed) == 1)
    );
    assert_eq!(map.counts().present, pages);
    let (promised, given) = (wakes_promised.into_inner(), wakes_given.into_inner());
    assert!(
        given <= promised && (given > 0) == (promised > 0),
        "{given} of {promised} wakes"
    );
}

#[test]
fn racing_threads_bring_each_page_in_once() {
    race(20_000, 4, 1, 0);
    race(20_000, 4, 16, 0);
    race(20_000, 8, 4, 3);
}

#[test]
fn a_waiter_is_never_forgotten() {
    // One owner and one waiter meet at the same page again and again; a lost wake-up would show as
    // a wait of LONG. All waits together may take longer where processors are slow or busy.
    const ROUNDS: u32 = 10_000;
    let map = PageMap::new(1).unwrap();
    let page = PageIndex(0);
    let meet = Barrier::new(2);
    thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..ROUNDS {
                let guard = won(map.claim(page));
                meet.wait();
                drop(guard);
                meet.wait();
            }
        });
        for _ in 0..ROUNDS {
            meet.wait();
            let begun = Instant::now();
            assert_eq!(map.wait(page, LONG), Some(PageState::Absent));
            assert!(begun.elapsed() < LONG, "nobody woke the waiter");
            meet.wait();
        }
    });
}

/// One step of a single-threaded history, for comparing the map with a plain model.
#[derive(Clone, Debug)]
enum Step {
    Claim(u64),
    ClaimRun(u64, u64),
    ClaimRemoved(u64),
    Finish(usize, Settled),
    Abandon(usize),
    Split(usize, u64),
    WantWake(u64),
    Remove(u64),
    Poison(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let page = 0u64..10;
    let settled = prop_oneof![
        Just(Settled::Present),
        Just(Settled::Zero),
        Just(Settled::Poisoned)
    ];
    prop_oneof![
        page.clone().prop_map(Step::Claim),
        (page.clone(), 1u64..9).prop_map(|(page, window)| Step::ClaimRun(page, window)),
        page.clone().prop_map(Step::ClaimRemoved),
        (any::<usize>(), settled).prop_map(|(at, settled)| Step::Finish(at, settled)),
        any::<usize>().prop_map(Step::Abandon),
        (any::<usize>(), 0u64..9).prop_map(|(at, count)| Step::Split(at, count)),
        page.clone().prop_map(Step::WantWake),
        page.clone().prop_map(Step::Remove),
        page.prop_map(Step::Poison),
    ]
}

/// The model: a page's state, the state it was claimed from, and whether a wake was asked for.
type Model = Vec<(PageState, PageState, bool)>;

fn settle(model: &mut Model, pages: PageRange, to: Option<PageState>) -> bool {
    let mut wake = false;
    for page in pages.iter() {
        let (_, origin, wanted) = model[page.as_usize()];
        wake |= wanted;
        model[page.as_usize()] = (to.unwrap_or(origin), PageState::Absent, false);
    }
    wake
}

proptest! {
    #[test]
    fn the_map_does_what_its_table_says(steps in prop::collection::vec(step(), 1..200)) {
        const PAGES: u64 = 9;
        let map = PageMap::new(PAGES).unwrap();
        let mut model: Model = vec![(PageState::Absent, PageState::Absent, false); to_usize(PAGES)];
        let mut guards = Vec::new();
        for step in steps {
            match step {
                Step::Claim(page) | Step::ClaimRun(page, _) | Step::ClaimRemoved(page) => {
                    let index = PageIndex(page);
                    let (claim, from) = match step {
                        Step::ClaimRun(_, window) => {
                            (map.claim_run(index, PageRange::window(index, window)), PageState::Absent)
                        }
                        Step::ClaimRemoved(_) => (map.claim_removed(index), PageState::Removed),
                        _ => (map.claim(index), PageState::Absent),
                    };
                    match claim {
                        Claim::Outside => prop_assert!(page >= PAGES),
                        Claim::Lost(state) => {
                            prop_assert_eq!(state, model[index.as_usize()].0);
                            prop_assert_ne!(state, from);
                        }
                        Claim::Won(guard) => {
                            prop_assert!(guard.pages().contains(index));
                            for page in guard.pages().iter() {
                                prop_assert_eq!(model[page.as_usize()].0, from);
                                model[page.as_usize()] = (PageState::InFlight, from, false);
                            }
                            guards.push(guard);
                        }
                    }
                }
                Step::Finish(at, settled) if !guards.is_empty() => {
                    let guard = guards.swap_remove(at % guards.len());
                    let state = PageState::of(settled.byte());
                    let wake = settle(&mut model, guard.pages(), Some(state));
                    prop_assert_eq!(guard.finish(settled).is_wanted(), wake);
                }
                Step::Abandon(at) if !guards.is_empty() => {
                    let guard = guards.swap_remove(at % guards.len());
                    let wake = settle(&mut model, guard.pages(), None);
                    prop_assert_eq!(guard.abandon().is_wanted(), wake);
                }
                Step::Split(at, count) if !guards.is_empty() => {
                    let guard = guards.swap_remove(at % guards.len());
                    let (head, tail) = guard.split_at(count);
                    guards.extend([head, tail]);
                }
                Step::WantWake(page) => {
                    let expected = model.get_mut(to_usize(page)).map(|(state, _, wanted)| {
                        *wanted |= *state == PageState::InFlight;
                        *state
                    });
                    prop_assert_eq!(map.want_wake(PageIndex(page)), expected);
                }
                Step::Remove(page) | Step::Poison(page) => {
                    let (removal, to) = match step {
                        Step::Remove(_) => (map.remove(PageIndex(page)), PageState::Removed),
                        _ => (map.poison(PageIndex(page)), PageState::Poisoned),
                    };
                    let expected = match model.get_mut(to_usize(page)) {
                        None => Removal::Outside,
                        Some((PageState::InFlight, ..)) => Removal::InFlight,
                        Some((PageState::Poisoned, ..)) => Removal::Poisoned,
                        Some((state, ..)) => Removal::Done(std::mem::replace(state, to)),
                    };
                    prop_assert_eq!(removal, expected);
                }
                Step::Finish(..) | Step::Abandon(..) | Step::Split(..) => {}
            }
            for (page, (state, ..)) in model.iter().enumerate() {
                prop_assert_eq!(map.state(PageIndex(to_u64(page))), Some(*state));
            }
        }
    }
}
