//! Faults that come as exits of a vCPU and are resolved by its own thread. No reader runs in these
//! tests: a touch of a page that is not there would hang.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod common;

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;

use common::*;
use pagetide_memory::{Backing, GuestAddress, GuestRange, PageIndex, PageRange, PageState};
use pagetide_pager::{
    Counters, ExitResolvers, FaultExit, Fetch, Fetched, Mode, PageCacheSource, Pager, Resolution,
    ResolveError, UffdLayout,
};
use pagetide_uapi::userfaultfd::{Features, InstallError, UserRange, Userfaultfd, Wake};

/// What can be served how.
const COMBINATIONS: [(Mode, Backing); 6] = [
    (Mode::Minor, Backing::Shmem),
    (Mode::Minor, Backing::Thp),
    (Mode::Minor, Backing::Hugetlb2M),
    (Mode::Missing, Backing::Shmem),
    (Mode::Missing, Backing::Anonymous),
    (Mode::Missing, Backing::Hugetlb2M),
];

fn pages_for(backing: Backing) -> u64 {
    if backing.is_hugetlb() { 4 } else { 64 }
}

#[test]
fn every_page_is_brought_in_once() {
    for (mode, backing) in COMBINATIONS {
        let Some(region) = region(pages_for(backing), backing) else {
            continue;
        };
        let pager = pager(&region, mode, pattern());
        let mut resolver = pager.resolver(0);
        let bytes = region.page_size().bytes();
        for page in 0..region.pages() {
            let gpa = GuestAddress(GPA.0 + page * bytes);
            let resolution = resolver.resolve_exit(&read_exit(&region, page)).unwrap();
            assert_eq!(
                resolution,
                Resolution::Installed { gpa, bytes },
                "{mode:?} {backing}"
            );
            assert_eq!(state(&pager, page), PageState::Present);
            let again = resolver.resolve_exit(&read_exit(&region, page)).unwrap();
            assert_eq!(again, Resolution::AlreadyPresent);
            check_page(&region, page);
        }
        let pages = region.pages();
        let expected = Counters {
            faults: 2 * pages,
            installs: pages,
            pages,
            already_present: pages,
            ..Counters::default()
        };
        assert_eq!(resolver.counters(), &expected, "{mode:?} {backing}");
        drop(resolver);
        assert_eq!(pager.counted(), expected);
    }
}

#[test]
fn what_the_page_cache_has_is_only_mapped() {
    for backing in [Backing::Shmem, Backing::Thp, Backing::Hugetlb2M] {
        let Some(region) = region(pages_for(backing), backing) else {
            continue;
        };
        fill_page_cache(&region);
        let pager = pager(&region, Mode::Minor, PageCacheSource);
        let mut resolver = pager.resolver(0);
        for page in 0..region.pages() {
            resolver.resolve_exit(&read_exit(&region, page)).unwrap();
            check_page(&region, page);
        }
        assert_eq!(resolver.counters().pages, region.pages());
    }
}

#[test]
fn a_page_of_1g_is_mapped_in_one_piece() {
    let Some(region) = region(1, Backing::Hugetlb1G) else {
        return;
    };
    let last = region.bytes() - 4;
    region.write_service(PageIndex(0), 0, b"head").unwrap();
    region.write_service(PageIndex(0), last, b"tail").unwrap();
    let pager = pager(&region, Mode::Minor, PageCacheSource);
    let resolution = pager
        .resolver(0)
        .resolve_exit(&read_exit(&region, 0))
        .unwrap();
    assert_eq!(
        resolution,
        Resolution::Installed {
            gpa: GPA,
            bytes: 1 << 30
        }
    );
    for (offset, expected) in [(0, b"head"), (last, b"tail")] {
        let mut seen = [0; 4];
        region.read_guest(PageIndex(0), offset, &mut seen).unwrap();
        assert_eq!(&seen, expected);
    }
}

#[test]
fn what_the_page_cache_lacks_is_an_error_and_not_a_zero_page() {
    let Some(region) = region(8, Backing::Shmem) else {
        return;
    };
    let pager = pager(&region, Mode::Minor, PageCacheSource);
    let mut resolver = pager.resolver(0);
    let error = resolver.resolve_exit(&read_exit(&region, 3)).unwrap_err();
    assert!(
        matches!(
            error,
            ResolveError::Install {
                source: InstallError::NoContent,
                ..
            }
        ),
        "{error:?}"
    );
    assert_eq!(state(&pager, 3), PageState::Absent);
    assert!(!is_mapped(&region, 3));
}

