//! Threads that do jobs: as many as there are jobs, up to a bound. One that has had nothing to do for a while ends.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::Builder;
use std::time::Duration;

/// How long a thread waits for its next job.
const IDLE_LIMIT: Duration = Duration::from_secs(10);

/// Dropped without being called, if there is no thread for it.
pub(super) type Job = Box<dyn FnOnce() + Send>;

/// The threads of one kind.
#[derive(Debug)]
pub(super) struct Threads {
    name: &'static str,
    most: usize,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    /// Threads that wait for a job.
    idle: usize,
    /// Threads that have been started, or are about to be.
    threads: usize,
}

impl Threads {
    /// Of this name; `most` at a time.
    pub(super) fn new(name: &'static str, most: usize) -> Self {
        Self {
            name,
            most,
            shared: Arc::default(),
        }
    }

    /// Has a thread do the job, which may wait for others. Does not wait.
    ///
    /// # Errors
    /// The kernel's, if there is no thread, and none can be started.
    pub(super) fn run(&self, job: Job) -> io::Result<()> {
        self.submit(job, true).map(drop)
    }

    /// Has a thread do the job at once. False, if all of them have jobs.
    ///
    /// # Errors
    /// As for [`Self::run`].
    pub(super) fn run_now(&self, job: Job) -> io::Result<bool> {
        self.submit(job, false)
    }

    fn submit(&self, job: Job, may_wait: bool) -> io::Result<bool> {
        let mut state = self.shared.lock();
        let is_idle = state.jobs.len() < state.idle;
        let is_full = state.threads >= self.most;
        if !is_idle && is_full && !may_wait {
            return Ok(false);
        }
        let mut first = None;
        if is_idle || is_full || may_wait {
            state.jobs.push_back(job);
        } else {
            // Not for the others, if this thread cannot be started.
            first = Some(job);
        }
        if is_idle || is_full {
            drop(state);
            self.shared.changed.notify_one();
            return Ok(true);
        }
        state.threads += 1;
        drop(state);
        let shared = Arc::clone(&self.shared);
        let thread = Builder::new().name(self.name.into());
        let Err(error) = thread.spawn(move || shared.work(first)) else {
            return Ok(true);
        };
        let mut state = self.shared.lock();
        state.threads -= 1;
        // No thread ends while there are jobs: the other ones do them.
        if state.threads > 0 {
            return Ok(may_wait);
        }
        let lost = std::mem::take(&mut state.jobs);
        drop(state);
        drop(lost);
        Err(error)
    }
}

impl Shared {
    fn work(&self, mut first: Option<Job>) {
        let mut state = self.lock();
        loop {
            while let Some(job) = first.take().or_else(|| state.jobs.pop_front()) {
                drop(state);
                // Its panic is that of one job, which has said so: whoever waits for its answer finds that there is none.
                let _ = catch_unwind(AssertUnwindSafe(job));
                state = self.lock();
            }
            state.idle += 1;
            let waited = self.changed.wait_timeout(state, IDLE_LIMIT);
            let (again, waited) = waited.unwrap_or_else(PoisonError::into_inner);
            state = again;
            state.idle -= 1;
            if waited.timed_out() && state.jobs.is_empty() {
                state.threads -= 1;
                return;
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No job runs under the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("State")
            .field("jobs", &self.jobs.len())
            .field("idle", &self.idle)
            .field("threads", &self.threads)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use pagetide_test_support::{NoOtherThread, eventually, in_a_process_of_its_own};

    use super::*;

    /// A job that says its number when it begins, and ends when the sender is dropped.
    fn job(number: u32, begun: &Sender<u32>) -> (Job, Sender<()>) {
        let begun = begun.clone();
        let (end, ended) = channel();
        let job = move || {
            begun.send(number).unwrap();
            let _ = ended.recv();
        };
        (Box::new(job), end)
    }

    fn counts(threads: &Threads) -> (usize, usize, usize) {
        let state = threads.shared.lock();
        (state.threads, state.idle, state.jobs.len())
    }

    fn begun(numbers: &Receiver<u32>) -> u32 {
        numbers.recv().unwrap()
    }

    #[test]
    fn there_are_as_many_threads_as_jobs_up_to_the_bound() {
        let threads = Threads::new("pt-test", 2);
        let (sender, numbers) = channel();
        let mut ends: Vec<_> = (0..3)
            .map(|number| {
                let (job, end) = job(number, &sender);
                threads.run(job).unwrap();
                Some(end)
            })
            .collect();
        let mut first = [begun(&numbers), begun(&numbers)];
        first.sort_unstable();
        assert_eq!(first, [0, 1]);
        assert_eq!(counts(&threads), (2, 0, 1));
        // Not for one that would have to wait.
        let (late, _end) = job(9, &sender);
        assert!(!threads.run_now(late).unwrap());
        ends[1] = None;
        assert_eq!(begun(&numbers), 2);
        ends.clear();
        eventually("both are idle", || counts(&threads) == (2, 2, 0));
        // One that waits does the next job.
        let (next, _end) = job(3, &sender);
        assert!(threads.run_now(next).unwrap());
        assert_eq!(begun(&numbers), 3);
        eventually("one works", || counts(&threads) == (2, 1, 0));
    }

    #[test]
    fn a_panic_ends_its_job_alone() {
        let threads = Threads::new("pt-test", 1);
        let (sender, numbers) = channel();
        threads.run(Box::new(|| panic!("of a test"))).unwrap();
        let (next, _end) = job(1, &sender);
        threads.run(next).unwrap();
        assert_eq!(begun(&numbers), 1);
    }

    /// Kind: what this process lacks ends it.
    #[test]
    fn without_a_thread_the_job_is_dropped() {
        let this = "cache::threads::tests::without_a_thread_the_job_is_dropped";
        in_a_process_of_its_own(this, || {
            let threads = Threads::new("pt-test", 2);
            let (sender, numbers) = channel();
            let none = NoOtherThread::begin(&[]);
            let (lost, _end) = job(1, &sender);
            let error = threads.run(lost);
            drop(none);
            assert!(error.is_err());
            assert_eq!(counts(&threads), (0, 0, 0));
            // With a thread, the next one is done.
            let (next, _end) = job(2, &sender);
            threads.run(next).unwrap();
            assert_eq!(begun(&numbers), 2);
            // One that may not wait is not left to a thread that has another.
            let none = NoOtherThread::begin(&[]);
            let (now, _end) = job(3, &sender);
            let is_done = threads.run_now(now).unwrap();
            drop(none);
            assert!(!is_done);
            assert_eq!(counts(&threads), (1, 0, 0));
        });
    }
}
