//! What a caller does on the vCPUs' own threads.

use pagetide_kvm::{BoundVcpu, FaultExit};

use pagetide_vmm::{HookError as HandlerError, NoFaults, UnexpectedFault};

/// What a caller does on the vCPUs' own threads while a Linux guest runs: resolve memory faults,
/// or set state that only the vCPU's thread may set, such as a machine check. Called from many
/// vCPUs at once.
pub trait VcpuHooks: Send + Sync {
    /// A memory access of the guest failed. After Ok it is repeated, unless what was done to the
    /// vCPU takes the guest elsewhere.
    ///
    /// # Errors
    /// Any error ends the run.
    fn fault(&self, vcpu: &mut BoundVcpu<'_>, fault: FaultExit) -> Result<(), HandlerError> {
        let _ = vcpu;
        Err(UnexpectedFault(fault).into())
    }

    /// A signal made the vCPU leave the guest: a kick of the caller's
    /// ([`LinuxMachine::vcpus`](super::LinuxMachine::vcpus) has the handles), or one of the
    /// machine's own, twice a second.
    ///
    /// # Errors
    /// Any error ends the run.
    fn interrupted(&self, vcpu: &mut BoundVcpu<'_>) -> Result<(), HandlerError> {
        let _ = vcpu;
        Ok(())
    }
}

impl VcpuHooks for NoFaults {}
