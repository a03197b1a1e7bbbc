//! Whether precopy goes on, as a pure function of the rounds so far.

use std::time::Duration;

use crate::layout::PAGE_BYTES;
use crate::rounds::Round;

/// What a round of precopy did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoundStats {
    /// The pages that the round sent, of any kind.
    pub sent_pages: u64,
    /// The bytes that its records took on the wire.
    pub wire_bytes: u64,
    /// From the harvest that began the round to its last record.
    pub duration: Duration,
    /// The pages that are dirty at its end.
    pub dirty_pages: u64,
}

/// How the VM may be moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Precopy while it gains, then postcopy.
    Auto,
    /// Precopy only.
    Precopy,
    /// Postcopy at once.
    Postcopy,
}

/// What happens when the deadline has passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnDeadline {
    /// Switch by postcopy.
    Postcopy,
    /// Stop the VM and send the rest, whatever the blackout.
    Force,
    /// Give the migration up.
    Cancel,
}

/// What the operator asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// How the VM may be moved.
    pub mode: Mode,
    /// The blackout that is aimed at: from the last vCPU's stop at the source to the first one's start at the destination.
    pub blackout: Duration,
    /// The part of the blackout that does not depend on dirty pages: round trips, state, records.
    pub blackout_overhead: Duration,
    /// From *accepted* until [`OnDeadline`] counts.
    pub deadline: Duration,
    /// What then happens.
    pub on_deadline: OnDeadline,
    /// The most rounds while the VM runs; never more than [`MOST_ROUNDS`].
    pub max_rounds: u8,
}

/// What to do at the end of a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Decision {
    /// Another round.
    NextRound,
    /// Stop the VM and send what is dirty before the switch.
    StopAndCopy,
    /// Stop the VM and let the destination fetch what is dirty.
    Postcopy,
    /// Give up; the VM goes on at the source.
    Cancel,
}

/// A decision with the numbers that led to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// What to do.
    pub decision: Decision,
    /// The blackout if the VM stopped now and all dirty pages were sent first. `None` before anything was measured.
    pub estimate: Option<Duration>,
    /// The dirty pages of the last two rounds, the older one first, if precopy was judged not to gain.
    pub not_gaining: Option<(u64, u64)>,
}

/// A round gains if it leaves at most this share of the dirty pages that the round before it left.
const GAIN_NUMERATOR: u64 = 7;
const GAIN_DENOMINATOR: u64 = 8;

/// The most rounds while the VM runs: one more number is left for the round of a stop.
pub const MOST_ROUNDS: u8 = Round::LAST.0 - 1;

/// The blackout of a stop after `round`: its dirty pages at its rate, and the overhead.
pub fn estimate_blackout(round: &RoundStats, overhead: Duration) -> Option<Duration> {
    if round.dirty_pages == 0 {
        return Some(overhead);
    }
    let bytes_per_page = match round.sent_pages {
        0 => PAGE_BYTES,
        sent => round.wire_bytes.div_ceil(sent),
    };
    let bytes = u128::from(bytes_per_page) * u128::from(round.dirty_pages);
    let time_ns = bytes
        .checked_mul(round.duration.as_nanos())?
        .checked_div(u128::from(round.wire_bytes))?;
    let copy = Duration::from_nanos(u64::try_from(time_ns).unwrap_or(u64::MAX));
    Some(copy.saturating_add(overhead))
}

/// Decides at the end of a round. `elapsed` is the time since *accepted*; `rounds` are all rounds so far.
pub fn decide(policy: &Policy, rounds: &[RoundStats], elapsed: Duration) -> Verdict {
    let last = rounds.last();
    let estimate = last.and_then(|round| estimate_blackout(round, policy.blackout_overhead));
    let fits = estimate.is_some_and(|estimate| estimate <= policy.blackout);
    let not_gaining = not_gaining(rounds);
    let most_rounds = policy.max_rounds.min(MOST_ROUNDS);
    let is_last_round = rounds.len() >= usize::from(most_rounds);
    let decision = match policy.mode {
        Mode::Postcopy => Decision::Postcopy,
        _ if fits => Decision::StopAndCopy,
        _ if elapsed >= policy.deadline => at_deadline(policy),
        Mode::Auto if not_gaining.is_some() || is_last_round => Decision::Postcopy,
        Mode::Precopy if is_last_round => at_deadline(policy),
        _ => Decision::NextRound,
    };
    Verdict {
        decision,
        estimate,
        not_gaining,
    }
}

