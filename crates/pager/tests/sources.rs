//! Sources that answer twice, late, wrongly, on another thread, never, or by a panic: nothing wrong is
//! installed, no page is lost, and all available content arrives.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use pagetide_memory::{Backing, GuestAddress, PageState};
use pagetide_pager::{
    Content, Contents, Filled, InFlightLimits, Mode, Pager, Pool, PoolConfig, Prefetch,
    PrefetchConfig, ReaderConfig, Readers, RegionConfig, RegionId, Request, RequestId, Resolution,
    Source, SourceError, Urgency,
};
use support::manual::*;

fn prefetch(pager: &Arc<Pager>, batch_pages: u64) -> Prefetch {
    let batch_bytes = batch_pages * PAGE;
    Prefetch::spawn(pager, PrefetchConfig { batch_bytes }).unwrap()
}

#[test]
fn answers_arrive_in_any_order_from_many_threads() {
    for (mode, backing) in WAYS {
        let Some(region) = region(256, backing) else {
            return;
        };
        let manual = ManualSource::new();
        let (pager, id) = serve(&region, mode, manual.source(), PERSISTENT);
        let running = prefetch(&pager, 8);
        let exits: Vec<_> = (0..256)
            .step_by(50)
            .map(|page| exit(&pager, page))
            .collect();
        let answering: Vec<_> = (0..4)
            .map(|index| {
                let (manual, pager) = (Arc::clone(&manual), Arc::clone(&pager));
                thread::spawn(move || {
                    while pager.counts(id).unwrap().present < 256 {
                        let request = match index {
                            0 => manual.take_if(|request| request.urgency() == Urgency::Bulk),
                            1 => manual.take_if(|_| true),
                            _ => manual.take_last(),
                        };
                        request.map_or_else(thread::yield_now, complete);
                    }
                })
            })
            .collect();
        for answering in answering {
            join("answering", answering);
        }
        for exit in exits {
            let _ = join("an exit", exit).unwrap();
        }
        assert!(
            within_patience("prefetch", || running.finish())
                .unwrap()
                .is_complete
        );
        check_all(&region);
        assert_eq!(pager.counted().pages, 256, "each page once");
    }
}

#[test]
fn of_two_answers_for_a_page_the_first_is_installed() {
    for (mode, backing) in WAYS {
        for urgent_first in [true, false] {
            let Some(region) = region(8, backing) else {
                return;
            };
            let manual = ManualSource::new();
            let (pager, _) = serve(&region, mode, manual.source(), PERSISTENT);
            let running = prefetch(&pager, 8);
            let bulk = manual.next_bulk();
            assert_eq!(bulk.pages(), range(0, 8));
            let waiting = exit(&pager, 3);
            // Prefetch has requested the page: now it is requested again, and a request without an
            // answer does not delay it.
            let urgent = manual.next_urgent();
            assert_eq!(urgent.pages(), range(3, 1));
            let wrong = vec![0xee; 8 * 4096];
            if urgent_first {
                complete(urgent);
                let _ = join("the exit", waiting).unwrap();
                complete(bulk);
            } else {
                complete(bulk);
                let _ = join("the exit", waiting).unwrap();
                urgent.complete(Content::Bytes(&wrong[..4096]));
            }
            assert!(
                within_patience("prefetch", || running.finish())
                    .unwrap()
                    .is_complete
            );
            check_all(&region);
            let counted = pager.counted();
            assert_eq!((counted.pages, counted.answers), (8, 2));
        }
    }
}

#[test]
fn a_fault_on_a_prefetched_page_is_not_delayed() {
    let Some(region) = region(64, Backing::Shmem) else {
        return;
    };
    let manual = ManualSource::new();
    let (pager, _) = serve(&region, Mode::Minor, manual.source(), PERSISTENT);
    let readers = Readers::spawn(&pager, ReaderConfig::new(1)).unwrap();
    let running = prefetch(&pager, 64);
    // Never answered.
    let bulk = manual.next_bulk();
    for page in 0..32 {
        let waiting = exit(&pager, page);
        complete(manual.next_urgent());
        let _ = join("the exit", waiting).unwrap();
    }
    let touched = Arc::clone(&region);
    let touching = thread::spawn(move || check_page(&touched, 40));
    complete(manual.next_urgent());
    join("the toucher", touching);
    assert_eq!(state(&pager, 50), PageState::Pending);
    assert!(
        !within_patience("prefetch", || running.stop())
            .unwrap()
            .is_complete
    );
    assert_eq!(state(&pager, 50), PageState::Absent);
    drop(readers);
    // Too late.
    complete(bulk);
    assert_eq!(pager.counted().late_answers, 1);
    assert_eq!(state(&pager, 50), PageState::Absent);
}

