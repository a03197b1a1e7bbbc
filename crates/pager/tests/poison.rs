//! Poison as a state of pages, from its origin to the access. In no step does an access read zeroes.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::sync::Arc;

use pagetide_memory::{
    Access, Backing, GuestAddress, GuestRange, PageIndex, PageRange, PageSize, PageState, PoisonMap,
};
use pagetide_pager::{
    Content, Contents, Filled, Holes, Mode, Pager, Prefetch, PrefetchConfig, Progress, PushError,
    ReaderConfig, Readers, RegionConfig, Resolution,
};
use pagetide_test_support::Sleeper;
use pagetide_uapi::userfaultfd::{Features, UserRange, Userfaultfd, Wake};
use rustix::io::Errno;
use support::view::View;
use support::*;

fn map(ranges: &[GuestRange]) -> PoisonMap {
    let mut map = PoisonMap::new();
    for range in ranges {
        map.insert(*range).unwrap();
    }
    map
}

/// Delivers the pattern, except for one page that is lost.
fn without(lost: u64) -> Contents {
    let lost = GPA.0 + lost * PAGE;
    local(LocalFn(move |gpa: GuestAddress, buffer: &mut [u8]| {
        if (gpa.0..gpa.0 + buffer.len() as u64).contains(&lost) {
            return Ok(Filled::Poisoned);
        }
        sources::fill_in(gpa, buffer)
    }))
}

fn prefetch(paged: &Paged) -> pagetide_pager::PrefetchEnd {
    let prefetch = Prefetch::spawn(&paged.pager, PrefetchConfig::default()).unwrap();
    within_patience("prefetch", || prefetch.finish().unwrap())
}

#[test]
fn earlier_losses_are_poisoned_from_the_start() {
    if !can_poison() {
        return;
    }
    for (mode, backing) in WAYS {
        let _pool = pool_for(8, backing);
        let Some(region) = region(8, backing) else {
            continue;
        };
        // A part of page 2, and pages 5 and 6.
        let size = region.page_size().bytes();
        let at =
            |page: u64, bytes| GuestRange::new(GuestAddress(GPA.0 + page * size), bytes).unwrap();
        let lost = map(&[at(2, PAGE), at(5, 2 * size)]);
        let paged = Paged::with(&region, mode, pattern(), |config| config.poison(lost));
        within_patience(&format!("{mode:?} {backing}"), move || {
            for page in [2, 5, 6] {
                assert_eq!(paged.state(page), PageState::Poisoned);
                assert_lost(&region, page);
            }
            let readers = Readers::spawn(&paged.pager, ReaderConfig::new(1)).unwrap();
            assert!(prefetch(&paged).is_complete);
            let progress = Progress {
                present: 5,
                poisoned: 3,
                total: 8,
            };
            assert_eq!(paged.pager.progress(), progress);
            assert_eq!(paged.pager.counted().poisoned, 3);
            let is_lost = |page: &u64| [2, 5, 6].contains(page);
            (0..8)
                .filter(|page| !is_lost(page))
                .for_each(|page| check_page(&region, page));
            readers.stop();
            // Poison outlives the pager: closing the userfaultfd turns no page into zeroes.
            drop(paged);
            (0..8)
                .filter(is_lost)
                .for_each(|page| assert_lost(&region, page));
        });
    }
}

#[test]
fn earlier_losses_may_already_be_marked() {
    if !can_poison() {
        return;
    }
    for (mode, backing) in SMALL_WAYS {
        let Some(region) = region(4, backing) else {
            return;
        };
        // The second time the markers of the first are still present.
        for time in ["first", "second"] {
            let lost = map(&[gpas(1, 2)]);
            let set = |config: RegionConfig| config.poison(lost).trust_existing_pages();
            let paged = Paged::with(&region, mode, pattern(), set);
            let poisoned = paged.pager.progress().poisoned;
            assert_eq!(poisoned, 2, "{mode:?} {backing} {time}");
            drop(paged);
            assert_lost(&region, 1);
        }
    }
}

#[test]
fn lost_content_is_removed_even_if_it_is_mapped() {
    if !can_poison() {
        return;
    }
    for (mode, backing) in SMALL_WAYS {
        let Some(region) = region(4, backing) else {
            return;
        };
        for page in 0..4 {
            region.write_guest(PageIndex(page), 0, &[7]).unwrap();
        }
        let lost = map(&[gpas(1, 2)]);
        let set = |config: RegionConfig| config.poison(lost).trust_existing_pages();
        let _paged = Paged::with(&region, mode, pattern(), set);
        assert_lost(&region, 1);
        assert_lost(&region, 2);
    }
}

