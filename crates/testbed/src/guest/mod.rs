//! The guest's code, and what it and the host tell each other.

#[cfg(target_arch = "x86_64")]
mod code;

#[cfg(target_arch = "x86_64")]
pub(crate) use code::{code, vectors_offset};

/// The I/O port of the guest's reports ("PG"); the value says which one.
pub(crate) const PORT: u16 = 0x5047;

/// What the guest writes to [`PORT`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Report {
    /// Warm-up is over; the walk starts when the vCPU is entered again.
    Ready = 1,
    /// Every page of the walk has been touched.
    Done = 2,
    /// The processor raised an exception, which the guest never expects.
    Exception = 3,
    /// The page whose address is in rsi is touched when the vCPU is entered again.
    Step = 4,
}

impl Report {
    pub(crate) fn decode(data: u32) -> Option<Self> {
        [Report::Ready, Report::Done, Report::Exception, Report::Step]
            .into_iter()
            .find(|report| *report as u32 == data)
    }
}

/// What the guest does with each page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub(crate) enum Mode {
    Read = 0,
    Write = 1,
    Spin = 2,
    Step = 3,
}

/// The words of a vCPU's parameter page, by position; each has 8 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub(crate) enum Field {
    /// gpa of the range to walk.
    Base,
    /// Pages in it.
    Pages,
    /// Bytes from one page to the next.
    StrideBytes,
    /// The permutation, see `order.rs`.
    Mask,
    MultiplierA,
    Shift,
    MultiplierB,
    /// [`Mode`].
    Mode,
    /// The content to expect or to write, see `pattern.rs`.
    Seed,
    /// `pattern::MULTIPLIER`, or 0 to expect zeroes.
    PatternMultiplier,
    /// gpa and length of the latency log.
    Log,
    LogBytes,
    /// gpa and length of the page tables, for the warm-up.
    Tables,
    TablesBytes,
    /// From here on, the guest writes. Pages touched so far:
    Touched,
    /// Pages whose first word was not the expected one, and the first of them.
    Mismatches,
    BadGpa,
    BadFound,
    BadExpected,
    /// The exception, if there was one.
    ExceptionVector,
    ExceptionErrorCode,
    ExceptionRip,
    ExceptionCr2,
}

impl Field {
    /// Bytes from the start of the parameter page.
    pub(crate) const fn offset(self) -> usize {
        self as usize * 8
    }
}
