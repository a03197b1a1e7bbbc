//! What the threads of a pool share: the first failure, the end, and who may bring it about.

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

impl State {
    fn is_over(&self) -> bool {
        self.stopped || self.ended == self.threads
    }
}

/// One pool's shared state.
pub(crate) struct Control {
    hooks: Arc<dyn VcpuHooks>,
    kicks: Vec<VcpuKick>,
    /// Each vCPU's exits so far, for watch-dogs. Its thread counts them on the hot path.
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

    pub(crate) fn hooks(&self) -> &dyn VcpuHooks {
        &*self.hooks
    }

    /// Counts an exit of the vCPU at this place. Only its own thread does.
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

    /// Whether the vCPUs are to come back. Kicked ones ask.
    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::SeqCst)
    }

    /// Ends the pool, as a failure or not. The first cause is kept; later ones are its consequences.
    pub(crate) fn finish(&self, failure: Option<PoolFailure>) {
        let mut state = self.state();
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
        for kick in &self.kicks {
            kick.kick();
        }
    }

    /// A vCPU's thread is about to return, or is never started.
    pub(crate) fn thread_ended(&self) {
        self.state().ended += 1;
        self.changed.notify_all();
    }

    /// Waits until the pool is stopped or all threads have ended, at most for `timeout`; whether that
    /// is so.
    pub(crate) fn wait_until_over(&self, timeout: Duration) -> bool {
        self.wait(timeout, State::is_over)
    }

    /// Waits until all threads have ended, at most for `timeout`; whether they have.
    pub(crate) fn wait_for_ends(&self, timeout: Duration) -> bool {
        self.wait(timeout, |state| state.ended == state.threads)
    }

    fn wait(&self, timeout: Duration, done: impl Fn(&State) -> bool) -> bool {
        let (state, _) = self
            .changed
            .wait_timeout_while(self.state(), timeout, |state| !done(state))
            .unwrap_or_else(PoisonError::into_inner);
        done(&state)
    }

    pub(crate) fn take_failure(&self) -> Option<PoolFailure> {
        self.state().failure.take()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

impl std::fmt::Debug for Control {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Control").finish_non_exhaustive()
    }
}

/// A panic elsewhere is no reason to stop here: what is guarded is whole between any two statements.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What [`Stopper`]s act on.
#[derive(Debug, Default)]
struct Target {
    pool: Option<Arc<Control>>,
    /// For the next pool: the cause, if it is one.
    pending: Option<Option<HookError>>,
}

/// Stops a machine's vCPUs from outside: for page readers and the like, without which the guest
/// would wait for ever, and for whoever has seen enough. Any thread may hold one.
#[derive(Clone, Debug, Default)]
pub struct Stopper {
    target: Arc<Mutex<Target>>,
}

impl Stopper {
    /// Ends the present run as a failure with this cause; without a run, the next one ends at its
    /// start.
    pub fn stop(&self, cause: impl Into<HookError>) {
        self.finish(Some(cause.into()));
    }

    /// Ends the present run, or the next one at its start, without a failure.
    pub fn end(&self) {
        self.finish(None);
    }

    fn finish(&self, cause: Option<HookError>) {
        let mut target = self.lock();
        match target.pool.clone() {
            Some(pool) => {
                drop(target);
                pool.finish(cause.map(PoolFailure::Stopped));
            }
            None => {
                target.pending.get_or_insert(cause);
            }
        }
    }

    /// The failure of the present run, once: whoever takes it deals with it, and the pool's end has
    /// none any more.
    #[must_use]
    pub fn take_failure(&self) -> Option<PoolFailure> {
        let pool = self.lock().pool.clone();
        pool?.take_failure()
    }

    /// A run begins, and ends at once if a stop is pending.
    pub(crate) fn begin(&self, control: &Arc<Control>) {
        let mut target = self.lock();
        target.pool = Some(Arc::clone(control));
        let pending = target.pending.take();
        drop(target);
        if let Some(cause) = pending {
            control.finish(cause.map(PoolFailure::Stopped));
        }
    }

    pub(crate) fn forget(&self) {
        self.lock().pool = None;
    }

    fn lock(&self) -> MutexGuard<'_, Target> {
        lock(&self.target)
    }
}
