//! Memory that is discarded, unmapped, moved or forked while it is paged: the events of a userfaultfd.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

#[path = "support/child.rs"]
mod child_process;
mod support;

use std::fs::read_dir;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier, mpsc};
use std::thread;

use child_process::{Mapped, Other, above, be_child, pager_and_child, two_readers};
use pagetide_memory::{Backing, GuestAddress, PageIndex, PageRange, PageSize, PageState, Region};
use pagetide_pager::{
    Content, Memfd, Mode, Notice, Pager, Prefetch, PrefetchConfig, RegionConfig, RegionId, Serving,
    UffdLayout,
};
use pagetide_uapi::userfaultfd::{Features, Userfaultfd};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use support::*;

const AT: GuestAddress = GuestAddress(1 << 40);

const ALL_EVENTS: [Features; 4] = [
    Features::EVENT_REMOVE,
    Features::EVENT_UNMAP,
    Features::EVENT_REMAP,
    Features::EVENT_FORK,
];

/// Local memory that reports discards.
const WAYS_WITH_EVENTS: [(Mode, Backing); 3] = [
    (Mode::Missing, Backing::Anonymous),
    (Mode::Missing, Backing::Shmem),
    (Mode::Minor, Backing::Shmem),
];

/// Not a test: the program of the other process.
#[test]
fn child() {
    be_child();
}

fn with_events(region: &Arc<Region>, mode: Mode) -> (Arc<Pager>, RegionId) {
    let pager = Pager::new().unwrap();
    let config = RegionConfig::local(Arc::clone(region), mode, pattern());
    let id = pager
        .add(config.userfaultfds(UffdLayout::WithEvents))
        .unwrap();
    (pager, id)
}

fn state(pager: &Pager, id: RegionId, page: u64) -> PageState {
    pager.page_state(id, PageIndex(page)).unwrap()
}

/// Serves a child's memory.
fn foreign(pager: &Pager, uffd: &Arc<Userfaultfd>, mapped: &Mapped, gpa: GuestAddress) -> RegionId {
    let mode = mapped.file.as_ref().map_or(Mode::Missing, |_| Mode::Minor);
    let size = PageSize::Size4K;
    let config = RegionConfig::foreign(uffd, mapped.range(), size, mode, pattern()).gpa(gpa);
    let config = match &mapped.file {
        None => config,
        Some(file) => config.memfd(Memfd {
            file: file.try_clone().unwrap(),
            offset_bytes: 0,
        }),
    };
    pager.add(config).unwrap()
}

/// No thread serves the pager. An installing thread gets EAGAIN, and reads the event itself.
#[test]
fn an_installer_reads_the_events_that_block_it() {
    for (mode, backing) in WAYS_WITH_EVENTS {
        let Some(region) = region(64, backing) else {
            return;
        };
        let (pager, id) = with_events(&region, mode);
        let discarding = {
            let region = Arc::clone(&region);
            spawn_asleep("the discard", move || advise_away(&region, 0, 8))
        };
        let pages = PageRange::new(PageIndex(0), 16);
        let bytes = content(GPA, 16 * PAGE);
        assert_eq!(
            pager.push(id, pages, Content::Bytes(&bytes)).unwrap(),
            8,
            "{mode:?} {backing}"
        );
        discarding.join();
        for page in 0..16 {
            let wanted = if page < 8 {
                PageState::Removed
            } else {
                PageState::Present
            };
            assert_eq!(
                state(&pager, id, page),
                wanted,
                "{mode:?} {backing}, page {page}"
            );
        }
        let _readers = two_readers(&pager);
        (0..8).for_each(|page| check_zeroes(&region, page));
        (8..64).for_each(|page| check_page(&region, page));
    }
}

