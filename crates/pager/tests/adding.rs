//! Regions that a pager accepts, and those that it refuses without any change.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use pagetide_memory::{
    Backing, Claim, GuestAddress, GuestRange, HostAddress, HostRange, PageIndex, PageMap,
    PageRange, PageSize, PageState, PoisonMap, Region, RegionError, ServiceAccess, Settled,
};
use pagetide_pager::{
    AddError, Contents, Holes, Memfd, Mode, Pager, RegionConfig, RetryPolicy, UffdLayout,
};
use pagetide_uapi::userfaultfd::{Features, RegisterError, UserRange, Userfaultfd};
use support::*;

fn range(start: u64, bytes: u64) -> GuestRange {
    GuestRange::new(GuestAddress(start), bytes).unwrap()
}

/// The error for a config that a pager refuses. The pager serves the same regions as before, and the
/// region can still be paged.
fn refusal(region: &Arc<Region>, config: RegionConfig) -> AddError {
    let pager = Pager::new().unwrap();
    let error = pager.add(config).unwrap_err();
    assert_eq!(pager.region_ids(), [], "{error}");
    assert_eq!(region.paging(), None, "{error}");
    error
}

fn minor(region: &Arc<Region>) -> RegionConfig {
    RegionConfig::local(Arc::clone(region), Mode::Minor, pattern())
}

fn missing(region: &Arc<Region>) -> RegionConfig {
    RegionConfig::local(Arc::clone(region), Mode::Missing, pattern())
}

/// Pages the region in.
fn assert_usable(region: &Arc<Region>, mode: Mode) {
    let paged = Paged::new(region, mode, pattern());
    for page in 0..region.pages() {
        let _ = paged.read_exit(page);
        check_page(region, page);
    }
    assert_eq!(paged.pager.progress().present, region.pages());
}

#[test]
fn incompatible_modes_and_memory_are_refused() {
    if let Some(region) = region(4, Backing::Thp) {
        let error = refusal(&region, missing(&region));
        assert!(matches!(error, AddError::MissingOnThp), "{error}");
        assert_usable(&region, Mode::Minor);
    }
    let Some(anonymous) = region(4, Backing::Anonymous) else {
        return;
    };
    let error = refusal(&anonymous, minor(&anonymous));
    assert!(matches!(error, AddError::MinorWithoutFile), "{error}");
    assert_usable(&anonymous, Mode::Missing);
    let shmem = region(4, Backing::Shmem).unwrap();
    for holes in [Holes::AreMissing, Holes::AreZero] {
        let contents = Contents::PageCache(holes);
        let config = RegionConfig::local(Arc::clone(&shmem), Mode::Missing, contents);
        let error = refusal(&shmem, config);
        assert!(matches!(error, AddError::PageCacheNeedsMinor), "{error}");
    }
    assert_usable(&shmem, Mode::Missing);
}

#[test]
fn wrong_initial_content_is_refused() {
    let Some(holey) = region(4, Backing::Shmem) else {
        return;
    };
    let contents = || Contents::PageCache(Holes::AreMissing);
    let config = || RegionConfig::local(Arc::clone(&holey), Mode::Minor, contents());
    for page in [0, 1, 3] {
        let content = content(holey.gpa_of_page(PageIndex(page)).unwrap(), PAGE);
        holey.write_service(PageIndex(page), 0, &content).unwrap();
    }
    let error = refusal(&holey, config());
    assert!(
        matches!(error, AddError::Hole { page: PageIndex(2) }),
        "{error}"
    );
    // A page that was lost before needs no content.
    let mut lost = PoisonMap::new();
    lost.insert(gpas(2, 1)).unwrap();
    let pager = Pager::new().unwrap();
    if can_poison() {
        pager.add(config().poison(lost)).unwrap();
        assert_lost(&holey, 2);
    }

    let full = region(4, Backing::Shmem).unwrap();
    fill_page_cache(&full);
    let error = refusal(&full, missing(&full));
    assert!(
        matches!(error, AddError::NotEmpty { page: PageIndex(0) }),
        "{error}"
    );
    (0..4).for_each(|page| check_page(&full, page));
}

