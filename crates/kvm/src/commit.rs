//! Carrying a transaction out: by the list ioctl, or slot by slot with every vCPU stopped.

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
    /// One ioctl for all slots, KVM_SET_USER_MEMORY_REGION_LIST. vCPUs run on, and those that fault
    /// see the old layout or the new one, or wait. Dirty bits and what the stage-2 tables map stay
    /// where nothing changes. Needs KVM_CAP_SET_USER_MEMORY_REGION_LIST.
    List,
    /// Every vCPU is stopped outside KVM_RUN, slots are deleted and created one by one, and the
    /// vCPUs go on. Works on any kernel.
    ///
    /// Needs a signal that kicks ([`Signals`](crate::Signals)), or KVM_CAP_KICK_VCPUS, which does not
    /// reach vCPUs that sleep in the kernel.
    ///
    /// Waits for vCPUs that KVM does not let go: one that waits in KVM_RUN for a userfaultfd is
    /// interrupted by the kick's signal on x86; where it is not, the commit waits until the page
    /// is there. So whoever resolves faults must not wait for a commit.
    ///
    /// The kernel forgets the dirty bits of slots that are made anew
    /// ([`Committed::lost_dirty`]) and all that the stage-2 tables map of them.
    Quiesce,
    /// Slots are deleted and created one by one while vCPUs run. A vCPU that looks in between sees
    /// a hole: MMIO exits for accesses to memory, and failed emulation of what it executes there.
    /// For measuring what the others are worth, and for changes that take one ioctl.
    DeleteCreate,
}

/// A layout that was changed.
#[derive(Clone, Debug)]
pub struct Committed {
    /// How.
    pub method: Method,
    /// Slots that were changed: each is deleted, created or given other flags. None if the
    /// transaction came to nothing; then nothing was done at all.
    pub entries: usize,
    /// How many vCPUs were inside KVM_RUN (or another ioctl), or threads populating, and were kicked. Others were kept
    /// from entering, and are not counted. 0 except for [`Method::Quiesce`].
    pub kicked: usize,
    /// How long vCPUs were kept from the guest at most: from the moment when the gate was closed
    /// until it was opened again, so the kicks, the wait until all had left, and `updating`. Not
    /// the time that a vCPU then takes to wake up and enter. Zero except for [`Method::Quiesce`].
    pub quiesced: Duration,
    /// The part of `quiesced` until the last vCPU had left.
    pub waited: Duration,
    /// The time of the ioctls that changed the slots, whatever the method.
    pub updating: Duration,
    /// Guest-physical ranges whose dirty bits the kernel has forgotten, because a slot with
    /// `log_dirty` was made anew: take all their pages as dirty. Empty for [`Method::List`].
    pub lost_dirty: Vec<GuestRange>,
    /// All slots that the VM has now.
    pub layout: SlotLayout,
    transaction: u64,
    made: Vec<Option<u32>>,
}

impl Committed {
    /// The number of a slot; None if it was deleted, or if other slots were made of it, or if the
    /// reference is another transaction's.
    #[must_use]
    pub fn slot(&self, slot: SlotRef) -> Option<u32> {
        match slot.number() {
            Some(number) => self.layout.contains_key(&number).then_some(number),
            None => *self.made.get(slot.made_by(self.transaction)?)?,
        }
    }
}

/// Checks the steps against the layout of this moment and carries them out. `calls` are `vm`'s
/// ioctls, except in tests.
pub(crate) fn commit(
    vm: &Inner,
    transaction: u64,
    steps: &[Step],
    method: Option<Method>,
    calls: &dyn SlotCalls,
) -> Result<Committed, CommitError> {
    // Taken outside all ioctls, also by a vCPU's thread: the holder may be waiting for vCPUs.
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
            let closed = quiesce(vm);
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
        // One ioctl is one step: nobody can see it half done.
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

/// Makes `layout` the VM's, which drops regions that no slot has any more.
fn publish(vm: &Inner, layout: SlotLayout) {
    let old = std::mem::replace(&mut *vm.slots(), layout);
    // After the lock: unmapping may take long.
    drop(old);
}

/// Stops every vCPU outside its ioctls.
fn quiesce(vm: &Inner) -> Closed<'_, dyn Kickable> {
    vm.gate().close(|inside, before| {
        // Whoever has taken its seat and not begun KVM_RUN sees this flag there.
        for target in inside {
            target.stop_early();
        }
        let kicked = before == 0 && vm.capabilities().kick_vcpus && kick_vcpus(vm);
        // There is no such ioctl, or it does not reach somebody: one who sleeps in the kernel, or
        // is in another ioctl than KVM_RUN.
        for target in inside.iter().filter(|target| !(kicked && target.is_vcpu())) {
            target.signal();
        }
    })
}

/// Whether those who are inside can be made to leave, if there may be any.
fn can_kick(vm: &Inner) -> bool {
    vm.signals().kick().is_some() || vm.capabilities().kick_vcpus || !vm.gate().has_seats()
}

/// KVM_KICK_VCPUS; whether it worked.
fn kick_vcpus(vm: &Inner) -> bool {
    // SAFETY: a VM's descriptor; the ioctl takes no argument and touches no memory of ours. Gated
    // by KVM_CAP_KICK_VCPUS, which the caller has seen.
    unsafe { ioctl(vm.fd(), abi::KVM_KICK_VCPUS.into()) == 0 }
}

/// Carries the changes out one after the other, and back if one fails.
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
    // A log that a step turned off is none that was forgotten, but one that nobody wants.
    done.lost_dirty = steps.deleted_logs();
    steps.finish();
    done.updating = start.elapsed();
    Ok(())
}

#[cfg(test)]
mod tests;
