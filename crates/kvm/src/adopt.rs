//! VMs and vCPUs that the program created itself, with `kvm-ioctls` or without.
//!
//! | object | owner | lifetime |
//! |---|---|---|
//! | the kernel's VM and vCPUs | shared by the program and the [`Vm`] and [`Vcpu`]s created here | until the last descriptor is closed |
//! | the given descriptors | the program; this crate duplicates them | until the program closes them |
//! | slots that the program has set, and their memory | the program, also after [`Vm::adopt_slot`] | decided by the program |
//! | slots set through the [`Vm`] | the [`Vm`]; the memory stays mapped as long as the slot exists | until [`Vm::remove_slot`] or a transaction; those of a VM that [`Kvm::create_vm`] made, at the latest until the [`Vm`] and its vCPUs are dropped |
//!
//! The program's VM may outlive the [`Vm`]. If slots that were set through the [`Vm`] still exist when
//! it is dropped, their memory stays mapped for the life of the process.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::sync::Arc;

use kvm_bindings::{KVM_CAP_USER_MEMORY, KVMIO, kvm_mp_state};
use kvm_ioctls::{VcpuFd, VmFd};
use vmm_sys_util::ioctl::{ioctl, ioctl_with_mut_ref, ioctl_with_val};
use vmm_sys_util::{ioctl_io_nr, ioctl_ior_nr};

use crate::kick::KickTarget;
use crate::os_error;
use crate::run_page::RunPage;
use crate::signals::Signals;
use crate::slot::{Slot, SlotError, SlotLayout};
use crate::slot_calls::{Change, SlotCalls, SlotChange};
use crate::system::Kvm;
use crate::vcpu::Vcpu;
use crate::vm::{Inner, Vm};

// kvm-ioctls has these numbers, but does not export them.
ioctl_io_nr!(KVM_GET_API_VERSION, KVMIO, 0x00);
ioctl_io_nr!(KVM_CHECK_EXTENSION, KVMIO, 0x03);
ioctl_ior_nr!(KVM_GET_MP_STATE, KVMIO, 0x98, kvm_mp_state);

