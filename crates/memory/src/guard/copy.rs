//! Copies to and from memory that the guest and other threads may write at the same time, and that may
//! have lost its content to an uncorrected error.
//!
//! One assembly routine makes all copies. To the compiler the routine is not a memory access, so a
//! concurrent access by the guest is not a data race, which Rust leaves undefined: a copy reads some
//! mix of old and new bytes. If the memory has an error, the SIGBUS handler recognises the routine by
//! its instruction addresses and makes it return the address that failed. No jump skips Rust frames,
//! and a copy needs no preparation.

use crate::address::HostAddress;

const WORD: usize = size_of::<u64>();
/// The source for [`fill_zeroes`]; small enough to stay in the cache.
static ZEROES: [u8; 4096] = [0; 4096];

/// The routine's result: `failed_at` is 0 after success.
#[repr(C)]
struct Outcome {
    failed_at: usize,
    lsb: usize,
}

unsafe extern "C" {
    /// Copies `head` bytes, `words` words of 8 bytes and `tail` bytes.
    fn pagetide_guarded_copy(
        to: *mut u8,
        from: *const u8,
        head: usize,
        words: usize,
        tail: usize,
    ) -> Outcome;
    /// The instruction after the last one that copies: returns what the handler has written to the
    /// result registers.
    fn pagetide_guarded_copy_escape();
}

#[cfg(target_arch = "x86_64")]
core::arch::global_asm!(
    ".pushsection .text.pagetide_guarded_copy, \"ax\", @progbits",
    ".globl pagetide_guarded_copy, pagetide_guarded_copy_escape",
    ".hidden pagetide_guarded_copy, pagetide_guarded_copy_escape",
    ".type pagetide_guarded_copy, @function",
    "pagetide_guarded_copy:",
    ".cfi_startproc",
    // rdi: to, rsi: from, rdx: head, rcx: words, r8: tail
    "   test rdx, rdx",
    "   jz 3f",
    "2: mov al, [rsi]",
    "   mov [rdi], al",
    "   inc rsi",
    "   inc rdi",
    "   dec rdx",
    "   jnz 2b",
    // Four words per iteration, in ascending order.
    "3: sub rcx, 4",
    "   jb 5f",
    "4: mov rax, [rsi]",
    "   mov rdx, [rsi + 8]",
    "   mov r9, [rsi + 16]",
    "   mov r10, [rsi + 24]",
    "   mov [rdi], rax",
    "   mov [rdi + 8], rdx",
    "   mov [rdi + 16], r9",
    "   mov [rdi + 24], r10",
    "   add rsi, 32",
    "   add rdi, 32",
    "   sub rcx, 4",
    "   jae 4b",
    "5: add rcx, 4",
    "   jz 7f",
    "6: mov rax, [rsi]",
    "   mov [rdi], rax",
    "   add rsi, 8",
    "   add rdi, 8",
    "   dec rcx",
    "   jnz 6b",
    "7: test r8, r8",
    "   jz 9f",
    "8: mov al, [rsi]",
    "   mov [rdi], al",
    "   inc rsi",
    "   inc rdi",
    "   dec r8",
    "   jnz 8b",
    "9: xor eax, eax",
    "   xor edx, edx",
    "pagetide_guarded_copy_escape:",
    "   ret",
    ".cfi_endproc",
    ".size pagetide_guarded_copy, . - pagetide_guarded_copy",
    ".popsection",
);

#[cfg(target_arch = "aarch64")]
core::arch::global_asm!(
    ".pushsection .text.pagetide_guarded_copy, \"ax\", %progbits",
    ".globl pagetide_guarded_copy, pagetide_guarded_copy_escape",
    ".hidden pagetide_guarded_copy, pagetide_guarded_copy_escape",
    ".type pagetide_guarded_copy, %function",
    "pagetide_guarded_copy:",
    ".cfi_startproc",
    // x0: to, x1: from, x2: head, x3: words, x4: tail
    "   cbz x2, 3f",
    "2: ldrb w5, [x1], #1",
    "   strb w5, [x0], #1",
    "   subs x2, x2, #1",
    "   b.ne 2b",
    "3: cbz x3, 5f",
    "4: ldr x5, [x1], #8",
    "   str x5, [x0], #8",
    "   subs x3, x3, #1",
    "   b.ne 4b",
    "5: cbz x4, 7f",
    "6: ldrb w5, [x1], #1",
    "   strb w5, [x0], #1",
    "   subs x4, x4, #1",
    "   b.ne 6b",
    "7: mov x0, #0",
    "   mov x1, #0",
    "pagetide_guarded_copy_escape:",
    "   ret",
    ".cfi_endproc",
    ".size pagetide_guarded_copy, . - pagetide_guarded_copy",
    ".popsection",
);

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!("guarded copies are written for x86_64 and aarch64");

