//! The right, and the duty, to bring pages in.

use std::mem;

use super::cell::{ABSENT, REMOVED, Settled};
use super::{PageMap, PageRange};

/// What the pages of a claim were before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Absent: their content must be brought from the source.
    Absent,
    /// Removed: they read as zeroes.
    Removed,
}

/// Whether userfaultfd readers asked the owner of a page to wake the threads that fault on it.
#[must_use = "a thread may be asleep in a userfaultfd until UFFDIO_WAKE is issued for these pages"]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WakeWanted {
    /// Nobody asked.
    No,
    /// Issue `UFFDIO_WAKE` for the pages that were finished or abandoned.
    Yes,
}

impl WakeWanted {
    /// Whether a wake is wanted.
    pub const fn is_wanted(self) -> bool {
        matches!(self, Self::Yes)
    }
}

/// Proof that its holder, and nobody else, is bringing these pages in: each of them is InFlight for
/// as long as the guard lives.
///
/// A guard that is dropped, as when a page source panics, abandons its pages.
#[derive(Debug)]
pub struct ClaimGuard<'map> {
    map: &'map PageMap,
    pages: PageRange,
    origin: Origin,
}

impl<'map> ClaimGuard<'map> {
    #[inline]
    pub(super) fn new(map: &'map PageMap, pages: PageRange, origin: Origin) -> Self {
        Self { map, pages, origin }
    }

    /// The caller has claimed all of `pages`, which include those claimed so far.
    #[inline]
    pub(super) fn widen(&mut self, pages: PageRange) {
        self.pages = pages;
    }

    /// The pages that are owned.
    pub fn pages(&self) -> PageRange {
        self.pages
    }

    /// What the pages were before.
    pub fn origin(&self) -> Origin {
        self.origin
    }

    /// Leaves the pages as `settled`, and lets those who wait for them go on.
    #[inline]
    pub fn finish(self, settled: Settled) -> WakeWanted {
        self.leave(settled.byte())
    }

    /// Gives the pages back as they were before the claim. Those who wait for them find them so,
    /// and may claim them themselves.
    pub fn abandon(self) -> WakeWanted {
        let back = self.abandoned_state();
        self.leave(back)
    }

    /// Splits off the first `count` pages: they, and the rest. Either may be empty.
    pub fn split_at(self, count: u64) -> (Self, Self) {
        let (head, tail) = self.pages.split_at(count);
        let halves = (
            Self {
                map: self.map,
                pages: head,
                origin: self.origin,
            },
            Self {
                map: self.map,
                pages: tail,
                origin: self.origin,
            },
        );
        // The halves own the pages now.
        mem::forget(self);
        halves
    }

    fn abandoned_state(&self) -> u8 {
        match self.origin {
            Origin::Absent => ABSENT,
            Origin::Removed => REMOVED,
        }
    }

    #[inline]
    fn leave(self, to: u8) -> WakeWanted {
        let wanted = self.leave_all(to);
        mem::forget(self);
        wanted
    }

    #[inline]
    fn leave_all(&self, to: u8) -> WakeWanted {
        let mut wanted = false;
        for page in self.pages.iter() {
            wanted |= self.map.leave_in_flight(page, to);
        }
        if wanted {
            WakeWanted::Yes
        } else {
            WakeWanted::No
        }
    }
}

impl Drop for ClaimGuard<'_> {
    fn drop(&mut self) {
        // A wake that was wanted is not given: the owner is gone without an answer, and a thread
        // that stays asleep is better than a guest that goes on.
        let _ = self.leave_all(self.abandoned_state());
    }
}