#[test]
fn lost_content_of_a_local_source_is_lost_for_good() {
    if !can_poison() {
        return;
    }
    for (mode, backing) in SMALL_WAYS {
        let Some(region) = region(8, backing) else {
            return;
        };
        let paged = Paged::new(&region, mode, without(3));
        // By an exit, which needs no wake-up.
        let mut resolver = paged.resolver();
        for _ in 0..2 {
            let resolution = exit(&mut resolver, &region, 3, Access::Read).unwrap();
            assert_eq!(resolution, Resolution::Poisoned);
            assert_eq!(paged.state(3), PageState::Poisoned);
            assert_lost(&region, 3);
        }
        assert_eq!(resolver.counters().poisoned, 1);
        // Prefetch skips it.
        let end = prefetch(&paged);
        assert!(end.is_complete);
        assert_eq!((end.counters.pages, end.counters.poisoned), (7, 0));
        drop((resolver, paged));
        assert_lost(&region, 3);
    }
}

/// If several pages are reported as lost, smaller requests identify the lost page.
#[test]
fn a_source_that_has_lost_one_page_of_many_loses_no_other() {
    if !can_poison() {
        return;
    }
    for (mode, backing) in SMALL_WAYS {
        let Some(region) = region(16, backing) else {
            return;
        };
        let source = ManualSource::new();
        let set = |config: RegionConfig| config.fault_around(16);
        let paged = Paged::with(&region, mode, source.contents(), set);
        let readers = Readers::spawn(&paged.pager, ReaderConfig::new(1)).unwrap();
        let touch = |page, is_lost: bool| {
            let region = Arc::clone(&region);
            spawn_asleep("a touch", move || match is_lost {
                true => expect_poison(&region, page),
                false => check_page(&region, page),
            })
        };
        let touchers = [touch(6, true), touch(7, false), touch(0, false)];
        while !touchers.iter().all(Sleeper::is_finished) {
            if source.waiting() == 0 {
                std::thread::yield_now();
                continue;
            }
            let request = source.next();
            if request.pages().contains(PageIndex(6)) {
                request.complete(Content::Poisoned);
            } else {
                sources::complete(request);
            }
        }
        for toucher in touchers {
            join("a touch", toucher);
        }
        let poisoned: Vec<_> = (0..16)
            .filter(|&page| paged.state(page) == PageState::Poisoned)
            .collect();
        assert_eq!(poisoned, [6], "{mode:?} {backing}");
        readers.stop();
        assert_no_trouble(&paged.pager);
    }
}

#[test]
fn poison_is_pushed_page_by_page() {
    if !can_poison() {
        return;
    }
    for (mode, backing) in SMALL_WAYS {
        let Some(region) = region(4, backing) else {
            return;
        };
        let paged = Paged::new(&region, mode, ManualSource::new().contents());
        let push = |first, count| {
            let pages = PageRange::new(PageIndex(first), count);
            paged.pager.push(paged.id, pages, Content::Poisoned)
        };
        assert!(matches!(push(0, 2), Err(PushError::PoisonedRun)));
        assert_eq!(push(1, 1).unwrap(), 1);
        assert_eq!(push(1, 1).unwrap(), 0, "it is lost already");
        assert_lost(&region, 1);
        assert_eq!(paged.state(0), PageState::Absent);
    }
}

#[test]
fn prefetch_counts_lost_pages() {
    let Some(region) = region(64, Backing::Shmem) else {
        return;
    };
    let paged = Paged::new(&region, Mode::Minor, without(17));
    let counters = prefetch(&paged).counters;
    assert_eq!((counters.pages, counters.poisoned), (63, 1));
}

#[test]
fn errors_that_the_vmm_reports_are_recorded() {
    if !can_poison() {
        return;
    }
    for (mode, backing) in SMALL_WAYS {
        let Some(region) = region(8, backing) else {
            return;
        };
        let paged = Paged::new(&region, mode, pattern());
        let pager = &paged.pager;
        let its = Arc::clone(&region);
        // A thread that sleeps there is woken.
        let toucher = spawn_asleep("a touch", move || expect_poison(&its, 1));
        assert_eq!(pager.record_poison(gpas(1, 2)), 2);
        join("the touch", toucher);
        assert_eq!(pager.record_poison(gpas(2, 2)), 1);
        // Outside of this pager's regions, in part or as a whole.
        assert_eq!(pager.record_poison(gpas(7, 3)), 1);
        assert_eq!(pager.record_poison(gpas(8, 3)), 0);
        assert_eq!(pager.counted().poisoned, 4);
        let poisoned = (0..8).filter(|&page| paged.state(page) == PageState::Poisoned);
        assert_eq!(poisoned.collect::<Vec<_>>(), [1, 2, 3, 7]);
        assert_eq!(paged.read_exit(3), Resolution::Poisoned);
        for page in [1, 2, 3, 7] {
            assert_lost(&region, page);
        }
        // Discarding does not turn it into zeroes.
        pager.discard(paged.id, region.all_pages()).unwrap();
        assert_eq!(paged.state(3), PageState::Poisoned);
        assert_eq!(paged.read_exit(3), Resolution::Poisoned);
        drop(paged);
        assert_lost(&region, 7);
    }
}

