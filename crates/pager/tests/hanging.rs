//! Sources that hang: everything else continues, and everything can be ended.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::sync::Arc;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use pagetide_memory::{Backing, GuestRange, PageState, Region};
use pagetide_pager::{
    Contents, Filled, Mode, Pager, Pool, PoolConfig, Prefetch, PrefetchConfig, ReadAt,
    ReaderConfig, Readers, RegionConfig, RegionId, ResolveError, Source, Urgency,
};
use support::manual::*;

/// How a source hangs.
#[derive(Clone, Copy, Debug)]
enum Hang {
    /// It holds its requests.
    Keeps,
    /// All threads of a pool are in a read that does not return.
    Blocks,
}

const HANGS: [Hang; 2] = [Hang::Keeps, Hang::Blocks];

/// A source that hangs until the test ends.
struct Hanging {
    manual: Arc<ManualSource>,
    gate: Arc<Gate>,
    source: Arc<dyn Source>,
}

impl Hanging {
    fn new(how: Hang) -> Self {
        let (manual, gate) = (ManualSource::new(), Gate::new());
        let at_gate = Arc::clone(&gate);
        let source: Arc<dyn Source> = match how {
            Hang::Keeps => manual.source(),
            Hang::Blocks => Pool::new(
                ReadFn(move |at: ReadAt, buffer: &mut [u8]| {
                    at_gate.pass();
                    fill(at.gpa, buffer);
                    Ok(Filled::Bytes)
                }),
                PoolConfig {
                    shared_threads: 1,
                    urgent_threads: 1,
                },
            )
            .unwrap(),
        };
        Self {
            manual,
            gate,
            source,
        }
    }

    /// Waits until it hangs in `requests` requests.
    fn wait_for(&self, how: Hang, requests: usize) {
        match how {
            Hang::Keeps => self.manual.wait_for_waiting(requests),
            Hang::Blocks => self.gate.wait_for(requests.min(2)),
        }
    }
}

impl Drop for Hanging {
    fn drop(&mut self) {
        self.gate.open();
    }
}

/// A pager whose source hangs while an exit, a sleeping thread and prefetch wait for it.
struct Stuck {
    region: Arc<Region>,
    pager: Arc<Pager>,
    id: RegionId,
    readers: Readers,
    ahead: Prefetch,
    waiting: thread::JoinHandle<Result<pagetide_pager::Resolution, ResolveError>>,
    touching: thread::JoinHandle<()>,
    hanging: Hanging,
}

fn stuck(how: Hang) -> Option<Stuck> {
    let region = region(64, Backing::Shmem)?;
    let hanging = Hanging::new(how);
    let (pager, id) = serve(
        &region,
        Mode::Minor,
        Arc::clone(&hanging.source),
        PERSISTENT,
    );
    let readers = Readers::spawn(&pager, ReaderConfig::new(1)).unwrap();
    let ahead = Prefetch::spawn(
        &pager,
        PrefetchConfig {
            batch_bytes: 16 * PAGE,
        },
    )
    .unwrap();
    eventually("prefetch", || pager.counts(id).unwrap().pending == 64);
    let waiting = exit(&pager, 3);
    let touched = Arc::clone(&region);
    let touching = thread::spawn(move || assert_lost(&touched, 20));
    // Each of the two pages is in flight twice: for prefetch, and urgently.
    let in_flight = || pager.source_status(id).unwrap().in_flight_bytes;
    eventually("both faults", || in_flight() == 66 * PAGE);
    hanging.wait_for(how, 6);
    Some(Stuck {
        region,
        pager,
        id,
        readers,
        ahead,
        waiting,
        touching,
        hanging,
    })
}

#[test]
fn stopping_returns_while_a_source_hangs() {
    for how in HANGS {
        let Some(stuck) = stuck(how) else { return };
        within_patience("stopping", move || {
            // A memory error in a page whose request is in flight, and in another one.
            let lost = GuestRange::new(gpa(30), 2 * PAGE).unwrap();
            assert_eq!(stuck.pager.record_poison(lost), 2);
            assert_eq!(state(&stuck.pager, 30), PageState::Poisoned);
            stuck.readers.stop();
            assert!(!stuck.ahead.stop().unwrap().is_complete);
            assert_eq!(state(&stuck.pager, 40), PageState::Absent);
            stuck.pager.stop();
            let stopped = join("the exit", stuck.waiting).unwrap_err();
            assert!(matches!(stopped, ResolveError::Stopped { .. }));
            stuck.pager.remove(stuck.id).unwrap();
            join("the toucher", stuck.touching);
            drop(stuck.pager);
            (0..64).for_each(|page| assert_lost(&stuck.region, page));
            drop(stuck.hanging);
        });
    }
}

