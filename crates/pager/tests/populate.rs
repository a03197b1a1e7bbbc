//! What arrives without being asked for is handed on, in batches, and whatever happens to that, paging
//! goes on.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod common;

use std::collections::BTreeSet;
use std::error::Error;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::Duration;

use common::*;
use pagetide_memory::{Backing, GuestAddress, GuestRange, PageState, Region};
use pagetide_pager::{
    Counters, IncrementalPopulator, Mode, PageCacheSource, Pager, PopulateConfig, PopulateCounters,
    PopulateFailure, PopulateSink, Prefetch, PrefetchConfig, ReaderConfig, Readers, Resolution,
    StartError,
};

type SinkResult = Result<u64, Box<dyn Error + Send + Sync>>;

/// A sink made of a function.
struct SinkFn<F>(F);

impl<F: Fn(GuestRange) -> SinkResult + Send + Sync> PopulateSink for SinkFn<F> {
    fn populate(&self, range: GuestRange) -> SinkResult {
        (self.0)(range)
    }
}

/// Remembers which pages it was given; each must be mapped and new, and present or about to be.
#[derive(Clone, Default)]
struct Seen(Arc<Mutex<BTreeSet<u64>>>);

impl Seen {
    fn sink(&self, pager: &Arc<Pager>, region: &Arc<Region>) -> impl PopulateSink + 'static {
        // Not the pager itself: its sink must not keep it.
        let (seen, pager, region) = (self.clone(), Arc::downgrade(pager), Arc::clone(region));
        SinkFn(move |range: GuestRange| {
            let pager = pager.upgrade().unwrap();
            for page in pages(range) {
                let state = state(&pager, page);
                assert!(
                    matches!(state, PageState::InFlight | PageState::Present),
                    "{state:?}"
                );
                assert!(is_mapped(&region, page));
                assert!(seen.0.lock().unwrap().insert(page), "page {page} twice");
            }
            Ok(range.bytes())
        })
    }

    fn pages(&self) -> Vec<u64> {
        self.0.lock().unwrap().iter().copied().collect()
    }
}

/// The 4 KiB pages of a range.
fn pages(range: GuestRange) -> impl Iterator<Item = u64> {
    let page = |gpa: GuestAddress| (gpa.0 - GPA.0) / PAGE;
    page(range.start())..page(range.end())
}

fn populate(pager: &Arc<Pager>, sink: impl PopulateSink + 'static) -> IncrementalPopulator {
    IncrementalPopulator::spawn(pager, sink, PopulateConfig::default()).unwrap()
}

/// Another populator, which maps nothing.
fn populate_again(pager: &Arc<Pager>) -> Result<IncrementalPopulator, StartError> {
    IncrementalPopulator::spawn(pager, SinkFn(|_| Ok(0)), PopulateConfig::default())
}

/// A pager whose faults bring in so many pages each.
fn with_neighbours(region: &Arc<Region>, fault_around: u64) -> Arc<Pager> {
    fill_page_cache(region);
    Pager::builder(Mode::Minor, PageCacheSource)
        .region(Arc::clone(region))
        .fault_around(fault_around)
        .build()
        .unwrap()
}

fn prefetch(pager: &Arc<Pager>) -> Prefetch {
    let batch_bytes = 16 * PAGE;
    Prefetch::spawn(pager, PrefetchConfig { batch_bytes }).unwrap()
}

#[test]
fn what_prefetch_brings_in_is_populated_once() {
    let Some(region) = region(2048, Backing::Shmem) else {
        return;
    };
    let pager = pager(&region, Mode::Minor, pattern());
    within_patience("prefetch", move || {
        let seen = Seen::default();
        let populator = populate(&pager, seen.sink(&pager, &region));
        prefetch(&pager).finish().unwrap();
        let ended = populator.finish();
        assert!(ended.failure.is_none(), "{:?}", ended.failure);
        assert_eq!(seen.pages(), (0..2048).collect::<Vec<_>>());
        let expected = PopulateCounters {
            asked_bytes: region.bytes(),
            mapped_bytes: region.bytes(),
            calls: 2048 / 16,
            ..PopulateCounters::default()
        };
        assert_eq!(ended.counters, expected);
    });
}

#[test]
fn vcpus_fault_while_prefetch_and_population_work() {
    for mode in [Mode::Minor, Mode::Missing] {
        let Some(region) = region(2048, Backing::Shmem) else {
            return;
        };
        let pager = pager(&region, mode, pattern());
        within_patience("all of them", move || {
            let seen = Seen::default();
            let populator = populate(&pager, seen.sink(&pager, &region));
            let readers = Readers::spawn(&pager, ReaderConfig::new(1)).unwrap();
            let prefetch = prefetch(&pager);
            let mut resolver = pager.resolver(0);
            thread::scope(|scope| {
                scope.spawn(|| (0..2048).rev().for_each(|page| check_page(&region, page)));
                scope.spawn(|| {
                    for page in (0..2048).map(|page| page * 1237 % 2048) {
                        resolver.resolve_exit(&read_exit(&region, page)).unwrap();
                        check_page(&region, page);
                    }
                });
            });
            let ahead = prefetch.finish().unwrap().counters;
            let mut all = readers.stop().unwrap();
            all.add(resolver.counters());
            all.add(&ahead);
            assert_eq!((all.pages, all.exists), (2048, 0), "{all:?}");
            let ended = populator.finish();
            assert!(ended.failure.is_none(), "{:?}", ended.failure);
            assert_eq!(ended.counters.dropped, 0);
            assert_eq!(seen.pages().len() as u64, ahead.pages);
        });
    }
}

