//! The walker's machine code, and the words that it and the host share.

use crate::layout::PAGE;

/// A word of the page that all vCPUs read, by its offset, beside those of every payload.
#[derive(Clone, Copy, Debug)]
#[repr(u64)]
pub(super) enum Control {
    /// Which window it is.
    Window = 0,
}

/// A word of a vCPU's parameter page, by its offset, beside those of every payload.
#[derive(Clone, Copy, Debug)]
#[repr(u64)]
pub(super) enum Word {
    /// Offset of this vCPU's own word in each page.
    Column = 1040,
    /// Nanoseconds of a cycle, times 2^32.
    Scale = 1048,
    /// 0: touch nothing, only read the clock.
    Touch = 1056,
    /// The longest time that this vCPU was kept in this window, in nanoseconds.
    Longest = 2056,
    /// KVM's steal time structure, whose first word is the time stolen in nanoseconds.
    Steal = 3072,
}

const _: () = assert!((Word::Steal as u64).is_multiple_of(64) && (Word::Steal as u64) + 64 <= PAGE);

#[cfg(target_arch = "x86_64")]
mod imp {
    use super::{Control, Word};
    use crate::endless::{self, CONTROL};
    use crate::guest::{PORT, Report};

    core::arch::global_asm!(
        include_str!("walk.s"),
        PORT = const PORT,
        DONE = const Report::Done as u32,
        CONTROL = const CONTROL,
        WINDOW = const Control::Window as u64,
        STOP = const endless::Control::Stop as u64,
        TABLE = const endless::Word::Table as u64,
        COUNT = const endless::Word::Count as u64,
        COLUMN = const Word::Column as u64,
        SCALE = const Word::Scale as u64,
        TOUCH = const Word::Touch as u64,
        STEPS = const endless::Word::Steps as u64,
        LONGEST = const Word::Longest as u64,
        ROUNDS = const endless::Word::Rounds as u64,
        WRONG = const endless::Word::Wrong as u64,
        WRONG_GPA = const endless::Word::WrongGpa as u64,
        WRONG_FOUND = const endless::Word::WrongFound as u64,
        WRONG_EXPECTED = const endless::Word::WrongExpected as u64,
        STEAL = const Word::Steal as u64,
    );

    #[allow(non_upper_case_globals, reason = "the assembler's names")]
    mod symbols {
        unsafe extern "C" {
            pub(super) static pagetide_walker_start: u8;
            pub(super) static pagetide_walker_end: u8;
        }
    }

    /// The code; its first byte is the entry.
    pub(in super::super) fn code() -> &'static [u8] {
        let start = &raw const symbols::pagetide_walker_start;
        let end = &raw const symbols::pagetide_walker_end;
        // SAFETY: walk.s places start before end in one section of read-only data, which is
        // initialised and lives as long as the program.
        unsafe { std::slice::from_raw_parts(start, end.addr() - start.addr()) }
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod imp {
    /// There is none; no machine is built, either.
    pub(in super::super) fn code() -> &'static [u8] {
        &[]
    }
}

pub(super) use imp::code;

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;

    #[test]
    fn code_fits() {
        let bytes = code().len() as u64;
        assert!(
            (1..=crate::endless::CODE_BYTES).contains(&bytes),
            "{bytes} bytes"
        );
    }

    #[test]
    fn nothing_lies_in_the_exception_handlers_words() {
        let handlers_end = crate::guest::Field::ExceptionCr2.offset() as u64 + 8;
        assert!(handlers_end <= crate::endless::Word::Table as u64);
    }
}
