//! The guests' machine code, and the words that a guest and the host share.
//!
//! Each vCPU has a parameter page, whose address is in rdi, and a table, whose use is the payload's own. The
//! vCPUs that run until they are stopped also read the control page.

use std::ops::Range;

use crate::layout::PAGE;

/// The I/O port of the guest's reports ("PG").
pub(crate) const PORT: u16 = 0x5047;

/// A value that the guest writes to [`PORT`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Report {
    /// Warm-up is over; the walk starts when the vCPU is entered again.
    Ready = 1,
    /// The guest has finished.
    Done = 2,
    /// The processor raised an exception, which no payload expects.
    Exception = 3,
    /// The guest touches the page whose address is in rsi when the vCPU is entered again.
    Step = 4,
}

impl Report {
    pub(crate) fn decode(data: u32) -> Option<Self> {
        [Self::Ready, Self::Done, Self::Exception, Self::Step]
            .into_iter()
            .find(|report| *report as u32 == data)
    }
}

/// What `workload.s` does with each page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub(crate) enum Mode {
    Read = 0,
    Write = 1,
    Spin = 2,
    Step = 3,
}

/// A 64-bit word of the control page, by its number.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Control {
    /// The number of the walkers' window.
    Window,
    /// Not 0: the vCPUs stop soon.
    Stop,
}

/// A 64-bit word of a vCPU's parameter page, by its number. Words that the guest writes all the time are in
/// other cache lines than those that it only reads, and than those that KVM writes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Word {
    // workload.s: the gpa of the range to walk, its pages, and the bytes from one to the next.
    Base,
    Pages,
    StrideBytes,
    // The permutation, see order.rs.
    Mask,
    MultiplierA,
    Shift,
    MultiplierB,
    /// [`Mode`].
    Mode,
    /// The content to expect or to write, see pattern.rs.
    Seed,
    /// `pattern::MULTIPLIER`, or 0 to expect zeroes.
    PatternMultiplier,
    // The gpa and the length of the page tables, for the warm-up.
    Tables,
    TablesBytes,
    // The gpa and the length of the vCPU's table: the latency log of workload.s.
    Table,
    TableBytes,
    /// Entries of the table that a walker or cycler uses.
    Count,
    /// walk.s: the offset of this vCPU's own word in each page.
    Column,
    /// walk.s: nanoseconds of a cycle, times 2^32.
    Scale,
    /// walk.s: 0 to touch nothing, and only read the clock.
    Touch,
    /// cycle.s: the address of the first page of this vCPU's part.
    First,

    // The guest writes these. Steps so far; in workload.s, pages touched.
    Steps = 256,
    /// Rounds so far.
    Rounds,
    // How many words were not as expected, and the first of them.
    Wrong,
    WrongGpa,
    WrongFound,
    WrongExpected,
    // The exception, if there was one.
    ExceptionVector,
    ExceptionErrorCode,
    ExceptionRip,
    ExceptionCr2,
    /// walk.s: the longest stall of this window, in nanoseconds.
    Longest,
    /// cycle.s: words read, compared and written so far.
    Words,
    /// cycle.s: the next page of this round.
    Page,

    /// KVM's steal time structure, whose first word is the stolen time in nanoseconds.
    Steal = 384,
}

impl Word {
    /// Bytes from the start of the parameter page.
    pub(crate) const fn offset(self) -> u64 {
        self as u64 * 8
    }
}

impl Control {
    /// Bytes from the start of the control page.
    pub(crate) const fn offset(self) -> u64 {
        self as u64 * 8
    }
}

const _: () = assert!(Word::Steal.offset().is_multiple_of(64) && Word::Steal.offset() + 64 <= PAGE);

/// Declares a module for machine code: its assembly, its first and last symbol, the symbols in between as
/// offsets from the first, the words and reports that the assembly names, and other constants. On other
/// architectures there is no code, and no machine is made.
macro_rules! payload {
    (
        $(#[$doc:meta])* $module:ident from $source:literal,
        $start:ident .. $end:ident, labels [$($label:ident: $symbol:ident),*],
        words [$($name:ident = $word:ident),*], constants [$($constant:ident = $value:expr),*]
    ) => {
        $(#[$doc])*
        #[cfg(target_arch = "x86_64")]
        pub(crate) mod $module {
            use super::*;

            core::arch::global_asm!(
                include_str!($source),
                PORT = const PORT,
                $($name = const Word::$word.offset(),)*
                $($constant = const $value,)*
            );

            #[allow(non_upper_case_globals, reason = "the assembler's names")]
            mod symbols {
                unsafe extern "C" {
                    pub(super) static $start: u8;
                    pub(super) static $end: u8;
                    $(pub(super) static $symbol: u8;)*
                }
            }

            /// The code; its first byte is the entry.
            pub(crate) fn code() -> &'static [u8] {
                let start = &raw const symbols::$start;
                let end = &raw const symbols::$end;
                // SAFETY: the assembly places start before end in one section of read-only data, which
                // is initialised and lives as long as the program.
                unsafe { std::slice::from_raw_parts(start, end.addr() - start.addr()) }
            }

            $(
                /// Bytes from the start of the code.
                pub(crate) fn $label() -> u64 {
                    let start = &raw const symbols::$start;
                    let label = &raw const symbols::$symbol;
                    (label.addr() - start.addr()) as u64
                }
            )*
        }

        #[cfg(not(target_arch = "x86_64"))]
        pub(crate) mod $module {
            pub(crate) fn code() -> &'static [u8] {
                &[]
            }

            $(
                pub(crate) fn $label() -> u64 {
                    0
                }
            )*
        }
    };
}

