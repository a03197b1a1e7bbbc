//! Local content that is unavailable fails the fault that needs it, with its cause: no other thread
//! hangs, and nothing is installed in its place.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread;

use pagetide_memory::{Access, Backing, GuestAddress, PageIndex, PageSize, PageState, Region};
use pagetide_pager::{
    Contents, Filled, Holes, Memfd, Mode, Notice, Pager, ReaderConfig, Readers, RegionConfig,
    Resolution, ResolveError, ServeError, SourceError,
};
use pagetide_test_support::FullMemoryFile;
use support::manual::*;
use support::view::View;
use support::{Paged, SMALL_WAYS, can_poison, expect_poison, has_userfaultfd, spawn_asleep};

fn chain(error: &dyn Error) -> Vec<String> {
    let mut words = vec![error.to_string()];
    let mut next = error.source();
    while let Some(error) = next {
        words.push(error.to_string());
        next = error.source();
    }
    words
}

/// The pages of a buffer that a source is to fill.
fn pages(gpa: GuestAddress, buffer: &[u8]) -> pagetide_memory::PageRange {
    range((gpa.0 - GPA.0) / PAGE, buffer.len() as u64 / PAGE)
}

fn serve_local<F>(region: &Arc<Region>, mode: Mode, around: u64, fill: F) -> Arc<Pager>
where
    F: Fn(GuestAddress, &mut [u8]) -> Result<Filled, SourceError> + Send + Sync + 'static,
{
    let pager = Pager::new().unwrap();
    let contents = Contents::Local(Arc::new(LocalFn(fill)));
    let config = RegionConfig::local(Arc::clone(region), mode, contents).fault_around(around);
    pager.add(config).unwrap();
    pager
}

#[test]
fn a_failure_ends_the_exit_with_its_cause() {
    for (mode, backing) in WAYS {
        let Some(region) = region(16, backing) else {
            return;
        };
        let pager = serve_local(&region, mode, 8, |_, _| {
            Err(unavailable("the other side hung up"))
        });
        let error = pager.resolver(Some(2)).unwrap();
        let error = { error }.resolve_exit(gpa(3), Access::Read).unwrap_err();
        let chain = chain(&error);
        assert_eq!(
            chain[0],
            "read of gpa 0x100003000 by vCPU 2 (by exit): no content"
        );
        assert_eq!(chain.last().unwrap(), "the other side hung up");
        assert!((0..16).all(|page| state(&pager, page) == PageState::Absent));
        // The next exit retries.
        assert!(join("the exit", exit(&pager, 3)).is_err());
    }
}

#[test]
fn a_failure_or_a_panic_of_a_source_is_a_notice_and_readers_continue() {
    for panics in [false, true] {
        let Some(region) = region(8, Backing::Shmem) else {
            return;
        };
        let pager = serve_local(&region, Mode::Minor, 1, move |gpa, buffer| {
            if pages(gpa, buffer).contains(PageIndex(2)) {
                assert!(!panics, "intended");
                return Err(unavailable("the other side hung up"));
            }
            fill(gpa, buffer);
            Ok(Filled::Bytes)
        });
        let told = notices(&pager);
        // All messages are present before the only reader reads: none of a batch may be lost.
        let (sent, done) = mpsc::channel();
        let touchers: Vec<_> = [0, 1, 3, 4, 5, 6, 7]
            .into_iter()
            .map(|page| {
                let (region, sent) = (Arc::clone(&region), sent.clone());
                thread::spawn(move || {
                    check_page(&region, page);
                    sent.send(()).unwrap();
                })
            })
            .collect();
        let touched = Arc::clone(&region);
        let unlucky = thread::spawn(move || assert_lost(&touched, 2));
        let config = ReaderConfig {
            threads: 1,
            messages_per_read: 8,
        };
        let readers = Readers::spawn(&pager, config).unwrap();
        let notice = told.recv_timeout(PATIENCE).unwrap();
        assert!(matches!(notice, Notice::Unresolved(_)) && notice.needs_action());
        let chain = chain(&notice);
        assert!(
            chain.iter().any(|words| words.contains("gpa 0x100002000")),
            "{chain:?}"
        );
        let cause = if panics {
            "the source panicked: intended"
        } else {
            "the other side hung up"
        };
        assert_eq!(chain.last().unwrap(), cause);
        for _ in 0..7 {
            done.recv_timeout(PATIENCE).unwrap();
        }
        for toucher in touchers {
            join("a toucher", toucher);
        }
        assert!(
            !unlucky.is_finished(),
            "a thread that waits for it stays asleep"
        );
        assert_eq!(state(&pager, 2), PageState::Pending);
        assert!(!pager.is_stopped());
        readers.stop();

        // A callback that is set later is called at once.
        let late = notices(&pager);
        assert!(matches!(late.try_recv(), Ok(Notice::Unresolved(_))));
        pager.clear_trouble();
        let later = notices(&pager);
        assert!(later.try_recv().is_err());
        // Dropping the pager wakes the sleeping thread, which reads no content.
        drop(pager);
        join("the unlucky", unlucky);
    }
}

