//! Taking steps beside each other, each after those that it needs.

use std::collections::HashSet;
use std::hash::Hash;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

/// Calls `take` for each step, from as many threads as `workers`: whenever one is free, the first step in
/// order whose needs have ended. Needs that are not among the steps are met already.
///
/// Every step is taken, also after one that went wrong: `take` keeps what became of them.
pub(super) fn run<S>(
    steps: &[S],
    workers: usize,
    needs: impl Fn(S) -> &'static [S] + Sync,
    take: impl Fn(S) + Sync,
) where
    S: Copy + Eq + Hash + Send + Sync + 'static,
{
    let schedule = Schedule {
        left: Mutex::new(Left {
            waiting: steps.to_vec(),
            unfinished: steps.iter().copied().collect(),
        }),
        ended: Condvar::new(),
    };
    let work = || {
        while let Some(step) = schedule.next(&needs) {
            // Whoever waits for a step that panics would wait for ever.
            let _ended = Ended(&schedule, step);
            take(step);
        }
    };
    thread::scope(|scope| {
        for _ in 0..workers.min(steps.len()) {
            scope.spawn(work);
        }
    });
}

struct Schedule<S: Copy + Eq + Hash> {
    left: Mutex<Left<S>>,
    /// A step has ended.
    ended: Condvar,
}

struct Left<S> {
    /// Not taken yet, in order.
    waiting: Vec<S>,
    /// Not taken, or not ended yet.
    unfinished: HashSet<S>,
}

impl<S: Copy + Eq + Hash + 'static> Schedule<S> {
    fn lock(&self) -> MutexGuard<'_, Left<S>> {
        self.left.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next step, as soon as there is one that can be taken; `None` if none is left.
    fn next(&self, needs: &impl Fn(S) -> &'static [S]) -> Option<S> {
        let mut left = self.lock();
        loop {
            if left.waiting.is_empty() {
                return None;
            }
            let unfinished = &left.unfinished;
            let ready = |step: &S| needs(*step).iter().all(|need| !unfinished.contains(need));
            if let Some(index) = left.waiting.iter().position(ready) {
                return Some(left.waiting.remove(index));
            }
            left = self
                .ended
                .wait(left)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Tells of a step's end when it is dropped.
struct Ended<'a, S: Copy + Eq + Hash + 'static>(&'a Schedule<S>, S);

impl<S: Copy + Eq + Hash + 'static> Drop for Ended<'_, S> {
    fn drop(&mut self) {
        self.0.lock().unfinished.remove(&self.1);
        self.0.ended.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    fn needs(step: u32) -> &'static [u32] {
        match step {
            1 => &[4],
            3 => &[1, 99],
            _ => &[],
        }
    }

    /// The order in which steps begin and end, by `workers`.
    fn order(workers: usize) -> Vec<(u32, &'static str)> {
        let log = Mutex::new(Vec::new());
        let tell = |step, what| log.lock().unwrap().push((step, what));
        run(&[1, 2, 3, 4, 5], workers, needs, |step| {
            tell(step, "begins");
            thread::yield_now();
            tell(step, "ends");
        });
        log.into_inner().unwrap()
    }

    #[test]
    fn one_worker_takes_the_first_that_is_ready() {
        let begun: Vec<_> = order(1).into_iter().step_by(2).collect();
        assert_eq!(begun, [2, 4, 1, 3, 5].map(|step| (step, "begins")));
    }

    #[test]
    fn no_step_begins_before_its_needs_have_ended() {
        for _ in 0..200 {
            let order = order(3);
            assert_eq!(order.len(), 10);
            let at = |step, what| {
                order
                    .iter()
                    .position(|entry| *entry == (step, what))
                    .unwrap()
            };
            assert!(at(4, "ends") < at(1, "begins") && at(1, "ends") < at(3, "begins"));
        }
    }

    #[test]
    fn a_step_that_panics_holds_up_no_other() {
        let taken = Mutex::new(Vec::new());
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            run(&[4, 1, 3], 2, needs, |step| {
                assert!(step != 4, "on purpose");
                taken.lock().unwrap().push(step);
            });
        }));
        assert!(panicked.is_err());
        assert_eq!(*taken.lock().unwrap(), [1, 3]);
    }
}