/// A process that has been told of its discard may take long to continue, on a busy machine. Until then the
/// kernel refuses to install, which is no lack of progress.
#[test]
fn a_fault_on_a_discarded_page_waits_for_another_discard() {
    for (mode, backing) in WAYS_WITH_EVENTS {
        let Some(region) = region(64, backing) else {
            return;
        };
        let pager = Pager::new().unwrap();
        let config = RegionConfig::local(Arc::clone(&region), mode, pattern());
        let config = config.userfaultfds(UffdLayout::WithEvents);
        pager
            .add(config.no_progress_limit(NonZeroU32::MIN))
            .unwrap();
        for (first, page) in [(0, 20), (8, 3)] {
            let discarding = {
                let region = Arc::clone(&region);
                spawn_asleep("the discard", move || advise_away(&region, first, 8))
            };
            let mut resolver = pager.resolver(Some(0)).unwrap();
            let resolved = within_patience("an exit", move || {
                resolver.resolve_exit(above(GPA, page), pagetide_memory::Access::Read)
            });
            assert!(resolved.is_ok(), "{mode:?} {backing}: {resolved:?}");
            discarding.join();
        }
        let _readers = two_readers(&pager);
        (0..16).for_each(|page| check_zeroes(&region, page));
        (16..64).for_each(|page| check_page(&region, page));
    }
}

/// The same for a fault whose content is in the page cache, and for an exit.
#[test]
fn a_fault_reads_the_events_that_block_it() {
    let Some(region) = region(64, Backing::Shmem) else {
        return;
    };
    fill_page_cache(&region);
    let pager = Pager::new().unwrap();
    let contents = pagetide_pager::Contents::PageCache(pagetide_pager::Holes::AreMissing);
    let config = RegionConfig::local(Arc::clone(&region), Mode::Minor, contents);
    let id = pager
        .add(config.userfaultfds(UffdLayout::WithEvents))
        .unwrap();
    let discarding = {
        let region = Arc::clone(&region);
        spawn_asleep("the discard", move || advise_away(&region, 0, 8))
    };
    let mut resolver = pager.resolver(Some(0)).unwrap();
    let resolved = within_patience("an exit", move || {
        resolver.resolve_exit(above(GPA, 20), pagetide_memory::Access::Read)
    });
    let _ = resolved.unwrap();
    discarding.join();
    assert_eq!(state(&pager, id, 3), PageState::Removed);
    assert_eq!(state(&pager, id, 20), PageState::Present);
    let _readers = two_readers(&pager);
    (0..8).for_each(|page| check_zeroes(&region, page));
    (8..64).for_each(|page| check_page(&region, page));
}

/// A page is pushed and discarded concurrently: in either order it is zero afterwards.
#[test]
fn an_installation_precedes_a_discard_or_finds_the_page_removed() {
    const PAGES: u64 = 3000;
    for (mode, backing) in WAYS_WITH_EVENTS {
        let Some(region) = region(PAGES, backing) else {
            return;
        };
        let (pager, id) = with_events(&region, mode);
        let _readers = two_readers(&pager);
        let begin = Barrier::new(2);
        let end = Barrier::new(2);
        let pushed = AtomicU64::new(0);
        let mut wrong = Vec::new();
        thread::scope(|scope| {
            scope.spawn(|| {
                for page in 0..PAGES {
                    let bytes = content(above(GPA, page), PAGE);
                    let pages = PageRange::single(PageIndex(page));
                    begin.wait();
                    let count = pager.push(id, pages, Content::Bytes(&bytes)).unwrap();
                    pushed.fetch_add(count, Ordering::Relaxed);
                    end.wait();
                }
            });
            for page in 0..PAGES {
                begin.wait();
                advise_away(&region, page, 1);
                end.wait();
                if first_byte(&region, page) != 0 {
                    // No panic here: the other thread would wait forever.
                    wrong.push(page);
                }
            }
        });
        assert_eq!(
            wrong, [0; 0],
            "{mode:?} {backing}: discarded pages came back"
        );
        let pushed = pushed.into_inner();
        println!("{mode:?} {backing}: {pushed} of {PAGES} pages came first");
        assert_eq!(pager.counts(id).unwrap().removed, PAGES);
    }
}

#[test]
fn memory_is_discarded_during_faults_and_prefetch() {
    for (mode, backing) in WAYS_WITH_EVENTS {
        let Some(region) = region(2000, backing) else {
            return;
        };
        let (pager, id) = with_events(&region, mode);
        let _readers = two_readers(&pager);
        let batch_bytes = 16 << 10;
        let prefetch = Prefetch::spawn(&pager, PrefetchConfig { batch_bytes }).unwrap();
        thread::scope(|scope| {
            scope.spawn(|| {
                (0..2000)
                    .step_by(2)
                    .for_each(|page| check_page(&region, page));
            });
            scope.spawn(|| {
                (1..2000)
                    .step_by(4)
                    .for_each(|page| advise_away(&region, page, 1));
            });
        });
        assert!(prefetch.finish().unwrap().is_complete);
        for page in 0..2000 {
            match page % 4 {
                1 => check_zeroes(&region, page),
                _ => check_page(&region, page),
            }
        }
        assert_eq!(pager.counts(id).unwrap().removed, 500);
        assert_no_trouble(&pager);
    }
}