#[test]
fn neighbours_come_along() {
    for (mode, backing) in COMBINATIONS {
        if backing.is_hugetlb() {
            continue;
        }
        let Some(region) = region(64, backing) else {
            continue;
        };
        let pager = Pager::builder(mode, pattern())
            .region(Arc::clone(&region))
            .fault_around(16)
            .build()
            .unwrap();
        let mut resolver = pager.resolver(0);
        let around = |first: u64, pages: u64| Resolution::Installed {
            gpa: GuestAddress(GPA.0 + first * PAGE),
            bytes: pages * PAGE,
        };
        assert_eq!(
            resolver.resolve_exit(&read_exit(&region, 37)).unwrap(),
            around(32, 16)
        );
        assert_eq!(
            resolver.resolve_exit(&read_exit(&region, 0)).unwrap(),
            around(0, 16)
        );
        assert_eq!(resolver.counters().installs, 2);
        for page in (0..16).chain(32..48) {
            assert_eq!(state(&pager, page), PageState::Present);
            check_page(&region, page);
        }
        for page in (16..32).chain(48..64) {
            assert_eq!(state(&pager, page), PageState::Absent);
            assert!(!is_mapped(&region, page));
        }
    }
}

#[test]
fn neighbours_of_another_userfaultfd_stay_absent() {
    let Some(region) = region(8, Backing::Shmem) else {
        return;
    };
    let range =
        |first, pages| GuestRange::new(GuestAddress(GPA.0 + first * PAGE), pages * PAGE).unwrap();
    let pager = Pager::builder(Mode::Minor, pattern())
        .region(Arc::clone(&region))
        .uffds(UffdLayout::PerRange(vec![range(0, 3), range(3, 5)]))
        .fault_around(8)
        .build()
        .unwrap();
    let mut resolver = pager.resolver(0);
    for (faulting, first, pages) in [(2, 0, 3), (3, 3, 5)] {
        let resolution = resolver
            .resolve_exit(&read_exit(&region, faulting))
            .unwrap();
        let gpa = range(first, pages).start();
        assert_eq!(
            resolution,
            Resolution::Installed {
                gpa,
                bytes: pages * PAGE
            }
        );
    }
    assert_eq!(resolver.counters().installs, 2);
}

#[test]
fn neighbours_without_content_stay_absent() {
    let Some(region) = region(16, Backing::Shmem) else {
        return;
    };
    for page in [4, 5, 6, 9] {
        region.write_service(PageIndex(page), 0, &[1]).unwrap();
    }
    let pager = Pager::builder(Mode::Minor, PageCacheSource)
        .region(Arc::clone(&region))
        .fault_around(16)
        .build()
        .unwrap();
    let mut resolver = pager.resolver(0);
    // Nothing before page 4, so the run starts over with the faulting page; nothing after page 6.
    let resolution = resolver.resolve_exit(&read_exit(&region, 5)).unwrap();
    let gpa = GuestAddress(GPA.0 + 5 * PAGE);
    assert_eq!(
        resolution,
        Resolution::Installed {
            gpa,
            bytes: 2 * PAGE
        }
    );
    for page in 0..16 {
        let expected = if page == 5 || page == 6 {
            PageState::Present
        } else {
            PageState::Absent
        };
        assert_eq!(state(&pager, page), expected, "page {page}");
    }
    resolver.resolve_exit(&read_exit(&region, 9)).unwrap();
    resolver.resolve_exit(&read_exit(&region, 4)).unwrap();
    resolver.resolve_exit(&read_exit(&region, 7)).unwrap_err();
}

/// Maps pages behind the pager's back, with a userfaultfd of the test's own.
fn map_behind(region: &pagetide_memory::Region, pages: PageRange) {
    let uffd = Userfaultfd::open(Features::NONE).unwrap();
    let range = UserRange::from(region.guest_range(pages).unwrap());
    uffd.continue_pages(range, Wake::DontWake).unwrap();
}

