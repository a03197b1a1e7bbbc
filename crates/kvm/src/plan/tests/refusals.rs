//! Each refusal, with the slot and the range in its message.

use std::error::Error;

use pagetide_memory::{GuestAddress, RangeError};

use super::*;
use crate::slot::SlotFlags;
use crate::transaction::SlotTransaction;

/// A step, the expected error, and words that its message must contain.
type Refusal = (
    fn(&mut SlotTransaction<'_>),
    fn(&PlanError) -> bool,
    &'static [&'static str],
);

const REFUSALS: &[Refusal] = &[
    (
        |t| t.delete(7),
        |e| matches!(e, PlanError::UnknownSlot { slot } if slot.number() == Some(7)),
        &["memory slot 7", "does not exist"],
    ),
    (
        |t| {
            t.delete(0);
            t.delete(0);
        },
        |e| matches!(e, PlanError::UsedUp { slot, .. } if slot.number() == Some(0)),
        &["memory slot 0", "0x0..0x10000"],
    ),
    (
        |t| {
            let [low, _] = t.split(0, PAGE);
            t.merge(low, low);
        },
        |e| matches!(e, PlanError::UsedUp { .. }),
        &["new memory slot 0", "0x0..0x1000"],
    ),
    (
        |t| {
            t.resize(0, 0);
        },
        |e| {
            matches!(
                e,
                PlanError::BadRange {
                    source: RangeError::Empty { .. },
                    ..
                }
            )
        },
        &["memory slot 0"],
    ),
    (
        |t| {
            t.resize(3, PAGE + 1);
        },
        |e| matches!(e, PlanError::BadRange { source: RangeError::Unaligned { bytes, .. }, .. } if *bytes == PAGE + 1),
        &["memory slot 3"],
    ),
    (
        |t| {
            t.create(region(0, 1), 0, PAGE, GuestAddress(0x123), NONE);
        },
        |e| {
            matches!(
                e,
                PlanError::BadRange {
                    source: RangeError::Unaligned { start: 0x123, .. },
                    ..
                }
            )
        },
        &["new memory slot 0"],
    ),
    (
        |t| {
            t.create(
                region(0, 1),
                0,
                PAGE,
                GuestAddress(0u64.wrapping_sub(PAGE)),
                NONE,
            );
        },
        |e| {
            matches!(
                e,
                PlanError::BadRange {
                    source: RangeError::Wraps { .. },
                    ..
                }
            )
        },
        &["new memory slot 0"],
    ),
    (
        |t| {
            t.create(region(0, 2), 8, PAGE, GuestAddress(1 << 30), NONE);
        },
        |e| matches!(e, PlanError::UnalignedOffset { offset: 8, .. }),
        &["0x40000000..0x40001000", "0x8"],
    ),
    (
        |t| {
            t.create(region(0, 2), PAGE, 2 * PAGE, GuestAddress(1 << 30), NONE);
        },
        |e| {
            matches!(
                e,
                PlanError::OutsideRegion {
                    offset: PAGE,
                    region_bytes: 8192,
                    ..
                }
            )
        },
        &["0x40000000..0x40002000"],
    ),
    (
        |t| {
            t.create(
                region(0, 2),
                0u64.wrapping_sub(PAGE),
                2 * PAGE,
                GuestAddress(1 << 30),
                NONE,
            );
        },
        |e| matches!(e, PlanError::OutsideRegion { .. }),
        &["0x40000000"],
    ),
    (
        |t| {
            t.resize(0, 17 * PAGE);
        },
        |e| matches!(e, PlanError::OutsideRegion { .. }),
        &["memory slot 0", "0x0..0x11000"],
    ),
    (
        |t| {
            t.split(0, 0);
        },
        |e| matches!(e, PlanError::BadSplit { at: 0, .. }),
        &["memory slot 0", "0x0..0x10000"],
    ),
    (
        |t| {
            t.split(0, 16 * PAGE);
        },
        |e| matches!(e, PlanError::BadSplit { .. }),
        &["0x10000 bytes"],
    ),
    (
        |t| {
            t.split(0, 17 * PAGE);
        },
        |e| matches!(e, PlanError::BadSplit { .. }),
        &[],
    ),
    (
        |t| {
            t.split(0, 100);
        },
        |e| matches!(e, PlanError::BadSplit { at: 100, .. }),
        &[],
    ),
    (
        |t| {
            t.merge(0, 3);
        },
        |e| matches!(e, PlanError::NotAdjacent { .. }),
        &[
            "memory slot 0 (0x0..0x10000)",
            "memory slot 3 (0x100000..0x110000)",
        ],
    ),
    // Adjacent in the guest, but not in the region.
    (
        |t| {
            let memory = region(0, 4);
            let low = t.create(memory.clone(), 0, PAGE, GuestAddress(1 << 30), NONE);
            let high = t.create(memory, 2 * PAGE, PAGE, GuestAddress((1 << 30) + PAGE), NONE);
            t.merge(low, high);
        },
        |e| matches!(e, PlanError::NotAdjacent { .. }),
        &["0x40001000..0x40002000"],
    ),
    (
        |t| {
            let [low, high] = t.split(0, PAGE);
            let high = t.set_flags(high, LOG);
            t.merge(low, high);
        },
        |e| {
            matches!(
                e,
                PlanError::FlagsDiffer {
                    flags: NONE,
                    other_flags: LOG,
                    ..
                }
            )
        },
        &["no flags", "log-dirty", "0x0..0x1000"],
    ),
    (
        |t| {
            t.set_flags(
                0,
                SlotFlags {
                    readonly: true,
                    ..EXITS
                },
            );
        },
        |e| matches!(e, PlanError::FlagsConflict { .. }),
        &["absent-mapping-fault, readonly", "0x0..0x10000"],
    ),
    // KVM's own accesses would fill its holes.
    (
        |t| {
            t.set_flags(3, EXITS);
        },
        |e| matches!(e, PlanError::NotRegistered { slot, .. } if slot.number() == Some(3)),
        &["0x100000..0x110000", "userfaultfd", "assume_registered"],
    ),
    (
        |t| {
            t.create(region(0, 2), 0, 2 * PAGE, GuestAddress(1 << 30), EXITS);
        },
        |e| matches!(e, PlanError::NotRegistered { .. }),
        &["0x40000000..0x40002000"],
    ),
    // Only the final layout is checked: intermediate overlaps are permitted.
    (
        |t| {
            t.create(region(0, 2), 0, 2 * PAGE, GuestAddress(15 * PAGE), NONE);
        },
        |e| matches!(e, PlanError::Overlap { slot, .. } if slot.number() == Some(0)),
        &[
            "memory slot 0 (0x0..0x10000)",
            "new memory slot 0",
            "0xf000..0x11000",
        ],
    ),
    (
        |t| {
            for slot in 0..15 {
                t.create(
                    region(0, 1),
                    0,
                    PAGE,
                    GuestAddress((1 << 30) + slot * PAGE),
                    NONE,
                );
            }
        },
        |e| matches!(e, PlanError::NoFreeSlot { slots: 16, .. }),
        &["0x4000e000..0x4000f000", "16"],
    ),
];

