//! The gate itself under loom, in every order in which threads may take their steps, with up to
//! [`PREEMPTIONS`] switches that no thread asked for:
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test -p pagetide-kvm --lib loom
//! ```
//!
//! What slots are is a cell that committers write to and vCPUs read from inside. loom fails if two
//! of these overlap, or if memory orderings do not put one before the other. A wake-up that is lost
//! is a deadlock, which loom finds too: under loom no wait ends by its time.

use loom::cell::UnsafeCell;
use loom::sync::Arc as LoomArc;
use loom::sync::atomic::AtomicBool;
use loom::thread;

use super::*;

/// More take much longer and have found nothing more.
const PREEMPTIONS: usize = 4;

/// Runs `test` in every order.
fn in_every_order(test: impl Fn() + Sync + Send + 'static) {
    with_preemptions(PREEMPTIONS, test);
}

fn with_preemptions(preemptions: usize, test: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(test);
}

#[derive(Debug, Default)]
struct Place {
    seat: Seat,
    /// Somebody wants it to leave.
    kicked: AtomicBool,
}

impl Occupant for Place {
    fn seat(&self) -> &Seat {
        &self.seat
    }
}

/// A VM's gate, its slots, and the committers' turns.
struct Machine {
    gate: Gate<Place>,
    slots: UnsafeCell<u32>,
    updates: Mutex<()>,
    /// Keeps places: that one is gone is told by std's Arc, which loom does not see.
    places: std::sync::Mutex<Vec<Arc<Place>>>,
}

impl Machine {
    fn new() -> LoomArc<Self> {
        LoomArc::new(Self {
            gate: Gate::default(),
            slots: UnsafeCell::new(0),
            updates: Mutex::new(()),
            places: std::sync::Mutex::default(),
        })
    }

    fn place(&self) -> Arc<Place> {
        let place = Arc::new(Place::default());
        self.gate.add(&place);
        let mut places = self.places.lock().expect("nobody panics");
        places.push(Arc::clone(&place));
        place
    }

    /// One ioctl, which looks at the slots. Whether the gate was closed meanwhile.
    fn ioctl(&self, place: &Place) -> bool {
        self.gate.enter(&place.seat);
        self.look();
        self.gate.leave(&place.seat)
    }

    /// For whoever is inside.
    fn look(&self) {
        // SAFETY: loom fails the test if the cell is written to meanwhile.
        let slots = self.slots.with(|slots| unsafe { *slots });
        assert_eq!(slots % 2, 0, "in the middle of an update");
    }

    /// KVM_RUN of a guest that never exits by itself; ends when it is kicked, or when `over` says that
    /// nobody will.
    fn run(&self, place: &Place, over: &AtomicBool) -> bool {
        self.gate.enter(&place.seat);
        self.look();
        while !place.kicked.load(Ordering::Acquire) && !over.load(Ordering::Acquire) {
            thread::yield_now();
        }
        self.look();
        self.gate.leave(&place.seat)
    }

    fn commit(&self) {
        let _turn = self.updates.lock().expect("nobody panics");
        let closed = self.gate.close(|inside, _| {
            for place in inside {
                place.kicked.store(true, Ordering::Release);
            }
        });
        for _ in 0..2 {
            // SAFETY: loom fails the test if the cell is looked at meanwhile.
            self.slots.with_mut(|slots| unsafe { *slots += 1 });
        }
        drop(closed);
    }
}

/// Runs `work` on a thread of its own.
fn spawn<T: 'static>(
    machine: &LoomArc<Machine>,
    work: impl FnOnce(&Machine) -> T + 'static,
) -> thread::JoinHandle<T> {
    let machine = LoomArc::clone(machine);
    thread::spawn(move || work(&machine))
}

#[test]
fn a_vcpu_and_a_committer_exclude_each_other() {
    in_every_order(|| {
        let machine = Machine::new();
        let place = machine.place();
        let vcpu = spawn(&machine, move |machine| {
            let closed = [machine.ioctl(&place), machine.ioctl(&place)];
            (closed, place)
        });
        machine.commit();
        let (closed, place) = vcpu.join().expect("no overlap");
        let was_kicked = place.kicked.load(Ordering::Relaxed);
        assert!(
            !was_kicked || closed.contains(&true),
            "who was kicked is told so"
        );
        machine.ioctl(&place);
    });
}

#[test]
fn two_vcpus_and_a_committer_exclude_each_other() {
    in_every_order(|| {
        let machine = Machine::new();
        let vcpus: Vec<_> = (0..2)
            .map(|_| {
                let place = machine.place();
                spawn(&machine, move |machine| machine.ioctl(&place))
            })
            .collect();
        machine.commit();
        for vcpu in vcpus {
            vcpu.join().expect("no overlap");
        }
    });
}

#[test]
fn a_vcpu_and_two_committers_exclude_each_other() {
    in_every_order(|| {
        let machine = Machine::new();
        let place = machine.place();
        let vcpu = spawn(&machine, move |machine| machine.ioctl(&place));
        let committer = spawn(&machine, Machine::commit);
        machine.commit();
        committer.join().expect("no overlap");
        vcpu.join().expect("no overlap");
    });
}

#[test]
fn two_vcpus_and_two_committers_exclude_each_other() {
    // With one more it takes minutes.
    with_preemptions(2, || {
        let machine = Machine::new();
        let vcpus: Vec<_> = (0..2)
            .map(|_| {
                let place = machine.place();
                spawn(&machine, move |machine| machine.ioctl(&place))
            })
            .collect();
        let committer = spawn(&machine, Machine::commit);
        machine.commit();
        committer.join().expect("no overlap");
        for vcpu in vcpus {
            vcpu.join().expect("no overlap");
        }
    });
}

#[test]
fn a_vcpu_that_stays_is_kicked() {
    in_every_order(|| {
        let machine = Machine::new();
        let place = machine.place();
        let over = LoomArc::new(AtomicBool::new(false));
        let ended = LoomArc::clone(&over);
        let running = Arc::clone(&place);
        let vcpu = spawn(&machine, move |machine| machine.run(&running, &ended));
        machine.commit();
        over.store(true, Ordering::Release);
        let closed = vcpu.join().expect("no overlap");
        let was_kicked = place.kicked.load(Ordering::Relaxed);
        assert_eq!(closed, was_kicked, "who was kicked is told so");
    });
}

#[test]
fn two_ioctls_of_one_vcpu_are_counted() {
    in_every_order(|| {
        let machine = Machine::new();
        let place = machine.place();
        let other = Arc::clone(&place);
        let second = spawn(&machine, move |machine| machine.ioctl(&other));
        let committer = spawn(&machine, Machine::commit);
        machine.ioctl(&place);
        second.join().expect("no overlap");
        committer.join().expect("no overlap");
    });
}

#[test]
fn a_new_vcpu_is_kept_out_too() {
    in_every_order(|| {
        let machine = Machine::new();
        let vcpu = spawn(&machine, |machine| {
            let place = machine.place();
            machine.ioctl(&place);
        });
        machine.commit();
        vcpu.join().expect("no overlap");
    });
}

#[test]
fn whoever_waits_enters_between_two_commits() {
    in_every_order(|| {
        let machine = Machine::new();
        let place = machine.place();
        let vcpu = spawn(&machine, move |machine| machine.ioctl(&place));
        machine.commit();
        machine.commit();
        vcpu.join().expect("no overlap");
    });
}
