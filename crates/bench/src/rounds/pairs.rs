//! Comparing two series, run by run of the same round: what drifts from round to round cancels out.

use crate::stats::RatioOf;

/// A measured run, which belongs to a round.
pub(crate) trait InRound {
    /// The round, from 1.
    fn round(&self) -> u32;
}

/// The ratio of a value, `over` to `under`, in rounds that have it in both; `None` if there are none.
pub(crate) fn paired<R: InRound>(
    over: &[R],
    under: &[R],
    value: impl Fn(&R) -> Option<f64>,
) -> Option<RatioOf> {
    let both = over.iter().filter_map(|run| {
        let other = under.iter().find(|other| other.round() == run.round())?;
        Some((value(run)?, value(other)?))
    });
    let (over, under): (Vec<f64>, Vec<f64>) = both.unzip();
    RatioOf::of(&over, &under)
}

#[cfg(test)]
mod tests {
    use super::*;

    impl InRound for (u32, Option<f64>) {
        fn round(&self) -> u32 {
            self.0
        }
    }

    #[test]
    fn only_rounds_that_both_have_count() {
        let over = [(1, Some(8.0)), (2, Some(100.0)), (3, Some(1.0))];
        let under = [(3, None), (1, Some(2.0))];
        let ratio = paired(&over, &under, |run| run.1).unwrap();
        assert_eq!((ratio.paired.count, ratio.paired.median), (1, 4.0));
        assert!(paired(&over, &[], |run| run.1).is_none());
    }
}
