//! Ownership of pages that are being installed.

use std::mem;

use super::cell::{REMOVED, Settled};
use super::{PageMap, PageRange};

/// Whether threads may sleep in a userfaultfd because their wake-up was left to the caller.
#[must_use = "a thread may be asleep in a userfaultfd until UFFDIO_WAKE is issued for these pages"]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WakeWanted {
    /// No thread sleeps.
    No,
    /// Issue `UFFDIO_WAKE` for the pages.
    Yes,
}

impl WakeWanted {
    /// Whether a wake is wanted.
    pub const fn is_wanted(self) -> bool {
        matches!(self, Self::Yes)
    }

    pub(super) const fn from(wanted: bool) -> Self {
        if wanted { Self::Yes } else { Self::No }
    }
}

/// Proof that its holder, and no other thread, installs these pages: each page is Installing for as
/// long as the guard lives.
///
/// Dropping the guard, as when the owner panics, restores the pages' states from before the claim. A
/// wake-up that was left to this owner then stays recorded on the page, for the page's next owner.
#[derive(Debug)]
pub struct ClaimGuard<'map> {
    map: &'map PageMap,
    pages: PageRange,
}

impl<'map> ClaimGuard<'map> {
    #[inline]
    pub(super) fn new(map: &'map PageMap, pages: PageRange) -> Self {
        Self { map, pages }
    }

    /// The owned pages.
    pub fn pages(&self) -> PageRange {
        self.pages
    }

    /// Leaves the pages as `settled` and resumes the threads that wait for them.
    #[inline]
    pub fn finish(self, settled: Settled) -> WakeWanted {
        self.settle(settled.byte())
    }

    /// Leaves the pages Removed: the guest discarded them while their content was in transit.
    pub fn finish_removed(self) -> WakeWanted {
        self.settle(REMOVED)
    }

    /// Restores each page's state from before the claim, Absent or Requested, and resumes parked
    /// threads.
    ///
    /// The result concerns the pages that have no urgent request (Absent, or Requested in bulk): the
    /// threads that sleep for them must be woken, so that they fault again and the page is requested.
    /// Threads that sleep for an urgently requested page continue to wait for its request.
    pub fn abandon(self) -> WakeWanted {
        let mut wanted = false;
        for page in self.pages.iter() {
            wanted |= self.map.give_back(page);
        }
        mem::forget(self);
        WakeWanted::from(wanted)
    }

    /// Takes over the wake-ups that were left to this owner so far: the caller issues `UFFDIO_WAKE` for
    /// the pages now. Threads that arrive later record new wake-ups.
    pub fn take_wake_wanted(&self) -> WakeWanted {
        let mut wanted = false;
        for page in self.pages.iter() {
            wanted |= self.map.take_wake(page);
        }
        WakeWanted::from(wanted)
    }

    /// Splits into the first `count` pages and the rest. Either may be empty.
    pub fn split_at(self, count: u64) -> (Self, Self) {
        let (head, tail) = self.pages.split_at(count);
        let halves = (Self::new(self.map, head), Self::new(self.map, tail));
        // The halves own the pages now.
        mem::forget(self);
        halves
    }

    #[inline]
    fn settle(self, to: u8) -> WakeWanted {
        let wanted = self.map.settle_owned(self.pages, to);
        mem::forget(self);
        WakeWanted::from(wanted)
    }
}

impl Drop for ClaimGuard<'_> {
    fn drop(&mut self) {
        for page in self.pages.iter() {
            self.map.give_back_quietly(page);
        }
    }
}
