//! What the threads of a run share: the devices, the first end, and which vCPUs still live.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pagetide_kvm::{Vcpu, VcpuKick, Vm};
use vm_superio::Trigger;

use super::devices::Devices;
use super::error::LinuxRunError;
use super::hooks::VcpuHooks;
use super::outcome::LinuxEnd;
use super::vcpu;

/// How often the vCPUs are asked whether they live.
const LOOK: Duration = Duration::from_millis(500);
/// Answers in which all are dead before it is believed: between two vCPUs' answers the one could
/// have started the other.
const BELIEVED: u32 = 2;

const NOT_ASKED: u8 = 0;
const ALIVE: u8 = 1;
const DEAD: u8 = 2;

/// An interrupt line of KVM's controllers, which Linux takes as edge-triggered.
pub(super) struct Line {
    pub(super) vm: Arc<Vm>,
    pub(super) number: u32,
}

impl Trigger for Line {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.vm.fd().set_irq_line(self.number, true)?;
        self.vm.fd().set_irq_line(self.number, false)?;
        Ok(())
    }
}

#[derive(Default)]
struct State {
    end: Option<Result<LinuxEnd, LinuxRunError>>,
    ended: bool,
    threads: usize,
}

/// One run's shared state.
pub(super) struct Control {
    devices: Mutex<Devices<Line>>,
    hooks: Arc<dyn VcpuHooks>,
    kicks: Vec<VcpuKick>,
    /// By the vCPU's number.
    looks: Vec<AtomicU8>,
    stopped: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
}

impl Control {
    pub(super) fn new(
        devices: Devices<Line>,
        hooks: Arc<dyn VcpuHooks>,
        kicks: Vec<VcpuKick>,
    ) -> Self {
        Self {
            devices: Mutex::new(devices),
            hooks,
            looks: kicks.iter().map(|_| AtomicU8::new(NOT_ASKED)).collect(),
            kicks,
            stopped: AtomicBool::new(false),
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    pub(super) fn devices(&self) -> MutexGuard<'_, Devices<Line>> {
        self.devices.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn hooks(&self) -> &dyn VcpuHooks {
        &*self.hooks
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::SeqCst)
    }

    /// Ends the run. The first end is kept; later ones are its consequences.
    pub(super) fn finish(&self, end: Result<LinuxEnd, LinuxRunError>) {
        let end = end.map(|end| self.named(end));
        let mut state = self.state();
        if state.ended {
            return;
        }
        state.ended = true;
        state.end = Some(end);
        drop(state);
        self.stopped.store(true, Ordering::SeqCst);
        self.changed.notify_all();
        self.kick_all();
    }

    /// Tells an end after a panic from one without.
    fn named(&self, end: LinuxEnd) -> LinuxEnd {
        use LinuxEnd::{Halted, Reset, TripleFault};
        if !matches!(end, Reset | Halted | TripleFault) {
            return end;
        }
        match self.devices().panic_message() {
            Some(message) => LinuxEnd::Panicked {
                message: message.to_owned(),
            },
            None => end,
        }
    }

    fn kick_all(&self) {
        for kick in &self.kicks {
            kick.kick();
        }
    }

    /// For a vCPU that was kicked: tells whether it lives.
    pub(super) fn look(&self, vcpu: &Vcpu) -> Result<(), LinuxRunError> {
        if let Some(look) = self.looks.get(vcpu.id() as usize) {
            let found = if vcpu::is_dead(vcpu)? { DEAD } else { ALIVE };
            look.store(found, Ordering::SeqCst);
        }
        Ok(())
    }

    /// Waits until the run has ended, and ends it when its time is up or when nobody lives.
    pub(super) fn watch(&self, started: Instant, limit: Option<Duration>) {
        let mut all_dead = 0;
        loop {
            let wait = limit.map_or(LOOK, |limit| {
                limit.saturating_sub(started.elapsed()).min(LOOK)
            });
            let (state, _) = self
                .changed
                .wait_timeout_while(self.state(), wait, |state| !state.ended)
                .unwrap_or_else(PoisonError::into_inner);
            if state.ended {
                return;
            }
            drop(state);
            if let Some(limit) = limit.filter(|limit| started.elapsed() >= *limit) {
                // Who was where is found out when the threads are back.
                let rips = Vec::new();
                return self.finish(Err(LinuxRunError::TimeLimit { limit, rips }));
            }
            let looks = self.looks.iter();
            let found: Vec<_> = looks
                .map(|look| look.swap(NOT_ASKED, Ordering::SeqCst))
                .collect();
            all_dead = if found.iter().all(|look| *look == DEAD) {
                all_dead + 1
            } else {
                0
            };
            if all_dead == BELIEVED {
                return self.finish(Ok(LinuxEnd::Halted));
            }
            self.kick_all();
        }
    }

    /// A vCPU's thread begins.
    pub(super) fn enlist(self: &Arc<Self>, vcpu: u32) -> Enlisted {
        self.state().threads += 1;
        let control = Arc::clone(self);
        Enlisted { control, vcpu }
    }

    /// Waits until all vCPUs' threads have ended, at most for `grace`; how many have not.
    pub(super) fn wait_for_threads(&self, grace: Duration) -> usize {
        let (state, _) = self
            .changed
            .wait_timeout_while(self.state(), grace, |state| state.threads > 0)
            .unwrap_or_else(PoisonError::into_inner);
        state.threads
    }

    pub(super) fn take_end(&self) -> Option<Result<LinuxEnd, LinuxRunError>> {
        self.state().end.take()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A vCPU's thread, until it ends in whatever way.
pub(super) struct Enlisted {
    control: Arc<Control>,
    vcpu: u32,
}

impl Drop for Enlisted {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let vcpu = self.vcpu;
            self.control.finish(Err(LinuxRunError::Panicked { vcpu }));
        }
        self.control.state().threads -= 1;
        self.control.changed.notify_all();
    }
}

/// Ends a guest from outside. Any thread may hold one.
#[derive(Clone, Default)]
pub struct LinuxStopper {
    target: Arc<Mutex<Target>>,
}

#[derive(Default)]
struct Target {
    run: Option<Arc<Control>>,
    stopped: bool,
}

impl LinuxStopper {
    /// Ends the run, or has it end as soon as it begins, with [`LinuxEnd::Stopped`].
    pub fn stop(&self) {
        let mut target = self.lock();
        target.stopped = true;
        let run = target.run.clone();
        drop(target);
        if let Some(run) = run {
            run.finish(Ok(LinuxEnd::Stopped));
        }
    }

    pub(super) fn begin(&self, control: &Arc<Control>) {
        let mut target = self.lock();
        target.run = Some(Arc::clone(control));
        let stopped = target.stopped;
        drop(target);
        if stopped {
            control.finish(Ok(LinuxEnd::Stopped));
        }
    }

    pub(super) fn end(&self) {
        self.lock().run = None;
    }

    fn lock(&self) -> MutexGuard<'_, Target> {
        self.target.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for LinuxStopper {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("LinuxStopper")
            .finish_non_exhaustive()
    }
}
