//! Uncorrected memory errors, forwarded to a Linux guest as machine checks.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use pagetide_kvm::poison::{
    ErrorWatch, Injected, MachineCheck, MachineCheckError, MachineCheckForm, MemoryError,
    WatchError,
};
use pagetide_kvm::{FaultExit, Vcpu, VcpuKick, Vm};
use pagetide_memory::{GuestAddress, PageSize, PoisonMap};

use crate::control::lock;
use crate::hooks::{Handled, HookError, NoFaults, VcpuHooks};
use crate::pool::PoolVcpu;

use super::machine::LinuxMachine;

/// An uncorrected error lies in no memory slot of the VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an uncorrected error at gpa {0}, which is no memory of the guest")]
pub struct NotItsMemory(pub GuestAddress);

/// Hooks that inject a machine check for every uncorrected error in the guest's memory. If a vCPU touched
/// the memory, that vCPU gets it: Linux kills the process whose memory it was, or panics if it was the
/// kernel's. If none has touched it yet, the first vCPU gets it, and Linux stops using the page. Any other
/// fault ends the run, unless other hooks resolve it ([`MachineChecks::other_faults_to`]).
pub struct MachineChecks {
    errors: Arc<Errors>,
    vm: Arc<Vm>,
    form: MachineCheckForm,
    others: Arc<dyn VcpuHooks>,
    kicks: Vec<VcpuKick>,
    /// By vCPU: whether it joins another vCPU's machine check at its next kick.
    joins: Vec<AtomicBool>,
    _watch: ErrorWatch,
}

/// The errors that the kernel reported.
#[derive(Debug, Default)]
struct Errors {
    lost: Mutex<PoisonMap>,
    /// The file that `lost` is saved to.
    file: Option<PathBuf>,
    /// Errors that no vCPU has touched, and that were not injected yet.
    untouched: Mutex<VecDeque<MemoryError>>,
}

impl Errors {
    fn record(&self, error: &MemoryError) -> Result<(), HookError> {
        tracing::info!("{error}");
        let mut lost = lock(&self.lost);
        lost.insert(error.lost)?;
        // No reason to end the guest: its memory is poisoned, and stays so while it runs.
        if let Some(Err(failure)) = self.file.as_ref().map(|file| lost.save(file)) {
            tracing::warn!(error = &failure as &dyn std::error::Error, "{error}");
        }
        Ok(())
    }
}

impl MachineChecks {
    /// For the vCPUs of one machine.
    ///
    /// # Errors
    /// This kernel does not report errors.
    pub fn new(machine: &LinuxMachine) -> Result<Self, WatchError> {
        Self::with_map(machine, PoisonMap::default(), None)
    }

    /// Adds lost memory to `lost`, and saves that to `file` after each error, from which a restored guest's
    /// memory can be poisoned again. A file that cannot be written is a warning.
    ///
    /// # Errors
    /// This kernel does not report errors.
    pub fn with_map(
        machine: &LinuxMachine,
        lost: PoisonMap,
        file: Option<PathBuf>,
    ) -> Result<Self, WatchError> {
        let errors = Arc::new(Errors {
            lost: Mutex::new(lost),
            file,
            untouched: Mutex::default(),
        });
        let vcpus = machine.vcpus();
        let kicks: Vec<_> = vcpus.iter().map(Vcpu::kick_handle).collect();
        let (reported, first) = (Arc::clone(&errors), kicks.first().cloned());
        let watch = ErrorWatch::start(machine.vm(), move |error| {
            if let Err(failure) = reported.record(&error) {
                tracing::warn!(error = &*failure as &dyn std::error::Error, "{error}");
            }
            // The kernel may report an error again. Without duplicates the queue is bounded.
            let mut untouched = lock(&reported.untouched);
            if !untouched.contains(&error) {
                untouched.push_back(error);
            }
            drop(untouched);
            if let Some(first) = &first {
                first.kick();
            }
        })?;
        Ok(Self {
            errors,
            vm: Arc::clone(machine.vm()),
            form: machine.machine_checks(),
            others: Arc::new(NoFaults),
            kicks,
            joins: vcpus.iter().map(|_| AtomicBool::new(false)).collect(),
            _watch: watch,
        })
    }

    /// Passes the faults that are no memory errors to `hooks`; without this they end the run.
    #[must_use]
    pub fn other_faults_to(mut self, hooks: Arc<dyn VcpuHooks>) -> Self {
        self.others = hooks;
        self
    }

    /// The bytes of guest memory lost so far, which depend on the host's policy.
    #[must_use]
    pub fn lost_bytes(&self) -> u64 {
        lock(&self.errors.lost).bytes()
    }

    /// Has the other vCPUs join a machine check: on Intel's processors Linux waits for all of them.
    fn broadcast(&self, from: u32) {
        if self.form != MachineCheckForm::Intel {
            return;
        }
        let others = (0..).zip(self.joins.iter().zip(&self.kicks));
        for (_, (joins, kick)) in others.filter(|(id, _)| *id != from) {
            joins.store(true, Ordering::SeqCst);
            kick.kick();
        }
    }

    /// Injects one error that no vCPU has touched, if there is one. The others follow at later kicks, or
    /// when a vCPU touches them.
    fn inject_untouched(&self, vcpu: &mut PoolVcpu<'_>) -> Result<(), HookError> {
        let Some(error) = lock(&self.errors.untouched).pop_front() else {
            return Ok(());
        };
        match vcpu.inject_machine_check(&MachineCheck::new(self.form, error.severity, error.gpa)) {
            Ok(Injected::Exception) => self.broadcast(vcpu.id()),
            Ok(Injected::Logged) | Err(MachineCheckError::NotReady { .. }) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }
}

impl VcpuHooks for MachineChecks {
    fn on_thread_start(&self, vcpu: &mut PoolVcpu<'_>) -> Result<(), HookError> {
        self.others.on_thread_start(vcpu)
    }

    fn on_fault(&self, vcpu: &mut PoolVcpu<'_>, fault: FaultExit) -> Result<Handled, HookError> {
        if !fault.poisoned {
            return self.others.on_fault(vcpu, fault);
        }
        let error = self
            .vm
            .error_of(fault.gpa, PageSize::Size4K)
            .ok_or(NotItsMemory(fault.gpa))?;
        self.errors.record(&error)?;
        vcpu.inject_machine_check(&MachineCheck::new(self.form, error.severity, error.gpa))?;
        self.broadcast(vcpu.id());
        Ok(Handled::Retry)
    }

    fn on_interrupted(&self, vcpu: &mut PoolVcpu<'_>) -> Result<(), HookError> {
        if vcpu.id() == 0 {
            self.inject_untouched(vcpu)?;
        }
        let joins = self.joins.get(vcpu.id() as usize);
        if !joins.is_some_and(|joins| joins.swap(false, Ordering::SeqCst)) {
            return Ok(());
        }
        match vcpu.inject_machine_check(&MachineCheck::bystander()) {
            // A vCPU that was not started yet, or that has an error of its own, need not join.
            Err(MachineCheckError::NotReady { .. }) | Ok(_) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn on_stop(&self) {
        self.others.on_stop();
    }
}
