//! Claimed pages, with what the book of missing pages had of them.

use pagetide_memory::{ClaimGuard, Entry, PageRange, Settled, WakeWanted, split_entries};

use crate::missing::Entries;
use crate::region::PagedRegion;

/// Pages that this thread installs, and their entries: nobody else has either.
///
/// Dropping it, as when its owner panics, puts the entries back into the book.
pub(crate) struct Claim<'r> {
    region: &'r PagedRegion,
    /// `None` at the end.
    guard: Option<ClaimGuard<'r>>,
    entries: Entries,
}

/// Who is to be woken after a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a thread may be asleep in a userfaultfd until UFFDIO_WAKE is issued for these pages"]
pub(crate) struct Sleeping {
    /// Threads that slept before the claim: the call that installs has woken them if it was asked to, in one
    /// address space.
    pub(crate) before: bool,
    /// Threads that have left their wake-ups to the claim.
    pub(crate) since: bool,
}

impl<'r> Claim<'r> {
    #[inline]
    pub(crate) fn new(region: &'r PagedRegion, guard: ClaimGuard<'r>) -> Self {
        let entries = match guard.has_pending() {
            true => region.missing().take(guard.pages()),
            false => Entries::new(),
        };
        Self {
            region,
            guard: Some(guard),
            entries,
        }
    }

    #[inline]
    pub(crate) fn pages(&self) -> PageRange {
        let none = PageRange::new(pagetide_memory::PageIndex(0), 0);
        self.guard.as_ref().map_or(none, ClaimGuard::pages)
    }

    /// Whether threads slept on its pages before it was made.
    #[inline]
    pub(crate) fn has_sleepers(&self) -> bool {
        self.entries.iter().any(|entry| entry.wish.is_asleep())
    }

    /// Splits into the first `count` pages and the rest. Either may be empty.
    pub(crate) fn split_at(mut self, count: u64) -> (Self, Self) {
        let at = self.pages().split_at(count).1.first();
        let entries = std::mem::take(&mut self.entries);
        let (first, second) = match entries.is_empty() {
            true => (entries, Entries::new()),
            false => split_entries(entries, at),
        };
        let guards = self.guard.take().map(|guard| guard.split_at(count));
        let (head, tail) = guards.unzip();
        let part = |guard, entries| Self {
            region: self.region,
            guard,
            entries,
        };
        (part(head, first), part(tail, second))
    }

    /// Leaves the pages as `settled`, and resumes the threads that wait in exits.
    #[inline]
    pub(crate) fn finish(mut self, settled: Settled) -> Sleeping {
        let before = self.has_sleepers();
        let wanted = self.guard.take().map(|guard| guard.finish(settled));
        self.entries.clear();
        Sleeping {
            before,
            since: wanted.is_some_and(WakeWanted::is_wanted),
        }
    }

    /// Gives the pages back as they were. Returns runs on which threads are to be woken, which then fault again; those
    /// that sleep on pages with an entry sleep on.
    #[must_use = "a thread may sleep on the pages"]
    pub(crate) fn give_back(mut self) -> Vec<PageRange> {
        let entries = std::mem::take(&mut self.entries);
        let pages = self.pages();
        match self.guard.take() {
            Some(guard) if guard.has_pending() && !pages.is_empty() => {
                let map = &self.region.map;
                let wake = self.region.missing().put_back(map, guard, entries);
                wake.into_iter().map(PageRange::single).collect()
            }
            Some(guard) => match guard.abandon() {
                WakeWanted::Yes => vec![pages],
                WakeWanted::No => Vec::new(),
            },
            None => Vec::new(),
        }
    }
}

impl Claim<'_> {
    /// Puts pages that were not installed back into the book.
    #[cold]
    fn keep(&mut self, guard: ClaimGuard<'_>) {
        let entries: Vec<Entry<_>> = std::mem::take(&mut self.entries);
        self.region.missing().keep(&self.region.map, guard, entries);
    }
}

impl Drop for Claim<'_> {
    #[inline]
    fn drop(&mut self) {
        if let Some(guard) = self.guard.take_if(|guard| !guard.pages().is_empty()) {
            self.keep(guard);
        }
    }
}
