//! How prefetch ends before everything is there: it is told to, the pager stops, the source fails.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod common;

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use common::*;
use pagetide_memory::{Backing, PageIndex, PageState};
use pagetide_pager::{
    Fetch, Fetched, Mode, Pager, Prefetch, PrefetchConfig, ReaderConfig, ReaderError, Readers,
};

fn prefetch(pager: &Arc<Pager>) -> Prefetch {
    let batch_bytes = 8 * PAGE;
    Prefetch::spawn(pager, PrefetchConfig { batch_bytes }).unwrap()
}

/// Takes a millisecond for each batch.
fn slowly(fetch: &mut Fetch<'_>) -> Result<Fetched, pagetide_pager::SourceError> {
    thread::sleep(Duration::from_millis(1));
    push_pattern(fetch)
}

fn last_cause(error: &dyn Error) -> String {
    error.source().map_or_else(|| error.to_string(), last_cause)
}

#[test]
fn it_stops_in_the_middle_and_another_goes_on() {
    let Some(region) = region(8192, Backing::Shmem) else {
        return;
    };
    let pager = pager(&region, Mode::Minor, SourceFn(slowly));
    within_patience("stopping", move || {
        let mut pages = 0;
        for _ in 0..3 {
            let before = pager.progress().present;
            let running = prefetch(&pager);
            eventually("progress", || pager.progress().present > before);
            assert!(!running.is_finished());
            let ended = running.stop().unwrap();
            assert!(!ended.is_complete);
            pages += ended.counters.pages;
            let counts = pager.page_map(only(&pager)).unwrap().counts();
            assert_eq!((counts.present, counts.in_flight), (pages, 0));
        }
        let running = prefetch(&pager);
        drop(running);
        pages = pager.progress().present;
        let ended = prefetch(&pager).finish().unwrap();
        assert!(ended.is_complete);
        assert_eq!(pages + ended.counters.pages, region.pages());
        assert_eq!(pager.counted().pages, region.pages());
        (0..region.pages()).for_each(|page| check_page(&region, page));
    });
}

#[test]
fn it_ends_with_the_pager() {
    let Some(region) = region(8192, Backing::Shmem) else {
        return;
    };
    let pager = pager(&region, Mode::Minor, SourceFn(slowly));
    within_patience("stopping", move || {
        let running = prefetch(&pager);
        eventually("progress", || pager.progress().present > 0);
        pager.stop();
        let ended = running.finish().unwrap();
        assert!(!ended.is_complete);
    });
}

#[test]
fn it_ends_while_it_waits_for_an_owner() {
    let Some(region) = region(8, Backing::Shmem) else {
        return;
    };
    let gate = Arc::new(std::sync::Barrier::new(2));
    let at_gate = Arc::clone(&gate);
    let source = SourceFn(move |fetch: &mut Fetch<'_>| {
        if fetch.is_urgent() {
            at_gate.wait();
        }
        push_pattern(fetch)
    });
    let pager = pager(&region, Mode::Minor, source);
    let mut resolver = pager.resolver(0);
    let touched = Arc::clone(&region);
    let owner = spawn_asleep("owner", move || {
        resolver.resolve_exit(&read_exit(&touched, 5)).unwrap()
    });
    within_patience("prefetch", move || {
        let running = prefetch(&pager);
        eventually("the rest", || pager.progress().present == 7);
        thread::sleep(Duration::from_millis(20));
        assert!(!running.is_finished(), "a page is not settled yet");
        assert!(!running.stop().unwrap().is_complete);
        let running = prefetch(&pager);
        gate.wait();
        assert!(running.finish().unwrap().is_complete);
        owner.join().unwrap();
    });
}

