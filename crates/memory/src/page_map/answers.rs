//! Results of page map operations.

use thiserror::Error;

use super::cell::PageState;
use super::claim::ClaimGuard;
use crate::page::{PageIndex, PageRange};

/// The result of a claim.
#[derive(Debug)]
pub enum Claim<'map> {
    /// The caller now owns these pages and must finish or abandon them.
    Won(ClaimGuard<'map>),
    /// Another thread owns the page, or the page is settled: its state at that moment.
    Lost(PageState),
    /// The map has no such page.
    Outside,
}

/// The result of [`PageMap::pend_run`](super::PageMap::pend_run).
#[must_use = "pages that became Pending stay so until they are taken out of the book"]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pend {
    /// These pages, including the given one, were Absent and are now Pending.
    Made(PageRange),
    /// The page's state, in which it stays.
    Lost(PageState),
    /// The map has no such page.
    Outside,
}

/// The result of removing or poisoning a page.
#[must_use = "a page that is Installing is neither removed nor poisoned"]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Removal {
    /// Done.
    Done {
        /// The page's state before. If it was Pending, the caller takes its entry out of the book, and wakes the
        /// threads that sleep on it.
        before: PageState,
    },
    /// A thread is installing the page. Wait for it ([`PageMap::wait`](super::PageMap::wait)) and try
    /// again.
    Installing,
    /// The page is poisoned and remains so.
    Poisoned,
    /// The map has no such page.
    Outside,
}

/// Why a page map could not be created.
#[derive(Debug, Error)]
pub enum PageMapError {
    /// The allocation of one byte per page failed.
    #[error("no memory for a map of {pages} pages")]
    OutOfMemory {
        /// The number of pages of the map.
        pages: u64,
    },
    /// The file of the map may shrink, and an access would then raise SIGBUS.
    #[error("the file of a page map is not sealed against shrinking")]
    NotSealed,
    /// The file of the map has fewer bytes.
    #[error(
        "the file of a page map has {file_bytes} bytes, and {pages} at {offset_bytes} are needed"
    )]
    OutsideFile {
        /// The offset of the map's first byte.
        offset_bytes: u64,
        /// The number of pages of the map, which is its number of bytes.
        pages: u64,
        /// The file's length.
        file_bytes: u64,
    },
    /// The file of the map could not be mapped.
    #[error("mapping the file of a page map")]
    Map {
        /// The kernel's error.
        #[source]
        errno: rustix::io::Errno,
    },
    /// The file has a byte that is no state of a page.
    #[error("the file of a page map has the byte {byte:#04x} for page {page}")]
    BadState {
        /// The page.
        page: PageIndex,
        /// The byte.
        byte: u8,
    },
}

/// The number of pages in each state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StateCounts {
    /// Pages that are missing, and that nobody has asked for.
    pub absent: u64,
    /// Missing pages that are in the book of missing pages: requested from a source, or given up for now.
    pub pending: u64,
    /// Pages that a thread is installing.
    pub installing: u64,
    /// Pages with their content.
    pub present: u64,
    /// Pages that map the zero page.
    pub zero: u64,
    /// Pages that the guest discarded.
    pub removed: u64,
    /// Pages lost to an uncorrected error.
    pub poisoned: u64,
}

impl StateCounts {
    pub(super) fn add(&mut self, state: PageState) {
        let count = match state {
            PageState::Absent => &mut self.absent,
            PageState::Pending => &mut self.pending,
            PageState::Installing => &mut self.installing,
            PageState::Present => &mut self.present,
            PageState::Zero => &mut self.zero,
            PageState::Removed => &mut self.removed,
            PageState::Poisoned => &mut self.poisoned,
        };
        *count += 1;
    }
}
