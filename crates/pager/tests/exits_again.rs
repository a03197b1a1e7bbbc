//! Exits on pages that are already present, or no longer: installed by another vCPU or an earlier
//! pager, or changed without the pager.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;

use pagetide_memory::{Access, Backing, GuestAddress, GuestRange, PageIndex, PageRange, PageState};
use pagetide_pager::{Contents, Holes, Mode, RegionConfig, Resolution, ResolveError, UffdLayout};
use support::*;

#[test]
fn mapped_pages_of_the_page_cache_are_accepted() {
    for faulting in [3, 4, 5, 6, 0, 15] {
        let Some(region) = region(16, Backing::Shmem) else {
            return;
        };
        fill_page_cache(&region);
        let contents = Contents::PageCache(Holes::AreMissing);
        let set = |config: RegionConfig| config.fault_around(16);
        let paged = Paged::with(&region, Mode::Minor, contents, set);
        map_without_pager(&region, PageRange::new(PageIndex(4), 2));
        let mut resolver = paged.resolver();
        let resolution = exit(&mut resolver, &region, faulting, Access::Write).unwrap();
        let expected = match faulting {
            0..4 => installed(0, 4),
            4 | 5 => Resolution::Exists,
            _ => installed(6, 10),
        };
        assert_eq!(resolution, expected, "page {faulting}");
        for page in 0..16 {
            assert_eq!(paged.state(page), PageState::Present);
            check_page(&region, page);
        }
        let counters = resolver.counters();
        // Four pages and EAGAIN, two times EEXIST, ten pages.
        let counted = (counters.pages, counters.exists, counters.again);
        assert_eq!(counted, (14, 2, 1));
        let populates = u64::from(faulting == 4 || faulting == 5);
        assert_eq!(counters.faulted_in, populates);
    }
}

#[test]
fn a_lost_mapping_is_restored() {
    let Some(region) = region(4, Backing::Shmem) else {
        return;
    };
    let paged = Paged::new(&region, Mode::Minor, pattern());
    let mut resolver = paged.resolver();
    let _ = exit(&mut resolver, &region, 2, Access::Write).unwrap();
    region.write_guest(PageIndex(2), 0, &[0x77]).unwrap();
    region.zap_guest(region.all_pages()).unwrap();

    let first = exit(&mut resolver, &region, 2, Access::Read).unwrap();
    assert_eq!(first, Resolution::AlreadyPresent);
    assert!(!is_mapped(&region, 2));
    let second = exit(&mut resolver, &region, 2, Access::Read).unwrap();
    assert_eq!(second, Resolution::Reinstalled);
    // The guest's own write is preserved; the source's content does not replace it.
    assert_eq!(first_byte(&region, 2), 0x77);
}

/// Memory that was discarded without informing the pager reads as zeroes, as without a pager; the vCPU
/// continues.
#[test]
fn a_present_page_punched_without_the_pager_reads_as_zeroes() {
    for (mode, backing) in SMALL_WAYS {
        let Some(region) = region(4, backing) else {
            return;
        };
        let paged = Paged::new(&region, mode, pattern());
        let mut resolver = paged.resolver();
        let _ = exit(&mut resolver, &region, 2, Access::Read).unwrap();
        check_page(&region, 2);
        region.punch(PageRange::single(PageIndex(2))).unwrap();
        let again = |resolver: &mut _, access| exit(resolver, &region, 2, access).unwrap();
        assert_eq!(
            again(&mut resolver, Access::Read),
            Resolution::AlreadyPresent
        );
        let second = again(&mut resolver, Access::Read);
        assert_eq!(second, Resolution::Zeroed, "{mode:?} {backing}");
        assert_eq!(paged.state(2), PageState::Removed);
        check_zeroes(&region, 2);
        // The page can be written, and the data is preserved.
        for _ in 0..2 {
            let _ = again(&mut resolver, Access::Write);
        }
        region.write_guest(PageIndex(2), 0, &[5]).unwrap();
        let _ = again(&mut resolver, Access::Read);
        assert_eq!(first_byte(&region, 2), 5);
        if mode == Mode::Minor {
            // Losing its mapping does not lose the data either.
            region.zap_guest(PageRange::single(PageIndex(2))).unwrap();
            let _ = again(&mut resolver, Access::Read);
            assert_eq!(first_byte(&region, 2), 5);
        }
    }
}

#[test]
fn an_endless_fault_is_an_error() {
    for (mode, backing) in SMALL_WAYS {
        let Some(region) = region(4, backing) else {
            return;
        };
        let limit = NonZeroU32::new(5).unwrap();
        let set = |config: RegionConfig| config.no_progress_limit(limit);
        let paged = Paged::with(&region, mode, pattern(), set);
        let mut resolver = paged.pager.resolver(Some(7)).unwrap();
        let mut resolve = |page| exit(&mut resolver, &region, page, Access::Write);
        assert!(matches!(resolve(1), Ok(Resolution::Installed { .. })));
        assert!(matches!(resolve(1), Ok(Resolution::AlreadyPresent)));
        for _ in 0..4 {
            assert!(matches!(resolve(1), Ok(Resolution::FaultedIn)));
        }
        let error = resolve(1).unwrap_err();
        let ResolveError::NoProgress { fault, times } = &error else {
            panic!("{error}")
        };
        let gpa = GuestAddress(GPA.0 + PAGE);
        assert_eq!((fault.vcpu, fault.gpa, *times), (Some(7), gpa, 5));
        // Installing another page counts as progress.
        assert!(matches!(resolve(2), Ok(Resolution::Installed { .. })));
        assert!(matches!(resolve(1), Ok(Resolution::AlreadyPresent)));
    }
}

