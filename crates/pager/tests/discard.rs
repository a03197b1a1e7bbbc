//! Discarded memory reads as zeroes, also during concurrent operations.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::error::Error;
use std::sync::{Arc, Mutex, mpsc};
use std::thread;

use pagetide_memory::{
    Access, Backing, GuestAddress, GuestRange, PageIndex, PageRange, PageSize, PageState, Region,
};
use pagetide_pager::{
    Content, DiscardError, Mapper, Memfd, Mode, Pager, ReaderConfig, Readers, RegionConfig,
    RegionId, Serving, UffdLayout,
};
use pagetide_test_support::{NoOtherThread, in_a_process_of_its_own};
use pagetide_uapi::userfaultfd::{Features, Userfaultfd};
use support::sources::complete;
use support::*;

fn pages(first: u64, count: u64) -> PageRange {
    PageRange::new(PageIndex(first), count)
}

fn state(pager: &Pager, id: RegionId, page: u64) -> PageState {
    pager.page_state(id, PageIndex(page)).unwrap()
}

fn push(pager: &Pager, id: RegionId, region: &Region, page: u64) -> u64 {
    let gpa = region.gpa_of_page(PageIndex(page)).unwrap();
    let bytes = content(gpa, region.page_size().bytes());
    pager
        .push(id, pages(page, 1), Content::Bytes(&bytes))
        .unwrap()
}

fn write(region: &Region, page: u64, text: &[u8; 8]) {
    region.write_guest(PageIndex(page), 64, text).unwrap();
}

fn written(region: &Region, page: u64) -> [u8; 8] {
    let mut seen = [0; 8];
    region.read_guest(PageIndex(page), 64, &mut seen).unwrap();
    seen
}

#[test]
fn discarded_pages_are_zero_and_poisoned_ones_stay() {
    for (mode, backing) in WAYS {
        let _pool = pool_for(8, backing);
        let Some(region) = region(8, backing) else {
            continue;
        };
        if !can_poison() {
            return;
        }
        let source = ManualSource::new();
        let pager = Pager::new().unwrap();
        let config = RegionConfig::local(Arc::clone(&region), mode, source.contents());
        let id = pager.add(config).unwrap();
        let _readers = Readers::spawn(&pager, ReaderConfig::new(1)).unwrap();
        // 0 absent, 1 requested, 2 present, 3 zero, 4 poisoned, 5 present and written to; 6 and 7 are
        // not discarded.
        let toucher = {
            let region = Arc::clone(&region);
            thread::spawn(move || first_byte(&region, 1))
        };
        let request = source.next();
        assert_eq!(request.pages(), pages(1, 1), "{mode:?} {backing}");
        push(&pager, id, &region, 2);
        pager.push(id, pages(3, 1), Content::Zero).unwrap();
        pager.push(id, pages(4, 1), Content::Poisoned).unwrap();
        push(&pager, id, &region, 5);
        push(&pager, id, &region, 6);
        write(&region, 5, b"balloon!");

        assert_eq!(
            pager.discard(id, pages(0, 6)).unwrap(),
            5,
            "{mode:?} {backing}"
        );
        assert_eq!(join("the touch of a requested page", toucher), 0);
        // A later answer is dropped.
        complete(request);
        assert_eq!(push(&pager, id, &region, 0), 0);
        for page in [0, 1, 2, 3, 5] {
            assert_eq!(
                state(&pager, id, page),
                PageState::Removed,
                "{mode:?} {backing}: {page}"
            );
            check_zeroes(&region, page);
            // What is written afterwards stays.
            write(&region, page, b"new life");
            assert_eq!(written(&region, page), *b"new life");
        }
        assert_eq!(state(&pager, id, 4), PageState::Poisoned);
        expect_poison(&region, 4);
        check_page(&region, 6);
        assert_eq!(state(&pager, id, 7), PageState::Absent);
        // A second discard also drops the new data.
        assert_eq!(pager.discard(id, pages(2, 1)).unwrap(), 1);
        assert_eq!(written(&region, 2), [0; 8]);
        assert_eq!(written(&region, 3), *b"new life");
        assert_no_trouble(&pager);
    }
}

/// Blocks threads that install pages ahead of faults.
struct Held(Mutex<mpsc::Receiver<()>>);

impl Mapper for Held {
    fn populate(&self, range: GuestRange) -> Result<u64, Box<dyn Error + Send + Sync>> {
        let _ = self.0.lock().unwrap().recv_timeout(PATIENCE);
        Ok(range.bytes())
    }
}

