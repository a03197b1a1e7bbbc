//! Memory faults that leave the guest through KVM_RUN.

use std::fmt;

use pagetide_memory::GuestAddress;
use pagetide_uapi::generated as abi;

/// What the guest tried to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// A data read.
    Read,
    /// A data write.
    Write,
    /// An instruction fetch.
    Exec,
    /// The kernel did not say: annotations without access flags exist upstream for private memory.
    Unstated,
}

impl Access {
    /// Decodes `kvm_run.memory_fault.flags`. A write decides over a fetch, a fetch over a read,
    /// because whoever makes the page present must satisfy the most demanding one.
    #[must_use]
    pub const fn from_flags(flags: u64) -> Self {
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
}

impl fmt::Display for Access {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(match self {
            Access::Read => "read",
            Access::Write => "write",
            Access::Exec => "exec",
            Access::Unstated => "access",
        })
    }
}

/// A `KVM_EXIT_MEMORY_FAULT`: KVM_RUN failed with EFAULT or EHWPOISON and said why; or a SIGBUS came
/// in KVM_RUN (then `poisoned` is set, the access is not stated, and `flags` are 0).
///
/// Source: `Documentation/virt/kvm/api.rst`, KVM_CAP_MEMORY_FAULT_INFO and, for `absent`,
/// KVM_CAP_ABSENT_MAPPING_FAULT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultExit {
    /// First faulting guest-physical address; aligned to `size_bytes` for stage-2 faults, exact
    /// for accesses that KVM makes itself.
    pub gpa: GuestAddress,
    /// Bytes from `gpa` that the access needs.
    pub size_bytes: u64,
    /// The access that failed.
    pub access: Access,
    /// The slot asks for exits and userspace's page tables had no mapping that permits the access:
    /// make the page present and enter the guest again. Without it a retry leads nowhere.
    pub absent: bool,
    /// The access was to private (guest_memfd) memory.
    pub private: bool,
    /// EHWPOISON or SIGBUS: the memory has an uncorrected error. [`Vm::error_of`](crate::Vm::error_of)
    /// says what is lost, [`Vcpu::inject_machine_check`](crate::Vcpu::inject_machine_check) tells the
    /// guest.
    pub poisoned: bool,
    /// The raw flags, for messages about bits that this version does not know.
    pub flags: u64,
}

impl FaultExit {
    /// Decodes `kvm_run.memory_fault`; `poisoned` says that the errno was EHWPOISON.
    #[must_use]
    pub const fn decode(flags: u64, gpa: u64, size_bytes: u64, poisoned: bool) -> Self {
        Self {
            gpa: GuestAddress(gpa),
            size_bytes,
            access: Access::from_flags(flags),
            absent: flags & abi::KVM_MEMORY_EXIT_FLAG_ABSENT as u64 != 0,
            private: flags & abi::KVM_MEMORY_EXIT_FLAG_PRIVATE as u64 != 0,
            poisoned,
            flags,
        }
    }

    /// Whether making the page present and entering again can resolve it.
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
    fn flags_decode_as_the_interface_says() {
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
    fn poison_is_never_resolvable() {
        let fault = FaultExit::decode(READ | ABSENT, 0x2000, 4096, true);
        assert!(!fault.is_resolvable());
        assert_eq!(
            fault.to_string(),
            "read of 4096 bytes at gpa 0x2000, absent, poisoned"
        );
    }
}
