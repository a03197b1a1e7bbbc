//! The changes of the layout that are measured, and the trace of a boot.

use std::sync::Arc;

use pagetide_kvm::{SlotFlags, SlotRef, SlotTransaction, Vm};
use pagetide_memory::{GuestAddress, PageIndex, Region};
use pagetide_testbed::DATA_GPA;

use super::plan::Op;

const PAGE: u64 = 4096;
/// Pages of the memory whose slots change: 16 MiB, one slot to begin with.
pub(super) const DATA_PAGES: u64 = 4096;
/// Where devices' memory goes, in pages from the start of the data: well behind it.
pub(super) const BAR_FIRST: u64 = 2 * DATA_PAGES;
/// Pages of devices' memory.
pub(super) const BAR_PAGES: u64 = 512;
/// As on a PC: video memory lies behind 640K, ROMs between 768K and 1M.
const VIDEO: u64 = 160;
const ROMS: u64 = 192;
const ABOVE_ROMS: u64 = 256;
/// What a resize leaves at least; no walked page lies behind it.
const SMALLEST: u64 = 3584;

/// One step of a change, in pages from the start of the data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// Makes two slots of the one that `at` lies in.
    Split { at: u64 },
    /// Makes one slot of the two that meet at `at`.
    Merge { at: u64 },
    /// Gives the slot that begins at `first` another size.
    Resize { first: u64, pages: u64 },
    /// Sets the flags of the slot that begins at `first`.
    Flags { first: u64, flags: SlotFlags },
    /// Makes a slot.
    Create { first: u64, pages: u64 },
    /// Deletes the slot that begins at `first`.
    Delete { first: u64 },
}

/// Steps that are committed as one.
pub(super) type Change = Vec<Step>;

const PLAIN: SlotFlags = SlotFlags {
    absent_mapping_fault: false,
    log_dirty: false,
    readonly: false,
};
const READ_ONLY: SlotFlags = SlotFlags {
    readonly: true,
    ..PLAIN
};
const LOGGED: SlotFlags = SlotFlags {
    log_dirty: true,
    ..PLAIN
};

/// A measured change, and what has to be committed before and after it, so that every one finds the
/// same kind of layout.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Round {
    pub(super) before: Option<Change>,
    pub(super) measured: Change,
    pub(super) after: Option<Change>,
}

/// The pages that vCPUs walk: below the video memory and above the ROMs, spread over both, and
/// never absent or read-only.
pub(super) fn walk() -> Vec<PageIndex> {
    let low = (0..VIDEO).step_by(20);
    let high = (ABOVE_ROMS..SMALLEST).step_by(59);
    low.chain(high).map(PageIndex).collect()
}

/// The `number`th change of a run.
pub(super) fn round(op: Op, number: u64) -> Round {
    // Somewhere else each time, and never at an end.
    let at = 1 + number * 97 % (DATA_PAGES - 1);
    let even = number.is_multiple_of(2);
    let (split, merge) = (vec![Step::Split { at }], vec![Step::Merge { at }]);
    match op {
        Op::Split => Round {
            measured: split,
            after: Some(merge),
            before: None,
        },
        Op::Merge => Round {
            before: Some(split),
            measured: merge,
            after: None,
        },
        Op::Resize => {
            let smaller = SMALLEST + number / 2 % (DATA_PAGES - SMALLEST);
            let pages = if even { smaller } else { DATA_PAGES };
            alone(vec![Step::Resize { first: 0, pages }])
        }
        Op::Flags => {
            let flags = if even { LOGGED } else { PLAIN };
            alone(vec![Step::Flags { first: 0, flags }])
        }
        Op::Boot => {
            let mut trace = boot();
            let place = usize::try_from(number).unwrap_or(0) % trace.len();
            alone(trace.swap_remove(place))
        }
    }
}

fn alone(measured: Change) -> Round {
    Round {
        measured,
        ..Round::default()
    }
}

/// Updates of a boot, as firmware and a first operating system make them on a PC: 86 of them, after
/// which the layout is what it was before.
pub(super) fn boot() -> Vec<Change> {
    let mut trace: Vec<Change> = Vec::new();
    // The window of the video card takes memory's place.
    trace.push(vec![
        Step::Split { at: VIDEO },
        Step::Split { at: ROMS },
        Step::Delete { first: VIDEO },
        Step::Split { at: ABOVE_ROMS },
    ]);
    // Firmware copies ROMs to memory, write-protects it, and opens it again for its own data:
    // 12 segments of 16K and one of 64K, one after the other (PAM registers).
    let segments: Vec<(u64, u64)> = (0..13)
        .map(|index| (ROMS + 4 * index, if index == 12 { 16 } else { 4 }))
        .collect();
    for pass in 0..4 {
        let flags = if pass % 2 == 0 { READ_ONLY } else { PLAIN };
        for &(first, pages) in &segments {
            let mut change = Vec::new();
            let end = first + pages;
            // The rest of the ROMs lies behind the segment, in one piece with it.
            if end < ABOVE_ROMS {
                change.push(Step::Split { at: end });
            }
            change.push(Step::Flags { first, flags });
            // What lies before it has these flags by now.
            if first > ROMS {
                change.push(Step::Merge { at: first });
            }
            trace.push(change);
        }
    }
    // Video memory, whose pages the display asks for dirty bits now and then.
    let video = ROMS - VIDEO;
    trace.push(vec![Step::Create {
        first: VIDEO,
        pages: video,
    }]);
    for pass in 0..6 {
        let flags = if pass % 2 == 0 { LOGGED } else { PLAIN };
        trace.push(vec![Step::Flags {
            first: VIDEO,
            flags,
        }]);
    }
    trace.push(vec![Step::Delete { first: VIDEO }]);
    // Four devices' BARs: placed by the firmware, moved by the operating system, resized, removed.
    let share = BAR_PAGES / 8;
    for device in 0..4 {
        let (firmware, system) = (BAR_FIRST + device * share, BAR_FIRST + (4 + device) * share);
        let create = |first| Step::Create {
            first,
            pages: share / 2,
        };
        trace.push(vec![create(firmware)]);
        trace.push(vec![Step::Delete { first: firmware }]);
        trace.push(vec![create(system)]);
        trace.push(vec![Step::Resize {
            first: system,
            pages: share,
        }]);
        trace.push(vec![Step::Delete { first: system }]);
    }
    // Memory is unplugged and plugged.
    for pages in [SMALLEST, DATA_PAGES, SMALLEST + 256, DATA_PAGES] {
        trace.push(vec![Step::Resize {
            first: ABOVE_ROMS,
            pages: pages - ABOVE_ROMS,
        }]);
    }
    // The way back, so that the trace can be run again.
    trace.push(vec![
        Step::Create {
            first: VIDEO,
            pages: video,
        },
        Step::Merge { at: VIDEO },
        Step::Merge { at: ROMS },
        Step::Merge { at: ABOVE_ROMS },
    ]);
    trace
}

