//! Order statistics over a handful of runs.
//!
//! Benchmarks here repeat each measurement a few times (seven, say), so nothing is assumed about a
//! distribution: a median says where the middle is, the extremes and the quartiles say how far the
//! runs lay apart.

use serde::{Deserialize, Serialize};

/// Five-number summary of one quantity over several runs, in the quantity's own unit.
///
/// Quartiles are interpolated linearly between the two nearest ranks (the definition that R calls
/// type 7 and spreadsheets use), so that `q1 == median == q3` for a single run.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// How many runs were summarised.
    pub count: usize,
    /// The smallest value.
    pub min: f64,
    /// First quartile.
    pub q1: f64,
    /// The middle.
    pub median: f64,
    /// Third quartile.
    pub q3: f64,
    /// The largest value.
    pub max: f64,
}

impl Spread {
    /// Summarises `values`; `None` if there are none or one of them is not finite.
    #[must_use]
    pub fn of(values: &[f64]) -> Option<Self> {
        if values.is_empty() || values.iter().any(|value| !value.is_finite()) {
            return None;
        }
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (min, max) = (*sorted.first()?, *sorted.last()?);
        Some(Self {
            count: sorted.len(),
            min,
            q1: quartile(&sorted, 1),
            median: quartile(&sorted, 2),
            q3: quartile(&sorted, 3),
            max,
        })
    }

    /// Interquartile range: the width of the middle half of the runs.
    #[must_use]
    pub fn iqr(&self) -> f64 {
        self.q3 - self.q1
    }

    /// Each figure by its name in data.
    pub(crate) fn figures(&self) -> [(&'static str, f64); 5] {
        [
            ("median", self.median),
            ("min", self.min),
            ("q1", self.q1),
            ("q3", self.q3),
            ("max", self.max),
        ]
    }

    /// The same summary of every value multiplied by `factor` (which must not be negative: the
    /// order of the values stays).
    #[must_use]
    pub fn scaled(&self, factor: f64) -> Self {
        Self {
            count: self.count,
            min: self.min * factor,
            q1: self.q1 * factor,
            median: self.median * factor,
            q3: self.q3 * factor,
            max: self.max * factor,
        }
    }
}

/// The `quarter`th quartile of a sorted slice that is not empty. Integer arithmetic picks the
/// ranks, so no float is ever turned into an index.
fn quartile(sorted: &[f64], quarter: usize) -> f64 {
    let scaled_rank = (sorted.len() - 1) * quarter;
    let (below, remainder) = (scaled_rank / 4, scaled_rank % 4);
    let low = sorted[below];
    if remainder == 0 {
        return low;
    }
    let fraction = [0.0, 0.25, 0.5, 0.75][remainder];
    low + (sorted[below + 1] - low) * fraction
}

/// How two series compare, computed in the two usual ways.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct RatioOf {
    /// Summary of the ratios of runs from the same round. Drift of the machine between rounds
    /// cancels, so this is the figure to quote.
    pub paired: Spread,
    /// Median of the one series over median of the other.
    pub of_medians: f64,
}

impl RatioOf {
    /// `numerator[i] / denominator[i]` are runs of the same round. `None` if the lengths differ,
    /// there is nothing to compare, or a ratio is not finite.
    #[must_use]
    pub fn of(numerator: &[f64], denominator: &[f64]) -> Option<Self> {
        if numerator.len() != denominator.len() {
            return None;
        }
        let ratios: Vec<f64> = numerator
            .iter()
            .zip(denominator)
            .map(|(n, d)| n / d)
            .collect();
        Some(Self {
            paired: Spread::of(&ratios)?,
            of_medians: Spread::of(numerator)?.median / Spread::of(denominator)?.median,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_single_run_is_its_own_summary() {
        let spread = Spread::of(&[3.5]).unwrap();
        let all = [spread.min, spread.q1, spread.median, spread.q3, spread.max];
        assert_eq!((spread.count, all, spread.iqr()), (1, [3.5; 5], 0.0));
    }

    #[test]
    fn quartiles_interpolate_between_ranks() {
        // (values, q1, median, q3) as `quantile(x, c(.25, .5, .75), type = 7)` gives them.
        let cases: [(&[f64], f64, f64, f64); 5] = [
            (&[1.0, 2.0], 1.25, 1.5, 1.75),
            (&[3.0, 1.0, 2.0], 1.5, 2.0, 2.5),
            (&[4.0, 1.0, 3.0, 2.0], 1.75, 2.5, 3.25),
            (&[5.0, 1.0, 4.0, 2.0, 3.0], 2.0, 3.0, 4.0),
            (&[7.0, 15.0, 36.0, 39.0, 40.0, 41.0], 20.25, 37.5, 39.75),
        ];
        for (values, q1, median, q3) in cases {
            let spread = Spread::of(values).unwrap();
            assert_eq!(
                (spread.q1, spread.median, spread.q3),
                (q1, median, q3),
                "{values:?}"
            );
            assert_eq!(spread.count, values.len());
        }
    }

    #[test]
    fn extremes_do_not_depend_on_the_order() {
        let spread = Spread::of(&[9.0, -2.0, 4.0]).unwrap();
        assert_eq!((spread.min, spread.max), (-2.0, 9.0));
    }

    #[test]
    fn nothing_and_nonsense_have_no_summary() {
        assert_eq!(Spread::of(&[]), None);
        assert_eq!(Spread::of(&[1.0, f64::NAN]), None);
        assert_eq!(Spread::of(&[1.0, f64::INFINITY]), None);
    }

    #[test]
    fn paired_ratio_cancels_drift_that_the_ratio_of_medians_sees() {
        // The machine slows down by half in every round; exit is always exactly twice uffd.
        let ratio = RatioOf::of(&[800.0, 400.0, 200.0], &[400.0, 200.0, 100.0]).unwrap();
        assert_eq!(
            (ratio.paired.min, ratio.paired.median, ratio.paired.max),
            (2.0, 2.0, 2.0)
        );
        // With rounds out of step the two definitions part.
        let ratio = RatioOf::of(&[10.0, 2.0, 3.0], &[1.0, 2.0, 10.0]).unwrap();
        assert_eq!((ratio.paired.median, ratio.of_medians), (1.0, 1.5));
    }

    #[test]
    fn ratios_need_pairs_and_a_denominator() {
        assert_eq!(RatioOf::of(&[1.0], &[1.0, 2.0]), None);
        assert_eq!(RatioOf::of(&[], &[]), None);
        assert_eq!(RatioOf::of(&[1.0], &[0.0]), None);
    }

    #[test]
    fn scaling_scales_every_number() {
        let spread = Spread::of(&[1.0, 2.0, 3.0]).unwrap().scaled(2.0);
        assert_eq!(
            (spread.min, spread.median, spread.max, spread.iqr()),
            (2.0, 4.0, 6.0, 2.0)
        );
    }
}
