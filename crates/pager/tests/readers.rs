//! Faults that are delivered as userfaultfd messages and resolved by reader threads, alone and together
//! with exits on the same pages.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;

use pagetide_memory::{
    Access, Backing, FaultInAccess, FaultInError, GuestAddress, GuestRange, PageIndex, PageRange,
    PageState, Region,
};
use pagetide_pager::{
    BlockingSource, Contents, Filled, Holes, Mode, Notice, Pool, PoolConfig, Prefetch,
    PrefetchConfig, PrefetchPlan, ReadAt, ReaderConfig, Readers, RegionConfig, Resolution,
    SourceError, UffdLayout,
};
use pagetide_uapi::userfaultfd::{Features, UserRange, Userfaultfd, Wake};
use support::*;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum From {
    PageCache,
    Local,
    Source,
}

/// A way to page a region in.
#[derive(Clone, Copy, Debug)]
struct Way {
    mode: Mode,
    backing: Backing,
    from: From,
    uffds: u64,
    readers: usize,
    fault_around: u64,
}

const PLAIN: Way = Way {
    mode: Mode::Minor,
    backing: Backing::Shmem,
    from: From::Local,
    uffds: 1,
    readers: 1,
    fault_around: 1,
};

struct FromPool;

impl BlockingSource for FromPool {
    fn read(&self, at: ReadAt, buffer: &mut [u8]) -> Result<Filled, SourceError> {
        sources::fill_in(at.gpa, buffer)
    }
}

/// Every backing, mode and supply, with varying numbers.
fn ways() -> Vec<Way> {
    let mut ways = vec![PLAIN];
    for (index, (mode, backing)) in WAYS.into_iter().enumerate() {
        for (step, from) in [From::Local, From::Source, From::PageCache]
            .into_iter()
            .enumerate()
        {
            if from == From::PageCache && mode == Mode::Missing {
                continue;
            }
            let number = index + step;
            ways.push(Way {
                mode,
                backing,
                from,
                uffds: [1, 4, 2][number % 3],
                readers: [2, 1, 4][step],
                fault_around: [1, 16, 8, 1][number % 4],
            });
        }
    }
    ways
}

impl Way {
    fn pages(self) -> u64 {
        if self.backing.is_hugetlb() { 4 } else { 1024 }
    }

    fn paged(self, region: &Arc<Region>) -> Paged {
        let each = region.bytes() / self.uffds;
        let part = |part| GuestRange::new(GuestAddress(GPA.0 + part * each), each).unwrap();
        let layout = match self.uffds {
            1 => UffdLayout::Single,
            _ => UffdLayout::PerRange((0..self.uffds).map(part).collect()),
        };
        let contents = match self.from {
            From::PageCache => {
                fill_page_cache(region);
                Contents::PageCache(Holes::AreMissing)
            }
            From::Local => pattern(),
            From::Source => Contents::Source(Pool::new(FromPool, PoolConfig::default()).unwrap()),
        };
        Paged::with(region, self.mode, contents, |config| {
            let config = config.fault_around(self.fault_around);
            config.userfaultfds(layout)
        })
    }
}

fn readers(paged: &Paged, threads: usize) -> Readers {
    Readers::spawn(&paged.pager, ReaderConfig::new(threads)).unwrap()
}

/// Touches every page from several threads, in different directions, and checks its content.
fn touch_all(region: &Region, threads: u64) {
    let start = Barrier::new(usize::try_from(threads).unwrap());
    thread::scope(|scope| {
        for thread in 0..threads {
            let start = &start;
            scope.spawn(move || {
                start.wait();
                let last = region.pages() - 1;
                for step in 0..region.pages() {
                    let page = if thread % 2 == 0 { step } else { last - step };
                    check_page(region, page);
                }
            });
        }
    });
}

