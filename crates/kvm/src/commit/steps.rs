//! Slot changes made one after the other, and undone unless all succeed.

use std::io;

use pagetide_memory::GuestRange;

use super::error::Undone;
use crate::slot::{Slot, SlotLayout};
use crate::slot_calls::{Change, SlotCalls, SlotChange};

/// The changes made so far. Unless [`Steps::finish`] was called, dropping the value (after an error or
/// a panic) undoes them. In every case `publish` receives the kernel's current layout, so that its
/// memory stays mapped.
pub(super) struct Steps<'a, P: FnMut(SlotLayout)> {
    calls: &'a dyn SlotCalls,
    old: SlotLayout,
    /// The kernel's current layout.
    present: SlotLayout,
    /// The changes made so far, the latest last; during a call, also its change.
    taken: Vec<&'a SlotChange>,
    publish: P,
}

impl<'a, P: FnMut(SlotLayout)> Steps<'a, P> {
    pub(super) fn new(calls: &'a dyn SlotCalls, old: SlotLayout, publish: P) -> Self {
        Self {
            calls,
            present: old.clone(),
            old,
            taken: Vec::new(),
            publish,
        }
    }

    /// Makes one change; after an error, the layout is as before the call.
    pub(super) fn take(&mut self, step: &'a SlotChange) -> io::Result<()> {
        // Recorded first: if the call panics, undoing a change that was not made does no harm.
        self.taken.push(step);
        let result = self.calls.set_one(step.slot, &step.state, step.change);
        match (&result, step.change) {
            (Err(_), _) => drop(self.taken.pop()),
            (Ok(()), Change::Delete) => drop(self.present.remove(&step.slot)),
            (Ok(()), Change::Create | Change::Flags) => {
                self.present.insert(step.slot, step.state.clone());
            }
        }
        result
    }

    /// Ranges of slots that logged and were deleted: their dirty bits are lost, whether other slots
    /// replace them or an undo creates them again.
    pub(super) fn deleted_logs(&self) -> Vec<GuestRange> {
        self.logs_lost_by(|step| step.change == Change::Delete)
    }

    /// Ranges whose dirty bits are lost if all changes so far are undone: those of deleted slots, and
    /// those of slots whose log was turned off, which frees the log. Turning the log on again creates
    /// an empty one.
    pub(super) fn lost_dirty(&self) -> Vec<GuestRange> {
        self.logs_lost_by(|step| match step.change {
            Change::Delete => true,
            Change::Flags => !step.state.flags.log_dirty,
            Change::Create => false,
        })
    }

    fn logs_lost_by(&self, loses: impl Fn(&SlotChange) -> bool) -> Vec<GuestRange> {
        let losing = self.taken.iter().filter(|step| loses(step));
        losing
            .filter_map(|step| self.old.get(&step.slot))
            .filter(|slot| slot.flags.log_dirty)
            .map(|slot| slot.range)
            .collect()
    }

    /// Accepts all changes.
    pub(super) fn finish(mut self) {
        self.taken.clear();
    }

    /// Undoes all changes, the latest first; returns the differences that remain, if any.
    pub(super) fn undo(mut self) -> Option<Undone> {
        let source = self.take_back()?;
        let missing = differing(&self.old, &self.present);
        let left = differing(&self.present, &self.old);
        Some(Undone {
            missing,
            left,
            source,
        })
    }

    /// Continues after a failure, to restore as much as possible; returns the first error.
    fn take_back(&mut self) -> Option<io::Error> {
        let mut failure = None;
        while let Some(step) = self.taken.pop() {
            let slot = step.slot;
            let result = match (step.change, self.old.get(&slot)) {
                (Change::Create, _) | (_, None) => self
                    .calls
                    .set_one(slot, &step.state, Change::Delete)
                    .map(|()| drop(self.present.remove(&slot))),
                (change, Some(old)) => {
                    let back = match change {
                        Change::Flags => Change::Flags,
                        _ => Change::Create,
                    };
                    let result = self.calls.set_one(slot, old, back);
                    result.map(|()| drop(self.present.insert(slot, old.clone())))
                }
            };
            if let Err(error) = result {
                failure.get_or_insert(error);
            }
        }
        failure
    }
}

impl<P: FnMut(SlotLayout)> Drop for Steps<'_, P> {
    fn drop(&mut self) {
        // Nothing is left to undo after finish() and undo(). During a panic a failure cannot be
        // reported; the VM's layout shows it.
        let _ = self.take_back();
        (self.publish)(std::mem::take(&mut self.present));
    }
}

/// The slots of `one` that `other` lacks or has with other memory or flags.
fn differing(one: &SlotLayout, other: &SlotLayout) -> Vec<(u32, Slot)> {
    one.iter()
        .filter(|(number, slot)| {
            !other
                .get(number)
                .is_some_and(|there| there.is_same_memory(slot) && there.flags == slot.flags)
        })
        .map(|(number, slot)| (*number, slot.clone()))
        .collect()
}
