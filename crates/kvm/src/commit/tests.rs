//! A failure of each ioctl of a commit, with a real VM.

use std::cell::{Cell, RefCell};
use std::error::Error;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use pagetide_memory::{Backing, GuestAddress, Region};

use super::*;
use crate::slot::{Slot, SlotFlags};
use crate::slot_calls::Change;
use crate::system::Kvm;
use crate::transaction::SlotTransaction;
use crate::vm::Vm;

#[path = "../../tests/guest/mod.rs"]
mod guest;

const PAGE: u64 = 4096;
const NONE: SlotFlags = SlotFlags {
    absent_mapping_fault: false,
    log_dirty: false,
    readonly: false,
};
const LOG: SlotFlags = SlotFlags {
    log_dirty: true,
    ..NONE
};

/// How a call fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Accident {
    Fails,
    PanicsBefore,
    PanicsAfter,
}

/// A VM's ioctls, some of which fail; and the kernel's layout, as their results imply it.
struct Accidents<'vm> {
    vm: &'vm Inner,
    call: Cell<usize>,
    planned: Vec<(usize, Accident)>,
    kernel: RefCell<SlotLayout>,
}

impl<'vm> Accidents<'vm> {
    fn new(vm: &'vm Inner, planned: &[(usize, Accident)]) -> Self {
        Self {
            vm,
            call: Cell::new(0),
            planned: planned.to_vec(),
            kernel: RefCell::new(vm.slots().clone()),
        }
    }

    /// Whether this call fails.
    fn next(&self) -> Option<Accident> {
        let call = self.call.replace(self.call.get() + 1);
        let mut planned = self.planned.iter();
        planned
            .find(|(at, _)| *at == call)
            .map(|(_, accident)| *accident)
    }
}

impl SlotCalls for Accidents<'_> {
    fn set_one(&self, slot: u32, state: &Slot, change: Change) -> io::Result<()> {
        let accident = self.next();
        match accident {
            Some(Accident::Fails) => return Err(io::Error::from_raw_os_error(libc::ENOMEM)),
            Some(Accident::PanicsBefore) => panic!("on purpose"),
            _ => {}
        }
        self.vm.set_one(slot, state, change)?;
        match change {
            Change::Delete => drop(self.kernel.borrow_mut().remove(&slot)),
            _ => drop(self.kernel.borrow_mut().insert(slot, state.clone())),
        }
        if accident == Some(Accident::PanicsAfter) {
            panic!("on purpose");
        }
        Ok(())
    }

    fn set_list(&self, changes: &[SlotChange]) -> Result<(), ListRefusal> {
        match self.next() {
            Some(Accident::Fails) => Err(ListRefusal {
                element: Some(1),
                source: io::Error::from_raw_os_error(libc::ENOMEM),
            }),
            Some(_) => panic!("on purpose"),
            None => self.vm.set_list(changes),
        }
    }
}

fn same(one: &SlotLayout, other: &SlotLayout) -> bool {
    one.len() == other.len()
        && one.iter().all(|(number, slot)| {
            let there = other.get(number);
            there.is_some_and(|there| there.is_same_memory(slot) && there.flags == slot.flags)
        })
}

/// Slots 0 to 3, each of 16 pages; slot 1 logs.
fn vm() -> Option<Vm> {
    let vm: Result<Vm, Box<dyn Error>> = Kvm::open()
        .map_err(Into::into)
        .and_then(|kvm| kvm.create_vm_with_signals().map_err(Into::into));
    let vm = vm.inspect_err(|error| println!("SKIP: {error}")).ok()?;
    for slot in 0..4 {
        let gpa = GuestAddress(u64::from(slot) << 20);
        let region = Region::new(gpa, 16 * PAGE, Backing::Shmem).expect("16 pages");
        let flags = if slot == 1 { LOG } else { NONE };
        vm.add_region(slot, Arc::new(region), flags).expect("free");
    }
    Some(vm)
}

/// Deletes 0, 1 and 2, changes the flags of 3, creates 4, 5 and 6: seven ioctls.
fn steps(vm: &Vm) -> SlotTransaction<'_> {
    let mut transaction = vm.transaction();
    transaction.split(0, PAGE);
    transaction.resize(1, PAGE);
    transaction.delete(2);
    transaction.set_flags(3, LOG);
    transaction
}

const CALLS: usize = 7;