#[test]
fn a_source_that_fails_ends_the_run_with_its_cause() {
    for mode in [Mode::Minor, Mode::Missing] {
        let Some(region) = region(256, Backing::Shmem) else {
            return;
        };
        let source = SourceFn(|fetch: &mut Fetch<'_>| {
            if fetch.pages().end().0 > 100 {
                return Err(unavailable("the other side hung up"));
            }
            push_pattern(fetch)
        });
        let pager = pager(&region, mode, source);
        let told = Arc::new(AtomicBool::new(false));
        let tell = Arc::clone(&told);
        pager.on_failure(move |_| tell.store(true, Ordering::Release));
        within_patience("failing", move || {
            let failure = prefetch(&pager).finish().unwrap_err();
            assert!(matches!(failure.cause(), ReaderError::Prefetch(_)));
            assert_eq!(last_cause(&failure), "the other side hung up");
            assert!(told.load(Ordering::Acquire) && pager.is_stopped());
            // What could be had came, one by one at the end; the rest was given back.
            for page in 0..region.pages() {
                let expected = if page < 100 {
                    PageState::Present
                } else {
                    PageState::Absent
                };
                assert_eq!(state(&pager, page), expected, "page {page}");
            }
            let counts = pager.page_map(only(&pager)).unwrap().counts();
            assert_eq!(counts.in_flight, 0);
            assert_eq!(pager.counted().pages, 100);
        });
    }
}

#[test]
fn a_source_that_panics_ends_the_run_with_what_it_said() {
    let Some(region) = region(64, Backing::Shmem) else {
        return;
    };
    let source = SourceFn(|_: &mut Fetch<'_>| panic!("index out of bounds"));
    let pager = pager(&region, Mode::Minor, source);
    within_patience("panicking", move || {
        let failure = prefetch(&pager).finish().unwrap_err();
        assert_eq!(
            failure.to_string(),
            "prefetch panicked: index out of bounds"
        );
        let counts = pager.page_map(only(&pager)).unwrap().counts();
        assert_eq!(counts.absent, 64);
    });
}

#[test]
fn a_failure_elsewhere_ends_it_too() {
    let Some(region) = region(8192, Backing::Shmem) else {
        return;
    };
    let last = region.pages() - 1;
    let failed = Arc::new(AtomicBool::new(false));
    let has_failed = Arc::clone(&failed);
    let source = SourceFn(move |fetch: &mut Fetch<'_>| {
        if fetch.is_urgent() {
            return Err(unavailable("no urgent pages today"));
        }
        if fetch.pages().contains(PageIndex(last)) {
            // Prefetch went where the fault was: it comes too late to bring that page in.
            eventually("failure", || has_failed.load(Ordering::Acquire));
            return Err(unavailable("no page"));
        }
        slowly(fetch)
    });
    let pager = pager(&region, Mode::Minor, source);
    pager.on_failure(move |_| failed.store(true, Ordering::Release));
    let readers = Readers::spawn(&pager, ReaderConfig::new(1)).unwrap();
    let running = prefetch(&pager);
    let touched = Arc::clone(&region);
    let toucher = spawn_asleep("toucher", move || check_page(&touched, last));
    within_patience("failing", move || {
        let failure = running.finish().unwrap_err();
        assert_eq!(last_cause(&failure), "no urgent pages today");
        drop(readers);
        assert!(!toucher.is_finished(), "it must not read zeroes");
        // Only the end of the userfaultfd lets it go, and it finds nothing.
        drop(pager);
        toucher.join().unwrap_err();
    });
}

#[test]
fn lost_pages_are_found_among_their_neighbours() {
    for lost in [0, 1, 31, 63] {
        let Some(region) = region(64, Backing::Shmem) else {
            return;
        };
        let source = SourceFn(move |fetch: &mut Fetch<'_>| {
            if fetch.pages().contains(PageIndex(lost)) {
                return Ok(Fetched::Poisoned);
            }
            push_pattern(fetch)
        });
        let pager = pager(&region, Mode::Minor, source);
        within_patience("prefetch", move || {
            let ended = prefetch(&pager).finish().unwrap();
            assert!(ended.is_complete);
            assert_eq!(ended.counters.pages, 63);
            assert_eq!(state(&pager, lost), PageState::Poisoned);
            let others = (0..64).filter(|&page| page != lost);
            others.for_each(|page| check_page(&region, page));
        });
    }
}
