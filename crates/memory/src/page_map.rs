//! The page map: one atomic state per page, and the rules by which it changes.

mod answers;
mod cell;
mod cells;
mod claim;
mod image;
#[cfg(not(loom))]
mod map_file;
mod parking;

use std::time::{Duration, Instant};

use crate::convert::to_u64;
use crate::page::{PageIndex, PageRange};
use crate::sync::{AtomicU8, Ordering};
use cell::{
    ABSENT, BEGUN, INSTALLING, PENDING, POISONED, REMOVED, STATE, WAITERS, WAKE_WANTED, update,
};
use cells::Cells;
use parking::Parking;

pub use answers::{Claim, PageMapError, Pend, Removal, StateCounts};
pub use cell::{PageState, Settled};
pub use claim::{ClaimGuard, WakeWanted};
pub use image::{ImportError, PageMapImage};
#[cfg(not(loom))]
pub use map_file::MapFile;

/// One atomic state per page of a region.
///
/// | from | to | by | meaning |
/// |---|---|---|---|
/// | Absent | Pending | [`Self::pend_run`] | the book of missing pages has an entry for the page |
/// | Pending, also below Installing | Absent | [`Self::unpend`] | the entry was withdrawn |
/// | Absent, Pending | Installing | [`Self::claim_run`], [`Self::claim_arrived`] | one thread has the content and owns the page |
/// | Installing | Present | [`ClaimGuard::finish`] | content is installed |
/// | Installing | Zero | [`ClaimGuard::finish`] | the zero page is installed |
/// | Installing | Poisoned | [`ClaimGuard::finish`] | the source reports that the content is lost |
/// | Installing | Absent or Pending, as claimed | [`ClaimGuard::abandon`], [`MissingPages::put_back`](crate::MissingPages::put_back) | the owner failed; others may claim |
/// | Installing | Pending | [`MissingPages::keep`](crate::MissingPages::keep) | the owner has ended without a result, and a thread sleeps on the page |
/// | Absent, Pending, Present, Zero, Removed | Removed | [`Self::remove`] | the guest discarded the content |
/// | Absent, Pending, Present, Zero, Removed | Poisoned | [`Self::poison`] | an uncorrected error destroyed the content, now or before the VM was restored |
/// | Absent | Present, Zero, Removed, Poisoned | [`Self::import`] | a predecessor had settled the page |
///
/// There is no other edge. Only the owner of an Installing page changes its state, so no other thread
/// can take the page meanwhile. An entry in the book does not own its page: the thread that has the content
/// first claims the page, and later content finds the page settled. A poisoned page stays poisoned.
/// `docs/design/poison.md` describes when each edge to Poisoned is taken.
///
/// Who asks for a page, and what was done about it, is in the book ([`MissingPages`](crate::MissingPages)), and
/// nowhere else. Pending says that the book, or the claim that has taken the page from it, has an entry. The edges
/// between Absent and Pending are therefore taken under the lock of the book alone.
///
/// Two more bits are set by threads that find a page which somebody else is to deliver. *Wake wanted* is set on
/// Installing pages only: a userfaultfd reader must not block, so it leaves its `UFFDIO_WAKE` to the page's owner,
/// to whom each end of the claim returns the bit. *Waiters* is set on Pending and Installing pages: threads are
/// parked in [`Self::wait`], and each edge to another state, and each end of a claim, notifies them. Both bits are
/// in the same byte as the state. A claim and a finish are therefore one atomic operation each when no thread
/// waits, and no bit can be set unnoticed between the owner's load and its store.
///
/// One more bit of a missing page says that an owner died while it installed the page
/// ([`Self::was_begun`]). Each edge between Absent, Pending and Installing retains it, and all others clear it.
#[derive(Debug)]
pub struct PageMap {
    cells: Cells,
    parking: Parking,
}

impl PageMap {
    /// Creates a map of `pages` pages, all Absent. Takes one byte per page, where pages are touched.
    pub fn new(pages: u64) -> Result<Self, PageMapError> {
        Ok(Self {
            cells: Cells::new(pages)?,
            parking: Parking::default(),
        })
    }

    /// Uses `pages` bytes of a memfd, from `offset_bytes` on, as the map, so that it outlives this process. Pages
    /// that the file has as settled (Present, Zero, Removed, Poisoned) stay so; all others become Absent, because
    /// whoever requested or installed them has gone. Where somebody was installing a page, [`Self::was_begun`] is true.
    /// A new file is a map of Absent pages.
    ///
    /// One map at a time may use the bytes.
    ///
    /// # Errors
    /// [`PageMapError`]: the file is too short, or has a byte that is no state.
    #[cfg(not(loom))]
    pub fn in_file(
        file: &std::sync::Arc<MapFile>,
        offset_bytes: u64,
        pages: u64,
    ) -> Result<Self, PageMapError> {
        Ok(Self {
            cells: Cells::in_file(file, offset_bytes, pages)?,
            parking: Parking::default(),
        })
    }

