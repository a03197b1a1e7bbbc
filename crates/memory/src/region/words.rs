//! Copies into and out of memory that the guest and other threads may write at the same moment.
//!
//! A plain `memcpy` there would be a data race, which Rust does not define. These copies use
//! relaxed atomic accesses instead: eight bytes at a time between 8-byte boundaries, single bytes
//! outside. What is read while somebody else writes is any mix of old and new bytes, but nothing
//! worse.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};

const WORD: usize = size_of::<u64>();

/// How many single bytes come before the first 8-byte boundary at or after `start`.
fn head_len(start: *mut u8, len: usize) -> usize {
    start.align_offset(WORD).min(len)
}

/// Writes `bytes` at `to`.
///
/// # Safety
///
/// `to .. to + bytes.len()` is mapped and writable for the length of the call, and every access to
/// it by this process at the same time is one of this module's.
pub(super) unsafe fn copy_in(to: *mut u8, bytes: &[u8]) {
    let (head, rest) = bytes.split_at(head_len(to, bytes.len()));
    let (words, tail) = rest.as_chunks::<WORD>();
    let words_at = to.wrapping_add(head.len());
    let tail_at = words_at.wrapping_add(words.len() * WORD);

    for (at, run) in [(to, head), (tail_at, tail)] {
        for (offset, &byte) in run.iter().enumerate() {
            // SAFETY: from_ptr requires a valid, aligned pointer without non-atomic access: the
            // caller vouches for the range, and a byte has no alignment.
            unsafe { AtomicU8::from_ptr(at.wrapping_add(offset)) }.store(byte, Relaxed);
        }
    }
    for (offset, word) in words.iter().enumerate() {
        let at = words_at.wrapping_add(offset * WORD).cast::<u64>();
        // SAFETY: as above; head_len made words_at a multiple of 8.
        unsafe { AtomicU64::from_ptr(at) }.store(u64::from_ne_bytes(*word), Relaxed);
    }
}

/// Reads into `bytes` from `from`.
///
/// # Safety
///
/// `from .. from + bytes.len()` is mapped and readable for the length of the call, and every write
/// to it by this process at the same time is one of this module's.
pub(super) unsafe fn copy_out(from: *mut u8, bytes: &mut [u8]) {
    let (head, rest) = bytes.split_at_mut(head_len(from, bytes.len()));
    let (words, tail) = rest.as_chunks_mut::<WORD>();
    let words_at = from.wrapping_add(head.len());
    let tail_at = words_at.wrapping_add(words.len() * WORD);

    for (at, run) in [(from, head), (tail_at, tail)] {
        for (offset, byte) in run.iter_mut().enumerate() {
            // SAFETY: from_ptr requires a valid, aligned pointer without non-atomic access: the
            // caller vouches for the range, and a byte has no alignment.
            *byte = unsafe { AtomicU8::from_ptr(at.wrapping_add(offset)) }.load(Relaxed);
        }
    }
    for (offset, word) in words.iter_mut().enumerate() {
        let at = words_at.wrapping_add(offset * WORD).cast::<u64>();
        // SAFETY: as above; head_len made words_at a multiple of 8.
        *word = unsafe { AtomicU64::from_ptr(at) }
            .load(Relaxed)
            .to_ne_bytes();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn what_goes_in_comes_out(start in 0usize..24, bytes in prop::collection::vec(any::<u8>(), 0..80)) {
            let mut memory = vec![0xa5_u8; 128];
            let before = memory.clone();
            let at = memory.as_mut_ptr().wrapping_add(start);
            let mut back = vec![0; bytes.len()];
            // SAFETY: start + bytes.len() is below 128, the length of the vector, and this thread
            // is the only one.
            unsafe { copy_in(at, &bytes) };
            // SAFETY: as above.
            unsafe { copy_out(at, &mut back) };
            prop_assert_eq!(&back, &bytes);
            prop_assert_eq!(&memory[..start], &before[..start]);
            prop_assert_eq!(&memory[start + bytes.len()..], &before[start + bytes.len()..]);
        }
    }
}
