//! Who resolves the faults that leave the guest.

use std::error::Error;

use pagetide_kvm::FaultExit;
use pagetide_memory::GuestRange;

/// Why a fault could not be resolved; it ends the run.
pub type HandlerError = Box<dyn Error + Send + Sync>;

/// What to do after a fault was handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Handled {
    /// Enter the guest again, which repeats the access.
    Retry,
    /// First fill the stage-2 tables for this range (KVM_PRE_FAULT_MEMORY on this vCPU): pages
    /// around the fault that were installed with it, so that their first touches do not exit. It
    /// is an optimisation: what cannot be filled is left to the guest's own faults, and counted.
    PreFaultThenRetry(GuestRange),
}

/// Resolves memory faults. Called on the thread of the vCPU that faulted, from many vCPUs at once.
pub trait FaultHandler: Send + Sync {
    /// Makes the memory present, or says why it cannot be had. Only resolvable faults
    /// ([`FaultExit::is_resolvable`]) come here; the machine itself ends the run for others.
    ///
    /// # Errors
    /// Any error ends the run: the guest stops, it never reads something else instead.
    fn handle(&self, vcpu: u32, fault: FaultExit) -> Result<Handled, HandlerError>;

    /// The run has failed somewhere: calls of [`FaultHandler::handle`] that wait for something
    /// must come back soon. Called from any thread, at most once a run.
    fn stop(&self) {}
}

/// For machines whose memory faults never leave the guest: any fault is an error.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoFaults;

/// A fault left the guest although nobody was to handle one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no handler for faults: {0}")]
pub struct UnexpectedFault(pub FaultExit);

impl FaultHandler for NoFaults {
    fn handle(&self, _vcpu: u32, fault: FaultExit) -> Result<Handled, HandlerError> {
        Err(UnexpectedFault(fault).into())
    }
}
