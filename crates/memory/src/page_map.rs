//! The page map: one atomic state per page, and the rules by which it changes.

mod cell;
mod claim;
mod parking;

use std::collections::TryReserveError;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use thiserror::Error;

use crate::convert::{to_u64, to_usize};
use crate::page::{PageIndex, PageRange};
use cell::{ABSENT, IN_FLIGHT, POISONED, REMOVED, WAITERS, WAKE_WANTED};
use parking::Parking;

pub use cell::{PageState, Settled};
pub use claim::{ClaimGuard, Origin, WakeWanted};

/// The answer to a claim.
#[derive(Debug)]
pub enum Claim<'map> {
    /// The caller owns these pages now and must finish or abandon them.
    Won(ClaimGuard<'map>),
    /// Somebody else owns the page, or it needs no owner: its state at that moment.
    Lost(PageState),
    /// The map has no such page.
    Outside,
}

/// What became of a page that should be removed or poisoned.
#[must_use = "a page that is InFlight is neither removed nor poisoned"]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Removal {
    /// Done; the state that it had before.
    Done(PageState),
    /// A thread is bringing the page in. Wait for it ([`PageMap::wait`]) and ask again.
    InFlight,
    /// The page is poisoned and stays so.
    Poisoned,
    /// The map has no such page.
    Outside,
}

/// Why there is no page map.
#[derive(Debug, Error)]
pub enum PageMapError {
    /// One byte per page is needed, and is not to be had.
    #[error("no memory for a map of {pages} pages")]
    OutOfMemory {
        /// How many pages it should have.
        pages: u64,
        /// What the allocator said.
        #[source]
        source: TryReserveError,
    },
}

/// A reset was refused: a page is still being brought in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("page {page} is still being brought in")]
pub struct ResetError {
    /// The first such page.
    pub page: PageIndex,
}

/// How many pages are in which state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StateCounts {
    /// Pages that are not there yet.
    pub absent: u64,
    /// Pages that somebody is bringing in.
    pub in_flight: u64,
    /// Pages with their content.
    pub present: u64,
    /// Pages that are the zero page.
    pub zero: u64,
    /// Pages that the guest gave up.
    pub removed: u64,
    /// Pages lost to an uncorrected error.
    pub poisoned: u64,
}

/// One atomic state per page of a region.
///
/// | from | to | by | meaning |
/// |---|---|---|---|
/// | Absent | InFlight | [`Self::claim`], [`Self::claim_run`] | one thread now owns bringing it in |
/// | Removed | InFlight | [`Self::claim_removed`] | one thread now owns making it zero |
/// | InFlight | Present | [`ClaimGuard::finish`] | content is installed |
/// | InFlight | Zero | [`ClaimGuard::finish`] | the zero page is installed |
/// | InFlight | Poisoned | [`ClaimGuard::finish`] | the content is lost, says the source |
/// | InFlight | Absent or Removed, as claimed | [`ClaimGuard::abandon`], or dropping the guard | the owner failed; others may claim |
/// | Absent, Present, Zero | Removed | [`Self::remove`] | the guest gave the content up |
/// | Absent, Present, Zero, Removed | Poisoned | [`Self::poison`] | an uncorrected error took it, now or before the VM was restored |
/// | any but InFlight | Absent | [`Self::reset`] | the memory was emptied for another run |
///
/// There is no other edge. InFlight is left by its owner only, so nobody can take a page from under
/// the thread that is installing it. A poisoned page stays poisoned until a reset. When each edge to
/// Poisoned is taken is in `docs/design/poison.md`.
///
/// An InFlight page carries two more bits, both set by those who came too late and cleared by the
/// owner's one swap: *wake wanted* (a userfaultfd reader must not block, so it leaves its
/// `UFFDIO_WAKE` to the owner) and *waiters* (threads parked in [`Self::wait`]). Because they sit
/// in the same byte as the state, a claim and a finish are one atomic operation each when nobody
/// waits, and no request can slip in between the owner's look and its store.
#[derive(Debug)]
pub struct PageMap {
    cells: Box<[AtomicU8]>,
    parking: Parking,
}

impl PageMap {
    /// A map of `pages` pages, all of them Absent. Takes one byte per page.
    pub fn new(pages: u64) -> Result<Self, PageMapError> {
        let mut cells = Vec::new();
        cells
            .try_reserve_exact(to_usize(pages))
            .map_err(|source| PageMapError::OutOfMemory { pages, source })?;
        cells.resize_with(to_usize(pages), || AtomicU8::new(ABSENT));
        Ok(Self {
            cells: cells.into_boxed_slice(),
            parking: Parking::default(),
        })
    }