#[test]
fn touched_pages_have_their_content() {
    for way in ways() {
        let _pool = pool_for(way.pages(), way.backing);
        let Some(region) = region(way.pages(), way.backing) else {
            continue;
        };
        within_patience(&format!("{way:?}"), move || {
            let paged = way.paged(&region);
            let readers = readers(&paged, way.readers);
            touch_all(&region, 4);
            let present = || paged.pager.counts(paged.id).unwrap().present;
            eventually("all pages", || present() == region.pages());
            let read = readers.stop();
            // A thread of the source's pool counts what it has installed a moment later.
            let counted = || paged.pager.counted().pages;
            eventually("all counts", || counted() >= region.pages());
            let mut all = paged.pager.counted();
            assert_eq!(all.pages, region.pages(), "{way:?}: each page once");
            assert_eq!((all.exists, all.faults), (0, all.messages), "{way:?}");
            assert!(read.reads > 0 && read.messages > 0);
            // The readers' counts are part of the pager's counts.
            all.add(&read);
            assert_no_trouble(&paged.pager);
        });
    }
}

#[test]
fn exits_and_messages_share_the_same_pages() {
    for way in ways() {
        let _pool = pool_for(way.pages(), way.backing);
        let Some(region) = region(way.pages(), way.backing) else {
            continue;
        };
        within_patience(&format!("{way:?}"), move || {
            let paged = way.paged(&region);
            let readers = readers(&paged, way.readers);
            thread::scope(|scope| {
                for vcpu in 0..2 {
                    let (paged, region) = (&paged, &region);
                    scope.spawn(move || {
                        let mut resolver = paged.pager.resolver(Some(vcpu)).unwrap();
                        let last = region.pages() - 1;
                        for step in 0..region.pages() {
                            let page = if vcpu == 0 { step } else { last - step };
                            let _ = exit(&mut resolver, region, page, Access::Write).unwrap();
                            check_page(region, page);
                        }
                    });
                }
                // KVM's own accesses, and the VMM's.
                scope.spawn(|| touch_all(&region, 2));
            });
            readers.stop();
            let present = || paged.pager.counts(paged.id).unwrap().present;
            eventually("all pages", || present() == region.pages());
            let counted = || paged.pager.counted().pages;
            eventually("all counts", || counted() >= region.pages());
            assert_eq!(counted(), region.pages(), "{way:?}");
        });
    }
}

#[test]
fn a_sleeping_thread_is_woken_by_the_installer_of_its_page() {
    for (mode, backing) in SMALL_WAYS {
        let Some(region) = region(4, backing) else {
            return;
        };
        let source = ManualSource::new();
        let paged = Paged::new(&region, mode, source.contents());
        let readers = readers(&paged, 1);
        let mut resolver = paged.resolver();
        let its = Arc::clone(&region);
        let waiting = thread::spawn(move || exit(&mut resolver, &its, 1, Access::Read).unwrap());
        let request = source.next();
        let touched = Arc::clone(&region);
        let toucher = spawn_asleep("toucher", move || check_page(&touched, 1));
        // The reader has left the wake-up to the installing thread.
        let lost_claims = || paged.pager.counted().lost_claims;
        assert!(!toucher.is_finished());
        let urgent = PageState::Pending;
        assert_eq!(paged.state(1), urgent);
        readers.stop();
        assert_eq!(lost_claims(), 1);
        sources::complete(request);
        assert_eq!(join("the exit", waiting), Resolution::Waited);
        join("the toucher", toucher);
        assert!(paged.pager.counted().wakes <= 1);
    }
}

#[test]
fn a_thread_that_sleeps_on_a_page_installed_without_a_wake_is_woken() {
    for (mode, backing) in SMALL_WAYS {
        let Some(region) = region(4, backing) else {
            return;
        };
        let paged = Paged::new(&region, mode, pattern());
        let touched = Arc::clone(&region);
        // The thread sleeps before any reader runs, so that the exit finds the page absent and installs
        // it without a wake-up.
        let toucher = spawn_asleep("toucher", move || check_page(&touched, 1));
        let _ = paged.read_exit(1);
        let readers = readers(&paged, 1);
        join("the toucher", toucher);
        let counters = readers.stop();
        let counted = (counters.already_present, counters.wakes);
        assert_eq!(counted, (1, 1), "{mode:?} {backing} {counters:?}");
    }
}

#[test]
fn a_lost_mapping_is_restored() {
    let Some(region) = region(4, Backing::Shmem) else {
        return;
    };
    let paged = Paged::new(&region, Mode::Minor, pattern());
    let readers = readers(&paged, 1);
    within_patience("touching", move || {
        region.write_guest(PageIndex(2), 0, &[0x77]).unwrap();
        region.zap_guest(region.all_pages()).unwrap();
        // The guest's own write is preserved; the source's content does not replace it.
        assert_eq!(first_byte(&region, 2), 0x77);
        let counters = readers.stop();
        let counted = (counters.installs, counters.reinstalls);
        assert_eq!(counted, (1, 1), "{counters:?}");
    });
}

