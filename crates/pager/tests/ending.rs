//! The end of a region or a pager, at any time: no access reads zeroes in place of content.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::process::Command;
use std::sync::Arc;
use std::thread;

use pagetide_memory::{Access, Backing, PageIndex, PageRange, PageSize, PageState, Region};
use pagetide_pager::{
    Content, Contents, Holes, Memfd, Mode, Pager, ReaderConfig, Readers, RegionChangeError,
    RegionConfig, ResolveError, UffdLayout,
};
use pagetide_uapi::userfaultfd::{Features, UserRange, Userfaultfd, Wake};
use support::view::{View, memfd};
use support::*;

/// The end of a region's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Drop,
    Unwind,
    Remove,
}

const ENDS: [End; 3] = [End::Drop, End::Unwind, End::Remove];

impl End {
    fn of(self, paged: Paged) {
        match self {
            Self::Drop => drop(paged),
            Self::Remove => {
                paged.pager.remove(paged.id).unwrap();
                // Only once.
                let again = paged.pager.remove(paged.id);
                let region = paged.id;
                assert_eq!(again, Err(RegionChangeError::NoSuchRegion { region }));
            }
            Self::Unwind => {
                let unwound = catch_unwind(AssertUnwindSafe(move || {
                    let _paged = paged;
                    // A panic without its message.
                    resume_unwind(Box::new("the VMM has a fault of its own"));
                }));
                assert!(unwound.is_err());
            }
        }
    }
}

/// Each end, with each layout.
fn layouts(region: &Region) -> [UffdLayout; 3] {
    let size = region.page_size().bytes();
    let range = |first: u64, count: u64| {
        let start = pagetide_memory::GuestAddress(GPA.0 + first * size);
        pagetide_memory::GuestRange::new(start, count * size).unwrap()
    };
    let parts = vec![range(0, 1), range(1, region.pages() - 1)];
    [
        UffdLayout::Single,
        UffdLayout::PerRange(parts),
        UffdLayout::WithEvents,
    ]
}

#[test]
fn missing_pages_are_lost_and_the_others_stay() {
    if !can_poison() {
        return;
    }
    for (mode, backing) in WAYS {
        let _pool = pool_for(4, backing);
        for end in ENDS {
            let Some(region) = region(4, backing) else {
                break;
            };
            for layout in layouts(&region) {
                let what = format!("{mode:?} {backing} {end:?} {layout:?}");
                let its = Arc::clone(&region);
                within_patience(&what.clone(), move || {
                    println!("{what}");
                    let set = |config: RegionConfig| config.userfaultfds(layout);
                    let paged = Paged::with(&its, mode, pattern(), set);
                    let _ = paged.read_exit(2);
                    end.of(paged);
                    for page in [0, 1, 3] {
                        assert_lost(&its, page);
                    }
                    check_page(&its, 2);
                    // The memory belongs to its owner again.
                    assert_eq!(its.paging(), None);
                    if backing.has_file() {
                        its.zap_guest(its.all_pages()).unwrap();
                    }
                    its.punch(its.all_pages()).unwrap();
                    check_zeroes(&its, 1);
                    its.punch(its.all_pages()).unwrap();
                });
            }
        }
    }
}

/// The poison markers of an earlier pager do not disturb a later one.
#[test]
fn memory_whose_paging_ended_early_can_be_paged_again() {
    for (mode, backing) in WAYS {
        let _pool = pool_for(4, backing);
        let Some(region) = region(4, backing) else {
            continue;
        };
        drop(Paged::new(&region, mode, pattern()));
        if !backing.has_file() {
            // The memory has only the markers; without them the page is missing, as it should be.
            region.punch(region.all_pages()).unwrap();
        }
        let paged = Paged::new(&region, mode, pattern());
        let readers = Readers::spawn(&paged.pager, ReaderConfig::new(1)).unwrap();
        within_patience(&format!("{mode:?} {backing}"), move || {
            (0..4).for_each(|page| check_page(&region, page));
        });
        readers.stop();
    }
}