#[test]
fn a_page_cache_with_a_lost_page_is_mapped_around_it() {
    if !can_poison() {
        return;
    }
    let Some(region) = region(16, Backing::Shmem) else {
        return;
    };
    fill_page_cache(&region);
    let lost = map(&[gpas(5, 1)]);
    let contents = Contents::PageCache(Holes::AreMissing);
    let set = |config: RegionConfig| config.poison(lost).fault_around(16);
    let paged = Paged::with(&region, Mode::Minor, contents, set);
    assert_eq!(paged.read_exit(4), installed(0, 5));
    assert_eq!(paged.read_exit(6), installed(6, 10));
    assert_eq!(paged.read_exit(5), Resolution::Poisoned);
    assert_lost(&region, 5);
    (0..16)
        .filter(|&page| page != 5)
        .for_each(|page| check_page(&region, page));
}

#[test]
fn a_part_of_a_huge_page_is_not_the_page() {
    let _pool = HugePages::reserve(2);
    let Some(region) = region(2, Backing::Hugetlb2M) else {
        return;
    };
    let paged = Paged::new(&region, Mode::Minor, pattern());
    // As with the policy that preserves the rest of the page.
    assert_eq!(paged.pager.record_poison(gpas(5, 1)), 0);
    assert_eq!(paged.pager.record_poison(gpas(512, 512)), 1);
    assert_eq!(paged.state(0), PageState::Absent);
    assert_eq!(paged.state(1), PageState::Poisoned);
}

/// So many pages that are not mapped are looked at, and no more.
const MOST_HOLES: u64 = 1 << 16;
/// Pages behind them, which alone are registered.
const BEHIND: [u64; 3] = [MOST_HOLES, MOST_HOLES + 1, MOST_HOLES + 2];
const WITH_HOLES: u64 = MOST_HOLES + 3;

/// Memory that has little in it: a process may have had any amount of it paged.
fn mostly_holes() -> (View, Arc<Userfaultfd>) {
    let view = View::private(WITH_HOLES * PAGE);
    let uffd = Userfaultfd::open(Features::POISON).unwrap();
    // SAFETY: a View is never unmapped, and no code relies on its zeroes.
    unsafe { uffd.register(page_of(&view, BEHIND[0], 3), Mode::Missing) }.unwrap();
    (view, Arc::new(uffd))
}

fn page_of(view: &View, first: u64, count: u64) -> UserRange {
    UserRange {
        start: view.range().start().as_u64() + first * PAGE,
        bytes: count * PAGE,
    }
}

/// Kind: what one client's memory costs everybody, without a bound. And where a bound is met, a thread that nobody wakes, and a
/// page that reads as zeroes when paging has ended.
#[test]
fn of_memory_that_is_lost_little_is_looked_at_where_nothing_is_mapped() {
    if !can_poison() {
        return;
    }
    handle_sigbus();
    let (view, uffd) = mostly_holes();
    let view = Arc::new(view);
    let source = ManualSource::new();
    let (size, mode) = (PageSize::Size4K, Mode::Missing);
    let config = RegionConfig::foreign(&uffd, view.range(), size, mode, source.contents());
    let pager = Pager::new().unwrap();
    let id = pager.add(config.gpa(GPA)).unwrap();
    let readers = Readers::spawn(&pager, ReaderConfig::new(1)).unwrap();
    let its = Arc::clone(&view);
    let asleep = spawn_asleep("a read", move || its.populate_here(BEHIND[0]));
    let _never_answered = source.next();
    let lost = pager.record_poison(gpas(0, WITH_HOLES));
    assert_eq!(lost, WITH_HOLES);
    // Woken, it faults again, and finds the page lost.
    assert_eq!(join("a read", asleep), Err(Errno::HWPOISON));
    // The other one has no mark until a thread touches it.
    let marked = uffd.poison_pages(page_of(&view, BEHIND[1], 1), Wake::DontWake);
    assert_eq!(marked, Ok(()));
    readers.stop();
    pager.remove(id).unwrap();
    assert!(view.is_lost(BEHIND[2]));
}

/// The same for memory that was lost before it was added.
#[test]
fn of_memory_that_was_lost_before_little_is_looked_at_where_nothing_is_mapped() {
    if !can_poison() {
        return;
    }
    let (view, uffd) = mostly_holes();
    let lost = map(&[gpas(0, WITH_HOLES)]);
    let (size, mode) = (PageSize::Size4K, Mode::Missing);
    let config = RegionConfig::foreign(&uffd, view.range(), size, mode, pattern());
    let pager = Pager::new().unwrap();
    let id = pager.add(config.gpa(GPA).poison(lost)).unwrap();
    assert_eq!(pager.progress().poisoned, WITH_HOLES);
    let marked = uffd.poison_pages(page_of(&view, BEHIND[1], 1), Wake::DontWake);
    assert_eq!(marked, Ok(()));
    let readers = Readers::spawn(&pager, ReaderConfig::new(1)).unwrap();
    assert!(view.is_lost(BEHIND[0]));
    readers.stop();
    pager.remove(id).unwrap();
    assert!(view.is_lost(BEHIND[2]));
}