#[test]
fn a_late_answer_is_used_while_somebody_waits() {
    for (mode, backing) in WAYS {
        let Some(region) = region(4, backing) else {
            return;
        };
        let manual = ManualSource::new();
        let (pager, _) = serve(&region, mode, manual.source(), IMPATIENT);
        let waiting = exit(&pager, 1);
        let late = manual.next();
        // The exit's own thread handles deadlines: no thread serves the pager's descriptor.
        manual.wait_for_cancelled(late.id());
        complete(late);
        assert_eq!(pager.counted().late_answers, 1);
        assert_eq!(state(&pager, 1), PageState::Present);
        let _ = join("the exit", waiting).unwrap();
        // Nobody waits for another one: it is dropped.
        if let Some(second) = manual.take_last() {
            let wrong = vec![0xee; usize::try_from(second.bytes()).unwrap()];
            second.complete(Content::Bytes(&wrong));
        }
        check_page(&region, 1);
        assert!(pager.counted().failed_requests >= 1);
        assert!(pager.trouble().is_none());
    }
}

#[test]
fn a_late_answer_of_the_wrong_size_installs_nothing() {
    let Some(region) = region(4, Backing::Shmem) else {
        return;
    };
    let manual = ManualSource::new();
    let (pager, _) = serve(&region, Mode::Minor, manual.source(), IMPATIENT);
    let waiting = exit(&pager, 1);
    for bytes in [PAGE / 2, 2 * PAGE] {
        let late = manual.next();
        manual.wait_for_cancelled(late.id());
        let wrong = vec![0xee; usize::try_from(bytes).unwrap()];
        late.complete(Content::Bytes(&wrong));
        assert!(matches!(
            state(&pager, 1),
            PageState::Pending | PageState::Absent
        ));
    }
    answer_until_done(&manual, &waiting);
    let _ = join("the exit", waiting).unwrap();
    check_page(&region, 1);
}

/// Answers all requests until the thread has finished: on a busy machine a short deadline may pass more
/// than once.
fn answer_until_done<T>(manual: &ManualSource, waiting: &thread::JoinHandle<T>) {
    eventually("the exit", || {
        if let Some(request) = manual.take_if(|_| true) {
            complete(request);
        }
        waiting.is_finished()
    });
}

#[test]
fn a_request_without_an_answer_is_cancelled_and_repeated() {
    let Some(region) = region(4, Backing::Shmem) else {
        return;
    };
    let manual = ManualSource::new();
    let (pager, id) = serve(&region, Mode::Minor, manual.source(), IMPATIENT);
    // Readers handle deadlines too: the thread that touches memory sleeps in the kernel.
    let readers = Readers::spawn(&pager, ReaderConfig::new(1)).unwrap();
    let touched = Arc::clone(&region);
    let touching = thread::spawn(move || check_page(&touched, 2));
    let kept: Vec<_> = (0..3).map(|_| manual.next()).collect();
    for pair in kept.windows(2) {
        assert!(pair[0].id() < pair[1].id());
        manual.wait_for_cancelled(pair[0].id());
    }
    assert!(!pager.source_status(id).unwrap().is_stalled);
    answer_until_done(&manual, &touching);
    join("the toucher", touching);
    readers.stop();
    drop(kept);
}

/// Answers the first request by `wrongly`, and the others correctly.
fn wrong_once(wrongly: impl Fn(Request) + Send + Sync + 'static) -> Arc<dyn Source> {
    let was_wrong = AtomicBool::new(false);
    Arc::new(SubmitFn(move |request| {
        if was_wrong.swap(true, Ordering::Relaxed) {
            complete(request);
        } else {
            wrongly(request);
        }
    }))
}