    /// The number of pages.
    pub fn pages(&self) -> u64 {
        to_u64(self.cells.len())
    }

    #[inline]
    fn cell(&self, page: PageIndex) -> Option<&AtomicU8> {
        self.cells.get(page.as_usize())
    }

    /// The part of `pages` that is in the map.
    #[inline]
    fn within(&self, pages: PageRange) -> PageRange {
        pages.intersection(PageRange::new(PageIndex(0), self.pages()))
    }

    /// The part of `pages` that is in the map, with the cells.
    fn cells(&self, pages: PageRange) -> impl Iterator<Item = (PageIndex, &AtomicU8)> {
        let pages = self.within(pages);
        let first = pages.first().as_usize().min(self.cells.len());
        pages.iter().zip(&self.cells[first..])
    }

    /// The state of `page` at this moment; `None` if there is no such page.
    #[inline]
    pub fn state(&self, page: PageIndex) -> Option<PageState> {
        // Acquire: a thread that sees Present also sees what the installer wrote before it.
        Some(PageState::of(self.cell(page)?.load(Ordering::Acquire)))
    }

    /// Whether a former owner of the map ([`Self::in_file`]) died while it installed `page`, and nobody has
    /// settled the page since: its content may be there already.
    pub fn was_begun(&self, page: PageIndex) -> bool {
        self.cell(page)
            .is_some_and(|cell| cell.load(Ordering::Relaxed) & BEGUN != 0)
    }

    /// The first of `pages` that is Absent, Pending or Installing, with its state: a page whose
    /// content is, or may become, missing. The result may be out of date on return.
    pub fn next_unsettled(&self, pages: PageRange) -> Option<(PageIndex, PageState)> {
        self.cells(pages)
            .map(|(page, cell)| (page, PageState::of(cell.load(Ordering::Relaxed))))
            .find(|(_, state)| !state.is_settled())
    }

    /// The first of `pages` that is Absent. The result may be out of date on return.
    pub fn next_absent(&self, pages: PageRange) -> Option<PageIndex> {
        self.cells(pages)
            .find(|(_, cell)| PageState::of(cell.load(Ordering::Relaxed)) == PageState::Absent)
            .map(|(page, _)| page)
    }

    /// The first of `pages` that a thread is installing. The result may be out of date on return.
    pub fn next_installing(&self, pages: PageRange) -> Option<PageIndex> {
        self.cells(pages)
            .find(|(_, cell)| cell.load(Ordering::Relaxed) & INSTALLING != 0)
            .map(|(page, _)| page)
    }

