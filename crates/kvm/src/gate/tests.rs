//! The gate with real threads and no VM.

use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use super::*;

const LIMIT: Duration = pagetide_test_support::PATIENCE;

#[derive(Debug, Default)]
struct Place {
    in_flight: InFlight,
    kicked: AtomicBool,
}

impl Participant for Place {
    fn in_flight(&self) -> &InFlight {
        &self.in_flight
    }
}

/// Stays inside until kicked, like a guest that never exits.
fn stay_inside(gate: &Gate<Place>, place: &Place) -> bool {
    gate.enter(&place.in_flight);
    let start = Instant::now();
    while !place.kicked.load(Ordering::SeqCst) {
        assert!(start.elapsed() < LIMIT, "no kick");
        thread::yield_now();
    }
    let closed = gate.leave(&place.in_flight);
    place.kicked.store(false, Ordering::SeqCst);
    closed
}

fn kick(places: &[Arc<Place>]) {
    for place in places {
        place.kicked.store(true, Ordering::SeqCst);
    }
}

/// Joins, or fails the test if the thread exceeds the limit.
fn within_limit<T: Send + 'static>(what: &str, work: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || sender.send(work()));
    receiver
        .recv_timeout(LIMIT)
        .unwrap_or_else(|error| panic!("{what}: {error}"))
}

#[test]
fn closing_does_not_wait_for_threads_outside() {
    let gate = Gate::default();
    let place = Arc::new(Place::default());
    gate.add(&place);
    let closed = gate.close(Duration::MAX, |_, _| panic!("no ioctl is in flight"));
    assert_eq!(closed.expect("nobody stays").found_inside, 0);
}

#[test]
fn a_participant_added_while_the_gate_is_closed_is_closed() {
    let gate = Arc::new(Gate::default());
    let closed = gate.close(Duration::MAX, |_, _| panic!("no ioctl is in flight"));
    let place = Arc::new(Place::default());
    gate.add(&place);
    assert!(!place.in_flight.try_enter());
    drop(closed);
    assert!(place.in_flight.try_enter());
}

#[test]
fn a_panic_of_the_committer_opens_the_gate() {
    let gate = Arc::new(Gate::default());
    let place = Arc::new(Place::default());
    gate.add(&place);
    let panicking = Arc::clone(&gate);
    within_limit("a panic", move || {
        thread::spawn(move || {
            let _closed = panicking.close(Duration::MAX, |_, _| ());
            panic!("on purpose");
        })
        .join()
        .expect_err("it panicked");
    });
    assert!(place.in_flight.try_enter());
}

/// As long as an outage lasts, no other transaction could begin either.
#[test]
fn a_committer_gives_up_on_a_thread_that_stays() {
    let gate = Gate::default();
    let (stays, leaves) = (Arc::new(Place::default()), Arc::new(Place::default()));
    for place in [&stays, &leaves] {
        gate.add(place);
        gate.enter(&place.in_flight);
    }
    // The first is kicked, and cannot leave.
    let inside = gate.close(Duration::ZERO, |_, kicks| {
        if kicks == 0 {
            assert!(gate.leave(&leaves.in_flight));
        }
    });
    let inside = inside.map(drop).expect_err("one stays");
    assert!(matches!(&inside[..], [one] if Arc::ptr_eq(one, &stays)));
    // Others go on, and know of no kick.
    gate.enter(&leaves.in_flight);
    assert!(!gate.leave(&leaves.in_flight));
    // The other one knows that it was kicked, once.
    assert!(gate.leave(&stays.in_flight));
    gate.enter(&stays.in_flight);
    assert!(!gate.leave(&stays.in_flight));
    // A later committer that finds it still inside waits for it, and not for a bit.
    gate.enter(&stays.in_flight);
    let inside = gate.close(Duration::ZERO, |_, _| ());
    inside.map(drop).expect_err("it is inside again");
    let closed = gate.close(Duration::MAX, |_, _| {
        gate.leave(&stays.in_flight);
    });
    assert_eq!(closed.expect("it has left").found_inside, 1);
    assert!(stays.in_flight.try_enter());
}

#[test]
fn several_ioctls_of_one_vcpu_are_counted() {
    let gate = Arc::new(Gate::default());
    let place = Arc::new(Place::default());
    gate.add(&place);
    gate.enter(&place.in_flight);
    gate.enter(&place.in_flight);
    let (started, starts) = mpsc::channel();
    let (done, dones) = mpsc::channel();
    let closing = Arc::clone(&gate);
    let committer = thread::spawn(move || {
        let closed = closing.close(Duration::MAX, |_, _| {
            let _ = started.send(());
        });
        let _ = done.send(closed.expect("nobody stays").found_inside);
    });
    starts.recv_timeout(LIMIT).expect("both are inside");
    assert!(gate.leave(&place.in_flight));
    // It asks again for the other one, and so still waits.
    starts.try_iter().for_each(drop);
    starts.recv_timeout(LIMIT).expect("one is inside");
    assert_eq!(dones.try_recv(), Err(mpsc::TryRecvError::Empty));
    assert!(gate.leave(&place.in_flight));
    assert_eq!(dones.recv_timeout(LIMIT), Ok(1), "one vCPU, not two");
    committer.join().expect("no panic");
}