#[test]
fn a_discard_waits_for_an_installation_in_progress() {
    for (mode, backing) in SMALL_WAYS {
        let Some(region) = region(8, backing) else {
            return;
        };
        let (release, held) = mpsc::channel();
        let pager = Pager::new().unwrap();
        let config = RegionConfig::local(Arc::clone(&region), mode, pattern());
        let sink = Arc::new(Held(Mutex::new(held)));
        let id = pager.add(config.populate(sink, 1)).unwrap();
        let installer = {
            let (pager, region) = (Arc::clone(&pager), Arc::clone(&region));
            thread::spawn(move || push(&pager, id, &region, 3))
        };
        eventually("installing", || {
            state(&pager, id, 3) == PageState::Installing
        });
        let discarding = {
            let pager = Arc::clone(&pager);
            spawn_asleep("the discard", move || {
                pager.discard(id, pages(2, 4)).unwrap()
            })
        };
        assert_eq!(state(&pager, id, 3), PageState::Installing);
        release.send(()).unwrap();
        assert_eq!(join("the installation", installer), 1);
        assert_eq!(discarding.join(), 4);
        drop(release);
        let _readers = Readers::spawn(&pager, ReaderConfig::new(1)).unwrap();
        (2..6).for_each(|page| check_zeroes(&region, page));
        check_page(&region, 1);
    }
}

/// A guest's balloon discards memory while vCPUs touch it, and no thread serves userfaultfds: each exit
/// ends, and the guest continues.
#[test]
fn exits_on_pages_that_are_repeatedly_discarded_end() {
    for (mode, backing) in WAYS {
        let _pool = pool_for(4, backing);
        let Some(region) = region(4, backing) else {
            continue;
        };
        let pager = Pager::new().unwrap();
        let config = RegionConfig::local(Arc::clone(&region), mode, pattern());
        let id = pager.add(config).unwrap();
        let gpa = region.gpa_of_page(PageIndex(1)).unwrap();
        let exit = |access| {
            let pager = Arc::clone(&pager);
            let what = format!("{mode:?} {backing}: an exit");
            let resolved = within_patience(&what, move || {
                let mut resolver = pager.resolver(Some(0)).unwrap();
                // The same exit twice in a row.
                let _ = resolver.resolve_exit(gpa, access).unwrap();
                resolver.resolve_exit(gpa, access)
            });
            let _ = resolved.unwrap();
        };
        exit(Access::Read);
        check_page(&region, 1);
        for access in [Access::Read, Access::Write, Access::Unstated] {
            pager.discard(id, pages(1, 1)).unwrap();
            exit(access);
            check_zeroes(&region, 1);
            write(&region, 1, b"scribble");
            exit(access);
            assert_eq!(written(&region, 1), *b"scribble", "{mode:?} {backing}");
            // Other code discards it without informing the pager.
            region.punch(pages(1, 1)).unwrap();
            exit(access);
            check_zeroes(&region, 1);
        }
        // The same for a page that was present throughout.
        let last = region.gpa_of_page(PageIndex(3)).unwrap();
        push(&pager, id, &region, 3);
        region.punch(pages(3, 1)).unwrap();
        let at_last = {
            let pager = Arc::clone(&pager);
            move || {
                let mut resolver = pager.resolver(Some(0)).unwrap();
                (0..4).try_for_each(|_| resolver.resolve_exit(last, Access::Write).map(|_| ()))
            }
        };
        within_patience("an exit on a page that was lost", at_last).unwrap();
        check_zeroes(&region, 3);
        assert_no_trouble(&pager);
    }
}

#[test]
fn missing_regions_and_pages_are_refused() {
    let Some(region) = region(8, Backing::Shmem) else {
        return;
    };
    let pager = Pager::new().unwrap();
    let config = RegionConfig::local(Arc::clone(&region), Mode::Minor, pattern());
    let id = pager.add(config).unwrap();
    for none in [pages(0, 0), pages(8, 1), pages(7, 2), pages(u64::MAX, 1)] {
        let error = pager.discard(id, none).unwrap_err();
        assert!(matches!(error, DiscardError::NoSuchPages { .. }), "{error}");
    }
    assert_eq!(pager.counts(id).unwrap().removed, 0);
    pager.remove(id).unwrap();
    let error = pager.discard(id, pages(0, 1)).unwrap_err();
    assert!(
        matches!(error, DiscardError::NoSuchRegion { .. }),
        "{error}"
    );
}

/// Discards pages 1 to 4 of 8, present and missing ones, and checks the result. Only the discarding
/// thread serves the pager.
fn discard_alone(what: &str, pager: &Arc<Pager>, id: RegionId, region: &Arc<Region>) {
    for page in [1, 2, 6] {
        assert_eq!(push(pager, id, region, page), 1, "{what}");
    }
    let its = Arc::clone(pager);
    let discarded = within_patience(&format!("{what}: the discard"), move || {
        let mut serving = Serving::new(&its, 1);
        let discarded = its.discard(id, pages(1, 4)).unwrap();
        serving.process_ready().unwrap();
        discarded
    });
    assert_eq!(discarded, 4, "{what}");
    for page in 1..5 {
        assert_eq!(state(pager, id, page), PageState::Removed, "{what}: {page}");
    }
    let _readers = Readers::spawn(pager, ReaderConfig::new(1)).unwrap();
    (1..5).for_each(|page| check_zeroes(region, page));
    (5..8).for_each(|page| check_page(region, page));
    assert_no_trouble(pager);
}

