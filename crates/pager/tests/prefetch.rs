//! Pages that come before anybody asks for them, alone and while others fault on the same pages.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod common;

use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use common::*;
use pagetide_memory::{Backing, GuestAddress, GuestRange, PageIndex, PageState, Region};
use pagetide_pager::{
    Counters, ExitResolvers, Fetch, Fetched, Mode, PageCacheSource, Pager, Prefetch,
    PrefetchConfig, Progress, ReaderConfig, Readers, UffdLayout,
};

/// One way to page a region in.
#[derive(Clone, Copy, Debug)]
struct Way {
    mode: Mode,
    backing: Backing,
    in_page_cache: bool,
    uffds: u64,
    fault_around: u64,
    batch_bytes: u64,
}

const PLAIN: Way = Way {
    mode: Mode::Minor,
    backing: Backing::Shmem,
    in_page_cache: false,
    uffds: 1,
    fault_around: 1,
    batch_bytes: 16 * PAGE,
};

const WAYS: [Way; 9] = [
    PLAIN,
    Way {
        batch_bytes: 0,
        ..PLAIN
    },
    Way {
        uffds: 4,
        fault_around: 8,
        batch_bytes: u64::MAX,
        ..PLAIN
    },
    Way {
        in_page_cache: true,
        fault_around: 16,
        ..PLAIN
    },
    Way {
        backing: Backing::Thp,
        ..PLAIN
    },
    Way {
        backing: Backing::Hugetlb2M,
        ..PLAIN
    },
    Way {
        mode: Mode::Missing,
        ..PLAIN
    },
    Way {
        mode: Mode::Missing,
        backing: Backing::Anonymous,
        uffds: 2,
        fault_around: 4,
        ..PLAIN
    },
    Way {
        mode: Mode::Missing,
        backing: Backing::Hugetlb2M,
        ..PLAIN
    },
];

impl Way {
    fn region(self) -> Option<Arc<Region>> {
        // Small enough for a software CPU, which computes the content of all of it.
        let pages = match self.backing {
            Backing::Hugetlb2M | Backing::Hugetlb1G => 2,
            Backing::Thp => 512,
            Backing::Shmem | Backing::Anonymous => 256,
        };
        region(pages, self.backing)
    }

    fn pager(self, region: &Arc<Region>) -> Arc<Pager> {
        let each = region.bytes() / self.uffds;
        let part = |part| GuestRange::new(GuestAddress(GPA.0 + part * each), each).unwrap();
        let builder = if self.in_page_cache {
            fill_page_cache(region);
            Pager::builder(self.mode, PageCacheSource)
        } else {
            Pager::builder(self.mode, pattern())
        };
        builder
            .region(Arc::clone(region))
            .fault_around(self.fault_around)
            .uffds(UffdLayout::PerRange((0..self.uffds).map(part).collect()))
            .build()
            .unwrap()
    }

    fn prefetch(self, pager: &Arc<Pager>) -> Prefetch {
        let batch_bytes = self.batch_bytes;
        Prefetch::spawn(pager, PrefetchConfig { batch_bytes }).unwrap()
    }
}

fn page_by_page(pager: &Arc<Pager>) -> Prefetch {
    Prefetch::spawn(pager, PrefetchConfig { batch_bytes: PAGE }).unwrap()
}

