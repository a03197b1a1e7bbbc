//! The `kvm_run` structure that a vCPU shares with the kernel.
//!
//! This mapping is separate from the one in `VcpuFd`, because a kick writes `immediate_exit` from
//! another thread: all accesses here go through raw pointers and atomics, never through a reference to
//! the structure.

use std::ffi::c_void;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU8, Ordering};

use kvm_bindings::{KVM_EXIT_IO_IN, KVM_EXIT_IO_OUT, KVM_EXIT_UNKNOWN, kvm_run};
use pagetide_uapi::generated as abi;
use rustix::mm::{MapFlags, ProtFlags};

use crate::exit::Exit;
use crate::fault::FaultExit;

/// Reads a field of the kernel's structure.
macro_rules! read {
    ($page:expr, $($field:ident).+) => {{
        let run = $page.run.as_ptr();
        // SAFETY: `run` points to a live mapping of at least a kvm_run; this takes only an address.
        let field = unsafe { &raw const (*run).$($field).+ };
        // SAFETY: inside the mapping and aligned; every field and union member is plain data, for which
        // any bit pattern is valid. The kernel does not write outside KVM_RUN, and this is the vCPU's
        // thread.
        unsafe { field.read_volatile() }
    }};
}

/// The elements of an IN or OUT within the mapping.
struct PortAccess {
    element_bytes: usize,
    elements: usize,
    offset: usize,
}

/// A vCPU's `kvm_run`.
#[derive(Debug)]
pub(crate) struct RunPage {
    run: NonNull<kvm_run>,
    bytes: usize,
}

// SAFETY: the mapping belongs to this value until drop, and all accesses are either atomic
// (immediate_exit) or made by the one thread that holds the vCPU (`&mut Vcpu`).
unsafe impl Send for RunPage {}
// SAFETY: as for Send; other threads access the structure through a shared reference only by the atomic
// `immediate_exit`.
unsafe impl Sync for RunPage {}

impl RunPage {
    /// Maps `bytes` (KVM_GET_VCPU_MMAP_SIZE) of a vCPU's file.
    pub(crate) fn map(vcpu: &impl AsRawFd, bytes: usize) -> io::Result<Self> {
        // SAFETY: the descriptor stays open during this call, because `vcpu` is borrowed.
        let fd = unsafe { BorrowedFd::borrow_raw(vcpu.as_raw_fd()) };
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses overlaps nothing.
        let start = unsafe {
            rustix::mm::mmap(ptr::null_mut(), bytes, protection, MapFlags::SHARED, fd, 0)?
        };
        let run = NonNull::new(start.cast::<kvm_run>())
            .ok_or_else(|| io::Error::other("the kernel mapped kvm_run at address 0"))?;
        Ok(Self { run, bytes })
    }

    /// Makes the current or next KVM_RUN return EINTR (true), or lets it run (false).
    pub(crate) fn set_immediate_exit(&self, exit: bool) {
        self.immediate_exit()
            .store(u8::from(exit), Ordering::SeqCst);
    }

    fn immediate_exit(&self) -> &AtomicU8 {
        // SAFETY: `run` points to a live mapping of at least a kvm_run.
        let field = unsafe { &raw mut (*self.run.as_ptr()).immediate_exit };
        // SAFETY: the field is valid as long as self; this process accesses it only atomically
        // (VcpuFd's own mapping is never used for it). The kernel reads a byte.
        unsafe { AtomicU8::from_ptr(field) }
    }

    /// Clears the last exit reason if it was an annotated fault, so that a kernel that does not set the
    /// field on a failure cannot make an old annotation look new.
    ///
    /// Any other exit reason stays: by KVM_EXIT_MMIO, an arm64 kernel without the series finds the
    /// access that it must complete.
    pub(crate) fn forget_fault(&self) {
        if self.exit_reason() != abi::KVM_EXIT_MEMORY_FAULT {
            return;
        }
        let run = self.run.as_ptr();
        // SAFETY: `run` points to a live mapping of a kvm_run; this takes only an address.
        let reason = unsafe { &raw mut (*run).exit_reason };
        // SAFETY: inside the mapping; the vCPU is not in KVM_RUN, because this is its thread.
        unsafe { reason.write_volatile(KVM_EXIT_UNKNOWN) };
    }

    fn exit_reason(&self) -> u32 {
        read!(self, exit_reason)
    }

    /// The annotation of a KVM_RUN that failed with EFAULT or EHWPOISON, if any.
    pub(crate) fn memory_fault(&self, poisoned: bool) -> Option<FaultExit> {
        if self.exit_reason() != abi::KVM_EXIT_MEMORY_FAULT {
            return None;
        }
        let fault = read!(self, __bindgen_anon_1.memory_fault);
        Some(FaultExit::decode(
            fault.flags,
            fault.gpa,
            fault.size,
            poisoned,
        ))
    }