fn at_deadline(policy: &Policy) -> Decision {
    match (policy.on_deadline, policy.mode) {
        (OnDeadline::Cancel, _) | (OnDeadline::Postcopy, Mode::Precopy) => Decision::Cancel,
        (OnDeadline::Force, _) => Decision::StopAndCopy,
        (OnDeadline::Postcopy, _) => Decision::Postcopy,
    }
}

fn not_gaining(rounds: &[RoundStats]) -> Option<(u64, u64)> {
    let [.., before, last] = rounds else {
        return None;
    };
    let left = last.dirty_pages.saturating_mul(GAIN_DENOMINATOR);
    let enough = before.dirty_pages.saturating_mul(GAIN_NUMERATOR);
    (left > enough).then_some((before.dirty_pages, last.dirty_pages))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn policy(mode: Mode) -> Policy {
        Policy {
            mode,
            blackout: 300 * MS,
            blackout_overhead: 10 * MS,
            deadline: 60_000 * MS,
            on_deadline: OnDeadline::Postcopy,
            max_rounds: 30,
        }
    }

    /// A round at 1000 pages a second.
    fn round(sent_pages: u64, dirty_pages: u64) -> RoundStats {
        let duration = Duration::from_millis(sent_pages);
        RoundStats {
            sent_pages,
            wire_bytes: sent_pages * 4112,
            duration,
            dirty_pages,
        }
    }

    #[test]
    fn a_guest_that_fits_the_blackout_is_stopped() {
        let verdict = decide(&policy(Mode::Auto), &[round(10_000, 290)], 10_000 * MS);
        assert_eq!(verdict.decision, Decision::StopAndCopy);
        assert_eq!(verdict.estimate, Some(300 * MS));
        let verdict = decide(&policy(Mode::Auto), &[round(10_000, 291)], 10_000 * MS);
        assert_eq!(verdict.decision, Decision::NextRound);
    }

    #[test]
    fn a_guest_that_does_not_converge_moves_by_postcopy_or_not_at_all() {
        let rounds = [round(10_000, 8000), round(8000, 7800)];
        let verdict = decide(&policy(Mode::Auto), &rounds, 18_000 * MS);
        assert_eq!(verdict.decision, Decision::Postcopy);
        assert_eq!(verdict.not_gaining, Some((8000, 7800)));
        let late = |on_deadline| Policy {
            on_deadline,
            ..policy(Mode::Precopy)
        };
        let decide_late = |on_deadline| decide(&late(on_deadline), &rounds, 60_000 * MS).decision;
        assert_eq!(decide_late(OnDeadline::Cancel), Decision::Cancel);
        assert_eq!(decide_late(OnDeadline::Postcopy), Decision::Cancel);
        assert_eq!(decide_late(OnDeadline::Force), Decision::StopAndCopy);
        assert_eq!(
            decide(&late(OnDeadline::Force), &rounds, MS).decision,
            Decision::NextRound
        );
    }

    #[test]
    fn postcopy_needs_no_round() {
        assert_eq!(
            decide(&policy(Mode::Postcopy), &[], MS).decision,
            Decision::Postcopy
        );
        assert_eq!(
            decide(&policy(Mode::Auto), &[], MS).decision,
            Decision::NextRound
        );
    }

    #[test]
    fn the_last_round_is_left_for_a_stop() {
        let rounds = vec![round(10_000, 9000); 249];
        let policy = Policy {
            on_deadline: OnDeadline::Force,
            max_rounds: 255,
            ..policy(Mode::Precopy)
        };
        assert_eq!(
            decide(&policy, &rounds[1..], MS).decision,
            Decision::NextRound
        );
        assert_eq!(decide(&policy, &rounds, MS).decision, Decision::StopAndCopy);
    }

    proptest! {
        #[test]
        fn every_guest_stops_and_no_number_overflows(
            rounds in prop::collection::vec((any::<u64>(), any::<u64>(), any::<u64>(), any::<u64>()), 0..4),
            mode in 0..3_usize,
        ) {
            let mode = [Mode::Auto, Mode::Precopy, Mode::Postcopy][mode];
            let stats = |&(sent_pages, wire_bytes, ns, dirty_pages): &(u64, u64, u64, u64)| {
                RoundStats { sent_pages, wire_bytes, duration: Duration::from_nanos(ns), dirty_pages }
            };
            let rounds: Vec<_> = rounds.iter().map(stats).collect();
            let late = decide(&policy(mode), &rounds, 60_000 * MS);
            prop_assert_ne!(late.decision, Decision::NextRound);
            let last = Policy { max_rounds: 0, ..policy(mode) };
            prop_assert_ne!(decide(&last, &rounds, MS).decision, Decision::NextRound);
        }
    }
}