#[test]
fn everything_comes_without_a_fault() {
    for way in WAYS {
        let Some(region) = way.region() else { continue };
        within_patience(&format!("{way:?}"), move || {
            let pager = way.pager(&region);
            let total = region.pages();
            assert_eq!(
                pager.progress(),
                Progress {
                    total,
                    ..Progress::default()
                }
            );
            let ended = way.prefetch(&pager).finish().unwrap();
            assert!(ended.is_complete);
            let expected = Counters {
                pages: total,
                installs: ended.counters.installs,
                ..Counters::default()
            };
            assert_eq!(ended.counters, expected, "{way:?}");
            assert_eq!(pager.counted(), expected);
            let present = total;
            assert_eq!(
                pager.progress(),
                Progress {
                    present,
                    total,
                    ..Progress::default()
                }
            );
            // A mapping may get lost at any time, as when khugepaged makes a huge one of many.
            let readers = Readers::spawn(&pager, ReaderConfig::new(1)).unwrap();
            for page in 0..total {
                check_page(&region, page);
            }
            readers.stop().unwrap();
            let again = way.prefetch(&pager).finish().unwrap();
            assert!(again.is_complete);
            assert_eq!(again.counters, Counters::default());
        });
    }
}

#[test]
fn faults_and_prefetch_meet_on_the_same_pages() {
    for way in WAYS {
        let Some(region) = way.region() else { continue };
        within_patience(&format!("{way:?}"), move || {
            for _ in 0..2 {
                let pager = way.pager(&region);
                let readers = Readers::spawn(&pager, ReaderConfig::new(2)).unwrap();
                let resolvers = ExitResolvers::new(&pager, 1);
                let prefetch = way.prefetch(&pager);
                thread::scope(|scope| {
                    // The same way as prefetch, so that they meet; the other way; and by exit.
                    scope.spawn(|| (0..region.pages()).for_each(|page| check_page(&region, page)));
                    scope.spawn(|| {
                        let pages = (0..region.pages()).rev();
                        pages.for_each(|page| check_page(&region, page));
                    });
                    scope.spawn(|| {
                        for page in (0..region.pages()).map(|page| page * 7 % region.pages()) {
                            resolvers.resolve(0, &write_exit(&region, page)).unwrap();
                            check_page(&region, page);
                        }
                    });
                });
                let ended = prefetch.finish().unwrap();
                assert!(ended.is_complete);
                let mut counters = readers.stop().unwrap();
                counters.add(&resolvers.counters());
                counters.add(&ended.counters);
                assert_eq!(counters.pages, region.pages(), "{way:?}: each page once");
                assert_eq!(counters.exists, 0, "{way:?}");
                drop(resolvers);
                drop(pager);
                region.punch(region.all_pages()).unwrap();
            }
        });
    }
}

#[test]
fn all_regions_are_walked() {
    if !has_userfaultfd() {
        return;
    }
    let regions = [0, 64 * PAGE, 1 << 30].map(|offset| {
        let gpa = GuestAddress(GPA.0 + offset);
        Arc::new(Region::new(gpa, 64 * PAGE, Backing::Shmem).unwrap())
    });
    let builder = regions
        .iter()
        .fold(Pager::builder(Mode::Minor, pattern()), |builder, region| {
            builder.region(Arc::clone(region))
        });
    let pager = builder.build().unwrap();
    // From within the second one, so that the walk wraps around.
    let mut resolver = pager.resolver(0);
    resolver.resolve_exit(&read_exit(&regions[1], 10)).unwrap();
    let ended = within_patience("prefetch", {
        let pager = Arc::clone(&pager);
        move || page_by_page(&pager).finish().unwrap()
    });
    assert!(ended.is_complete);
    assert_eq!(ended.counters.pages, 3 * 64 - 1);
    for region in &regions {
        (0..64).for_each(|page| check_page(region, page));
    }
}

#[test]
fn it_goes_on_from_the_last_fault() {
    let Some(region) = region(64, Backing::Shmem) else {
        return;
    };
    let asked = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&asked);
    let source = SourceFn(move |fetch: &mut Fetch<'_>| {
        let entry = (fetch.pages().first().0, fetch.is_urgent());
        log.lock().unwrap().push(entry);
        push_pattern(fetch)
    });
    let pager = pager(&region, Mode::Minor, source);
    let mut resolver = pager.resolver(0);
    resolver.resolve_exit(&read_exit(&region, 40)).unwrap();
    within_patience("prefetch", move || page_by_page(&pager).finish().unwrap());
    let expected = [(40, true)]
        .into_iter()
        .chain((41..64).map(|page| (page, false)))
        .chain((0..40).map(|page| (page, false)));
    assert_eq!(*asked.lock().unwrap(), expected.collect::<Vec<_>>());
}

