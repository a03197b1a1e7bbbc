//! Uncorrected memory errors, passed on to a Linux guest as machine checks.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pagetide_kvm::poison::{MachineCheck, MachineCheckError, MachineCheckForm};
use pagetide_kvm::{BoundVcpu, FaultExit, Vcpu, VcpuKick, Vm};
use pagetide_memory::{GuestAddress, PageSize, PoisonMap};

use crate::handler::{HandlerError, UnexpectedFault};

use super::hooks::VcpuHooks;
use super::machine::LinuxMachine;

/// Memory with an error lies in no slot of the VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an uncorrected error at gpa {0}, which is no memory of the guest")]
pub struct NotItsMemory(pub GuestAddress);

/// Tells the guest of every uncorrected error that it runs into, by a machine check on the vCPU that
/// did: Linux then kills the process whose memory it was, or panics if it was the kernel's. Any
/// other fault ends the run.
#[derive(Debug)]
pub struct MachineChecks {
    vm: Arc<Vm>,
    form: MachineCheckForm,
    kicks: Vec<VcpuKick>,
    /// By vCPU: whether it is to be told of another one's error.
    bystanders: Vec<AtomicBool>,
    lost: Mutex<PoisonMap>,
}

impl MachineChecks {
    /// For the vCPUs of one machine.
    #[must_use]
    pub fn new(machine: &LinuxMachine) -> Self {
        let vcpus = machine.vcpus();
        Self {
            vm: Arc::clone(machine.vm()),
            form: machine.machine_checks(),
            kicks: vcpus.iter().map(Vcpu::kick_handle).collect(),
            bystanders: vcpus.iter().map(|_| AtomicBool::new(false)).collect(),
            lost: Mutex::default(),
        }
    }

    /// Bytes of guest memory that are lost so far, by the host's policy.
    #[must_use]
    pub fn lost_bytes(&self) -> u64 {
        self.lost().bytes()
    }

    fn lost(&self) -> MutexGuard<'_, PoisonMap> {
        self.lost.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Linux on Intel's processors waits until every one of them is in its machine check.
    fn call_bystanders(&self, but: u32) {
        let others = (0..).zip(self.bystanders.iter().zip(&self.kicks));
        for (_, (wanted, kick)) in others.filter(|(id, _)| *id != but) {
            wanted.store(true, Ordering::SeqCst);
            kick.kick();
        }
    }
}

impl VcpuHooks for MachineChecks {
    fn fault(&self, vcpu: &mut BoundVcpu<'_>, fault: FaultExit) -> Result<(), HandlerError> {
        if !fault.poisoned {
            return Err(UnexpectedFault(fault).into());
        }
        let error = self
            .vm
            .error_of(fault.gpa, PageSize::Size4K)
            .ok_or(NotItsMemory(fault.gpa))?;
        self.lost().insert(error.lost)?;
        tracing::info!("vCPU {}: {error}", vcpu.id());
        vcpu.inject_machine_check(&MachineCheck::new(self.form, error.urgency, error.gpa))?;
        if self.form == MachineCheckForm::Intel {
            self.call_bystanders(vcpu.id());
        }
        Ok(())
    }

    fn interrupted(&self, vcpu: &mut BoundVcpu<'_>) -> Result<(), HandlerError> {
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
}