/// The page cache belongs to the owner, but the guest does not have its content.
#[test]
fn the_page_cache_outlives_a_pager_and_stays_hidden_from_the_guest() {
    let Some(region) = region(4, Backing::Shmem) else {
        return;
    };
    if !can_poison() {
        return;
    }
    fill_page_cache(&region);
    for _ in 0..2 {
        let contents = Contents::PageCache(Holes::AreMissing);
        let paged = Paged::new(&region, Mode::Minor, contents);
        assert_eq!(paged.read_exit(1), installed(1, 1));
        check_page(&region, 1);
        drop(paged);
        assert_lost(&region, 2);
    }
}

#[test]
fn a_thread_that_sleeps_on_a_missing_page_gets_sigbus() {
    handle_sigbus();
    if !can_poison() {
        return;
    }
    for (mode, backing) in SMALL_WAYS {
        for end in ENDS {
            for with_source in [false, true] {
                let Some(region) = region(4, backing) else {
                    return;
                };
                let source = ManualSource::new();
                let contents = if with_source {
                    source.contents()
                } else {
                    pattern()
                };
                let paged = Paged::new(&region, mode, contents);
                let readers = with_source
                    .then(|| Readers::spawn(&paged.pager, ReaderConfig::new(1)).unwrap());
                let touch = |page| {
                    let region = Arc::clone(&region);
                    spawn_asleep("a touch", move || expect_poison(&region, page))
                };
                let touchers = [touch(1), touch(3)];
                // With a source, these messages have been read: their wake-ups are left to the
                // installing thread.
                let requests = readers.map(|readers| {
                    let requests = [source.next(), source.next()];
                    readers.stop();
                    requests
                });
                end.of(paged);
                for toucher in touchers {
                    join(&format!("{mode:?} {backing} {end:?}"), toucher);
                }
                // An answer after the end is dropped.
                for request in requests.into_iter().flatten() {
                    sources::complete(request);
                }
                assert_lost(&region, 1);
            }
        }
    }
}

/// Threads that sleep on a page that was installed without a wake-up are woken too.
#[test]
fn a_thread_that_sleeps_on_a_present_page_reads_it() {
    for (mode, backing) in SMALL_WAYS {
        for end in ENDS {
            let Some(region) = region(4, backing) else {
                return;
            };
            let paged = Paged::new(&region, mode, pattern());
            let its = Arc::clone(&region);
            let toucher = spawn_asleep("a touch", move || check_page(&its, 1));
            let _ = paged.read_exit(1);
            end.of(paged);
            join(&format!("{mode:?} {backing} {end:?}"), toucher);
        }
    }
}

/// Without a handler the process ends by SIGBUS, and reports no zeroes.
#[test]
fn an_access_ends_a_process_without_a_handler() {
    const ROLE: &str = "PAGETIDE_TEST_TOUCH";
    if let Ok(way) = std::env::var(ROLE) {
        let (mode, backing) = SMALL_WAYS[way.parse::<usize>().unwrap()];
        let region = region(4, backing).unwrap();
        drop(Paged::new(&region, mode, pattern()));
        println!("read {}", first_byte(&region, 1));
        return;
    }
    if !has_userfaultfd() || !can_poison() {
        return;
    }
    for (number, way) in SMALL_WAYS.into_iter().enumerate() {
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "an_access_ends_a_process_without_a_handler"])
            .arg("--nocapture")
            .env(ROLE, number.to_string())
            .output()
            .unwrap();
        let signal = std::os::unix::process::ExitStatusExt::signal(&output.status);
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert_eq!(signal, Some(libc::SIGBUS), "{way:?}: {said}");
        assert!(!said.contains("read "), "{said}");
    }
}

#[test]
fn an_exit_that_waits_ends_with_an_error() {
    let Some(region) = region(4, Backing::Shmem) else {
        return;
    };
    let source = ManualSource::new();
    let paged = Paged::new(&region, Mode::Minor, source.contents());
    let mut resolver = paged.resolver();
    let its = Arc::clone(&region);
    let waiting = thread::spawn(move || exit(&mut resolver, &its, 1, Access::Read));
    let request = source.next();
    paged.pager.remove(paged.id).unwrap();
    let error = join("the exit", waiting).unwrap_err();
    assert!(
        matches!(
            error,
            ResolveError::Removed { .. } | ResolveError::Outside { .. }
        ),
        "{error}"
    );
    assert_eq!(source.cancelled(), [request.id()]);
}