#[test]
fn a_present_page_punched_without_the_pager_reads_as_zeroes() {
    for (mode, backing) in SMALL_WAYS {
        let Some(region) = region(4, backing) else {
            return;
        };
        let paged = Paged::new(&region, mode, pattern());
        let readers = readers(&paged, 2);
        within_patience(&format!("{mode:?} {backing}"), move || {
            for _ in 0..3 {
                first_byte(&region, 1);
                region.punch(PageRange::single(PageIndex(1))).unwrap();
                check_zeroes(&region, 1);
                region.write_guest(PageIndex(1), 0, &[5]).unwrap();
                assert_eq!(first_byte(&region, 1), 5);
            }
            check_page(&region, 2);
            readers.stop();
            assert_no_trouble(&paged.pager);
        });
    }
}

#[test]
fn the_zero_page_can_be_written_to() {
    let Some(region) = region(4, Backing::Anonymous) else {
        return;
    };
    let contents = local(LocalFn(|_, _: &mut [u8]| Ok(Filled::Zero)));
    let paged = Paged::new(&region, Mode::Missing, contents);
    let readers = readers(&paged, 1);
    within_patience("touching", move || {
        check_zeroes(&region, 1);
        eventually("settled", || paged.state(1) == PageState::Zero);
        region.write_guest(PageIndex(1), 8, &[7]).unwrap();
        region.write_guest(PageIndex(2), 0, &[8]).unwrap();
        assert_eq!(first_byte(&region, 2), 8);
        readers.stop();
    });
}

#[test]
fn mapped_pages_of_the_page_cache_are_accepted() {
    let Some(region) = region(16, Backing::Shmem) else {
        return;
    };
    fill_page_cache(&region);
    let contents = Contents::PageCache(Holes::AreMissing);
    let set = |config: RegionConfig| config.fault_around(16);
    let paged = Paged::with(&region, Mode::Minor, contents, set);
    let touched = Arc::clone(&region);
    let toucher = spawn_asleep("toucher", move || check_page(&touched, 5));
    let uffd = Userfaultfd::open(Features::NONE).unwrap();
    let behind = region.guest_range(PageRange::new(PageIndex(4), 2)).unwrap();
    let continued = uffd.continue_pages(UserRange::from(behind), Wake::DontWake);
    continued.unwrap();
    let readers = readers(&paged, 1);
    join("the toucher", toucher);
    let counters = readers.stop();
    let counted = (counters.exists, counters.pages, counters.wakes);
    // Each page that was mapped before is woken separately, because the installing call does not wake
    // its sleeping threads.
    assert_eq!(counted, (2, 14, 2), "{counters:?}");
    for page in 0..16 {
        assert_eq!(paged.state(page), PageState::Present);
        assert!(is_mapped(&region, page));
    }
}

#[test]
fn lost_content_is_an_error_for_waiting_threads() {
    if !can_poison() {
        return;
    }
    for (mode, backing) in SMALL_WAYS {
        let Some(region) = region(4, backing) else {
            return;
        };
        let contents = local(LocalFn(|_, _: &mut [u8]| Ok(Filled::Poisoned)));
        let paged = Paged::new(&region, mode, contents);
        let readers = readers(&paged, 1);
        within_patience("populating", move || {
            let pages = PageRange::single(PageIndex(1));
            for _ in 0..2 {
                let populated = region.fault_in(pages, FaultInAccess::Read);
                assert_eq!(populated, Err(FaultInError::Poisoned { pages }));
            }
            assert_eq!(paged.state(1), PageState::Poisoned);
            expect_poison(&region, 2);
            readers.stop();
        });
    }
}

/// Content that cannot be had before the flag is set. A source that fails only once would not do: the kernel may
/// wake a thread that sleeps in a fault early (by a futex that another thread has just released, for one), and then
/// it faults again.
fn unavailable_until(available: &Arc<AtomicBool>, panics: bool) -> Contents {
    let available = Arc::clone(available);
    local(LocalFn(move |gpa, buffer: &mut [u8]| {
        if available.load(Ordering::Relaxed) {
            return sources::fill_in(gpa, buffer);
        }
        if panics {
            std::panic::resume_unwind(Box::new("not yet"));
        }
        Err(sources::unavailable("not yet"))
    }))
}

