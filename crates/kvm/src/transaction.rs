//! Slot transactions: changes of slots, collected step by step.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use pagetide_memory::{GuestAddress, Region};

use crate::commit::{self, CommitError, Committed, Method};
use crate::plan::{Plan, PlanError};
use crate::slot::SlotFlags;
use crate::vm::Inner;

/// A slot in the steps of a transaction: an existing slot, by its number, or one that a step creates.
///
/// The commit chooses the numbers of new slots; [`Committed::slot`] returns them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SlotRef(Referent);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Referent {
    Number(u32),
    Made { transaction: u64, index: usize },
}

impl SlotRef {
    /// The number of an existing slot; None for a new one.
    #[must_use]
    pub fn number(self) -> Option<u32> {
        match self.0 {
            Referent::Number(slot) => Some(slot),
            Referent::Made { .. } => None,
        }
    }

    /// A new slot of a transaction.
    pub(crate) fn made(transaction: u64, index: usize) -> Self {
        Self(Referent::Made { transaction, index })
    }

    /// The index among the new slots of transaction `by`; None for other slots.
    pub(crate) fn made_by(self, by: u64) -> Option<usize> {
        match self.0 {
            Referent::Made { transaction, index } if transaction == by => Some(index),
            _ => None,
        }
    }
}

impl From<u32> for SlotRef {
    fn from(slot: u32) -> Self {
        Self(Referent::Number(slot))
    }
}

impl fmt::Display for SlotRef {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Referent::Number(slot) => write!(formatter, "memory slot {slot}"),
            Referent::Made { index, .. } => {
                write!(formatter, "new memory slot {index} of the transaction")
            }
        }
    }
}

/// One step, as the caller requested it.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    Create {
        region: Arc<Region>,
        offset: u64,
        bytes: u64,
        gpa: GuestAddress,
        flags: SlotFlags,
    },
    Delete(SlotRef),
    Resize(SlotRef, u64),
    Split(SlotRef, u64),
    Merge(SlotRef, SlotRef),
    SetFlags(SlotRef, SlotFlags),
}

/// An atomic change of a VM's memory slots: vCPUs see the old layout or the new one, and no
/// intermediate layout. ([`Method`] explains how, and how [`Method::DeleteCreate`] differs.)
///
/// The steps are only collected here; [`SlotTransaction::commit`] checks all of them against the
/// current layout and then changes it. Several threads may have transactions on one VM, including
/// vCPUs' threads (between two calls of [`BoundVcpu::run`](crate::BoundVcpu::run)); commits take turns.
///
/// The size and memory of a slot number cannot change, so every step but a change of flags assigns new
/// numbers: the lowest that are free before and after, in the order of the steps.
///
/// ```no_run
/// # use pagetide_kvm::{Kvm, SlotFlags};
/// # let vm = Kvm::open()?.create_vm(pagetide_kvm::Signals::install()?)?;
/// let mut change = vm.transaction();
/// let [low, high] = change.split(1, 2 << 20);
/// let logging = SlotFlags { log_dirty: true, ..SlotFlags::default() };
/// change.set_flags(high, logging);
/// let done = change.commit()?;
/// println!("slot 1 is now slots {:?} and {:?}", done.slot(low), done.slot(high));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
#[must_use = "a transaction that is dropped without commit() changes nothing"]
pub struct SlotTransaction<'vm> {
    vm: &'vm Inner,
    number: u64,
    steps: Vec<Step>,
    made: usize,
}

impl<'vm> SlotTransaction<'vm> {
    pub(crate) fn new(vm: &'vm Inner) -> Self {
        static NUMBERS: AtomicU64 = AtomicU64::new(0);
        Self {
            vm,
            number: NUMBERS.fetch_add(1, Ordering::Relaxed),
            steps: Vec::new(),
            made: 0,
        }
    }

