//! Failures in a row, for which no page is to blame, and after which bulk requests are held.

use std::time::Instant;

use pagetide_memory::PageRange;

use super::Miss;

/// Why bulk requests are held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cause {
    /// The source answers nothing.
    Silence,
    /// The memory takes nothing.
    NoMemory,
}

impl Cause {
    pub(super) fn of(miss: Miss) -> Option<Self> {
        match miss {
            Miss::Failed => Some(Self::Silence),
            Miss::NotInstalled { is_lack: true } => Some(Self::NoMemory),
            Miss::NotInstalled { is_lack: false } | Miss::PoisonedAmongOthers => None,
        }
    }
}

/// Bulk requests are held.
#[derive(Clone, Copy, Debug)]
pub(super) struct Hold {
    pub(super) cause: Cause,
    /// The time of the next one.
    pub(super) until: Instant,
    /// The failures since it began.
    pub(super) failures: u32,
}

/// Failures in a row.
#[derive(Debug, Default)]
pub(super) struct InARow {
    pub(super) failures: u32,
    /// Pages that were set aside meanwhile.
    pub(super) set_aside: Vec<PageRange>,
}

impl InARow {
    pub(super) fn end(&mut self) {
        self.failures = 0;
        self.set_aside.clear();
    }
}