/// The change that call `call` of [`steps`] makes.
fn expected(call: usize) -> (u32, u64) {
    let changes = [
        (0, 0),
        (1, 1 << 20),
        (2, 2 << 20),
        (3, 3 << 20),
        (4, 0),
        (5, PAGE),
        (6, 1 << 20),
    ];
    changes[call]
}

#[test]
fn a_failure_at_any_step_restores_the_old_layout() {
    let Some(vm) = vm() else { return };
    let old = vm.layout();
    for method in [Method::Quiesce, Method::DeleteCreate] {
        for call in 0..CALLS {
            let calls = Accidents::new(vm.inner(), &[(call, Accident::Fails)]);
            let error = steps(&vm)
                .commit_through(method, &calls)
                .expect_err("it fails");
            let CommitError::RolledBack {
                change,
                lost_dirty,
                source,
                ..
            } = &error
            else {
                panic!("{error}");
            };
            let place = (change.slot, change.range.start().0);
            assert_eq!(place, expected(call), "{error}");
            assert_eq!(source.raw_os_error(), Some(libc::ENOMEM));
            assert!(error.source().is_some(), "chained");
            let is_new = call > 1;
            let forgotten = is_new.then_some(old[&1].range);
            assert_eq!(
                lost_dirty.first().copied(),
                forgotten,
                "slot 1 is a new one"
            );
            assert!(same(&vm.layout(), &old), "call {call}");
            assert!(same(&calls.kernel.borrow(), &old), "call {call}");
            // One undo for each change made.
            assert_eq!(calls.call.get(), 2 * call + 1);
        }
    }
    let done = steps(&vm)
        .commit_with(Method::Quiesce)
        .expect("no accident");
    assert_eq!((done.entries, done.layout.len()), (CALLS, 4));
    assert_eq!(done.lost_dirty, [old[&1].range]);
}

#[test]
fn a_panic_at_any_step_restores_the_old_layout() {
    let Some(vm) = vm() else { return };
    let old = vm.layout();
    for method in [Method::Quiesce, Method::DeleteCreate] {
        for accident in [Accident::PanicsBefore, Accident::PanicsAfter] {
            for call in 0..CALLS {
                let calls = Accidents::new(vm.inner(), &[(call, accident)]);
                let transaction = steps(&vm);
                let commit = || transaction.commit_through(method, &calls);
                catch_unwind(AssertUnwindSafe(commit)).expect_err("it panics");
                assert!(same(&vm.layout(), &old), "{accident:?} at {call}");
                assert!(same(&calls.kernel.borrow(), &old), "{accident:?} at {call}");
                // Neither the gate nor the lock is held: this would wait forever.
                vm.set_slot_flags(3, LOG).expect("it is there");
                vm.set_slot_flags(3, NONE).expect("it is there");
                let vcpu = vm.create_vcpu(u32::try_from(call).unwrap());
                drop(vcpu);
            }
        }
    }
    steps(&vm)
        .commit_with(Method::Quiesce)
        .expect("no accident");
}

#[test]
fn a_failed_undo_names_the_missing_slots() {
    let Some(vm) = vm() else { return };
    let old = vm.layout();
    // The sixth call fails; undoing the fourth (3's flags) and the first (0) fails as well.
    let accidents = [5, 7, 10].map(|call| (call, Accident::Fails));
    let calls = Accidents::new(vm.inner(), &accidents);
    let error = steps(&vm)
        .commit_through(Method::Quiesce, &calls)
        .expect_err("it fails");
    let text = error.to_string();
    let CommitError::HalfDone { change, undone, .. } = error else {
        panic!("{error}");
    };
    assert_eq!((change.slot, change.range.start().0), expected(5));
    let numbers = |slots: &[(u32, Slot)]| slots.iter().map(|(n, _)| *n).collect::<Vec<_>>();
    assert_eq!(numbers(&undone.missing), [0, 3]);
    assert_eq!(numbers(&undone.left), [3]);
    assert_eq!(undone.source.raw_os_error(), Some(libc::ENOMEM));
    assert!(
        text.contains("missing: memory slot 0 (0x0..0x10000; no flags)"),
        "{text}"
    );
    // The VM has recorded the kernel's layout, and further changes start from it.
    let present = vm.layout();
    assert!(same(&present, &calls.kernel.borrow()));
    assert_eq!(present.keys().collect::<Vec<_>>(), [&1, &2, &3]);
    vm.add_region(0, old[&0].region.clone(), NONE)
        .expect("it is free");
    vm.set_slot_flags(3, NONE).expect("it is there");
    assert!(same(&vm.layout(), &old));
}

