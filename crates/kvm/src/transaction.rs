//! Slot transactions: what is to change, collected step by step.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use pagetide_memory::{GuestAddress, Region};

use crate::commit::{self, CommitError, Committed, Method};
use crate::plan::{Plan, PlanError};
use crate::slot::SlotFlags;
use crate::vm::Inner;

/// A slot in the steps of a transaction: one that the VM has, by its number, or one that a step
/// makes.
///
/// The numbers of new slots are chosen when the transaction is committed:
/// [`Committed::slot`] tells them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SlotRef(Referent);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Referent {
    Number(u32),
    Made { transaction: u64, index: usize },
}

impl SlotRef {
    /// The number, if this is a slot that the VM had before.
    #[must_use]
    pub fn number(self) -> Option<u32> {
        match self.0 {
            Referent::Number(slot) => Some(slot),
            Referent::Made { .. } => None,
        }
    }

    /// A transaction's new slot.
    pub(crate) fn made(transaction: u64, index: usize) -> Self {
        Self(Referent::Made { transaction, index })
    }

    /// Which of a transaction's new slots this is; None for another transaction's.
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

/// One step, as it was asked for.
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

/// A change of a VM's memory slots that its vCPUs see as one: they see the old layout or the new
/// one, and no step in between ([`Method`] says how, and what [`Method::DeleteCreate`] does instead).
///
/// The steps are collected here; nothing is looked at or changed before [`SlotTransaction::commit`],
/// which checks all of it against the layout of that moment. Several threads may have transactions
/// on one VM, vCPUs' threads included (between two calls of [`BoundVcpu::run`](crate::BoundVcpu::run),
/// of course); commits take turns.
///
/// A slot's number cannot change its size or its memory, so every step but a change of flags makes
/// new numbers: the lowest that are free before and after, in the order of the steps.
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

    /// A new slot: `bytes` bytes of `region` from `offset` on (both multiples of 4 KiB), which the
    /// guest sees at `gpa`. KVM can use huge pages only where gpa and offset allow it.
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

    /// Empties a slot.
    pub fn delete(&mut self, slot: impl Into<SlotRef>) {
        self.steps.push(Step::Delete(slot.into()));
    }

    /// Gives a slot another size, in bytes; its start stays. It may grow as far as its region goes.
    pub fn resize(&mut self, slot: impl Into<SlotRef>, bytes: u64) -> SlotRef {
        self.steps.push(Step::Resize(slot.into(), bytes));
        self.make()
    }

    /// Makes two slots of one: the first `at` bytes and the rest.
    pub fn split(&mut self, slot: impl Into<SlotRef>, at: u64) -> [SlotRef; 2] {
        self.steps.push(Step::Split(slot.into(), at));
        [self.make(), self.make()]
    }

    /// Makes one slot of two that follow each other, in the guest and in one region, and have the
    /// same flags; in either order.
    pub fn merge(&mut self, one: impl Into<SlotRef>, other: impl Into<SlotRef>) -> SlotRef {
        self.steps.push(Step::Merge(one.into(), other.into()));
        self.make()
    }

    /// Gives a slot other flags. It keeps its number, unless `readonly` changes.
    pub fn set_flags(&mut self, slot: impl Into<SlotRef>, flags: SlotFlags) -> SlotRef {
        self.steps.push(Step::SetFlags(slot.into(), flags));
        self.make()
    }

    /// Checks the steps against the VM's present layout and changes nothing. Another thread's
    /// change may make a difference until the commit.
    ///
    /// # Errors
    /// See [`PlanError`].
    pub fn check(&self) -> Result<(), PlanError> {
        let slots = self.vm.slots().clone();
        Plan::new(&slots, self.vm.capabilities(), self.number, &self.steps).map(|_| ())
    }

    /// Changes the layout by the best method that this kernel has: [`Method::List`]; without it
    /// one ioctl where the change takes only one, and [`Method::Quiesce`] otherwise.
    ///
    /// # Errors
    /// [`CommitError`]; the old layout is in place, unless it is [`CommitError::HalfDone`], and
    /// vCPUs run on.
    pub fn commit(self) -> Result<Committed, CommitError> {
        commit::commit(self.vm, self.number, &self.steps, None, self.vm)
    }

    /// Changes the layout by this method, for tests and comparisons.
    ///
    /// # Errors
    /// As [`SlotTransaction::commit`]; also if the kernel lacks what the method needs.
    pub fn commit_with(self, method: Method) -> Result<Committed, CommitError> {
        commit::commit(self.vm, self.number, &self.steps, Some(method), self.vm)
    }

    /// With other ioctls than the kernel's.
    #[cfg(test)]
    pub(crate) fn commit_through(
        self,
        method: Method,
        calls: &dyn crate::slot_calls::SlotCalls,
    ) -> Result<Committed, CommitError> {
        commit::commit(self.vm, self.number, &self.steps, Some(method), calls)
    }

    /// What the transaction would do to another layout and with other capabilities.
    #[cfg(test)]
    pub(crate) fn plan(
        &self,
        slots: &crate::slot::SlotLayout,
        capabilities: &crate::vm::Capabilities,
    ) -> Result<Plan, PlanError> {
        Plan::new(slots, capabilities, self.number, &self.steps)
    }
}