#[test]
fn a_repeatedly_reclaimed_page_counts_as_progress() {
    let Some(region) = region(4, Backing::Shmem) else {
        return;
    };
    let limit = NonZeroU32::new(5).unwrap();
    let set = |config: RegionConfig| config.no_progress_limit(limit);
    let paged = Paged::with(&region, Mode::Minor, pattern(), set);
    let mut resolver = paged.resolver();
    let _ = exit(&mut resolver, &region, 2, Access::Write).unwrap();
    for _ in 0..20 {
        region.zap_guest(region.all_pages()).unwrap();
        let first = exit(&mut resolver, &region, 2, Access::Write).unwrap();
        assert_eq!(first, Resolution::AlreadyPresent);
        let second = exit(&mut resolver, &region, 2, Access::Write).unwrap();
        assert_eq!(second, Resolution::Reinstalled);
    }
}

/// As with a balloon that repeatedly discards memory that a guest touches: a page is mapped each time,
/// so there is progress.
#[test]
fn a_repeatedly_discarded_page_counts_as_progress() {
    for (mode, backing) in SMALL_WAYS {
        let Some(region) = region(4, backing) else {
            return;
        };
        let limit = NonZeroU32::new(5).unwrap();
        let set = |config: RegionConfig| config.no_progress_limit(limit);
        let paged = Paged::with(&region, mode, pattern(), set);
        let mut resolver = paged.resolver();
        let page = PageRange::single(PageIndex(2));
        for turn in 0..20 {
            assert_eq!(paged.pager.discard(paged.id, page).unwrap(), 1);
            let resolved = exit(&mut resolver, &region, 2, Access::Read);
            assert!(
                matches!(resolved, Ok(Resolution::Zeroed)),
                "{mode:?} {backing}, {turn}: {resolved:?}"
            );
            assert!(is_mapped(&region, 2));
        }
        check_zeroes(&region, 2);
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
        let filled = Arc::new(AtomicU64::new(0));
        let counter = Arc::clone(&filled);
        let contents = local(LocalFn(move |gpa, buffer: &mut [u8]| {
            counter.fetch_add(buffer.len() as u64 / PAGE, Ordering::Relaxed);
            sources::fill_in(gpa, buffer)
        }));
        let each = region.bytes() / uffds;
        let range = |part| GuestRange::new(GuestAddress(GPA.0 + part * each), each).unwrap();
        let layout = match uffds {
            1 => UffdLayout::Single,
            _ => UffdLayout::PerRange((0..uffds).map(range).collect()),
        };
        let set = |config: RegionConfig| config.fault_around(around).userfaultfds(layout);
        let paged = Paged::with(&region, mode, contents, set);
        let start = Barrier::new(4);
        thread::scope(|scope| {
            for vcpu in 0..4 {
                let (paged, region, start) = (&paged, &region, &start);
                scope.spawn(move || {
                    let mut resolver = paged.pager.resolver(Some(vcpu)).unwrap();
                    start.wait();
                    for step in 0..region.pages() {
                        // Two run upwards and two downwards, so that they meet.
                        let last = region.pages() - 1;
                        let page = if vcpu % 2 == 0 { step } else { last - step };
                        let _ = exit(&mut resolver, region, page, Access::Read).unwrap();
                        check_page(region, page);
                    }
                });
            }
        });
        let counters = paged.pager.counted();
        let pages = region.pages();
        assert_eq!(counters.pages, pages, "each page once: {counters:?}");
        // Content is computed before a page is claimed, so two threads may compute the same.
        assert!(filled.load(Ordering::Relaxed) >= pages);
        assert_eq!(counters.exists, 0);
        assert_eq!(counters.faults, 4 * pages);
    }
}

#[test]
fn memory_can_be_paged_repeatedly() {
    for (mode, backing) in SMALL_WAYS {
        let Some(region) = region(16, backing) else {
            return;
        };
        for _ in 0..3 {
            let paged = Paged::new(&region, mode, pattern());
            for page in 0..16 {
                assert_eq!(paged.read_exit(page), installed(page, 1));
                check_page(&region, page);
            }
            assert_eq!(paged.pager.counted().pages, 16);
            drop(paged);
            // All pages were present, so none was poisoned.
            (0..16).for_each(|page| check_page(&region, page));
            region.punch(region.all_pages()).unwrap();
        }
    }
}

#[test]
fn earlier_mappings_are_removed() {
    let Some(region) = region(4, Backing::Shmem) else {
        return;
    };
    fill_page_cache(&region);
    check_page(&region, 1);
    assert!(is_mapped(&region, 1));
    let contents = Contents::PageCache(Holes::AreMissing);
    let paged = Paged::new(&region, Mode::Minor, contents);
    assert!(!is_mapped(&region, 1), "absent in the page map");
    let _ = paged.read_exit(1);
    check_page(&region, 1);
}
