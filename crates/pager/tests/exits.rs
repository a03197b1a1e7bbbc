//! Faults that come as exits of a vCPU and are resolved by its own thread. No reader runs in these
//! tests: a touch of a page that is not there would hang.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod common;

use std::sync::Arc;

use common::*;
use pagetide_memory::{Backing, GuestAddress, GuestRange, PageIndex, PageRange, PageState};
use pagetide_pager::{
    Counters, FaultExit, Fetch, Fetched, Mode, PageCacheSource, Pager, Resolution, ResolveError,
    UffdLayout,
};
use pagetide_uapi::userfaultfd::InstallError;

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
