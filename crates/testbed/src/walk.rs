//! The hooks of a machine's walk: they count reports, and pass faults to the caller's hooks.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_utils::CachePadded;
use pagetide_kvm::{Exit, FaultExit};
use pagetide_memory::Exclusive;
use pagetide_vmm::{Handled, HookError, Next, PoolVcpu, VcpuCounts, VcpuHooks};

use crate::bare::exception;
use crate::low_memory::LowMemory;
use crate::payload::{PORT, Report, Word};
use crate::window;

/// A vCPU's walk, from the start until it was done.
#[derive(Clone, Debug)]
pub(crate) struct Walked {
    pub(crate) elapsed: Duration,
    pub(crate) counts: VcpuCounts,
    /// The touches that exited as faults, by their numbers, ascending.
    pub(crate) faulted: Vec<u32>,
}

/// A vCPU's progress, which only its thread uses while it runs.
#[derive(Debug, Default)]
struct Progress {
    start: Option<(Instant, VcpuCounts)>,
    faulted: Vec<u32>,
    walked: Option<Walked>,
}

impl Progress {
    /// Records the touch that faulted: the guest has counted those before it. One touch may fault more than
    /// once.
    fn note_touch(&mut self, touch: u64) {
        // A log has at most 2^28 entries.
        if let Ok(touch) = u32::try_from(touch)
            && self.start.is_some()
            && self.faulted.last() != Some(&touch)
        {
            self.faulted.push(touch);
        }
    }
}

#[derive(Debug, Default)]
struct Start {
    ready: usize,
    released: Option<Instant>,
    stopped: bool,
}

/// The hooks of one run: all vCPUs start together, and the caller's hooks get what is not a report.
pub(crate) struct Walk {
    caller: Arc<dyn VcpuHooks>,
    low: Arc<LowMemory>,
    /// Pages of each walk.
    pages: u64,
    progress: Vec<CachePadded<Exclusive<Progress>>>,
    start: Mutex<Start>,
    changed: Condvar,
}

impl Walk {
    pub(crate) fn new(
        caller: Arc<dyn VcpuHooks>,
        low: Arc<LowMemory>,
        vcpus: usize,
        pages: u64,
    ) -> Self {
        Self {
            caller,
            low,
            pages,
            progress: (0..vcpus).map(|_| CachePadded::default()).collect(),
            start: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// A vCPU's walk, if it was done; once.
    pub(crate) fn take(&self, vcpu: u32) -> Option<Walked> {
        self.with(vcpu, |progress| progress.walked.take()).flatten()
    }

    fn with<R>(&self, vcpu: u32, work: impl FnOnce(&mut Progress) -> R) -> Option<R> {
        let progress = self.progress.get(vcpu as usize)?;
        Some(progress.with(work))
    }

    /// Waits until every vCPU is ready; the last one releases all. Returns the common start, or None if
    /// the run was stopped.
    fn wait_for_start(&self) -> Option<Instant> {
        let mut start = self.lock_start();
        start.ready += 1;
        if start.ready == self.progress.len() && !start.stopped {
            start.released = Some(Instant::now());
            window::begin();
            self.changed.notify_all();
        }
        let waits = |start: &mut Start| start.released.is_none() && !start.stopped;
        let woken = self.changed.wait_while(start, waits);
        let start = woken.unwrap_or_else(PoisonError::into_inner);
        start.released.filter(|_| !start.stopped)
    }

    fn lock_start(&self) -> MutexGuard<'_, Start> {
        self.start.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin(&self, vcpu: &PoolVcpu<'_>) {
        // With room for all touches, so that nothing is allocated while the clock runs.
        let faulted = Vec::with_capacity(usize::try_from(self.pages).unwrap_or(0));
        // None: the pool is stopped, and does not enter the guest again.
        if let Some(start) = self.wait_for_start() {
            self.with(vcpu.id(), |progress| {
                progress.faulted = faulted;
                progress.start = Some((start, vcpu.counts()));
            });
        }
    }

    /// Whether the vCPU had begun.
    fn end(&self, vcpu: &PoolVcpu<'_>) -> bool {
        let ended = self.with(vcpu.id(), |progress| {
            let (start, before) = progress.start?;
            window::end();
            progress.walked = Some(Walked {
                elapsed: start.elapsed(),
                counts: vcpu.counts().since(before),
                faulted: std::mem::take(&mut progress.faulted),
            });
            Some(())
        });
        ended.flatten().is_some()
    }
}

impl VcpuHooks for Walk {
    fn on_thread_start(&self, vcpu: &mut PoolVcpu<'_>) -> Result<(), HookError> {
        self.caller.on_thread_start(vcpu)
    }

    fn on_fault(&self, vcpu: &mut PoolVcpu<'_>, fault: FaultExit) -> Result<Handled, HookError> {
        if let Some(touched) = self.low.atomic(vcpu.id(), Word::Steps) {
            let touch = touched.load(Ordering::Relaxed);
            self.with(vcpu.id(), |progress| progress.note_touch(touch));
        }
        self.caller.on_fault(vcpu, fault)
    }

    fn on_interrupted(&self, vcpu: &mut PoolVcpu<'_>) -> Result<(), HookError> {
        self.caller.on_interrupted(vcpu)
    }

    fn on_exit(&self, vcpu: &mut PoolVcpu<'_>, exit: Exit) -> Result<Next, HookError> {
        let Exit::IoOut { port: PORT, data } = exit else {
            return self.caller.on_exit(vcpu, exit);
        };
        let began = self.with(vcpu.id(), |progress| progress.start.is_some());
        match Report::decode(data) {
            Some(Report::Ready) if began == Some(false) => {
                self.begin(vcpu);
                Ok(Next::Enter)
            }
            Some(Report::Done) if self.end(vcpu) => Ok(Next::Leave),
            Some(Report::Step) => self.caller.on_exit(vcpu, exit),
            Some(Report::Exception) => Err(exception(&self.low, vcpu.id()).into()),
            _ => Ok(Next::Unexpected),
        }
    }

    fn on_stop(&self) {
        self.lock_start().stopped = true;
        self.changed.notify_all();
        self.caller.on_stop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_touch_that_faults_twice_is_recorded_once() {
        let mut progress = Progress::default();
        progress.note_touch(5);
        assert!(progress.faulted.is_empty(), "before the start");
        progress.start = Some((Instant::now(), VcpuCounts::default()));
        for touch in [0, 0, 16, 17, 17] {
            progress.note_touch(touch);
        }
        assert_eq!(progress.faulted, [0, 16, 17]);
    }
}
