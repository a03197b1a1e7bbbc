//! The plan of a transaction: the resulting layout and the changes that lead to it, computed and
//! checked before anything changes.

mod error;

use std::collections::BTreeMap;

use pagetide_memory::{GuestAddress, GuestRange, PageSize};
use pagetide_uapi::generated as abi;

use crate::slot::{Slot, SlotLayout, has_exits};
use crate::slot_calls::{Change, SlotChange};
use crate::transaction::{SlotRef, Step};
use crate::vm::Capabilities;

pub use error::PlanError;

/// The maximal number of slots that one transaction may change.
pub(crate) const ENTRIES_MAX: usize = abi::KVM_MEMORY_REGION_LIST_MAX as usize;

/// A transaction that passed all checks.
#[derive(Debug)]
pub(crate) struct Plan {
    /// Deletions first, then changes of flags, then creations; no slot twice.
    pub(crate) changes: Vec<SlotChange>,
    /// All slots afterwards.
    pub(crate) layout: SlotLayout,
    /// The numbers of the slots that steps created; None for those that a later step consumed.
    pub(crate) made: Vec<Option<u32>>,
}

/// A slot between two steps.
#[derive(Debug)]
struct Piece {
    /// The slot's name in errors: the name of the original slot if only its size or flags changed.
    name: SlotRef,
    slot: Slot,
    /// The number under which the VM has this memory, if any.
    origin: Option<u32>,
}

/// The meaning of a reference: a piece, or the range of one that a step consumed.
#[derive(Debug)]
enum Place {
    Piece(Piece),
    UsedUp(GuestRange),
}

#[derive(Debug)]
struct Work {
    transaction: u64,
    old: BTreeMap<u32, Place>,
    made: Vec<Place>,
}

impl Plan {
    /// Applies `steps` of a transaction to `slots`.
    pub(crate) fn new(
        slots: &SlotLayout,
        capabilities: &Capabilities,
        transaction: u64,
        steps: &[Step],
    ) -> Result<Self, PlanError> {
        let old = slots.iter().map(|(number, slot)| {
            let piece = Piece {
                name: SlotRef::from(*number),
                slot: slot.clone(),
                origin: Some(*number),
            };
            (*number, Place::Piece(piece))
        });
        let mut work = Work {
            transaction,
            old: old.collect(),
            made: Vec::new(),
        };
        for step in steps {
            work.apply(step)?;
        }
        work.check_layout(slots, capabilities)?;
        work.conclude(slots, capabilities.slots)
    }
}

impl Work {
    fn place(&mut self, name: SlotRef) -> Option<&mut Place> {
        match name.number() {
            Some(number) => self.old.get_mut(&number),
            None => self.made.get_mut(name.made_by(self.transaction)?),
        }
    }

    /// Consumes a slot.
    fn take(&mut self, name: SlotRef) -> Result<Piece, PlanError> {
        let place = self
            .place(name)
            .ok_or(PlanError::UnknownSlot { slot: name })?;
        let range = match place {
            Place::Piece(piece) => piece.slot.range,
            Place::UsedUp(range) => *range,
        };
        match std::mem::replace(place, Place::UsedUp(range)) {
            Place::Piece(piece) => Ok(piece),
            Place::UsedUp(range) => Err(PlanError::UsedUp { slot: name, range }),
        }
    }

    fn make(&mut self, name: SlotRef, slot: Slot, origin: Option<u32>) {
        self.made.push(Place::Piece(Piece { name, slot, origin }));
    }

