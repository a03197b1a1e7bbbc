//! Commits a transaction: by the list ioctl, or slot by slot with every vCPU stopped.

mod error;
mod steps;

use std::time::{Duration, Instant};

use pagetide_memory::GuestRange;
use pagetide_uapi::generated as abi;
use vmm_sys_util::ioctl::ioctl;

use crate::gate::Closed;
use crate::kick::Kickable;
use crate::plan::Plan;
use crate::slot::SlotLayout;
use crate::slot_calls::{ListRefusal, SlotCalls, SlotChange};
use crate::transaction::{SlotRef, Step};
use crate::vm::Inner;
use steps::Steps;

pub use error::{CommitError, FailedChange, Undone};

/// How a transaction changes the layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Method {
    /// One ioctl for all slots, KVM_SET_USER_MEMORY_REGION_LIST. vCPUs continue to run; a vCPU that
    /// faults sees the old or the new layout, or waits. Unchanged slots retain their dirty bits and
    /// stage-2 mappings. Needs KVM_CAP_SET_USER_MEMORY_REGION_LIST.
    List,
    /// Stops every vCPU outside KVM_RUN, deletes and creates slots one by one, and resumes the vCPUs.
    /// Works on any kernel.
    ///
    /// Needs a kick signal ([`Signals`](crate::Signals)), or KVM_CAP_KICK_VCPUS, which does not reach
    /// vCPUs that sleep in the kernel.
    ///
    /// Waits for vCPUs that cannot leave KVM at once. The kick's signal interrupts a vCPU that waits in
    /// KVM_RUN for a userfaultfd on x86; on other architectures the commit waits until the page is
    /// resolved. A thread that resolves faults must therefore not wait for a commit. If the page does not come,
    /// the commit fails after a while ([`CommitError::VcpusStay`]).
    ///
    /// The kernel discards the dirty bits of slots that are created again ([`Committed::lost_dirty`])
    /// and all of their stage-2 mappings.
    Quiesce,
    /// Deletes and creates slots one by one while vCPUs run. A vCPU that accesses a slot in between
    /// sees a hole: MMIO exits for memory accesses, and failed emulation of instructions fetched there.
    /// For comparisons with the other methods, and for changes that take one ioctl.
    DeleteCreate,
}

/// The result of a commit.
#[derive(Clone, Debug)]
pub struct Committed {
    /// The method used.
    pub method: Method,
    /// Number of changed slots: each was deleted, created or given other flags. 0 if the transaction
    /// changes nothing; then no ioctl was made.
    pub entries: usize,
    /// Number of vCPUs inside KVM_RUN (or another ioctl), and of threads populating, that were kicked.
    /// vCPUs that the gate kept from entering do not count. 0 except for [`Method::Quiesce`].
    pub kicked: usize,
    /// The upper bound of the vCPUs' stall: the time from closing the gate to opening it, including the
    /// kicks, the wait until all vCPUs have left, and `updating`. Excludes the time that a vCPU then
    /// takes to wake up and enter. Zero except for [`Method::Quiesce`].
    pub quiesced: Duration,
    /// The part of `quiesced` until the last vCPU left.
    pub waited: Duration,
    /// The time of the ioctls that changed the slots, for every method.
    pub updating: Duration,
    /// Guest-physical ranges whose dirty bits the kernel has discarded because a slot with `log_dirty`
    /// was created again: treat all of their pages as dirty. Empty for [`Method::List`].
    pub lost_dirty: Vec<GuestRange>,
    /// All slots of the VM after the commit.
    pub layout: SlotLayout,
    transaction: u64,
    made: Vec<Option<u32>>,
}

impl Committed {
    /// The number of a slot; None if it was deleted, if later steps replaced it, or if the reference
    /// belongs to another transaction.
    #[must_use]
    pub fn slot(&self, slot: SlotRef) -> Option<u32> {
        match slot.number() {
            Some(number) => self.layout.contains_key(&number).then_some(number),
            None => *self.made.get(slot.made_by(self.transaction)?)?,
        }
    }
}

