//! The connection of KVM and the pager: exits become faults, and installed pages mappings in stage 2.

use std::error::Error;
use std::sync::Arc;

use crossbeam_utils::CachePadded;
use pagetide_kvm::{FaultExit, PopulateError, PopulateFlags, Vm, populate_vm};
use pagetide_memory::{Exclusive, GuestAddress, GuestRange};
use pagetide_pager::{Counters, Mapper, Notice, Pager, Resolution, Resolver};

use crate::control::Stopper;
use crate::hooks::{Handled, HookError, VcpuHooks};
use crate::pool::PoolVcpu;

/// Hooks that resolve memory faults by a pager, each on the thread of the vCPU that faulted. They
/// allocate nothing, and take no lock that another thread takes.
#[derive(Debug)]
pub struct Paging {
    pager: Arc<Pager>,
    /// One for each vCPU, which only the vCPU's thread uses while the guest runs.
    resolvers: Box<[CachePadded<Exclusive<Resolver>>]>,
    pre_fault: bool,
    /// The VM whose slots translate gpas to the regions' own; None if these are the same.
    slots: Option<Arc<Vm>>,
}

/// A memory fault that paging cannot resolve.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnresolvableExit {
    /// The page's content is lost.
    #[error("the page at gpa {0} has an uncorrected memory error")]
    Poisoned(GuestAddress),
    /// The memory is not mapped on the host any more.
    #[error("the page at gpa {0} is not mapped on the host any more")]
    Unmapped(GuestAddress),
    /// A present page would not help: the exit is not about an absent one.
    #[error("not a fault on an absent page: {0}")]
    NotAbsent(FaultExit),
    /// [`Paging::new`] was given fewer vCPUs.
    #[error("paging was set up for fewer vCPUs than {0}")]
    UnknownVcpu(u32),
}

impl Paging {
    /// For the vCPUs `0..vcpus`.
    #[must_use]
    pub fn new(pager: &Arc<Pager>, vcpus: u32) -> Self {
        let resolvers = (0..vcpus).filter_map(|vcpu| pager.resolver(Some(vcpu)));
        Self {
            resolvers: resolvers
                .map(|resolver| CachePadded::new(Exclusive::new(resolver)))
                .collect(),
            pager: Arc::clone(pager),
            pre_fault: false,
            slots: None,
        }
    }

    /// For a VM in which slot transactions move memory away from its region's own gpa. Each fault is
    /// then translated by the slots of that moment; the pager knows pages by their regions' own gpas.
    #[must_use]
    pub fn with_slots_of(mut self, vm: &Arc<Vm>) -> Self {
        self.slots = Some(Arc::clone(vm));
        self
    }

    /// Whether the pages that a fault installed are mapped in stage 2 before the vCPU enters the guest
    /// (KVM_PRE_FAULT_MEMORY). Ignored with [`Self::with_slots_of`]: the page's neighbours may belong to
    /// another region there.
    #[must_use]
    pub fn pre_fault(mut self, pre_fault: bool) -> Self {
        self.pre_fault = pre_fault;
        self
    }

    /// The sum of the vCPUs' counters. Waits while a vCPU's thread resolves a fault, which may wait for
    /// a source: best called when the vCPUs have stopped.
    #[must_use]
    pub fn counters(&self) -> Counters {
        let mut sum = Counters::default();
        for resolver in &self.resolvers {
            while resolver
                .try_with(|resolver| sum.add(resolver.counters()))
                .is_none()
            {
                std::thread::yield_now();
            }
        }
        sum
    }

    /// Resolves a memory fault of vCPU `vcpu`, on the vCPU's thread.
    ///
    /// # Errors
    /// [`UnresolvableExit`] and the pager's errors; the vCPU must not enter the guest again.
    #[inline]
    pub fn resolve(&self, vcpu: u32, exit: &FaultExit) -> Result<Resolution, HookError> {
        // In slots with exits, the kernel reports poison by an exit, too. The pager's map of the pages
        // then notes the loss, or has content again that replaces it. SIGBUS has no flags.
        let poison = exit.poisoned && exit.flags != 0;
        if !(exit.is_resolvable() || poison) || exit.private {
            return Err(UnresolvableExit::NotAbsent(*exit).into());
        }
        let index = usize::try_from(vcpu).ok();
        let resolver = index
            .and_then(|index| self.resolvers.get(index))
            .ok_or(UnresolvableExit::UnknownVcpu(vcpu))?;
        let gpa = match &self.slots {
            None => exit.gpa,
            Some(vm) => match vm.home_of(exit.gpa) {
                Some(home) => home.gpa,
                // The slot is gone: the guest repeats the access under the new layout.
                None => return Ok(Resolution::AlreadyPresent),
            },
        };
        match resolver.with(|resolver| resolver.resolve_exit(gpa, exit.access))? {
            Resolution::Poisoned => Err(UnresolvableExit::Poisoned(exit.gpa).into()),
            Resolution::Unmapped => Err(UnresolvableExit::Unmapped(exit.gpa).into()),
            resolution => Ok(resolution),
        }
    }
}

impl VcpuHooks for Paging {
    #[inline]
    fn on_fault(&self, vcpu: &mut PoolVcpu<'_>, fault: FaultExit) -> Result<Handled, HookError> {
        match self.resolve(vcpu.id(), &fault)? {
            Resolution::Installed { pages } if self.pre_fault && self.slots.is_none() => {
                let range = self.pager.gpa_range(fault.gpa, pages);
                Ok(range.map_or(Handled::Retry, Handled::PreFaultThenRetry))
            }
            _ => Ok(Handled::Retry),
        }
    }

    fn on_stop(&self) {
        self.pager.stop();
    }
}

/// A mapper of installed pages in the stage-2 tables that all vCPUs share (KVM_POPULATE_MEMORY, gated by
/// KVM_CAP_POPULATE_MEMORY: without it, the first call fails and population ends). For VMs whose slots
/// have each region at its own gpa; in other VMs it may map other memory, which is useless and harmless.
#[derive(Clone, Debug)]
pub struct StageTwo(pub Arc<Vm>);

impl Mapper for StageTwo {
    fn populate(&self, range: GuestRange) -> Result<u64, Box<dyn Error + Send + Sync>> {
        // Without the flag for writing, mappings are writable if the host's are; with it the zero page
        // would count as absent.
        let flags = PopulateFlags {
            write: false,
            present_only: true,
        };
        // Not under the gate of slot transactions, because nothing here waits for a fault: a slot that is
        // deleted meanwhile ends the call.
        match populate_vm(self.0.fd(), range, flags, || false) {
            Ok(populated) => Ok(populated.mapped_bytes),
            // The memory is not the guest's, or no longer: there is nothing to map.
            Err(PopulateError::NoSlot { unfinished, .. }) => Ok(unfinished.done.mapped_bytes),
            Err(error) => Err(error.into()),
        }
    }
}

/// Stops the run when the pager reports trouble: the guest would wait for its pages for ever.
pub fn stop_when_in_trouble(pager: &Pager, stopper: &Stopper) {
    let stopper = stopper.clone();
    pager.on_notice(move |notice: &Notice| {
        if notice.needs_action() {
            stopper.stop(notice.clone());
        }
    });
}
