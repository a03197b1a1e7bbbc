//! A source that is unreachable stalls its region and nothing else: a thread that touches a missing
//! page waits, and the owner continues with the same source, with another, or without one.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::error::Error;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::thread;
use std::time::Duration;

use pagetide_memory::{Backing, GuestAddress, PageState, Region};
use pagetide_pager::{
    Content, Contents, Mode, Notice, Pager, Prefetch, PrefetchConfig, ReaderConfig, Readers,
    RegionChangeError, RegionConfig, RegionId, Request, RequestId, ResolveError, RetryPolicy,
    Source, SourceError, SourceStatus,
};
use support::manual::*;
use support::{equals, eventually, spawn_asleep};

/// A source that works while its switch is on.
fn switched() -> (
    Arc<AtomicBool>,
    Arc<SubmitFn<impl Fn(Request) + Send + Sync>>,
) {
    let on = Arc::new(AtomicBool::new(false));
    let is_on = Arc::clone(&on);
    let source = SubmitFn(move |request: Request| {
        if is_on.load(Ordering::Acquire) {
            complete(request);
        } else {
            request.fail(unavailable("the other side hung up"));
        }
    });
    (on, Arc::new(source))
}

fn prefetch(pager: &Arc<Pager>) -> Prefetch {
    let batch_bytes = 8 * PAGE;
    Prefetch::spawn(pager, PrefetchConfig { batch_bytes }).unwrap()
}

fn last_cause(error: &dyn Error) -> String {
    error.source().map_or_else(|| error.to_string(), last_cause)
}

/// A thread that touches a page as the guest would.
fn touch(region: &Arc<Region>, page: u64) -> thread::JoinHandle<()> {
    let region = Arc::clone(region);
    thread::spawn(move || check_page(&region, page))
}

#[test]
fn a_stalled_region_waits_until_it_is_resumed() {
    for (mode, backing) in WAYS {
        let Some(region) = region(64, backing) else {
            return;
        };
        let (on, source) = switched();
        let policy = RetryPolicy {
            attempts: 3,
            ..ONE_ATTEMPT
        };
        let (pager, id) = serve(&region, mode, source, policy);
        let told = notices(&pager);
        let readers = Readers::spawn(&pager, ReaderConfig::new(2)).unwrap();
        let touching = touch(&region, 7);
        let last = stalled(&told, id);
        assert_eq!(last_cause(&*last), "the other side hung up");
        assert_eq!(pager.counted().failed_requests, 3);
        let notice = pager.trouble().unwrap();
        assert!(notice.needs_action());
        assert_eq!(last_cause(&notice), "the other side hung up");
        let expected = SourceStatus {
            is_stalled: true,
            is_suspended: false,
            in_flight_bytes: 0,
            waiting_requests: 1,
            set_aside_pages: 0,
            is_held: false,
        };
        assert_eq!(pager.source_status(id).unwrap(), expected);

        // A later thread waits as well, and nothing more is requested.
        let waiting = exit(&pager, 8);
        let ahead = prefetch(&pager);
        eventually("the exit", || {
            pager.source_status(id).unwrap().waiting_requests == 2
        });
        assert_eq!(state(&pager, 7), PageState::Pending);
        assert_eq!(pager.counted().failed_requests, 3);
        assert!(!touching.is_finished() && !waiting.is_finished() && !ahead.is_finished());

        // Too early: the notice is repeated.
        pager.resume(id).unwrap();
        stalled(&told, id);
        on.store(true, Ordering::Release);
        pager.clear_trouble();
        pager.resume(id).unwrap();
        join("the toucher", touching);
        let _ = join("the exit", waiting).unwrap();
        assert!(
            within_patience("prefetch", || ahead.finish())
                .unwrap()
                .is_complete
        );
        check_all(&region);
        readers.stop();
        assert_eq!(pager.counted().pages, 64);
        assert!(pager.trouble().is_none());
        assert!(!pager.source_status(id).unwrap().is_stalled);
    }
}

/// Two regions in one pager: the first one's source is unreachable, the second one's is not.
struct Half {
    pager: Arc<Pager>,
    regions: [Arc<Region>; 2],
    gone: RegionId,
    there: RegionId,
    /// The switch of the first one's source.
    on: Arc<AtomicBool>,
}