/// How to take a thread out of a copy that failed: set the thread's first two result registers (rax and
/// rdx; x0 and x1) to the address that failed and to `si_addr_lsb`, and its program counter to
/// `instruction`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Escape {
    /// The address at which the thread continues.
    pub instruction: usize,
}

/// The escape for a thread whose next instruction is at `instruction`; `None` if that is not part of a
/// guarded copy. Async-signal-safe.
pub fn escape_from_copy(instruction: usize) -> Option<Escape> {
    let start = pagetide_guarded_copy as *const () as usize;
    let escape = pagetide_guarded_copy_escape as *const () as usize;
    (start..escape).contains(&instruction).then_some(Escape {
        instruction: escape,
    })
}

/// A copy met an uncorrected error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CopyFailure {
    /// The address that failed.
    pub(crate) at: HostAddress,
    /// `si_addr_lsb`: binary logarithm of the number of lost bytes around it.
    pub(crate) lsb: u32,
}

impl Outcome {
    fn result(&self) -> Result<(), CopyFailure> {
        match self.failed_at {
            0 => Ok(()),
            at => Err(CopyFailure {
                at: HostAddress(at),
                lsb: u32::try_from(self.lsb).unwrap_or(u32::MAX),
            }),
        }
    }
}

/// The number of bytes before the first 8-byte boundary of `memory`, of whole words, and of bytes after
/// them.
fn parts(memory: *mut u8, len: usize) -> (usize, usize, usize) {
    let head = memory.align_offset(WORD).min(len);
    (head, (len - head) / WORD, (len - head) % WORD)
}

/// Writes `bytes` to `to`; after an error only a part of them.
///
/// # Safety
///
/// `to .. to + bytes.len()` is mapped and writable for the length of the call. During the call, this
/// process accesses it only by these copies and by atomic operations.
pub(crate) unsafe fn copy_in(to: *mut u8, bytes: &[u8]) -> Result<(), CopyFailure> {
    let (head, words, tail) = parts(to, bytes.len());
    // SAFETY: head + 8 * words + tail is bytes.len(): that many bytes are readable from `bytes`, and
    // writable at `to` by this function's requirement.
    unsafe { pagetide_guarded_copy(to, bytes.as_ptr(), head, words, tail) }.result()
}

/// Writes `len` zeroes to `to`; after an error only a part of them.
///
/// # Safety
///
/// As for [`copy_in`], for `len` bytes.
pub(crate) unsafe fn fill_zeroes(to: *mut u8, len: usize) -> Result<(), CopyFailure> {
    let mut done = 0;
    while done < len {
        let piece = ZEROES.len().min(len - done);
        // SAFETY: done + piece is at most len, which this function's requirement covers.
        unsafe { copy_in(to.wrapping_add(done), &ZEROES[..piece]) }?;
        done += piece;
    }
    Ok(())
}

/// Reads into `bytes` from `from`; after an error only a part of `bytes` has been written.
///
/// # Safety
///
/// `from .. from + bytes.len()` is mapped and readable for the length of the call. During the call,
/// this process writes to it only by these copies and by atomic operations.
pub(crate) unsafe fn copy_out(from: *mut u8, bytes: &mut [u8]) -> Result<(), CopyFailure> {
    let (head, words, tail) = parts(from, bytes.len());
    // SAFETY: as in copy_in, in the other direction.
    unsafe { pagetide_guarded_copy(bytes.as_mut_ptr(), from, head, words, tail) }.result()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_copy_writes_its_bytes_and_no_others(start in 0usize..24, bytes in prop::collection::vec(any::<u8>(), 0..160)) {
            let mut memory = vec![0xa5_u8; 256];
            let before = memory.clone();
            let at = memory.as_mut_ptr().wrapping_add(start);
            let mut back = vec![0; bytes.len()];
            // SAFETY: start + bytes.len() is below 256, the length of the vector, and no other thread
            // accesses it.
            unsafe { copy_in(at, &bytes) }.unwrap();
            // SAFETY: as above.
            unsafe { copy_out(at, &mut back) }.unwrap();
            prop_assert_eq!(&back, &bytes);
            prop_assert_eq!(&memory[..start], &before[..start]);
            prop_assert_eq!(&memory[start + bytes.len()..], &before[start + bytes.len()..]);
        }
    }

    #[test]
    fn the_escape_is_for_the_routine_only() {
        let start = pagetide_guarded_copy as *const () as usize;
        let escape = escape_from_copy(start).unwrap();
        assert_eq!(escape_from_copy(escape.instruction - 1), Some(escape));
        assert_eq!(escape_from_copy(escape.instruction), None);
        assert_eq!(escape_from_copy(start - 1), None);
        assert_eq!(escape_from_copy(0), None);
    }
}