#[cfg(target_arch = "x86_64")]
payload! {
    /// The walk of a [`Machine`](crate::Machine), and the exception handler of all payloads.
    workload from "payload/workload.s",
    pagetide_guest_start .. pagetide_guest_end, labels [vectors: pagetide_guest_vectors],
    words [
        BASE = Base, PAGES = Pages, STRIDE_BYTES = StrideBytes, MASK = Mask, MULTIPLIER_A = MultiplierA,
        SHIFT = Shift, MULTIPLIER_B = MultiplierB, MODE = Mode, SEED = Seed,
        PATTERN_MULTIPLIER = PatternMultiplier, LOG = Table, LOG_BYTES = TableBytes, TABLES = Tables,
        TABLES_BYTES = TablesBytes, TOUCHED = Steps, WRONG = Wrong, WRONG_GPA = WrongGpa,
        WRONG_FOUND = WrongFound, WRONG_EXPECTED = WrongExpected, EXCEPTION_VECTOR = ExceptionVector,
        EXCEPTION_ERROR_CODE = ExceptionErrorCode, EXCEPTION_RIP = ExceptionRip,
        EXCEPTION_CR2 = ExceptionCr2
    ],
    constants [
        READY = Report::Ready as u32, DONE = Report::Done as u32, EXCEPTION = Report::Exception as u32,
        STEP = Report::Step as u32, MODE_WRITE = Mode::Write as u64, MODE_SPIN = Mode::Spin as u64,
        MODE_STEP = Mode::Step as u64
    ]
}

payload! {
    /// The walk of [`Walkers`](crate::Walkers).
    walk from "payload/walk.s",
    pagetide_walker_start .. pagetide_walker_end, labels [],
    words [
        TABLE = Table, COUNT = Count, COLUMN = Column, SCALE = Scale, TOUCH = Touch, STEPS = Steps,
        ROUNDS = Rounds, LONGEST = Longest, WRONG = Wrong, WRONG_GPA = WrongGpa, WRONG_FOUND = WrongFound,
        WRONG_EXPECTED = WrongExpected, STEAL = Steal
    ],
    constants [
        DONE = Report::Done as u32, CONTROL = crate::layout::CONTROL, WINDOW = Control::Window.offset(),
        STOP = Control::Stop.offset()
    ]
}

payload! {
    /// The cycle of a [`Cycler`](crate::Cycler).
    cycle from "payload/cycle.s",
    pagetide_cycler_start .. pagetide_cycler_end,
    labels [
        first_touch: pagetide_cycler_touches, end_of_touches: pagetide_cycler_touched,
        after_loss: pagetide_cycler_lost
    ],
    words [
        TABLE = Table, COUNT = Count, FIRST = First, STEPS = Steps, ROUNDS = Rounds, WRONG = Wrong,
        WRONG_GPA = WrongGpa, WRONG_FOUND = WrongFound, WRONG_EXPECTED = WrongExpected, WORDS = Words,
        PAGE = Page
    ],
    constants [
        DONE = Report::Done as u32, CONTROL = crate::layout::CONTROL, STOP = Control::Stop.offset()
    ]
}

/// The instructions of `cycle.s` that touch data memory, as offsets.
pub(crate) fn cycler_touches() -> Range<u64> {
    cycle::first_touch()..cycle::end_of_touches()
}

#[cfg(target_arch = "x86_64")]
#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{CODE, GDT, PAYLOAD, TABLES};

    #[test]
    fn all_code_fits() {
        assert!(workload::code().len() as u64 <= GDT - CODE);
        for code in [walk::code(), cycle::code()] {
            assert!((1..=TABLES - PAYLOAD).contains(&(code.len() as u64)));
        }
    }

    #[test]
    fn there_are_32_stubs_for_exceptions() {
        let stubs = workload::code().len() as u64 - workload::vectors();
        assert_eq!(stubs, 32 * 16);
    }

    #[test]
    fn stubs_push_an_error_code_if_the_processor_does_not() {
        const PUSH_BYTE: u8 = 0x6a;
        let with_error_code = [8, 10, 11, 12, 13, 14, 17, 21, 29, 30];
        let stubs = &workload::code()[usize::try_from(workload::vectors()).expect("small")..];
        for (vector, stub) in stubs.as_chunks::<16>().0.iter().enumerate() {
            let expected: &[u8] = &match u8::try_from(vector).expect("32 vectors") {
                vector if with_error_code.contains(&vector) => vec![PUSH_BYTE, vector],
                vector => vec![PUSH_BYTE, 0, PUSH_BYTE, vector],
            };
            assert!(stub.starts_with(expected), "vector {vector}: {stub:x?}");
        }
    }

    #[test]
    fn the_cycler_loses_memory_only_between_its_labels() {
        let touches = cycler_touches();
        assert!(0 < touches.start && touches.start < touches.end);
        let end = cycle::code().len() as u64;
        assert!(touches.end < cycle::after_loss() && cycle::after_loss() < end);
    }
}
