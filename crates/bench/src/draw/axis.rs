//! The vertical axis: where its ticks are, and a short label for a tick.
//!
//! The first and the last tick enclose the values, and the axis ends at these two ticks.

use std::ops::Range;

use plotters::coord::ranged1d::{DefaultFormatting, KeyPointHint, Ranged};
use plotters::coord::types::RangedCoordf64;

use crate::units::{decimal, figure, float};

/// The vertical axis of a chart.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Axis {
    /// Linear, from zero to the highest value, or to `at_least` if that is more.
    FromZero {
        /// The axis reaches this value even if no value does.
        at_least: f64,
    },
    /// Logarithmic, with ticks at 1, 2 and 5 times the powers of ten.
    Logarithmic,
    /// Logarithmic, with ticks at powers of two, 1 and 2 among these: for ratios.
    Doubling,
}

/// An axis spans at most this many powers; more powers share ticks.
const MOST_POWERS: f64 = 10.0;
/// Values beyond are drawn at the axis's ends.
const LIMITS: (f64, f64) = (1e-200, 1e200);

impl Axis {
    /// The ticks for values from `low` to `high`, ascending; at least two.
    pub(super) fn ticks(self, low: f64, high: f64) -> Vec<f64> {
        let limited = |value: f64| {
            if value > 0.0 {
                value.clamp(LIMITS.0, LIMITS.1)
            } else {
                1.0
            }
        };
        match self {
            Self::FromZero { at_least } => from_zero(limited(high.max(at_least))),
            Self::Logarithmic => {
                let low = limited(low);
                logarithmic(low, limited(high).max(low))
            }
            Self::Doubling => powers(2.0, limited(low.min(1.0)), limited(high.max(2.0))),
        }
    }
}

/// Multiples of 1, 2 or 5 times a power of ten.
fn from_zero(high: f64) -> Vec<f64> {
    let decade = 10f64.powf((high / 5.0).log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0].map(|step| step * decade);
    let enough = |step: &f64| 5.0 * step >= high * 0.999_999;
    let step = steps.into_iter().find(enough).unwrap_or(steps[3]);
    let counts = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0].into_iter();
    let needed = counts.take_while(|count| (count - 1.0) * step < high * 0.999_999);
    needed.map(|count| count * step).collect()
}

/// Powers of ten, with their multiples by 2 and 5 unless there are many powers.
fn logarithmic(low: f64, high: f64) -> Vec<f64> {
    let powers = powers(10.0, low, high);
    if (high / low).log10() > 2.5 {
        return powers;
    }
    let mut ticks: Vec<f64> = powers
        .iter()
        .flat_map(|power| [1.0, 2.0, 5.0].map(|step| step * power))
        .collect();
    let first = ticks.iter().rposition(|tick| *tick <= low * 1.000_001);
    ticks.drain(..first.unwrap_or(0));
    let last = ticks
        .iter()
        .skip(1)
        .position(|tick| *tick >= high * 0.999_999);
    ticks.truncate(last.map_or(ticks.len(), |last| last + 2));
    ticks
}

/// The powers of `base` from the last one at or below `low` to the first one at or above `high`.
fn powers(base: f64, low: f64, high: f64) -> Vec<f64> {
    let first = (low.log(base) + 1e-6).floor();
    let last = (high.log(base) - 1e-6).ceil().max(first + 1.0);
    let stride = ((last - first) / MOST_POWERS).ceil();
    let last = (last / stride).ceil() * stride;
    let next = |exponent: &f64| Some(exponent + stride).filter(|next| *next <= last);
    std::iter::successors(Some((first / stride).floor() * stride), next)
        .map(|exponent| base.powf(exponent))
        .collect()
}

/// A count as a coordinate.
pub(super) fn number(count: usize) -> f64 {
    float(u64::try_from(count).unwrap_or(u64::MAX))
}

/// An axis for plotters. Values beyond its ends are drawn at the ends.
#[derive(Debug, Clone)]
pub(super) struct Scale {
    ends: Range<f64>,
    ticks: Vec<f64>,
    logarithmic: bool,
}

impl Scale {
    /// A vertical axis from the first to the last tick.
    pub(super) fn values(ticks: Vec<f64>, axis: Axis) -> Self {
        Self {
            ends: ticks[0]..ticks[ticks.len() - 1],
            ticks,
            logarithmic: !matches!(axis, Axis::FromZero { .. }),
        }
    }

    /// A horizontal axis with room for `count` places.
    pub(super) fn places(count: usize) -> Self {
        Self {
            ends: -0.5..number(count.max(1)) - 0.5,
            ticks: (0..count).map(number).collect(),
            logarithmic: false,
        }
    }
}

