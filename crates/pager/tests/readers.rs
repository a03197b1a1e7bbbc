//! Faults that come as userfaultfd messages and are resolved by reader threads, alone and together
//! with exits on the same pages.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod common;

use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use common::*;
use pagetide_memory::{
    Backing, GuestAddress, GuestRange, PageIndex, PageRange, PageState, PopulateAccess,
    PopulateError, Region,
};
use pagetide_pager::{
    Counters, ExitResolvers, Fetch, Fetched, Mode, PageCacheSource, Pager, ReaderConfig, Readers,
    Resolution, UffdLayout,
};
use pagetide_uapi::userfaultfd::{Features, UserRange, Userfaultfd, Wake};

/// One way to page a region in.
#[derive(Clone, Copy, Debug)]
struct Way {
    mode: Mode,
    backing: Backing,
    in_page_cache: bool,
    uffds: u64,
    readers: usize,
    fault_around: u64,
}

const PLAIN: Way = Way {
    mode: Mode::Minor,
    backing: Backing::Shmem,
    in_page_cache: false,
    uffds: 1,
    readers: 1,
    fault_around: 1,
};

const WAYS: [Way; 13] = [
    PLAIN,
    Way {
        readers: 2,
        ..PLAIN
    },
    Way {
        readers: 4,
        fault_around: 16,
        ..PLAIN
    },
    Way {
        readers: 2,
        uffds: 4,
        ..PLAIN
    },
    Way {
        readers: 3,
        uffds: 4,
        fault_around: 8,
        ..PLAIN
    },
    Way {
        in_page_cache: true,
        ..PLAIN
    },
    Way {
        in_page_cache: true,
        readers: 4,
        fault_around: 16,
        ..PLAIN
    },
    Way {
        backing: Backing::Thp,
        readers: 2,
        ..PLAIN
    },
    Way {
        backing: Backing::Hugetlb2M,
        readers: 2,
        ..PLAIN
    },
    Way {
        mode: Mode::Missing,
        readers: 2,
        ..PLAIN
    },
    Way {
        mode: Mode::Missing,
        backing: Backing::Anonymous,
        readers: 1,
        ..PLAIN
    },
    Way {
        mode: Mode::Missing,
        backing: Backing::Anonymous,
        readers: 4,
        uffds: 2,
        fault_around: 16,
        ..PLAIN
    },
    Way {
        mode: Mode::Missing,
        backing: Backing::Hugetlb2M,
        readers: 2,
        ..PLAIN
    },
];

impl Way {
    fn region(self) -> Option<Arc<Region>> {
        region(
            if self.backing.is_hugetlb() { 4 } else { 1024 },
            self.backing,
        )
    }

    fn pager(self, region: &Arc<Region>) -> Arc<Pager> {
        let each = region.bytes() / self.uffds;
        let part = |part| GuestRange::new(GuestAddress(GPA.0 + part * each), each).unwrap();
        let layout = match self.uffds {
            1 => UffdLayout::Single,
            _ => UffdLayout::PerRange((0..self.uffds).map(part).collect()),
        };
        let builder = if self.in_page_cache {
            fill_page_cache(region);
            Pager::builder(self.mode, PageCacheSource)
        } else {
            Pager::builder(self.mode, pattern())
        };
        builder
            .region(Arc::clone(region))
            .fault_around(self.fault_around)
            .uffds(layout)
            .build()
            .unwrap()
    }

    fn readers(self, pager: &Arc<Pager>) -> Readers {
        Readers::spawn(pager, ReaderConfig::new(self.readers)).unwrap()
    }
}

/// Touches every page from several threads, in different directions, and checks its content.
fn touch_all(region: &Region, threads: u64) {
    let start = Barrier::new(usize::try_from(threads).unwrap());
    thread::scope(|scope| {
        for thread in 0..threads {
            let start = &start;
            scope.spawn(move || {
                start.wait();
                for step in 0..region.pages() {
                    let page = if thread % 2 == 0 {
                        step
                    } else {
                        region.pages() - 1 - step
                    };
                    check_page(region, page);
                }
            });
        }
    });
}

#[test]
fn touched_pages_come_with_their_content() {
    for way in WAYS {
        let Some(region) = way.region() else { continue };
        let counters = within_patience(&format!("{way:?}"), move || {
            let pager = way.pager(&region);
            let readers = way.readers(&pager);
            touch_all(&region, 4);
            let counters = readers.stop().unwrap();
            assert_eq!(counters.pages, region.pages(), "{way:?}: each page once");
            assert_eq!(counters.messages, counters.faults);
            assert_eq!(counters.exists, 0, "{way:?}");
            let map = pager.page_map(only(&pager)).unwrap();
            assert_eq!(map.counts().present, region.pages());
            counters
        });
        assert!(counters.installs > 0 && counters.reads > 0 && counters.sleeps > 0);
    }
}