fn half_stalled() -> Option<Half> {
    let first = region(64, Backing::Shmem)?;
    let second = region_at(GuestAddress(GPA.0 + 64 * PAGE), 64, Backing::Anonymous)?;
    let (on, source) = switched();
    let (pager, gone) = serve(&first, Mode::Minor, source, ONE_ATTEMPT);
    let contents = Contents::Source(Arc::new(SubmitFn(complete)));
    let config = RegionConfig::local(Arc::clone(&second), Mode::Missing, contents);
    let there = pager.add(config).unwrap();
    let told = notices(&pager);
    let waiting = exit(&pager, 0);
    stalled(&told, gone);
    assert!(!waiting.is_finished());
    Some(Half {
        pager,
        regions: [first, second],
        gone,
        there,
        on,
    })
}

#[test]
fn other_regions_continue() {
    let Some(Half {
        pager,
        regions,
        gone,
        there,
        ..
    }) = half_stalled()
    else {
        return;
    };
    let [_, second] = regions;
    let readers = Readers::spawn(&pager, ReaderConfig::new(1)).unwrap();
    join("the toucher", touch(&second, 9));
    let _ = join("the exit", exit(&pager, 64 + 3)).unwrap();
    within_patience("the rest", move || check_all(&second));
    assert!(pager.source_status(gone).unwrap().is_stalled);
    assert!(!pager.source_status(there).unwrap().is_stalled);
    drop(readers);
    pager.stop();
}

#[test]
fn prefetch_continues_in_other_regions() {
    let Some(Half {
        pager,
        regions,
        gone,
        there,
        on,
    }) = half_stalled()
    else {
        return;
    };
    let [first, second] = regions;
    // In whichever region it starts.
    let ahead = prefetch(&pager);
    eventually("the other region", || {
        pager.counts(there).unwrap().present == 64
    });
    within_patience("the other region", move || check_all(&second));
    assert!(!ahead.is_finished());
    on.store(true, Ordering::Release);
    pager.resume(gone).unwrap();
    assert!(
        within_patience("prefetch", || ahead.finish())
            .unwrap()
            .is_complete
    );
    check_all(&first);
}

#[test]
fn prefetch_continues_in_other_regions_when_a_source_hangs() {
    let Some(first) = region(64, Backing::Shmem) else {
        return;
    };
    let Some(second) = region_at(GuestAddress(GPA.0 + 64 * PAGE), 64, Backing::Shmem) else {
        return;
    };
    let manual = ManualSource::new();
    let pager = Pager::new().unwrap();
    let limits = pagetide_pager::InFlightLimits {
        bulk_bytes: 16 * PAGE,
        ..Default::default()
    };
    let add = |region: &Arc<Region>, contents| {
        let config = RegionConfig::local(Arc::clone(region), Mode::Minor, contents)
            .in_flight_limits(limits)
            .retry_policy(PERSISTENT);
        pager.add(config).unwrap()
    };
    let hanging = add(&first, Contents::Source(manual.source()));
    let there = add(&second, Contents::Source(Arc::new(SubmitFn(complete))));
    let ahead = prefetch(&pager);
    eventually("the other region", || {
        pager.counts(there).unwrap().present == 64
    });
    assert_eq!(pager.counts(hanging).unwrap().pending, 16);
    assert_eq!(manual.log().len(), 2);
    eventually("the first region", || {
        if let Some(request) = manual.take_if(|_| true) {
            complete(request);
        }
        ahead.is_finished()
    });
    assert!(ahead.finish().unwrap().is_complete);
    check_all(&first);
    check_all(&second);
}

#[test]
fn another_source_takes_over_while_the_region_is_stalled() {
    for (mode, backing) in WAYS {
        let Some(region) = region(16, backing) else {
            return;
        };
        let (_, source) = switched();
        let (pager, id) = serve(&region, mode, source, ONE_ATTEMPT);
        let told = notices(&pager);
        let readers = Readers::spawn(&pager, ReaderConfig::new(1)).unwrap();
        let touching = touch(&region, 3);
        let waiting = exit(&pager, 4);
        stalled(&told, id);
        pager
            .replace_source(id, Arc::new(SubmitFn(complete)))
            .unwrap();
        join("the toucher", touching);
        let _ = join("the exit", waiting).unwrap();
        check_page(&region, 15);
        assert!(!pager.source_status(id).unwrap().is_stalled);
        drop(readers);
    }
}

