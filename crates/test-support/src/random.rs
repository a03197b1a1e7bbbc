//! Random numbers that can be had again.

use std::sync::OnceLock;

/// The variable that gives a seed back.
const VARIABLE: &str = "PAGETIDE_SEED";

/// The seed of this run's random numbers: what `PAGETIDE_SEED` says, or another one each time. It is printed, with
/// the variable that repeats it.
///
/// # Panics
///
/// If `PAGETIDE_SEED` is no number.
pub fn seed() -> u64 {
    static SEED: OnceLock<u64> = OnceLock::new();
    let seed = *SEED.get_or_init(|| match std::env::var(VARIABLE) {
        Ok(text) => text
            .parse()
            .unwrap_or_else(|error| panic!("{VARIABLE}={text:?}: {error}")),
        Err(_) => {
            let now = std::time::UNIX_EPOCH.elapsed().unwrap();
            now.as_secs() ^ u64::from(std::process::id()) << 32
        }
    });
    println!("seed {seed}: {VARIABLE}={seed} repeats it");
    seed
}

/// Numbers that look random, the same for the same seed and part (splitmix64).
#[derive(Debug, Clone)]
pub struct Rng(u64);

/// One step of splitmix64.
pub fn mix(seed: u64) -> u64 {
    let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Rng {
    /// The numbers of one part of a test: each thread has its own.
    pub fn new(seed: u64, part: u64) -> Self {
        Self(mix(seed) ^ mix(part.wrapping_mul(3)))
    }

    /// The next number.
    #[allow(
        clippy::should_implement_trait,
        reason = "an iterator of random numbers never ends"
    )]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(1);
        mix(self.0)
    }

    /// A number from 0 to `end`, exclusive.
    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// True once in so many times.
    pub fn one_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }

    /// One of several.
    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[usize::try_from(self.below(of.len() as u64)).unwrap()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_the_same_numbers_again() {
        let numbers = |seed, part| {
            let mut rng = Rng::new(seed, part);
            [(); 4].map(|()| rng.next())
        };
        assert_eq!(numbers(7, 1), numbers(7, 1));
        assert_ne!(numbers(7, 1), numbers(7, 2));
        assert_ne!(numbers(7, 1), numbers(8, 1));
        assert_eq!(seed(), seed());
    }
}
