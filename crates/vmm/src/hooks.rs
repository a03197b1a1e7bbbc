//! What happens on the vCPUs' own threads.

use std::error::Error;

use pagetide_kvm::{Exit, FaultExit};
use pagetide_memory::GuestRange;

use crate::pool::PoolVcpu;

/// Why a hook cannot go on; it ends the pool.
pub type HookError = Box<dyn Error + Send + Sync>;

/// What to do after a memory fault was handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Handled {
    /// Enter the guest again, which repeats the access.
    Retry,
    /// First fill the stage-2 tables for this range (KVM_PRE_FAULT_MEMORY on this vCPU): pages
    /// around the fault that were installed with it, so that their first touches do not exit. It
    /// is an optimisation: what cannot be filled is left to the guest's own faults, and counted.
    PreFaultThenRetry(GuestRange),
}

/// What a vCPU does after an exit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Enters the guest again.
    Enter,
    /// Is done. The other vCPUs go on.
    Leave,
    /// All vCPUs are done.
    End,
    /// Nobody here knows this exit: the pool fails with
    /// [`PoolFailure::UnexpectedExit`](crate::PoolFailure::UnexpectedExit).
    Unexpected,
}

/// What a pool does with its vCPUs' exits. Each method but [`VcpuHooks::on_stop`] is called on the
/// thread of the vCPU that it is about, and from many of these threads at once. Any error, and any
/// panic, ends the pool: the guest stops, it never reads something else instead.
pub trait VcpuHooks: Send + Sync {
    /// The vCPU is bound to its thread, and has not entered the guest yet.
    ///
    /// # Errors
    /// End the pool.
    fn on_thread_start(&self, vcpu: &mut PoolVcpu<'_>) -> Result<(), HookError> {
        let _ = vcpu;
        Ok(())
    }

    /// A memory access of the guest failed. After Ok it is repeated, unless what was done to the
    /// vCPU takes the guest elsewhere. Of a fault that is not resolvable
    /// ([`FaultExit::is_resolvable`]) a repetition makes nothing better: it wants an error, or to be
    /// told to the guest.
    ///
    /// # Errors
    /// End the pool.
    fn on_fault(&self, vcpu: &mut PoolVcpu<'_>, fault: FaultExit) -> Result<Handled, HookError> {
        let _ = vcpu;
        Err(UnexpectedFault(fault).into())
    }

    /// A signal made the vCPU leave the guest: a kick, which may be one of the pool's owner
    /// ([`VcpuPool::kick_all`](crate::VcpuPool::kick_all)). Not called once the pool is stopped.
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

    /// The pool was stopped or has failed: hooks that wait for something must come back soon. Called
    /// from any thread, at most once a pool.
    fn on_stop(&self) {}
}

/// For guests whose memory faults never leave them: any fault is an error.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoFaults;

impl VcpuHooks for NoFaults {}

/// A fault left the guest although nobody was to handle one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no handler for faults: {0}")]
pub struct UnexpectedFault(pub FaultExit);
