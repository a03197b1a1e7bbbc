//! Memory faults that exit to userspace through KVM_RUN.

use std::fmt;

use kvm_bindings::{KVM_EXIT_UNKNOWN, kvm_run};
pub use pagetide_memory::Access;
use pagetide_memory::GuestAddress;
use pagetide_uapi::generated as abi;

/// Decodes the access in `kvm_run.memory_fault.flags`. If several bits are set, a write takes
/// precedence over a fetch and a fetch over a read, because the page must permit all of them.
const fn access_of(flags: u64) -> Access {
    if flags & abi::KVM_MEMORY_EXIT_FLAG_WRITE as u64 != 0 {
        Access::Write
    } else if flags & abi::KVM_MEMORY_EXIT_FLAG_EXEC as u64 != 0 {
        Access::Exec
    } else if flags & abi::KVM_MEMORY_EXIT_FLAG_READ as u64 != 0 {
        Access::Read
    } else {
        Access::Unstated
    }
}

/// A `KVM_EXIT_MEMORY_FAULT`: KVM_RUN failed with EFAULT or EHWPOISON and an annotation; or SIGBUS was
/// raised in KVM_RUN (then `poisoned` is set, the access is unstated, and `flags` is 0).
///
/// Source: `Documentation/virt/kvm/api.rst`, KVM_CAP_MEMORY_FAULT_INFO and, for `absent`,
/// KVM_CAP_ABSENT_MAPPING_FAULT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultExit {
    /// First faulting guest-physical address; aligned to `size_bytes` for stage-2 faults, exact for
    /// accesses that KVM itself makes.
    pub gpa: GuestAddress,
    /// Bytes from `gpa` that the access needs.
    pub size_bytes: u64,
    /// The access that failed.
    pub access: Access,
    /// The slot has absent-mapping exits enabled, and userspace's page tables had no mapping that
    /// permits the access: make the page present and enter the guest again. If this is false, a retry
    /// fails again.
    pub absent: bool,
    /// The access was to private (guest_memfd) memory.
    pub private: bool,
    /// EHWPOISON or SIGBUS: the memory has an uncorrected error. [`Vm::error_of`](crate::Vm::error_of)
    /// returns the lost range; [`Vcpu::inject_machine_check`](crate::Vcpu::inject_machine_check)
    /// reports the error to the guest.
    pub poisoned: bool,
    /// The raw flags, for messages about bits that this version does not decode.
    pub flags: u64,
}

impl FaultExit {
    /// Decodes `kvm_run.memory_fault`; `poisoned`: the errno was EHWPOISON.
    #[must_use]
    pub const fn decode(flags: u64, gpa: u64, size_bytes: u64, poisoned: bool) -> Self {
        Self {
            gpa: GuestAddress(gpa),
            size_bytes,
            access: access_of(flags),
            absent: flags & abi::KVM_MEMORY_EXIT_FLAG_ABSENT as u64 != 0,
            private: flags & abi::KVM_MEMORY_EXIT_FLAG_PRIVATE as u64 != 0,
            poisoned,
            flags,
        }
    }

    /// The memory fault of a failed KVM_RUN, for a program that makes the ioctl itself: `run` is the
    /// vCPU's structure, and `errno` the result of KVM_RUN. None if it is not an annotated fault.
    ///
    /// With `kvm-ioctls`: `VcpuFd::run` returns annotated faults as `VcpuExit::MemoryFault`, without
    /// the errno. Immediately after the call, the thread's errno still distinguishes EHWPOISON from EFAULT.
    ///
    /// Kernels without Pagetide's patches may fail without an annotation and leave an earlier one in
    /// `run`: call [`FaultExit::forget`] before each KVM_RUN to tell them apart.
    #[must_use]
    pub fn of(run: &kvm_run, errno: i32) -> Option<Self> {
        let is_fault = matches!(errno, libc::EFAULT | libc::EHWPOISON);
        if !is_fault || run.exit_reason != abi::KVM_EXIT_MEMORY_FAULT {
            return None;
        }
        // SAFETY: the member that the exit reason selects; integers, for which any bits are valid.
        let fault = unsafe { run.__bindgen_anon_1.memory_fault };
        let is_poisoned = errno == libc::EHWPOISON;
        Some(Self::decode(
            fault.flags,
            fault.gpa,
            fault.size,
            is_poisoned,
        ))
    }