/// A page that other code has mapped is not content either.
#[test]
fn a_foreign_page_is_lost_with_the_others() {
    if !can_poison() {
        return;
    }
    for (mode, backing) in SMALL_WAYS {
        for layout in [UffdLayout::Single, UffdLayout::WithEvents] {
            let Some(region) = region(4, backing) else {
                return;
            };
            let what = format!("{mode:?} {backing} {layout:?}");
            within_patience(&what, move || {
                let set = |config: RegionConfig| config.userfaultfds(layout);
                let paged = Paged::with(&region, mode, pattern(), set);
                let uffd = Userfaultfd::open(Features::NONE).unwrap();
                let page = PageRange::single(PageIndex(1));
                let range = UserRange::from(region.guest_range(page).unwrap());
                uffd.zero_pages(range, Wake::DontWake).unwrap();
                assert!(is_mapped(&region, 1));
                paged.pager.remove(paged.id).unwrap();
                assert_lost(&region, 1);
            });
        }
    }
}

/// Content that the owner trusts stays.
#[test]
fn a_trusted_page_stays() {
    let Some(region) = region(4, Backing::Anonymous) else {
        return;
    };
    region.write_guest(PageIndex(1), 0, &[3]).unwrap();
    let set = RegionConfig::trust_existing_pages;
    let paged = Paged::with(&region, Mode::Missing, pattern(), set);
    assert_eq!(paged.state(1), PageState::Absent);
    drop(paged);
    assert_eq!(first_byte(&region, 1), 3);
}

/// A source's answer may hold the last reference to the pager, on any thread.
#[test]
fn answers_and_the_end_of_the_pager_race() {
    if !can_poison() {
        return;
    }
    for (mode, backing) in SMALL_WAYS {
        for round in 0..20 {
            let Some(region) = region(16, backing) else {
                return;
            };
            let source = ManualSource::new();
            let paged = Paged::new(&region, mode, source.contents());
            let mut resolver = paged.resolver();
            let its = Arc::clone(&region);
            let pager = Arc::clone(&paged.pager);
            let waiting = thread::spawn(move || {
                let resolved = exit(&mut resolver, &its, round % 16, Access::Read);
                drop((resolver, pager));
                resolved
            });
            let request = source.next();
            let answering = thread::spawn(move || sources::complete(request));
            paged.pager.remove(paged.id).unwrap();
            drop(paged);
            join("the answer", answering);
            let resolved = join("the exit", waiting);
            // Each page either arrived before the end, or is lost.
            match resolved {
                Ok(_) => check_page(&region, round % 16),
                Err(_) => {
                    let read = region.fault_in(
                        PageRange::single(PageIndex(round % 16)),
                        pagetide_memory::FaultInAccess::Read,
                    );
                    match read {
                        Ok(()) => check_page(&region, round % 16),
                        Err(_) => assert_lost(&region, round % 16),
                    }
                }
            }
            assert_lost(&region, (round + 1) % 16);
        }
    }
}

#[test]
fn regions_are_added_and_removed_while_others_are_served() {
    let Some(steady) = region(1024, Backing::Shmem) else {
        return;
    };
    let paged = Paged::new(&steady, Mode::Minor, pattern());
    let readers = Readers::spawn(&paged.pager, ReaderConfig::new(2)).unwrap();
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| (0..1024).rev().for_each(|page| check_page(&steady, page)));
        }
        for (index, (mode, backing)) in SMALL_WAYS.into_iter().enumerate() {
            let pager = &paged.pager;
            let source = ManualSource::new();
            scope.spawn(move || {
                for round in 0..20 {
                    let gpa = GPA.0 + ((index as u64 + 1) << 30);
                    let gpa = pagetide_memory::GuestAddress(gpa);
                    let region = region_at(gpa, 32, backing).unwrap();
                    let contents = if round % 3 == 0 {
                        source.contents()
                    } else {
                        pattern()
                    };
                    let config = RegionConfig::local(Arc::clone(&region), mode, contents);
                    let id = pager.add(config.fault_around(4)).unwrap();
                    if round % 3 == 0 {
                        let its = Arc::clone(&region);
                        let toucher = thread::spawn(move || check_page(&its, 9));
                        sources::complete(source.next());
                        join("a touch", toucher);
                    } else {
                        (0..32).for_each(|page| check_page(&region, page));
                        // A woken thread may continue before the reader that woke it.
                        let present = || pager.counts(id).unwrap().present;
                        eventually("all pages", || present() == 32);
                    }
                    pager.remove(id).unwrap();
                    check_page(&region, 9);
                }
            });
        }
    });
    readers.stop();
    assert_no_trouble(&paged.pager);
    assert_eq!(paged.pager.region_ids(), [paged.id]);
    assert_eq!(paged.pager.progress().present, 1024);
}

