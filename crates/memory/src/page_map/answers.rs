//! What the page map answers.

use std::collections::TryReserveError;

use thiserror::Error;

use super::cell::PageState;
use super::claim::{ClaimGuard, WakeWanted};
use crate::page::{PageIndex, PageRange};

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

/// The answer to a request.
#[must_use = "pages that became Requested stay so until somebody asks the source for them"]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// These pages, the one asked for among them, were Absent and are Requested now: ask the source
    /// for them.
    Made(PageRange),
    /// The page was requested in bulk and is requested urgently now: ask the source for this page
    /// again.
    Upgraded,
    /// Nothing to ask for: the page's state at that moment. Requested means at least as urgently.
    Lost(PageState),
    /// The map has no such page.
    Outside,
}

/// What became of a page that should be removed or poisoned.
#[must_use = "a page that is Installing is neither removed nor poisoned"]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Removal {
    /// Done.
    Done {
        /// The state that the page had before.
        before: PageState,
        /// Whether threads are asleep for it in a userfaultfd; the caller wakes them.
        wake: WakeWanted,
    },
    /// A thread is installing the page. Wait for it ([`PageMap::wait`](super::PageMap::wait)) and ask
    /// again.
    Installing,
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

/// A reset was refused: a page is still being installed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("page {page} is still being installed")]
pub struct ResetError {
    /// The first such page.
    pub page: PageIndex,
}

/// How many pages are in which state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StateCounts {
    /// Pages that are not there and were not asked for.
    pub absent: u64,
    /// Pages that a source was asked for.
    pub requested: u64,
    /// Pages that a thread is installing.
    pub installing: u64,
    /// Pages with their content.
    pub present: u64,
    /// Pages that are the zero page.
    pub zero: u64,
    /// Pages that the guest gave up.
    pub removed: u64,
    /// Pages lost to an uncorrected error.
    pub poisoned: u64,
}

impl StateCounts {
    pub(super) fn add(&mut self, state: PageState) {
        let count = match state {
            PageState::Absent => &mut self.absent,
            PageState::Requested(_) => &mut self.requested,
            PageState::Installing => &mut self.installing,
            PageState::Present => &mut self.present,
            PageState::Zero => &mut self.zero,
            PageState::Removed => &mut self.removed,
            PageState::Poisoned => &mut self.poisoned,
        };
        *count += 1;
    }
}
