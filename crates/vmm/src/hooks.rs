//! The interface between a pool and its user: what happens at a vCPU's exits.

use std::error::Error;

use pagetide_kvm::{Exit, FaultExit};
use pagetide_memory::GuestRange;

use crate::pool::PoolVcpu;

/// Why a hook failed; the error ends the pool.
pub type HookError = Box<dyn Error + Send + Sync>;

/// What follows a memory fault that was handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Handled {
    /// The vCPU enters the guest, which repeats the access.
    Retry,
    /// The vCPU first maps this range in stage 2 (KVM_PRE_FAULT_MEMORY): pages around the fault that
    /// were installed with it, so that their first touches do not exit. This is an optimisation: what
    /// cannot be mapped is counted, and left to the guest's own faults.
    PreFaultThenRetry(GuestRange),
}

/// What a vCPU does after an exit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// It enters the guest again.
    Enter,
    /// It ends. The other vCPUs continue.
    Leave,
    /// All vCPUs end.
    End,
    /// The hook does not handle this exit: the pool fails with
    /// [`PoolFailure::UnexpectedExit`](crate::PoolFailure::UnexpectedExit).
    Unexpected,
}

/// What a pool does at its vCPUs' exits. The pool calls each method but [`VcpuHooks::on_stop`] on the
/// thread of the vCPU in question, and on many of these threads at the same time. An error or a panic
/// ends the pool: no guest continues with wrong memory.
pub trait VcpuHooks: Send + Sync {
    /// The vCPU is bound to its thread, and has not entered the guest yet.
    ///
    /// # Errors
    /// End the pool.
    fn on_thread_start(&self, vcpu: &mut PoolVcpu<'_>) -> Result<(), HookError> {
        let _ = vcpu;
        Ok(())
    }

    /// A memory access of the guest failed. After Ok the guest repeats it, unless the hook has changed
    /// the vCPU's registers. Repetition does not help a fault that is not resolvable
    /// ([`FaultExit::is_resolvable`]): the hook returns an error, or injects an exception.
    ///
    /// # Errors
    /// End the pool.
    fn on_fault(&self, vcpu: &mut PoolVcpu<'_>, fault: FaultExit) -> Result<Handled, HookError> {
        let _ = vcpu;
        Err(UnexpectedFault(fault).into())
    }

    /// A signal interrupted the vCPU: a kick, perhaps by [`VcpuPool::kick_all`](crate::VcpuPool::kick_all).
    /// Not called once the pool is stopped.
    ///
    /// # Errors
    /// End the pool.
    fn on_interrupted(&self, vcpu: &mut PoolVcpu<'_>) -> Result<(), HookError> {
        let _ = vcpu;
        Ok(())
    }

    /// Any other exit: port and memory-mapped I/O, halt, shutdown and the rest.
    ///
    /// # Errors
    /// End the pool.
    fn on_exit(&self, vcpu: &mut PoolVcpu<'_>, exit: Exit) -> Result<Next, HookError> {
        let _ = (vcpu, exit);
        Ok(Next::Unexpected)
    }

    /// The pool was stopped or has failed: hooks that wait must return soon. Called on any thread, at
    /// most once for a pool.
    fn on_stop(&self) {}
}

/// Hooks of guests whose memory faults never exit: any fault is an error.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoFaults;

impl VcpuHooks for NoFaults {}

/// A memory fault exited, and the hooks handle none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no handler for faults: {0}")]
pub struct UnexpectedFault(pub FaultExit);
