//! The right, and the duty, to install pages.

use std::mem;

use super::cell::{REMOVED, Settled};
use super::{PageMap, PageRange};

/// Whether threads may be asleep in a userfaultfd because their wake-up was left to the caller.
#[must_use = "a thread may be asleep in a userfaultfd until UFFDIO_WAKE is issued for these pages"]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WakeWanted {
    /// No thread is.
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

/// Proof that its holder, and nobody else, is installing these pages: each of them is Installing for
/// as long as the guard lives.
///
/// A guard that is dropped, as when its owner panics, gives its pages back as they were. A wake-up
/// that was left to this owner then stays with the page, for the page's next owner.
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

    /// The pages that are owned.
    pub fn pages(&self) -> PageRange {
        self.pages
    }

    /// Leaves the pages as `settled`, and lets those who wait for them go on.
    #[inline]
    pub fn finish(self, settled: Settled) -> WakeWanted {
        self.settle(settled.byte())
    }

    /// Leaves the pages Removed: the guest gave them up while their content was on its way.
    pub fn finish_removed(self) -> WakeWanted {
        self.settle(REMOVED)
    }

    /// Gives each page back as it was before the claim, Absent or Requested, and lets parked threads
    /// look again.
    ///
    /// The answer is about the pages that nobody urgently brings in now (Absent, or Requested in
    /// bulk): their sleepers have to be woken so that they fault again and ask for the page. The
    /// sleepers of an urgently requested page stay with its request.
    pub fn abandon(self) -> WakeWanted {
        let mut wanted = false;
        for page in self.pages.iter() {
            wanted |= self.map.give_back(page);
        }
        mem::forget(self);
        WakeWanted::from(wanted)
    }

    /// Takes over the wake-ups that were left to this owner so far: the caller issues `UFFDIO_WAKE`
    /// for the pages now. Those who come later ask anew.
    pub fn take_wake_wanted(&self) -> WakeWanted {
        let mut wanted = false;
        for page in self.pages.iter() {
            wanted |= self.map.take_wake(page);
        }
        WakeWanted::from(wanted)
    }

    /// Splits off the first `count` pages: they, and the rest. Either may be empty.
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