#[test]
fn another_process_discards_memory() {
    let Some((pager, _readers, other, uffd)) = pager_and_child(&ALL_EVENTS) else {
        return;
    };
    for (turn, mode) in [Mode::Missing, Mode::Minor].into_iter().enumerate() {
        let gpa = above(AT, 1000 * turn as u64);
        let mapped = other.map(64, mode);
        let id = foreign(&pager, &uffd, &mapped, gpa);
        assert_eq!(other.check(mapped.start, 32, gpa), "right");
        let how = if mapped.file.is_some() {
            "remove"
        } else {
            "dontneed"
        };
        // Present pages and missing ones.
        other.tell(format!("{how} {} 32", mapped.start + 16 * PAGE));
        assert_eq!(other.check(mapped.start, 16, gpa), "right");
        assert_eq!(
            other.tell(format!("zero {} 32", mapped.start + 16 * PAGE)),
            "right"
        );
        let rest = other.check(mapped.start + 48 * PAGE, 16, above(gpa, 48));
        assert_eq!(rest, "right");
        assert_eq!(pager.counts(id).unwrap().removed, 32);
    }
    assert_no_trouble(&pager);
}

#[test]
fn another_process_unmaps_and_moves_memory() {
    let Some((pager, _readers, other, uffd)) = pager_and_child(&ALL_EVENTS) else {
        return;
    };
    for (turn, mode) in [Mode::Missing, Mode::Minor].into_iter().enumerate() {
        let gpa = above(AT, 1000 * turn as u64);
        let mapped = other.map(64, mode);
        let id = foreign(&pager, &uffd, &mapped, gpa);
        assert_eq!(other.check(mapped.start, 4, gpa), "right");

        // A part is unmapped.
        other.tell(format!("munmap {} 8", mapped.start + 8 * PAGE));
        for page in 8..16 {
            // The thread that has read the event may not have applied it yet.
            eventually("removed", || state(&pager, id, page) == PageState::Removed);
        }
        let bytes = content(above(gpa, 8), 8 * PAGE);
        let gone = PageRange::new(PageIndex(8), 8);
        assert_eq!(pager.push(id, gone, Content::Bytes(&bytes)).unwrap(), 0);

        // A part moves, with present and missing pages.
        let to: u64 = other
            .tell(format!("mremap {} 8", mapped.start))
            .parse()
            .unwrap();
        assert_eq!(other.check(to, 8, gpa), "right");
        // Pushed pages are installed at the new address.
        let to: u64 = other
            .tell(format!("mremap {} 16", mapped.start + 16 * PAGE))
            .parse()
            .unwrap();
        let pushed = PageRange::new(PageIndex(12), 10);
        let bytes = content(above(gpa, 12), 10 * PAGE);
        assert_eq!(pager.push(id, pushed, Content::Bytes(&bytes)).unwrap(), 6);
        assert_eq!(other.check(to, 16, above(gpa, 16)), "right");
        assert_eq!(
            other.check(mapped.start + 32 * PAGE, 32, above(gpa, 32)),
            "right"
        );

        // Another mapping moves as a whole, and is handed over with its new address.
        let whole = other.map(16, mode);
        let gpa = above(gpa, 500);
        let id = foreign(&pager, &uffd, &whole, gpa);
        assert_eq!(other.check(whole.start, 4, gpa), "right");
        let to: u64 = other
            .tell(format!("mremap {} 16", whole.start))
            .parse()
            .unwrap();
        assert_eq!(other.check(to, 16, gpa), "right");
        eventually("all present", || pager.counts(id).unwrap().present == 16);
    }
    assert_no_trouble(&pager);
}