#[test]
fn each_refusal_names_the_slot_and_the_range() {
    let Some(vm) = vm() else { return };
    for (number, (steps, expected, words)) in REFUSALS.iter().enumerate() {
        let mut transaction = vm.transaction();
        steps(&mut transaction);
        let error = transaction.plan(&slots(), &ALL).expect_err("refused");
        assert!(expected(&error), "case {number}: {error:?}");
        let source = error.source().map(ToString::to_string).unwrap_or_default();
        let text = format!("{error}: {source}");
        for word in *words {
            assert!(
                text.contains(word),
                "case {number}: {word} is not in: {text}"
            );
        }
    }
}

/// Once its paging has ended, memory is not registered any more, and no page is absent.
#[test]
fn a_slot_that_has_exits_can_be_split_after_its_paging() {
    let Some(vm) = vm() else { return };
    let mut slots = slots();
    let unregistered = slots.get_mut(&3).expect("slot 3");
    unregistered.flags = EXITS;
    let mut transaction = vm.transaction();
    let [low, high] = transaction.split(3, PAGE);
    transaction.set_flags(low, NONE);
    let plan = transaction.plan(&slots, &ALL).expect("both may exit");
    let exit = plan.layout.values().filter(|slot| slot.flags == EXITS);
    assert_eq!(exit.count(), 1, "{high:?}");
}

#[test]
fn a_flag_needs_its_capability() {
    let Some(vm) = vm() else { return };
    let mut transaction = vm.transaction();
    transaction.set_flags(3, EXITS);
    let without = Capabilities {
        absent_mapping_fault: false,
        ..ALL
    };
    let error = transaction.plan(&slots(), &without).expect_err("not there");
    assert!(
        matches!(error, PlanError::MissingCapability { slot, number: 10001, .. } if slot == 3.into()),
        "{error}"
    );
}

#[test]
fn a_reference_of_another_transaction_is_unknown() {
    let Some(vm) = vm() else { return };
    let [mut one, mut other] = [vm.transaction(), vm.transaction()];
    let [low, _] = one.split(0, PAGE);
    other.split(0, PAGE);
    other.delete(low);
    let error = other.plan(&slots(), &ALL).expect_err("not its own");
    assert!(matches!(error, PlanError::UnknownSlot { slot } if slot == low));
}

#[test]
fn a_list_has_a_limit() {
    let Some(vm) = vm() else { return };
    let many = Capabilities {
        slots: 32764,
        ..ALL
    };
    let memory = region(0, ENTRIES_MAX as u64 + 1);
    let slots = SlotLayout::new();
    for (count, fits) in [(ENTRIES_MAX, true), (ENTRIES_MAX + 1, false)] {
        let mut transaction = vm.transaction();
        for page in 0..count as u64 {
            let at = page * PAGE;
            transaction.create(memory.clone(), at, PAGE, GuestAddress(at), NONE);
        }
        let result = transaction.plan(&slots, &many);
        assert_eq!(result.is_ok(), fits, "{count}");
        if let Err(error) = result {
            assert!(
                matches!(
                    error,
                    PlanError::TooManyEntries {
                        entries: 513,
                        limit: 512,
                        slot: 512,
                        ..
                    }
                ),
                "{error}"
            );
        }
    }
}