#[test]
fn another_source_takes_over_requests_in_flight() {
    for (mode, backing) in WAYS {
        let Some(region) = region(16, backing) else {
            return;
        };
        let (former, next) = (ManualSource::new(), ManualSource::new());
        let (pager, id) = serve(&region, mode, former.source(), PERSISTENT);
        let ahead = prefetch(&pager);
        former.wait_for_waiting(2);
        let waiting = exit(&pager, 3);
        former.wait_for_waiting(3);
        pager.replace_source(id, next.source()).unwrap();
        next.wait_for_waiting(3);
        // The same pages, urgent ones first.
        let asked: Vec<_> = next.log().iter().map(|asked| asked.pages).collect();
        assert_eq!(asked, [range(3, 1), range(0, 8), range(8, 8)]);
        for _ in 0..3 {
            let late = former.next();
            former.wait_for_cancelled(late.id());
            let wrong = vec![0xee; usize::try_from(late.bytes()).unwrap()];
            late.complete(Content::Bytes(&wrong));
        }
        assert_eq!(pager.counted().late_answers, 3);
        assert_eq!(pager.counts(id).unwrap().pending, 16);
        (0..3).for_each(|_| complete(next.next()));
        let _ = join("the exit", waiting).unwrap();
        assert!(
            within_patience("prefetch", || ahead.finish())
                .unwrap()
                .is_complete
        );
        check_all(&region);
    }
}

#[test]
fn abandoned_pages_are_lost_and_not_zero() {
    for (mode, backing) in WAYS {
        for is_stalled in [true, false] {
            let Some(region) = region(16, backing) else {
                return;
            };
            let manual = ManualSource::new();
            let (pager, id) = serve(&region, mode, manual.source(), ONE_ATTEMPT);
            let told = notices(&pager);
            let readers = Readers::spawn(&pager, ReaderConfig::new(1)).unwrap();
            let there = exit(&pager, 0);
            complete(manual.next());
            let _ = join("the exit", there).unwrap();
            let touched = Arc::clone(&region);
            let touching = thread::spawn(move || assert_lost(&touched, 3));
            let kept = manual.next();
            let waiting = exit(&pager, 5);
            let other = manual.next();
            if is_stalled {
                other.fail(unavailable("gone for good"));
                stalled(&told, id);
            }
            pager.abandon(id).unwrap();
            join("the toucher", touching);
            let resolved = join("the exit", waiting).unwrap();
            assert_eq!(resolved, pagetide_pager::Resolution::Poisoned);
            // A late answer changes nothing.
            complete(kept);
            assert_eq!(pager.counts(id).unwrap().poisoned, 15);
            check_page(&region, 0);
            (1..16).for_each(|page| assert_lost(&region, page));
            let ahead = prefetch(&pager);
            assert!(
                within_patience("prefetch", || ahead.finish())
                    .unwrap()
                    .is_complete
            );
            drop(readers);
            drop(pager);
            (1..16).for_each(|page| assert_lost(&region, page));
        }
    }
}

#[test]
fn content_that_cannot_be_installed_stalls_its_region_only() {
    let Some(region) = region(8, Backing::Shmem) else {
        return;
    };
    let manual = ManualSource::new();
    let (pager, id) = serve(&region, Mode::Missing, manual.source(), PERSISTENT);
    let told = notices(&pager);
    let waiting = exit(&pager, 3);
    let request = manual.next();
    // Other code maps a page there without the pager.
    let file = region.file().unwrap();
    rustix::io::pwrite(file, &[7; 4096], 3 * PAGE).unwrap();
    complete(request);
    match told.recv_timeout(PATIENCE).unwrap() {
        Notice::NotInstalled { region, .. } => assert_eq!(region, id),
        other => panic!("{other}"),
    }
    assert!(
        !waiting.is_finished(),
        "no thread may read the foreign page"
    );
    assert!(pager.source_status(id).unwrap().is_stalled);
    // The owner removes it again.
    region.punch(range(3, 1)).unwrap();
    pager.resume(id).unwrap();
    complete(manual.next());
    let _ = join("the exit", waiting).unwrap();
    check_page(&region, 3);
}

