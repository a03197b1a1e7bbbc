//! The reasons for which KVM_RUN returns.

use std::fmt;

use pagetide_memory::GuestAddress;

use crate::fault::FaultExit;

/// Why the guest stopped running.
///
/// Source: `Documentation/virt/kvm/api.rst`, "The kvm_run structure".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// A memory access failed and the kernel reports which one (EFAULT or EHWPOISON with
    /// KVM_EXIT_MEMORY_FAULT, or SIGBUS). Entering again repeats the access.
    Fault(FaultExit),
    /// The guest wrote to an I/O port. The next KVM_RUN completes the instruction.
    IoOut {
        /// The port.
        port: u16,
        /// The first element written, zero-extended.
        data: u32,
    },
    /// The guest reads from an I/O port; the caller supplies the value
    /// ([`BoundVcpu::answer_in`](crate::BoundVcpu::answer_in)).
    IoIn {
        /// The port.
        port: u16,
        /// Bytes per element.
        size_bytes: u8,
    },
    /// An access outside every memory slot. For a read, the caller supplies the value
    /// ([`BoundVcpu::answer_mmio`](crate::BoundVcpu::answer_mmio)); of a write,
    /// [`BoundVcpu::written_mmio`](crate::BoundVcpu::written_mmio) returns the value.
    Mmio {
        /// The address.
        gpa: GuestAddress,
        /// The number of bytes.
        size_bytes: u32,
        /// Whether the access was a write.
        write: bool,
    },
    /// A signal or a kick ended KVM_RUN (EINTR). A kick is thereby consumed.
    Interrupted,
    /// HLT; only without an in-kernel interrupt controller.
    Halt,
    /// Triple fault or the like: the vCPU cannot continue.
    Shutdown,
    /// The processor refused to enter the guest.
    FailedEntry {
        /// The processor's error code.
        hardware_reason: u64,
    },
    /// KVM failed internally, for instance on an instruction that it cannot emulate.
    InternalError {
        /// KVM_INTERNAL_ERROR_*.
        suberror: u32,
    },
    /// Any other exit, with its KVM_EXIT_* number.
    Other {
        /// The number.
        reason: u32,
    },
}

impl fmt::Display for Exit {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Exit::Fault(fault) => write!(formatter, "memory fault: {fault}"),
            Exit::IoOut { port, data } => write!(formatter, "out {data:#x} to port {port:#x}"),
            Exit::IoIn { port, size_bytes } => {
                write!(formatter, "in of {size_bytes} bytes from port {port:#x}")
            }
            Exit::Mmio {
                gpa,
                size_bytes,
                write,
            } => {
                let access = if *write { "write" } else { "read" };
                let gpa = gpa.0;
                write!(
                    formatter,
                    "{access} of {size_bytes} bytes outside all memory slots, gpa {gpa:#x}"
                )
            }
            Exit::Interrupted => formatter.write_str("interrupted"),
            Exit::Halt => formatter.write_str("halt"),
            Exit::Shutdown => formatter.write_str("shutdown (triple fault)"),
            Exit::FailedEntry { hardware_reason } => {
                write!(
                    formatter,
                    "failed entry, hardware reason {hardware_reason:#x}"
                )
            }
            Exit::InternalError { suberror } => {
                write!(formatter, "KVM internal error, suberror {suberror}")
            }
            Exit::Other { reason } => write!(formatter, "exit with reason {reason}"),
        }
    }
}
