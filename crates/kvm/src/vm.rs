//! VMs: capabilities, slots and vCPUs.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use kvm_bindings::KVM_CAP_NR_MEMSLOTS;
use kvm_ioctls::VmFd;
use pagetide_memory::Region;
use pagetide_uapi::generated as abi;

use crate::gate::Gate;
use crate::kick::{KickTarget, Kickable};
use crate::os_error;
use crate::run_page::RunPage;
use crate::signals::{Signals, SignalsError};
use crate::slot::{Slot, SlotError, SlotFlags, SlotLayout, has_exits};
use crate::slot_calls::{Change, SlotCalls};
use crate::system::Kvm;
use crate::transaction::SlotTransaction;
use crate::vcpu::Vcpu;

/// Why a VM could not be created.
#[derive(Debug, thiserror::Error)]
pub enum CreateVmError {
    /// KVM_CREATE_VM failed.
    #[error("cannot create a VM")]
    Create(#[source] io::Error),
    /// The requested signals are unavailable.
    #[error(transparent)]
    Signals(#[from] SignalsError),
    /// The size of `kvm_run` is unknown.
    #[error("KVM_GET_VCPU_MMAP_SIZE failed")]
    RunSize(#[source] io::Error),
}

/// Why a vCPU could not be created.
#[derive(Debug, thiserror::Error)]
pub enum CreateVcpuError {
    /// KVM_CREATE_VCPU failed.
    #[error("cannot create vCPU {vcpu}")]
    Create {
        /// The vCPU's number.
        vcpu: u32,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// Its `kvm_run` could not be mapped.
    #[error("cannot map kvm_run of vCPU {vcpu}")]
    Map {
        /// The vCPU's number.
        vcpu: u32,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

/// The kernel's capabilities for a VM, by KVM_CHECK_EXTENSION on the VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// KVM_CAP_MEMORY_FAULT_INFO: failed accesses report their address.
    pub memory_fault_info: bool,
    /// The same capability's bit KVM_MEMORY_FAULT_INFO_ACCESS: they also report whether it was a read, a
    /// write or a fetch. Without it, the access is [`Access::Unstated`](crate::Access::Unstated).
    pub memory_fault_access: bool,
    /// KVM_CAP_ABSENT_MAPPING_FAULT: slots can enable exits instead of blocking.
    pub absent_mapping_fault: bool,
    /// KVM_CAP_PRE_FAULT_MEMORY: a vCPU can fill its stage-2 tables ahead of the guest.
    pub pre_fault_memory: bool,
    /// KVM_CAP_USER_MEMORY2: slots are set by KVM_SET_USER_MEMORY_REGION2.
    pub user_memory2: bool,
    /// KVM_CAP_SET_USER_MEMORY_REGION_LIST: many slots change at once, without an intermediate layout.
    pub slot_list: bool,
    /// KVM_CAP_POPULATE_MEMORY: any thread can fill the stage-2 tables that all vCPUs share.
    pub populate_memory: bool,
    /// KVM_CAP_KICK_VCPUS: one ioctl makes all vCPUs leave the guest.
    pub kick_vcpus: bool,
    /// KVM_CAP_NR_MEMSLOTS: the maximal number of slots of a VM.
    pub slots: u32,
}

impl Capabilities {
    /// Queries the capabilities for this VM; one ioctl per field.
    #[must_use]
    pub fn of(vm: &VmFd) -> Self {
        let value = |number: u32| vm.check_extension_raw(number.into());
        let has = |number| value(number) > 0;
        // A mask of bits; a kernel without any of them returns 0.
        let fault_info = u32::try_from(value(abi::KVM_CAP_MEMORY_FAULT_INFO)).unwrap_or(0);
        Self {
            memory_fault_info: fault_info & abi::KVM_MEMORY_FAULT_INFO_ANNOTATED != 0,
            memory_fault_access: fault_info & abi::KVM_MEMORY_FAULT_INFO_ACCESS != 0,
            absent_mapping_fault: has(abi::KVM_CAP_ABSENT_MAPPING_FAULT),
            pre_fault_memory: has(abi::KVM_CAP_PRE_FAULT_MEMORY),
            user_memory2: has(abi::KVM_CAP_USER_MEMORY2),
            slot_list: has(abi::KVM_CAP_SET_USER_MEMORY_REGION_LIST),
            populate_memory: has(abi::KVM_CAP_POPULATE_MEMORY),
            kick_vcpus: has(abi::KVM_CAP_KICK_VCPUS),
            // 32 where the capability is missing, by the kernel's documentation.
            slots: u32::try_from(value(KVM_CAP_NR_MEMSLOTS))
                .ok()
                .filter(|n| *n > 0)
                .unwrap_or(32),
        }
    }

    /// The slot flag that makes accesses to absent pages leave KVM_RUN (KVM_MEM_ABSENT_MAPPING_FAULT),
    /// for KVM_SET_USER_MEMORY_REGION2; None where the kernel lacks it.
    #[must_use]
    pub fn absent_mapping_flag(&self) -> Option<u32> {
        (self.absent_mapping_fault && self.user_memory2)
            .then_some(abi::KVM_MEM_ABSENT_MAPPING_FAULT)
    }
}

/// For how long a transaction waits for vCPUs, unless its owner says otherwise: longer than a page takes that comes.
const QUIESCE_LIMIT: Duration = Duration::from_secs(10);

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// The state that a VM and its vCPUs share. The descriptor comes first, so that the memory outlives it.
///
/// Lock order: `updates`, then `slots` or the gate's own, then that of a vCPU's thread. A thread that
/// waits for `updates`, whose holder may wait for vCPUs, is in no ioctl; the other locks are held only
/// briefly.
#[derive(Debug)]
pub(crate) struct Inner {
    fd: VmFd,
    capabilities: Capabilities,
    signals: Signals,
    run_bytes: usize,
    /// Held by a thread that changes slots, from the check to the end.
    updates: Mutex<()>,
    /// The kernel's layout. Changed only by the holder of `updates`.
    slots: Mutex<SlotLayout>,
    gate: Gate<dyn Kickable>,
    /// For how long a transaction waits for a vCPU to leave KVM, in nanoseconds.
    quiesce_limit: AtomicU64,
    /// For a VM that the program created and that may outlive this value: the slots that the program
    /// set itself.
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
            quiesce_limit: AtomicU64::new(nanoseconds(QUIESCE_LIMIT)),
            foreign: None,
        }
    }

    pub(crate) fn quiesce_limit(&self) -> Duration {
        Duration::from_nanos(self.quiesce_limit.load(Ordering::Relaxed))
    }

    pub(crate) fn adopted(fd: VmFd, run_bytes: usize, signals: Signals) -> Self {
        let mut inner = Self::new(fd, run_bytes, signals);
        inner.foreign = Some(Mutex::default());
        inner
    }

    /// Records a slot that the program set itself.
    pub(crate) fn note_foreign(&self, slot: u32, state: Slot) {
        if let Some(foreign) = &self.foreign {
            let mut foreign = foreign.lock().unwrap_or_else(PoisonError::into_inner);
            foreign.insert(slot, state);
        }
    }

    /// The slots that the program set itself; None if this crate created the VM.
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

    /// Locks the slots for a change. Waits for other threads' changes, which may wait for vCPUs to
    /// leave KVM_RUN.
    pub(crate) fn updates(&self) -> MutexGuard<'_, ()> {
        self.updates.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The kernel's layout; do not hold the lock while waiting for anything.
    pub(crate) fn slots(&self) -> MutexGuard<'_, SlotLayout> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Checks that the kernel supports what a slot needs, and that absent pages stay absent until userspace fills them.
    pub(crate) fn check(&self, slot: u32, to: &Slot) -> Result<(), SlotError> {
        let Slot { range, flags, .. } = *to;
        let slots = self.capabilities.slots;
        if slot >= slots {
            return Err(SlotError::NoSuchSlot { slot, slots });
        }
        if !flags.absent_mapping_fault {
            return Ok(());
        }
        if self.capabilities.absent_mapping_flag().is_none() {
            return Err(SlotError::MissingCapability {
                slot,
                range,
                capability: "KVM_CAP_ABSENT_MAPPING_FAULT",
                number: abi::KVM_CAP_ABSENT_MAPPING_FAULT,
            });
        }
        // The region's lock, which may be held for long, is not taken under that of the slots.
        if !to.region.is_registered() && !has_exits(&self.slots(), &to.region) {
            return Err(SlotError::NotRegistered { slot, range });
        }
        Ok(())
    }

    /// Sets a slot, after checking that the kernel supports it.
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

/// A virtual machine. Its slots keep their regions mapped until the VM and all of its vCPUs are
/// dropped.
#[derive(Debug)]
pub struct Vm {
    inner: Arc<Inner>,
}

impl Vm {
    /// Creates a VM without memory or vCPUs, whose vCPUs may use these signals.
    ///
    /// # Errors
    /// See [`CreateVmError`].
    pub fn new(kvm: &Kvm, signals: Signals) -> Result<Self, CreateVmError> {
        let create = || loop {
            match kvm.fd().create_vm() {
                // KVM_CREATE_VM fails on a pending signal; there is nothing to undo.
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

    /// A reference for a vCPU.
    pub(crate) fn share(&self) -> Arc<Inner> {
        Arc::clone(&self.inner)
    }

    /// The kernel's capabilities for this VM.
    #[must_use]
    pub fn capabilities(&self) -> &Capabilities {
        &self.inner.capabilities
    }

    /// The signals of this VM.
    #[must_use]
    pub fn signals(&self) -> Signals {
        self.inner.signals
    }

    /// Sets for how long a transaction by [`Method::Quiesce`](crate::Method::Quiesce) waits for a vCPU that cannot
    /// leave KVM, because it waits for a page; 10 s by default. Then it fails with
    /// [`CommitError::VcpusStay`](crate::CommitError::VcpusStay).
    pub fn set_quiesce_limit(&self, limit: Duration) {
        let limit = nanoseconds(limit);
        self.inner.quiesce_limit.store(limit, Ordering::Relaxed);
    }

    /// The `kvm-ioctls` handle, for everything that this crate does not wrap. Set slots only through
    /// [`Vm`], which keeps their memory mapped. When the last [`Vm`] and [`Vcpu`] of a VM that
    /// [`Kvm::create_vm`] made are dropped, its slots are deleted: a vCPU or a device made here may live longer, and
    /// then has no memory.
    ///
    /// [`Kvm::create_vm`]: crate::Kvm::create_vm
    /// [`Vcpu`]: crate::Vcpu
    #[must_use]
    pub fn fd(&self) -> &VmFd {
        &self.inner.fd
    }

    /// Creates a vCPU with this number (the APIC ID on x86). The caller does the architecture's set-up.
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
            KickTarget::new(id, page),
            Arc::clone(&self.inner),
        ))
    }

    /// Sets an empty slot to `region`, at the region's own guest-physical address.
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
    /// See [`SlotError`]; the flags stay unchanged.
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

    /// The content of a slot; None if it is empty.
    #[must_use]
    pub fn slot(&self, slot: u32) -> Option<Slot> {
        self.inner.slots().get(&slot).cloned()
    }

    /// All slots. During a slot transaction this is still the old layout.
    #[must_use]
    pub fn layout(&self) -> SlotLayout {
        self.inner.slots().clone()
    }

    /// Deletes a slot and returns its memory. Guest accesses there then exit as MMIO.
    ///
    /// # Errors
    /// See [`SlotError`]; the slot stays unchanged.
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

    /// A reference that does not keep the VM alive.
    pub(crate) fn downgrade(&self) -> Weak<Inner> {
        Arc::downgrade(&self.inner)
    }

    /// Begins an atomic change of several slots.
    pub fn transaction(&self) -> SlotTransaction<'_> {
        SlotTransaction::new(&self.inner)
    }
}