/// A fault on page 5 of 8 gets its page although the first answer is `wrongly`.
fn is_survived(what: &'static str, wrongly: fn(Request)) {
    for (mode, backing) in WAYS {
        for around in [1, 8] {
            let Some(region) = region(8, backing) else {
                return;
            };
            let pager = Pager::new().unwrap();
            let contents = Contents::Source(wrong_once(wrongly));
            let config = RegionConfig::local(Arc::clone(&region), mode, contents)
                .retry_policy(PERSISTENT)
                .fault_around(around);
            pager.add(config).unwrap();
            let _ = join(what, exit(&pager, 5)).unwrap();
            check_page(&region, 5);
            let counted = pager.counted();
            assert_eq!(counted.failed_requests, 1, "{what}");
            assert_eq!((counted.pages, counted.answers), (1, 1), "{what}");
            // The neighbours are requested again.
            assert_eq!(state(&pager, 4), PageState::Absent, "{what}");
            assert!(pager.trouble().is_none(), "{what}");
        }
    }
}

#[test]
fn wrong_answers_install_nothing_and_their_requests_are_repeated() {
    is_survived("a short answer", |request| {
        let bytes = content(request.gpa(), request.bytes() - 1);
        request.complete(Content::Bytes(&bytes));
    });
    is_survived("a long answer", |request| {
        let bytes = content(request.gpa(), request.bytes() + 1);
        request.complete(Content::Bytes(&bytes));
    });
    is_survived("an empty answer", |request| {
        request.complete(Content::Bytes(&[]));
    });
    is_survived("a failure", |request| request.fail(unavailable("not now")));
    is_survived("a dropped request", drop);
    is_survived("a panic", |_request| panic!("intended"));
    is_survived("a late panic", |request| {
        // On another thread, which owns the request.
        let panicking = thread::spawn(move || {
            let _request = request;
            panic!("intended, elsewhere");
        });
        panicking.join().unwrap_err();
    });
}

#[test]
fn a_source_that_answers_and_then_panics_has_answered() {
    let Some(region) = region(4, Backing::Shmem) else {
        return;
    };
    let source = Arc::new(SubmitFn(|request| {
        complete(request);
        panic!("after the fact");
    }));
    let (pager, id) = serve(&region, Mode::Minor, source, ONE_ATTEMPT);
    for page in 0..4 {
        let _ = join("the exit", exit(&pager, page)).unwrap();
    }
    check_all(&region);
    assert!(!pager.source_status(id).unwrap().is_stalled);
    assert_eq!(pager.counted().failed_requests, 0);
}

/// Holds requests, and panics when one is cancelled.
struct PanicsInCancel(ManualSource);

impl Source for PanicsInCancel {
    fn submit(&self, request: Request) {
        self.0.submit(request);
    }

    fn cancel(&self, region: RegionId, id: RequestId) {
        self.0.cancel(region, id);
        panic!("cannot cancel");
    }
}

#[test]
fn a_source_that_panics_in_cancel_does_no_harm() {
    let Some(region) = region(4, Backing::Shmem) else {
        return;
    };
    let source = Arc::new(PanicsInCancel(ManualSource::default()));
    let (pager, id) = serve(&region, Mode::Minor, Arc::clone(&source) as _, IMPATIENT);
    let waiting = exit(&pager, 0);
    let kept = source.0.next();
    source.0.wait_for_cancelled(kept.id());
    answer_until_done(&source.0, &waiting);
    let _ = join("the exit", waiting).unwrap();
    let waiting = exit(&pager, 1);
    source
        .0
        .next_if("page 1", |request| request.pages() == range(1, 1));
    within_patience("removing", move || {
        pager.remove(id).unwrap();
        join("the exit", waiting).unwrap_err();
    });
}

