//! Why a population did not get to its end, and how far it got.

use std::fmt;
use std::io;

use pagetide_memory::{GuestAddress, GuestRange};

use super::{PopulateFlags, Populated, rest};

/// How far a population got that did not get to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unfinished {
    /// What became of the memory before `rest`.
    pub done: Populated,
    /// What is left.
    pub rest: GuestRange,
}

impl fmt::Display for Unfinished {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} is left ({})", self.rest, self.done)
    }
}

/// Why a range is not populated, or not all of it.
#[derive(Debug, thiserror::Error)]
pub enum PopulateError {
    /// The kernel lacks KVM_CAP_POPULATE_MEMORY, or cannot do it for this VM.
    #[error(
        "population of {range}: this kernel does not have KVM_CAP_POPULATE_MEMORY ({number}) for \
         this VM; run a kernel with Pagetide's patches, on x86 with two-dimensional paging"
    )]
    MissingCapability {
        /// What was asked for.
        range: GuestRange,
        /// The capability's number.
        number: u32,
    },
    /// No slot has the memory at `gpa` (ENOENT): it never was there, or was deleted meanwhile.
    #[error("population: no memory slot at {gpa}; {unfinished}")]
    NoSlot {
        /// Where there is none.
        gpa: GuestAddress,
        /// How far it got.
        unfinished: Unfinished,
        /// ENOENT.
        #[source]
        source: io::Error,
    },
    /// The kernel finds the range or the flags invalid (EINVAL).
    #[error("population of {range}: the kernel refuses it, with {flags}")]
    Invalid {
        /// What was asked for.
        range: GuestRange,
        /// The flags that were asked for.
        flags: PopulateFlags,
        /// EINVAL.
        #[source]
        source: io::Error,
    },
    /// The caller's condition said stop.
    #[error("population was stopped; {unfinished}")]
    Interrupted {
        /// How far it got.
        unfinished: Unfinished,
    },
    /// Any other errno: ENOMEM, EIO for a VM that is dead.
    #[error("population failed; {unfinished}")]
    Failed {
        /// How far it got.
        unfinished: Unfinished,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
}

impl PopulateError {
    /// How far it got; None if it did not begin.
    #[must_use]
    pub fn unfinished(&self) -> Option<&Unfinished> {
        match self {
            Self::NoSlot { unfinished, .. }
            | Self::Interrupted { unfinished }
            | Self::Failed { unfinished, .. } => Some(unfinished),
            Self::MissingCapability { .. } | Self::Invalid { .. } => None,
        }
    }

    /// The same error of a larger range, of which `done` came before.
    pub(super) fn within(mut self, range: GuestRange, done: Populated) -> Self {
        match &mut self {
            Self::NoSlot { unfinished, .. }
            | Self::Interrupted { unfinished }
            | Self::Failed { unfinished, .. } => {
                unfinished.done += done;
                unfinished.rest = rest(range, unfinished.rest.start()).unwrap_or(unfinished.rest);
            }
            Self::MissingCapability { .. } | Self::Invalid { .. } => {}
        }
        self
    }
}
