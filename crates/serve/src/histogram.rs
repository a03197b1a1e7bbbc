//! Histograms of durations.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use prometheus_client::encoding::{EncodeLabelSet, MetricEncoder, NoLabelSet};

/// Upper bounds of the buckets of work that takes little time, in microseconds.
pub(crate) const WORK_US: &[u64] = &[
    2, 4, 8, 16, 32, 64, 128, 256, 512, 1_000, 2_000, 5_000, 10_000, 50_000, 250_000, 1_000_000,
];

/// The same for what guests wait, which takes as long as a store is away.
pub(crate) const WAIT_US: &[u64] = &[
    8, 16, 32, 64, 128, 256, 512, 1_000, 2_000, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000,
    500_000, 1_000_000, 2_500_000, 5_000_000, 10_000_000, 30_000_000, 60_000_000,
];

/// A histogram with fixed buckets, which any thread may write to.
#[derive(Debug)]
pub(crate) struct Histogram {
    bounds_us: &'static [u64],
    /// One more than there are bounds, for longer durations.
    buckets: Vec<AtomicU64>,
    sum_ns: AtomicU64,
}

impl Histogram {
    pub(crate) fn new(bounds_us: &'static [u64]) -> Self {
        Self {
            bounds_us,
            buckets: (0..=bounds_us.len()).map(|_| AtomicU64::new(0)).collect(),
            sum_ns: AtomicU64::new(0),
        }
    }

    pub(crate) fn record(&self, duration: Duration) {
        let bucket = self
            .bounds_us
            .partition_point(|&bound| Duration::from_micros(bound) < duration);
        if let Some(bucket) = self.buckets.get(bucket) {
            bucket.fetch_add(1, Ordering::Relaxed);
        }
        let ns = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        self.sum_ns.fetch_add(ns, Ordering::Relaxed);
    }

    pub(crate) fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        let mut count = 0;
        let bounds = self
            .bounds_us
            .iter()
            .map(|&bound| Duration::from_micros(bound).as_secs_f64());
        let bounds = bounds.chain([f64::INFINITY]);
        let buckets: Vec<(f64, u64)> = bounds
            .zip(&self.buckets)
            .map(|(bound, bucket)| {
                let inside = bucket.load(Ordering::Relaxed);
                count += inside;
                (bound, inside)
            })
            .collect();
        let sum = Duration::from_nanos(self.sum_ns.load(Ordering::Relaxed)).as_secs_f64();
        encoder.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)
    }

    /// One of several histograms of a name, each with its labels.
    pub(crate) fn encode_as(
        &self,
        encoder: &mut MetricEncoder<'_>,
        labels: &impl EncodeLabelSet,
    ) -> fmt::Result {
        self.encode(encoder.encode_family(labels)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::Metrics;

    /// The bucket in which a duration is counted.
    fn bucket_of(duration: Duration, bounds_us: &'static [u64]) -> Option<usize> {
        let histogram = Histogram::new(bounds_us);
        histogram.record(duration);
        let mut buckets = histogram.buckets.iter();
        buckets.position(|bucket| bucket.load(Ordering::Relaxed) == 1)
    }

    #[test]
    fn a_bucket_has_what_is_as_long_as_its_bound_and_nothing_longer() {
        for bounds_us in [WORK_US, WAIT_US] {
            assert!(bounds_us.is_sorted_by(|one, next| one < next));
            assert_eq!(bucket_of(Duration::ZERO, bounds_us), Some(0));
            for (bucket, &bound) in bounds_us.iter().enumerate() {
                let bound = Duration::from_micros(bound);
                let longer = bound + Duration::from_nanos(1);
                assert_eq!(bucket_of(bound, bounds_us), Some(bucket), "{bound:?}");
                assert_eq!(bucket_of(longer, bounds_us), Some(bucket + 1), "{bound:?}");
            }
            let last = Some(bounds_us.len());
            assert_eq!(bucket_of(Duration::MAX, bounds_us), last);
        }
    }

    /// Who reads the text sees the same bounds.
    #[test]
    fn the_text_counts_up_to_each_bound() {
        let metrics = Metrics::default();
        for us in [8, 9] {
            metrics.resolved(Duration::from_micros(us));
        }
        let text = metrics.text();
        for (bound, count) in [("0.000004", 0), ("0.000008", 1), ("0.000016", 2)] {
            let line = format!("pagetide_fault_resolve_seconds_bucket{{le=\"{bound}\"}} {count}\n");
            assert!(text.contains(&line), "{line} is missing in:\n{text}");
        }
    }
}
