//! VMs: what the kernel can do for them, and their slots and vCPUs.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use kvm_bindings::KVM_CAP_NR_MEMSLOTS;
use kvm_ioctls::VmFd;
use pagetide_memory::Region;
use pagetide_uapi::generated as abi;

use crate::gate::Gate;
use crate::kick::{KickTarget, Kickable};
use crate::os_error;
use crate::run_page::RunPage;
use crate::signals::{Signals, SignalsError};
use crate::slot::{Slot, SlotError, SlotFlags, SlotLayout};
use crate::slot_calls::{Change, SlotCalls};
use crate::system::Kvm;
use crate::transaction::SlotTransaction;
use crate::vcpu::Vcpu;

/// Why a VM could not be made.
#[derive(Debug, thiserror::Error)]
pub enum CreateVmError {
    /// KVM_CREATE_VM failed.
    #[error("cannot create a VM")]
    Create(#[source] io::Error),
    /// The signals that it was to have cannot be had.
    #[error(transparent)]
    Signals(#[from] SignalsError),
    /// The size of `kvm_run` is unknown.
    #[error("KVM_GET_VCPU_MMAP_SIZE failed")]
    RunSize(#[source] io::Error),
}

/// Why a vCPU could not be made.
#[derive(Debug, thiserror::Error)]
pub enum CreateVcpuError {
    /// KVM_CREATE_VCPU failed.
    #[error("cannot create vCPU {vcpu}")]
    Create {
        /// The vCPU's number.
        vcpu: u32,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// Its `kvm_run` could not be mapped.
    #[error("cannot map kvm_run of vCPU {vcpu}")]
    Map {
        /// The vCPU's number.
        vcpu: u32,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
}

/// What this kernel has for a VM, as KVM_CHECK_EXTENSION on the VM says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// KVM_CAP_MEMORY_FAULT_INFO: failed accesses say where.
    pub memory_fault_info: bool,
    /// KVM_CAP_ABSENT_MAPPING_FAULT: slots may ask for exits instead of blocking.
    pub absent_mapping_fault: bool,
    /// KVM_CAP_PRE_FAULT_MEMORY: a vCPU may fill its stage-2 tables ahead.
    pub pre_fault_memory: bool,
    /// KVM_CAP_USER_MEMORY2: slots are set by KVM_SET_USER_MEMORY_REGION2.
    pub user_memory2: bool,
    /// KVM_CAP_SET_USER_MEMORY_REGION_LIST: many slots change at once, and nobody sees a step in
    /// between.
    pub slot_list: bool,
    /// KVM_CAP_POPULATE_MEMORY: any thread may fill the stage-2 tables that all vCPUs share.
    pub populate_memory: bool,
    /// KVM_CAP_KICK_VCPUS: one call makes all vCPUs leave the guest.
    pub kick_vcpus: bool,
    /// KVM_CAP_NR_MEMSLOTS: how many slots a VM may have.
    pub slots: u32,
}

impl Capabilities {
    /// What the kernel has for this VM; one call of the kernel for each field.
    #[must_use]
    pub fn of(vm: &VmFd) -> Self {
        let value = |number: u32| vm.check_extension_raw(number.into());
        let has = |number| value(number) > 0;
        Self {
            memory_fault_info: has(abi::KVM_CAP_MEMORY_FAULT_INFO),
            absent_mapping_fault: has(abi::KVM_CAP_ABSENT_MAPPING_FAULT),
            pre_fault_memory: has(abi::KVM_CAP_PRE_FAULT_MEMORY),
            user_memory2: has(abi::KVM_CAP_USER_MEMORY2),
            slot_list: has(abi::KVM_CAP_SET_USER_MEMORY_REGION_LIST),
            populate_memory: has(abi::KVM_CAP_POPULATE_MEMORY),
            kick_vcpus: has(abi::KVM_CAP_KICK_VCPUS),
            // The kernel's documentation: 32 where the capability is missing.
            slots: u32::try_from(value(KVM_CAP_NR_MEMSLOTS))
                .ok()
                .filter(|n| *n > 0)
                .unwrap_or(32),
        }
    }

    /// The flag of a slot whose absent pages are to leave KVM_RUN (KVM_MEM_ABSENT_MAPPING_FAULT), for
    /// KVM_SET_USER_MEMORY_REGION2; None where the kernel lacks it.
    #[must_use]
    pub fn absent_mapping_flag(&self) -> Option<u32> {
        (self.absent_mapping_fault && self.user_memory2)
            .then_some(abi::KVM_MEM_ABSENT_MAPPING_FAULT)
    }
}

/// What a VM and its vCPUs share. The descriptor comes first, so that the memory outlives it.
///
/// Locks, in the order in which they are taken: `updates`, then `slots` or the gate's own, then a
/// vCPU's thread's. A thread that waits for `updates`, whose holder may be waiting for vCPUs, is in
/// no ioctl; the others are held for moments only.
#[derive(Debug)]
pub(crate) struct Inner {
    fd: VmFd,
    capabilities: Capabilities,
    signals: Signals,
    run_bytes: usize,
    /// Held by whoever changes slots, from the check to the end.
    updates: Mutex<()>,
    /// What the kernel has. Changed only by the holder of `updates`.
    slots: Mutex<SlotLayout>,
    gate: Gate<dyn Kickable>,
    /// Of a VM that the program made, which may outlive this: slots that the program set itself.
    foreign: Option<Mutex<SlotLayout>>,
}

impl Inner {
    fn new(fd: VmFd, run_bytes: usize, signals: Signals) -> Self {
        Self {
            capabilities: Capabilities::of(&fd),
            fd,
            signals,
            run_bytes,
            updates: Mutex::default(),
            slots: Mutex::default(),
            gate: Gate::default(),
            foreign: None,
        }
    }

    pub(crate) fn adopted(fd: VmFd, run_bytes: usize, signals: Signals) -> Self {
        let mut inner = Self::new(fd, run_bytes, signals);
        inner.foreign = Some(Mutex::default());
        inner
    }

    /// Takes note of a slot that the program has set itself.
    pub(crate) fn note_foreign(&self, slot: u32, state: Slot) {
        if let Some(foreign) = &self.foreign {
            let mut foreign = foreign.lock().unwrap_or_else(PoisonError::into_inner);
            foreign.insert(slot, state);
        }
    }

    /// The slots that the program has set itself; None if this VM is nobody else's.
    pub(crate) fn take_foreign(&mut self) -> Option<SlotLayout> {
        let foreign = self.foreign.take()?;
        Some(foreign.into_inner().unwrap_or_else(PoisonError::into_inner))
    }

    /// The size of a vCPU's `kvm_run`.
    pub(crate) fn run_bytes(&self) -> usize {
        self.run_bytes
    }

    pub(crate) fn fd(&self) -> &VmFd {
        &self.fd
    }

    pub(crate) fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    pub(crate) fn signals(&self) -> Signals {
        self.signals
    }

    pub(crate) fn gate(&self) -> &Gate<dyn Kickable> {
        &self.gate
    }

    /// The right to change slots. Waits for other threads' changes, which may wait for vCPUs to
    /// leave KVM_RUN.
    pub(crate) fn updates(&self) -> MutexGuard<'_, ()> {
        self.updates.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the kernel has; not to be held while anything is waited for.
    pub(crate) fn slots(&self) -> MutexGuard<'_, SlotLayout> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the kernel has what a slot needs.
    pub(crate) fn check(&self, slot: u32, to: &Slot) -> Result<(), SlotError> {
        let Slot { range, flags, .. } = *to;
        let slots = self.capabilities.slots;
        if slot >= slots {
            return Err(SlotError::NoSuchSlot { slot, slots });
        }
        if flags.absent_mapping_fault && self.capabilities.absent_mapping_flag().is_none() {
            return Err(SlotError::MissingCapability {
                slot,
                range,
                capability: "KVM_CAP_ABSENT_MAPPING_FAULT",
                number: abi::KVM_CAP_ABSENT_MAPPING_FAULT,
            });
        }
        Ok(())
    }

    /// Sets a slot, once it is checked that the kernel can.
    fn set(&self, slot: u32, to: &Slot, change: Change) -> Result<(), SlotError> {
        self.check(slot, to)?;
        let Slot { range, flags, .. } = *to;
        self.set_one(slot, to, change).map_err(|source| {
            let errno = source.raw_os_error();
            match errno {
                Some(libc::EEXIST) => SlotError::Overlap {
                    slot,
                    range,
                    source,
                },
                Some(libc::EINVAL) => SlotError::Invalid {
                    slot,
                    range,
                    flags,
                    source,
                },
                _ => SlotError::Failed {
                    slot,
                    range,
                    flags,
                    source,
                },
            }
        })
    }
}

/// A virtual machine. Its slots keep their regions mapped until the last of the VM and its vCPUs
/// is gone.
#[derive(Debug)]
pub struct Vm {
    inner: Arc<Inner>,
}

impl Vm {
    /// A new VM without memory or vCPUs, whose vCPUs may count on these signals.
    ///
    /// # Errors
    /// See [`CreateVmError`].
    pub fn new(kvm: &Kvm, signals: Signals) -> Result<Self, CreateVmError> {
        let create = || loop {
            match kvm.fd().create_vm() {
                // KVM_CREATE_VM gives up on a pending signal; there is nothing to undo.
                Err(errno) if errno.errno() == libc::EINTR => {}
                result => return result.map_err(os_error),
            }
        };
        let fd = create().map_err(CreateVmError::Create)?;
        let run_bytes = kvm
            .fd()
            .get_vcpu_mmap_size()
            .map_err(os_error)
            .map_err(CreateVmError::RunSize)?;
        Ok(Self::over(Inner::new(fd, run_bytes, signals)))
    }

    pub(crate) fn over(inner: Inner) -> Self {
        let inner = Arc::new(inner);
        Self { inner }
    }

    /// For a vCPU.
    pub(crate) fn share(&self) -> Arc<Inner> {
        Arc::clone(&self.inner)
    }

    /// What this kernel has.
    #[must_use]
    pub fn capabilities(&self) -> &Capabilities {
        &self.inner.capabilities
    }

    /// The signals that it was made with.
    #[must_use]
    pub fn signals(&self) -> Signals {
        self.inner.signals
    }

    /// The `kvm-ioctls` handle, for everything that this crate does not wrap. Slots are to be set
    /// through [`Vm`] only, which knows what memory must stay.
    #[must_use]
    pub fn fd(&self) -> &VmFd {
        &self.inner.fd
    }

    /// A vCPU with this number (the APIC ID on x86). The architecture's set-up is the caller's.
    ///
    /// # Errors
    /// See [`CreateVcpuError`].
    pub fn create_vcpu(&self, id: u32) -> Result<Vcpu, CreateVcpuError> {
        let fd = self
            .inner
            .fd
            .create_vcpu(id.into())
            .map_err(|errno| CreateVcpuError::Create {
                vcpu: id,
                source: os_error(errno),
            })?;
        let page = RunPage::map(&fd, self.inner.run_bytes)
            .map_err(|source| CreateVcpuError::Map { vcpu: id, source })?;
        Ok(Vcpu::new(
            id,
            fd,
            KickTarget::new(page),
            Arc::clone(&self.inner),
        ))
    }

    /// Makes `region` the memory of an empty slot, at the region's own guest-physical address.
    ///
    /// # Errors
    /// See [`SlotError`]; the slot stays empty.
    pub fn add_region(
        &self,
        slot: u32,
        region: Arc<Region>,
        flags: SlotFlags,
    ) -> Result<(), SlotError> {
        let _updates = self.inner.updates();
        if let Some(used) = self.inner.slots().get(&slot) {
            let range = used.range;
            return Err(SlotError::InUse { slot, range });
        }
        let new = Slot::whole(region, flags);
        self.inner.set(slot, &new, Change::Create)?;
        self.inner.slots().insert(slot, new);
        Ok(())
    }

    /// Changes the flags of a slot; vCPUs may be running.
    ///
    /// # Errors
    /// See [`SlotError`]; the flags stay as they were.
    pub fn set_slot_flags(&self, slot: u32, flags: SlotFlags) -> Result<(), SlotError> {
        let _updates = self.inner.updates();
        let mut new = self.slot(slot).ok_or(SlotError::Empty { slot })?;
        new.flags = flags;
        self.inner.set(slot, &new, Change::Flags)?;
        self.inner.slots().insert(slot, new);
        Ok(())
    }

    /// The flags of a slot; None if it is empty.
    #[must_use]
    pub fn slot_flags(&self, slot: u32) -> Option<SlotFlags> {
        self.inner.slots().get(&slot).map(|entry| entry.flags)
    }

    /// What a slot holds; None if it is empty.
    #[must_use]
    pub fn slot(&self, slot: u32) -> Option<Slot> {
        self.inner.slots().get(&slot).cloned()
    }

    /// All slots. In the middle of a slot transaction this is still the old layout.
    #[must_use]
    pub fn layout(&self) -> SlotLayout {
        self.inner.slots().clone()
    }

    /// Empties a slot and returns its memory. Guest accesses there are MMIO from now on.
    ///
    /// # Errors
    /// See [`SlotError`]; the slot stays as it was.
    pub fn remove_slot(&self, slot: u32) -> Result<Arc<Region>, SlotError> {
        let _updates = self.inner.updates();
        let mut old = self.slot(slot).ok_or(SlotError::Empty { slot })?;
        old.flags = SlotFlags::default();
        self.inner.set(slot, &old, Change::Delete)?;
        self.inner.slots().remove(&slot);
        Ok(old.region)
    }

    pub(crate) fn inner(&self) -> &Inner {
        &self.inner
    }

    /// For whoever must not keep the VM alive.
    pub(crate) fn downgrade(&self) -> Weak<Inner> {
        Arc::downgrade(&self.inner)
    }

    /// Begins a change of several slots, which vCPUs see as one.
    pub fn transaction(&self) -> SlotTransaction<'_> {
        SlotTransaction::new(&self.inner)
    }
}
