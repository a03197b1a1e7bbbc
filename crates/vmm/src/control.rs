//! State that the threads of a pool share: the first failure, the stop, and the handle that stops.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crossbeam_utils::CachePadded;
use pagetide_kvm::VcpuKick;

use crate::failure::PoolFailure;
use crate::hooks::{HookError, VcpuHooks};

#[derive(Debug, Default)]
struct State {
    threads: usize,
    ended: usize,
    stopped: bool,
    failure: Option<PoolFailure>,
}

/// The shared state of one pool.
pub(crate) struct Control {
    pub(crate) hooks: Arc<dyn VcpuHooks>,
    kicks: Vec<VcpuKick>,
    /// Each vCPU's exits so far, for watchdogs. Its thread counts them on the hot path.
    exits: Vec<CachePadded<AtomicU64>>,
    stopped: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
}

impl Control {
    pub(crate) fn new(hooks: Arc<dyn VcpuHooks>, kicks: Vec<VcpuKick>) -> Self {
        Self {
            hooks,
            exits: kicks.iter().map(|_| CachePadded::default()).collect(),
            state: Mutex::new(State {
                threads: kicks.len(),
                ..State::default()
            }),
            kicks,
            stopped: AtomicBool::new(false),
            changed: Condvar::new(),
        }
    }

    /// Counts an exit of the vCPU at this place, on the vCPU's own thread.
    pub(crate) fn count_exit(&self, place: usize) {
        if let Some(count) = self.exits.get(place) {
            // One writer: a plain increment, not a locked one.
            count.store(count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        }
    }

    pub(crate) fn exits(&self) -> u64 {
        let counts = self.exits.iter();
        counts.map(|count| count.load(Ordering::Relaxed)).sum()
    }

    /// Whether the vCPUs' threads should end. A thread looks at this after each exit.
    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::SeqCst)
    }

    /// Stops the pool, with a failure or without. The first failure is kept; later ones are its
    /// consequences.
    pub(crate) fn finish(&self, failure: Option<PoolFailure>) {
        let mut state = lock(&self.state);
        if state.stopped {
            drop(state);
            if let Some(failure) = failure {
                tracing::debug!("after the first failure: {failure}");
            }
            return;
        }
        state.stopped = true;
        state.failure = failure;
        drop(state);
        self.stopped.store(true, Ordering::SeqCst);
        self.changed.notify_all();
        self.kick_all();
        self.hooks.on_stop();
    }

    pub(crate) fn kick_all(&self) {
        self.kicks.iter().for_each(VcpuKick::kick);
    }

    /// A vCPU's thread is about to return, or will not be started.
    pub(crate) fn thread_ended(&self) {
        lock(&self.state).ended += 1;
        self.changed.notify_all();
    }

    /// Waits at most `timeout` until the pool is stopped or all threads have ended; whether that is so.
    pub(crate) fn wait_until_over(&self, timeout: Duration) -> bool {
        self.wait(timeout, |state| {
            state.stopped || state.ended == state.threads
        })
    }

    /// Waits at most `timeout` until all threads have ended; whether they have.
    pub(crate) fn wait_for_ends(&self, timeout: Duration) -> bool {
        self.wait(timeout, |state| state.ended == state.threads)
    }

    fn wait(&self, timeout: Duration, done: impl Fn(&State) -> bool) -> bool {
        let (state, _) = self
            .changed
            .wait_timeout_while(lock(&self.state), timeout, |state| !done(state))
            .unwrap_or_else(PoisonError::into_inner);
        done(&state)
    }

    pub(crate) fn take_failure(&self) -> Option<PoolFailure> {
        lock(&self.state).failure.take()
    }
}

impl std::fmt::Debug for Control {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Control").finish_non_exhaustive()
    }
}

/// Locks a mutex also after another thread panicked with it: each statement leaves what these mutexes
/// guard in a consistent state.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The pool that a [`Stopper`] stops.
#[derive(Debug, Default)]
struct Target {
    pool: Option<Arc<Control>>,
    /// A stop that came before the pool, and its cause.
    pending: Option<Option<HookError>>,
}

/// Stops a machine's vCPUs from outside: for page readers, without which a guest would wait for ever,
/// and for watchdogs. Any thread may hold one.
#[derive(Clone, Debug, Default)]
pub struct Stopper {
    target: Arc<Mutex<Target>>,
}

impl Stopper {
    /// Ends the present run as a failure with this cause. Without a run, the next one ends when it
    /// starts.
    pub fn stop(&self, cause: impl Into<HookError>) {
        self.finish(Some(cause.into()));
    }

    /// Ends the present run, or the next one when it starts, without a failure.
    pub fn end(&self) {
        self.finish(None);
    }

    fn finish(&self, cause: Option<HookError>) {
        let mut target = lock(&self.target);
        let Some(pool) = target.pool.clone() else {
            target.pending.get_or_insert(cause);
            return;
        };
        drop(target);
        pool.finish(cause.map(PoolFailure::Stopped));
    }

    /// Takes the failure of the present run. The pool's end does not report it again.
    #[must_use]
    pub fn take_failure(&self) -> Option<PoolFailure> {
        let pool = lock(&self.target).pool.clone();
        pool?.take_failure()
    }

    /// A run begins. It ends at once if a stop is pending.
    pub(crate) fn begin(&self, control: &Arc<Control>) {
        let mut target = lock(&self.target);
        target.pool = Some(Arc::clone(control));
        let pending = target.pending.take();
        drop(target);
        if let Some(cause) = pending {
            control.finish(cause.map(PoolFailure::Stopped));
        }
    }

    pub(crate) fn forget(&self) {
        lock(&self.target).pool = None;
    }
}