#[test]
fn removing_a_region_whose_source_hangs_ends_all_waits() {
    for how in HANGS {
        let Some(stuck) = stuck(how) else { return };
        within_patience("removing", move || {
            stuck.pager.remove(stuck.id).unwrap();
            let removed = join("the exit", stuck.waiting).unwrap_err();
            assert!(matches!(removed, ResolveError::Removed { .. }), "{removed}");
            join("the toucher", stuck.touching);
            // Its pages are poisoned, and none was fetched.
            assert!(!stuck.ahead.finish().unwrap().is_complete);
            drop(stuck.readers);
            // A thread that ends may have it for a moment longer.
            let holders = || Arc::strong_count(&stuck.pager);
            eventually("nobody else has the pager", || holders() == 1);
        });
    }
}

#[test]
fn dropping_returns_while_a_source_hangs() {
    for how in HANGS {
        let Some(stuck) = stuck(how) else { return };
        within_patience("dropping", move || {
            drop((stuck.readers, stuck.ahead));
            stuck.pager.stop();
            join("the exit", stuck.waiting).unwrap_err();
            drop(stuck.pager);
            join("the toucher", stuck.touching);
            (0..64).for_each(|page| assert_lost(&stuck.region, page));
            // Its later answers have no effect.
            drop(stuck.hanging);
            assert_lost(&stuck.region, 3);
        });
    }
}

#[test]
fn urgent_requests_do_not_wait_for_bulk_requests_that_hang() {
    let Some(region) = region(256, Backing::Shmem) else {
        return;
    };
    let gate = Gate::new();
    let at_gate = Arc::clone(&gate);
    let source = ReadFn(move |at: ReadAt, buffer: &mut [u8]| {
        if at.urgency == Urgency::Bulk {
            at_gate.pass();
        }
        fill(at.gpa, buffer);
        Ok(Filled::Bytes)
    });
    let config = PoolConfig {
        shared_threads: 3,
        urgent_threads: 1,
    };
    let pool = Pool::new(source, config).unwrap();
    let (pager, _) = serve(&region, Mode::Minor, pool, PERSISTENT);
    let readers = Readers::spawn(&pager, ReaderConfig::new(1)).unwrap();
    let ahead = Prefetch::spawn(
        &pager,
        PrefetchConfig {
            batch_bytes: 8 * PAGE,
        },
    )
    .unwrap();
    gate.wait_for(3);
    // Pages in a read that hangs and pages that wait in the pool, by either delivery.
    for page in (0..250).step_by(5) {
        let _ = join("an exit", exit(&pager, page)).unwrap();
        let touched = Arc::clone(&region);
        within_patience("a touch", move || check_page(&touched, page + 1));
    }
    gate.open();
    assert!(
        within_patience("prefetch", || ahead.finish())
            .unwrap()
            .is_complete
    );
    check_all(&region);
    drop(readers);
}

#[test]
fn a_read_beyond_its_deadline_is_repeated_by_another_thread() {
    let Some(region) = region(4, Backing::Shmem) else {
        return;
    };
    let gate = Gate::new();
    let at_gate = Arc::clone(&gate);
    let hangs = std::sync::atomic::AtomicBool::new(true);
    let source = ReadFn(move |at: ReadAt, buffer: &mut [u8]| {
        if hangs.swap(false, std::sync::atomic::Ordering::Relaxed) {
            at_gate.pass();
        }
        fill(at.gpa, buffer);
        Ok(Filled::Bytes)
    });
    let pool = Pool::new(source, PoolConfig::default()).unwrap();
    let policy = pagetide_pager::RetryPolicy {
        deadline: Duration::from_millis(200),
        ..PERSISTENT
    };
    let (pager, _) = serve(&region, Mode::Minor, pool, policy);
    let _ = join("the exit", exit(&pager, 2)).unwrap();
    check_page(&region, 2);
    gate.wait_for(1);
    gate.open();
}

