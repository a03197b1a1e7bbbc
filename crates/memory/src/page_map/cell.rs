//! The layout of a page's byte.

use crate::sync::{AtomicU8, Ordering};

/// The bits that hold the state.
pub(super) const STATE: u8 = 0b0000_0111;
/// A thread owns the page and works on it. The state bits still have the state before the claim.
pub(super) const INSTALLING: u8 = 0b0000_1000;
/// A userfaultfd reader left its `UFFDIO_WAKE` to the thread that installs the page.
pub(super) const WAKE_WANTED: u8 = 0b0001_0000;
/// Threads are parked in [`PageMap::wait`](super::PageMap::wait).
pub(super) const WAITERS: u8 = 0b0010_0000;
/// An owner of this missing page died while it installed the page: its content may be there already.
pub(super) const BEGUN: u8 = 0b0100_0000;

// Zero, so that a new map is memory that the kernel has already zeroed.
pub(super) const ABSENT: u8 = 0;
pub(super) const PRESENT: u8 = 1;
pub(super) const ZERO: u8 = 2;
pub(super) const REMOVED: u8 = 3;
pub(super) const POISONED: u8 = 4;
pub(super) const PENDING: u8 = 5;
/// What former versions stored for some of the pages that were requested from a source.
#[cfg(not(loom))]
pub(super) const FORMER_PENDING: u8 = 6;

/// The state of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PageState {
    /// Missing, and not asked for.
    Absent,
    /// Missing, and in the book of missing pages: its content was requested from a source, or could not be had or
    /// installed so far.
    Pending,
    /// A thread owns the page and is installing its content.
    Installing,
    /// Installed with its content.
    Present,
    /// Installed as the shared zero page. A write replaces that by a page of its own, without a pager.
    Zero,
    /// Discarded by the guest: the next access reads zeroes.
    Removed,
    /// Lost to an uncorrected memory error: the next access raises a machine check.
    Poisoned,
}

impl PageState {
    #[inline]
    pub(super) fn of(byte: u8) -> Self {
        if byte & INSTALLING != 0 {
            return Self::Installing;
        }
        match byte & STATE {
            ABSENT => Self::Absent,
            PENDING => Self::Pending,
            PRESENT => Self::Present,
            ZERO => Self::Zero,
            REMOVED => Self::Removed,
            // No other value is ever stored; a corrupted map reads as poison.
            _ => Self::Poisoned,
        }
    }

    /// Whether no content is missing: Present, Zero, Removed or Poisoned.
    #[inline]
    pub const fn is_settled(self) -> bool {
        matches!(
            self,
            Self::Present | Self::Zero | Self::Removed | Self::Poisoned
        )
    }

    /// Whether a thread or a source is to deliver the page: Pending or Installing.
    #[inline]
    pub(super) const fn is_pending(self) -> bool {
        matches!(self, Self::Pending | Self::Installing)
    }

    /// Whether a thread that has the content may claim the page: Absent or Pending.
    #[inline]
    pub(super) const fn is_claimable(self) -> bool {
        matches!(self, Self::Absent | Self::Pending)
    }
}

/// The states in which an owner may leave a page after success.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Settled {
    /// Content is installed.
    Present,
    /// The shared zero page is installed.
    Zero,
    /// The source reports that the content is lost.
    Poisoned,
}

impl Settled {
    #[inline]
    pub(super) fn byte(self) -> u8 {
        match self {
            Self::Present => PRESENT,
            Self::Zero => ZERO,
            Self::Poisoned => POISONED,
        }
    }
}

/// Replaces the byte in `cell` by the result of `next`; repeats this until it succeeds or `next`
/// returns `None`. `Ok` has the replaced byte, `Err` the byte that `next` refused.
///
/// The first attempt assumes the byte `guess`: a caller that knows the usual value saves a load.
#[inline]
pub(super) fn update(
    cell: &AtomicU8,
    guess: u8,
    next: impl Fn(u8) -> Option<u8>,
) -> Result<u8, u8> {
    let mut seen = guess;
    loop {
        let Some(new) = next(seen) else {
            return Err(seen);
        };
        // Release: a thread that sees the new byte sees the caller's earlier writes, such as content or
        // a queued thread that must be woken. Acquire: the caller sees the writes of those that changed
        // the byte before; the last owner may have written a part of a page and given up.
        match cell.compare_exchange(seen, new, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => return Ok(seen),
            Err(changed) => seen = changed,
        }
    }
}