#[test]
fn exits_and_messages_meet_on_the_same_pages() {
    for way in WAYS {
        let Some(region) = way.region() else { continue };
        within_patience(&format!("{way:?}"), move || {
            for _ in 0..3 {
                let pager = way.pager(&region);
                let readers = way.readers(&pager);
                let resolvers = ExitResolvers::new(&pager, 2);
                thread::scope(|scope| {
                    for vcpu in 0..2 {
                        let (region, resolvers) = (&region, &resolvers);
                        scope.spawn(move || {
                            for step in 0..region.pages() {
                                let page = if vcpu == 0 {
                                    step
                                } else {
                                    region.pages() - 1 - step
                                };
                                resolvers.resolve(vcpu, &write_exit(region, page)).unwrap();
                                check_page(region, page);
                            }
                        });
                    }
                    // KVM's own accesses, and the VMM's.
                    scope.spawn(|| touch_all(&region, 2));
                });
                let mut counters = readers.stop().unwrap();
                counters.add(&resolvers.counters());
                assert_eq!(counters.pages, region.pages(), "{way:?}: {counters:?}");
                drop(resolvers);
                drop(pager);
                region.punch(region.all_pages()).unwrap();
            }
        });
    }
}

#[test]
fn a_sleeper_is_woken_by_the_owner_of_its_page() {
    let Some(region) = region(4, Backing::Shmem) else {
        return;
    };
    let (arrived, on_arrival) = std::sync::mpsc::channel();
    let gate = Arc::new(Barrier::new(2));
    let at_gate = Arc::clone(&gate);
    // The exit's thread owns the page for as long as the test likes.
    let source = SourceFn(move |fetch: &mut Fetch<'_>| {
        arrived.send(()).unwrap();
        at_gate.wait();
        push_pattern(fetch)
    });
    let pager = pager(&region, Mode::Minor, source);
    let readers = Readers::spawn(&pager, ReaderConfig::new(1)).unwrap();
    let mut resolver = pager.resolver(0);
    let owned = Arc::clone(&region);
    let owner = thread::spawn(move || {
        let resolution = resolver.resolve_exit(&read_exit(&owned, 1)).unwrap();
        (resolution, *resolver.counters())
    });
    on_arrival.recv_timeout(PATIENCE).unwrap();
    let touched = Arc::clone(&region);
    let toucher = spawn_asleep("toucher", move || check_page(&touched, 1));
    // The reader leaves the wake to the owner.
    let map = pager.page_map(only(&pager)).unwrap();
    eventually("message", || map.is_wake_wanted(PageIndex(1)));
    assert!(!toucher.is_finished());
    assert_eq!(state(&pager, 1), PageState::InFlight);
    gate.wait();
    let (resolution, counters) = owner.join().unwrap();
    assert!(matches!(resolution, Resolution::Installed { .. }));
    within_patience("the toucher", move || toucher.join().unwrap());
    assert_eq!(counters.wakes, 1);
    let read = readers.stop().unwrap();
    assert_eq!(
        (read.messages, read.lost_claims, read.installs),
        (1, 1, 0),
        "{read:?}"
    );
}

#[test]
fn a_sleeper_on_a_page_that_came_without_a_wake_is_woken() {
    for mode in [Mode::Minor, Mode::Missing] {
        let Some(region) = region(4, Backing::Shmem) else {
            return;
        };
        let pager = pager(&region, mode, pattern());
        let touched = Arc::clone(&region);
        // Asleep before any reader runs, so that the exit finds the page absent and installs it
        // without a wake.
        let toucher = spawn_asleep("toucher", move || check_page(&touched, 1));
        pager
            .resolver(0)
            .resolve_exit(&read_exit(&region, 1))
            .unwrap();
        thread::sleep(Duration::from_millis(50));
        assert!(!toucher.is_finished());
        let readers = Readers::spawn(&pager, ReaderConfig::new(1)).unwrap();
        within_patience("the toucher", move || toucher.join().unwrap());
        let counters = readers.stop().unwrap();
        assert_eq!(
            (counters.already_present, counters.wakes),
            (1, 1),
            "{mode:?} {counters:?}"
        );
    }
}

