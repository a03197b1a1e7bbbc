//! The one seed of a run: of the tests' random numbers, of property tests, and of the order of shuffled tests.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, Result};

/// The variable that crates/test-support reads, and that gives a seed back.
const VARIABLE: &str = "PAGETIDE_SEED";

/// The variable that proptest reads.
const PROPTEST: &str = "PROPTEST_RNG_SEED";

/// What all test programs are given, on this machine and in VMs.
static SEED: AtomicU64 = AtomicU64::new(0);

/// Begins a run with a new seed, or with the one that `PAGETIDE_SEED` gives.
pub(super) fn draw() -> Result<()> {
    SEED.store(choose(std::env::var(VARIABLE).ok())?, Ordering::Relaxed);
    Ok(())
}

fn choose(given: Option<String>) -> Result<u64> {
    match given {
        Some(text) => {
            let seed = text.parse();
            seed.with_context(|| format!("{VARIABLE}={text} is no number below 2^64"))
        }
        // Few enough digits to type.
        None => Ok(RandomState::new().hash_one(VARIABLE) >> 32),
    }
}

/// This run's seed.
pub(super) fn current() -> u64 {
    SEED.load(Ordering::Relaxed)
}

/// What test programs find in their environment.
pub(super) fn environment() -> [(&'static str, String); 2] {
    [VARIABLE, PROPTEST].map(|name| (name, current().to_string()))
}

/// How the seed is given back, for people.
pub(super) fn assignment() -> String {
    format!("{VARIABLE}={}", current())
}

/// Puts lists into an order that looks random, the same for the same seed (splitmix64).
#[derive(Debug, Clone)]
pub(super) struct Shuffle(u64);

impl Shuffle {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(super) fn shuffle<T>(&mut self, list: &mut [T]) {
        for (end, count) in (1..list.len()).zip(2..) {
            // Less than the list's length.
            let other = usize::try_from(self.next() % count).unwrap_or(end);
            list.swap(end, other);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_the_same_order_again() {
        let order = |seed| {
            let mut list: Vec<u32> = (0..50).collect();
            Shuffle::new(seed).shuffle(&mut list);
            list
        };
        assert_eq!(order(7), order(7));
        assert_ne!(order(7), order(8));
        let mut sorted = order(7);
        assert_ne!(sorted, (0..50).collect::<Vec<_>>());
        sorted.sort_unstable();
        assert_eq!(sorted, (0..50).collect::<Vec<_>>());
        Shuffle::new(7).shuffle::<u32>(&mut []);
    }

    #[test]
    fn a_seed_is_drawn_or_given_back() {
        assert_eq!(
            choose(Some("18446744073709551615".into())).unwrap(),
            u64::MAX
        );
        let error = choose(Some("seven".into())).unwrap_err().to_string();
        assert!(error.contains("PAGETIDE_SEED=seven"), "{error}");
        let drawn: Vec<_> = (0..3).map(|_| choose(None).unwrap()).collect();
        assert!(drawn[0] != drawn[1] || drawn[1] != drawn[2], "{drawn:?}");
    }

    #[test]
    fn test_programs_and_proptest_have_the_same_seed() {
        let [ours, proptest] = environment();
        assert_eq!((ours.0, proptest.0), (VARIABLE, PROPTEST));
        assert_eq!(ours.1, proptest.1);
        assert_eq!(assignment(), format!("PAGETIDE_SEED={}", ours.1));
    }
}