#[test]
fn a_slot_that_could_not_be_undone_keeps_its_memory() {
    let Some(vm) = vm() else { return };
    let region = Region::new(GuestAddress(1 << 30), PAGE, Backing::Shmem).expect("a page");
    let region = Arc::new(region);
    let weak = Arc::downgrade(&region);
    let mut transaction = vm.transaction();
    transaction.create(region, 0, PAGE, GuestAddress(1 << 30), NONE);
    let gpa = GuestAddress(1 << 31);
    let second = Region::new(gpa, PAGE, Backing::Shmem).expect("a page");
    transaction.create(Arc::new(second), 0, PAGE, gpa, NONE);
    // The second creation fails, and so does deleting the first.
    let accidents = [1, 2].map(|call| (call, Accident::Fails));
    let calls = Accidents::new(vm.inner(), &accidents);
    let error = transaction
        .commit_through(Method::DeleteCreate, &calls)
        .expect_err("it fails");
    let CommitError::HalfDone { undone, .. } = &error else {
        panic!("{error}");
    };
    assert!(undone.missing.is_empty());
    assert_eq!(undone.left.len(), 1);
    drop((error, calls));
    assert!(weak.upgrade().is_some(), "the kernel can still reach it");
    vm.remove_slot(4).expect("it is there");
    assert!(weak.upgrade().is_none());
}

#[test]
fn a_refused_list_names_its_element() {
    let Some(vm) = vm() else { return };
    if !vm.capabilities().slot_list {
        println!("SKIP: this kernel lacks KVM_CAP_SET_USER_MEMORY_REGION_LIST");
        let error = steps(&vm)
            .commit_with(Method::List)
            .expect_err("no such ioctl");
        assert!(
            matches!(error, CommitError::MissingCapability { number: 10002, .. }),
            "{error}"
        );
        return;
    }
    let old = vm.layout();
    for accident in [Accident::Fails, Accident::PanicsBefore] {
        let calls = Accidents::new(vm.inner(), &[(0, accident)]);
        let transaction = steps(&vm);
        let commit = || transaction.commit_through(Method::List, &calls);
        if let Ok(result) = catch_unwind(AssertUnwindSafe(commit)) {
            let error = result.expect_err("it fails");
            assert!(
                matches!(
                    error,
                    CommitError::List {
                        entries: CALLS,
                        refused: Some((1, _)),
                        ..
                    }
                ),
                "{error}"
            );
            assert!(error.to_string().contains("0x100000..0x110000"), "{error}");
        }
        assert!(same(&vm.layout(), &old));
    }
    steps(&vm).commit_with(Method::List).expect("no accident");
}

#[test]
fn one_change_needs_no_quiescing() {
    let Some(vm) = vm() else { return };
    let mut transaction = vm.transaction();
    transaction.set_flags(0, LOG);
    let done = transaction.commit().expect("every kernel logs");
    let best = if vm.capabilities().slot_list {
        Method::List
    } else {
        Method::DeleteCreate
    };
    assert_eq!((done.method, done.entries), (best, 1));
    let done = vm.transaction().commit().expect("nothing to do");
    assert_eq!((done.entries, done.updating), (0, Duration::ZERO));
}

/// The guest continues to walk its memory after each failure, and observes none of them.
#[test]
fn vcpus_continue_after_failures_and_panics() {
    use guest::{DATA_PAGES, DATA_SLOT, LIMIT, Limited, Machine, Word, is_round};

    let Some(machine) = Machine::new() else {
        return;
    };
    let mut vcpu = machine.vcpu(0, 0, DATA_PAGES);
    let walking = Limited::spawn("a vCPU", move || {
        let mut here = vcpu.bind().expect("signals work");
        here.run().expect("no failure")
    });
    let walks_on = |before: u64| {
        let start = Instant::now();
        while machine.get(0, Word::Rounds) <= before + 1 {
            assert!(start.elapsed() < LIMIT, "the guest has stopped");
            std::thread::yield_now();
        }
    };
    walks_on(0);
    let old = machine.vm.layout();
    for accident in [
        Accident::Fails,
        Accident::PanicsBefore,
        Accident::PanicsAfter,
    ] {
        for call in 0..3 {
            let calls = Accidents::new(machine.vm.inner(), &[(call, accident)]);
            let mut transaction = machine.vm.transaction();
            transaction.split(DATA_SLOT, PAGE);
            let commit = || transaction.commit_through(Method::Quiesce, &calls);
            if let Ok(result) = catch_unwind(AssertUnwindSafe(commit)) {
                result.expect_err("it fails");
            }
            assert!(same(&machine.vm.layout(), &old), "{accident:?} at {call}");
            walks_on(machine.get(0, Word::Rounds));
        }
    }
    machine.set(0, Word::Report, 1);
    let exit = walking.join();
    assert!(is_round(&exit), "{exit}");
}

