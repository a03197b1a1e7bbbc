//! What a pager can be built of, and what it refuses.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod common;

use std::sync::Arc;

use common::*;
use pagetide_memory::{Backing, GuestAddress, GuestRange, HostAddress, PageIndex, Region};
use pagetide_pager::{BuildError, Mode, PageCacheSource, Pager, PagerBuilder, UffdLayout};
use pagetide_uapi::userfaultfd::RegisterError;

fn range(start: u64, bytes: u64) -> GuestRange {
    GuestRange::new(GuestAddress(start), bytes).unwrap()
}

fn with(region: &Arc<Region>) -> PagerBuilder {
    Pager::builder(Mode::Minor, pattern()).region(Arc::clone(region))
}

#[test]
fn modes_and_memory_that_do_not_fit_are_refused() {
    let refused = |mode, backing| {
        let region = region(4, backing)?;
        let builder = Pager::builder(mode, pattern()).region(region);
        Some(builder.build().unwrap_err())
    };
    if let Some(error) = refused(Mode::Missing, Backing::Thp) {
        assert!(matches!(error, BuildError::MissingOnThp), "{error}");
    }
    if let Some(error) = refused(Mode::Minor, Backing::Anonymous) {
        assert!(matches!(error, BuildError::MinorOnAnonymous), "{error}");
    }
    let Some(region) = region(4, Backing::Shmem) else {
        return;
    };
    let error = Pager::builder(Mode::Missing, PageCacheSource)
        .region(region)
        .build()
        .unwrap_err();
    assert!(matches!(error, BuildError::PageCacheNeedsMinor), "{error}");
}

#[test]
fn numbers_that_make_no_sense_are_refused() {
    let Some(region) = region(4, Backing::Shmem) else {
        return;
    };
    for pages in [0, 3, 17, 1024, u64::MAX] {
        let error = with(&region).fault_around(pages).build().unwrap_err();
        assert!(
            matches!(error, BuildError::FaultAround { max: 512, .. }),
            "{error}"
        );
    }
    let error = Pager::builder(Mode::Minor, pattern()).build().unwrap_err();
    assert!(matches!(error, BuildError::NoRegions), "{error}");
}

#[test]
fn regions_that_overlap_are_refused() {
    let Some(low) = region(4, Backing::Shmem) else {
        return;
    };
    let high = Arc::new(Region::new(GuestAddress(GPA.0 + PAGE), PAGE, Backing::Shmem).unwrap());
    let error = with(&high).region(low).build().unwrap_err();
    let BuildError::Overlap { first, second } = error else {
        panic!("{error}")
    };
    assert!(first.start() < second.start());
}

#[test]
fn memory_that_another_pager_serves_is_refused_and_free_after_it() {
    let Some(region) = region(4, Backing::Shmem) else {
        return;
    };
    let pager = with(&region).build().unwrap();
    let error = with(&region).build().unwrap_err();
    assert!(
        matches!(error, BuildError::Register(RegisterError::Busy { .. })),
        "{error}"
    );
    drop(pager);
    with(&region).build().unwrap();
}

#[test]
fn userfaultfd_ranges_must_add_up() {
    let Some(region) = region(8, Backing::Shmem) else {
        return;
    };
    let build = |ranges: Vec<GuestRange>| {
        with(&region)
            .uffds(UffdLayout::PerRange(ranges))
            .build()
            .map(drop)
    };
    let half = 4 * PAGE;
    let (low, high) = (range(GPA.0, half), range(GPA.0 + half, half));
    build(vec![high, low]).unwrap();
    for ranges in [
        vec![],
        vec![low],
        vec![high],
        vec![low, low, high],
        vec![low, range(GPA.0, PAGE)],
    ] {
        let error = build(ranges.clone()).unwrap_err();
        assert!(
            matches!(error, BuildError::NotCovered { .. }),
            "{ranges:?}: {error}"
        );
    }
    for stray in [
        range(0, PAGE),
        range(GPA.0 - PAGE, 2 * PAGE),
        range(GPA.0 + half, 2 * half),
    ] {
        let error = build(vec![low, high, stray]).unwrap_err();
        assert!(
            matches!(error, BuildError::BadRange { .. }),
            "{stray}: {error}"
        );
    }
}

#[test]
fn addresses_are_found_in_many_regions() {
    if !has_userfaultfd() {
        return;
    }
    let starts = [0x10_0000, 0x40_0000, 0x41_0000, 1 << 32];
    let mut builder = Pager::builder(Mode::Minor, pattern());
    // Not in order: the pager sorts them.
    for index in [2, 0, 3, 1] {
        let gpa = GuestAddress(starts[index]);
        let region = Region::new(gpa, 0x1_0000, Backing::Shmem).unwrap();
        builder = builder.region(Arc::new(region));
    }
    let pager = builder.build().unwrap();
    let regions: Vec<_> = pager.regions().cloned().collect();
    for (start, region) in starts.into_iter().zip(regions) {
        assert_eq!(region.gpa(), GuestAddress(start));
        let gpa = GuestAddress(start + 0x5123);
        let (id, page) = pager.locate(gpa).unwrap();
        assert_eq!(page, PageIndex(5));
        assert_eq!(
            pager.locate_host(region.gpa_to_hva(gpa).unwrap()),
            Some((id, page))
        );
        assert_eq!(pager.page_map(id).unwrap().pages(), 16);
        if start != 0x40_0000 {
            assert_eq!(pager.locate(GuestAddress(start + 0x1_0000)), None);
        }
    }
    assert_eq!(pager.locate(GuestAddress(0)), None);
    assert_eq!(pager.locate_host(HostAddress(0)), None);
    assert_eq!(pager.locate_host(HostAddress(usize::MAX)), None);
}