#[test]
fn invalid_numbers_are_refused() {
    let Some(region) = region(4, Backing::Shmem) else {
        return;
    };
    for pages in [0, 3, 17, 1024, u64::MAX] {
        let error = refusal(&region, minor(&region).fault_around(pages));
        let AddError::FaultAround { pages: said, max } = error else {
            panic!("{error}")
        };
        assert_eq!((said, max), (pages, 512));
    }
    for (attempts, deadline) in [(0, Duration::from_secs(1)), (1, Duration::ZERO)] {
        let policy = RetryPolicy {
            attempts,
            deadline,
            ..RetryPolicy::default()
        };
        let error = refusal(&region, minor(&region).retry_policy(policy));
        assert!(matches!(error, AddError::RetryPolicy), "{error}");
    }
    for pages in [1, 512] {
        let pager = Pager::new().unwrap();
        pager.add(minor(&region).fault_around(pages)).unwrap();
    }
}

#[test]
fn regions_that_overlap_are_refused() {
    let Some(low) = region(4, Backing::Shmem) else {
        return;
    };
    let high = region_at(GuestAddress(GPA.0 + PAGE), 1, Backing::Shmem).unwrap();
    for (one, other) in [(&low, &high), (&high, &low), (&low, &low)] {
        let pager = Pager::new().unwrap();
        let id = pager.add(minor(one)).unwrap();
        let error = pager.add(minor(other)).unwrap_err();
        let AddError::Overlap { first, second } = error else {
            panic!("{error}")
        };
        assert!(first.start() <= second.start());
        assert_eq!(pager.region_ids(), [id]);
        // The region that is already served continues.
        pager.remove(id).unwrap();
        pager.add(minor(other)).unwrap();
    }
}

#[test]
fn memory_that_another_pager_serves_is_refused_and_free_after_it() {
    for mode in [Mode::Minor, Mode::Missing] {
        let Some(region) = region(4, Backing::Shmem) else {
            return;
        };
        let paged = Paged::new(&region, mode, pattern());
        let again = Paged::try_with(&region, mode, pattern(), |config| config).map(drop);
        let Err(AddError::Region(RegionError::AlreadyPaged)) = again else {
            panic!("{mode:?}: {again:?}")
        };
        // It continues to be served.
        let _ = paged.read_exit(1);
        check_page(&region, 1);
        drop(paged);
        region.punch(region.all_pages()).unwrap();
        assert_usable(&region, mode);
    }
}

#[test]
fn memory_that_another_userfaultfd_serves_is_refused() {
    let Some(region) = region(8, Backing::Shmem) else {
        return;
    };
    let uffd = Userfaultfd::open(Features::NONE).unwrap();
    let part = gpas(4, 4);
    let hva = region.gpa_to_hva(part.start()).unwrap().as_u64();
    let taken = UserRange {
        start: hva,
        bytes: part.bytes(),
    };
    // SAFETY: the region stays mapped for longer than the userfaultfd is open, and no code relies on
    // its zeroes.
    unsafe { uffd.register(taken, Mode::Minor) }.unwrap();
    for layout in [
        UffdLayout::Single,
        UffdLayout::PerRange(vec![gpas(0, 4), part]),
    ] {
        let error = refusal(&region, minor(&region).userfaultfds(layout));
        assert!(
            matches!(error, AddError::Register(RegisterError::Busy { .. })),
            "{error}"
        );
    }
    // Its content is unchanged.
    uffd.unregister(taken).unwrap();
    assert_usable(&region, Mode::Minor);
}

#[test]
fn a_region_with_referenced_words_cannot_close_its_service_mapping() {
    let Some(region) = region(4, Backing::Shmem) else {
        return;
    };
    assert!(region.service_word(PageIndex(1), 8).is_some());
    let error = refusal(&region, missing(&region));
    assert!(
        matches!(error, AddError::Region(RegionError::ServiceInUse)),
        "{error}"
    );
    assert_usable(&region, Mode::Minor);
}