#[test]
fn requests_are_repeated_until_a_failing_source_works() {
    for (mode, backing) in WAYS {
        let Some(region) = region(16, backing) else {
            return;
        };
        let asked = AtomicU64::new(0);
        let source = Arc::new(SubmitFn(move |request: Request| {
            match asked.fetch_add(1, Ordering::Relaxed) {
                // A bulk request is halved after each failure, so it arrives in pieces.
                0..4 => request.fail(unavailable("not yet")),
                _ => complete(request),
            }
        }));
        let (pager, _) = serve(&region, mode, source, PERSISTENT);
        let running = prefetch(&pager, 16);
        assert!(
            within_patience("prefetch", || running.finish())
                .unwrap()
                .is_complete
        );
        check_all(&region);
        assert_eq!(pager.counted().failed_requests, 4);
        assert!(pager.trouble().is_none());
    }
}

#[test]
fn a_source_that_answers_inside_submit_answers_all_without_recursion() {
    for (mode, backing) in WAYS {
        let Some(region) = region(2048, backing) else {
            return;
        };
        // On a thread with a small stack: each answer submits the next request.
        let source = Arc::new(SubmitFn(complete));
        let pager = Pager::new().unwrap();
        let config = RegionConfig::local(Arc::clone(&region), mode, Contents::Source(source));
        pager.add(config).unwrap();
        let exiting = Arc::clone(&pager);
        let exits = thread::spawn(move || {
            let mut resolver = exiting.resolver(None).unwrap();
            for page in (0..2048).step_by(3) {
                let access = pagetide_pager::Access::Write;
                let _ = resolver.resolve_exit(gpa(page), access).unwrap();
            }
        });
        let running = prefetch(&pager, 1);
        assert!(
            within_patience("prefetch", || running.finish())
                .unwrap()
                .is_complete
        );
        join("exits", exits);
        check_all(&region);
        assert_eq!(pager.counted().pages, 2048);
    }
}

#[test]
fn zeroes_count_as_content() {
    for (mode, backing) in WAYS {
        let Some(region) = region(8, backing) else {
            return;
        };
        let source = Arc::new(SubmitFn(|request: Request| request.complete(Content::Zero)));
        let (pager, _) = serve(&region, mode, source, ONE_ATTEMPT);
        let _ = join("the exit", exit(&pager, 2)).unwrap();
        let running = prefetch(&pager, 8);
        assert!(
            within_patience("prefetch", || running.finish())
                .unwrap()
                .is_complete
        );
        for page in 0..8 {
            let mut seen = [1; 4096];
            region
                .read_guest(pagetide_memory::PageIndex(page), 0, &mut seen)
                .unwrap();
            assert!(seen.iter().all(|&byte| byte == 0));
        }
        assert!(pager.trouble().is_none());
    }
}

#[test]
fn poison_of_a_run_is_identified_page_by_page() {
    for lost in [0, 1, 31, 63] {
        for by_fault in [true, false] {
            let Some(region) = region(64, Backing::Shmem) else {
                return;
            };
            let source = Arc::new(SubmitFn(move |request: Request| {
                if request.pages().contains(pagetide_memory::PageIndex(lost)) {
                    return request.complete(Content::Poisoned);
                }
                complete(request);
            }));
            let pager = Pager::new().unwrap();
            let contents = Contents::Source(source);
            let config = RegionConfig::local(Arc::clone(&region), Mode::Minor, contents)
                .retry_policy(ONE_ATTEMPT)
                .fault_around(8);
            pager.add(config).unwrap();
            if by_fault {
                let resolved = join("the exit", exit(&pager, lost)).unwrap();
                assert_eq!(resolved, Resolution::Poisoned);
                let neighbour = if lost == 0 { 1 } else { lost - 1 };
                let _ = join("the exit", exit(&pager, neighbour)).unwrap();
                check_page(&region, neighbour);
            }
            let running = prefetch(&pager, 64);
            assert!(
                within_patience("prefetch", || running.finish())
                    .unwrap()
                    .is_complete
            );
            assert_eq!(state(&pager, lost), PageState::Poisoned);
            let others = (0..64).filter(|&page| page != lost);
            others.for_each(|page| check_page(&region, page));
            assert_lost(&region, lost);
            let counted = pager.counted();
            assert_eq!((counted.pages, counted.poisoned), (63, 1));
            assert!(pager.trouble().is_none(), "lost content is no failure");
        }
    }
}

