//! The workload in machine code: `workload.s`, assembled into this program's read-only data.

use super::{Field, Mode, PORT, Report};

core::arch::global_asm!(
    include_str!("workload.s"),
    PORT = const PORT,
    READY = const Report::Ready as u32,
    DONE = const Report::Done as u32,
    EXCEPTION = const Report::Exception as u32,
    STEP = const Report::Step as u32,
    MODE_WRITE = const Mode::Write as u64,
    MODE_SPIN = const Mode::Spin as u64,
    MODE_STEP = const Mode::Step as u64,
    BASE = const Field::Base.offset(),
    PAGES = const Field::Pages.offset(),
    STRIDE_BYTES = const Field::StrideBytes.offset(),
    MASK = const Field::Mask.offset(),
    MULTIPLIER_A = const Field::MultiplierA.offset(),
    SHIFT = const Field::Shift.offset(),
    MULTIPLIER_B = const Field::MultiplierB.offset(),
    MODE = const Field::Mode.offset(),
    SEED = const Field::Seed.offset(),
    PATTERN_MULTIPLIER = const Field::PatternMultiplier.offset(),
    LOG = const Field::Log.offset(),
    LOG_BYTES = const Field::LogBytes.offset(),
    TABLES = const Field::Tables.offset(),
    TABLES_BYTES = const Field::TablesBytes.offset(),
    TOUCHED = const Field::Touched.offset(),
    MISMATCHES = const Field::Mismatches.offset(),
    BAD_GPA = const Field::BadGpa.offset(),
    BAD_FOUND = const Field::BadFound.offset(),
    BAD_EXPECTED = const Field::BadExpected.offset(),
    EXCEPTION_VECTOR = const Field::ExceptionVector.offset(),
    EXCEPTION_ERROR_CODE = const Field::ExceptionErrorCode.offset(),
    EXCEPTION_RIP = const Field::ExceptionRip.offset(),
    EXCEPTION_CR2 = const Field::ExceptionCr2.offset(),
);

/// Room for the code in low memory; a test checks that it fits.
#[cfg(test)]
const CODE_BYTES: u64 = 0x4000;

#[allow(non_upper_case_globals, reason = "the assembler's names")]
mod symbols {
    unsafe extern "C" {
        pub(super) static pagetide_guest_start: u8;
        pub(super) static pagetide_guest_vectors: u8;
        pub(super) static pagetide_guest_end: u8;
    }
}

/// The code; its first byte is the entry.
pub(crate) fn code() -> &'static [u8] {
    let start = &raw const symbols::pagetide_guest_start;
    let end = &raw const symbols::pagetide_guest_end;
    // SAFETY: workload.s places start before end in one section of read-only data, which is
    // initialised and lives as long as the program.
    unsafe { std::slice::from_raw_parts(start, end.addr() - start.addr()) }
}

/// Where the exception stubs start, 16 bytes each, in bytes from the start of the code.
pub(crate) fn vectors_offset() -> u64 {
    let start: *const u8 = &raw const symbols::pagetide_guest_start;
    let vectors: *const u8 = &raw const symbols::pagetide_guest_vectors;
    (vectors.addr() - start.addr()) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_fits_and_has_32_stubs() {
        let code = code();
        assert!(code.len() as u64 <= CODE_BYTES, "{} bytes", code.len());
        assert_eq!(code.len() as u64 - vectors_offset(), 32 * 16);
    }

    #[test]
    fn stubs_push_an_error_code_where_the_processor_does_not() {
        const PUSH_BYTE: u8 = 0x6a;
        let with_error_code = [8, 10, 11, 12, 13, 14, 17, 21, 29, 30];
        let stubs = &code()[usize::try_from(vectors_offset()).expect("an offset in a slice")..];
        for (vector, stub) in stubs.as_chunks::<16>().0.iter().enumerate() {
            let expected: &[u8] = &match u8::try_from(vector).expect("32 vectors") {
                vector if with_error_code.contains(&vector) => vec![PUSH_BYTE, vector],
                vector => vec![PUSH_BYTE, 0, PUSH_BYTE, vector],
            };
            assert!(stub.starts_with(expected), "vector {vector}: {stub:x?}");
        }
    }
}
