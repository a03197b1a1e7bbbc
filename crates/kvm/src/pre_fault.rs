//! Pre-faulting: mapping memory in stage 2 ahead of the guest, by a vCPU (KVM_PRE_FAULT_MEMORY).

use std::io;

use pagetide_memory::GuestRange;
use pagetide_uapi::generated::{KVM_PRE_FAULT_MEMORY, kvm_pre_fault_memory};
use vmm_sys_util::ioctl::ioctl_with_mut_ref;

use crate::poison::{MemoryError, Severity, catching};
use crate::vcpu::BoundVcpu;

/// Why no part of a range was pre-faulted.
#[derive(Debug, thiserror::Error)]
pub enum PreFaultError {
    /// The kernel lacks KVM_CAP_PRE_FAULT_MEMORY (Linux 6.11 on x86 with TDP).
    #[error("this kernel lacks KVM_CAP_PRE_FAULT_MEMORY for this VM")]
    MissingCapability,
    /// A signal or a kick arrived first (EINTR).
    #[error("pre-fault of {range} was interrupted")]
    Interrupted {
        /// The requested range.
        range: GuestRange,
    },
    /// A memory slot was changing (EAGAIN, or a slot transaction's kick): try again, or leave the range
    /// to the guest's own faults.
    #[error("pre-fault of {range}: a memory slot is changing")]
    Again {
        /// The requested range.
        range: GuestRange,
    },
    /// No slot contains the range (ENOENT).
    #[error("pre-fault of {range}: no memory slot there")]
    NoSlot {
        /// The requested range.
        range: GuestRange,
        /// ENOENT.
        #[source]
        source: io::Error,
    },
    /// The memory at the start of the range has an uncorrected error.
    #[error("pre-fault of {range}: {error}")]
    Poisoned {
        /// The requested range.
        range: GuestRange,
        /// The error and the lost memory.
        error: MemoryError,
    },
    /// Any other errno; EFAULT: the host memory is not accessible or not present.
    #[error("pre-fault of {range} failed")]
    Failed {
        /// The requested range.
        range: GuestRange,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

impl BoundVcpu<'_> {
    /// Maps `range` in the stage-2 tables as reads by this vCPU would, and returns the number of bytes
    /// from its start that were processed; fewer than requested if the ioctl stopped early.
    ///
    /// Pages that are absent on the host are faulted in, so with a userfaultfd registered this waits
    /// for them: use it on pages that were just installed. Writes to pages that are mapped read-only on
    /// the host still fault.
    ///
    /// A slot transaction interrupts it. The call does not resume by itself: on Linux 6.12,
    /// KVM_PRE_FAULT_MEMORY does not return until a signal if slots were created again and the vCPU has
    /// not entered the guest since.
    ///
    /// # Errors
    /// [`PreFaultError`], if no byte was processed.
    pub fn pre_fault(&mut self, range: GuestRange) -> Result<u64, PreFaultError> {
        if !self.vm().capabilities().pre_fault_memory {
            return Err(PreFaultError::MissingCapability);
        }
        let mut request = kvm_pre_fault_memory {
            gpa: range.start().0,
            size: range.bytes(),
            ..kvm_pre_fault_memory::default()
        };
        let ((result, poison), kicked) = self.held_and_kicked(|fd| {
            catching(|| {
                // SAFETY: a vCPU descriptor and the structure that this ioctl takes; the kernel writes
                // only to that structure. Gated by KVM_CAP_PRE_FAULT_MEMORY, checked above.
                match unsafe { ioctl_with_mut_ref(fd, KVM_PRE_FAULT_MEMORY.into(), &mut request) } {
                    0 => Ok(()),
                    _ => Err(io::Error::last_os_error()),
                }
            })
        });
        let handled = range.bytes().saturating_sub(request.size);
        let source = match result {
            Err(source) if handled == 0 => source,
            _ => return Ok(handled),
        };
        let poison = poison.and_then(|report| self.vm().error_at(report, Severity::ActionRequired));
        if let Some(error) = poison {
            return Err(PreFaultError::Poisoned { range, error });
        }
        Err(match source.raw_os_error() {
            Some(libc::EINTR) if kicked && !self.has_kick() => PreFaultError::Again { range },
            Some(libc::EINTR) => PreFaultError::Interrupted { range },
            Some(libc::EAGAIN) => PreFaultError::Again { range },
            Some(libc::ENOENT) => PreFaultError::NoSlot { range, source },
            _ => PreFaultError::Failed { range, source },
        })
    }
}