#[test]
fn neighbours_of_faults_are_handed_over_and_lone_pages_are_not() {
    for fault_around in [1, 8] {
        let Some(region) = region(64, Backing::Shmem) else {
            return;
        };
        let pager = with_neighbours(&region, fault_around);
        within_patience("faults", move || {
            let seen = Seen::default();
            let populator = populate(&pager, seen.sink(&pager, &region));
            let mut resolver = pager.resolver(0);
            resolver.resolve_exit(&read_exit(&region, 19)).unwrap();
            let ended = populator.finish();
            assert!(ended.failure.is_none(), "{:?}", ended.failure);
            let expected = if fault_around == 1 { 0..0 } else { 16..24 };
            // The lock may have been taken: a fault does not wait for it.
            if ended.counters.dropped == 0 {
                assert_eq!(seen.pages(), expected.collect::<Vec<_>>());
            }
        });
    }
}

#[test]
fn what_prefetch_brings_in_is_present_only_when_it_is_populated() {
    let Some(region) = region(16, Backing::Shmem) else {
        return;
    };
    let pager = pager(&region, Mode::Minor, pattern());
    within_patience("the exit", move || {
        let (entered, has_entered) = mpsc::channel();
        let (go_on, may_go_on) = mpsc::channel::<()>();
        let may_go_on = Mutex::new(may_go_on);
        let sink = SinkFn(move |range: GuestRange| {
            entered.send(range).unwrap();
            may_go_on.lock().unwrap().recv().unwrap();
            Ok(range.bytes())
        });
        let populator = populate(&pager, sink);
        let running = prefetch(&pager);
        assert_eq!(has_entered.recv().unwrap().bytes(), region.bytes());
        // Whoever faults in userspace need not wait: the pages are mapped there.
        check_page(&region, 3);
        assert_eq!(state(&pager, 3), PageState::InFlight);
        thread::scope(|scope| {
            let exit = scope.spawn(|| {
                let mut resolver = pager.resolver(0);
                resolver.resolve_exit(&read_exit(&region, 3)).unwrap()
            });
            thread::sleep(Duration::from_millis(20));
            assert!(!exit.is_finished());
            go_on.send(()).unwrap();
            assert_eq!(exit.join().unwrap(), Resolution::JoinedOwner);
        });
        running.finish().unwrap();
        assert_eq!(populator.finish().counters.mapped_bytes, region.bytes());
    });
}

#[test]
fn a_full_queue_drops_and_holds_nobody_up() {
    let Some(region) = region(1024, Backing::Shmem) else {
        return;
    };
    let pager = with_neighbours(&region, 16);
    within_patience("faults", move || {
        let gate = Arc::new(AtomicBool::new(false));
        let is_open = Arc::clone(&gate);
        let sink = SinkFn(move |range: GuestRange| {
            while !is_open.load(Ordering::Acquire) {
                thread::sleep(Duration::from_millis(1));
            }
            Ok(range.bytes())
        });
        let config = PopulateConfig {
            batch_bytes: PAGE,
            queued_ranges: 2,
        };
        let populator = IncrementalPopulator::spawn(&pager, sink, config).unwrap();
        // All of them, although the sink takes nothing.
        let mut resolver = pager.resolver(0);
        for page in (0..1024).step_by(16) {
            resolver.resolve_exit(&read_exit(&region, page)).unwrap();
        }
        gate.store(true, Ordering::Release);
        let ended = populator.finish();
        let counters = ended.counters;
        assert_eq!(counters.ranges, 64);
        assert_eq!(counters.dropped + counters.calls, 64);
        // One in the sink's hands at most, and two that wait; fewer if the lock was taken.
        assert!((1..=3).contains(&counters.calls), "{counters:?}");
        assert_eq!(
            counters.dropped_bytes + counters.asked_bytes,
            region.bytes()
        );
    });
}