    fn apply(&mut self, step: &Step) -> Result<(), PlanError> {
        let name = SlotRef::made(self.transaction, self.made.len());
        match *step {
            Step::Create {
                ref region,
                offset,
                bytes,
                gpa,
                flags,
            } => {
                let slot = Slot {
                    region: region.clone(),
                    offset,
                    range: checked_range(name, gpa, bytes)?,
                    flags,
                };
                check_memory(name, &slot)?;
                self.make(name, slot, None);
            }
            Step::Delete(target) => drop(self.take(target)?),
            Step::Resize(target, bytes) => {
                let Piece { name, slot, origin } = self.take(target)?;
                let range = checked_range(target, slot.range.start(), bytes)?;
                let slot = Slot { range, ..slot };
                check_memory(target, &slot)?;
                self.make(name, slot, origin);
            }
            Step::Split(target, at) => {
                let Piece { slot, .. } = self.take(target)?;
                let range = slot.range;
                let bad = PlanError::BadSplit {
                    slot: target,
                    range,
                    at,
                };
                let Some((low, high)) = split(&slot, at) else {
                    return Err(bad);
                };
                self.make(name, low, None);
                let name = SlotRef::made(self.transaction, self.made.len());
                self.make(name, high, None);
            }
            Step::Merge(one, other) => {
                let (one, other) = (self.take(one)?, self.take(other)?);
                let merged = merge(one, other)?;
                self.make(name, merged, None);
            }
            Step::SetFlags(target, flags) => {
                let Piece { name, slot, origin } = self.take(target)?;
                self.make(name, Slot { flags, ..slot }, origin);
            }
        }
        Ok(())
    }

    fn pieces(&self) -> impl Iterator<Item = &Piece> {
        let places = self.old.values().chain(&self.made);
        places.filter_map(|place| match place {
            Place::Piece(piece) => Some(piece),
            Place::UsedUp(_) => None,
        })
    }

    /// Checks the final layout: the flags of changed slots, and overlaps.
    fn check_layout(
        &self,
        slots: &SlotLayout,
        capabilities: &Capabilities,
    ) -> Result<(), PlanError> {
        let mut pieces: Vec<_> = self.pieces().collect();
        for piece in &pieces {
            let Slot { range, flags, .. } = piece.slot;
            let slot = piece.name;
            let known = piece.origin.and_then(|number| slots.get(&number));
            if known.is_some_and(|known| known.flags == flags) {
                continue;
            }
            if flags.readonly && flags.absent_mapping_fault {
                return Err(PlanError::FlagsConflict { slot, range, flags });
            }
            if !flags.absent_mapping_fault {
                continue;
            }
            if capabilities.absent_mapping_flag().is_none() {
                return Err(PlanError::MissingCapability {
                    slot,
                    range,
                    capability: "KVM_CAP_ABSENT_MAPPING_FAULT",
                    number: abi::KVM_CAP_ABSENT_MAPPING_FAULT,
                });
            }
            let region = &piece.slot.region;
            if !region.is_registered() && !has_exits(slots, region) {
                return Err(PlanError::NotRegistered { slot, range });
            }
        }
        pieces.sort_by_key(|piece| piece.slot.range.start());
        for pair in pieces.windows(2) {
            let [one, other] = pair else { continue };
            if one.slot.range.overlaps(other.slot.range) {
                return Err(PlanError::Overlap {
                    slot: one.name,
                    range: one.slot.range,
                    other: other.name,
                    other_range: other.slot.range,
                });
            }
        }
        Ok(())
    }