#[test]
fn pages_that_were_mapped_behind_the_pagers_back_are_taken_as_they_are() {
    for faulting in [3, 4, 5, 6, 0, 15] {
        let Some(region) = region(16, Backing::Shmem) else {
            return;
        };
        fill_page_cache(&region);
        let pager = Pager::builder(Mode::Minor, PageCacheSource)
            .region(Arc::clone(&region))
            .fault_around(16)
            .build()
            .unwrap();
        map_behind(&region, PageRange::new(PageIndex(4), 2));
        let mut resolver = pager.resolver(0);
        let resolution = resolver
            .resolve_exit(&write_exit(&region, faulting))
            .unwrap();
        let piece = |first: u64, pages: u64| Resolution::Installed {
            gpa: GuestAddress(GPA.0 + first * PAGE),
            bytes: pages * PAGE,
        };
        let expected = match faulting {
            0..4 => piece(0, 4),
            4 | 5 => Resolution::Exists,
            _ => piece(6, 10),
        };
        assert_eq!(resolution, expected, "page {faulting}");
        for page in 0..16 {
            assert_eq!(state(&pager, page), PageState::Present);
            check_page(&region, page);
        }
        let counters = resolver.counters();
        // Four pages and EAGAIN, two times EEXIST, ten pages.
        assert_eq!(
            (counters.pages, counters.exists, counters.again),
            (14, 2, 1)
        );
        assert_eq!(
            counters.populates,
            u64::from(faulting == 4 || faulting == 5)
        );
    }
}

#[test]
fn content_lands_on_its_own_page_when_the_kernel_stops_half_way() {
    let Some(region) = region(16, Backing::Anonymous) else {
        return;
    };
    let pager = Pager::builder(Mode::Missing, pattern())
        .region(Arc::clone(&region))
        .fault_around(16)
        .build()
        .unwrap();
    let uffd = Userfaultfd::open(Features::NONE).unwrap();
    let taken = region.guest_range(PageRange::single(PageIndex(4))).unwrap();
    uffd.copy_pages(taken.start().as_u64(), &[0x33; 4096], Wake::DontWake)
        .unwrap();
    let mut resolver = pager.resolver(0);
    let resolution = resolver.resolve_exit(&read_exit(&region, 7)).unwrap();
    let gpa = GuestAddress(GPA.0 + 5 * PAGE);
    assert_eq!(
        resolution,
        Resolution::Installed {
            gpa,
            bytes: 11 * PAGE
        }
    );
    for page in (0..4).chain(5..16) {
        check_page(&region, page);
    }
    let mut seen = [0];
    region.read_guest(PageIndex(4), 0, &mut seen).unwrap();
    assert_eq!(seen, [0x33], "what was there stays");
}

#[test]
fn what_was_mapped_before_the_pager_is_mapped_anew() {
    let Some(region) = region(4, Backing::Shmem) else {
        return;
    };
    fill_page_cache(&region);
    check_page(&region, 1);
    assert!(is_mapped(&region, 1));
    let pager = pager(&region, Mode::Minor, PageCacheSource);
    assert!(!is_mapped(&region, 1), "the page map says absent");
    pager
        .resolver(0)
        .resolve_exit(&read_exit(&region, 1))
        .unwrap();
    check_page(&region, 1);
}

#[test]
fn a_mapping_that_was_lost_is_made_again() {
    let Some(region) = region(4, Backing::Shmem) else {
        return;
    };
    let pager = pager(&region, Mode::Minor, pattern());
    let mut resolver = pager.resolver(0);
    resolver.resolve_exit(&write_exit(&region, 2)).unwrap();
    region.write_guest(PageIndex(2), 0, &[0x77]).unwrap();
    region.zap_guest(region.all_pages()).unwrap();

    let first = resolver.resolve_exit(&read_exit(&region, 2)).unwrap();
    assert_eq!(first, Resolution::AlreadyPresent);
    assert!(!is_mapped(&region, 2));
    let second = resolver.resolve_exit(&read_exit(&region, 2)).unwrap();
    assert_eq!(second, Resolution::Reinstalled);
    let mut seen = [0];
    region.read_guest(PageIndex(2), 0, &mut seen).unwrap();
    assert_eq!(
        seen,
        [0x77],
        "the guest's own write, not the source's content"
    );
}