#[test]
fn a_pools_reads_fail_panic_and_return_zero_or_poison() {
    let Some(region) = region(8, Backing::Shmem) else {
        return;
    };
    let asked = AtomicU64::new(0);
    let source = ReadFn(move |at: pagetide_pager::ReadAt, buffer: &mut [u8]| {
        match at.offset_bytes / PAGE {
            1 => return Ok(Filled::Zero),
            2 => return Ok(Filled::Poisoned),
            _ => {}
        }
        match asked.fetch_add(1, Ordering::Relaxed) {
            0 => return Err(unavailable("not now")),
            1 => panic!("intended"),
            _ => fill(at.gpa, buffer),
        }
        Ok(Filled::Bytes)
    });
    let pool = Pool::new(source, PoolConfig::default()).unwrap();
    let (pager, _) = serve(&region, Mode::Minor, pool, PERSISTENT);
    let _ = join("page 0", exit(&pager, 0)).unwrap();
    check_page(&region, 0);
    assert_eq!(pager.counted().failed_requests, 2);
    let _ = join("page 1", exit(&pager, 1)).unwrap();
    assert_eq!(
        join("page 2", exit(&pager, 2)).unwrap(),
        Resolution::Poisoned
    );
    let _ = join("page 3", exit(&pager, 3)).unwrap();
    check_page(&region, 3);
}

#[test]
fn pages_in_flight_never_exceed_the_limits() {
    let Some(region) = region(256, Backing::Shmem) else {
        return;
    };
    let manual = ManualSource::new();
    let pager = Pager::new().unwrap();
    let limits = InFlightLimits {
        urgent_bytes: 4 * PAGE,
        bulk_bytes: 16 * PAGE,
    };
    let contents = Contents::Source(manual.source());
    let config = RegionConfig::local(Arc::clone(&region), Mode::Minor, contents)
        .retry_policy(PERSISTENT)
        .in_flight_limits(limits);
    let id = pager.add(config).unwrap();
    let running = prefetch(&pager, 8);
    manual.wait_for_waiting(2);
    let exits: Vec<_> = (100..108).map(|page| exit(&pager, page)).collect();
    manual.wait_for_waiting(6);
    eventually("what has no room", || {
        pager.source_status(id).unwrap().waiting_requests == 4
    });
    assert_eq!(pager.source_status(id).unwrap().in_flight_bytes, 20 * PAGE);
    // No bulk request takes the room that a bulk answer leaves, because urgent requests wait.
    complete(manual.next_bulk());
    assert_eq!(manual.waiting(), 5);
    for _ in 0..4 {
        complete(manual.next_urgent());
    }
    for _ in 0..4 {
        complete(manual.next_urgent());
    }
    for exit in exits {
        let _ = join("an exit", exit).unwrap();
    }
    eventually("prefetch", || {
        if let Some(request) = manual.take_if(|_| true) {
            complete(request);
        }
        assert!(pager.source_status(id).unwrap().in_flight_bytes <= 20 * PAGE);
        running.is_finished()
    });
    assert!(running.finish().unwrap().is_complete);
    check_all(&region);
}

#[test]
fn a_request_describes_its_pages() {
    let Some(region) = region(8, Backing::Shmem) else {
        return;
    };
    let manual = ManualSource::new();
    let (pager, id) = serve(&region, Mode::Minor, manual.source(), PERSISTENT);
    let waiting = exit(&pager, 5);
    let request = manual.next();
    assert_eq!(request.region(), id);
    assert_eq!(
        (request.pages(), request.urgency()),
        (range(5, 1), Urgency::Urgent)
    );
    assert_eq!((request.offset_bytes(), request.bytes()), (5 * PAGE, PAGE));
    assert_eq!(request.gpa(), GuestAddress(GPA.0 + 5 * PAGE));
    assert!(format!("{request:?}").contains("Urgent"));
    // An answer after the end of the pager has no effect.
    pager.stop();
    join("the exit", waiting).unwrap_err();
    drop(pager);
    request.fail(SourceError::Late);
}
