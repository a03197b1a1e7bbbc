//! Exits on pages that are present already, half present, or present no more: brought in by another
//! vCPU, by an earlier run, or behind the pager's back.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod common;

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;

use common::*;
use pagetide_memory::{Backing, GuestAddress, GuestRange, PageIndex, PageRange, PageState};
use pagetide_pager::{
    ExitResolvers, Fetch, Mode, PageCacheSource, Pager, Resolution, ResolveError, UffdLayout,
};
use pagetide_uapi::userfaultfd::{Features, UserRange, Userfaultfd, Wake};

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
fn a_page_that_is_reclaimed_again_and_again_is_progress() {
    let Some(region) = region(4, Backing::Shmem) else {
        return;
    };
    let pager = Pager::builder(Mode::Minor, pattern())
        .region(Arc::clone(&region))
        .no_progress_limit(NonZeroU32::new(5).unwrap())
        .build()
        .unwrap();
    let mut resolver = pager.resolver(0);
    resolver.resolve_exit(&write_exit(&region, 2)).unwrap();
    for _ in 0..20 {
        region.zap_guest(region.all_pages()).unwrap();
        let exit = write_exit(&region, 2);
        let first = resolver.resolve_exit(&exit).unwrap();
        assert_eq!(first, Resolution::AlreadyPresent);
        let second = resolver.resolve_exit(&exit).unwrap();
        assert_eq!(second, Resolution::Reinstalled);
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
