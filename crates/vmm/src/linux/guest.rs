//! The hooks of a Linux guest: devices answer its exits, and the caller's hooks get the others.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use pagetide_kvm::{Exit, FaultExit, Vm};
use vm_superio::Trigger;

use crate::control::lock;
use crate::hooks::{Handled, HookError, Next, VcpuHooks};
use crate::pool::PoolVcpu;

use super::devices::{Devices, Request};
use super::discard::OnDiscard;
use super::error::LinuxRunError;
use super::outcome::LinuxEnd;
use super::vcpu;

const UNKNOWN: u8 = 0;
const ALIVE: u8 = 1;
const DEAD: u8 = 2;

/// An interrupt line of KVM's controllers, which Linux configures as edge-triggered.
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

/// The hooks of one run.
pub(super) struct Guest {
    devices: Mutex<Devices<Line>>,
    caller: Arc<dyn VcpuHooks>,
    on_discard: OnDiscard,
    /// By vCPU number: whether the vCPU could still run when it was kicked last.
    states: Vec<AtomicU8>,
    stopped: AtomicBool,
    end: Mutex<Option<LinuxEnd>>,
}

impl Guest {
    pub(super) fn new(
        devices: Devices<Line>,
        caller: Arc<dyn VcpuHooks>,
        on_discard: OnDiscard,
        vcpus: usize,
    ) -> Self {
        Self {
            devices: Mutex::new(devices),
            caller,
            on_discard,
            states: (0..vcpus).map(|_| AtomicU8::new(UNKNOWN)).collect(),
            stopped: AtomicBool::new(false),
            end: Mutex::default(),
        }
    }

    pub(super) fn devices(&self) -> MutexGuard<'_, Devices<Line>> {
        lock(&self.devices)
    }

    /// Whether the run is over.
    pub(super) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::SeqCst)
    }

    /// Records how the guest ended; the first end is kept. An end after a panic is recorded as the panic.
    pub(super) fn note_end(&self, end: LinuxEnd) {
        use LinuxEnd::{Halted, Reset, TripleFault};
        let panic = match end {
            Reset | Halted | TripleFault => self.devices().panic_message().map(str::to_owned),
            _ => None,
        };
        let end = panic.map_or(end, |message| LinuxEnd::Panicked { message });
        lock(&self.end).get_or_insert(end);
    }

    pub(super) fn take_end(&self) -> Option<LinuxEnd> {
        lock(&self.end).take()
    }

    /// Whether every vCPU was kicked since the last call, and none will run again by itself.
    pub(super) fn all_dead(&self) -> bool {
        let states = self.states.iter();
        let found = states.map(|state| state.swap(UNKNOWN, Ordering::SeqCst));
        found.filter(|state| *state != DEAD).count() == 0
    }

    fn out(&self, vcpu: &PoolVcpu<'_>, port: u16) -> Result<Option<LinuxEnd>, HookError> {
        for element in vcpu.out_elements() {
            // The lock is not held while memory is discarded: other vCPUs need the devices.
            let request = self
                .devices()
                .write(port, element)
                .map_err(LinuxRunError::from)?;
            match request {
                Some(Request::Reset) => return Ok(Some(LinuxEnd::Reset)),
                Some(Request::Exit(status)) => return Ok(Some(LinuxEnd::Status(status))),
                Some(Request::Discard(range)) => (self.on_discard)(range)?,
                None => {}
            }
        }
        Ok(None)
    }
}

impl VcpuHooks for Guest {
    fn on_thread_start(&self, vcpu: &mut PoolVcpu<'_>) -> Result<(), HookError> {
        self.caller.on_thread_start(vcpu)
    }

    fn on_fault(&self, vcpu: &mut PoolVcpu<'_>, fault: FaultExit) -> Result<Handled, HookError> {
        self.caller.on_fault(vcpu, fault)
    }

    /// A kick: finds out whether the vCPU can still run.
    fn on_interrupted(&self, vcpu: &mut PoolVcpu<'_>) -> Result<(), HookError> {
        if let Some(state) = self.states.get(vcpu.id() as usize) {
            let found = if vcpu::is_dead(vcpu)? { DEAD } else { ALIVE };
            state.store(found, Ordering::SeqCst);
        }
        self.caller.on_interrupted(vcpu)
    }

    fn on_exit(&self, vcpu: &mut PoolVcpu<'_>, exit: Exit) -> Result<Next, HookError> {
        let end = match exit {
            Exit::IoOut { port, .. } => self.out(vcpu, port)?,
            Exit::IoIn { port, .. } => {
                let mut devices = self.devices();
                vcpu.answer_in(|| devices.read(port));
                None
            }
            // No device: reads are all ones.
            Exit::Mmio { write, .. } => {
                if !write {
                    vcpu.answer_mmio(u64::MAX);
                }
                None
            }
            Exit::Shutdown => Some(LinuxEnd::TripleFault),
            exit => return self.caller.on_exit(vcpu, exit),
        };
        let Some(end) = end else {
            return Ok(Next::Enter);
        };
        self.note_end(end);
        Ok(Next::End)
    }

    fn on_stop(&self) {
        self.stopped.store(true, Ordering::SeqCst);
        self.caller.on_stop();
    }
}
