//! What happens when a vCPU leaves a walk: reports are counted, faults are the caller's.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_utils::CachePadded;
use pagetide_kvm::{Exit, FaultExit};
use pagetide_memory::{Exclusive, PageIndex};
use pagetide_vmm::{Handled, HookError, Next, PoolVcpu, VcpuCounts, VcpuHooks};

use crate::guest::{Field, PORT, Report};
use crate::low_memory::LowMemory;
use crate::outcome::FailureCause;
use crate::window;

/// What a vCPU did from the start until it was done.
#[derive(Clone, Debug)]
pub(crate) struct Walked {
    pub(crate) elapsed: Duration,
    pub(crate) counts: VcpuCounts,
    /// The touches that left the guest as faults, by their number, ascending.
    pub(crate) faulted: Vec<u32>,
}

/// How far a vCPU is. Only its own thread uses it as long as it runs.
#[derive(Debug)]
struct Seat {
    progress: Exclusive<Progress>,
    /// Where the guest counts its touches.
    touched: (PageIndex, u64),
}

#[derive(Debug, Default)]
struct Progress {
    start: Option<(Instant, VcpuCounts)>,
    faulted: Vec<u32>,
    walked: Option<Walked>,
}

impl Progress {
    /// Notes which touch a fault belongs to: the guest has counted those before it. One touch may
    /// fault more than once.
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

/// One run's hooks: all vCPUs start together, and the caller's hooks get what is not a report.
pub(crate) struct Walk {
    caller: Arc<dyn VcpuHooks>,
    low: Arc<LowMemory>,
    /// Of each walk.
    pages: u64,
    seats: Vec<CachePadded<Seat>>,
    start: Mutex<Start>,
    changed: Condvar,
}

impl Walk {
    pub(crate) fn new(
        caller: Arc<dyn VcpuHooks>,
        low: Arc<LowMemory>,
        walkers: usize,
        pages: u64,
    ) -> Self {
        let seat = |vcpu| {
            CachePadded::new(Seat {
                progress: Exclusive::default(),
                touched: low.place_of(vcpu, Field::Touched),
            })
        };
        let seats = (0..).take(walkers).map(seat).collect();
        Self {
            caller,
            low,
            pages,
            seats,
            start: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// What a vCPU did, if it was done; once.
    pub(crate) fn take(&self, vcpu: u32) -> Option<Walked> {
        self.seats
            .get(vcpu as usize)?
            .progress
            .with(|progress| progress.walked.take())
    }

    fn seat(&self, vcpu: &PoolVcpu<'_>) -> Option<&Seat> {
        self.seats.get(vcpu.id() as usize).map(|seat| &**seat)
    }

    /// Waits until every vCPU has come here; the last one releases all. Returns the common start,
    /// or None if the run was stopped.
    fn wait_for_start(&self) -> Option<Instant> {
        let mut start = lock(&self.start);
        start.ready += 1;
        if start.ready == self.seats.len() && !start.stopped {
            start.released = Some(Instant::now());
            window::begin();
            self.changed.notify_all();
        }
        let waits = |start: &mut Start| start.released.is_none() && !start.stopped;
        let woken = self.changed.wait_while(start, waits);
        let start = woken.unwrap_or_else(PoisonError::into_inner);
        start.released.filter(|_| !start.stopped)
    }

    fn begin(&self, vcpu: &PoolVcpu<'_>) {
        // With room for all of them, so that none is made while the clock runs.
        let faulted = Vec::with_capacity(usize::try_from(self.pages).unwrap_or(0));
        // None: the pool is stopped, and sees to it that the guest is not entered again.
        let start = self.wait_for_start();
        if let (Some(seat), Some(start)) = (self.seat(vcpu), start) {
            seat.progress.with(|progress| {
                progress.faulted = faulted;
                progress.start = Some((start, vcpu.counts()));
            });
        }
    }

    /// Whether the vCPU had begun.
    fn end(&self, vcpu: &PoolVcpu<'_>) -> bool {
        let end = |progress: &mut Progress| {
            let Some((start, before)) = progress.start else {
                return false;
            };
            window::end();
            progress.walked = Some(Walked {
                elapsed: start.elapsed(),
                counts: vcpu.counts().since(before),
                faulted: std::mem::take(&mut progress.faulted),
            });
            true
        };
        self.seat(vcpu).is_some_and(|seat| seat.progress.with(end))
    }

    fn exception(&self, vcpu: u32) -> Result<FailureCause, FailureCause> {
        let field = |field| self.low.field(vcpu, field);
        Ok(FailureCause::Exception {
            vcpu,
            vector: field(Field::ExceptionVector)?,
            error_code: field(Field::ExceptionErrorCode)?,
            rip: field(Field::ExceptionRip)?,
            cr2: field(Field::ExceptionCr2)?,
        })
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl VcpuHooks for Walk {
    fn on_thread_start(&self, vcpu: &mut PoolVcpu<'_>) -> Result<(), HookError> {
        self.caller.on_thread_start(vcpu)
    }

    fn on_fault(&self, vcpu: &mut PoolVcpu<'_>, fault: FaultExit) -> Result<Handled, HookError> {
        if let Some(seat) = self.seat(vcpu)
            && let Some(touched) = self.low.word_at(seat.touched)
        {
            let touch = touched.load(Ordering::Relaxed);
            seat.progress.with(|progress| progress.note_touch(touch));
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
        let began = self
            .seat(vcpu)
            .is_some_and(|seat| seat.progress.with(|progress| progress.start.is_some()));
        match Report::decode(data) {
            Some(Report::Ready) if !began => {
                self.begin(vcpu);
                Ok(Next::Enter)
            }
            Some(Report::Done) if self.end(vcpu) => Ok(Next::Leave),
            Some(Report::Step) => self.caller.on_exit(vcpu, exit),
            Some(Report::Exception) => Err(self.exception(vcpu.id())?.into()),
            _ => Ok(Next::Unexpected),
        }
    }

    fn on_stop(&self) {
        lock(&self.start).stopped = true;
        self.changed.notify_all();
        self.caller.on_stop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_touch_that_faults_twice_is_noted_once() {
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
