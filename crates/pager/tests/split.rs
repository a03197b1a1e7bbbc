//! One range of addresses that consists of several kernel mappings, as after `madvise` on a part of it:
//! the kernel installs within one mapping at a time.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::sync::Arc;

use pagetide_memory::{Backing, PageIndex, PageRange, Region};
use pagetide_pager::{
    Content, Contents, Holes, Mode, Prefetch, PrefetchConfig, ReaderConfig, Readers, RegionConfig,
};
use support::*;

const PAGES: u64 = 32;

/// A region of 32 pages in three mappings or more: pages 5 and 6 have a separate mapping.
fn split_region(backing: Backing) -> Option<Arc<Region>> {
    let region = region(PAGES, backing)?;
    for (first, count) in [(5, 2), (16, 1)] {
        let pages = PageRange::new(PageIndex(first), count);
        let range = region.guest_range(pages).unwrap();
        let start = std::ptr::with_exposed_provenance_mut(range.start().0);
        // SAFETY: madvise has no requirements here; the advice only concerns core dumps.
        let advised = unsafe { libc::madvise(start, range.bytes(), libc::MADV_DONTDUMP) };
        assert_eq!(advised, 0);
    }
    Some(region)
}

fn around(config: RegionConfig) -> RegionConfig {
    config.fault_around(PAGES)
}

/// Checks that every page has its content, and that none was removed.
fn check(paged: &Paged) {
    (0..PAGES).for_each(|page| check_page(&paged.region, page));
    assert_eq!(paged.pager.counts(paged.id).unwrap().present, PAGES);
}

/// Resolves an exit on page `first`, and then exits on all pages.
fn check_exits(paged: &Paged, first: u64) {
    let _ = paged.read_exit(first);
    check_page(&paged.region, first);
    (0..PAGES).for_each(|page| {
        let _ = paged.read_exit(page);
    });
    check(paged);
}

#[test]
fn faults_install_in_several_mappings() {
    for (mode, backing) in SMALL_WAYS {
        for faulting in [0, 4, 5, 7, 16, 31] {
            let Some(region) = split_region(backing) else {
                return;
            };
            let paged = Paged::with(&region, mode, pattern(), around);
            check_exits(&paged, faulting);
        }
    }
}

#[test]
fn a_page_cache_in_several_mappings_is_mapped() {
    for faulting in [0, 4, 5, 7, 16, 31] {
        let Some(region) = split_region(Backing::Shmem) else {
            return;
        };
        fill_page_cache(&region);
        let contents = Contents::PageCache(Holes::AreMissing);
        let paged = Paged::with(&region, Mode::Minor, contents, around);
        check_exits(&paged, faulting);
    }
}

#[test]
fn arrivals_are_installed_in_several_mappings() {
    for (mode, backing) in SMALL_WAYS {
        let Some(region) = split_region(backing) else {
            return;
        };
        let source = ManualSource::new();
        let paged = Paged::with(&region, mode, source.contents(), around);
        let readers = Readers::spawn(&paged.pager, ReaderConfig::new(1)).unwrap();
        let its = Arc::clone(&region);
        let toucher = spawn_asleep("a touch", move || check_page(&its, 9));
        sources::complete(source.next());
        join("the touch", toucher);
        readers.stop();
        assert_eq!(source.waiting(), 0);
        check(&paged);
    }
}

#[test]
fn pushes_are_installed_in_several_mappings() {
    for (mode, backing) in SMALL_WAYS {
        let Some(region) = split_region(backing) else {
            return;
        };
        let paged = Paged::new(&region, mode, ManualSource::new().contents());
        let bytes = content(GPA, region.bytes());
        let pushed = paged
            .pager
            .push(paged.id, region.all_pages(), Content::Bytes(&bytes));
        assert_eq!(pushed.unwrap(), PAGES);
        check(&paged);
    }
}

#[test]
fn prefetch_installs_in_several_mappings() {
    for (mode, backing) in SMALL_WAYS {
        let Some(region) = split_region(backing) else {
            return;
        };
        let paged = Paged::new(&region, mode, pattern());
        let prefetch = Prefetch::spawn(&paged.pager, PrefetchConfig::default()).unwrap();
        let end = within_patience("prefetch", || prefetch.finish().unwrap());
        assert!(end.is_complete);
        check(&paged);
    }
}

#[test]
fn missing_pages_in_several_mappings_are_lost() {
    if !can_poison() {
        return;
    }
    for (mode, backing) in SMALL_WAYS {
        let Some(region) = split_region(backing) else {
            return;
        };
        drop(Paged::new(&region, mode, pattern()));
        (0..PAGES).for_each(|page| assert_lost(&region, page));
    }
}