#[test]
fn a_discard_of_memory_with_events_needs_no_other_thread() {
    for (mode, backing) in SMALL_WAYS {
        let Some(region) = region(8, backing) else {
            return;
        };
        let pager = Pager::new().unwrap();
        let config = RegionConfig::local(Arc::clone(&region), mode, pattern());
        let config = config.userfaultfds(UffdLayout::WithEvents);
        let id = pager.add(config).unwrap();
        discard_alone(&format!("{mode:?} {backing}"), &pager, id, &region);
    }
}

/// The same with memory of this process that other code mapped.
#[test]
fn a_discard_of_mapped_memory_with_events_needs_no_other_thread() {
    for (mode, backing) in SMALL_WAYS {
        let Some(region) = region(8, backing) else {
            return;
        };
        let features = match backing {
            Backing::Anonymous => Features::EVENT_REMOVE,
            _ => Features::EVENT_REMOVE | Features::MISSING_SHMEM | Features::MINOR_SHMEM,
        };
        let uffd = Arc::new(Userfaultfd::open(features).unwrap());
        // SAFETY: the region stays mapped for longer than the userfaultfd is open, and no code relies
        // on its zeroes.
        unsafe { uffd.register(region.guest().into(), mode) }.unwrap();
        let size = PageSize::Size4K;
        // SAFETY: as above.
        let config =
            unsafe { RegionConfig::mapped(&uffd, region.guest(), size, mode, pattern()) }.gpa(GPA);
        let config = match region.file() {
            None => config,
            Some(file) => config.memfd(Memfd {
                file: file.try_clone_to_owned().unwrap(),
                offset_bytes: 0,
            }),
        };
        let pager = Pager::new().unwrap();
        let id = pager.add(config).unwrap();
        discard_alone(&format!("{mode:?} {backing}"), &pager, id, &region);
    }
}

/// A balloon names memory by its gpas.
#[test]
fn a_range_of_gpas_is_discarded_where_whole_pages_are_in_it() {
    // Two regions without a gap, and none behind them.
    let both = [0, 8].map(|page| region_at(GuestAddress(GPA.0 + page * PAGE), 8, Backing::Shmem));
    let [Some(low), Some(high)] = &both else {
        return;
    };
    let pager = Pager::new().unwrap();
    let ids = [low, high].map(|region| {
        let config = RegionConfig::local(Arc::clone(region), Mode::Minor, pattern());
        pager.add(config).unwrap()
    });
    let discard = |first: u64, bytes: u64| {
        let gpa = GuestAddress(GPA.0 + first);
        pager.discard_gpas(gpa, bytes).unwrap()
    };
    // From the middle of page 5 to the middle of page 10.
    assert_eq!(discard(5 * PAGE + 1, 5 * PAGE), 4);
    let removed = |id, page| state(&pager, id, page) == PageState::Removed;
    let all: Vec<_> = ids
        .iter()
        .flat_map(|&id| (0..8).map(move |page| (id, page)))
        .map(|(id, page)| removed(id, page))
        .collect();
    let expected: Vec<_> = (0..16).map(|page| (6..10).contains(&page)).collect();
    assert_eq!(all, expected);
    // Nothing is in it, or a part of a page, or nothing but what is there.
    assert_eq!(discard(100 * PAGE, PAGE), 0);
    assert_eq!(discard(PAGE / 2, PAGE), 0);
    assert_eq!(pager.discard_gpas(GuestAddress(0), PAGE).unwrap(), 0);
    assert_eq!(pager.discard_gpas(GuestAddress(0), u64::MAX).unwrap(), 16);
}

#[test]
fn a_discard_whose_thread_cannot_be_started_fails_and_may_be_repeated() {
    in_a_process_of_its_own(
        "a_discard_whose_thread_cannot_be_started_fails_and_may_be_repeated",
        || {
            let Some(region) = region(8, Backing::Anonymous) else {
                return;
            };
            let pager = Pager::new().unwrap();
            let config = RegionConfig::local(Arc::clone(&region), Mode::Missing, pattern());
            let config = config.userfaultfds(UffdLayout::WithEvents);
            let id = pager.add(config).unwrap();
            let _readers = Readers::spawn(&pager, ReaderConfig::new(1)).unwrap();
            push(&pager, id, &region, 2);

            let none = NoOtherThread::begin(&[]);
            let discarded = pager.discard(id, pages(0, 4));
            drop(none);
            assert!(
                matches!(discarded, Err(DiscardError::NoThread(_))),
                "{discarded:?}"
            );

            assert_eq!(pager.discard(id, pages(0, 4)).unwrap(), 4);
            check_zeroes(&region, 2);
            assert_no_trouble(&pager);
        },
    );
}