#[test]
fn a_sleeper_on_a_page_of_a_batch_is_woken_with_it() {
    let Some(region) = region(64, Backing::Shmem) else {
        return;
    };
    let (arrived, on_arrival) = std::sync::mpsc::channel();
    let gate = Arc::new(std::sync::Barrier::new(2));
    let at_gate = Arc::clone(&gate);
    let source = SourceFn(move |fetch: &mut Fetch<'_>| {
        if fetch.pages().first().0 == 0 {
            arrived.send(()).unwrap();
            at_gate.wait();
        }
        push_pattern(fetch)
    });
    let pager = pager(&region, Mode::Minor, source);
    let readers = Readers::spawn(&pager, ReaderConfig::new(1)).unwrap();
    let prefetch = PLAIN.prefetch(&pager);
    on_arrival.recv_timeout(PATIENCE).unwrap();
    let touchers = [1, 7, 15].map(|page| {
        let touched = Arc::clone(&region);
        spawn_asleep("toucher", move || check_page(&touched, page))
    });
    let map = pager.page_map(only(&pager)).unwrap();
    let asked_for = |page| map.is_wake_wanted(PageIndex(page));
    eventually("messages", || [1, 7, 15].into_iter().all(asked_for));
    let exits = Arc::clone(&region);
    let mut resolver = pager.resolver(0);
    let exit = spawn_asleep("exit", move || {
        resolver.resolve_exit(&read_exit(&exits, 3)).unwrap()
    });
    gate.wait();
    within_patience("those who wait", move || {
        for toucher in touchers {
            toucher.join().unwrap();
        }
        exit.join().unwrap();
        let ended = prefetch.finish().unwrap();
        assert_eq!(ended.counters.wakes, 1, "{:?}", ended.counters);
        readers.stop().unwrap();
    });
}

#[test]
fn what_the_guest_gave_up_is_left_alone() {
    let Some(region) = region(64, Backing::Shmem) else {
        return;
    };
    let pager = pager(&region, Mode::Minor, pattern());
    give_up(&pager, 20);
    within_patience("prefetch", move || {
        let ended = PLAIN.prefetch(&pager).finish().unwrap();
        assert!(ended.is_complete);
        assert_eq!(ended.counters.pages, 63);
        assert_eq!(state(&pager, 20), PageState::Removed);
        assert!(!is_mapped(&region, 20));
    });
}

#[test]
fn prefetch_gives_way_to_faults_and_gets_there_all_the_same() {
    let Some(region) = region(4096, Backing::Shmem) else {
        return;
    };
    // A source that is slow for those who can wait: 1000 pages a second.
    let source = SourceFn(|fetch: &mut Fetch<'_>| {
        if !fetch.is_urgent() {
            thread::sleep(Duration::from_millis(1));
        }
        // Faults have to come fast, so nothing is computed.
        Ok(Fetched::Zero)
    });
    let pager = pager(&region, Mode::Minor, source);
    within_patience("prefetch", move || {
        let prefetch = page_by_page(&pager);
        let mut resolver = pager.resolver(0);
        // Downwards, so that prefetch does not run ahead of it; the last few are left to prefetch.
        for page in (32..region.pages()).rev() {
            resolver.resolve_exit(&read_exit(&region, page)).unwrap();
        }
        let ended = prefetch.finish().unwrap();
        assert!(ended.is_complete);
        assert!(ended.counters.yields > 0, "{:?}", ended.counters);
        let pages = ended.counters.pages + resolver.counters().pages;
        assert_eq!(pages, region.pages());
        assert!(ended.counters.pages > 0);
    });
}