/// Kind: what is read once, of which there may be any number. A process may keep a copy of its userfaultfd, which nobody reads
/// any more.
#[test]
fn all_who_wait_for_the_end_of_a_discard_go_on() {
    /// More than one read takes.
    const DISCARDS: u64 = 40;
    let Some(region) = region(DISCARDS, Backing::Anonymous) else {
        return;
    };
    let uffd = Arc::new(Userfaultfd::open(Features::EVENT_REMOVE).unwrap());
    // SAFETY: the region stays mapped for longer than the userfaultfd is open, and no code relies on its zeroes.
    unsafe { uffd.register(region.guest().into(), Mode::Missing) }.unwrap();
    let size = PageSize::Size4K;
    let config = RegionConfig::foreign(&uffd, region.guest(), size, Mode::Missing, pattern());
    let pager = Pager::new().unwrap();
    let id = pager.add(config.gpa(GPA)).unwrap();
    // No page is missing: to mark one as lost, events would be read before.
    let pages = PageRange::new(PageIndex(0), DISCARDS);
    pager.push(id, pages, Content::Zero).unwrap();
    let discards: Vec<_> = (0..DISCARDS)
        .map(|page| {
            let region = Arc::clone(&region);
            spawn_asleep("a discard", move || advise_away(&region, page, 1))
        })
        .collect();
    pager.remove(id).unwrap();
    for discard in discards {
        join("a discard", discard);
    }
    drop(uffd);
}

/// A VMM that tracks writes protects missing pages as well. That leaves a mark, where the kernel then puts no other.
#[test]
fn missing_pages_that_are_protected_are_lost_at_the_end() {
    const PAGES: u64 = 8;
    if !has_userfaultfd() || !can_poison() {
        return;
    }
    for mode in [Mode::Minor, Mode::Missing] {
        let file = memfd(PAGES * PAGE);
        let memory = View::new(&file, PAGES * PAGE);
        let Some(uffd) = memory.register_protected(mode, Features::NONE) else {
            return;
        };
        let (range, size) = (memory.range(), PageSize::Size4K);
        let config = RegionConfig::foreign(&uffd, range, size, mode, pattern()).gpa(GPA);
        let offset_bytes = 0;
        let pager = Pager::new().unwrap();
        let id = pager
            .add(config.memfd(Memfd { file, offset_bytes }))
            .unwrap();
        let readers = Readers::spawn(&pager, ReaderConfig::new(1)).unwrap();
        let word_of = |page: u64| !(GPA.0 + page * PAGE);
        assert_eq!(memory.read(1), word_of(1));
        let one = |page| PageRange::single(PageIndex(page));
        pager.discard(id, one(4)).unwrap();
        uffd.protect(UserRange::from(range)).unwrap();
        // Each is installed, whatever touches it, and then written.
        assert_eq!(memory.read(2), word_of(2), "{mode:?}");
        assert_eq!(memory.read(4), 0, "{mode:?}");
        for page in 1..5 {
            memory.write(page, page);
        }
        pager.record_poison(gpas(5, 1));
        assert!(memory.is_lost(5), "{mode:?}");
        pager.remove(id).unwrap();
        for page in 0..PAGES {
            match page {
                1..5 => assert_eq!(memory.read(page), page, "{mode:?}"),
                _ => assert!(memory.is_lost(page), "{mode:?}: {page}"),
            }
        }
        readers.stop();
    }
}