#[test]
fn a_fault_without_end_is_an_error() {
    let Some(region) = region(4, Backing::Shmem) else {
        return;
    };
    let pager = Pager::builder(Mode::Minor, pattern())
        .region(Arc::clone(&region))
        .no_progress_limit(NonZeroU32::new(5).unwrap())
        .build()
        .unwrap();
    let mut resolver = pager.resolver(7);
    let mut resolve = |page| resolver.resolve_exit(&write_exit(&region, page));
    assert!(matches!(resolve(1), Ok(Resolution::Installed { .. })));
    assert!(matches!(resolve(1), Ok(Resolution::AlreadyPresent)));
    for _ in 0..4 {
        assert!(matches!(resolve(1), Ok(Resolution::Populated)));
    }
    let error = resolve(1).unwrap_err();
    let ResolveError::NoProgress { fault, times } = &error else {
        panic!("{error}")
    };
    assert_eq!(
        (fault.vcpu, fault.gpa, *times),
        (Some(7), GuestAddress(GPA.0 + PAGE), 5)
    );
    // Bringing another page in is progress.
    assert!(matches!(resolve(2), Ok(Resolution::Installed { .. })));
    assert!(matches!(resolve(1), Ok(Resolution::AlreadyPresent)));
}

#[test]
fn zeroes_are_installed_where_the_source_says_so() {
    for (mode, backing) in COMBINATIONS {
        let Some(region) = region(4, backing) else {
            continue;
        };
        if backing.has_file() && mode == Mode::Minor {
            // Something old is there, which must not show.
            region
                .write_service(PageIndex(0), 0, &vec![0xee; 4 * 4096])
                .unwrap();
        }
        let pager = pager(
            &region,
            mode,
            SourceFn(|_: &mut Fetch<'_>| Ok(Fetched::Zero)),
        );
        let mut resolver = pager.resolver(0);
        let resolution = resolver.resolve_exit(&read_exit(&region, 1)).unwrap();
        assert!(matches!(resolution, Resolution::Installed { .. }));
        let zero_page = backing == Backing::Anonymous;
        let expected = if zero_page {
            PageState::Zero
        } else {
            PageState::Present
        };
        assert_eq!(state(&pager, 1), expected, "{mode:?} {backing}");
        let mut seen = [1; 4096];
        region.read_guest(PageIndex(1), 0, &mut seen).unwrap();
        assert_eq!(seen, [0; 4096], "{mode:?} {backing}");
        // A write needs a page of its own; only of the zero page is that known beforehand.
        let written = resolver.resolve_exit(&write_exit(&region, 1)).unwrap();
        let expected = if zero_page {
            Resolution::Populated
        } else {
            Resolution::AlreadyPresent
        };
        assert_eq!(written, expected, "{mode:?} {backing}");
        region.write_guest(PageIndex(1), 0, &[9]).unwrap();
    }
}

#[test]
fn what_the_guest_gave_up_comes_back_as_zeroes() {
    for (mode, backing) in [
        (Mode::Minor, Backing::Shmem),
        (Mode::Missing, Backing::Shmem),
        (Mode::Missing, Backing::Anonymous),
    ] {
        let Some(region) = region(4, backing) else {
            return;
        };
        let pager = pager(&region, mode, pattern());
        let mut resolver = pager.resolver(0);
        resolver.resolve_exit(&read_exit(&region, 1)).unwrap();
        check_page(&region, 1);
        for page in [1, 2] {
            give_up(&pager, page);
            region.punch(PageRange::single(PageIndex(page))).unwrap();
            resolver.resolve_exit(&read_exit(&region, page)).unwrap();
            let mut seen = [1; 4096];
            region.read_guest(PageIndex(page), 0, &mut seen).unwrap();
            assert_eq!(seen, [0; 4096], "{mode:?} {backing} page {page}");
        }
    }
}

#[test]
fn lost_content_is_never_installed() {
    for (mode, backing) in [
        (Mode::Minor, Backing::Shmem),
        (Mode::Missing, Backing::Anonymous),
    ] {
        let Some(region) = region(8, backing) else {
            return;
        };
        let source = SourceFn(|fetch: &mut Fetch<'_>| {
            if fetch.pages().contains(PageIndex(2)) {
                return Ok(Fetched::Poisoned);
            }
            push_pattern(fetch)
        });
        let pager = Pager::builder(mode, source)
            .region(Arc::clone(&region))
            .fault_around(8)
            .build()
            .unwrap();
        let mut resolver = pager.resolver(0);
        // With a neighbour lost, the page itself still comes.
        let resolution = resolver.resolve_exit(&read_exit(&region, 3)).unwrap();
        assert!(
            matches!(resolution, Resolution::Installed { bytes: PAGE, .. }),
            "{resolution:?}"
        );
        assert_eq!(state(&pager, 2), PageState::Absent);
        for _ in 0..2 {
            let resolution = resolver.resolve_exit(&read_exit(&region, 2)).unwrap();
            assert_eq!(resolution, Resolution::Poisoned);
            assert_eq!(state(&pager, 2), PageState::Poisoned);
            assert!(!is_mapped(&region, 2));
        }
    }
}