/// Why a VM, a vCPU or `/dev/kvm` of the program could not be adopted.
#[derive(Debug, thiserror::Error)]
pub enum AdoptError {
    /// The descriptor is not a VM.
    #[error("descriptor {fd} is not a KVM VM")]
    NotAVm {
        /// The descriptor.
        fd: i32,
    },
    /// The descriptor is not a vCPU.
    #[error("descriptor {fd} is not a vCPU")]
    NotAVcpu {
        /// The descriptor.
        fd: i32,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The descriptor cannot be duplicated.
    #[error("cannot duplicate descriptor {fd}")]
    Duplicate {
        /// The descriptor.
        fd: i32,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The size of `kvm_run` is unknown.
    #[error("KVM_GET_VCPU_MMAP_SIZE failed")]
    RunSize(#[source] io::Error),
    /// The vCPU's `kvm_run` cannot be mapped.
    #[error("cannot map kvm_run of vCPU {vcpu}")]
    Map {
        /// The vCPU's number.
        vcpu: u32,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

impl Vm {
    /// Adopts a VM that the program created. The VM does not change. The [`Vm`] starts without slots:
    /// see [`Vm::adopt_slot`].
    ///
    /// # Errors
    /// See [`AdoptError`].
    pub fn adopt(kvm: &Kvm, vm: &VmFd, signals: Signals) -> Result<Self, AdoptError> {
        // SAFETY: the descriptor stays open during this call, because `vm` is borrowed.
        let fd = unsafe { BorrowedFd::borrow_raw(vm.as_raw_fd()) };
        Self::adopt_fd(kvm, fd, signals)
    }

    /// As [`Vm::adopt`], from the VM's descriptor.
    ///
    /// # Errors
    /// See [`AdoptError`].
    pub fn adopt_fd(kvm: &Kvm, vm: BorrowedFd<'_>, signals: Signals) -> Result<Self, AdoptError> {
        let raw = vm.as_raw_fd();
        if !is_vm(vm) {
            return Err(AdoptError::NotAVm { fd: raw });
        }
        let run_bytes = kvm.fd().get_vcpu_mmap_size();
        let run_bytes = run_bytes.map_err(|errno| AdoptError::RunSize(os_error(errno)))?;
        let own = duplicate(vm)?;
        // SAFETY: a VM's descriptor without another owner.
        let fd = unsafe { kvm.fd().create_vmfd_from_rawfd(own.as_raw_fd()) };
        let fd = fd.map_err(|errno| AdoptError::RunSize(os_error(errno)))?;
        // `fd` now owns the descriptor.
        let _ = own.into_raw_fd();
        Ok(Self::over(Inner::adopted(fd, run_bytes, signals)))
    }

    /// Adopts a vCPU of this VM that the program created with the number `id`. The program remains
    /// responsible for the vCPU's set-up, by either handle.
    ///
    /// From now on only the [`Vcpu`] may run the guest and access `kvm_run`, so that kicks and slot
    /// transactions reach the vCPU. Do not use the program's handle for either.
    ///
    /// # Errors
    /// See [`AdoptError`].
    pub fn adopt_vcpu(&self, id: u32, vcpu: &VcpuFd) -> Result<Vcpu, AdoptError> {
        // SAFETY: the descriptor stays open during this call, because `vcpu` is borrowed.
        let fd = unsafe { BorrowedFd::borrow_raw(vcpu.as_raw_fd()) };
        self.adopt_vcpu_fd(id, fd)
    }

    /// As [`Vm::adopt_vcpu`], from the vCPU's descriptor. Waits while the vCPU is in KVM_RUN.
    ///
    /// # Errors
    /// See [`AdoptError`].
    pub fn adopt_vcpu_fd(&self, id: u32, vcpu: BorrowedFd<'_>) -> Result<Vcpu, AdoptError> {
        let fd = vcpu.as_raw_fd();
        is_vcpu(vcpu).map_err(|source| AdoptError::NotAVcpu { fd, source })?;
        let own = duplicate(vcpu)?.into_raw_fd();
        let map = |source| AdoptError::Map { vcpu: id, source };
        // SAFETY: a vCPU's descriptor without another owner; it is closed if this fails.
        let fd = unsafe { self.fd().create_vcpu_from_rawfd(own) };
        let fd = fd.map_err(|errno| map(os_error(errno)))?;
        let page = RunPage::map(&fd, self.inner().run_bytes()).map_err(map)?;
        Ok(Vcpu::new(id, fd, KickTarget::new(id, page), self.share()))
    }

    /// Records a slot that the program set itself, so that transactions can change it and lookups of
    /// gpas find it. The kernel's slot does not change. If the VM has no such slot, the kernel refuses
    /// later changes of it. A slot with exits is refused unless a pager has its region, as by [`Vm::set_slot_flags`].
    ///
    /// # Errors
    /// See [`SlotError`].
    pub fn adopt_slot(&self, slot: u32, state: Slot) -> Result<(), SlotError> {
        let inner = self.inner();
        let _updates = inner.updates();
        inner.check(slot, &state)?;
        let end = state.offset.checked_add(state.range.bytes());
        let range = state.range;
        if end.is_none_or(|end| end > state.region.bytes()) {
            return Err(SlotError::OutsideRegion { slot, range });
        }
        let mut slots = inner.slots();
        if let Some(used) = slots.get(&slot) {
            let range = used.range;
            return Err(SlotError::InUse { slot, range });
        }
        if slots.values().any(|known| known.range.overlaps(range)) {
            let source = io::Error::from_raw_os_error(libc::EEXIST);
            return Err(SlotError::Overlap {
                slot,
                range,
                source,
            });
        }
        inner.note_foreign(slot, state.clone());
        slots.insert(slot, state);
        Ok(())
    }
}

impl Kvm {
    /// Adopts a `/dev/kvm` that the program opened; the descriptor is duplicated.
    ///
    /// # Errors
    /// The descriptor cannot be duplicated.
    pub fn adopt(kvm: &kvm_ioctls::Kvm) -> Result<Self, AdoptError> {
        use std::os::fd::FromRawFd;

        // SAFETY: the descriptor stays open during this call, because `kvm` is borrowed.
        let fd = unsafe { BorrowedFd::borrow_raw(kvm.as_raw_fd()) };
        let own = duplicate(fd)?.into_raw_fd();
        // SAFETY: a descriptor of /dev/kvm without another owner.
        Ok(Self::over(unsafe { kvm_ioctls::Kvm::from_raw_fd(own) }))
    }
}

fn duplicate(fd: BorrowedFd<'_>) -> Result<OwnedFd, AdoptError> {
    // Descriptors below 3 are standard input, output and error.
    rustix::io::fcntl_dupfd_cloexec(fd, 3).map_err(|errno| AdoptError::Duplicate {
        fd: fd.as_raw_fd(),
        source: errno.into(),
    })
}

/// Whether `fd` is a VM: VMs and /dev/kvm implement KVM_CHECK_EXTENSION, and only /dev/kvm has an API
/// version.
fn is_vm(fd: BorrowedFd<'_>) -> bool {
    // SAFETY: the argument is a number; descriptors of other kinds do not implement the ioctl.
    let knows = unsafe { ioctl_with_val(&fd, KVM_CHECK_EXTENSION(), KVM_CAP_USER_MEMORY.into()) };
    // SAFETY: the ioctl has no argument; otherwise as above.
    let version = unsafe { ioctl(&fd, KVM_GET_API_VERSION()) };
    knows > 0 && version < 0
}

fn is_vcpu(fd: BorrowedFd<'_>) -> io::Result<()> {
    let mut state = kvm_mp_state::default();
    // SAFETY: the kernel writes to the structure only; descriptors of other kinds do not implement the
    // ioctl.
    match unsafe { ioctl_with_mut_ref(&fd, KVM_GET_MP_STATE(), &mut state) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let slots = std::mem::take(&mut *self.slots());
        match self.take_foreign() {
            None => self.empty(slots),
            Some(foreign) => {
                for (number, slot) in slots {
                    let is_programs = foreign
                        .get(&number)
                        .is_some_and(|noted| noted.is_same_memory(&slot));
                    if !is_programs {
                        // The program's VM may still have the slot.
                        std::mem::forget(Arc::clone(&slot.region));
                    }
                }
            }
        }
    }
}

impl Inner {
    /// Deletes the slots of the crate's own VM before their memory is unmapped. The VM ends with its last
    /// descriptor, and that may be one of a vCPU or a device which the program has made through [`Vm::fd`]: a
    /// guest must not find other memory of this process at the addresses then.
    fn empty(&self, slots: SlotLayout) {
        let changes = slots.into_iter().map(|(slot, state)| SlotChange {
            slot,
            change: Change::Delete,
            state,
        });
        let changes: Vec<_> = changes.collect();
        if self.capabilities().slot_list && self.set_list(&changes).is_ok() {
            return;
        }
        for SlotChange { slot, state, .. } in changes {
            if self.set_one(slot, &state, Change::Delete).is_err() {
                // The guest may still reach the memory, so it stays mapped.
                std::mem::forget(Arc::clone(&state.region));
            }
        }
    }
}