    /// Assigns the numbers and lists the changes.
    fn conclude(self, slots: &SlotLayout, numbers: u32) -> Result<Plan, PlanError> {
        let mut layout = SlotLayout::new();
        let mut made = Vec::new();
        let mut free = (0..numbers).filter(|number| !slots.contains_key(number));
        let (mut flags, mut creations) = (Vec::new(), Vec::new());
        let places = self.old.into_values().map(|place| (place, false));
        for (place, is_made) in places.chain(self.made.into_iter().map(|place| (place, true))) {
            let number = match place {
                Place::UsedUp(_) => None,
                Place::Piece(Piece { name, slot, origin }) => {
                    let (number, change) = match keeps_number(slots, origin, &slot) {
                        Some(number) => (number, Change::Flags),
                        None => {
                            let range = slot.range;
                            let number = free.next().ok_or(PlanError::NoFreeSlot {
                                slot: name,
                                range,
                                slots: numbers,
                            })?;
                            (number, Change::Create)
                        }
                    };
                    let state = slot.clone();
                    layout.insert(number, slot);
                    let entry = SlotChange {
                        slot: number,
                        change,
                        state,
                    };
                    match change {
                        Change::Flags if slots[&number].flags == entry.state.flags => {}
                        Change::Flags => flags.push(entry),
                        _ => creations.push(entry),
                    }
                    Some(number)
                }
            };
            if is_made {
                made.push(number);
            }
        }
        let gone = slots
            .iter()
            .filter(|(number, _)| !layout.contains_key(number));
        let mut changes: Vec<_> = gone
            .map(|(number, slot)| SlotChange {
                slot: *number,
                change: Change::Delete,
                state: slot.clone(),
            })
            .collect();
        changes.append(&mut flags);
        changes.append(&mut creations);
        if let Some(first) = changes.get(ENTRIES_MAX) {
            return Err(PlanError::TooManyEntries {
                entries: changes.len(),
                limit: ENTRIES_MAX,
                slot: first.slot,
                range: first.state.range,
            });
        }
        Ok(Plan {
            changes,
            layout,
            made,
        })
    }
}

/// The number that a piece retains, if it can: the kernel can change only a slot's flags, and of these
/// not KVM_MEM_READONLY.
fn keeps_number(slots: &SlotLayout, origin: Option<u32>, slot: &Slot) -> Option<u32> {
    let number = origin?;
    let old = slots.get(&number)?;
    (old.is_same_memory(slot) && old.flags.readonly == slot.flags.readonly).then_some(number)
}

fn checked_range(slot: SlotRef, gpa: GuestAddress, bytes: u64) -> Result<GuestRange, PlanError> {
    GuestRange::new(gpa, bytes).map_err(|source| PlanError::BadRange { slot, source })
}

/// Checks that a slot's memory consists of whole pages of its region.
fn check_memory(name: SlotRef, slot: &Slot) -> Result<(), PlanError> {
    let Slot { range, offset, .. } = *slot;
    if !PageSize::Size4K.divides(offset) {
        return Err(PlanError::UnalignedOffset {
            slot: name,
            range,
            offset,
        });
    }
    let region_bytes = slot.region.bytes();
    match offset.checked_add(range.bytes()) {
        Some(end) if end <= region_bytes => Ok(()),
        _ => Err(PlanError::OutsideRegion {
            slot: name,
            range,
            offset,
            region_bytes,
        }),
    }
}

/// The two parts of a slot; None if one of them would be empty or not whole pages.
fn split(slot: &Slot, at: u64) -> Option<(Slot, Slot)> {
    let rest = slot.range.bytes().checked_sub(at)?;
    let low = GuestRange::new(slot.range.start(), at).ok()?;
    let high = GuestRange::new(low.end(), rest).ok()?;
    let part = |range, offset| Slot {
        region: slot.region.clone(),
        offset,
        range,
        flags: slot.flags,
    };
    Some((part(low, slot.offset), part(high, slot.offset + at)))
}

fn merge(one: Piece, other: Piece) -> Result<Slot, PlanError> {
    let (low, high) = if one.slot.range.start() <= other.slot.range.start() {
        (one, other)
    } else {
        (other, one)
    };
    let (range, other_range) = (low.slot.range, high.slot.range);
    let (slot, other) = (low.name, high.name);
    let adjacent = std::sync::Arc::ptr_eq(&low.slot.region, &high.slot.region)
        && range.end() == other_range.start()
        && low.slot.offset + range.bytes() == high.slot.offset;
    if !adjacent {
        return Err(PlanError::NotAdjacent {
            slot,
            range,
            other,
            other_range,
        });
    }
    if low.slot.flags != high.slot.flags {
        return Err(PlanError::FlagsDiffer {
            slot,
            range,
            flags: low.slot.flags,
            other,
            other_range,
            other_flags: high.slot.flags,
        });
    }
    let bytes = range.bytes() + other_range.bytes();
    let range = checked_range(slot, range.start(), bytes)?;
    Ok(Slot { range, ..low.slot })
}

#[cfg(test)]
mod tests;
