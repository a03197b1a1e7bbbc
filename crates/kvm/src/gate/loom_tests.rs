//! The gate under loom, for every order of the threads' steps with up to [`PREEMPTIONS`] preemptions:
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test -p pagetide-kvm --lib loom
//! ```
//!
//! A cell stands for the slots: committers write to it, and vCPUs read it inside their ioctls. loom
//! fails if two of these accesses overlap, or if memory orderings do not order them. A lost wake-up is
//! a deadlock, which loom finds too: under loom no wait times out.

use loom::cell::UnsafeCell;
use loom::sync::Arc as LoomArc;
use loom::sync::atomic::AtomicBool;
use loom::thread;

use super::*;

/// More take much longer and have found no further errors.
const PREEMPTIONS: usize = 4;

/// Runs `test` for every order of its threads' steps.
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
    in_flight: InFlight,
    /// A committer has kicked it.
    kicked: AtomicBool,
}

impl Participant for Place {
    fn in_flight(&self) -> &InFlight {
        &self.in_flight
    }
}

/// A VM's gate, its slots, and the committers' lock.
struct Machine {
    gate: Gate<Place>,
    slots: UnsafeCell<u32>,
    updates: Mutex<()>,
    /// Keeps participants alive: a drop is visible only through std's Arc, which loom does not model.
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
        let mut places = self.places.lock().expect("no thread panics");
        places.push(Arc::clone(&place));
        place
    }

    /// One ioctl, which reads the slots. Returns whether the gate was closed meanwhile.
    fn ioctl(&self, place: &Place) -> bool {
        self.gate.enter(&place.in_flight);
        self.look();
        self.gate.leave(&place.in_flight)
    }

    /// Reads the slots, inside an ioctl.
    fn look(&self) {
        // SAFETY: loom fails the test if the cell is written meanwhile.
        let slots = self.slots.with(|slots| unsafe { *slots });
        assert_eq!(slots % 2, 0, "in the middle of an update");
    }

    /// KVM_RUN of a guest that never exits by itself; ends at a kick, or when `over` says that none
    /// will come.
    fn run(&self, place: &Place, over: &AtomicBool) -> bool {
        self.gate.enter(&place.in_flight);
        self.look();
        while !place.kicked.load(Ordering::Acquire) && !over.load(Ordering::Acquire) {
            thread::yield_now();
        }
        self.look();
        self.gate.leave(&place.in_flight)
    }

    fn commit(&self) {
        let _turn = self.updates.lock().expect("no thread panics");
        let closed = self.gate.close(Duration::MAX, |inside, _| {
            for place in inside {
                place.kicked.store(true, Ordering::Release);
            }
        });
        for _ in 0..2 {
            // SAFETY: loom fails the test if the cell is read meanwhile.
            self.slots.with_mut(|slots| unsafe { *slots += 1 });
        }
        drop(closed);
    }
}

/// Runs `work` in a separate thread.
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
            "leaving reports the kick"
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
    // With one more preemption it takes minutes.
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
        assert_eq!(closed, was_kicked, "leaving reports the kick");
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
fn a_new_vcpu_is_excluded_too() {
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
fn waiting_threads_enter_between_two_commits() {
    in_every_order(|| {
        let machine = Machine::new();
        let place = machine.place();
        let vcpu = spawn(&machine, move |machine| machine.ioctl(&place));
        machine.commit();
        machine.commit();
        vcpu.join().expect("no overlap");
    });
}

#[test]
fn a_committer_that_gives_up_leaves_nothing_behind() {
    in_every_order(|| {
        let machine = Machine::new();
        let place = machine.place();
        let its = Arc::clone(&place);
        let vcpu = spawn(&machine, move |machine| {
            [machine.ioctl(&its), machine.ioctl(&its)]
        });
        let turn = machine.updates.lock().expect("no thread panics");
        let closed = machine.gate.close(Duration::ZERO, |inside, _| {
            for place in inside {
                place.kicked.store(true, Ordering::Release);
            }
        });
        drop(closed);
        drop(turn);
        let told = vcpu.join().expect("no overlap");
        let was_kicked = place.kicked.load(Ordering::Relaxed);
        assert!(
            !was_kicked || told.contains(&true),
            "leaving reports the kick"
        );
        // The gate is open, nobody is counted, and nobody is told of a kick that is over.
        assert!(!machine.ioctl(&place));
        assert_eq!(place.in_flight.inside(), 0);
    });
}