/// Kind: a neighbour decides over the page that a thread waits for. Content that cannot be installed keeps no other from where it
/// belongs.
#[test]
fn content_next_to_what_cannot_be_installed_is_installed() {
    let Some(region) = region(8, Backing::Shmem) else {
        return;
    };
    let manual = ManualSource::new();
    let pager = Pager::new().unwrap();
    let config = RegionConfig::local(Arc::clone(&region), Mode::Missing, manual.contents());
    let config = config.retry_policy(PERSISTENT).fault_around(8);
    let id = pager.add(config).unwrap();
    let waiting = exit(&pager, 5);
    let request = manual.next();
    assert_eq!(request.pages(), range(0, 8));
    let file = region.file().unwrap();
    rustix::io::pwrite(file, &[7; 4096], 2 * PAGE).unwrap();
    complete(request);
    let _ = join("the exit", waiting).unwrap();
    for page in (0..2).chain(3..8) {
        check_page(&region, page);
    }
    assert_eq!(state(&pager, 2), PageState::Absent);
    assert!(!pager.source_status(id).unwrap().is_stalled);
}

/// No thread waits for it: the page is left out, and the region does not stall.
#[test]
fn bulk_content_that_cannot_be_installed_stalls_nothing() {
    let Some(region) = region(8, Backing::Shmem) else {
        return;
    };
    let manual = ManualSource::new();
    let policy = RetryPolicy {
        attempts: 3,
        ..PERSISTENT
    };
    let (pager, id) = serve(&region, Mode::Missing, manual.source(), policy);
    let told = notices(&pager);
    let ahead = prefetch(&pager);
    let bulk = manual.next_bulk();
    assert_eq!(bulk.pages(), range(0, 8));
    // Other code maps a page there without the pager.
    let file = region.file().unwrap();
    rustix::io::pwrite(file, &[7; 4096], 2 * PAGE).unwrap();
    complete(bulk);
    let others = || pager.progress().present == 7;
    eventually("the others", || {
        manual.take_if(|_| true).into_iter().for_each(complete);
        others() && pager.source_status(id).unwrap().set_aside_pages == 1
    });
    let ended = within_patience("prefetch", || ahead.finish()).unwrap();
    assert!(!ended.is_complete);
    let expected = SourceStatus {
        is_stalled: false,
        is_suspended: false,
        in_flight_bytes: 0,
        waiting_requests: 0,
        set_aside_pages: 1,
        is_held: false,
    };
    assert_eq!(pager.source_status(id).unwrap(), expected);
    assert_eq!(state(&pager, 2), PageState::Pending);
    match told.recv_timeout(PATIENCE).unwrap() {
        Notice::NotPrefetched { region, .. } => assert_eq!(region, id),
        other => panic!("{other}"),
    }
    assert!(told.try_recv().is_err(), "one notice");
    // The owner removes the page, and a thread touches it.
    region.punch(range(2, 1)).unwrap();
    let waiting = exit(&pager, 2);
    complete(manual.next_urgent());
    let _ = join("the exit", waiting).unwrap();
    check_all(&region);
}

/// Infinite waits are represented by the longest duration.
#[test]
fn deadlines_and_pauses_may_be_of_any_length() {
    for long in [Duration::MAX, Duration::from_secs(1 << 62)] {
        let Some(region) = region(8, Backing::Shmem) else {
            return;
        };
        let manual = ManualSource::new();
        let policy = RetryPolicy {
            deadline: long,
            attempts: 3,
            first_backoff: long,
            longest_backoff: long,
        };
        let (pager, id) = serve(&region, Mode::Minor, manual.source(), policy);
        let readers = Readers::spawn(&pager, ReaderConfig::new(1)).unwrap();
        let touching = touch(&region, 3);
        complete(manual.next());
        join("the touch", touching);
        // Also after a failure, until the owner resumes it.
        let waiting = exit(&pager, 5);
        manual.next().fail(unavailable("not yet"));
        pager.tick();
        assert_eq!(manual.waiting(), 0);
        assert_eq!(pager.source_status(id).unwrap().waiting_requests, 1);
        pager.resume(id).unwrap();
        complete(manual.next());
        let _ = join("the exit", waiting).unwrap();
        check_page(&region, 5);
        readers.stop();
        assert!(pager.trouble().is_none());
    }
}

