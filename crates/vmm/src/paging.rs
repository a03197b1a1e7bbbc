//! Where an exit becomes a fault of the pager's, and an installed page a mapping in stage 2.

use std::error::Error;
use std::sync::Arc;

use crossbeam_utils::CachePadded;
use pagetide_kvm::{FaultExit, PopulateError, PopulateFlags, Vm, populate_vm};
use pagetide_memory::{Exclusive, GuestAddress, GuestRange};
use pagetide_pager::{Counters, Mapper, Notice, Pager, Resolution, Resolver};

use crate::control::Stopper;
use crate::hooks::{Handled, HookError, VcpuHooks};
use crate::pool::PoolVcpu;

/// Has a pager resolve memory faults, each on the thread of the vCPU that faulted. It allocates
/// nothing and takes no lock that another thread takes.
#[derive(Debug)]
pub struct Paging {
    pager: Arc<Pager>,
    /// One for each vCPU, which its own thread alone uses while the guest runs.
    resolvers: Box<[CachePadded<Exclusive<Resolver>>]>,
    pre_fault: bool,
    /// Whose slots say where a gpa's memory is at home; None while every region is.
    slots: Option<Arc<Vm>>,
}

/// An exit that paging cannot resolve.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnresolvableExit {
    /// A page's content is lost: there is nothing to show the guest.
    #[error("the page at gpa {0} has an uncorrected memory error")]
    Poisoned(GuestAddress),
    /// The memory is not mapped on the host any more.
    #[error("the page at gpa {0} is not mapped on the host any more")]
    Unmapped(GuestAddress),
    /// KVM does not say that making the page present would help.
    #[error("not a fault on an absent page: {0}")]
    NotAbsent(FaultExit),
    /// The paging was made for fewer vCPUs.
    #[error("vCPU {0} is none of those that are paged for")]
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

    /// For a VM whose slot transactions put memory elsewhere than at its region's own gpa: each fault
    /// is the fault of the page that the guest sees there at that moment. The pager knows pages by
    /// their regions' own gpas.
    #[must_use]
    pub fn with_slots_of(mut self, vm: &Arc<Vm>) -> Self {
        self.slots = Some(Arc::clone(vm));
        self
    }

    /// Whether what a fault installed is also mapped in stage 2 before the guest goes on
    /// (KVM_PRE_FAULT_MEMORY). Not for a VM whose slots put memory elsewhere
    /// ([`Self::with_slots_of`]): what lies beside a page there may be something else.
    #[must_use]
    pub fn pre_fault(mut self, pre_fault: bool) -> Self {
        self.pre_fault = pre_fault;
        self
    }

    /// What the vCPUs' threads counted so far, together. Waits while one of them resolves a fault: for
    /// as long as a source is silent, if a vCPU waits for it. So rather ask when the vCPUs have stopped.
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

    /// Resolves an exit of vCPU `vcpu`, on its thread.
    ///
    /// # Errors
    /// [`UnresolvableExit`], and what the pager says; the guest must not be entered again.
    #[inline]
    pub fn resolve(&self, vcpu: u32, exit: &FaultExit) -> Result<Resolution, HookError> {
        if !exit.is_resolvable() || exit.private {
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
                // The slot has gone since: the access is repeated under the new layout.
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

/// Maps what has arrived in the stage-2 tables that all vCPUs share (KVM_POPULATE_MEMORY, gated by
/// KVM_CAP_POPULATE_MEMORY: without it, the first call fails and population ends). For VMs whose slots
/// have each region at its own gpa; elsewhere it may map other memory ahead, which does no harm and no
/// good.
#[derive(Clone, Debug)]
pub struct StageTwo(pub Arc<Vm>);

impl Mapper for StageTwo {
    fn populate(&self, range: GuestRange) -> Result<u64, Box<dyn Error + Send + Sync>> {
        // Not for writing: mappings are writable anyhow if the host's are, and with that flag the zero
        // page would count as absent.
        let flags = PopulateFlags {
            write: false,
            present_only: true,
        };
        // Beside slot transactions, not under their gate, as nothing here waits for a fault: a slot that
        // goes meanwhile ends the call.
        match populate_vm(self.0.fd(), range, flags, || false) {
            Ok(populated) => Ok(populated.mapped_bytes),
            // The memory is not, or no longer, the guest's: there is nothing to save it from.
            Err(PopulateError::NoSlot { unfinished, .. }) => Ok(unfinished.done.mapped_bytes),
            Err(error) => Err(error.into()),
        }
    }
}

/// Has trouble of the pager stop the run, which would wait for its pages for ever.
pub fn stop_when_in_trouble(pager: &Pager, stopper: &Stopper) {
    let stopper = stopper.clone();
    pager.on_notice(move |notice: &Notice| {
        if notice.needs_action() {
            stopper.stop(notice.clone());
        }
    });
}
