//! Layouts and slot numbers. `tests/refusals.rs` has the refusals.

use std::error::Error;
use std::sync::Arc;

use pagetide_memory::{Backing, Region};
use proptest::prelude::*;

use super::*;
use crate::slot::SlotFlags;
use crate::system::Kvm;
use crate::transaction::SlotTransaction;
use crate::vm::Vm;

mod refusals;

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
const READONLY: SlotFlags = SlotFlags {
    readonly: true,
    ..NONE
};
const EXITS: SlotFlags = SlotFlags {
    absent_mapping_fault: true,
    ..NONE
};
const ALL: Capabilities = Capabilities {
    memory_fault_info: true,
    memory_fault_access: true,
    absent_mapping_fault: true,
    pre_fault_memory: true,
    user_memory2: true,
    slot_list: true,
    populate_memory: true,
    kick_vcpus: true,
    slots: 16,
};

/// A transaction belongs to a VM, although these tests change nothing there.
fn vm() -> Option<Vm> {
    let vm: Result<Vm, Box<dyn Error>> = Kvm::open()
        .map_err(Into::into)
        .and_then(|kvm| kvm.create_vm_with_signals().map_err(Into::into));
    vm.inspect_err(|error| println!("SKIP: {error}")).ok()
}

fn region(gpa: u64, pages: u64) -> Arc<Region> {
    Arc::new(Region::new(GuestAddress(gpa), pages * PAGE, Backing::Shmem).expect("some pages"))
}

/// Slots 0 (16 pages at 0, registered with a userfaultfd) and 3 (16 pages at 1 MiB, which are not).
fn slots() -> SlotLayout {
    let registered = region(0, 16);
    registered.assume_registered();
    SlotLayout::from([
        (0, Slot::whole(registered, NONE)),
        (3, Slot::whole(region(1 << 20, 16), LOG)),
    ])
}

fn changes(plan: &Plan) -> Vec<(u32, Change, u64, u64)> {
    let changes = plan.changes.iter();
    changes
        .map(|entry| {
            let range = entry.state.range;
            let pages = (range.start().0 / PAGE, range.bytes() / PAGE);
            (entry.slot, entry.change, pages.0, pages.1)
        })
        .collect()
}