    /// Clears an annotated fault of an earlier KVM_RUN. Any other exit reason stays, because the kernel
    /// may need it to complete an access.
    pub fn forget(run: &mut kvm_run) {
        if run.exit_reason == abi::KVM_EXIT_MEMORY_FAULT {
            run.exit_reason = KVM_EXIT_UNKNOWN;
        }
    }

    /// Whether making the page present and entering again can resolve the fault.
    #[must_use]
    pub const fn is_resolvable(&self) -> bool {
        self.absent && !self.poisoned
    }
}

impl fmt::Display for FaultExit {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "{} of {} bytes at gpa {:#x}",
            self.access, self.size_bytes, self.gpa.0
        )?;
        for (set, name) in [
            (self.absent, "absent"),
            (self.private, "private"),
            (self.poisoned, "poisoned"),
        ] {
            if set {
                write!(formatter, ", {name}")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const READ: u64 = 1 << 0;
    const WRITE: u64 = 1 << 1;
    const EXEC: u64 = 1 << 2;
    const PRIVATE: u64 = 1 << 3;
    const ABSENT: u64 = 1 << 5;

    #[test]
    fn flags_decode_as_documented() {
        // flags, access, absent, private
        let table = [
            (0, Access::Unstated, false, false),
            (READ, Access::Read, false, false),
            (WRITE, Access::Write, false, false),
            (EXEC, Access::Exec, false, false),
            (READ | ABSENT, Access::Read, true, false),
            (WRITE | ABSENT, Access::Write, true, false),
            (READ | WRITE | ABSENT, Access::Write, true, false),
            (READ | EXEC, Access::Exec, false, false),
            (PRIVATE, Access::Unstated, false, true),
            (1 << 4, Access::Unstated, false, false),
        ];
        for (flags, access, absent, private) in table {
            let fault = FaultExit::decode(flags, 0x1_0000_0000, 4096, false);
            assert_eq!(
                (fault.access, fault.absent, fault.private),
                (access, absent, private),
                "flags {flags:#x}"
            );
            assert_eq!(fault.is_resolvable(), absent, "flags {flags:#x}");
        }
    }

    #[test]
    fn a_run_structure_is_decoded_by_its_errno() {
        let mut run = kvm_run {
            exit_reason: abi::KVM_EXIT_MEMORY_FAULT,
            ..kvm_run::default()
        };
        run.__bindgen_anon_1.memory_fault.flags = WRITE | ABSENT;
        run.__bindgen_anon_1.memory_fault.gpa = 0x3000;
        run.__bindgen_anon_1.memory_fault.size = 4096;
        let fault = FaultExit::decode(WRITE | ABSENT, 0x3000, 4096, false);
        assert_eq!(FaultExit::of(&run, libc::EFAULT), Some(fault));
        let poisoned = FaultExit {
            poisoned: true,
            ..fault
        };
        assert_eq!(FaultExit::of(&run, libc::EHWPOISON), Some(poisoned));
        for errno in [0, libc::EINTR, libc::EAGAIN] {
            assert_eq!(FaultExit::of(&run, errno), None);
        }
        FaultExit::forget(&mut run);
        assert_eq!(FaultExit::of(&run, libc::EFAULT), None);
        // The kernel completes an MMIO access at the next entry.
        run.exit_reason = kvm_bindings::KVM_EXIT_MMIO;
        FaultExit::forget(&mut run);
        assert_eq!(run.exit_reason, kvm_bindings::KVM_EXIT_MMIO);
    }

    #[test]
    fn poison_is_never_resolvable() {
        let fault = FaultExit::decode(READ | ABSENT, 0x2000, 4096, true);
        assert!(!fault.is_resolvable());
        assert_eq!(
            fault.to_string(),
            "read of 4096 bytes at gpa 0x2000, absent, poisoned"
        );
    }
}
