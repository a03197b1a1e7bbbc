//! Prefetch of pages that a source does not deliver: they are left out, and nothing stalls that no thread
//! waits for.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use pagetide_memory::{Backing, PageIndex, PageState, Region};
use pagetide_pager::{
    Contents, InFlightLimits, Mode, Pager, Prefetch, PrefetchConfig, PrefetchEnd, PrefetchPlan,
    ReaderConfig, Readers, RegionConfig, RegionId, Request, RetryPolicy, Source,
};
use support::manual::*;

const PAGES: u64 = 64;
const BAD: u64 = 21;

const POLICY: RetryPolicy = RetryPolicy {
    attempts: 3,
    ..ONE_ATTEMPT
};

/// A source that does not have one page until it is repaired.
#[derive(Default)]
struct Holed {
    is_repaired: AtomicBool,
    /// Requests for the page alone.
    asked: AtomicU64,
}

impl Source for Holed {
    fn submit(&self, request: Request) {
        let has_bad = request.pages().contains(PageIndex(BAD));
        if has_bad && request.pages().count() == 1 {
            self.asked.fetch_add(1, Ordering::AcqRel);
        }
        if has_bad && !self.is_repaired.load(Ordering::Acquire) {
            return request.fail(unavailable("a bad sector"));
        }
        complete(request);
    }
}

fn config() -> PrefetchConfig {
    PrefetchConfig {
        batch_bytes: 16 * PAGE,
    }
}

/// Fetches all pages.
fn fetch(pager: &Arc<Pager>) -> PrefetchEnd {
    let ahead = Prefetch::spawn(pager, config()).unwrap();
    within_patience("prefetch", || ahead.finish()).unwrap()
}

fn check_others(region: &Region) {
    let others = (0..PAGES).filter(|&page| page != BAD);
    others.for_each(|page| check_page(region, page));
}

fn set_aside(pager: &Pager, id: RegionId) -> u64 {
    pager.source_status(id).unwrap().set_aside_pages
}

#[test]
fn a_bad_page_is_set_aside_and_the_thread_that_touches_it_decides() {
    for (mode, backing) in WAYS {
        let Some(region) = region(PAGES, backing) else {
            return;
        };
        let source = Arc::new(Holed::default());
        let (pager, id) = serve(&region, mode, Arc::clone(&source) as _, POLICY);
        let told = notices(&pager);
        let readers = Readers::spawn(&pager, ReaderConfig::new(1)).unwrap();
        let ended = fetch(&pager);
        assert!(!ended.is_complete);
        check_others(&region);
        assert_eq!(state(&pager, BAD), PageState::Pending);
        assert_eq!(set_aside(&pager, id), 1);
        // Counted after it was set aside, by the thread that has delivered the failure.
        eventually("the count", || pager.counted().set_aside == 1);
        assert_eq!(source.asked.load(Ordering::Acquire), 3);
        // Nobody has to act.
        assert!(!pager.source_status(id).unwrap().is_stalled);
        assert!(told.try_recv().is_err() && pager.trouble().is_none());

        // Another one tries again, in vain.
        assert!(!fetch(&pager).is_complete);
        assert_eq!(source.asked.load(Ordering::Acquire), 6);

        // A thread that touches the page has all attempts, and then stalls the region.
        let waiting = exit(&pager, BAD);
        stalled(&told, id);
        assert_eq!(source.asked.load(Ordering::Acquire), 9);
        assert!(!waiting.is_finished());
        source.is_repaired.store(true, Ordering::Release);
        pager.resume(id).unwrap();
        let _ = join("the exit", waiting).unwrap();
        check_page(&region, BAD);
        assert_eq!(set_aside(&pager, id), 0);
        assert!(fetch(&pager).is_complete);
        readers.stop();
        eventually("the last count", || pager.counted().pages == PAGES);
    }
}