#[test]
fn a_thread_that_stays_is_kicked_again() {
    let gate = Arc::new(Gate::default());
    let place = Arc::new(Place::default());
    gate.add(&place);
    let (entered, entries) = mpsc::channel();
    let (inner_gate, inner_place) = (Arc::clone(&gate), Arc::clone(&place));
    let vcpu = thread::spawn(move || {
        inner_gate.enter(&inner_place.in_flight);
        let _ = entered.send(());
        while !inner_place.kicked.load(Ordering::SeqCst) {
            thread::yield_now();
        }
        inner_gate.leave(&inner_place.in_flight)
    });
    entries.recv_timeout(LIMIT).expect("it enters");
    let kicks = within_limit("the third kick", move || {
        let mut kicks = 0;
        drop(gate.close(Duration::MAX, |inside, before| {
            kicks = before + 1;
            if before == 2 {
                kick(inside);
            }
        }));
        kicks
    });
    // More if the vCPU's thread did not get the processor before the next pause ended.
    assert!(kicks >= 3, "{kicks} kicks");
    assert!(vcpu.join().expect("no panic"), "leaving reports the kick");
}

/// Four vCPUs that leave only when kicked, three committers. A word that only committers write and that
/// vCPUs read from inside detects any overlap.
#[test]
fn committers_and_vcpus_exclude_each_other() {
    const ROUNDS: u64 = 300;
    let gate = Arc::new(Gate::default());
    let turn = Arc::new(Mutex::new(()));
    let layout = Arc::new(AtomicU64::new(0));
    let over = Arc::new(AtomicBool::new(false));
    let vcpus: Vec<_> = (0..4)
        .map(|_| {
            let (gate, layout, over) = (gate.clone(), layout.clone(), over.clone());
            let place = Arc::new(Place::default());
            gate.add(&place);
            thread::spawn(move || {
                let mut entries = 0_u64;
                while !over.load(Ordering::SeqCst) {
                    gate.enter(&place.in_flight);
                    let before = layout.load(Ordering::Relaxed);
                    while !place.kicked.load(Ordering::SeqCst) && !over.load(Ordering::SeqCst) {
                        assert_eq!(layout.load(Ordering::Relaxed), before);
                        assert_eq!(before % 2, 0, "in the middle of an update");
                        thread::yield_now();
                    }
                    assert_eq!(layout.load(Ordering::Relaxed), before);
                    gate.leave(&place.in_flight);
                    place.kicked.store(false, Ordering::SeqCst);
                    entries += 1;
                }
                entries
            })
        })
        .collect();
    let committers: Vec<_> = (0..3)
        .map(|_| {
            let (gate, layout, turn) = (gate.clone(), layout.clone(), turn.clone());
            thread::spawn(move || {
                for _ in 0..ROUNDS {
                    let _turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
                    let _closed = gate.close(Duration::MAX, |inside, _| kick(inside));
                    layout.fetch_add(1, Ordering::Relaxed);
                    thread::yield_now();
                    layout.fetch_add(1, Ordering::Relaxed);
                }
            })
        })
        .collect();
    within_limit("the commits", move || {
        for committer in committers {
            committer.join().expect("no panic");
        }
        over.store(true, Ordering::SeqCst);
        for vcpu in vcpus {
            assert!(vcpu.join().expect("no overlap") > 0);
        }
        assert_eq!(layout.load(Ordering::SeqCst), 2 * 3 * ROUNDS);
    });
}

/// A vCPU that waits at the gate enters before the next turn of a fast committer.
#[test]
fn waiting_vcpus_are_admitted_between_commits() {
    let gate = Arc::new(Gate::default());
    let place = Arc::new(Place::default());
    gate.add(&place);
    let over = Arc::new(AtomicBool::new(false));
    let (inner_gate, inner_over) = (Arc::clone(&gate), Arc::clone(&over));
    let committer = thread::spawn(move || {
        while !inner_over.load(Ordering::SeqCst) {
            drop(inner_gate.close(Duration::MAX, |inside, _| kick(inside)));
        }
    });
    within_limit("100 entries", move || {
        for _ in 0..100 {
            stay_inside(&gate, &place);
        }
    });
    over.store(true, Ordering::SeqCst);
    committer.join().expect("no panic");
}
