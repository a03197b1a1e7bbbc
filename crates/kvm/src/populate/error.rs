//! Errors of a population, and its progress.

use std::fmt;
use std::io;

use pagetide_memory::{GuestAddress, GuestRange};

use super::{PopulateFlags, Populated, rest};

/// The progress of a population that did not complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unfinished {
    /// The result for the memory before `rest`.
    pub done: Populated,
    /// The remaining range.
    pub rest: GuestRange,
}

impl fmt::Display for Unfinished {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} is left ({})", self.rest, self.done)
    }
}

/// Why a range was not, or not completely, populated.
#[derive(Debug, thiserror::Error)]
pub enum PopulateError {
    /// The kernel lacks KVM_CAP_POPULATE_MEMORY, or does not support it for this VM.
    #[error(
        "population of {range}: this kernel lacks KVM_CAP_POPULATE_MEMORY ({number}) for \
         this VM; run a kernel with Pagetide's patches, on x86 with two-dimensional paging"
    )]
    MissingCapability {
        /// The requested range.
        range: GuestRange,
        /// The capability's number.
        number: u32,
    },
    /// No slot contains `gpa` (ENOENT), from the beginning or since a deletion.
    #[error("population: no memory slot at {gpa}; {unfinished}")]
    NoSlot {
        /// The first address without a slot.
        gpa: GuestAddress,
        /// The progress.
        unfinished: Unfinished,
        /// ENOENT.
        #[source]
        source: io::Error,
    },
    /// The kernel refuses the range or the flags (EINVAL).
    #[error("population of {range}: the kernel refuses the range with {flags}")]
    Invalid {
        /// The requested range.
        range: GuestRange,
        /// The requested flags.
        flags: PopulateFlags,
        /// EINVAL.
        #[source]
        source: io::Error,
    },
    /// The caller's condition stopped the population.
    #[error("population was stopped; {unfinished}")]
    Interrupted {
        /// The progress.
        unfinished: Unfinished,
    },
    /// Any other errno: ENOMEM, or EIO for a VM that is dead.
    #[error("population failed; {unfinished}")]
    Failed {
        /// The progress.
        unfinished: Unfinished,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

impl PopulateError {
    /// The progress; None if the population did not begin.
    #[must_use]
    pub fn unfinished(&self) -> Option<&Unfinished> {
        match self {
            Self::NoSlot { unfinished, .. }
            | Self::Interrupted { unfinished }
            | Self::Failed { unfinished, .. } => Some(unfinished),
            Self::MissingCapability { .. } | Self::Invalid { .. } => None,
        }
    }

    /// The same error for the larger range `range`, of which `done` was processed before.
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
