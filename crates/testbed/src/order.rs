//! The order in which a vCPU touches its pages.
//!
//! One formula gives both orders, so that the guest has a single loop: page `i` of the walk is
//!
//! ```text
//! x = (i * a) mod 2^k;  x ^= x >> s;  x = (x * b) mod 2^k;  x ^= x >> s
//! with 2^k >= pages, a and b odd, s about k / 2
//! ```
//!
//! and results at or above the page count are skipped. Each step is a bijection on k-bit numbers
//! (multiplication by an odd number, xor with the number's upper half), so every page comes exactly once, for
//! any page count; at most every second step is a skip, outside the timed part. An additive step that is
//! coprime to the page count would need no skips, but a constant distance between pages, which fault-around
//! and prefetchers would hit always or never. Sequential order is `a = b = 1` with a shift that leaves
//! nothing.

use std::num::NonZeroU64;

/// How the pages of a range follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Ascending addresses.
    Sequential,
    /// A pseudo-random permutation, the same one on every machine for the same seed.
    Random {
        /// Selects the permutation.
        seed: u64,
    },
}

/// The parameters of an order for one page count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Permutation {
    pub(crate) pages: u64,
    pub(crate) mask: u64,
    pub(crate) multiplier_a: u64,
    pub(crate) shift: u64,
    pub(crate) multiplier_b: u64,
}

impl Order {
    /// The permutation of `pages` pages. `lane` (a vCPU number) selects one of many permutations of the same
    /// seed, so that vCPUs that share a range touch different pages at a time.
    #[must_use]
    pub fn permutation(self, pages: NonZeroU64, lane: u32) -> Permutation {
        let pages = pages.get();
        // Not next_power_of_two: that overflows above 2^63.
        let mask = match pages - 1 {
            0 => 0,
            last => u64::MAX >> last.leading_zeros(),
        };
        match self {
            Order::Sequential => Permutation {
                pages,
                mask,
                multiplier_a: 1,
                shift: 63,
                multiplier_b: 1,
            },
            Order::Random { seed } => {
                let mut state = seed ^ (u64::from(lane) << 32);
                let bits = mask.count_ones();
                Permutation {
                    pages,
                    mask,
                    multiplier_a: split_mix(&mut state) | 1,
                    shift: u64::from(bits.div_ceil(2).max(1)),
                    multiplier_b: split_mix(&mut state) | 1,
                }
            }
        }
    }
}

impl Permutation {
    /// The page at step `step`, or None if the step is skipped.
    fn page_at(self, step: u64) -> Option<u64> {
        let mut page = step.wrapping_mul(self.multiplier_a) & self.mask;
        page ^= page >> self.shift;
        page = page.wrapping_mul(self.multiplier_b) & self.mask;
        page ^= page >> self.shift;
        (page < self.pages).then_some(page)
    }

    /// All page indices, each exactly once, in the order in which the guest touches them.
    pub fn iter(self) -> impl Iterator<Item = u64> {
        (0..=self.mask).filter_map(move |step| self.page_at(step))
    }
}

/// One step of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators").
fn split_mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut mixed = *state;
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn walk(order: Order, pages: u64, lane: u32) -> Vec<u64> {
        let pages = NonZeroU64::new(pages).expect("tests use at least one page");
        order.permutation(pages, lane).iter().collect()
    }

    #[test]
    fn every_page_comes_exactly_once() {
        let counts = (1..=70).chain([511, 512, 513, 4096, 4097, 20_011]);
        for pages in counts {
            for seed in [0, 1, 7, u64::MAX] {
                let mut seen = walk(Order::Random { seed }, pages, 3);
                seen.sort_unstable();
                assert!(
                    seen.iter().copied().eq(0..pages),
                    "pages {pages} seed {seed}"
                );
            }
            let sequential = walk(Order::Sequential, pages, 0);
            assert!(sequential.into_iter().eq(0..pages), "sequential {pages}");
        }
    }

    #[test]
    fn random_order_is_not_nearly_sequential() {
        for (seed, lane) in [(0, 0), (1, 0), (1, 1), (42, 7)] {
            let pages = walk(Order::Random { seed }, 16384, lane);
            let close = pages
                .windows(2)
                .filter(|pair| pair[0].abs_diff(pair[1]) <= 16)
                .count();
            // A uniformly random walk has about 33 such pairs in 16383.
            assert!(
                close < 200,
                "seed {seed} lane {lane}: {close} neighbours follow each other"
            );
        }
    }

    #[test]
    fn lanes_and_seeds_differ() {
        let first = walk(Order::Random { seed: 1 }, 4096, 0);
        assert_ne!(first, walk(Order::Random { seed: 1 }, 4096, 1));
        assert_ne!(first, walk(Order::Random { seed: 2 }, 4096, 0));
        assert_eq!(first, walk(Order::Random { seed: 1 }, 4096, 0));
    }
}
