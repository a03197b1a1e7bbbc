//! Errors of a commit, and the state after each.

use std::fmt;
use std::io;
use std::time::Duration;

use pagetide_memory::GuestRange;

use pagetide_uapi::generated as abi;

use super::Method;
use crate::plan::PlanError;
use crate::slot::{Slot, SlotFlags};
use crate::slot_calls::{Change, SlotChange};

/// Why a transaction was not committed. vCPUs continue to run in each case.
#[derive(Debug, thiserror::Error)]
pub enum CommitError {
    /// The transaction is invalid. Nothing has changed.
    #[error("the transaction is refused")]
    Refused(#[from] PlanError),
    /// The kernel lacks a capability that the method needs. Nothing has changed.
    #[error("method {method:?}: this kernel lacks {capability} ({number})")]
    MissingCapability {
        /// The method.
        method: Method,
        /// The capability's name.
        capability: &'static str,
        /// The capability's number.
        number: u32,
    },
    /// [`Method::Quiesce`] cannot make vCPUs leave KVM_RUN: the VM has no kick signal, and this kernel
    /// lacks KVM_CAP_KICK_VCPUS. Nothing has changed.
    #[error(
        "method Quiesce: vCPUs cannot be stopped, because the VM has no kick signal and this kernel \
         lacks KVM_CAP_KICK_VCPUS ({})",
        abi::KVM_CAP_KICK_VCPUS
    )]
    NoKick,
    /// These vCPUs could not leave KVM: each waits for a page that does not come, as during an outage of its source.
    /// Nothing has changed, and no other transaction is held up.
    #[error(
        "method Quiesce: {} did not leave KVM for {waited:?}, and may wait for a page",
        Stayed(vcpus)
    )]
    VcpusStay {
        /// The vCPUs; none if a thread that populates has stayed.
        vcpus: Vec<u32>,
        /// For how long the commit has waited.
        waited: Duration,
    },
    /// The kernel refused the list. Nothing has changed.
    #[error("the kernel refuses a list of {entries} slots{}", at_slot(refused.as_ref()))]
    List {
        /// The number of slots in the list.
        entries: usize,
        /// The slot that the kernel reports, if any, and its range.
        refused: Option<(u32, GuestRange)>,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// One of several changes failed; the earlier ones were undone. The old layout is in place.
    #[error("{change} failed; the old layout was restored")]
    RolledBack {
        /// The method.
        method: Method,
        /// The change that failed.
        change: FailedChange,
        /// Ranges whose dirty bits the kernel has discarded because a slot with `log_dirty` was created
        /// again, or because its log was turned off and on: treat all of their pages as dirty.
        lost_dirty: Vec<GuestRange>,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// One of several changes failed, and undoing the earlier ones failed as well.
    #[error("{change} failed, and the old layout could not be restored: {undone}")]
    HalfDone {
        /// The method.
        method: Method,
        /// The change that failed.
        change: FailedChange,
        /// As for [`CommitError::RolledBack`].
        lost_dirty: Vec<GuestRange>,
        /// The kernel's error for the change.
        #[source]
        source: io::Error,
        /// The differences from the old layout.
        undone: Undone,
    },
}

/// Those that have stayed inside, for a message.
struct Stayed<'v>(&'v [u32]);

impl fmt::Display for Stayed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let numbers: Vec<_> = self.0.iter().map(ToString::to_string).collect();
        match &numbers[..] {
            [] => f.write_str("a thread that populates"),
            [one] => write!(f, "vCPU {one}"),
            all => write!(f, "the vCPUs {}", all.join(", ")),
        }
    }
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
    /// The slot's range, old or requested.
    pub range: GuestRange,
    /// The requested flags; for a deletion, the old flags.
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

/// The differences that remain after a failed undo. The VM's layout includes them.
#[derive(Debug)]
pub struct Undone {
    /// Slots of the old layout that are missing, or have other flags.
    pub missing: Vec<(u32, Slot)>,
    /// Slots that the old layout did not have, or had with other flags.
    pub left: Vec<(u32, Slot)>,
    /// The kernel's first error during the undo.
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