/// A slot in the middle of a change.
#[derive(Debug, Clone, Copy)]
struct Piece {
    first: u64,
    end: u64,
    slot: SlotRef,
}

/// The machine's memory and devices' memory.
#[derive(Debug)]
pub(super) struct Memory {
    pub(super) data: Arc<Region>,
    pub(super) bars: Arc<Region>,
}

/// A change that does not fit the layout, which would be an error of this file.
#[derive(Debug, thiserror::Error)]
#[error("no slot for {0:?}")]
pub(super) struct NoSuchSlot(Step);

/// Collects the steps of `change` in a transaction.
pub(super) fn transaction<'vm>(
    vm: &'vm Vm,
    memory: &Memory,
    change: &[Step],
) -> Result<SlotTransaction<'vm>, NoSuchSlot> {
    let page = |gpa: GuestAddress| gpa.0.saturating_sub(DATA_GPA) / PAGE;
    let mut pieces: Vec<Piece> = vm
        .layout()
        .iter()
        .filter(|(_, slot)| slot.range.start().0 >= DATA_GPA)
        .map(|(number, slot)| Piece {
            first: page(slot.range.start()),
            end: page(slot.range.end()),
            slot: SlotRef::from(*number),
        })
        .collect();
    let mut transaction = vm.transaction();
    for &step in change {
        take(step, &mut pieces, &mut transaction, memory)?;
    }
    Ok(transaction)
}

fn take(
    step: Step,
    pieces: &mut Vec<Piece>,
    transaction: &mut SlotTransaction<'_>,
    memory: &Memory,
) -> Result<(), NoSuchSlot> {
    let mut remove = |wanted: &dyn Fn(&Piece) -> bool| {
        let place = pieces.iter().position(wanted);
        place
            .map(|place| pieces.swap_remove(place))
            .ok_or(NoSuchSlot(step))
    };
    match step {
        Step::Split { at } => {
            let whole = remove(&|piece| piece.first < at && at < piece.end)?;
            let [low, high] = transaction.split(whole.slot, (at - whole.first) * PAGE);
            pieces.push(Piece {
                end: at,
                slot: low,
                ..whole
            });
            pieces.push(Piece {
                first: at,
                slot: high,
                ..whole
            });
        }
        Step::Merge { at } => {
            let low = remove(&|piece| piece.end == at)?;
            let high = remove(&|piece| piece.first == at)?;
            let slot = transaction.merge(low.slot, high.slot);
            pieces.push(Piece {
                end: high.end,
                slot,
                ..low
            });
        }
        Step::Resize { first, pages } => {
            let old = remove(&|piece| piece.first == first)?;
            let slot = transaction.resize(old.slot, pages * PAGE);
            pieces.push(Piece {
                end: first + pages,
                slot,
                ..old
            });
        }
        Step::Flags { first, flags } => {
            let old = remove(&|piece| piece.first == first)?;
            let slot = transaction.set_flags(old.slot, flags);
            pieces.push(Piece { slot, ..old });
        }
        Step::Create { first, pages } => {
            let (region, base) = if first >= BAR_FIRST {
                (&memory.bars, BAR_FIRST)
            } else {
                (&memory.data, 0)
            };
            let slot = transaction.create(
                Arc::clone(region),
                (first - base) * PAGE,
                pages * PAGE,
                GuestAddress(DATA_GPA + first * PAGE),
                PLAIN,
            );
            pieces.push(Piece {
                first,
                end: first + pages,
                slot,
            });
        }
        Step::Delete { first } => {
            let old = remove(&|piece| piece.first == first)?;
            transaction.delete(old.slot);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memslots::BOOT_UPDATES;

    #[test]
    fn a_boot_has_as_many_updates_as_the_published_one() {
        assert_eq!(boot().len(), usize::try_from(BOOT_UPDATES).unwrap());
    }

    #[test]
    fn walked_pages_are_never_absent_or_read_only() {
        let walk = walk();
        assert!(walk.len() > 60 && walk.len() <= pagetide_testbed::MAX_WALK);
        assert!(walk.iter().all(|page| page.0 < SMALLEST));
        assert!(
            walk.iter()
                .all(|page| !(VIDEO..ABOVE_ROMS).contains(&page.0))
        );
    }

    #[test]
    fn splits_are_never_at_an_end() {
        for number in 0..10_000 {
            let Some(Step::Split { at }) = round(Op::Split, number).measured.first().copied()
            else {
                unreachable!("it is a split")
            };
            assert!((1..DATA_PAGES).contains(&at), "{number}");
        }
    }
}
