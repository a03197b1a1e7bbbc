//! Faults that are delivered as exits and resolved by the vCPU's own thread. These tests have no
//! reader: an access to a missing page would hang.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use pagetide_memory::{Access, Backing, GuestAddress, PageIndex, PageRange, PageState};
use pagetide_pager::{
    Contents, Counters, Filled, Holes, InstallFailure, Mode, Resolution, ResolveError, UffdLayout,
};
use pagetide_uapi::userfaultfd::InstallError;
use support::*;

fn pages_for(backing: Backing) -> u64 {
    if backing.is_hugetlb() { 4 } else { 64 }
}

#[test]
fn every_page_is_installed_once() {
    for (mode, backing) in WAYS {
        let pages = pages_for(backing);
        let _pool = pool_for(pages, backing);
        let Some(region) = region(pages, backing) else {
            continue;
        };
        let paged = Paged::new(&region, mode, pattern());
        let mut resolver = paged.resolver();
        for page in 0..pages {
            let first = exit(&mut resolver, &region, page, Access::Read).unwrap();
            assert_eq!(first, installed(page, 1), "{mode:?} {backing}");
            assert_eq!(paged.state(page), PageState::Present);
            let again = exit(&mut resolver, &region, page, Access::Read).unwrap();
            assert_eq!(again, Resolution::AlreadyPresent);
            check_page(&region, page);
        }
        let expected = Counters {
            faults: 2 * pages,
            installs: pages,
            pages,
            already_present: pages,
            ..Counters::default()
        };
        assert_eq!(resolver.counters(), &expected, "{mode:?} {backing}");
        drop(resolver);
        assert_eq!(paged.pager.counted(), expected);
    }
}

#[test]
fn pages_in_the_page_cache_are_only_mapped() {
    for backing in [Backing::Shmem, Backing::Thp, Backing::Hugetlb2M] {
        let pages = pages_for(backing);
        let _pool = pool_for(pages, backing);
        let Some(region) = region(pages, backing) else {
            continue;
        };
        fill_page_cache(&region);
        let contents = Contents::PageCache(Holes::AreMissing);
        let paged = Paged::new(&region, Mode::Minor, contents);
        let mut resolver = paged.resolver();
        for page in 0..pages {
            let _ = exit(&mut resolver, &region, page, Access::Read).unwrap();
            check_page(&region, page);
        }
        assert_eq!(resolver.counters().pages, pages);
    }
}

#[test]
fn a_hole_that_appears_later_is_an_error_and_not_a_zero_page() {
    let Some(region) = region(8, Backing::Shmem) else {
        return;
    };
    fill_page_cache(&region);
    let contents = Contents::PageCache(Holes::AreMissing);
    let paged = Paged::new(&region, Mode::Minor, contents);
    region.punch(PageRange::single(PageIndex(3))).unwrap();
    let error = paged.exit(3, Access::Read).unwrap_err();
    let no_content = InstallFailure::Kernel(InstallError::NoContent).to_string();
    let ResolveError::Install { source, .. } = &error else {
        panic!("{error:?}")
    };
    assert_eq!(source.to_string(), no_content);
    assert_eq!(paged.state(3), PageState::Absent);
    assert!(!is_mapped(&region, 3));
}

#[test]
fn a_hole_is_zero_if_configured() {
    for around in [1, 16] {
        let Some(region) = region(16, Backing::Shmem) else {
            return;
        };
        for page in [4, 5, 6, 9] {
            region.write_service(PageIndex(page), 0, &[1]).unwrap();
        }
        let contents = Contents::PageCache(Holes::AreZero);
        let set = |config: pagetide_pager::RegionConfig| config.fault_around(around);
        let paged = Paged::with(&region, Mode::Minor, contents, set);
        for page in [7, 5, 0, 15, 9] {
            let resolution = paged.read_exit(page);
            let is_hole = ![4, 5, 6, 9].contains(&page);
            assert!(
                matches!(resolution, Resolution::Installed { .. }),
                "{resolution:?}"
            );
            assert_eq!(first_byte(&region, page), u8::from(!is_hole), "page {page}");
            assert_eq!(paged.state(page), PageState::Present);
            // The guest's own writes are preserved.
            let _ = paged.exit(page, Access::Write).unwrap();
            region.write_guest(PageIndex(page), 0, &[9]).unwrap();
        }
        assert_eq!(first_byte(&region, 7), 9);
    }
}