#[test]
fn a_sink_that_fails_ends_the_population_and_not_the_paging() {
    type Fail = fn(GuestRange) -> SinkResult;
    let fails: [(Fail, &str); 2] = [
        (|_| Err("KVM is gone".into()), "could not be populated"),
        (|_| panic!("off by one"), "panicked: off by one"),
    ];
    for (fail, told) in fails {
        let Some(region) = region(1024, Backing::Shmem) else {
            return;
        };
        let pager = pager(&region, Mode::Minor, pattern());
        within_patience("prefetch", move || {
            let middle = GPA.0 + region.bytes() / 2;
            let sink = SinkFn(move |range: GuestRange| {
                if range.end().0 > middle {
                    return fail(range);
                }
                Ok(range.bytes())
            });
            let config = PopulateConfig {
                batch_bytes: 16 * PAGE,
                ..PopulateConfig::default()
            };
            let populator = IncrementalPopulator::spawn(&pager, sink, config).unwrap();
            let ended = prefetch(&pager).finish().unwrap();
            assert!(ended.is_complete && pager.failure().is_none());
            eventually("the end", || !populator.is_running());
            assert_eq!(populator.counters().failures, 1);
            (0..1024).for_each(|page| check_page(&region, page));
            let another = populate_again(&pager);
            assert!(matches!(another, Err(StartError::AlreadyPopulating)));
            let ended = populator.finish();
            let failure = ended.failure.unwrap();
            assert!(failure.to_string().contains(told), "{failure}");
            if let PopulateFailure::Sink { source, .. } = &failure {
                assert_eq!(source.to_string(), "KVM is gone");
            }
            assert_eq!(ended.counters.failures, 1);
            assert_eq!(ended.counters.mapped_bytes, region.bytes() / 2);
            // Another may try.
            assert!(populate_again(&pager).unwrap().is_running());
        });
    }
}

#[test]
fn there_is_one_at_a_time() {
    let Some(region) = region(4, Backing::Shmem) else {
        return;
    };
    let pager = pager(&region, Mode::Minor, pattern());
    within_patience("stopping", move || {
        let one = populate(&pager, SinkFn(|_| Ok(0)));
        let other = populate_again(&pager);
        assert!(matches!(other, Err(StartError::AlreadyPopulating)));
        let ended = one.stop();
        assert_eq!(ended.counters, PopulateCounters::default());
        drop(populate(&pager, SinkFn(|_| Ok(0))));
        populate(&pager, SinkFn(|_| Ok(0))).finish();
    });
}

#[test]
fn it_ends_when_nobody_is_in_the_sink_any_more() {
    let Some(region) = region(64, Backing::Shmem) else {
        return;
    };
    let pager = pager(&region, Mode::Minor, pattern());
    within_patience("the end", move || {
        let (entered, is_in) = mpsc::channel();
        let (go, may_go) = mpsc::channel::<()>();
        let (entered, may_go) = (Mutex::new(entered), Mutex::new(may_go));
        let populator = populate(
            &pager,
            SinkFn(move |_| {
                entered.lock().unwrap().send(()).unwrap();
                let _ = may_go.lock().unwrap().recv();
                Err("too late".into())
            }),
        );
        let prefetch = prefetch(&pager);
        is_in.recv().unwrap();
        let stopping = thread::spawn(|| populator.stop());
        thread::sleep(Duration::from_millis(50));
        assert!(!stopping.is_finished(), "prefetch is in the sink");
        assert!(matches!(
            populate_again(&pager),
            Err(StartError::AlreadyPopulating)
        ));
        go.send(()).unwrap();
        let ended = stopping.join().unwrap();
        assert!(ended.failure.is_some(), "the failure is its own");
        let next = populate_again(&pager).unwrap();
        prefetch.finish().unwrap();
        assert!(next.finish().failure.is_none());
    });
}

#[test]
fn it_ends_with_the_pager_and_hands_on_nothing_afterwards() {
    let Some(region) = region(64, Backing::Shmem) else {
        return;
    };
    let pager = pager(&region, Mode::Minor, pattern());
    within_patience("stopping", move || {
        let populator = populate(&pager, SinkFn(|range: GuestRange| Ok(range.bytes())));
        pager.stop();
        eventually("the end", || !populator.is_running());
        let mut resolver = pager.resolver(0);
        resolver.resolve_exit(&read_exit(&region, 0)).unwrap();
        assert_eq!(populator.finish().counters, PopulateCounters::default());
        let ended = prefetch(&pager).finish().unwrap();
        assert_eq!(ended.counters, Counters::default());
    });
}

#[test]
fn population_gives_way_to_faults() {
    let Some(region) = region(2048, Backing::Shmem) else {
        return;
    };
    let pager = with_neighbours(&region, 2);
    within_patience("faults", move || {
        // It maps next to nothing, and faults come as fast as they can: it has to give way. What it
        // is given it gets round to all the same.
        let slow = SinkFn(|_: GuestRange| {
            thread::sleep(Duration::from_millis(1));
            Ok(PAGE)
        });
        let config = PopulateConfig {
            batch_bytes: PAGE,
            ..PopulateConfig::default()
        };
        let populator = IncrementalPopulator::spawn(&pager, slow, config).unwrap();
        let mut resolver = pager.resolver(0);
        // In bursts, until it has seen one: who knows when its thread gets to run.
        for page in (0..region.pages()).step_by(2) {
            resolver.resolve_exit(&read_exit(&region, page)).unwrap();
            if page % 128 == 0 {
                if populator.counters().yields > 0 {
                    break;
                }
                thread::sleep(Duration::from_millis(15));
            }
        }
        let ended = populator.finish();
        assert!(ended.counters.yields > 0, "{:?}", ended.counters);
        let handed = ended.counters.calls + ended.counters.merged + ended.counters.dropped;
        assert_eq!(handed, ended.counters.ranges);
    });
}
