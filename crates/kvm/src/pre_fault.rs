//! Filling the stage-2 tables ahead of the guest (KVM_PRE_FAULT_MEMORY).

use std::io;

use pagetide_memory::GuestRange;
use pagetide_uapi::generated::{KVM_PRE_FAULT_MEMORY, kvm_pre_fault_memory};
use vmm_sys_util::ioctl::ioctl_with_mut_ref;

use crate::poison::{MemoryError, Severity, catching};
use crate::vcpu::BoundVcpu;

/// Why nothing of a range was pre-faulted.
#[derive(Debug, thiserror::Error)]
pub enum PreFaultError {
    /// The kernel lacks KVM_CAP_PRE_FAULT_MEMORY (Linux 6.11 on x86 with TDP).
    #[error("this kernel does not have KVM_CAP_PRE_FAULT_MEMORY for this VM")]
    MissingCapability,
    /// A signal or a kick came first (EINTR).
    #[error("pre-fault of {range} was interrupted")]
    Interrupted {
        /// What was asked for.
        range: GuestRange,
    },
    /// A memory slot was changing (EAGAIN, or a slot transaction's kick): try again, or leave it to the guest's own faults.
    #[error("pre-fault of {range}: a memory slot is changing")]
    Again {
        /// What was asked for.
        range: GuestRange,
    },
    /// The range is outside every slot (ENOENT).
    #[error("pre-fault of {range}: no memory slot there")]
    NoSlot {
        /// What was asked for.
        range: GuestRange,
        /// ENOENT.
        #[source]
        source: io::Error,
    },
    /// The memory at the start of the range has an uncorrected error.
    #[error("pre-fault of {range}: {error}")]
    Poisoned {
        /// What was asked for.
        range: GuestRange,
        /// What is lost.
        error: MemoryError,
    },
    /// Any other errno; EFAULT: the host memory is not accessible or not present.
    #[error("pre-fault of {range} failed")]
    Failed {
        /// What was asked for.
        range: GuestRange,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
}

impl BoundVcpu<'_> {
    /// Maps `range` in the stage-2 tables as reads by this vCPU would, and returns how many bytes
    /// from its start were handled; fewer than asked for when something stopped it half-way.
    ///
    /// Pages that are absent on the host are faulted in, so with a userfaultfd registered this
    /// waits for them: use it on pages that were just installed. Writes to pages that are mapped
    /// read-only on the host still fault.
    ///
    /// A slot transaction interrupts it. It is not taken up again by itself: Linux 6.12 never ends
    /// it when slots were made anew and the vCPU has not entered the guest since, unless a signal
    /// comes.
    ///
    /// # Errors
    /// [`PreFaultError`], when nothing was handled.
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
                // SAFETY: a vCPU descriptor and the structure that this ioctl takes; the kernel
                // writes to that structure only. Gated by KVM_CAP_PRE_FAULT_MEMORY, checked above.
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