/// Turning the log off frees it; turning it on again creates an empty one.
#[test]
fn a_log_that_was_turned_off_and_on_is_reported() {
    let Some(vm) = vm() else { return };
    let old = vm.layout();
    let steps = |vm| {
        let mut transaction = Vm::transaction(vm);
        transaction.set_flags(1, NONE);
        transaction.split(0, PAGE);
        transaction
    };
    // Deletes 0, turns 1's log off, creates 4 and 5; which of them fail, and whether the log was lost.
    let table: [(&[usize], bool, &[u64]); 5] = [
        (&[0], true, &[]),
        (&[1], true, &[]),
        (&[2], true, &[1 << 20]),
        (&[3], true, &[1 << 20]),
        (&[3, 5], false, &[1 << 20]),
    ];
    for (fails, is_back, lost) in table {
        let accidents: Vec<_> = fails.iter().map(|call| (*call, Accident::Fails)).collect();
        let calls = Accidents::new(vm.inner(), &accidents);
        let error = steps(&vm)
            .commit_through(Method::Quiesce, &calls)
            .expect_err("it fails");
        let (forgot, back) = match &error {
            CommitError::RolledBack { lost_dirty, .. } => (lost_dirty, true),
            CommitError::HalfDone { lost_dirty, .. } => (lost_dirty, false),
            error => panic!("{error}"),
        };
        let starts: Vec<_> = forgot.iter().map(|range| range.start().0).collect();
        assert_eq!((starts.as_slice(), back), (lost, is_back), "{fails:?}");
        if !is_back {
            // Undone by hand for the next row.
            vm.set_slot_flags(1, LOG).expect("it is there");
        }
        assert!(same(&vm.layout(), &old), "{fails:?}: {error}");
    }
    // A log that was turned off on purpose is not reported.
    let done = steps(&vm).commit_with(Method::Quiesce).expect("it works");
    assert!(done.lost_dirty.is_empty());
}

/// The dirty log of the kernel for the pages that the guest wrote to.
#[test]
fn the_kernel_loses_the_dirty_bits_that_a_failure_reports() {
    use guest::{DATA_PAGES, DATA_SLOT, LOW_SLOT, Machine, Word};

    let Some(machine) = Machine::new() else {
        return;
    };
    let dirty = |slot, bytes: u64| {
        let bytes = usize::try_from(bytes).expect("64 bits");
        let log = machine.vm.fd().get_dirty_log(slot, bytes).expect("a log");
        log.iter().map(|word| word.count_ones()).sum::<u32>()
    };
    machine.vm.set_slot_flags(DATA_SLOT, LOG).expect("a flag");
    machine.set(0, Word::Report, 1);
    let mut vcpu = machine.vcpu(0, 0, DATA_PAGES);
    let mut here = vcpu.bind().expect("signals work");
    for fails in [false, true] {
        here.run().expect("a round");
        if fails {
            let calls = Accidents::new(machine.vm.inner(), &[(2, Accident::Fails)]);
            let mut transaction = machine.vm.transaction();
            transaction.set_flags(DATA_SLOT, NONE);
            transaction.split(LOW_SLOT, PAGE);
            let error = transaction
                .commit_through(Method::Quiesce, &calls)
                .expect_err("it fails");
            let CommitError::RolledBack { lost_dirty, .. } = &error else {
                panic!("{error}");
            };
            assert_eq!(lost_dirty, &[machine.data.range()]);
        }
        let found = dirty(DATA_SLOT, machine.data.bytes());
        assert_eq!(found == 0, fails, "{found} dirty pages");
    }
}
