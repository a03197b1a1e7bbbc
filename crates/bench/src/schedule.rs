//! The order of runs.
//!
//! A machine drifts: it warms up, its neighbours come and go. If all runs of one series came before
//! all runs of the next, the drift would be read as a difference between them. So every round runs
//! every series once at each number of vCPUs, the series of one number right after each other, and
//! the one that goes first changes from round to round.

/// One run of the benchmark.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Step {
    /// 0 warms up and is not counted; the measured rounds start at 1.
    pub(crate) round: u32,
    /// Which of the plan's numbers of vCPUs.
    pub(crate) vcpus: usize,
    /// Which of the plan's series.
    pub(crate) series: usize,
}

/// All steps for `rounds` measured rounds after one that warms up.
pub(crate) fn schedule(vcpus: usize, series: usize, rounds: u32) -> impl Iterator<Item = Step> {
    (0..=rounds).flat_map(move |round| {
        (0..vcpus).flat_map(move |vcpus| {
            (0..series).map(move |place| Step {
                round,
                vcpus,
                series: (place + usize::try_from(round).unwrap_or(0)) % series,
            })
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round_of(steps: &[Step], round: u32, vcpus: usize) -> Vec<usize> {
        let chosen = steps
            .iter()
            .filter(|step| step.round == round && step.vcpus == vcpus);
        chosen.map(|step| step.series).collect()
    }

    #[test]
    fn every_round_has_every_run_once() {
        let steps: Vec<_> = schedule(2, 3, 5).collect();
        assert_eq!(steps.len(), 2 * 3 * 6);
        for round in 0..=5 {
            for vcpus in [0, 1] {
                let mut series = round_of(&steps, round, vcpus);
                series.sort_unstable();
                assert_eq!(series, [0, 1, 2], "round {round}, number {vcpus}");
            }
        }
    }

    #[test]
    fn the_first_series_rotates() {
        let steps: Vec<_> = schedule(1, 3, 3).collect();
        let firsts: Vec<_> = (0..=3).map(|round| round_of(&steps, round, 0)[0]).collect();
        assert_eq!(firsts, [0, 1, 2, 0]);
    }

    #[test]
    fn series_of_one_vcpu_count_follow_each_other() {
        let steps: Vec<_> = schedule(2, 2, 1).collect();
        let vcpus: Vec<_> = steps.iter().map(|step| step.vcpus).collect();
        assert_eq!(vcpus, [0, 0, 1, 1, 0, 0, 1, 1]);
    }

    #[test]
    fn only_round_zero_is_not_counted() {
        let (warm, counted): (Vec<_>, Vec<_>) = schedule(1, 2, 7).partition(|step| step.round == 0);
        assert_eq!((warm.len(), counted.len()), (2, 14));
    }

    #[test]
    fn no_series_no_steps() {
        assert_eq!(schedule(1, 0, 3).count(), 0);
    }
}