    /// The exit of a KVM_RUN that returned 0.
    pub(crate) fn exit(&self) -> Exit {
        // The exit reason selects the member of the union that the kernel filled.
        match self.exit_reason() {
            kvm_bindings::KVM_EXIT_IO => {
                let io = read!(self, __bindgen_anon_1.io);
                if u32::from(io.direction) != KVM_EXIT_IO_OUT {
                    return Exit::IoIn {
                        port: io.port,
                        size_bytes: io.size,
                    };
                }
                Exit::IoOut {
                    port: io.port,
                    data: self.io_data(io.data_offset, io.size),
                }
            }
            kvm_bindings::KVM_EXIT_MMIO => {
                let mmio = read!(self, __bindgen_anon_1.mmio);
                Exit::Mmio {
                    gpa: pagetide_memory::GuestAddress(mmio.phys_addr),
                    size_bytes: mmio.len,
                    write: mmio.is_write != 0,
                }
            }
            kvm_bindings::KVM_EXIT_HLT => Exit::Halt,
            kvm_bindings::KVM_EXIT_SHUTDOWN => Exit::Shutdown,
            kvm_bindings::KVM_EXIT_INTR => Exit::Interrupted,
            kvm_bindings::KVM_EXIT_FAIL_ENTRY => {
                let entry = read!(self, __bindgen_anon_1.fail_entry);
                Exit::FailedEntry {
                    hardware_reason: entry.hardware_entry_failure_reason,
                }
            }
            kvm_bindings::KVM_EXIT_INTERNAL_ERROR => {
                let internal = read!(self, __bindgen_anon_1.internal);
                Exit::InternalError {
                    suberror: internal.suberror,
                }
            }
            reason => Exit::Other { reason },
        }
    }

    /// Port, bytes per element, number of elements and data offset of the last exit's IN or OUT; None
    /// for any other exit, and for data outside the mapping, which no kernel produces.
    fn port_access(&self, direction: u32) -> Option<PortAccess> {
        if self.exit_reason() != kvm_bindings::KVM_EXIT_IO {
            return None;
        }
        let io = read!(self, __bindgen_anon_1.io);
        let element_bytes = usize::from(io.size);
        let elements = usize::try_from(io.count).ok()?;
        let offset = usize::try_from(io.data_offset).ok()?;
        let end = offset.checked_add(element_bytes.checked_mul(elements)?)?;
        let good = u32::from(io.direction) == direction && end <= self.bytes;
        (good && matches!(element_bytes, 1 | 2 | 4)).then_some(PortAccess {
            element_bytes,
            elements,
            offset,
        })
    }

    /// The elements of the OUT for which KVM_RUN returned, each zero-extended.
    pub(crate) fn out_elements(&self) -> Vec<u32> {
        let Some(access) = self.port_access(KVM_EXIT_IO_OUT) else {
            return Vec::new();
        };
        let element = |index: usize| {
            let mut bytes = [0; 4];
            let start = access.offset + index * access.element_bytes;
            for (byte, at) in bytes.iter_mut().take(access.element_bytes).zip(start..) {
                let source = self.run.as_ptr().cast::<u8>().wrapping_add(at);
                // SAFETY: port_access found all elements inside the live mapping; any bit pattern is a
                // u8, and the vCPU is not in KVM_RUN, because this is its thread.
                *byte = unsafe { source.read_volatile() };
            }
            u32::from_le_bytes(bytes)
        };
        (0..access.elements).map(element).collect()
    }

    /// Supplies the values of the IN for which KVM_RUN returned; `answer` is called once per element.
    pub(crate) fn answer_in(&self, mut answer: impl FnMut() -> u32) {
        let Some(access) = self.port_access(KVM_EXIT_IO_IN) else {
            return;
        };
        for index in 0..access.elements {
            let start = access.offset + index * access.element_bytes;
            let bytes = answer().to_le_bytes();
            for (byte, at) in bytes.iter().take(access.element_bytes).zip(start..) {
                let target = self.run.as_ptr().cast::<u8>().wrapping_add(at);
                // SAFETY: as in out_elements; there is no reference into the mapping.
                unsafe { target.write_volatile(*byte) };
            }
        }
    }

    /// Supplies the value of the read outside all memory slots for which KVM_RUN returned, little
    /// endian.
    pub(crate) fn answer_mmio(&self, answer: u64) {
        if self.exit_reason() != kvm_bindings::KVM_EXIT_MMIO {
            return;
        }
        let run = self.run.as_ptr();
        // SAFETY: `run` points to a live mapping of a kvm_run; this takes only an address.
        let data = unsafe { &raw mut (*run).__bindgen_anon_1.mmio.data };
        // SAFETY: inside the mapping; the vCPU is not in KVM_RUN, because this is its thread.
        unsafe { data.write_volatile(answer.to_le_bytes()) };
    }

    /// The write outside all memory that KVM_RUN returned for, little endian, zero-extended.
    pub(crate) fn written_mmio(&self) -> Option<u64> {
        if self.exit_reason() != kvm_bindings::KVM_EXIT_MMIO {
            return None;
        }
        let mmio = read!(self, __bindgen_anon_1.mmio);
        let mut data = [0; 8];
        let len = data.len().min(usize::try_from(mmio.len).ok()?);
        data[..len].copy_from_slice(&mmio.data[..len]);
        (mmio.is_write != 0).then_some(u64::from_le_bytes(data))
    }

    /// The first element of an OUT, little endian, zero-extended. Out-of-range offsets, which no kernel
    /// produces, read as 0.
    fn io_data(&self, offset: u64, size: u8) -> u32 {
        let size = usize::from(size.min(4));
        let Ok(offset) = usize::try_from(offset) else {
            return 0;
        };
        if offset.checked_add(size).is_none_or(|end| end > self.bytes) {
            return 0;
        }
        let mut data = [0; 4];
        for (index, byte) in data.iter_mut().take(size).enumerate() {
            // SAFETY: offset + index < bytes, the length of the mapping.
            let source = unsafe { self.run.as_ptr().cast::<u8>().add(offset + index) };
            // SAFETY: inside the live mapping; any bit pattern is a u8.
            *byte = unsafe { source.read_volatile() };
        }
        u32::from_le_bytes(data)
    }
}

impl Drop for RunPage {
    fn drop(&mut self) {
        // After a failure the mapping remains, which is harmless.
        // SAFETY: mapped by map() with this length; no reference into it outlives self.
        let _ = unsafe { rustix::mm::munmap(self.run.as_ptr().cast::<c_void>(), self.bytes) };
    }
}
