//! Axes: from values to pixels, and where the ticks go.

/// A vertical axis.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Scale {
    low: f64,
    high: f64,
    logarithmic: bool,
    ticks: Vec<f64>,
}

impl Scale {
    /// From zero to a round number at or above `highest`.
    pub(crate) fn from_zero(highest: f64) -> Self {
        let highest = if highest > 0.0 { highest } else { 1.0 };
        let step = round_step(highest / 5.0);
        let mut ticks = vec![0.0];
        let (mut count, mut top) = (0.0, 0.0);
        while top < highest * 0.999_999 {
            count += 1.0;
            // Multiplied rather than summed up, so that errors do not add up.
            top = count * step;
            ticks.push(top);
        }
        Self {
            low: 0.0,
            high: top,
            logarithmic: false,
            ticks,
        }
    }

    /// Logarithmic, whole steps of 1, 2, 5 (or of decades, if there are many) around the values.
    pub(crate) fn logarithmic(lowest: f64, highest: f64) -> Self {
        let lowest = if lowest > 0.0 { lowest } else { 1.0 };
        let highest = highest.max(lowest);
        let decades = (highest / lowest).log10();
        let steps: &[f64] = if decades > 2.5 {
            &[1.0]
        } else {
            &[1.0, 2.0, 5.0]
        };
        let mut candidates = Vec::new();
        let mut decade = 10f64.powf(lowest.log10().floor() - 1.0);
        while decade <= highest * 100.0 {
            candidates.extend(steps.iter().map(|step| step * decade));
            decade *= 10.0;
        }
        Self::between(&candidates, lowest, highest)
    }

    /// Logarithmic with powers of two, for ratios.
    pub(crate) fn doubling(lowest: f64, highest: f64) -> Self {
        let lowest = if lowest > 0.0 { lowest } else { 1.0 };
        let highest = highest.max(lowest);
        let candidates: Vec<f64> = (-20..=40).map(|power| 2f64.powi(power)).collect();
        Self::between(&candidates, lowest, highest)
    }

    /// A logarithmic axis from the last candidate at or below `lowest` to the first at or above
    /// `highest`, with the candidates between as ticks.
    fn between(candidates: &[f64], lowest: f64, highest: f64) -> Self {
        let below = candidates
            .iter()
            .rev()
            .find(|tick| **tick <= lowest * 1.000_001);
        let low = below.copied().unwrap_or(lowest);
        let above = candidates
            .iter()
            .find(|tick| **tick >= highest * 0.999_999 && **tick > low);
        let high = above.copied().unwrap_or(highest * 2.0);
        let ticks = candidates
            .iter()
            .copied()
            .filter(|tick| (low..=high).contains(tick))
            .collect();
        Self {
            low,
            high,
            logarithmic: true,
            ticks,
        }
    }

    /// Where a value lies: 0 at the bottom, 1 at the top; outside values stay on the edge.
    pub(crate) fn place(&self, value: f64) -> f64 {
        let place = if self.logarithmic {
            (value.max(self.low) / self.low).ln() / (self.high / self.low).ln()
        } else {
            (value - self.low) / (self.high - self.low)
        };
        place.clamp(0.0, 1.0)
    }

    /// Where lines and labels go, ascending.
    pub(crate) fn ticks(&self) -> &[f64] {
        &self.ticks
    }
}

/// 1, 2 or 5 times a power of ten, at or above `least`.
fn round_step(least: f64) -> f64 {
    let decade = 10f64.powf(least.log10().floor());
    [1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .map(|step| step * decade)
        .find(|step| *step >= least * 0.999_999)
        .unwrap_or(10.0 * decade)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn linear_axes_end_at_a_round_number() {
        let cases: [(f64, &[f64]); 4] = [
            (4134.0, &[0.0, 1000.0, 2000.0, 3000.0, 4000.0, 5000.0]),
            (340.0, &[0.0, 100.0, 200.0, 300.0, 400.0]),
            (1.0, &[0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
            (0.0, &[0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        ];
        for (highest, ticks) in cases {
            let scale = Scale::from_zero(highest);
            let near = scale
                .ticks()
                .iter()
                .zip(ticks)
                .all(|(one, other)| (one - other).abs() < 1e-9);
            assert!(
                near && scale.ticks().len() == ticks.len(),
                "{highest}: {scale:?}"
            );
            assert!(scale.place(highest) <= 1.0 && scale.place(0.0) == 0.0);
        }
    }

    #[test]
    fn logarithmic_axes_enclose_their_values() {
        let scale = Scale::logarithmic(3_000.0, 70_000.0);
        assert_eq!(scale.ticks(), [2e3, 5e3, 1e4, 2e4, 5e4, 1e5]);
        let wide = Scale::logarithmic(3_000.0, 70_000_000.0);
        assert_eq!(wide.ticks(), [1e3, 1e4, 1e5, 1e6, 1e7, 1e8]);
        assert!((wide.place(1e3) - 0.0).abs() < 1e-9 && (wide.place(1e8) - 1.0).abs() < 1e-9);
        assert!((wide.place(316_227.766) - 0.5).abs() < 1e-3);
    }

    #[test]
    fn a_single_value_still_has_an_axis() {
        for scale in [Scale::logarithmic(10.0, 10.0), Scale::doubling(1.0, 1.0)] {
            assert!(scale.ticks().len() >= 2, "{scale:?}");
            assert!(scale.place(10.0).is_finite());
        }
    }

    #[test]
    fn doubling_axes_have_powers_of_two() {
        assert_eq!(Scale::doubling(0.9, 5.0).ticks(), [0.5, 1.0, 2.0, 4.0, 8.0]);
        assert_eq!(Scale::doubling(1.0, 4.0).ticks(), [1.0, 2.0, 4.0]);
    }

    #[test]
    fn what_lies_outside_stays_on_the_edge() {
        let scale = Scale::from_zero(10.0);
        assert_eq!((scale.place(-5.0), scale.place(1e9)), (0.0, 1.0));
    }
}