    /// Claims `page`, whose content is available, if it is Absent or Pending, together with the
    /// Absent pages of `window` that form a run with it.
    #[inline]
    pub fn claim_run(&self, page: PageIndex, window: PageRange) -> Claim<'_> {
        let Some(cell) = self.cell(page) else {
            return Claim::Outside;
        };
        match update(cell, ABSENT, claimed) {
            Ok(before) => {
                let run = self.grow(page, window, claimed_absent);
                Claim::Won(ClaimGuard::new(self, run, is_entered(before)))
            }
            Err(found) => Claim::Lost(PageState::of(found)),
        }
    }

    /// Claims the first run of `pages` that is Absent or Pending, for content that has arrived.
    /// `None` if there is none. The caller installs the claimed run and continues after it.
    pub fn claim_arrived(&self, pages: PageRange) -> Option<ClaimGuard<'_>> {
        let mut first = None;
        let mut count = 0;
        let mut has_pending = false;
        for (page, cell) in self.cells(pages) {
            let seen = cell.load(Ordering::Relaxed);
            if let Ok(before) = update(cell, seen, claimed) {
                first.get_or_insert(page);
                count += 1;
                has_pending |= is_entered(before);
            } else if first.is_some() {
                break;
            }
        }
        let run = PageRange::new(first?, count);
        Some(ClaimGuard::new(self, run, has_pending))
    }

    /// Makes `page` Pending if it is Absent, together with the Absent pages of `window` that form a run with it.
    /// The caller has the book of missing pages locked, and enters them there before it unlocks it.
    pub fn pend_run(&self, page: PageIndex, window: PageRange) -> Pend {
        let Some(cell) = self.cell(page) else {
            return Pend::Outside;
        };
        let pended = |seen: u8| {
            (PageState::of(seen) == PageState::Absent).then_some(seen & !STATE | PENDING)
        };
        match update(cell, ABSENT, pended) {
            Ok(_) => Pend::Made(self.grow(page, window, pended)),
            Err(found) => Pend::Lost(PageState::of(found)),
        }
    }

    /// Changes the neighbours of `page` in both directions, up to the first that `next` refuses and
    /// within `window`. Returns the changed run, including `page`.
    #[inline]
    fn grow(
        &self,
        page: PageIndex,
        window: PageRange,
        next: impl Fn(u8) -> Option<u8>,
    ) -> PageRange {
        if window.count() <= 1 || !window.contains(page) {
            return PageRange::single(page);
        }
        let window = self.within(window);
        let cells = |first: PageIndex, end: PageIndex| {
            let cells = self.cells.get(first.as_usize()..end.as_usize());
            cells.unwrap_or_default().iter()
        };
        let is_taken = |cell: &&AtomicU8| update(cell, ABSENT, &next).is_ok();
        let below = cells(window.first(), page).rev().take_while(is_taken);
        let below = to_u64(below.count());
        let above = cells(PageIndex(page.0 + 1), window.end()).take_while(is_taken);
        PageRange::new(PageIndex(page.0 - below), below + 1 + to_u64(above.count()))
    }

    /// Makes those of `pages` Absent that are Pending. The caller has the book of missing pages locked, and has
    /// taken their entries out. Parked threads resume and find the page Absent. A page that was claimed meanwhile, by
    /// an owner who will not find the entry any more, returns to Absent if it is given back.
    pub fn unpend(&self, pages: PageRange) {
        for (page, cell) in self.cells(pages) {
            let next = |seen: u8| {
                let kept = match seen & INSTALLING {
                    0 => BEGUN,
                    _ => !STATE,
                };
                is_entered(seen).then_some(ABSENT | seen & kept)
            };
            if let Ok(before) = update(cell, cell.load(Ordering::Relaxed), next)
                && before & INSTALLING == 0
            {
                self.notify_if_parked(page, before);
            }
        }
    }

    /// Leaves the `UFFDIO_WAKE` for `page` to the thread that installs it. This succeeds if the
    /// returned state is Installing. For any other state no thread will issue the wake-up, and the caller
    /// must handle that state itself. `None` if there is no such page.
    pub fn want_wake(&self, page: PageIndex) -> Option<PageState> {
        let is_owned = |state| state == PageState::Installing;
        Some(flag(self.cell(page)?, WAKE_WANTED, is_owned))
    }

    /// Whether a wake-up for `page` was left to its owner. The result may be out of date on return: for tests and
    /// for the diagnosis of a VM that hangs.
    pub fn is_wake_wanted(&self, page: PageIndex) -> bool {
        self.cell(page)
            .is_some_and(|cell| cell.load(Ordering::Relaxed) & WAKE_WANTED != 0)
    }

    /// Waits until `page` is neither Pending nor Installing, or `timeout` has passed, and returns its
    /// state. The wait ends early, with any state, when [`Self::notify_all`] wakes all threads and when
    /// an owner gives a pending page back; callers therefore loop. `None` if there is no such page.
    pub fn wait(&self, page: PageIndex, timeout: Duration) -> Option<PageState> {
        self.wait_since(page, self.epoch(), timeout)
    }

    /// The number of calls of [`Self::notify_all`] so far, for [`Self::wait_since`].
    pub fn epoch(&self) -> u64 {
        self.parking.epoch()
    }

    /// As [`Self::wait`], but returns at once if [`Self::notify_all`] was called since `epoch` was
    /// read. A thread that reads the epoch, then checks whether to stop, then waits, cannot miss a stop
    /// flag that is set before the notification.
    pub fn wait_since(&self, page: PageIndex, epoch: u64, timeout: Duration) -> Option<PageState> {
        self.wait_while(page, epoch, timeout, PageState::is_pending)
    }

    /// Waits until nobody owns `page`, or `timeout` has passed, and returns its state: as [`Self::wait`], but not for a
    /// page that is Pending.
    pub fn wait_for_owner(&self, page: PageIndex, timeout: Duration) -> Option<PageState> {
        let is_owned = |state| state == PageState::Installing;
        self.wait_while(page, self.epoch(), timeout, is_owned)
    }

    fn wait_while(
        &self,
        page: PageIndex,
        epoch: u64,
        timeout: Duration,
        is_it: impl Fn(PageState) -> bool,
    ) -> Option<PageState> {
        let cell = self.cell(page)?;
        let deadline = Instant::now().checked_add(timeout);
        let mut shard = self.parking.lock(page);
        let mut owned = false;
        loop {
            // The flag is set under the shard's lock, and a thread that clears it takes that lock
            // before it notifies: it finds this thread either without the flag or already asleep. The
            // same holds for the epoch.
            let state = flag(cell, WAITERS, &is_it);
            let given_back = owned && state != PageState::Installing;
            if !is_it(state) || given_back || self.parking.epoch() != epoch {
                return Some(state);
            }
            owned = state == PageState::Installing;
            let left = deadline.map_or(timeout, |at| at.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return Some(state);
            }
            shard.sleep(left);
        }
    }

    /// Wakes every thread that is parked in this map, so that it checks its condition again: used when
    /// a pager stops.
    pub fn notify_all(&self) {
        self.parking.notify_all();
    }

    /// The guest discarded the content of `page`: the next access reads zeroes.
    pub fn remove(&self, page: PageIndex) -> Removal {
        self.settle_unowned(page, REMOVED)
    }

    /// An uncorrected error destroyed the content of `page`.
    pub fn poison(&self, page: PageIndex) -> Removal {
        self.settle_unowned(page, POISONED)
    }

    fn settle_unowned(&self, page: PageIndex, to: u8) -> Removal {
        let Some(cell) = self.cell(page) else {
            return Removal::Outside;
        };
        let next = |seen: u8| match PageState::of(seen) {
            PageState::Installing | PageState::Poisoned => None,
            _ => Some(to),
        };
        match update(cell, cell.load(Ordering::Acquire), next) {
            Ok(before) => {
                self.notify_if_parked(page, before);
                Removal::Done {
                    before: PageState::of(before),
                }
            }
            Err(found) if found & INSTALLING != 0 => Removal::Installing,
            Err(_) => Removal::Poisoned,
        }
    }

    /// The number of pages in each state. Reads one page after the other; in a map that is in use, the
    /// sum belongs to no single moment.
    pub fn counts(&self) -> StateCounts {
        let mut counts = StateCounts::default();
        for cell in self.cells.iter() {
            counts.add(PageState::of(cell.load(Ordering::Relaxed)));
        }
        counts
    }

    /// The owner's transition to a settled state. Returns whether a wake-up was left to the owner.
    #[inline]
    fn settle_owned(&self, pages: PageRange, to: u8) -> bool {
        let settle = |page, cell: &AtomicU8| {
            // Release: a thread that sees the new state sees the owner's earlier writes. Acquire: the
            // owner sees the writes of the threads that left a wake-up or wait.
            let before = cell.swap(to, Ordering::AcqRel);
            debug_assert!(before & INSTALLING != 0, "page {page} has no owner");
            self.notify_if_parked(page, before);
            before & WAKE_WANTED != 0
        };
        if pages.count() == 1 {
            let page = pages.first();
            return self.cell(page).is_some_and(|cell| settle(page, cell));
        }
        let cells = self.cells(pages);
        cells.fold(false, |wanted, (page, cell)| settle(page, cell) | wanted)
    }

    /// The owner restores the state from before the claim; but with `keeps`, a page on which a thread sleeps
    /// becomes Pending. Returns the state, and whether a wake-up was left to the owner.
    fn give_back(&self, page: PageIndex, keeps: bool) -> (PageState, bool) {
        let Some(cell) = self.cell(page) else {
            return (PageState::Absent, false);
        };
        let next = |seen: u8| {
            let free = seen & !(INSTALLING | WAITERS | WAKE_WANTED);
            match keeps && seen & WAKE_WANTED != 0 {
                true => free & !STATE | PENDING,
                false => free,
            }
        };
        let guess = cell.load(Ordering::Relaxed);
        let (Ok(before) | Err(before)) = update(cell, guess, |seen| Some(next(seen)));
        debug_assert!(before & INSTALLING != 0, "page {page} has no owner");
        self.notify_if_parked(page, before);
        (PageState::of(next(before)), before & WAKE_WANTED != 0)
    }

    #[inline]
    fn notify_if_parked(&self, page: PageIndex, before: u8) {
        if before & WAITERS != 0 {
            self.parking.notify(page);
        }
    }
}

/// The byte of a page that is claimed because its content is available.
#[inline]
fn claimed(seen: u8) -> Option<u8> {
    PageState::of(seen)
        .is_claimable()
        .then_some(seen | INSTALLING)
}

/// The same for a neighbour that was not requested.
#[inline]
fn claimed_absent(seen: u8) -> Option<u8> {
    (PageState::of(seen) == PageState::Absent).then_some(seen | INSTALLING)
}

/// Whether a page is Pending, or was before it was claimed.
#[inline]
fn is_entered(byte: u8) -> bool {
    byte & STATE == PENDING
}

/// Sets `flag` if the page is in such a state; returns the observed state.
fn flag(cell: &AtomicU8, flag: u8, is_it: impl Fn(PageState) -> bool) -> PageState {
    let next = |seen: u8| (is_it(PageState::of(seen)) && seen & flag == 0).then_some(seen | flag);
    let (Ok(seen) | Err(seen)) = update(cell, cell.load(Ordering::Acquire), next);
    PageState::of(seen)
}

#[cfg(test)]
#[cfg(loom)]
mod loom_tests;
#[cfg(test)]
#[cfg(not(loom))]
mod tests;
