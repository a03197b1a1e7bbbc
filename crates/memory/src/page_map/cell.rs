//! What is in a page's byte.

/// The bits that hold the state.
const STATE: u8 = 0b0000_1111;
/// A userfaultfd reader left its `UFFDIO_WAKE` to the owner. Only with IN_FLIGHT.
pub(super) const WAKE_WANTED: u8 = 0b0001_0000;
/// Threads are parked until the owner is done. Only with IN_FLIGHT.
pub(super) const WAITERS: u8 = 0b0010_0000;

// Zero, so that a new map is memory that the kernel has zeroed already.
pub(super) const ABSENT: u8 = 0;
pub(super) const IN_FLIGHT: u8 = 1;
pub(super) const PRESENT: u8 = 2;
pub(super) const ZERO: u8 = 3;
pub(super) const REMOVED: u8 = 4;
pub(super) const POISONED: u8 = 5;

/// Where a page is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PageState {
    /// Not there: its content is still at the source.
    Absent,
    /// A thread owns bringing it in.
    InFlight,
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
        match byte & STATE {
            ABSENT => Self::Absent,
            IN_FLIGHT => Self::InFlight,
            PRESENT => Self::Present,
            ZERO => Self::Zero,
            REMOVED => Self::Removed,
            // No other value is ever stored; poison is what a map gone wrong should look like.
            _ => Self::Poisoned,
        }
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
