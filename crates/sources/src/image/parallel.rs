//! Numbered jobs in threads, their results in order.

use std::num::NonZeroUsize;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::{self, Builder};

/// Results of each thread that wait to be taken.
const WAITING: usize = 2;

/// As many threads as this process has processors.
pub(crate) fn default_threads() -> NonZeroUsize {
    thread::available_parallelism().unwrap_or(NonZeroUsize::MIN)
}

/// Does the jobs 0..`jobs` in threads, each of which has a state of its own, and takes the results in
/// the order of the jobs, on this thread. At most three results of each thread exist at a time. After
/// the first error, in the order of the jobs, no further job begins.
///
/// # Errors
/// The first error of `state`, `work` or `take`.
pub(crate) fn in_order<S, T: Send, E: Send>(
    jobs: u64,
    threads: NonZeroUsize,
    state: impl Fn() -> Result<S, E> + Sync,
    work: impl Fn(&mut S, u64) -> Result<T, E> + Sync,
    mut take: impl FnMut(T) -> Result<(), E>,
) -> Result<(), E> {
    let wanted = u64::try_from(threads.get()).unwrap_or(1).min(jobs);
    thread::scope(|scope| {
        let mut lanes: Vec<Receiver<Result<T, E>>> = Vec::new();
        let mut starts = Vec::new();
        for thread in 0..wanted {
            let (results, lane) = sync_channel(WAITING);
            let (start, started) = sync_channel(1);
            let (state, work) = (&state, &work);
            let doing = move || {
                // How many threads there are: fewer than wanted where the system refuses one.
                let Ok(threads) = started.recv() else { return };
                let mut state = match state() {
                    Ok(state) => state,
                    Err(error) => return drop(results.send(Err(error))),
                };
                let mut job = thread;
                while job < jobs {
                    let result = work(&mut state, job);
                    // Nobody receives it: an earlier job has failed, and ended all.
                    if results.send(result).is_err() {
                        return;
                    }
                    job += threads;
                }
            };
            if Builder::new().spawn_scoped(scope, doing).is_err() {
                break;
            }
            lanes.push(lane);
            starts.push(start);
        }
        for start in starts {
            let _ = start.send(lanes.len() as u64);
        }
        if lanes.is_empty() && jobs > 0 {
            let mut state = state()?;
            return (0..jobs).try_for_each(|job| take(work(&mut state, job)?));
        }
        for lane in (0..jobs).zip(lanes.iter().cycle()).map(|(_, lane)| lane) {
            // A thread that ends early has panicked, and the scope panics as well.
            let Ok(result) = lane.recv() else { break };
            take(result?)?;
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use pagetide_test_support::{NoOtherThread, in_a_process_of_its_own};

    use super::*;

    fn threads(number: usize) -> NonZeroUsize {
        NonZeroUsize::new(number).expect("it is not zero")
    }

    #[test]
    fn results_come_in_the_order_of_the_jobs() {
        for (jobs, number) in [(0, 1), (1, 4), (100, 1), (100, 3), (3, 8)] {
            let mut taken = Vec::new();
            let work = |_: &mut (), job| Ok::<_, ()>(job);
            let result = in_order(
                jobs,
                threads(number),
                || Ok(()),
                work,
                |job| {
                    taken.push(job);
                    Ok(())
                },
            );
            assert_eq!(result, Ok(()));
            assert!(
                taken.into_iter().eq(0..jobs),
                "{jobs} jobs, {number} threads"
            );
        }
    }

    #[test]
    fn the_first_error_ends_all() {
        let begun = AtomicU64::new(0);
        let work = |_: &mut (), job: u64| {
            begun.fetch_add(1, Ordering::Relaxed);
            if job < 10 { Ok(job) } else { Err(job) }
        };
        let result = in_order(1 << 40, threads(4), || Ok(()), work, |_| Ok(()));
        assert_eq!(result, Err(10));
        assert!(begun.load(Ordering::Relaxed) < 40);
        let result = in_order(1 << 40, threads(4), || Ok(()), |(), job| Ok(job), Err);
        assert_eq!(result, Err(0));
        let result = in_order(9, threads(2), || Err(7), |_: &mut u64, _| Ok(0), |_| Ok(()));
        assert_eq!(result, Err(7));
    }

    #[test]
    fn without_a_thread_the_jobs_are_done_on_this_one() {
        let this = "image::parallel::tests::without_a_thread_the_jobs_are_done_on_this_one";
        in_a_process_of_its_own(this, || {
            let mut taken = Vec::with_capacity(100);
            let on = |_: &mut (), job| Ok::<_, ()>((job, thread::current().id()));
            let take = |job| {
                taken.push(job);
                Ok(())
            };
            let none = NoOtherThread::begin(&[]);
            let done = in_order(100, threads(4), || Ok(()), on, take);
            drop(none);
            assert_eq!(done, Ok(()));
            let here = thread::current().id();
            assert!(taken.into_iter().eq((0..100).map(|job| (job, here))));
        });
    }
}
