//! Where an exit becomes a fault of the pager's.

use std::sync::Arc;

use pagetide_kvm::FaultExit;
use pagetide_memory::{GuestAddress, GuestRange};
use pagetide_pager::{Counters, ExitResolvers, Pager, Resolution};

use crate::control::Stopper;
use crate::hooks::{Handled, HookError, VcpuHooks};
use crate::pool::PoolVcpu;

/// Has a pager resolve memory faults, each on the thread of the vCPU that faulted. It allocates
/// nothing and takes no lock that another thread takes.
#[derive(Debug)]
pub struct Paging {
    resolvers: ExitResolvers,
    pre_fault: bool,
}

/// A page's content is lost: there is nothing to show the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the page at gpa {0} has an uncorrected memory error")]
pub struct PoisonedPage(pub GuestAddress);

impl Paging {
    /// For the vCPUs `0..vcpus`.
    #[must_use]
    pub fn new(pager: &Arc<Pager>, vcpus: u32) -> Self {
        Self {
            resolvers: ExitResolvers::new(pager, vcpus),
            pre_fault: false,
        }
    }

    /// Whether what a fault installed is also mapped in stage 2 before the guest goes on
    /// (KVM_PRE_FAULT_MEMORY).
    #[must_use]
    pub fn pre_fault(mut self, pre_fault: bool) -> Self {
        self.pre_fault = pre_fault;
        self
    }

    /// What the vCPUs' threads counted so far, together.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.resolvers.counters()
    }
}

impl VcpuHooks for Paging {
    #[inline]
    fn on_fault(&self, vcpu: &mut PoolVcpu<'_>, fault: FaultExit) -> Result<Handled, HookError> {
        match self.resolvers.resolve(vcpu.id(), &fault)? {
            Resolution::Installed { gpa, bytes } if self.pre_fault => {
                Ok(Handled::PreFaultThenRetry(GuestRange::new(gpa, bytes)?))
            }
            Resolution::Poisoned => Err(PoisonedPage(fault.gpa).into()),
            _ => Ok(Handled::Retry),
        }
    }

    fn on_stop(&self) {
        self.resolvers.pager().stop();
    }
}

/// Has a failure of the pager stop the run, which would wait for its pages for ever.
pub fn stop_when_paging_fails(pager: &Pager, stopper: &Stopper) {
    let stopper = stopper.clone();
    pager.on_failure(move |failure| stopper.stop(failure.clone()));
}
