//! EAGAIN: the kernel defers an installation while the process changes its address space.
//!
//! That is no failure. It normally passes within microseconds. But the process's thread may have to wait for a
//! processor for as long as the host makes it wait: stolen time, a limit of its cgroup, a thread of higher
//! priority. So tries are bounded by time, and made further and further apart.

use std::cell::Cell;
use std::thread;
use std::time::{Duration, Instant};

use crate::error::InstallFailure;

/// For so long a thread tries again before it reports that the memory takes nothing.
const PATIENCE: Duration = Duration::from_secs(30);

/// For so long a thread that serves other faults as well tries again before it sees to those first.
const TURN: Duration = Duration::from_millis(20);

thread_local! {
    /// The end of the budget with which this thread serves, if it has one.
    static ENDS: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// The budget of a thread that serves, until this is dropped: whatever it comes to does not pause beyond it.
#[derive(Debug)]
pub(crate) struct Budget {
    before: Option<Instant>,
}

impl Budget {
    pub(crate) fn of(budget: Duration) -> Self {
        let ends = Instant::now().checked_add(budget);
        // A callback may serve another pager meanwhile.
        let before = ENDS.get();
        ENDS.set(ends.into_iter().chain(before).min());
        Self { before }
    }

    /// What is left of this thread's budget; `None` without one.
    fn left() -> Option<Duration> {
        let ends = ENDS.get()?;
        Some(ends.saturating_duration_since(Instant::now()))
    }

    /// Whether this thread's budget has passed.
    pub(crate) fn is_over() -> bool {
        Self::left().is_some_and(|left| left.is_zero())
    }
}

impl Drop for Budget {
    fn drop(&mut self) {
        ENDS.set(self.before);
    }
}

/// Tries at first only let other threads run.
const YIELDS: u32 = 32;
/// The pause after those; it doubles with each try, ...
const FIRST_PAUSE: Duration = Duration::from_micros(50);
/// ... up to this.
const LONGEST_PAUSE: Duration = Duration::from_millis(10);

/// The tries of one installation, since its last progress.
#[derive(Debug)]
pub(crate) struct Again {
    limit: Duration,
    tries: u32,
    since: Option<Instant>,
    /// Whether progress gives it no further time.
    is_in_all: bool,
    /// The pages at which nothing was mapped, since these were taken.
    holes: u64,
    /// Whether no pause goes beyond the thread's budget.
    heeds_budget: bool,
}

impl Again {
    /// For a thread that has nothing else to do meanwhile.
    pub(crate) fn with_patience() -> Self {
        Self::new(PATIENCE)
    }

    /// For a thread that can come back later.
    pub(crate) fn for_a_turn() -> Self {
        Self {
            heeds_budget: true,
            ..Self::new(TURN)
        }
    }

    /// The same whatever is left of the thread's budget: for what nobody comes back to.
    pub(crate) fn for_a_turn_at_least() -> Self {
        Self::new(TURN)
    }

    /// For any number of installations together, of a thread that others wait for.
    pub(crate) fn in_all() -> Self {
        Self {
            is_in_all: true,
            ..Self::with_patience()
        }
    }

    fn new(limit: Duration) -> Self {
        Self {
            limit,
            tries: 0,
            since: None,
            is_in_all: false,
            holes: 0,
            heeds_budget: false,
        }
    }

    /// Something was installed: what follows is another installation.
    pub(crate) fn progress(&mut self) {
        self.tries = 0;
        if !self.is_in_all {
            self.since = None;
        }
    }

    /// Nothing is mapped at a page.
    pub(crate) fn found_hole(&mut self) {
        self.holes += 1;
    }

    /// How many such pages there were since the last call.
    pub(crate) fn take_holes(&mut self) -> u64 {
        std::mem::take(&mut self.holes)
    }

    /// How often it was tried in vain.
    pub(crate) fn tries(&self) -> u32 {
        self.tries
    }

    /// Pauses before the next try.
    ///
    /// # Errors
    /// [`InstallFailure::Busy`] after all of the time, or of the thread's budget.
    pub(crate) fn pause(&mut self) -> Result<(), InstallFailure> {
        let waited = self.since.get_or_insert_with(Instant::now).elapsed();
        let left = Budget::left().filter(|_| self.heeds_budget);
        match pause(self.tries, waited, self.limit, left) {
            None => return Err(InstallFailure::Busy { waited }),
            Some(Duration::ZERO) => thread::yield_now(),
            Some(pause) => thread::sleep(pause),
        }
        self.tries = self.tries.saturating_add(1);
        Ok(())
    }
}

/// The pause after `tries` tries, which took `waited`; zero for one that only lets other threads run. `None` after
/// `limit`, and where nothing is `left` of a budget.
fn pause(
    tries: u32,
    waited: Duration,
    limit: Duration,
    left: Option<Duration>,
) -> Option<Duration> {
    let left = left.unwrap_or(Duration::MAX);
    if waited >= limit || left.is_zero() {
        return None;
    }
    let Some(doublings) = tries.checked_sub(YIELDS) else {
        return Some(Duration::ZERO);
    };
    let pause = FIRST_PAUSE.saturating_mul(1 << doublings.min(16));
    Some(pause.min(LONGEST_PAUSE).min(left))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Time is an argument: no clock decides.
    #[test]
    fn tries_are_bounded_by_time_and_become_rare() {
        const SOON: Duration = Duration::from_micros(1);
        let after = |tries, waited| pause(tries, waited, TURN, None);
        assert_eq!(after(0, Duration::ZERO), Some(Duration::ZERO));
        assert_eq!(after(YIELDS - 1, SOON), Some(Duration::ZERO));
        assert_eq!(after(YIELDS, SOON), Some(FIRST_PAUSE));
        assert_eq!(after(YIELDS + 1, SOON), Some(2 * FIRST_PAUSE));
        assert_eq!(after(u32::MAX, SOON), Some(LONGEST_PAUSE));
        // However few tries there were: a thread without a processor makes none.
        assert_eq!(after(1, TURN), None);
        // And however many.
        assert_eq!(after(u32::MAX, TURN - SOON), Some(LONGEST_PAUSE));
    }

    /// Kind: a time of its own for what a caller gives a time for.
    #[test]
    fn no_pause_goes_beyond_what_is_left_of_a_budget() {
        const LITTLE: Duration = Duration::from_micros(70);
        let after = |tries, left| pause(tries, Duration::ZERO, TURN, Some(left));
        assert_eq!(after(0, LITTLE), Some(Duration::ZERO));
        assert_eq!(after(YIELDS, LITTLE), Some(FIRST_PAUSE));
        assert_eq!(after(YIELDS + 1, LITTLE), Some(LITTLE));
        assert_eq!(after(0, Duration::ZERO), None);
    }

    #[test]
    fn a_budget_is_that_of_the_thread_that_serves() {
        let busy = |mut again: Again| again.pause().is_err();
        {
            let _budget = Budget::of(Duration::ZERO);
            assert!(Budget::is_over() && busy(Again::for_a_turn()));
            {
                // Of a callback, which has no more time than its caller.
                let _longer = Budget::of(Duration::MAX);
                assert!(Budget::is_over());
            }
            assert!(Budget::is_over());
            // Nobody comes back to a child that has ended.
            assert!(!busy(Again::for_a_turn_at_least()));
            // It waits for others, whatever its budget: a mark of lost memory is not left out.
            assert!(!busy(Again::with_patience()));
            let other = thread::spawn(Budget::is_over);
            assert!(!other.join().unwrap());
        }
        assert!(!Budget::is_over() && !busy(Again::for_a_turn()));
    }

    #[test]
    fn progress_begins_anew() {
        let mut again = Again::new(Duration::ZERO);
        assert!(matches!(again.pause(), Err(InstallFailure::Busy { .. })));
        let mut again = Again::with_patience();
        for tries in 0..5 {
            assert_eq!(again.tries(), tries);
            again.pause().unwrap();
        }
        again.progress();
        assert_eq!(again.tries(), 0);
        assert_eq!(again.since, None);
    }

    /// Kind: a time for each of something that another process can make any number of, here runs of missing pages.
    #[test]
    fn progress_gives_many_installations_together_no_further_time() {
        let mut again = Again::in_all();
        again.pause().unwrap();
        let since = again.since;
        again.progress();
        assert_eq!((again.tries(), again.since), (0, since));
        assert!(since.is_some());
    }
}