#[test]
fn userfaultfd_ranges_must_cover_the_region() {
    for (mode, backing) in SMALL_WAYS {
        let Some(region) = region(8, backing) else {
            return;
        };
        let config = |ranges: Vec<GuestRange>| {
            let config = RegionConfig::local(Arc::clone(&region), mode, pattern());
            config.userfaultfds(UffdLayout::PerRange(ranges))
        };
        let half = 4 * PAGE;
        let (low, high) = (range(GPA.0, half), range(GPA.0 + half, half));
        for ranges in [
            vec![],
            vec![low],
            vec![high],
            vec![low, low, high],
            vec![low, range(GPA.0, PAGE)],
            vec![low, range(GPA.0 + half + PAGE, half - PAGE)],
        ] {
            let error = refusal(&region, config(ranges.clone()));
            assert!(
                matches!(error, AddError::NotCovered { .. }),
                "{ranges:?}: {error}"
            );
        }
        for stray in [
            range(0, PAGE),
            range(GPA.0 - PAGE, 2 * PAGE),
            range(GPA.0 + half, 2 * half),
        ] {
            let error = refusal(&region, config(vec![low, high, stray]));
            let AddError::BadUffdRange { range } = error else {
                panic!("{stray}: {error}")
            };
            assert_eq!(range, stray);
        }
        let pager = Pager::new().unwrap();
        pager.add(config(vec![high, low])).unwrap();
    }
    let _pool = HugePages::reserve(2);
    let Some(huge) = region(2, Backing::Hugetlb2M) else {
        return;
    };
    let part = range(GPA.0, 0x10_0000);
    let layout = UffdLayout::PerRange(vec![part]);
    let error = refusal(&huge, minor(&huge).userfaultfds(layout));
    assert!(matches!(error, AddError::BadUffdRange { .. }), "{error}");
}

#[test]
fn poison_outside_the_region_is_refused() {
    let Some(region) = region(4, Backing::Shmem) else {
        return;
    };
    for other in [gpas(4, 1), gpas(3, 2), range(GPA.0 - PAGE, 2 * PAGE)] {
        let mut lost = PoisonMap::new();
        lost.insert(gpas(2, 1)).unwrap();
        lost.insert(other).unwrap();
        let error = refusal(&region, minor(&region).poison(lost));
        let AddError::PoisonOutside { range } = error else {
            panic!("{error}")
        };
        assert!(range.end() > region.range().end() || range.start() < region.gpa());
    }
}

#[test]
fn a_page_map_of_another_size_is_refused() {
    let Some(region) = region(4, Backing::Shmem) else {
        return;
    };
    let image = PageMap::new(5).unwrap().image();
    let error = refusal(&region, minor(&region).resume_from(image));
    assert!(matches!(error, AddError::Import(_)), "{error}");
}

/// A foreign range and the userfaultfd for it.
fn foreign(start: u64, bytes: u64, mode: Mode) -> Option<RegionConfig> {
    if !has_userfaultfd() {
        return None;
    }
    let uffd = Arc::new(Userfaultfd::open(Features::NONE).unwrap());
    let start = HostAddress(usize::try_from(start).unwrap());
    let range = HostRange::new(start, usize::try_from(bytes).unwrap()).unwrap();
    let size = PageSize::Size4K;
    Some(RegionConfig::foreign(&uffd, range, size, mode, pattern()))
}

#[test]
fn invalid_foreign_ranges_are_refused() {
    let add = |config: RegionConfig| Pager::new().unwrap().add(config).unwrap_err();
    let at = 0x10_0000_0000;
    let Some(config) = foreign(at, 4 * PAGE, Mode::Missing) else {
        return;
    };
    let error = add(config.gpa(GuestAddress(u64::MAX - 2 * PAGE + 1)));
    assert!(matches!(error, AddError::BadRange { .. }), "{error}");
    let uffd = Arc::new(Userfaultfd::open(Features::NONE).unwrap());
    let part = HostRange::new(HostAddress(1 << 30), 0x30_0000).unwrap();
    let huge = PageSize::Size2M;
    let error = add(RegionConfig::foreign(
        &uffd,
        part,
        huge,
        Mode::Missing,
        pattern(),
    ));
    assert!(matches!(error, AddError::BadRange { .. }), "{error}");
    let error = add(foreign(at, 4 * PAGE, Mode::Minor).unwrap());
    assert!(matches!(error, AddError::MinorWithoutFile), "{error}");
    // So long that the allocation of a page map fails.
    let error = add(foreign(at, 1 << 62, Mode::Missing).unwrap());
    assert!(matches!(error, AddError::PageMap(_)), "{error}");
    let memfd = Memfd {
        file: OwnedFd::from(std::fs::File::open("/dev/zero").unwrap()),
        offset_bytes: 0,
    };
    let error = add(foreign(at, 4 * PAGE, Mode::Minor).unwrap().memfd(memfd));
    assert!(matches!(error, AddError::File(_)), "{error}");
}

