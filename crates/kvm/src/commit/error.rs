//! Why a commit failed, and what it left.

use std::fmt;
use std::io;

use pagetide_memory::GuestRange;

use pagetide_uapi::generated as abi;

use super::Method;
use crate::plan::PlanError;
use crate::slot::{Slot, SlotFlags};
use crate::slot_calls::{Change, SlotChange};

/// Why a transaction was not carried out. vCPUs run on in each case.
#[derive(Debug, thiserror::Error)]
pub enum CommitError {
    /// It was refused before anything was done.
    #[error("the transaction is refused")]
    Refused(#[from] PlanError),
    /// The kernel lacks what the method needs; nothing has been done.
    #[error("method {method:?}: this kernel does not have {capability} ({number})")]
    MissingCapability {
        /// The method.
        method: Method,
        /// The capability's name.
        capability: &'static str,
        /// The capability's number.
        number: u32,
    },
    /// [`Method::Quiesce`] cannot make vCPUs leave KVM_RUN: the VM was made without a signal that
    /// kicks, and this kernel does not have KVM_CAP_KICK_VCPUS. Nothing has been done.
    #[error(
        "method Quiesce: vCPUs cannot be stopped, for the VM has no signal that kicks and this kernel \
         does not have KVM_CAP_KICK_VCPUS ({})",
        abi::KVM_CAP_KICK_VCPUS
    )]
    NoKick,
    /// The kernel refused the list; nothing has changed.
    #[error("the kernel refuses a list of {entries} slots{}", at_slot(refused.as_ref()))]
    List {
        /// How many slots were to be changed.
        entries: usize,
        /// The slot that the kernel names, if it names one, and its range.
        refused: Option<(u32, GuestRange)>,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// One of several changes failed, and those before it were taken back: the old layout is in
    /// place.
    #[error("{change} failed; the old layout is back")]
    RolledBack {
        /// The method.
        method: Method,
        /// The change that failed.
        change: FailedChange,
        /// Ranges whose dirty bits the kernel has forgotten, because a slot with `log_dirty` was made
        /// anew, or its log was turned off and on again: take all their pages as dirty.
        lost_dirty: Vec<GuestRange>,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// One of several changes failed, and taking back those before it failed as well.
    #[error("{change} failed, and the old layout could not be restored: {undone}")]
    HalfDone {
        /// The method.
        method: Method,
        /// The change that failed.
        change: FailedChange,
        /// As for [`CommitError::RolledBack`].
        lost_dirty: Vec<GuestRange>,
        /// The kernel's answer to the change.
        #[source]
        source: io::Error,
        /// What is not as it was.
        undone: Undone,
    },
}

fn at_slot(refused: Option<&(u32, GuestRange)>) -> String {
    refused.map_or_else(String::new, |(slot, range)| {
        format!(", slot {slot} ({range})")
    })
}

/// The change of a slot that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FailedChange {
    /// The slot.
    pub slot: u32,
    /// The range that it holds, or was to hold.
    pub range: GuestRange,
    /// The flags that it was to have; those it had, if it was to be deleted.
    pub flags: SlotFlags,
    kind: Change,
}

impl From<&SlotChange> for FailedChange {
    fn from(change: &SlotChange) -> Self {
        let Slot { range, flags, .. } = change.state;
        Self {
            slot: change.slot,
            range,
            flags,
            kind: change.change,
        }
    }
}

impl fmt::Display for FailedChange {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            slot, range, flags, ..
        } = self;
        match self.kind {
            Change::Create => write!(formatter, "creating memory slot {slot} ({range}; {flags})"),
            Change::Delete => write!(formatter, "deleting memory slot {slot} ({range})"),
            Change::Flags => write!(formatter, "giving memory slot {slot} ({range}) {flags}"),
        }
    }
}

/// What is left when steps could not be taken back. The VM's layout says the same.
#[derive(Debug)]
pub struct Undone {
    /// Slots of the old layout that are gone, or have other flags.
    pub missing: Vec<(u32, Slot)>,
    /// Slots that the old layout did not have, or had with other flags.
    pub left: Vec<(u32, Slot)>,
    /// The kernel's first answer when steps were taken back.
    pub source: io::Error,
}

impl fmt::Display for Undone {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (what, slots) in [("missing", &self.missing), ("left over", &self.left)] {
            for (number, slot) in slots {
                let Slot { range, flags, .. } = slot;
                write!(
                    formatter,
                    "{what}: memory slot {number} ({range}; {flags}), "
                )?;
            }
        }
        write!(formatter, "because of: {}", self.source)
    }
}