#[test]
fn neighbours_are_installed_too() {
    for (mode, backing) in SMALL_WAYS {
        let Some(region) = region(64, backing) else {
            return;
        };
        let paged = Paged::with(&region, mode, pattern(), |config| config.fault_around(16));
        let mut resolver = paged.resolver();
        for (page, first) in [(37, 32), (0, 0), (63, 48)] {
            let resolution = exit(&mut resolver, &region, page, Access::Read).unwrap();
            assert_eq!(resolution, installed(first, 16), "{mode:?} {backing}");
        }
        assert_eq!(resolver.counters().installs, 3);
        for page in (0..16).chain(32..64) {
            assert_eq!(paged.state(page), PageState::Present);
            check_page(&region, page);
        }
        for page in 16..32 {
            assert_eq!(paged.state(page), PageState::Absent);
            assert!(!is_mapped(&region, page));
        }
    }
}

/// The window is clipped at the region's ends and at present pages.
#[test]
fn neighbours_end_at_the_region_and_at_present_pages() {
    for (mode, backing) in SMALL_WAYS {
        let Some(region) = region(20, backing) else {
            return;
        };
        let paged = Paged::with(&region, mode, pattern(), |config| config.fault_around(512));
        let single = PageRange::single(PageIndex(7));
        let bytes = content(region.gpa_of_page(PageIndex(7)).unwrap(), PAGE);
        let bytes = pagetide_pager::Content::Bytes(&bytes);
        assert_eq!(paged.pager.push(paged.id, single, bytes).unwrap(), 1);
        assert_eq!(paged.read_exit(19), installed(8, 12), "{mode:?} {backing}");
        assert_eq!(paged.read_exit(6), installed(0, 7), "{mode:?} {backing}");
        (0..20).for_each(|page| check_page(&region, page));
    }
}

#[test]
fn neighbours_of_another_userfaultfd_stay_absent() {
    for (mode, backing) in SMALL_WAYS {
        let Some(region) = region(8, backing) else {
            return;
        };
        let layout = UffdLayout::PerRange(vec![gpas(3, 5), gpas(0, 3)]);
        let paged = Paged::with(&region, mode, pattern(), |config| {
            config.userfaultfds(layout).fault_around(8)
        });
        let mut resolver = paged.resolver();
        for (faulting, first, pages) in [(2, 0, 3), (3, 3, 5)] {
            let resolution = exit(&mut resolver, &region, faulting, Access::Read).unwrap();
            assert_eq!(resolution, installed(first, pages));
        }
        assert_eq!(resolver.counters().installs, 2);
        (0..8).for_each(|page| check_page(&region, page));
    }
}

#[test]
fn neighbours_without_content_stay_absent() {
    let Some(region) = region(16, Backing::Shmem) else {
        return;
    };
    fill_page_cache(&region);
    let contents = Contents::PageCache(Holes::AreMissing);
    let set = |config: pagetide_pager::RegionConfig| config.fault_around(16);
    let paged = Paged::with(&region, Mode::Minor, contents, set);
    for hole in [(0, 4), (7, 2), (10, 6)] {
        let hole = PageRange::new(PageIndex(hole.0), hole.1);
        region.punch(hole).unwrap();
    }
    // No page before page 4 has content, so the run starts at the faulting page; page 6 is the last
    // with content.
    assert_eq!(paged.read_exit(5), installed(5, 2));
    for page in 0..16 {
        let expected = if page == 5 || page == 6 {
            PageState::Present
        } else {
            PageState::Absent
        };
        assert_eq!(paged.state(page), expected, "page {page}");
    }
    let _ = paged.read_exit(9);
    let _ = paged.read_exit(4);
    paged.exit(7, Access::Read).unwrap_err();
}