/// Checks the steps against the current layout and commits them. `calls` makes `vm`'s ioctls, except in
/// tests.
pub(crate) fn commit(
    vm: &Inner,
    transaction: u64,
    steps: &[Step],
    method: Option<Method>,
    calls: &dyn SlotCalls,
) -> Result<Committed, CommitError> {
    // Taken outside all ioctls, also by a vCPU's thread: the holder may wait for vCPUs.
    let _updates = vm.updates();
    let old = vm.slots().clone();
    let plan = Plan::new(&old, vm.capabilities(), transaction, steps)?;
    let method = choose(vm, method, plan.changes.len())?;
    let mut done = Committed {
        method,
        entries: plan.changes.len(),
        kicked: 0,
        quiesced: Duration::ZERO,
        waited: Duration::ZERO,
        updating: Duration::ZERO,
        lost_dirty: Vec::new(),
        layout: plan.layout,
        transaction,
        made: plan.made,
    };
    if plan.changes.is_empty() {
        return Ok(done);
    }
    match method {
        Method::List => {
            let start = Instant::now();
            calls
                .set_list(&plan.changes)
                .map_err(|refusal| refused_list(&plan.changes, refusal))?;
            done.updating = start.elapsed();
            publish(vm, done.layout.clone());
        }
        Method::Quiesce => {
            if !can_kick(vm) {
                return Err(CommitError::NoKick);
            }
            let closed = quiesce(vm)?;
            (done.kicked, done.waited) = (closed.found_inside, closed.since.elapsed());
            let result = one_by_one(vm, old, &plan.changes, calls, &mut done);
            // Before the gate opens: this thread may wait for a processor once vCPUs run again.
            done.quiesced = closed.since.elapsed();
            drop(closed);
            result?;
        }
        Method::DeleteCreate => one_by_one(vm, old, &plan.changes, calls, &mut done)?,
    }
    Ok(done)
}

fn choose(vm: &Inner, asked: Option<Method>, entries: usize) -> Result<Method, CommitError> {
    let has_list = vm.capabilities().slot_list;
    match asked {
        Some(method @ Method::List) if !has_list => Err(CommitError::MissingCapability {
            method,
            capability: "KVM_CAP_SET_USER_MEMORY_REGION_LIST",
            number: abi::KVM_CAP_SET_USER_MEMORY_REGION_LIST,
        }),
        Some(method) => Ok(method),
        None if has_list => Ok(Method::List),
        // One ioctl is atomic: no vCPU sees an intermediate layout.
        None if entries <= 1 => Ok(Method::DeleteCreate),
        None => Ok(Method::Quiesce),
    }
}

fn refused_list(changes: &[SlotChange], refusal: ListRefusal) -> CommitError {
    let ListRefusal { element, source } = refusal;
    let refused = element.and_then(|index| changes.get(index));
    CommitError::List {
        entries: changes.len(),
        refused: refused.map(|change| (change.slot, change.state.range)),
        source,
    }
}

/// Makes `layout` the VM's layout, which drops regions that no slot has any more.
fn publish(vm: &Inner, layout: SlotLayout) {
    let old = std::mem::replace(&mut *vm.slots(), layout);
    // After releasing the lock: unmapping may take long.
    drop(old);
}

/// Stops every vCPU outside its ioctls.
fn quiesce(vm: &Inner) -> Result<Closed<'_, dyn Kickable>, CommitError> {
    let limit = vm.quiesce_limit();
    let closed = vm.gate().close(limit, |inside, before| {
        // A vCPU that has passed the gate but not begun KVM_RUN sees this flag there.
        for target in inside {
            target.stop_early();
        }
        let kicked = before == 0 && vm.capabilities().kick_vcpus && kick_vcpus(vm);
        // The ioctl is missing, or does not reach all: a thread may sleep in the kernel, or be in
        // another ioctl than KVM_RUN.
        for target in inside
            .iter()
            .filter(|target| !(kicked && target.vcpu().is_some()))
        {
            target.signal();
        }
    });
    closed.map_err(|inside| CommitError::VcpusStay {
        vcpus: inside.iter().filter_map(|target| target.vcpu()).collect(),
        waited: limit,
    })
}

/// Whether threads inside an ioctl can be made to leave, or none can be inside.
fn can_kick(vm: &Inner) -> bool {
    vm.signals().kick().is_some() || vm.capabilities().kick_vcpus || !vm.gate().has_participants()
}

/// KVM_KICK_VCPUS; returns whether it succeeded.
fn kick_vcpus(vm: &Inner) -> bool {
    // SAFETY: a VM's descriptor; the ioctl takes no argument and touches no memory of this process.
    // Gated by KVM_CAP_KICK_VCPUS, which the caller has checked.
    unsafe { ioctl(vm.fd(), abi::KVM_KICK_VCPUS.into()) == 0 }
}

/// Makes the changes one after the other, and undoes them if one fails.
fn one_by_one(
    vm: &Inner,
    old: SlotLayout,
    changes: &[SlotChange],
    calls: &dyn SlotCalls,
    done: &mut Committed,
) -> Result<(), CommitError> {
    let start = Instant::now();
    let mut steps = Steps::new(calls, old, |layout| publish(vm, layout));
    for change in changes {
        if let Err(source) = steps.take(change) {
            let lost_dirty = steps.lost_dirty();
            return Err(match steps.undo() {
                None => CommitError::RolledBack {
                    method: done.method,
                    change: change.into(),
                    lost_dirty,
                    source,
                },
                Some(undone) => CommitError::HalfDone {
                    method: done.method,
                    change: change.into(),
                    lost_dirty,
                    source,
                    undone,
                },
            });
        }
    }
    // A log that a step turned off on purpose does not count as lost.
    done.lost_dirty = steps.deleted_logs();
    steps.finish();
    done.updating = start.elapsed();
    Ok(())
}

#[cfg(test)]
mod tests;
