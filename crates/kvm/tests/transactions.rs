//! Slot transactions as the guest observes them, by each method without an intermediate layout.

#![allow(clippy::panic, reason = "a failed helper fails its test")]

mod guest;

use std::sync::Arc;

use guest::{DATA, DATA_PAGES, DATA_SLOT, LOW_SLOT, Machine, PAGE, number_pages, whole_methods};
use pagetide_kvm::{
    BoundVcpu, CommitError, Committed, Exit, Method, PlanError, SlotFlags, SlotTransaction,
};
use pagetide_memory::{Backing, GuestAddress, Region};

const LOG: SlotFlags = SlotFlags {
    absent_mapping_fault: false,
    log_dirty: true,
    readonly: false,
};
const NONE: SlotFlags = SlotFlags {
    log_dirty: false,
    ..LOG
};

/// Runs a test with a new machine for each method; the vCPU is bound.
fn with_each(test: impl Fn(&Machine, &mut BoundVcpu<'_>, Method)) {
    let Some(first) = Machine::new() else { return };
    for method in whole_methods(&first.vm) {
        let machine = Machine::new().expect("there was one");
        let mut vcpu = machine.vcpu(0, 0, DATA_PAGES);
        test(&machine, &mut vcpu.bind().expect("signals work"), method);
    }
}

fn commit(
    machine: &Machine,
    method: Method,
    steps: impl FnOnce(&mut SlotTransaction<'_>),
) -> Committed {
    let mut transaction = machine.vm.transaction();
    steps(&mut transaction);
    let done = transaction
        .commit_with(method)
        .unwrap_or_else(|error| panic!("{method:?}: {error}"));
    assert_eq!(done.method, method);
    assert_eq!(done.layout.len(), machine.vm.layout().len());
    done
}

/// Pages that the guest reads: the ends, and those around each split.
const PROBES: [u64; 8] = [0, 1, 15, 16, 31, 32, 33, DATA_PAGES - 1];

fn check_content(machine: &Machine, vcpu: &mut BoundVcpu<'_>) {
    for page in PROBES {
        let found = machine.peek(vcpu, DATA + page * PAGE);
        assert_eq!(found.map(u64::from), Ok(page), "page {page}");
    }
}

fn hole(gpa: u64) -> Exit {
    Exit::Mmio {
        gpa: GuestAddress(gpa),
        size_bytes: 4,
        write: false,
    }
}

#[test]
fn splits_and_merges_preserve_the_content() {
    with_each(|machine, vcpu, method| {
        check_content(machine, vcpu);
        let mut halves = Vec::new();
        let done = commit(machine, method, |t| {
            halves.extend(t.split(DATA_SLOT, 32 * PAGE));
        });
        assert_eq!(done.entries, 3);
        let ids: Vec<_> = halves.iter().map(|half| done.slot(*half)).collect();
        assert_eq!(ids, [Some(2), Some(3)]);
        assert_eq!(done.slot(DATA_SLOT.into()), None);
        let low = machine.vm.slot(2).expect("it was made");
        assert_eq!((low.offset, low.range.bytes()), (0, 32 * PAGE));
        let high = machine.vm.slot(3).expect("it was made");
        assert_eq!(
            (high.offset, high.range.start().0),
            (32 * PAGE, DATA + 32 * PAGE)
        );
        check_content(machine, vcpu);
        commit(machine, method, |t| {
            t.split(2, 16 * PAGE);
        });
        check_content(machine, vcpu);
        let done = commit(machine, method, |t| {
            let low = t.merge(4, 1);
            t.merge(low, 3);
        });
        assert_eq!(done.entries, 4, "three go and one comes");
        assert_eq!(done.layout.len(), 2);
        check_content(machine, vcpu);
    });
}

#[test]
fn memory_cut_off_is_outside_all_slots() {
    with_each(|machine, vcpu, method| {
        let last = DATA + (DATA_PAGES - 1) * PAGE;
        commit(machine, method, |t| {
            t.resize(DATA_SLOT, 16 * PAGE);
        });
        assert_eq!(machine.peek(vcpu, DATA + 15 * PAGE), Ok(15));
        assert_eq!(
            machine.peek(vcpu, DATA + 16 * PAGE),
            Err(hole(DATA + 16 * PAGE))
        );
        commit(machine, method, |t| {
            t.resize(2, DATA_PAGES * PAGE);
        });
        check_content(machine, vcpu);
        commit(machine, method, |t| t.delete(1));
        assert_eq!(machine.peek(vcpu, last), Err(hole(last)));
        let memory = Arc::clone(&machine.data);
        let bytes = memory.bytes();
        commit(machine, method, |t| {
            t.create(memory, 0, bytes, GuestAddress(DATA), NONE);
        });
        check_content(machine, vcpu);
    });
}

#[test]
fn two_regions_swap_addresses() {
    with_each(|machine, vcpu, method| {
        const OTHER: u64 = DATA + (64 << 20);
        let bytes = DATA_PAGES * PAGE;
        let other = Region::new(GuestAddress(OTHER), bytes, Backing::Shmem).expect("64 pages");
        number_pages(&other, 1000);
        let (data, other) = (Arc::clone(&machine.data), Arc::new(other));
        machine
            .vm
            .add_region(2, Arc::clone(&other), NONE)
            .expect("empty");
        for round in 0..4 {
            let swapped = round % 2 == 0;
            let (low, high) = if swapped {
                (&other, &data)
            } else {
                (&data, &other)
            };
            let slots: Vec<_> = machine.vm.layout().into_keys().skip(1).collect();
            commit(machine, method, |t| {
                slots.iter().for_each(|slot| t.delete(*slot));
                t.create(Arc::clone(low), 0, bytes, GuestAddress(DATA), NONE);
                t.create(Arc::clone(high), 0, bytes, GuestAddress(OTHER), NONE);
            });
            let (at_low, at_high) = if swapped { (1005, 5) } else { (5, 1005) };
            assert_eq!(machine.peek(vcpu, DATA + 5 * PAGE), Ok(at_low));
            assert_eq!(machine.peek(vcpu, OTHER + 5 * PAGE), Ok(at_high));
        }
    });
}

#[test]
fn the_slot_that_the_guest_runs_from_can_be_split() {
    with_each(|machine, vcpu, method| {
        // Code and page tables end up in separate slots.
        let done = commit(machine, method, |t| {
            let [_, rest] = t.split(LOW_SLOT, 2 * PAGE);
            t.split(rest, PAGE);
        });
        assert_eq!(done.entries, 4);
        check_content(machine, vcpu);
    });
}

#[test]
fn flags_change_and_readonly_needs_a_new_slot() {
    with_each(|machine, vcpu, method| {
        let mut slot = None;
        let done = commit(machine, method, |t| {
            slot = Some(t.set_flags(DATA_SLOT, LOG));
        });
        assert_eq!(
            (done.entries, done.slot(slot.expect("set"))),
            (1, Some(DATA_SLOT))
        );
        assert_eq!(machine.vm.slot_flags(DATA_SLOT), Some(LOG));
        check_content(machine, vcpu);
        let readonly = SlotFlags {
            readonly: true,
            ..NONE
        };
        let done = commit(machine, method, |t| {
            slot = Some(t.set_flags(DATA_SLOT, readonly));
        });
        assert_eq!((done.entries, done.slot(slot.expect("set"))), (2, Some(2)));
        check_content(machine, vcpu);
    });
}

/// The list retains dirty bits across a split; creating slots again loses them, and reports it.
#[test]
fn lost_dirty_bits_are_reported() {
    with_each(|machine, vcpu, method| {
        machine
            .vm
            .set_slot_flags(DATA_SLOT, LOG)
            .expect("every kernel logs");
        machine.set(0, guest::Word::Report, 1);
        // A round of the walk writes to each page.
        let exit = vcpu.run().expect("no failure");
        assert!(guest::is_round(&exit), "{exit}");
        let range = machine.vm.slot(DATA_SLOT).expect("there").range;
        let done = commit(machine, method, |t| {
            t.split(DATA_SLOT, 32 * PAGE);
        });
        if method == Method::Quiesce {
            assert_eq!(done.lost_dirty, [range]);
            return;
        }
        assert!(done.lost_dirty.is_empty());
        for slot in [2, 3] {
            let bytes = usize::try_from(32 * PAGE).expect("64-bit host");
            let log = machine.vm.fd().get_dirty_log(slot, bytes).expect("it logs");
            assert_eq!(log, [0xffff_ffff], "slot {slot}");
        }
    });
}

#[test]
fn a_refused_transaction_changes_nothing() {
    with_each(|machine, vcpu, method| {
        let before = machine.vm.layout();
        let mut transaction = machine.vm.transaction();
        transaction.delete(LOW_SLOT);
        transaction.split(DATA_SLOT, 100);
        assert!(matches!(
            transaction.check(),
            Err(PlanError::BadSplit { .. })
        ));
        let error = transaction.commit_with(method).expect_err("unaligned");
        assert!(
            matches!(
                error,
                CommitError::Refused(PlanError::BadSplit { at: 100, .. })
            ),
            "{error}"
        );
        // An error that only the kernel detects: no guest has that much physical address space.
        let mut transaction = machine.vm.transaction();
        transaction.delete(DATA_SLOT);
        let memory = Arc::clone(&machine.data);
        transaction.create(memory, 0, PAGE, GuestAddress(1 << 62), NONE);
        let error = transaction.commit_with(method).expect_err("too high");
        assert!(
            matches!(
                error,
                CommitError::RolledBack { .. } | CommitError::List { .. }
            ),
            "{error}"
        );
        assert!(error.to_string().contains("0x4000000000000000"), "{error}");
        // Dropping a transaction changes nothing either.
        let mut transaction = machine.vm.transaction();
        transaction.delete(DATA_SLOT);
        drop(transaction);
        let after = machine.vm.layout();
        assert_eq!(
            after.keys().collect::<Vec<_>>(),
            before.keys().collect::<Vec<_>>()
        );
        assert!(after[&DATA_SLOT].is_same_memory(&before[&DATA_SLOT]));
        check_content(machine, vcpu);
    });
}