    /// How many pages it has.
    pub fn pages(&self) -> u64 {
        to_u64(self.cells.len())
    }

    #[inline]
    fn cell(&self, page: PageIndex) -> Option<&AtomicU8> {
        self.cells.get(page.as_usize())
    }

    /// The state of `page` at this moment; `None` if there is no such page.
    #[inline]
    pub fn state(&self, page: PageIndex) -> Option<PageState> {
        // Acquire: whoever sees Present also sees what the installer wrote before it.
        Some(PageState::of(self.cell(page)?.load(Ordering::Acquire)))
    }

    /// The first of `pages` that is Absent or InFlight, and which of them: where there is, or may
    /// yet be, something to bring in. Out of date as soon as it is told.
    pub fn next_unsettled(&self, pages: PageRange) -> Option<(PageIndex, PageState)> {
        let cells = self.cells.get(pages.first().as_usize()..)?;
        let states = cells
            .iter()
            .map(|cell| PageState::of(cell.load(Ordering::Relaxed)));
        pages
            .iter()
            .zip(states)
            .find(|(_, state)| matches!(state, PageState::Absent | PageState::InFlight))
    }

    /// Claims `page` if it is Absent.
    #[inline]
    pub fn claim(&self, page: PageIndex) -> Claim<'_> {
        self.claim_from(page, ABSENT, Origin::Absent)
    }

    /// Claims `page` if it is Removed.
    pub fn claim_removed(&self, page: PageIndex) -> Claim<'_> {
        self.claim_from(page, REMOVED, Origin::Removed)
    }

    #[inline]
    fn claim_from(&self, page: PageIndex, from: u8, origin: Origin) -> Claim<'_> {
        let Some(cell) = self.cell(page) else {
            return Claim::Outside;
        };
        // Acquire on success: the last owner may have abandoned the page after writing some of it.
        match cell.compare_exchange(from, IN_FLIGHT, Ordering::Acquire, Ordering::Acquire) {
            Ok(_) => Claim::Won(ClaimGuard::new(self, PageRange::single(page), origin)),
            Err(found) => Claim::Lost(PageState::of(found)),
        }
    }

    /// Claims `page` if it is Absent, and with it the Absent pages around it that are connected to
    /// it and in `window`.
    #[inline]
    pub fn claim_run(&self, page: PageIndex, window: PageRange) -> Claim<'_> {
        let mut guard = match self.claim(page) {
            Claim::Won(guard) => guard,
            lost => return lost,
        };
        if window.count() <= 1 || !window.contains(page) {
            return Claim::Won(guard);
        }
        let all = PageRange::new(PageIndex(0), self.pages());
        let window = window.intersection(all);
        let mut first = page;
        while first > window.first() && self.take_neighbour(PageIndex(first.0 - 1)) {
            first = PageIndex(first.0 - 1);
        }
        let mut end = PageIndex(page.0 + 1);
        while end < window.end() && self.take_neighbour(end) {
            end = PageIndex(end.0 + 1);
        }
        guard.widen(PageRange::new(first, end.0 - first.0));
        Claim::Won(guard)
    }

    #[inline]
    fn take_neighbour(&self, page: PageIndex) -> bool {
        self.cell(page).is_some_and(|cell| {
            // As in claim_from.
            cell.compare_exchange(ABSENT, IN_FLIGHT, Ordering::Acquire, Ordering::Relaxed)
                .is_ok()
        })
    }

    /// Asks the owner of `page` to issue `UFFDIO_WAKE` when it is done. If the state returned is
    /// InFlight the owner will do so; if it is anything else there is no owner, and the caller must
    /// act on that state itself. `None` if there is no such page.
    pub fn want_wake(&self, page: PageIndex) -> Option<PageState> {
        Some(self.flag(self.cell(page)?, WAKE_WANTED))
    }

    /// Whether the owner of `page` was asked for a wake that it has not given yet. Out of date as soon
    /// as it is told: for tests and for looking at a VM that hangs.
    pub fn is_wake_wanted(&self, page: PageIndex) -> bool {
        self.cell(page)
            .is_some_and(|cell| cell.load(Ordering::Relaxed) & WAKE_WANTED != 0)
    }

    /// Sets `flag` if the cell is InFlight; returns the state seen.
    fn flag(&self, cell: &AtomicU8, flag: u8) -> PageState {
        let mut seen = cell.load(Ordering::Acquire);
        loop {
            if PageState::of(seen) != PageState::InFlight || seen & flag != 0 {
                return PageState::of(seen);
            }
            // AcqRel: the owner's swap that clears the flag must come after what the caller did
            // before it asked (such as queueing a thread that has to be woken).
            match cell.compare_exchange_weak(seen, seen | flag, Ordering::AcqRel, Ordering::Acquire)
            {
                Ok(_) => return PageState::InFlight,
                Err(changed) => seen = changed,
            }
        }
    }

    /// Waits until `page` is not InFlight, or `timeout` has passed (then it returns InFlight).
    /// `None` if there is no such page.
    pub fn wait(&self, page: PageIndex, timeout: Duration) -> Option<PageState> {
        let cell = self.cell(page)?;
        let deadline = Instant::now().checked_add(timeout);
        let mut shard = self.parking.lock(page);
        // The flag is set under the shard's lock, and the owner takes that lock before it notifies:
        // so it finds this thread either not flagged yet or already asleep.
        while self.flag(cell, WAITERS) == PageState::InFlight {
            let left = deadline.map_or(timeout, |at| at.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return Some(PageState::InFlight);
            }
            shard.sleep(left);
        }
        self.state(page)
    }

    /// The guest gave up the content of `page`: its next touch reads zeroes.
    pub fn remove(&self, page: PageIndex) -> Removal {
        self.settle_unowned(page, REMOVED)
    }

    /// An uncorrected error took the content of `page`.
    pub fn poison(&self, page: PageIndex) -> Removal {
        self.settle_unowned(page, POISONED)
    }

    fn settle_unowned(&self, page: PageIndex, to: u8) -> Removal {
        let Some(cell) = self.cell(page) else {
            return Removal::Outside;
        };
        let mut seen = cell.load(Ordering::Acquire);
        loop {
            match PageState::of(seen) {
                PageState::InFlight => return Removal::InFlight,
                PageState::Poisoned => return Removal::Poisoned,
                before => {
                    match cell.compare_exchange_weak(seen, to, Ordering::AcqRel, Ordering::Acquire)
                    {
                        Ok(_) => return Removal::Done(before),
                        Err(changed) => seen = changed,
                    }
                }
            }
        }
    }

    /// Makes every page Absent again, for another run over emptied memory. The caller has stopped
    /// everything that resolves faults; if a page is InFlight after all, it and what follows it is
    /// left as it is.
    pub fn reset(&self) -> Result<(), ResetError> {
        for (index, cell) in self.cells.iter().enumerate() {
            let mut seen = cell.load(Ordering::Acquire);
            while seen != ABSENT {
                if PageState::of(seen) == PageState::InFlight {
                    return Err(ResetError {
                        page: PageIndex(to_u64(index)),
                    });
                }
                match cell.compare_exchange_weak(seen, ABSENT, Ordering::AcqRel, Ordering::Acquire)
                {
                    Ok(_) => break,
                    Err(changed) => seen = changed,
                }
            }
        }
        Ok(())
    }

    /// How many pages are in which state. Looks at one page after the other, so the sum over a map
    /// in use is of no single moment.
    pub fn counts(&self) -> StateCounts {
        let mut counts = StateCounts::default();
        for cell in &self.cells {
            let count = match PageState::of(cell.load(Ordering::Relaxed)) {
                PageState::Absent => &mut counts.absent,
                PageState::InFlight => &mut counts.in_flight,
                PageState::Present => &mut counts.present,
                PageState::Zero => &mut counts.zero,
                PageState::Removed => &mut counts.removed,
                PageState::Poisoned => &mut counts.poisoned,
            };
            *count += 1;
        }
        counts
    }

    /// The owner's way out of InFlight. Says whether a userfaultfd reader asked for a wake.
    #[inline]
    fn leave_in_flight(&self, page: PageIndex, to: u8) -> bool {
        let Some(cell) = self.cell(page) else {
            return false;
        };
        // Release: whoever sees the new state sees what the owner did before. Acquire: the owner
        // sees what those did who asked to be told.
        let before = cell.swap(to, Ordering::AcqRel);
        debug_assert_eq!(
            PageState::of(before),
            PageState::InFlight,
            "page {page} has no owner"
        );
        if before & WAITERS != 0 {
            self.parking.notify(page);
        }
        before & WAKE_WANTED != 0
    }
}

#[cfg(test)]
mod tests;
