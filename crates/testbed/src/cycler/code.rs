//! The cycler's machine code, and the words that it and the host share.

/// A word of a vCPU's parameter page, by its offset, beside those of every payload.
#[derive(Clone, Copy, Debug)]
#[repr(u64)]
pub(super) enum Word {
    /// Address of the first page of this vCPU's part.
    First = 1040,
    /// Words read, compared and written so far.
    Words = 2056,
    /// The page of this round that comes next.
    Page = 2104,
}

#[cfg(target_arch = "x86_64")]
mod imp {
    use std::ops::Range;

    use super::Word;
    use crate::endless::{self, CODE, CONTROL};
    use crate::guest::{PORT, Report};

    core::arch::global_asm!(
        include_str!("cycle.s"),
        PORT = const PORT,
        DONE = const Report::Done as u32,
        CONTROL = const CONTROL,
        STOP = const endless::Control::Stop as u64,
        TABLE = const endless::Word::Table as u64,
        COUNT = const endless::Word::Count as u64,
        STEPS = const endless::Word::Steps as u64,
        ROUNDS = const endless::Word::Rounds as u64,
        WRONG = const endless::Word::Wrong as u64,
        WRONG_GPA = const endless::Word::WrongGpa as u64,
        WRONG_FOUND = const endless::Word::WrongFound as u64,
        WRONG_EXPECTED = const endless::Word::WrongExpected as u64,
        FIRST = const Word::First as u64,
        WORDS = const Word::Words as u64,
        PAGE = const Word::Page as u64,
    );

    #[allow(non_upper_case_globals, reason = "the assembler's names")]
    mod symbols {
        unsafe extern "C" {
            pub(super) static pagetide_cycler_start: u8;
            pub(super) static pagetide_cycler_touches: u8;
            pub(super) static pagetide_cycler_touched: u8;
            pub(super) static pagetide_cycler_lost: u8;
            pub(super) static pagetide_cycler_end: u8;
        }
    }

    /// The code; its first byte is the entry.
    pub(in super::super) fn code() -> &'static [u8] {
        let start = &raw const symbols::pagetide_cycler_start;
        let end = &raw const symbols::pagetide_cycler_end;
        // SAFETY: cycle.s places start before end in one section of read-only data, which is
        // initialised and lives as long as the program.
        unsafe { std::slice::from_raw_parts(start, end.addr() - start.addr()) }
    }

    /// Where in the guest a symbol of the code is.
    fn place(symbol: *const u8) -> u64 {
        let start = &raw const symbols::pagetide_cycler_start;
        CODE + (symbol.addr() - start.addr()) as u64
    }

    /// The instructions that touch data memory.
    pub(in super::super) fn touches() -> Range<u64> {
        place(&raw const symbols::pagetide_cycler_touches)
            ..place(&raw const symbols::pagetide_cycler_touched)
    }

    /// Where a vCPU goes on that has lost the page under its access.
    pub(in super::super) fn after_loss() -> u64 {
        place(&raw const symbols::pagetide_cycler_lost)
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod imp {
    use std::ops::Range;

    /// There is none; no machine is built, either.
    pub(in super::super) fn code() -> &'static [u8] {
        &[]
    }

    pub(in super::super) fn touches() -> Range<u64> {
        0..0
    }

    pub(in super::super) fn after_loss() -> u64 {
        0
    }
}

pub(super) use imp::{after_loss, code, touches};

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;
    use crate::endless::{CODE, CODE_BYTES};

    #[test]
    fn code_fits_and_loss_is_expected_within_it() {
        let bytes = code().len() as u64;
        assert!((1..=CODE_BYTES).contains(&bytes), "{bytes} bytes");
        let touches = touches();
        assert!(CODE < touches.start && touches.start < touches.end);
        assert!(touches.end < after_loss() && after_loss() < CODE + bytes);
    }
}