#[test]
fn a_mapping_that_was_lost_is_made_again() {
    let Some(region) = region(4, Backing::Shmem) else {
        return;
    };
    let pager = pager(&region, Mode::Minor, pattern());
    let readers = Readers::spawn(&pager, ReaderConfig::new(1)).unwrap();
    within_patience("touching", move || {
        region.write_guest(PageIndex(2), 0, &[0x77]).unwrap();
        region.zap_guest(region.all_pages()).unwrap();
        let mut seen = [0];
        region.read_guest(PageIndex(2), 0, &mut seen).unwrap();
        assert_eq!(
            seen,
            [0x77],
            "the guest's own write, not the source's content"
        );
        let counters = readers.stop().unwrap();
        assert_eq!(
            (counters.installs, counters.reinstalls),
            (1, 1),
            "{counters:?}"
        );
    });
}

#[test]
fn pages_that_were_mapped_behind_the_pagers_back_are_taken_as_they_are() {
    let Some(region) = region(16, Backing::Shmem) else {
        return;
    };
    fill_page_cache(&region);
    let pager = Pager::builder(Mode::Minor, PageCacheSource)
        .region(Arc::clone(&region))
        .fault_around(16)
        .build()
        .unwrap();
    let touched = Arc::clone(&region);
    let toucher = spawn_asleep("toucher", move || check_page(&touched, 5));
    let uffd = Userfaultfd::open(Features::NONE).unwrap();
    let behind = region.guest_range(PageRange::new(PageIndex(4), 2)).unwrap();
    uffd.continue_pages(UserRange::from(behind), Wake::DontWake)
        .unwrap();
    let readers = Readers::spawn(&pager, ReaderConfig::new(1)).unwrap();
    within_patience("the toucher", move || toucher.join().unwrap());
    let counters = readers.stop().unwrap();
    let expected = Counters {
        exists: 2,
        pages: 14,
        again: 1,
        wakes: 1,
        ..counters
    };
    assert_eq!(counters, expected);
    for page in 0..16 {
        assert_eq!(state(&pager, page), PageState::Present);
        assert!(is_mapped(&region, page));
    }
}

#[test]
fn lost_content_is_an_error_to_whoever_waits_for_it() {
    let Some(region) = region(4, Backing::Shmem) else {
        return;
    };
    if !Userfaultfd::available().unwrap().contains(Features::POISON) {
        println!("SKIP: this kernel's userfaultfd lacks UFFD_FEATURE_POISON");
        return;
    }
    let pager = pager(
        &region,
        Mode::Minor,
        SourceFn(|_: &mut Fetch<'_>| Ok(Fetched::Poisoned)),
    );
    let readers = Readers::spawn(&pager, ReaderConfig::new(1)).unwrap();
    within_patience("populating", move || {
        let pages = PageRange::single(PageIndex(1));
        for _ in 0..2 {
            // A touch would be a SIGBUS; populating says the same in words.
            let error = region.populate(pages, PopulateAccess::Read).unwrap_err();
            assert_eq!(error, PopulateError::Poisoned { pages });
        }
        assert_eq!(state(&pager, 1), PageState::Poisoned);
        readers.stop().unwrap();
    });
}

#[test]
fn what_the_guest_gave_up_comes_back_as_zeroes() {
    for (mode, backing) in [
        (Mode::Minor, Backing::Shmem),
        (Mode::Missing, Backing::Anonymous),
    ] {
        let Some(region) = region(4, backing) else {
            return;
        };
        let pager = pager(&region, mode, pattern());
        let readers = Readers::spawn(&pager, ReaderConfig::new(2)).unwrap();
        within_patience("touching", move || {
            check_page(&region, 1);
            give_up(&pager, 1);
            region.punch(PageRange::single(PageIndex(1))).unwrap();
            let mut seen = [1; 4096];
            region.read_guest(PageIndex(1), 0, &mut seen).unwrap();
            assert_eq!(seen, [0; 4096]);
            readers.stop().unwrap();
        });
    }
}

#[test]
fn readers_stop_when_nothing_happens() {
    let Some(region) = region(4, Backing::Shmem) else {
        return;
    };
    let pager = pager(&region, Mode::Minor, pattern());
    within_patience("stopping", move || {
        for threads in [1, 8] {
            let readers = Readers::spawn(&pager, ReaderConfig::new(threads)).unwrap();
            readers.stop().unwrap();
        }
        drop(Readers::spawn(&pager, ReaderConfig::new(2)).unwrap());
    });
}