#[test]
fn zeroes_of_a_source_are_installed() {
    for (mode, backing) in WAYS {
        let _pool = pool_for(4, backing);
        let Some(region) = region(4, backing) else {
            continue;
        };
        let contents = local(LocalFn(|_, _: &mut [u8]| Ok(Filled::Zero)));
        let paged = Paged::new(&region, mode, contents);
        let mut resolver = paged.resolver();
        let resolution = exit(&mut resolver, &region, 1, Access::Read).unwrap();
        assert_eq!(resolution, installed(1, 1));
        let zero_page = backing == Backing::Anonymous;
        let expected = if zero_page {
            PageState::Zero
        } else {
            PageState::Present
        };
        assert_eq!(paged.state(1), expected, "{mode:?} {backing}");
        check_zeroes(&region, 1);
        // A write needs a separate page; this is known beforehand only for the zero page.
        let written = exit(&mut resolver, &region, 1, Access::Write).unwrap();
        let expected = if zero_page {
            Resolution::FaultedIn
        } else {
            Resolution::AlreadyPresent
        };
        assert_eq!(written, expected, "{mode:?} {backing}");
        region.write_guest(PageIndex(1), 0, &[9]).unwrap();
        assert_eq!(first_byte(&region, 1), 9);
    }
}

#[test]
fn lost_content_is_never_installed() {
    for (mode, backing) in SMALL_WAYS {
        let Some(region) = region(8, backing) else {
            return;
        };
        let lost = gpas(2, 1);
        let contents = local(LocalFn(move |gpa: GuestAddress, buffer: &mut [u8]| {
            let asked = gpa.0..gpa.0 + buffer.len() as u64;
            if asked.contains(&lost.start().0) {
                return Ok(Filled::Poisoned);
            }
            sources::fill_in(gpa, buffer)
        }));
        let paged = Paged::with(&region, mode, contents, |config| config.fault_around(8));
        // If a neighbour is lost, the page itself is still installed.
        assert_eq!(paged.read_exit(3), installed(3, 1));
        assert_eq!(paged.state(2), PageState::Absent);
        for _ in 0..2 {
            assert_eq!(paged.read_exit(2), Resolution::Poisoned);
            assert_eq!(paged.state(2), PageState::Poisoned);
            assert!(!is_mapped(&region, 2));
        }
        check_page(&region, 3);
    }
}

#[test]
fn a_local_source_that_fails_fails_the_fault_and_installs_nothing() {
    for (mode, backing) in SMALL_WAYS {
        for panics in [false, true] {
            let Some(region) = region(4, backing) else {
                return;
            };
            let contents = local(LocalFn(move |_, _: &mut [u8]| {
                assert!(!panics, "not this one");
                Err(sources::unavailable("gone"))
            }));
            let paged = Paged::new(&region, mode, contents);
            let error = paged.exit(1, Access::Read).unwrap_err();
            let ResolveError::Content { fault, source } = &error else {
                panic!("{error:?}")
            };
            assert_eq!((fault.page, fault.vcpu), (PageIndex(1), Some(0)));
            let said = source.to_string();
            assert_eq!(said.contains("not this one"), panics, "{said}");
            assert_eq!(paged.state(1), PageState::Absent);
            assert!(!is_mapped(&region, 1));
        }
    }
}

#[test]
fn an_address_outside_all_regions_is_refused() {
    let Some(region) = region(4, Backing::Shmem) else {
        return;
    };
    let paged = Paged::new(&region, Mode::Minor, pattern());
    let mut resolver = paged.resolver();
    for gpa in [GPA.0 - 1, GPA.0 + region.bytes(), 0, u64::MAX] {
        let gpa = GuestAddress(gpa);
        let error = resolver.resolve_exit(gpa, Access::Read).unwrap_err();
        assert!(matches!(error, ResolveError::Outside { .. }), "{error}");
    }
    paged.pager.remove(paged.id).unwrap();
    let error = exit(&mut resolver, &region, 0, Access::Read).unwrap_err();
    assert!(matches!(error, ResolveError::Outside { .. }), "{error}");
}