#[test]
fn a_failure_of_a_neighbour_does_not_fail_the_fault() {
    for (mode, backing) in WAYS {
        for is_poison in [false, true] {
            let Some(region) = region(16, backing) else {
                return;
            };
            let asked = Arc::new(AtomicU64::new(0));
            let counter = Arc::clone(&asked);
            let pager = serve_local(&region, mode, 8, move |gpa, buffer| {
                counter.fetch_add(1, Ordering::Relaxed);
                if pages(gpa, buffer).contains(PageIndex(6)) {
                    if is_poison {
                        return Ok(Filled::Poisoned);
                    }
                    return Err(unavailable("page 6 is gone"));
                }
                fill(gpa, buffer);
                Ok(Filled::Bytes)
            });
            let resolved = join("the exit", exit(&pager, 4)).unwrap();
            let pages = range(4, 1);
            assert_eq!(resolved, Resolution::Installed { pages });
            assert_eq!(asked.load(Ordering::Relaxed), 2);
            check_page(&region, 4);
            assert_eq!(pager.progress().present, 1);
            let lost = join("the exit", exit(&pager, 6));
            if is_poison {
                assert_eq!(lost.unwrap(), Resolution::Poisoned);
            } else {
                assert!(matches!(lost, Err(ResolveError::Content { .. })));
            }
        }
    }
}

#[test]
fn content_removed_from_the_page_cache_never_becomes_zeroes() {
    let Some(region) = region(4, Backing::Shmem) else {
        return;
    };
    let content = content_of(range(0, 4));
    region.write_service(PageIndex(0), 0, &content).unwrap();
    let pager = Pager::new().unwrap();
    let contents = Contents::PageCache(Holes::AreMissing);
    let config = RegionConfig::local(Arc::clone(&region), Mode::Minor, contents);
    let id = pager.add(config).unwrap();
    let told = notices(&pager);
    // Without the pager.
    region.punch(range(1, 1)).unwrap();
    let readers = Readers::spawn(&pager, ReaderConfig::new(1)).unwrap();
    let touched = Arc::clone(&region);
    let toucher = thread::spawn(move || assert_lost(&touched, 1));
    let notice = told.recv_timeout(PATIENCE).unwrap();
    assert!(matches!(notice, Notice::Unresolved(_)), "{notice}");
    assert!(!toucher.is_finished());
    let error = join("the exit", exit(&pager, 1)).unwrap_err();
    assert!(matches!(error, ResolveError::Install { .. }), "{error}");
    within_patience("another page", {
        let region = Arc::clone(&region);
        move || check_page(&region, 2)
    });
    drop(readers);
    pager.remove(id).unwrap();
    join("the toucher", toucher);
}

#[test]
fn no_readers_are_refused() {
    let pager = Pager::new().unwrap();
    let refused = Readers::spawn(&pager, ReaderConfig::new(0));
    assert!(matches!(refused, Err(ServeError::NoReaders)));
}

/// Whatever the content comes from: the notice names the region to resume.
#[test]
fn a_failure_of_local_content_that_has_passed_is_resumed() {
    for (mode, backing) in SMALL_WAYS {
        let Some(region) = region(4, backing) else {
            return;
        };
        // The kernel may wake the thread early, which then faults again and must fail again.
        let has_passed = Arc::new(AtomicBool::new(false));
        let passed = Arc::clone(&has_passed);
        let source = LocalFn(move |gpa: GuestAddress, buffer: &mut [u8]| {
            if !passed.load(Ordering::Acquire) {
                return Err(unavailable("a moment's lack of memory"));
            }
            fill(gpa, buffer);
            Ok(Filled::Bytes)
        });
        let paged = Paged::new(&region, mode, support::local(source));
        let (send, notices) = mpsc::channel();
        paged.pager.on_notice(move |notice| {
            let _ = send.send(notice.clone());
        });
        let _readers = Readers::spawn(&paged.pager, ReaderConfig::new(1)).unwrap();
        let its = Arc::clone(&region);
        let read = spawn_asleep("a read", move || check_page(&its, 1));
        let notice = notices.recv_timeout(PATIENCE).unwrap();
        assert!(read.is_undisturbed());
        let id = notice.resumable().expect("the failure may pass");
        has_passed.store(true, Ordering::Release);
        paged.pager.resume(id).unwrap();
        read.join();
        // What is missing can be given up, too.
        if can_poison() {
            paged.pager.abandon(id).unwrap();
            expect_poison(&region, 2);
        }
        check_page(&region, 1);
    }
}

/// Kind: a lack that passes is taken for the end. The kernel has no memory for the page while its file system is full.
#[test]
fn a_lack_of_memory_for_a_page_that_has_passed_is_resumed() {
    if !has_userfaultfd() {
        return;
    }
    for mode in [Mode::Missing, Mode::Minor] {
        let Some(full) = FullMemoryFile::new(4 * PAGE) else {
            return;
        };
        let memory = Arc::new(View::new(&full.memory, 4 * PAGE));
        let uffd = memory.register(mode);
        let (range, size) = (memory.range(), PageSize::Size4K);
        let config = RegionConfig::foreign(&uffd, range, size, mode, support::pattern()).gpa(GPA);
        let config = match mode {
            Mode::Missing => config,
            Mode::Minor => config.memfd(Memfd {
                file: full.memory.try_clone().unwrap(),
                offset_bytes: 0,
            }),
        };
        let pager = Pager::new().unwrap();
        pager.add(config).unwrap();
        let told = notices(&pager);
        let _readers = Readers::spawn(&pager, ReaderConfig::new(1)).unwrap();
        let its = Arc::clone(&memory);
        let read = spawn_asleep("a read", move || its.populate_here(1));
        let notice = told.recv_timeout(PATIENCE).unwrap();
        let chain = chain(&notice).join(": ");
        assert!(chain.contains("Cannot allocate memory"), "{chain}");
        assert!(read.is_undisturbed());
        full.make_room();
        let id = notice.resumable().expect("the failure may pass");
        pager.resume(id).unwrap();
        assert_eq!(read.join(), Ok(()), "{mode:?}");
        assert_eq!(memory.read_here(1), !(GPA.0 + PAGE));
    }
}
