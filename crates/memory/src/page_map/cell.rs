//! What is in a page's byte.

use crate::sync::{AtomicU8, Ordering};

/// The bits that hold the state.
pub(super) const STATE: u8 = 0b0000_0111;
/// A thread owns the page and is at work on it. The state bits still say what the page was before.
pub(super) const INSTALLING: u8 = 0b0000_1000;
/// A userfaultfd reader left its `UFFDIO_WAKE` to whoever installs the page.
pub(super) const WAKE_WANTED: u8 = 0b0001_0000;
/// Threads are parked in [`PageMap::wait`](super::PageMap::wait).
pub(super) const WAITERS: u8 = 0b0010_0000;
/// Both requests of those who came too late.
pub(super) const FLAGS: u8 = WAKE_WANTED | WAITERS;

// Zero, so that a new map is memory that the kernel has zeroed already.
pub(super) const ABSENT: u8 = 0;
pub(super) const PRESENT: u8 = 1;
pub(super) const ZERO: u8 = 2;
pub(super) const REMOVED: u8 = 3;
pub(super) const POISONED: u8 = 4;
pub(super) const REQUESTED_BULK: u8 = 5;
pub(super) const REQUESTED_URGENT: u8 = 6;

/// How soon the content of a page is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Urgency {
    /// Nobody has touched the page yet: prefetch.
    Bulk,
    /// A thread waits for it.
    Urgent,
}

impl Urgency {
    #[inline]
    pub(super) fn byte(self) -> u8 {
        match self {
            Self::Bulk => REQUESTED_BULK,
            Self::Urgent => REQUESTED_URGENT,
        }
    }
}

/// Where a page is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PageState {
    /// Not there, and nobody has asked for its content.
    Absent,
    /// Not there; a source was asked for its content.
    Requested(Urgency),
    /// A thread owns the page and is installing its content.
    Installing,
    /// There, with its content.
    Present,
    /// There, as the shared zero page. A write makes a page of it without a pager's help.
    Zero,
    /// Given up by the guest: the next touch reads zeroes.
    Removed,
    /// Lost to an uncorrected memory error: the next touch is a machine check.
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
            REQUESTED_BULK => Self::Requested(Urgency::Bulk),
            REQUESTED_URGENT => Self::Requested(Urgency::Urgent),
            PRESENT => Self::Present,
            ZERO => Self::Zero,
            REMOVED => Self::Removed,
            // No other value is ever stored; poison is what a map gone wrong should look like.
            _ => Self::Poisoned,
        }
    }

    /// Whether there is nothing to bring in: Present, Zero, Removed or Poisoned.
    #[inline]
    pub const fn is_settled(self) -> bool {
        matches!(
            self,
            Self::Present | Self::Zero | Self::Removed | Self::Poisoned
        )
    }

    /// Whether somebody is expected to bring the page in: Requested or Installing.
    #[inline]
    pub(super) const fn is_pending(self) -> bool {
        matches!(self, Self::Requested(_) | Self::Installing)
    }

    /// Whether a thread that has the content may claim the page: Absent or Requested.
    #[inline]
    pub(super) const fn is_claimable(self) -> bool {
        matches!(self, Self::Absent | Self::Requested(_))
    }
}

/// What an owner may leave a page as when it succeeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Settled {
    /// Content is installed.
    Present,
    /// The shared zero page is installed.
    Zero,
    /// The source says that the content is lost.
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

/// Replaces the byte in `cell` by what `next` makes of it, for as long as `next` makes something of
/// it. `Ok` has the byte that was replaced, `Err` the one that `next` refused.
///
/// `guess` is tried first: a caller that knows what the byte usually is saves a load.
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
        // Release: whoever sees the new byte sees what the caller did before, such as writing
        // content or queueing a thread that has to be woken. Acquire: the caller sees what those did
        // who changed the byte before; the last owner may have written part of a page and given up.
        match cell.compare_exchange(seen, new, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => return Ok(seen),
            Err(changed) => seen = changed,
        }
    }
}