/// The kernel wakes no thread in these cases. A sleeping thread must find that the memory is not mapped
/// any more (an access would raise SIGSEGV; here the kernel returns ENOMEM).
#[test]
fn threads_that_sleep_in_unmapped_or_moved_memory_are_woken() {
    if !Other::can_start() {
        return;
    }
    // If UNMAP events are enabled, a move also reports its previous address by UNMAP.
    let ways = [
        ("munmap", Features::EVENT_UNMAP),
        ("mremap", Features::EVENT_REMAP),
    ];
    for (how, event) in ways {
        for mode in [Mode::Missing, Mode::Minor] {
            let pager = Pager::new().unwrap();
            let (other, uffd) = Other::start(&[event]);
            let mapped = other.map(4, mode);
            let id = foreign(&pager, &uffd, &mapped, AT);
            // There is no reader yet: the fault precedes the event, and is not resolved.
            other.tell(format!("later populate {} 1", mapped.start + 2 * PAGE));
            let serving = Serving::new(&pager, 1);
            let mut told = [PollFd::new(&serving, PollFlags::IN)];
            let timeout = Timespec::try_from(PATIENCE).unwrap();
            assert_eq!(
                poll(&mut told, Some(&timeout)).unwrap(),
                1,
                "{how} {mode:?}"
            );
            drop(serving);
            other.tell(format!("later {how} {} 4", mapped.start));
            other.wait_for_end_of(&mapped);

            let _readers = two_readers(&pager);
            let no_memory = format!("{:?}", Err::<(), _>(rustix::io::Errno::NOMEM));
            assert_eq!(other.tell("join"), no_memory, "{how} {mode:?}");
            let done = other.tell("join");
            if how == "mremap" {
                let to: u64 = done.parse().unwrap();
                assert_eq!(other.check(to, 4, AT), "right", "{mode:?}");
            } else {
                assert_eq!(done, "ok");
                eventually("removed", || pager.counts(id).unwrap().removed == 4);
            }
            assert_no_trouble(&pager);
        }
    }
}

#[test]
fn a_region_in_parts_is_exported_with_their_addresses() {
    let Some((pager, serving, other, uffd)) = pager_and_child(&ALL_EVENTS) else {
        return;
    };
    let mapped = other.map(16, Mode::Missing);
    let id = foreign(&pager, &uffd, &mapped, AT);
    let to: u64 = other
        .tell(format!("mremap {} 4", mapped.start + 4 * PAGE))
        .parse()
        .unwrap();
    serving.stop();
    let exported = pager.export(id).unwrap();
    let mut parts: Vec<_> = exported
        .parts
        .iter()
        .map(|part| (part.pages.first().0, part.pages.count(), part.start))
        .collect();
    parts.sort_unstable();
    let start = mapped.start;
    assert_eq!(parts, [(0, 4, start), (4, 4, to), (8, 8, start + 8 * PAGE)]);
}

#[test]
fn a_fork_is_reported_and_leaks_no_descriptor() {
    if !Other::can_start() {
        return;
    }
    let pager = Pager::new().unwrap();
    let (sender, notices) = mpsc::channel();
    pager.on_notice(move |notice| {
        let _ = sender.send(notice.clone());
    });
    let _readers = two_readers(&pager);
    let (other, uffd) = Other::start(&ALL_EVENTS);
    let mapped = other.map(16, Mode::Missing);
    let id = foreign(&pager, &uffd, &mapped, AT);
    assert_eq!(other.check(mapped.start, 4, AT), "right");
    // Other tests of this process have descriptors too: the test counts only userfaultfds, and none of
    // the other tests forks.
    let forked = || {
        let links = read_dir("/proc/self/fd").unwrap();
        let names = links.filter_map(|link| std::fs::read_link(link.ok()?.path()).ok());
        names
            .filter(|name| name.as_os_str() == "anon_inode:[userfaultfd]")
            .count()
    };
    for _ in 0..50 {
        assert_eq!(other.tell("fork"), "ok");
        match notices.recv_timeout(PATIENCE).unwrap() {
            Notice::Forked { region } => assert_eq!(region, id),
            other => panic!("{other}"),
        }
    }
    let open = forked();
    assert!(open < 50, "{open} userfaultfds are open");
    assert_eq!(other.check(mapped.start, 16, AT), "right");
    assert_no_trouble(&pager);
}
