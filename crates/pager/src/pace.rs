//! Back-pressure: work ahead of faults pauses in favour of faults.
//!
//! The crate's documentation gives the reason and a summary. The complete rule:
//!
//! - Over the last [`WINDOW`], the number of faults that installed or requested a page is compared with
//!   the number of pages that the activity itself processed (prefetch: installed or requested).
//! - If there were more faults than pages, and at least [`QUIET_FAULTS_PER_SECOND`], the activity
//!   pauses before its next batch for as long as its last batch took, at most [`LONGEST_PAUSE`] (pauses
//!   below [`SHORTEST_PAUSE`] are added up): it
//!   then uses half of the time and of the other resources that it used before. A longer pause would be
//!   counterproductive: the slower prefetch is, the more the vCPUs fault.
//! - After a pause the activity always processes one batch. It therefore progresses at any rate of
//!   faults, and returns to full speed once it is faster than they are.
//! - After an idle period the window is empty: having been idle does not count as being slow.
//!
//! The rule reads no clock: its callers say what time it is.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// The period over which the two rates are compared.
pub(crate) const WINDOW: Duration = Duration::from_millis(100);

/// The interval of the window's samples, and the minimal length of the window.
const SPACING: Duration = Duration::from_millis(10);

/// The longest pause of an activity. During a pause it does not notice that it is to stop.
const LONGEST_PAUSE: Duration = Duration::from_millis(50);

/// Shorter pauses are added up until they are this long: a timer makes a pause of microseconds many times
/// as long.
const SHORTEST_PAUSE: Duration = Duration::from_micros(500);

/// At a lower rate of faults, concurrent work does not affect them noticeably.
const QUIET_FAULTS_PER_SECOND: u64 = 1000;

/// The counts at a moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sample {
    /// Time since the activity began.
    pub(crate) at: Duration,
    /// Faults that had installed or requested a page.
    pub(crate) faults: u64,
    /// Pages that the activity had processed.
    pub(crate) pages: u64,
}

/// The rule: whether an activity pauses that counted `since` and then `now`.
pub(crate) fn gives_way(since: Sample, now: Sample) -> bool {
    let window = now.at.saturating_sub(since.at);
    let faults = now.faults.saturating_sub(since.faults);
    let pages = now.pages.saturating_sub(since.pages);
    let quiet = u128::from(QUIET_FAULTS_PER_SECOND) * window.as_nanos();
    window >= SPACING && faults > pages && u128::from(faults) * 1_000_000_000 >= quiet
}

/// An activity's window. All times are passed in.
#[derive(Debug)]
pub(crate) struct Pace {
    begun: Instant,
    samples: VecDeque<Sample>,
    last_batch: Duration,
    /// Pauses that were too short to make.
    owed: Duration,
}

impl Pace {
    /// Of an activity that begins now.
    pub(crate) fn new(now: Instant) -> Self {
        Self {
            begun: now,
            samples: VecDeque::new(),
            last_batch: Duration::ZERO,
            owed: Duration::ZERO,
        }
    }

    /// Call after a batch, with its duration.
    pub(crate) fn batch_took(&mut self, duration: Duration) {
        self.last_batch = duration;
    }

    /// Call before a batch: returns the pause before it, if any. Takes the current counts.
    pub(crate) fn pause(&mut self, now: Instant, faults: u64, pages: u64) -> Option<Duration> {
        let at = now.saturating_duration_since(self.begun);
        let now = Sample { at, faults, pages };
        if self.must_pause_at(now) {
            self.owed += self.last_batch.min(LONGEST_PAUSE);
        }
        if self.owed < SHORTEST_PAUSE {
            return None;
        }
        Some(std::mem::take(&mut self.owed))
    }