#[test]
fn foreign_ranges_of_one_userfaultfd_must_not_overlap() {
    if !has_userfaultfd() {
        return;
    }
    let uffd = Arc::new(Userfaultfd::open(Features::NONE).unwrap());
    let config = |start: usize, gpa: u64| {
        let range = HostRange::new(HostAddress(start), 0x4000).unwrap();
        let size = PageSize::Size4K;
        let config = RegionConfig::foreign(&uffd, range, size, Mode::Missing, pattern());
        config.gpa(GuestAddress(gpa))
    };
    let pager = Pager::new().unwrap();
    let first = pager.add(config(0x10_0000, 0)).unwrap();
    let error = pager.add(config(0x10_2000, 0x10_0000)).unwrap_err();
    let AddError::HostOverlap { start } = error else {
        panic!("{error}")
    };
    assert_eq!(start, 0x10_2000);
    assert_eq!(pager.region_ids(), [first]);
    pager.add(config(0x10_4000, 0x10_0000)).unwrap();
}

#[test]
fn addresses_are_found_in_many_regions() {
    if !has_userfaultfd() {
        return;
    }
    let starts = [0x10_0000, 0x40_0000, 0x41_0000, 1 << 32];
    let pager = Pager::new().unwrap();
    // Not in ascending order: the pager sorts the regions.
    let mut ids = [None; 4];
    for index in [2, 0, 3, 1] {
        let region = region_at(GuestAddress(starts[index]), 16, Backing::Shmem).unwrap();
        ids[index] = Some(pager.add(minor(&region)).unwrap());
    }
    assert_eq!(pager.region_ids(), ids.map(Option::unwrap));
    for (start, id) in starts.into_iter().zip(ids.map(Option::unwrap)) {
        let region = pager.local_region(id).unwrap();
        assert_eq!(region.gpa(), GuestAddress(start));
        let located = pager.locate(GuestAddress(start + 0x5123));
        assert_eq!(located, Some((id, PageIndex(5))));
        assert_eq!(pager.counts(id).unwrap().absent, 16);
        if start != 0x40_0000 {
            assert_eq!(pager.locate(GuestAddress(start + 0x1_0000)), None);
        }
    }
    assert_eq!(pager.locate(GuestAddress(0)), None);
    assert_eq!(pager.locate(GuestAddress(u64::MAX)), None);
    // Numbers are not reused.
    pager.remove(ids[1].unwrap()).unwrap();
    assert_eq!(pager.locate(GuestAddress(starts[1])), None);
    let region = region_at(GuestAddress(starts[1]), 16, Backing::Shmem).unwrap();
    let again = pager.add(minor(&region)).unwrap();
    assert!(!ids.contains(&Some(again)));
    assert_eq!(pager.region_ids()[1], again);
}

/// Adding and removing works without a thread that serves the pager, with events and without.
#[test]
fn a_region_with_events_is_added_and_removed() {
    for (mode, backing) in SMALL_WAYS {
        let Some(region) = region(4, backing) else {
            return;
        };
        let its = Arc::clone(&region);
        within_patience(&format!("{mode:?} {backing}"), move || {
            let mut lost = PoisonMap::new();
            if can_poison() {
                lost.insert(gpas(2, 1)).unwrap();
            }
            let set = |config: RegionConfig| {
                let config = config.userfaultfds(UffdLayout::WithEvents);
                config.poison(lost)
            };
            let paged = Paged::with(&its, mode, pattern(), set);
            assert_eq!(paged.read_exit(1), installed(1, 1));
            check_page(&its, 1);
            paged.pager.remove(paged.id).unwrap();
            if can_poison() {
                assert_lost(&its, 2);
                assert_lost(&its, 3);
            }
            check_page(&its, 1);
        });
    }
}