#[test]
fn a_waiting_exit_ends_by_stop_and_by_removal() {
    for stop in [true, false] {
        let Some(region) = region(8, Backing::Shmem) else {
            return;
        };
        let manual = ManualSource::new();
        let (pager, id) = serve(&region, Mode::Minor, manual.source(), PERSISTENT);
        let waiting = exit(&pager, 3);
        let request = manual.next();
        if stop {
            pager.stop();
        } else {
            pager.remove(id).unwrap();
        }
        match join("the exit", waiting).unwrap_err() {
            ResolveError::Stopped { fault } => assert!(stop && fault.vcpu == Some(0)),
            ResolveError::Removed { fault } => assert!(!stop && fault.vcpu == Some(0)),
            other => panic!("{other}"),
        }
        if stop {
            // The VM continues later: its requests are still in flight.
            pager.restart();
            let waiting = exit(&pager, 3);
            complete(request);
            let _ = join("the exit", waiting).unwrap();
            check_page(&region, 3);
        }
    }
}

#[test]
fn only_regions_with_a_source_can_be_stalled() {
    let Some(region) = region(8, Backing::Shmem) else {
        return;
    };
    let pager = Pager::new().unwrap();
    let local = Contents::Local(Arc::new(pagetide_pager::PatternSource::new(fill)));
    let config = RegionConfig::local(Arc::clone(&region), Mode::Minor, local);
    let id = pager.add(config).unwrap();
    let none = RegionChangeError::NoSource { region: id };
    // Nothing is stalled, and nobody is asleep.
    assert_eq!(pager.resume(id), Ok(()));
    assert_eq!(pager.source_status(id), Err(none));
    assert_eq!(
        pager.replace_source(id, ManualSource::new().source()),
        Err(none)
    );
    pager.remove(id).unwrap();
    let gone = RegionChangeError::NoSuchRegion { region: id };
    assert_eq!(pager.resume(id), Err(gone));
    assert_eq!(pager.source_status(id), Err(gone));
    assert_eq!(pager.remove(id), Err(gone));
}

#[test]
fn a_request_for_pages_delivered_otherwise_is_no_failure() {
    let Some(region) = region(8, Backing::Shmem) else {
        return;
    };
    let manual = ManualSource::new();
    let (pager, id) = serve(&region, Mode::Minor, manual.source(), ONE_ATTEMPT);
    let waiting = exit(&pager, 3);
    let request = manual.next();
    pager
        .push(id, range(3, 1), Content::Bytes(&content_of(range(3, 1))))
        .unwrap();
    let _ = join("the exit", waiting).unwrap();
    request.fail(SourceError::Dropped);
    let status = pager.source_status(id).unwrap();
    assert_eq!((status.is_stalled, status.in_flight_bytes), (false, 0));
    assert!(pager.trouble().is_none());
}