#[test]
fn a_working_set_goes_on_behind_a_bad_page() {
    for (mode, backing) in WAYS {
        let Some(region) = region(PAGES, backing) else {
            return;
        };
        let source = Arc::new(Holed::default());
        let (pager, id) = serve(&region, mode, Arc::clone(&source) as _, POLICY);
        let readers = Readers::spawn(&pager, ReaderConfig::new(1)).unwrap();
        let fetch = |first: &[(u64, u64)]| {
            let first = first.iter().map(|&(at, count)| (id, range(at, count)));
            let plan = PrefetchPlan {
                first: first.collect(),
                then: Vec::new(),
            };
            let ahead = Prefetch::spawn_plan(&pager, config(), plan).unwrap();
            within_patience("prefetch", || ahead.finish()).unwrap()
        };
        // Whether it was set aside before its second visit depends on time.
        let _ = fetch(&[(BAD - 1, 3), (40, 8), (BAD, 1), (50, 2)]);
        let there = || {
            { (40..48).chain(50..52) }
                .chain([BAD - 1, BAD + 1])
                .all(|page| state(&pager, page) == PageState::Present)
        };
        eventually("the others", there);
        eventually("the bad page", || set_aside(&pager, id) == 1);
        eventually("the count", || pager.counted().set_aside == 1);
        assert!(pager.trouble().is_none());
        drop(readers);
    }
}

/// A guest that touches pages around a bad one gets what it touches.
#[test]
fn fault_around_a_page_that_is_set_aside_stalls_nothing() {
    let Some(region) = region(PAGES, Backing::Shmem) else {
        return;
    };
    let source = Arc::new(Holed::default());
    let pager = Pager::new().unwrap();
    let contents = Contents::Source(Arc::clone(&source) as _);
    let config = RegionConfig::local(Arc::clone(&region), Mode::Minor, contents)
        .retry_policy(POLICY)
        .fault_around(16);
    let id = pager.add(config).unwrap();
    let readers = Readers::spawn(&pager, ReaderConfig::new(1)).unwrap();
    let _ = join("the exit", exit(&pager, BAD + 1)).unwrap();
    assert!(!fetch(&pager).is_complete);
    check_others(&region);
    assert_eq!(set_aside(&pager, id), 1);
    assert!(pager.trouble().is_none());
    drop(readers);
}

/// A source that is unreachable while nobody touches memory: prefetch waits, and later fetches all of it.
#[test]
fn an_outage_that_only_prefetch_meets_stalls_nothing() {
    for (mode, backing) in WAYS {
        let Some(region) = region(1024, backing) else {
            return;
        };
        let is_up = Arc::new(AtomicBool::new(false));
        let up = Arc::clone(&is_up);
        let source = SubmitFn(move |request: Request| match up.load(Ordering::Acquire) {
            true => complete(request),
            false => request.fail(unavailable("the line is cut")),
        });
        let policy = RetryPolicy {
            attempts: 10,
            longest_backoff: Duration::from_millis(50),
            ..ONE_ATTEMPT
        };
        let pager = Pager::new().unwrap();
        let limits = InFlightLimits {
            bulk_bytes: 64 * PAGE,
            ..InFlightLimits::default()
        };
        let contents = Contents::Source(Arc::new(source));
        let config = RegionConfig::local(Arc::clone(&region), mode, contents)
            .retry_policy(policy)
            .in_flight_limits(limits);
        let id = pager.add(config).unwrap();
        let readers = Readers::spawn(&pager, ReaderConfig::new(1)).unwrap();
        let ahead = Prefetch::spawn(&pager, self::config()).unwrap();
        eventually("the hold", || pager.source_status(id).unwrap().is_held);
        // Ten pauses later what was requested is given up, and the rest is tried bit by bit.
        eventually("a page", || set_aside(&pager, id) > 64);
        assert!(!ahead.is_finished());
        let status = pager.source_status(id).unwrap();
        assert!(status.is_held && !status.is_stalled);
        assert!(pager.trouble().is_none());
        is_up.store(true, Ordering::Release);
        let ended = within_patience("prefetch", || ahead.finish()).unwrap();
        assert!(ended.is_complete);
        check_all(&region);
        assert_eq!(set_aside(&pager, id), 0);
        readers.stop();
    }
}
