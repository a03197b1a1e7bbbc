//! Ownership of pages that are being installed.

use std::mem;

use super::cell::{PageState, Settled};
use super::{PageIndex, PageMap, PageRange};

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
}

impl From<bool> for WakeWanted {
    fn from(wanted: bool) -> Self {
        if wanted { Self::Yes } else { Self::No }
    }
}

/// Proof that its holder, and no other thread, installs these pages: each page is Installing for as
/// long as the guard lives.
///
/// Dropping the guard, as when the owner panics, restores the pages' states from before the claim, and loses a
/// wake-up that was left to the owner: [`MissingPages::keep`](crate::MissingPages::keep) does not.
#[derive(Debug)]
pub struct ClaimGuard<'map> {
    map: &'map PageMap,
    pages: PageRange,
    has_pending: bool,
}

impl<'map> ClaimGuard<'map> {
    #[inline]
    pub(super) fn new(map: &'map PageMap, pages: PageRange, has_pending: bool) -> Self {
        Self {
            map,
            pages,
            has_pending,
        }
    }

    /// The owned pages.
    pub fn pages(&self) -> PageRange {
        self.pages
    }

    /// Whether some of them were Pending: their entries are to be taken out of the book of missing pages. After a
    /// split, both parts say so.
    pub fn has_pending(&self) -> bool {
        self.has_pending
    }

    /// Leaves the pages as `settled` and resumes the threads that wait for them.
    #[inline]
    pub fn finish(self, settled: Settled) -> WakeWanted {
        let wanted = self.map.settle_owned(self.pages, settled.byte());
        mem::forget(self);
        WakeWanted::from(wanted)
    }

    /// Restores each page's state from before the claim, and resumes parked threads. A wake-up that was left to the
    /// owner is returned.
    ///
    /// For pages that were Pending call [`MissingPages::put_back`](crate::MissingPages::put_back) instead.
    pub fn abandon(self) -> WakeWanted {
        let mut wanted = false;
        self.give_back(false, |_, _| wanted = true);
        WakeWanted::from(wanted)
    }

    /// Gives the pages back, and calls `asleep` for each page on which a thread sleeps that has left its wake-up to
    /// the owner, with the state to which the page has returned. With `keeps`, that state is Pending.
    pub(crate) fn give_back(self, keeps: bool, mut asleep: impl FnMut(PageIndex, PageState)) {
        for page in self.pages.iter() {
            if let (state, true) = self.map.give_back(page, keeps) {
                asleep(page, state);
            }
        }
        mem::forget(self);
    }

    /// Splits into the first `count` pages and the rest. Either may be empty.
    pub fn split_at(self, count: u64) -> (Self, Self) {
        let (head, tail) = self.pages.split_at(count);
        let part = |pages| Self::new(self.map, pages, self.has_pending);
        let halves = (part(head), part(tail));
        // The halves own the pages now.
        mem::forget(self);
        halves
    }
}

impl Drop for ClaimGuard<'_> {
    fn drop(&mut self) {
        for page in self.pages.iter() {
            let _ = self.map.give_back(page, false);
        }
    }
}