    fn make(&mut self) -> SlotRef {
        let index = self.made;
        self.made += 1;
        SlotRef::made(self.number, index)
    }

    /// Creates a slot: `bytes` bytes of `region` from `offset` on (both multiples of 4 KiB), at the
    /// guest's address `gpa`. KVM can use huge pages only where gpa and offset permit it.
    pub fn create(
        &mut self,
        region: Arc<Region>,
        offset: u64,
        bytes: u64,
        gpa: GuestAddress,
        flags: SlotFlags,
    ) -> SlotRef {
        self.steps.push(Step::Create {
            region,
            offset,
            bytes,
            gpa,
            flags,
        });
        self.make()
    }

    /// Deletes a slot.
    pub fn delete(&mut self, slot: impl Into<SlotRef>) {
        self.steps.push(Step::Delete(slot.into()));
    }

    /// Changes a slot's size, in bytes; its start stays. It may grow up to the end of its region.
    pub fn resize(&mut self, slot: impl Into<SlotRef>, bytes: u64) -> SlotRef {
        self.steps.push(Step::Resize(slot.into(), bytes));
        self.make()
    }

    /// Splits a slot into two: the first `at` bytes and the rest.
    pub fn split(&mut self, slot: impl Into<SlotRef>, at: u64) -> [SlotRef; 2] {
        self.steps.push(Step::Split(slot.into(), at));
        [self.make(), self.make()]
    }

    /// Merges two slots that are adjacent, both in the guest and in one region, and have the same
    /// flags; in either order.
    pub fn merge(&mut self, one: impl Into<SlotRef>, other: impl Into<SlotRef>) -> SlotRef {
        self.steps.push(Step::Merge(one.into(), other.into()));
        self.make()
    }

    /// Changes a slot's flags. It retains its number, unless `readonly` changes.
    pub fn set_flags(&mut self, slot: impl Into<SlotRef>, flags: SlotFlags) -> SlotRef {
        self.steps.push(Step::SetFlags(slot.into(), flags));
        self.make()
    }

    /// Checks the steps against the VM's current layout and changes nothing. Another thread may change
    /// the layout before the commit.
    ///
    /// # Errors
    /// See [`PlanError`].
    pub fn check(&self) -> Result<(), PlanError> {
        let slots = self.vm.slots().clone();
        Plan::new(&slots, self.vm.capabilities(), self.number, &self.steps).map(|_| ())
    }

    /// Changes the layout by the best method that this kernel supports: [`Method::List`]; without it,
    /// one ioctl where the change takes only one, and otherwise [`Method::Quiesce`].
    ///
    /// # Errors
    /// [`CommitError`]; the old layout is in place, except after [`CommitError::HalfDone`], and vCPUs
    /// continue to run.
    pub fn commit(self) -> Result<Committed, CommitError> {
        commit::commit(self.vm, self.number, &self.steps, None, self.vm)
    }

    /// Changes the layout by the given method, for tests and comparisons.
    ///
    /// # Errors
    /// As [`SlotTransaction::commit`], and an error if the kernel lacks what the method needs.
    pub fn commit_with(self, method: Method) -> Result<Committed, CommitError> {
        commit::commit(self.vm, self.number, &self.steps, Some(method), self.vm)
    }

    /// Commits by other ioctls than the kernel's.
    #[cfg(test)]
    pub(crate) fn commit_through(
        self,
        method: Method,
        calls: &dyn crate::slot_calls::SlotCalls,
    ) -> Result<Committed, CommitError> {
        commit::commit(self.vm, self.number, &self.steps, Some(method), calls)
    }

    /// The plan of the transaction for another layout and other capabilities.
    #[cfg(test)]
    pub(crate) fn plan(
        &self,
        slots: &crate::slot::SlotLayout,
        capabilities: &crate::vm::Capabilities,
    ) -> Result<Plan, PlanError> {
        Plan::new(slots, capabilities, self.number, &self.steps)
    }
}
