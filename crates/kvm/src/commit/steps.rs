//! Changes of slots one after the other, which are taken back unless all of them worked.

use std::io;

use pagetide_memory::GuestRange;

use super::error::Undone;
use crate::slot::{Slot, SlotLayout};
use crate::slot_calls::{Change, SlotCalls, SlotChange};

/// The steps taken so far. Dropped before [`Steps::finish`] (an error, or a panic), it takes them
/// back. In each case `publish` gets what the kernel has then, so that its memory stays mapped.
pub(super) struct Steps<'a, P: FnMut(SlotLayout)> {
    calls: &'a dyn SlotCalls,
    old: SlotLayout,
    /// What the kernel has now.
    present: SlotLayout,
    /// Taken, the last one last; while a call is going on, its step as well.
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

    /// Takes a step; if it fails, nothing has changed since the last one.
    pub(super) fn take(&mut self, step: &'a SlotChange) -> io::Result<()> {
        // Noted first: should the call panic, taking back a step that was not taken does no harm.
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

    /// Ranges of slots that logged and were deleted: their dirty bits are gone, whether other slots
    /// were made of them or they are brought back.
    pub(super) fn deleted_logs(&self) -> Vec<GuestRange> {
        self.logs_lost_by(|step| step.change == Change::Delete)
    }

    /// Ranges whose dirty bits are gone if all that was done so far is undone: those of deleted
    /// slots, and those of slots whose log was turned off, which frees it. Turning it on again
    /// makes an empty one.
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

    /// All steps were taken.
    pub(super) fn finish(mut self) {
        self.taken.clear();
    }

    /// Takes all steps back, the last one first; what could not be taken back, if anything.
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

    /// Goes on after a failure, to bring back as much as can be; returns the first one.
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
        // Nothing to take back after finish() and undo(). In a panic nobody can be told of a
        // failure; the VM's layout shows it.
        let _ = self.take_back();
        (self.publish)(std::mem::take(&mut self.present));
    }
}

/// What `one` has and `other` has not, or has otherwise.
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