    fn must_pause_at(&mut self, now: Sample) -> bool {
        let is_old = |sample: &Sample| now.at.saturating_sub(sample.at) > WINDOW;
        while self.samples.front().is_some_and(is_old) {
            self.samples.pop_front();
        }
        let newest = self.samples.back();
        if newest.is_none_or(|newest| now.at.saturating_sub(newest.at) >= SPACING) {
            self.samples.push_back(now);
        }
        self.samples
            .front()
            .is_some_and(|oldest| gives_way(*oldest, now))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const START: Sample = sample(0, 0, 0);

    const fn sample(ms: u64, faults: u64, pages: u64) -> Sample {
        Sample {
            at: Duration::from_millis(ms),
            faults,
            pages,
        }
    }

    #[test]
    fn more_faults_than_pages_cause_a_pause() {
        assert!(gives_way(START, sample(100, 1001, 1000)));
        assert!(!gives_way(START, sample(100, 1000, 1000)));
        assert!(!gives_way(START, sample(100, 10, 1000)));
        assert!(gives_way(sample(500, 5000, 0), sample(600, 6001, 1000)));
    }

    #[test]
    fn few_faults_cause_no_pause() {
        assert!(!gives_way(START, sample(100, 99, 0)));
        assert!(gives_way(START, sample(100, 100, 0)));
    }

    #[test]
    fn a_short_window_causes_no_pause() {
        assert!(!gives_way(START, sample(9, 1000, 0)));
        assert!(gives_way(START, sample(10, 1000, 0)));
        assert!(!gives_way(START, START));
    }

    #[test]
    fn the_window_slides() {
        let mut pace = Pace::new(Instant::now());
        assert!(!pace.must_pause_at(START));
        assert!(pace.must_pause_at(sample(50, 1000, 10)));
        assert!(pace.must_pause_at(sample(90, 2000, 20)));
        // There are no more faults; the earlier ones leave the window.
        assert!(pace.must_pause_at(sample(140, 2000, 30)));
        assert!(!pace.must_pause_at(sample(185, 2000, 40)));
    }

    #[test]
    fn having_been_idle_causes_no_pause() {
        let mut pace = Pace::new(Instant::now());
        assert!(!pace.must_pause_at(START));
        assert!(!pace.must_pause_at(sample(10_000, 1_000_000, 1)));
    }

    /// A pace that begins, and the moment so many milliseconds later.
    fn begun() -> (Pace, impl Fn(u64) -> Instant) {
        let begun = Instant::now();
        let at = move |ms| begun + Duration::from_millis(ms);
        (Pace::new(begun), at)
    }

    #[test]
    fn a_pause_is_as_long_as_the_last_batch() {
        let (mut pace, at) = begun();
        assert_eq!(pace.pause(at(0), 0, 0), None);
        for (now, took, pause) in [(12, 12, 12), (24, 500, 50)] {
            pace.batch_took(Duration::from_millis(took));
            let pause = Duration::from_millis(pause);
            assert_eq!(pace.pause(at(now), u64::MAX, 0), Some(pause));
        }
    }

    #[test]
    fn short_pauses_are_added_up() {
        let (mut pace, at) = begun();
        assert_eq!(pace.pause(at(0), 0, 0), None);
        pace.batch_took(SHORTEST_PAUSE / 4);
        let pauses: Vec<_> = (10..18).map(|ms| pace.pause(at(ms), u64::MAX, 0)).collect();
        let wanted = [None, None, None, Some(SHORTEST_PAUSE)];
        assert_eq!(pauses, [wanted, wanted].concat());
    }

    #[test]
    fn what_was_before_the_window_causes_no_pause() {
        let (mut pace, at) = begun();
        assert_eq!(pace.pause(at(0), 0, 0), None);
        pace.batch_took(Duration::from_millis(12));
        assert_eq!(pace.pause(at(101), u64::MAX, 0), None);
    }

    proptest! {
        /// In every case there are few samples, and an activity that is faster than the faults never
        /// pauses.
        #[test]
        fn an_activity_ahead_of_the_faults_never_pauses(steps in prop::collection::vec((0u64..50, 0u64..500, 0u64..500), 1..200)) {
            let mut pace = Pace::new(Instant::now());
            let mut now = START;
            for (ms, faults, more) in steps {
                now.at += Duration::from_millis(ms);
                now.faults += faults;
                now.pages += faults + more;
                prop_assert!(!pace.must_pause_at(now));
                prop_assert!(pace.samples.len() <= 12);
            }
        }
    }
}
