//! Recent latencies, and the silence after which a second request is sent.

use std::collections::VecDeque;
use std::ops::RangeInclusive;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// The number of latencies that are remembered.
const REMEMBERED: usize = 32;
/// The silence that is unusual, in medians.
const MEDIANS: u32 = 3;

/// The latencies of the last answers: from the request to the head of the answer.
#[derive(Debug, Default)]
pub(super) struct Latencies(Mutex<VecDeque<Duration>>);

impl Latencies {
    pub(super) fn add(&self, latency: Duration) {
        let mut recent = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if recent.len() == REMEMBERED {
            recent.pop_front();
        }
        recent.push_back(latency);
    }

    /// Three medians, within `bounds`; the upper bound if no answer has been seen.
    pub(super) fn hedge_after(&self, bounds: &RangeInclusive<Duration>) -> Duration {
        let recent = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut sorted: Vec<Duration> = recent.iter().copied().collect();
        drop(recent);
        sorted.sort_unstable();
        let usual = sorted.get(sorted.len() / 2);
        let unusual = usual.map_or(*bounds.end(), |usual| usual.saturating_mul(MEDIANS));
        unusual.max(*bounds.start()).min(*bounds.end())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hedge_waits_for_three_medians_within_bounds() {
        let ms = Duration::from_millis;
        let bounds = ms(20)..=ms(1000);
        let latencies = Latencies::default();
        assert_eq!(latencies.hedge_after(&bounds), ms(1000));
        latencies.add(ms(1));
        assert_eq!(latencies.hedge_after(&bounds), ms(20));
        (0..REMEMBERED).for_each(|_| latencies.add(ms(50)));
        assert_eq!(latencies.hedge_after(&bounds), ms(150));
        (0..REMEMBERED).for_each(|_| latencies.add(ms(900)));
        assert_eq!(latencies.hedge_after(&bounds), ms(1000));
    }
}