#[test]
fn a_region_that_was_not_added_is_unchanged() {
    let Some(region) = region(4, Backing::Shmem) else {
        return;
    };
    region.begin_paging(ServiceAccess::ReadWrite).unwrap();
    let pager = Pager::new().unwrap();
    let error = pager.add(minor(&region)).unwrap_err();
    assert!(
        matches!(error, AddError::Region(RegionError::AlreadyPaged)),
        "{error}"
    );
    // Another pager pages the region, and continues to.
    assert_eq!(region.paging(), Some(ServiceAccess::ReadWrite));
    region.end_paging();
    assert_usable(&region, Mode::Minor);
}

/// The source's content would not replace it.
#[test]
fn a_file_of_foreign_memory_that_has_content_is_refused() {
    let Some(region) = region(8, Backing::Shmem) else {
        return;
    };
    let features = Features::MISSING_SHMEM | Features::MINOR_SHMEM;
    let uffd = Arc::new(Userfaultfd::open(features).unwrap());
    // The pages 2 to 5. The file has content before, in the middle of and after them.
    let part = region.guest_range(PageRange::new(PageIndex(2), 4)).unwrap();
    let config = |mode| {
        let size = PageSize::Size4K;
        let config = RegionConfig::foreign(&uffd, part, size, mode, pattern());
        config.gpa(GPA).memfd(Memfd {
            file: region.file().unwrap().try_clone_to_owned().unwrap(),
            offset_bytes: 2 * PAGE,
        })
    };
    let add = |config| Pager::new().unwrap().add(config);
    for page in [0, 7] {
        region.write_service(PageIndex(page), 0, b"text").unwrap();
    }
    for mode in [Mode::Missing, Mode::Minor] {
        add(config(mode)).unwrap();
        region.write_service(PageIndex(5), 8, b"text").unwrap();
        let pager = Pager::new().unwrap();
        let error = pager.add(config(mode)).unwrap_err();
        assert!(
            matches!(error, AddError::NotEmpty { page: PageIndex(3) }),
            "{error}"
        );
        assert_eq!(pager.region_ids(), []);
        // Existing content is accepted if the owner trusts it, or if an earlier pager installed it.
        add(config(mode).trust_existing_pages()).unwrap();
        let image = PageMap::new(4).unwrap().image();
        add(config(mode).resume_from(image)).unwrap();
        region.punch(PageRange::single(PageIndex(5))).unwrap();
    }
}

/// As memory that a migration has filled before the VM runs here.
#[test]
fn what_a_resumed_map_has_as_settled_stays_mapped() {
    for backing in [Backing::Shmem, Backing::Hugetlb2M] {
        let _pool = pool_for(8, backing);
        let Some(region) = region(8, backing) else {
            continue;
        };
        let map = PageMap::new(8).unwrap();
        for page in [0, 1, 4] {
            let page = PageIndex(page);
            region.write_guest(page, 0, &[7]).unwrap();
            let Claim::Won(claim) = map.claim_run(page, PageRange::single(page)) else {
                panic!("nobody else is here")
            };
            let _ = claim.finish(Settled::Present);
        }
        let set = |config: RegionConfig| config.resume_from(map.image());
        let paged = Paged::with(&region, Mode::Minor, pattern(), set);
        let mapped: Vec<_> = (0..8).map(|page| is_mapped(&region, page)).collect();
        let wanted: Vec<_> = (0..8).map(|page| [0, 1, 4].contains(&page)).collect();
        assert_eq!(mapped, wanted, "{backing}");
        assert_eq!(first_byte(&region, 4), 7, "{backing}");
        for page in [2, 3, 5] {
            assert_eq!(paged.read_exit(page), installed(page, 1), "{backing}");
            check_page(&region, page);
        }
        assert_eq!(paged.pager.image(paged.id).unwrap().pages(), 8);
        let state = |page| paged.pager.image(paged.id).unwrap().state(PageIndex(page));
        assert_eq!(state(5), Some(PageState::Present), "{backing}");
        assert_eq!(state(6), Some(PageState::Absent), "{backing}");
    }
}