#[test]
fn many_vcpus_share_the_pages() {
    for (mode, around, uffds) in [
        (Mode::Minor, 1, 1),
        (Mode::Minor, 16, 1),
        (Mode::Minor, 4, 4),
        (Mode::Missing, 1, 1),
        (Mode::Missing, 8, 4),
    ] {
        let Some(region) = region(2048, Backing::Shmem) else {
            return;
        };
        let fetched = Arc::new(AtomicU64::new(0));
        let counter = Arc::clone(&fetched);
        let source = SourceFn(move |fetch: &mut Fetch<'_>| {
            counter.fetch_add(fetch.pages().count(), Ordering::Relaxed);
            push_pattern(fetch)
        });
        let each = region.bytes() / uffds;
        let ranges = (0..uffds)
            .map(|part| GuestRange::new(GuestAddress(GPA.0 + part * each), each).unwrap());
        let layout = match uffds {
            1 => UffdLayout::Single,
            _ => UffdLayout::PerRange(ranges.collect()),
        };
        let pager = Pager::builder(mode, source)
            .region(Arc::clone(&region))
            .fault_around(around)
            .uffds(layout)
            .build()
            .unwrap();
        let vcpus: u32 = 4;
        let resolvers = ExitResolvers::new(&pager, vcpus);
        let start = Barrier::new(4);
        thread::scope(|scope| {
            for vcpu in 0..vcpus {
                let (region, resolvers, start) = (&region, &resolvers, &start);
                scope.spawn(move || {
                    start.wait();
                    for step in 0..region.pages() {
                        // Two run up and two run down, so that they meet.
                        let page = if vcpu % 2 == 0 {
                            step
                        } else {
                            region.pages() - 1 - step
                        };
                        resolvers.resolve(vcpu, &read_exit(region, page)).unwrap();
                        check_page(region, page);
                    }
                });
            }
        });
        let counters = resolvers.counters();
        assert_eq!(
            counters.pages,
            region.pages(),
            "each page once: {counters:?}"
        );
        assert_eq!(fetched.load(Ordering::Relaxed), region.pages());
        assert_eq!(counters.exists, 0);
        assert_eq!(counters.faults, 4 * region.pages());
    }
}

#[test]
fn what_is_no_fault_on_an_absent_page_is_refused() {
    let Some(region) = region(4, Backing::Shmem) else {
        return;
    };
    let pager = pager(&region, Mode::Minor, pattern());
    let mut resolver = pager.resolver(0);
    for gpa in [GPA.0 - 1, GPA.0 + region.bytes(), 0, u64::MAX] {
        let exit = FaultExit {
            gpa: GuestAddress(gpa),
            ..read_exit(&region, 0)
        };
        let error = resolver.resolve_exit(&exit).unwrap_err();
        assert!(matches!(error, ResolveError::Outside { .. }), "{error}");
    }
    let good = read_exit(&region, 0);
    for exit in [
        FaultExit {
            absent: false,
            ..good
        },
        FaultExit {
            private: true,
            ..good
        },
        FaultExit {
            poisoned: true,
            ..good
        },
    ] {
        let error = resolver.resolve_exit(&exit).unwrap_err();
        assert!(
            matches!(error, ResolveError::NotResolvable { .. }),
            "{error}"
        );
    }
    assert_eq!(state(&pager, 0), PageState::Absent);
}

#[test]
fn a_pager_can_be_used_for_run_after_run() {
    let Some(region) = region(16, Backing::Shmem) else {
        return;
    };
    let pager = pager(&region, Mode::Minor, pattern());
    for _ in 0..3 {
        let mut resolver = pager.resolver(0);
        for page in 0..16 {
            let resolution = resolver.resolve_exit(&read_exit(&region, page)).unwrap();
            assert!(matches!(resolution, Resolution::Installed { .. }));
            check_page(&region, page);
        }
        drop(resolver);
        assert_eq!(pager.counted().pages, 16);
        region.punch(region.all_pages()).unwrap();
        pager.reset().unwrap();
        assert!(!is_mapped(&region, 3));
    }
}