impl Ranged for Scale {
    type FormatOption = DefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        let Range { start, end } = self.ends;
        let place = |value: f64| if self.logarithmic { value.ln() } else { value };
        let linear = RangedCoordf64::from(place(start)..place(end));
        linear.map(&place(value.clamp(start, end)), limit)
    }

    fn key_points<Hint: KeyPointHint>(&self, hint: Hint) -> Vec<f64> {
        if hint.weight().allow_light_points() {
            Vec::new()
        } else {
            self.ticks.clone()
        }
    }

    fn range(&self) -> Range<f64> {
        self.ends.clone()
    }
}

/// A tick's label in few digits: whole numbers without decimals, thousands as 10k.
pub fn short(value: f64) -> String {
    if value >= 1e6 {
        format!("{}M", decimal(value / 1e6, 1))
    } else if value >= 1e4 {
        format!("{}k", decimal(value / 1e3, 1))
    } else if value >= 1.0 || value == 0.0 {
        decimal(value, 1)
    } else {
        figure(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(one: &[f64], other: &[f64]) -> bool {
        let equal = |(one, other): (&f64, &f64)| (one - other).abs() <= other.abs() * 1e-9;
        one.len() == other.len() && one.iter().zip(other).all(equal)
    }

    #[test]
    fn linear_axes_end_at_a_round_number() {
        let cases: [(f64, &[f64]); 5] = [
            (4134.0, &[0.0, 1000.0, 2000.0, 3000.0, 4000.0, 5000.0]),
            (340.0, &[0.0, 100.0, 200.0, 300.0, 400.0]),
            (1.0, &[0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
            (0.0, &[0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
            (0.03, &[0.0, 0.01, 0.02, 0.03]),
        ];
        for (high, wanted) in cases {
            let ticks = Axis::FromZero { at_least: 0.0 }.ticks(0.0, high);
            assert!(near(&ticks, wanted), "{high}: {ticks:?}");
        }
        let ticks = Axis::FromZero { at_least: 1.0 }.ticks(0.0, 0.01);
        assert!(near(&ticks, cases[2].1), "{ticks:?}");
    }

    #[test]
    fn logarithmic_axes_have_few_ticks() {
        let cases: [(f64, f64, &[f64]); 4] = [
            (3e3, 7e4, &[2e3, 5e3, 1e4, 2e4, 5e4, 1e5]),
            (3e3, 7e7, &[1e3, 1e4, 1e5, 1e6, 1e7, 1e8]),
            (10.0, 10.0, &[10.0, 20.0]),
            (0.0, 0.0, &[1.0, 2.0]),
        ];
        for (low, high, wanted) in cases {
            let ticks = Axis::Logarithmic.ticks(low, high);
            assert!(near(&ticks, wanted), "{low} to {high}: {ticks:?}");
        }
    }

    #[test]
    fn ratios_have_powers_of_two() {
        let cases: [(f64, f64, &[f64]); 4] = [
            (0.9, 5.0, &[0.5, 1.0, 2.0, 4.0, 8.0]),
            (1.0, 4.0, &[1.0, 2.0, 4.0]),
            (3.0, 3.5, &[1.0, 2.0, 4.0]),
            (0.3, 0.4, &[0.25, 0.5, 1.0, 2.0]),
        ];
        for (low, high, wanted) in cases {
            let ticks = Axis::Doubling.ticks(low, high);
            assert!(near(&ticks, wanted), "{low} to {high}: {ticks:?}");
        }
    }

    proptest::proptest! {
        #[test]
        fn ticks_enclose_the_values(low in -199.0..199.0, above in 0.0..300.0f64) {
            let (low, high) = (10f64.powf(low), 10f64.powf((low + above).min(199.0)));
            for axis in [Axis::FromZero { at_least: 0.0 }, Axis::Logarithmic, Axis::Doubling] {
                let ticks = axis.ticks(low, high);
                proptest::prop_assert!((2..=13).contains(&ticks.len()), "{axis:?}: {ticks:?}");
                proptest::prop_assert!(ticks.is_sorted() && ticks[0] < ticks[1], "{axis:?}: {ticks:?}");
                proptest::prop_assert!(ticks[0] <= low * 1.000_01, "{axis:?}: {ticks:?}");
                proptest::prop_assert!(ticks[ticks.len() - 1] >= high * 0.999_99, "{axis:?}: {ticks:?}");
            }
        }
    }

    #[test]
    fn labels_are_short() {
        let cases = [
            (0.0, "0"),
            (0.5, "0.500"),
            (1.5, "1.5"),
            (2000.0, "2000"),
            (25_000.0, "25k"),
            (2_500_000.0, "2.5M"),
        ];
        for (value, text) in cases {
            assert_eq!(short(value), text);
        }
    }
}
