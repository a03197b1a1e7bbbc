//! The content of memory: words that depend on their own address, so that a page in the wrong place, a page of
//! zeroes and a page of another run differ from the right page.
//!
//! The word at guest-physical address `gpa` (8-byte aligned, little endian) is
//!
//! ```text
//! word(gpa, seed) = ((gpa ^ seed) * 0x9e3779b97f4a7c15) mod 2^64
//! ```
//!
//! which takes the guest two instructions and a constant. The factor is odd, so different addresses have
//! different words; a [`Seed`] is odd and `gpa` is a multiple of 8, so no word is 0.

use pagetide_memory::GuestAddress;

/// The factor of [`word`]: 2^64 divided by the golden ratio, made odd.
pub const MULTIPLIER: u64 = 0x9e37_79b9_7f4a_7c15;

/// Selects the content of a run; always odd.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Seed(u64);

impl Seed {
    /// The seed with this value, made odd.
    #[must_use]
    pub const fn new(value: u64) -> Self {
        Self(value | 1)
    }

    /// The (odd) value that [`word`] uses.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }
}

/// The word at `gpa`, a multiple of 8.
#[must_use]
pub const fn word(gpa: u64, seed: Seed) -> u64 {
    (gpa ^ seed.0).wrapping_mul(MULTIPLIER)
}

/// Fills `bytes`, which start at `gpa`, with their words. `gpa` and the length are multiples of 8; a rest of
/// fewer than 8 bytes is not written.
pub fn fill(gpa: GuestAddress, seed: Seed, bytes: &mut [u8]) {
    let mut address = gpa.0;
    for chunk in bytes.as_chunks_mut::<8>().0 {
        *chunk = word(address, seed).to_le_bytes();
        address = address.wrapping_add(8);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_are_odd_so_that_no_word_is_zero() {
        assert_eq!(Seed::new(0).get(), 1);
        for gpa in (0..1 << 16).step_by(8) {
            assert_ne!(word(gpa, Seed::new(gpa)), 0);
        }
    }

    #[test]
    fn words_differ_between_pages_and_runs() {
        let seed = Seed::new(5);
        assert_ne!(word(0x1_0000_0000, seed), word(0x1_0000_1000, seed));
        assert_ne!(word(0x1_0000_0000, seed), word(0x1_0000_0000, Seed::new(7)));
    }
}
