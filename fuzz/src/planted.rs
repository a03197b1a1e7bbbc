//! A failure on purpose.

use std::hint::black_box;

use crate::take;

/// Each comparison opens the way to the next: chance passes none of them.
pub(crate) fn run(mut input: &[u8]) -> bool {
    if input.len() < 12 {
        return false;
    }
    if black_box(u32::from_le_bytes(take(&mut input))) != 0x7469_6465 {
        return true;
    }
    if black_box(u64::from_le_bytes(take(&mut input))) == 0x0102_0304_0506_0708 {
        std::process::abort();
    }
    true
}

/// Bytes that differ, so that each is found in a comparison.
pub(crate) fn seeds() -> Vec<Vec<u8>> {
    vec![(0x81..=0x8c).collect()]
}