/// A fault whose content is unavailable causes a notice, and its thread stays asleep until the page is
/// delivered in any way.
#[test]
fn a_thread_whose_fault_failed_is_woken_when_its_page_arrives() {
    for panics in [false, true] {
        for (mode, backing) in SMALL_WAYS {
            let Some(region) = region(4, backing) else {
                return;
            };
            let available = Arc::new(AtomicBool::new(false));
            let contents = unavailable_until(&available, panics);
            let paged = Paged::new(&region, mode, contents);
            let readers = readers(&paged, 1);
            let its = Arc::clone(&region);
            let toucher = thread::spawn(move || check_page(&its, 1));
            eventually("the notice", || paged.pager.trouble().is_some());
            let notice = paged.pager.trouble().unwrap();
            assert!(matches!(notice, Notice::Unresolved(_)), "{notice}");
            assert!(!toucher.is_finished());
            readers.stop();
            available.store(true, Ordering::Relaxed);
            let _ = paged.read_exit(1);
            join(&format!("{panics} {mode:?} {backing}"), toucher);
        }
    }
}

/// Prefetch tries local content again, in a plan's order as well as in its own.
#[test]
fn a_thread_whose_fault_failed_is_woken_by_prefetch() {
    for in_order in [false, true] {
        let Some(region) = region(4, Backing::Shmem) else {
            return;
        };
        let available = Arc::new(AtomicBool::new(false));
        let contents = unavailable_until(&available, false);
        let paged = Paged::new(&region, Mode::Minor, contents);
        let readers = readers(&paged, 1);
        let its = Arc::clone(&region);
        let toucher = thread::spawn(move || check_page(&its, 1));
        eventually("the notice", || paged.pager.trouble().is_some());
        assert!(!toucher.is_finished());
        readers.stop();
        available.store(true, Ordering::Relaxed);
        let all = PageRange::new(PageIndex(0), 4);
        let plan = match in_order {
            true => PrefetchPlan {
                first: vec![(paged.id, all)],
                then: Vec::new(),
            },
            false => PrefetchPlan {
                first: Vec::new(),
                then: vec![paged.id],
            },
        };
        let ahead = Prefetch::spawn_plan(&paged.pager, PrefetchConfig::default(), plan).unwrap();
        assert!(ahead.finish().unwrap().is_complete, "in order: {in_order}");
        join("the toucher", toucher);
    }
}

/// A page arrives for a sleeping thread, while the source of an exit panics.
#[test]
fn an_exit_whose_source_panics_blocks_no_other_thread() {
    let Some(region) = region(4, Backing::Shmem) else {
        return;
    };
    let gate = Arc::new(Barrier::new(2));
    let (at_gate, calls) = (Arc::clone(&gate), AtomicU64::new(0));
    let contents = local(LocalFn(move |gpa, buffer: &mut [u8]| {
        if calls.fetch_add(1, Ordering::Relaxed) == 0 {
            at_gate.wait();
            std::panic::resume_unwind(Box::new("the owner"));
        }
        sources::fill_in(gpa, buffer)
    }));
    let paged = Paged::new(&region, Mode::Minor, contents);
    let readers = readers(&paged, 1);
    let mut resolver = paged.resolver();
    let its = Arc::clone(&region);
    let panicking = spawn_asleep("the exit", move || {
        exit(&mut resolver, &its, 1, Access::Read).map(drop)
    });
    // The page is not claimed before its content is available.
    let its = Arc::clone(&region);
    within_patience("the touch", move || check_page(&its, 1));
    gate.wait();
    join("the exit", panicking).unwrap_err();
    readers.stop();
}

#[test]
fn idle_readers_stop() {
    let Some(region) = region(4, Backing::Shmem) else {
        return;
    };
    let paged = Paged::new(&region, Mode::Minor, pattern());
    within_patience("stopping", move || {
        for threads in [1, 8] {
            readers(&paged, threads).stop();
        }
        drop(readers(&paged, 2));
        assert!(Readers::spawn(&paged.pager, ReaderConfig::new(0)).is_err());
    });
}