#[test]
fn a_dropped_pool_fails_its_requests() {
    let Some(region) = region(64, Backing::Shmem) else {
        return;
    };
    let gate = Gate::new();
    let at_gate = Arc::clone(&gate);
    let source = ReadFn(move |_: ReadAt, _: &mut [u8]| {
        at_gate.pass();
        Ok(Filled::Zero)
    });
    let config = PoolConfig {
        shared_threads: 1,
        urgent_threads: 0,
    };
    let pool = Pool::new(source, config).unwrap();
    let weak = Arc::downgrade(&pool);
    let (pager, id) = serve(&region, Mode::Minor, pool, PERSISTENT);
    let exits: Vec<_> = (0..8).map(|page| exit(&pager, page)).collect();
    gate.wait_for(1);
    // Its only thread hangs, and the other requests wait in the pool.
    pager
        .replace_source(id, Arc::new(SubmitFn(complete)))
        .unwrap();
    for exit in exits {
        let _ = join("an exit", exit).unwrap();
    }
    eventually("the end of the pool, whose thread hangs on", || {
        weak.upgrade().is_none()
    });
    (0..8).for_each(|page| check_page(&region, page));
    gate.open();
    (0..8).for_each(|page| check_page(&region, page));
}

#[test]
fn a_slow_page_delays_no_other_message_of_a_readers_batch() {
    for (mode, backing) in WAYS {
        let Some(region) = region(8, backing) else {
            return;
        };
        let manual = ManualSource::new();
        let (pager, _) = serve(&region, mode, manual.source(), PERSISTENT);
        // All eight messages are present before the only reader reads.
        let (sent, done) = mpsc::channel();
        let touching: Vec<_> = (0..8)
            .map(|page| {
                let (region, sent) = (Arc::clone(&region), sent.clone());
                thread::spawn(move || {
                    check_page(&region, page);
                    sent.send(page).unwrap();
                })
            })
            .collect();
        let config = ReaderConfig {
            threads: 1,
            messages_per_read: 8,
        };
        let readers = Readers::spawn(&pager, config).unwrap();
        // All pages are requested before any answer. The first is the slow one.
        manual.wait_for_waiting(8);
        let slow = manual.next();
        for _ in 0..7 {
            complete(manual.next());
        }
        let mut others: Vec<u64> = (0..7)
            .map(|_| done.recv_timeout(PATIENCE).unwrap())
            .collect();
        others.sort_unstable();
        let slow_page = slow.pages().first().0;
        let expected: Vec<u64> = (0..8).filter(|&page| page != slow_page).collect();
        assert_eq!(others, expected);
        complete(slow);
        assert_eq!(done.recv_timeout(PATIENCE).unwrap(), slow_page);
        for touching in touching {
            join("a toucher", touching);
        }
        assert_eq!(readers.stop().messages, 8);
    }
}

#[test]
fn a_pool_needs_a_thread_for_bulk_requests() {
    let source = ReadFn(|_: ReadAt, _: &mut [u8]| Ok(Filled::Zero));
    let config = PoolConfig {
        shared_threads: 0,
        urgent_threads: 4,
    };
    let refused = Pool::new(source, config).unwrap_err();
    assert!(matches!(refused, pagetide_pager::ServeError::NoReaders));
}

#[test]
fn a_hanging_source_of_one_region_does_not_affect_others() {
    let Some(stuck) = stuck(Hang::Blocks) else {
        return;
    };
    let Some(other) = region_at(gpa(64), 16, Backing::Anonymous) else {
        return;
    };
    let contents = Contents::Source(Arc::new(SubmitFn(complete)));
    let config = RegionConfig::local(Arc::clone(&other), Mode::Missing, contents);
    stuck.pager.add(config).unwrap();
    within_patience("the other region", move || check_all(&other));
    within_patience("dropping", move || {
        stuck.pager.remove(stuck.id).unwrap();
        join("the exit", stuck.waiting).unwrap_err();
        join("the toucher", stuck.touching);
        drop((stuck.ahead, stuck.readers));
    });
}
