//! Latencies: recorded one by one, merged over runs, told as percentiles.

use hdrhistogram::Histogram;

use crate::units::whole;

/// Largest latency that is told apart from larger ones, in nanoseconds: ten minutes.
const HIGHEST_NS: u64 = 600_000_000_000;
/// Significant decimal digits that a recorded latency keeps.
const DIGITS: u8 = 3;

/// Latencies of faults, from any number of runs.
#[derive(Debug, Clone)]
pub struct LatencyLog {
    histogram: Histogram<u64>,
}

/// The histogram could not be made; the bounds are constants, so this does not happen.
#[derive(Debug, thiserror::Error)]
#[error("cannot make a latency histogram")]
pub struct LatencyLogError(#[source] hdrhistogram::CreationError);

impl LatencyLog {
    /// No latencies yet.
    ///
    /// # Errors
    /// The histogram cannot be made.
    pub fn new() -> Result<Self, LatencyLogError> {
        let histogram =
            Histogram::new_with_bounds(1, HIGHEST_NS, DIGITS).map_err(LatencyLogError)?;
        Ok(Self { histogram })
    }

    /// Records one latency in nanoseconds.
    pub fn record(&mut self, ns: u64) {
        self.histogram.saturating_record(ns);
    }

    /// Adds everything that `other` recorded.
    pub fn merge(&mut self, other: &Self) {
        // Same bounds and digits by construction, the one thing that adding can refuse; and if that
        // ever changes, recording value by value is slower but the same.
        if self.histogram.add(&other.histogram).is_err() {
            for value in other.histogram.iter_recorded() {
                self.histogram
                    .saturating_record_n(value.value_iterated_to(), value.count_at_value());
            }
        }
    }

    /// How many latencies were recorded.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.histogram.len()
    }

    /// The percentiles; `None` if nothing was recorded.
    #[must_use]
    pub fn summary(&self) -> Option<Latency> {
        if self.histogram.is_empty() {
            return None;
        }
        let at = |quantile| self.histogram.value_at_quantile(quantile);
        Some(Latency {
            count: self.count(),
            min_ns: self.histogram.min(),
            mean_ns: whole(self.histogram.mean()),
            p50_ns: at(0.5),
            p90_ns: at(0.9),
            p99_ns: at(0.99),
            p999_ns: at(0.999),
            max_ns: self.histogram.max(),
        })
    }
}

/// Percentiles of a set of latencies, in nanoseconds, to three significant digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Latency {
    /// How many latencies.
    pub count: u64,
    /// The shortest.
    pub min_ns: u64,
    /// The arithmetic mean.
    pub mean_ns: u64,
    /// Half of them are at most this long.
    pub p50_ns: u64,
    /// 90 % are at most this long.
    pub p90_ns: u64,
    /// 99 % are at most this long.
    pub p99_ns: u64,
    /// 99.9 % are at most this long.
    pub p999_ns: u64,
    /// The longest.
    pub max_ns: u64,
}

impl Latency {
    /// Each figure by its name in data.
    pub(crate) fn figures(self) -> Vec<(&'static str, u64)> {
        vec![
            ("count", self.count),
            ("min", self.min_ns),
            ("mean", self.mean_ns),
            ("p50", self.p50_ns),
            ("p90", self.p90_ns),
            ("p99", self.p99_ns),
            ("p999", self.p999_ns),
            ("max", self.max_ns),
        ]
    }

    /// The reverse of [`Latency::figures`]; `None` if one is missing.
    pub(crate) fn of_figures(figure: impl Fn(&str) -> Option<u64>) -> Option<Self> {
        Some(Self {
            count: figure("count")?,
            min_ns: figure("min")?,
            mean_ns: figure("mean")?,
            p50_ns: figure("p50")?,
            p90_ns: figure("p90")?,
            p99_ns: figure("p99")?,
            p999_ns: figure("p999")?,
            max_ns: figure("max")?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_of_a_known_set() {
        let mut log = LatencyLog::new().unwrap();
        (1..=1000).for_each(|ns| log.record(ns));
        let summary = log.summary().unwrap();
        assert_eq!(
            (summary.count, summary.min_ns, summary.max_ns),
            (1000, 1, 1000)
        );
        assert_eq!(
            (summary.p50_ns, summary.p90_ns, summary.p99_ns),
            (500, 900, 990)
        );
        assert_eq!(summary.p999_ns, 999);
        assert_eq!(summary.mean_ns, 501);
    }

    #[test]
    fn merging_is_recording_both() {
        let (mut low, mut high, mut both) = (
            LatencyLog::new().unwrap(),
            LatencyLog::new().unwrap(),
            LatencyLog::new().unwrap(),
        );
        for ns in 1..=500 {
            low.record(ns);
            high.record(ns * 1000);
            both.record(ns);
            both.record(ns * 1000);
        }
        low.merge(&high);
        assert_eq!(low.summary(), both.summary());
    }

    #[test]
    fn nothing_recorded_has_no_percentiles() {
        assert_eq!(LatencyLog::new().unwrap().summary(), None);
    }

    #[test]
    fn what_is_beyond_the_bounds_counts_at_the_bound() {
        let mut log = LatencyLog::new().unwrap();
        log.record(0);
        log.record(u64::MAX);
        let summary = log.summary().unwrap();
        assert_eq!(summary.count, 2);
        assert!(summary.max_ns >= HIGHEST_NS, "{summary:?}");
    }
}