#[test]
fn steps_become_one_list_with_each_slot_once() {
    use Change::{Create, Delete, Flags};
    type Case = (fn(&mut SlotTransaction<'_>), Vec<(u32, Change, u64, u64)>);
    let cases: Vec<Case> = vec![
        (|_| (), vec![]),
        (|t| t.delete(0), vec![(0, Delete, 0, 16)]),
        (
            |t| {
                t.split(0, PAGE);
            },
            vec![(0, Delete, 0, 16), (1, Create, 0, 1), (2, Create, 1, 15)],
        ),
        // A slot that a later step consumes never gets a number.
        (
            |t| {
                let [low, high] = t.split(0, 8 * PAGE);
                let [_, third] = t.split(high, 4 * PAGE);
                t.delete(third);
                t.set_flags(low, LOG);
            },
            vec![(0, Delete, 0, 16), (1, Create, 8, 4), (2, Create, 0, 8)],
        ),
        // The numbers of deleted slots are not reused in the same list.
        (
            |t| {
                t.resize(0, 8 * PAGE);
            },
            vec![(0, Delete, 0, 16), (1, Create, 0, 8)],
        ),
        (
            |t| {
                t.resize(0, 16 * PAGE);
            },
            vec![],
        ),
        (
            |t| {
                t.set_flags(0, NONE);
            },
            vec![],
        ),
        (
            |t| {
                t.set_flags(0, EXITS);
            },
            vec![(0, Flags, 0, 16)],
        ),
        // KVM cannot change this flag of a live slot.
        (
            |t| {
                t.set_flags(0, READONLY);
            },
            vec![(0, Delete, 0, 16), (1, Create, 0, 16)],
        ),
        (
            |t| {
                let small = t.resize(0, PAGE);
                let back = t.resize(small, 16 * PAGE);
                t.set_flags(back, LOG);
            },
            vec![(0, Flags, 0, 16)],
        ),
    ];
    let Some(vm) = vm() else { return };
    let slots = slots();
    for (number, (steps, expected)) in cases.into_iter().enumerate() {
        let mut transaction = vm.transaction();
        steps(&mut transaction);
        let plan = transaction.plan(&slots, &ALL).expect("a good transaction");
        assert_eq!(changes(&plan), expected, "case {number}");
    }
}

#[test]
fn two_slots_can_swap_addresses() {
    let Some(vm) = vm() else { return };
    let slots = slots();
    let mut swap = vm.transaction();
    swap.delete(0);
    swap.delete(3);
    let low = slots[&3].region.clone();
    let high = slots[&0].region.clone();
    let low = swap.create(low, 0, 16 * PAGE, GuestAddress(0), NONE);
    let high = swap.create(high, 0, 16 * PAGE, GuestAddress(1 << 20), LOG);
    let plan = swap.plan(&slots, &ALL).expect("no overlap at the end");
    assert_eq!(plan.made, [Some(1), Some(2)]);
    assert_eq!(plan.layout.keys().collect::<Vec<_>>(), [&1, &2]);
    assert_ne!(low, high);
}

#[test]
fn halves_merge_again_in_either_order() {
    let Some(vm) = vm() else { return };
    let slots = slots();
    for swapped in [false, true] {
        let mut transaction = vm.transaction();
        let [low, high] = transaction.split(0, 3 * PAGE);
        let [one, other] = if swapped { [high, low] } else { [low, high] };
        let merged = transaction.merge(one, other);
        let plan = transaction.plan(&slots, &ALL).expect("adjacent");
        assert_eq!(plan.made, [None, None, Some(1)]);
        assert!(plan.layout[&1].is_same_memory(&slots[&0]), "{merged}");
    }
}

#[derive(Clone, Copy, Debug)]
enum Op {
    Split(usize, u64),
    Merge(usize),
    Resize(usize, u64),
    Flags(usize, bool),
    Delete(usize),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        (any::<usize>(), 1..16_u64).prop_map(|(which, at)| Op::Split(which, at)),
        any::<usize>().prop_map(Op::Merge),
        (any::<usize>(), 1..32_u64).prop_map(|(which, pages)| Op::Resize(which, pages)),
        (any::<usize>(), any::<bool>()).prop_map(|(which, log)| Op::Flags(which, log)),
        any::<usize>().prop_map(Op::Delete),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    /// For any steps, the changes lead from the old layout to the new one, in an order in which no slot
    /// changes twice or overlaps another, and the remaining pages retain their memory.
    #[test]
    fn changes_lead_from_one_layout_to_the_other(ops in proptest::collection::vec(op(), 0..12)) {
        let Some(vm) = vm() else { return Ok(()) };
        let slots = slots();
        let mut transaction = vm.transaction();
        let mut live: Vec<SlotRef> = slots.keys().map(|number| SlotRef::from(*number)).collect();
        for op in ops {
            if live.is_empty() {
                break;
            }
            let count = live.len();
            match op {
                Op::Split(which, at) => {
                    live.extend(transaction.split(live[which % count], at * PAGE));
                    live.swap_remove(which % count);
                }
                Op::Merge(which) if count > 1 => {
                    let one = live.swap_remove(which % count);
                    let other = live.swap_remove(which % (count - 1));
                    live.push(transaction.merge(one, other));
                }
                Op::Merge(_) => {}
                Op::Resize(which, pages) => {
                    live[which % count] = transaction.resize(live[which % count], pages * PAGE);
                }
                Op::Flags(which, log) => {
                    let flags = SlotFlags { log_dirty: log, ..NONE };
                    live[which % count] = transaction.set_flags(live[which % count], flags);
                }
                Op::Delete(which) => transaction.delete(live.swap_remove(which % count)),
            }
        }
        let Ok(plan) = transaction.plan(&slots, &ALL) else { return Ok(()) };
        let mut present = slots.clone();
        let mut touched = Vec::new();
        for entry in &plan.changes {
            prop_assert!(!touched.contains(&entry.slot), "slot {} twice", entry.slot);
            touched.push(entry.slot);
            match entry.change {
                Change::Delete => prop_assert!(present.remove(&entry.slot).is_some()),
                Change::Flags => {
                    let old = present.insert(entry.slot, entry.state.clone());
                    prop_assert!(old.is_some_and(|old| old.is_same_memory(&entry.state)));
                }
                Change::Create => {
                    let range = entry.state.range;
                    prop_assert!(present.values().all(|slot| !slot.range.overlaps(range)));
                    prop_assert!(present.insert(entry.slot, entry.state.clone()).is_none());
                }
            }
        }
        prop_assert_eq!(present.len(), plan.layout.len());
        for (number, slot) in &plan.layout {
            prop_assert!(present[number].is_same_memory(slot));
            prop_assert_eq!(present[number].flags, slot.flags);
            // Nothing was moved: offset and gpa still differ by the region's own address.
            prop_assert_eq!(slot.region.gpa().0 + slot.offset, slot.range.start().0);
        }
        prop_assert_eq!(plan.layout.len(), live.len());
    }
}
