//! What happens when a vCPU of a Linux guest leaves it: devices answer, and the rest is the caller's.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use pagetide_kvm::{Exit, FaultExit, Vm};
use vm_superio::Trigger;

use crate::control::lock;
use crate::hooks::{Handled, HookError, Next, VcpuHooks};
use crate::pool::PoolVcpu;

use super::balloon::OnGivenUp;
use super::devices::{Devices, Wish};
use super::error::LinuxRunError;
use super::outcome::LinuxEnd;
use super::vcpu;

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

/// One run's hooks.
pub(super) struct Guest {
    devices: Mutex<Devices<Line>>,
    caller: Arc<dyn VcpuHooks>,
    on_given_up: OnGivenUp,
    /// By the vCPU's number: whether it lived when it was kicked last.
    looks: Vec<AtomicU8>,
    stopped: AtomicBool,
    end: Mutex<Option<LinuxEnd>>,
}

impl Guest {
    pub(super) fn new(
        devices: Devices<Line>,
        caller: Arc<dyn VcpuHooks>,
        on_given_up: OnGivenUp,
        vcpus: usize,
    ) -> Self {
        Self {
            devices: Mutex::new(devices),
            caller,
            on_given_up,
            looks: (0..vcpus).map(|_| AtomicU8::new(NOT_ASKED)).collect(),
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

    /// The guest has ended; of several ends the first is kept. A panic is told from an end without.
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

    /// Whether every vCPU has been asked since the last time, and none lives.
    pub(super) fn all_dead(&self) -> bool {
        let asked = self.looks.iter();
        let found = asked.map(|look| look.swap(NOT_ASKED, Ordering::SeqCst));
        found.filter(|look| *look != DEAD).count() == 0
    }

    fn out(&self, vcpu: &PoolVcpu<'_>, port: u16) -> Result<Option<LinuxEnd>, HookError> {
        for element in vcpu.out_elements() {
            // The other vCPUs' devices answer while memory is discarded.
            let wish = self
                .devices()
                .write(port, element)
                .map_err(LinuxRunError::from)?;
            match wish {
                Some(Wish::Reset) => return Ok(Some(LinuxEnd::Reset)),
                Some(Wish::Exit(status)) => return Ok(Some(LinuxEnd::Status(status))),
                Some(Wish::Discard(range)) => self.on_given_up.call(range)?,
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

    /// It was kicked: tells whether it lives.
    fn on_interrupted(&self, vcpu: &mut PoolVcpu<'_>) -> Result<(), HookError> {
        if let Some(look) = self.looks.get(vcpu.id() as usize) {
            let found = if vcpu::is_dead(vcpu)? { DEAD } else { ALIVE };
            look.store(found, Ordering::SeqCst);
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
            // Nothing is there: reads are all ones.
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