/// As when a link to a peer is down, and the owner makes another.
#[test]
fn a_suspended_region_asks_for_nothing_and_uses_up_no_attempt() {
    for (mode, backing) in WAYS {
        let Some(region) = region(8, backing) else {
            return;
        };
        let manual = ManualSource::new();
        let (pager, id) = serve(&region, mode, manual.source(), ONE_ATTEMPT);
        let first = exit(&pager, 1);
        let flying = manual.next();
        pager.suspend(id).unwrap();
        manual.wait_for_cancelled(flying.id());
        let status = pager.source_status(id).unwrap();
        assert!(status.is_stalled && status.is_suspended, "{status:?}");
        assert_eq!((status.in_flight_bytes, status.waiting_requests), (0, 1));
        // A thread that comes meanwhile waits, too.
        let second = exit(&pager, 5);
        eventually("its request", || {
            equals(pager.source_status(id).unwrap().waiting_requests, &2)
        });
        assert_eq!(manual.waiting(), 0);
        // What the link has delivered after all is used.
        complete(flying);
        let _ = join("the first exit", first).unwrap();
        check_page(&region, 1);
        pager.resume(id).unwrap();
        // The page that has come is not asked for again.
        let again = manual.next();
        assert_eq!(again.pages(), range(5, 1));
        complete(again);
        let _ = join("the second exit", second).unwrap();
        check_page(&region, 5);
        let status = pager.source_status(id).unwrap();
        assert!(!status.is_stalled && !status.is_suspended, "{status:?}");
        assert!(pager.trouble().is_none());
        assert_eq!(pager.counted().failed_requests, 0);
    }
}

/// Calls this when a request is cancelled.
struct Cancelled<F>(F);

impl<F: Fn() + Send + Sync> Source for Cancelled<F> {
    fn submit(&self, request: Request) {
        std::mem::forget(request);
    }

    fn cancel(&self, _: RegionId, _: RequestId) {
        (self.0)();
    }
}

/// While a region is abandoned, the guest discards a page on which a thread sleeps. The page is not missing any more,
/// so that it is not poisoned, and its entry is gone.
#[test]
fn a_page_that_is_discarded_while_its_region_is_abandoned_wakes_its_thread() {
    let Some(region) = region(8, Backing::Shmem) else {
        return;
    };
    let pager = Pager::new().unwrap();
    let (its, place) = (Arc::downgrade(&pager), Arc::new(OnceLock::new()));
    let id = Arc::clone(&place);
    let source = Cancelled(move || {
        let (pager, id) = (its.upgrade().unwrap(), *id.get().unwrap());
        assert_eq!(pager.discard(id, range(3, 1)).unwrap(), 1);
    });
    let contents = Contents::Source(Arc::new(source));
    let config = RegionConfig::local(Arc::clone(&region), Mode::Minor, contents);
    let id = pager.add(config).unwrap();
    place.set(id).unwrap();
    let readers = Readers::spawn(&pager, ReaderConfig::new(1)).unwrap();
    let touched = Arc::clone(&region);
    let touching = spawn_asleep("a touch", move || {
        let mut seen = [1; 16];
        touched
            .read_guest(range(3, 1).first(), 0, &mut seen)
            .unwrap();
        seen
    });
    eventually("the request", || {
        pager.source_status(id).unwrap().in_flight_bytes > 0
    });
    pager.abandon(id).unwrap();
    assert_eq!(touching.join(), [0; 16]);
    readers.stop();
}

/// Replaces itself while it gets a request, and then lives no longer than the call. Its end answers the request.
struct Leaving {
    kept: Mutex<Vec<Request>>,
    pager: Weak<Pager>,
    region: Arc<OnceLock<RegionId>>,
    next: Arc<dyn Source>,
}

impl Source for Leaving {
    fn submit(&self, request: Request) {
        self.kept.lock().unwrap().push(request);
        let pager = self.pager.upgrade().unwrap();
        let next = Arc::clone(&self.next);
        pager
            .replace_source(*self.region.get().unwrap(), next)
            .unwrap();
    }
}

#[test]
fn a_source_whose_end_comes_in_a_call_of_the_pager_holds_up_nothing() {
    let Some(region) = region(8, Backing::Shmem) else {
        return;
    };
    let pager = Pager::new().unwrap();
    let place = Arc::new(OnceLock::new());
    let source = Leaving {
        kept: Mutex::default(),
        pager: Arc::downgrade(&pager),
        region: Arc::clone(&place),
        next: Arc::new(SubmitFn(complete)),
    };
    let contents = Contents::Source(Arc::new(source));
    let config = RegionConfig::local(Arc::clone(&region), Mode::Minor, contents);
    let id = pager.add(config).unwrap();
    place.set(id).unwrap();
    let _ = join("the exit", exit(&pager, 3)).unwrap();
    check_page(&region, 3);
}
