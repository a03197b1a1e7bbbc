//! Uncorrected memory errors, passed on to a Linux guest as machine checks.

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

/// Memory with an error lies in no slot of the VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an uncorrected error at gpa {0}, which is no memory of the guest")]
pub struct NotItsMemory(pub GuestAddress);

/// Tells the guest of every uncorrected error in its memory, by a machine check: on the vCPU that ran
/// into it, and Linux kills the process whose memory it was, or panics if it was the kernel's; or, of
/// an error that nobody has touched yet, on the first vCPU, and Linux stops using the page. Any other
/// fault ends the run, unless somebody else is to have it ([`MachineChecks::other_faults_to`]).
pub struct MachineChecks {
    told: Arc<Told>,
    vm: Arc<Vm>,
    form: MachineCheckForm,
    others: Arc<dyn VcpuHooks>,
    kicks: Vec<VcpuKick>,
    /// By vCPU: whether it is to be told of another one's error.
    bystanders: Vec<AtomicBool>,
    _watch: ErrorWatch,
}

/// What the kernel has told of.
#[derive(Debug, Default)]
struct Told {
    lost: Mutex<PoisonMap>,
    /// Where that is saved.
    file: Option<PathBuf>,
    /// Errors that nobody has touched, and that the guest does not know of.
    found: Mutex<VecDeque<MemoryError>>,
}

impl Told {
    fn record(&self, error: &MemoryError) -> Result<(), HookError> {
        tracing::info!("{error}");
        let mut lost = lock(&self.lost);
        lost.insert(error.lost)?;
        // No reason to end the guest: what is lost is lost in its memory, too, as long as it lives.
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
    /// The kernel does not tell of errors.
    pub fn new(machine: &LinuxMachine) -> Result<Self, WatchError> {
        Self::with_map(machine, PoisonMap::default(), None)
    }

    /// Adds what is lost to `lost`, and saves that to `file` with each error, for whoever restores the guest.
    /// A file that cannot be written is a warning.
    ///
    /// # Errors
    /// The kernel does not tell of errors.
    pub fn with_map(
        machine: &LinuxMachine,
        lost: PoisonMap,
        file: Option<PathBuf>,
    ) -> Result<Self, WatchError> {
        let told = Arc::new(Told {
            lost: Mutex::new(lost),
            file,
            found: Mutex::default(),
        });
        let vcpus = machine.vcpus();
        let kicks: Vec<_> = vcpus.iter().map(Vcpu::kick_handle).collect();
        let (its, first) = (Arc::clone(&told), kicks.first().cloned());
        let watch = ErrorWatch::start(machine.vm(), move |error| {
            if let Err(failure) = its.record(&error) {
                tracing::warn!(error = &*failure as &dyn std::error::Error, "{error}");
            }
            // The same error may be told of again: no more wait than there are pages.
            let mut found = lock(&its.found);
            if !found.contains(&error) {
                found.push_back(error);
            }
            drop(found);
            if let Some(first) = &first {
                first.kick();
            }
        })?;
        Ok(Self {
            told,
            vm: Arc::clone(machine.vm()),
            form: machine.machine_checks(),
            others: Arc::new(NoFaults),
            kicks,
            bystanders: vcpus.iter().map(|_| AtomicBool::new(false)).collect(),
            _watch: watch,
        })
    }

    /// Has `hooks` resolve the faults that are no memory errors; without this they end the run.
    #[must_use]
    pub fn other_faults_to(mut self, hooks: Arc<dyn VcpuHooks>) -> Self {
        self.others = hooks;
        self
    }

    /// Bytes of guest memory that are lost so far, by the host's policy.
    #[must_use]
    pub fn lost_bytes(&self) -> u64 {
        lock(&self.told.lost).bytes()
    }

    /// Linux on Intel's processors waits until every one of them is in its machine check.
    fn call_bystanders(&self, but: u32) {
        if self.form != MachineCheckForm::Intel {
            return;
        }
        let others = (0..).zip(self.bystanders.iter().zip(&self.kicks));
        for (_, (wanted, kick)) in others.filter(|(id, _)| *id != but) {
            wanted.store(true, Ordering::SeqCst);
            kick.kick();
        }
    }

    /// Tells of an error that nobody has touched, if there is one. The next is told of when the guest is done
    /// with this one, or by whoever touches it.
    fn tell_found(&self, vcpu: &mut PoolVcpu<'_>) -> Result<(), HookError> {
        let Some(error) = lock(&self.told.found).pop_front() else {
            return Ok(());
        };
        match vcpu.inject_machine_check(&MachineCheck::new(self.form, error.severity, error.gpa)) {
            Ok(Injected::Exception) => self.call_bystanders(vcpu.id()),
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
        self.told.record(&error)?;
        vcpu.inject_machine_check(&MachineCheck::new(self.form, error.severity, error.gpa))?;
        self.call_bystanders(vcpu.id());
        Ok(Handled::Retry)
    }

    fn on_interrupted(&self, vcpu: &mut PoolVcpu<'_>) -> Result<(), HookError> {
        if vcpu.id() == 0 {
            self.tell_found(vcpu)?;
        }
        let wanted = self.bystanders.get(vcpu.id() as usize);
        if !wanted.is_some_and(|wanted| wanted.swap(false, Ordering::SeqCst)) {
            return Ok(());
        }
        match vcpu.inject_machine_check(&MachineCheck::bystander()) {
            // It was not started yet, or has an error of its own: then it need not be told.
            Err(MachineCheckError::NotReady { .. }) | Ok(_) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn on_stop(&self) {
        self.others.on_stop();
    }
}
