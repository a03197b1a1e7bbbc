//! What the threads of one run share: the start, the end and the first failure.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pagetide_kvm::VcpuKick;

use crate::handler::{FaultHandler, HandlerError};
use crate::outcome::FailureCause;
use crate::window;

/// A vCPU's exits so far, for the watch-dog; alone in its cache lines, because its owner counts on
/// the hot path.
#[derive(Debug, Default)]
#[repr(align(128))]
struct ExitCount(AtomicU64);

#[derive(Debug, Default)]
struct State {
    ready: usize,
    ended: usize,
    released: Option<Instant>,
    failure: Option<FailureCause>,
    failed: bool,
}

/// One run's shared state.
pub(crate) struct Control {
    handler: Arc<dyn FaultHandler>,
    kicks: Vec<VcpuKick>,
    exits: Vec<ExitCount>,
    stopped: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
}

impl Control {
    pub(crate) fn new(handler: Arc<dyn FaultHandler>, kicks: Vec<VcpuKick>) -> Self {
        let exits = kicks.iter().map(|_| ExitCount::default()).collect();
        Self {
            handler,
            kicks,
            exits,
            stopped: AtomicBool::new(false),
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    pub(crate) fn handler(&self) -> &dyn FaultHandler {
        &*self.handler
    }

    /// Counts an exit of the calling thread's own vCPU.
    pub(crate) fn count_exit(&self, vcpu: u32) {
        if let Some(count) = self.exits.get(vcpu as usize) {
            // One writer: a plain increment, not a locked one.
            count
                .0
                .store(count.0.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        }
    }

    pub(crate) fn exits(&self) -> u64 {
        self.exits
            .iter()
            .map(|count| count.0.load(Ordering::Relaxed))
            .sum()
    }

    /// Whether the run is to end at once. Kicked vCPUs ask.
    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::SeqCst)
    }

    /// Ends the run. The first cause is kept; later ones are its consequences.
    pub(crate) fn fail(&self, cause: FailureCause) {
        let mut state = self.state();
        if state.failed {
            drop(state);
            tracing::debug!("after the first failure: {cause}");
            return;
        }
        state.failed = true;
        state.failure = Some(cause);
        drop(state);
        self.stopped.store(true, Ordering::SeqCst);
        self.changed.notify_all();
        self.kick_all();
        self.handler.stop();
    }

    pub(crate) fn kick_all(&self) {
        for kick in &self.kicks {
            kick.kick();
        }
    }

    /// Waits until every vCPU has come here; the last one releases all. Returns the common start,
    /// or None if the run was stopped.
    pub(crate) fn wait_for_start(&self) -> Option<Instant> {
        let mut state = self.state();
        state.ready += 1;
        if state.ready == self.kicks.len() && !state.failed {
            state.released = Some(Instant::now());
            window::begin();
            self.changed.notify_all();
        }
        while state.released.is_none() && !state.failed {
            state = self
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
        state.released.filter(|_| !state.failed)
    }

    /// A vCPU's thread is about to return.
    pub(crate) fn thread_ended(&self) {
        self.state().ended += 1;
        self.changed.notify_all();
    }

    /// Waits until that many threads have ended, at most for `timeout`; whether they have.
    pub(crate) fn wait_for_ends(&self, threads: usize, timeout: Duration) -> bool {
        let (state, _) = self
            .changed
            .wait_timeout_while(self.state(), timeout, |state| state.ended < threads)
            .unwrap_or_else(PoisonError::into_inner);
        state.ended >= threads
    }

    pub(crate) fn take_failure(&self) -> Option<FailureCause> {
        self.state().failure.take()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What [`Stopper`]s act on.
#[derive(Default)]
struct Target {
    run: Option<Arc<Control>>,
    pending: Option<HandlerError>,
}

/// Stops a machine's run from outside: for page readers and the like, without which the guest
/// would wait for ever. Any thread may hold one.
#[derive(Clone, Default)]
pub struct Stopper {
    target: Arc<Mutex<Target>>,
}

impl Stopper {
    /// Ends the present run with this cause; without a run, the next one ends at its start.
    pub fn stop(&self, cause: impl Into<HandlerError>) {
        let mut target = self.lock();
        match target.run.clone() {
            Some(control) => {
                drop(target);
                control.fail(FailureCause::Stopped(cause.into()));
            }
            None => {
                target.pending.get_or_insert(cause.into());
            }
        }
    }

    /// Begins a run, unless a stop is pending.
    pub(crate) fn begin(&self, control: &Arc<Control>) -> Result<(), HandlerError> {
        let mut target = self.lock();
        if let Some(cause) = target.pending.take() {
            return Err(cause);
        }
        target.run = Some(Arc::clone(control));
        Ok(())
    }

    pub(crate) fn end(&self) {
        self.lock().run = None;
    }

    fn lock(&self) -> MutexGuard<'_, Target> {
        self.target.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for Stopper {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Stopper").finish_non_exhaustive()
    }
}
