//! Uncorrected memory errors: how they reach a VMM, and how the VMM reports them to the guest.
//!
//! - An access to guest memory with an error raises SIGBUS (`BUS_MCEERR_AR`). The creator of a VM
//!   chooses the handler ([`Signals`]): this crate's ([`install_sigbus_handler`]), or a handler of the
//!   program that calls [`handle_sigbus`].
//!   - A vCPU that accesses such memory leaves KVM_RUN with [`Exit::Fault`](crate::Exit::Fault) and
//!     `poisoned` set, also when the kernel returns EHWPOISON.
//!   - The VMM's own accesses by [`Region`](pagetide_memory::Region)'s methods fail with
//!     [`AccessError::Poisoned`](pagetide_memory::AccessError::Poisoned).
//!   - For any other SIGBUS the previous handler runs, or the default action of SIG_DFL or SIG_IGN.
//! - An error in memory that was not accessed (`BUS_MCEERR_AO`) goes to an [`ErrorWatch`].
//! - [`Vm::error_of`] returns the lost range; [`Vcpu::inject_machine_check`] reports the error to the
//!   guest.
//!
//! `docs/design/poison.md` describes the design and all state transitions.
//!
//! [`Signals`]: crate::Signals
//! [`Vcpu::inject_machine_check`]: crate::Vcpu::inject_machine_check

mod machine_check;
mod previous;
mod reports;
mod sigbus;
mod simulate;
mod watch;

use std::fmt;

use pagetide_memory::{GuestAddress, GuestRange, HostAddress, Lost, PageSize};

use crate::fault::{Access, FaultExit};
use crate::slot::Slot;
use crate::vm::{Inner, Vm};

#[cfg(target_arch = "x86_64")]
pub use machine_check::prepare_cpuid;
pub use machine_check::{
    CpuidFull, Injected, MachineCheck, MachineCheckError, MachineCheckForm, NotReady,
};
pub use sigbus::{SigbusError, handle_sigbus, install_sigbus_handler};
pub use simulate::{SimulateError, Simulated, simulate_error};
pub use watch::{ErrorWatch, WatchError};

pub(crate) use reports::Report;
pub(crate) use sigbus::catching;

/// Whether the memory with the error was accessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Severity {
    /// It was accessed (`BUS_MCEERR_AR`): the accessing thread cannot continue.
    ActionRequired,
    /// It was detected by other means, for instance by a scrubber (`BUS_MCEERR_AO`), and has not been
    /// accessed.
    ActionOptional,
}

/// An uncorrected error in a guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryError {
    /// The accessed address, rounded down to 4 KiB, or the address that the kernel reported.
    pub gpa: GuestAddress,
    /// The lost guest memory: 4 KiB, or a huge page (2 MiB, 1 GiB) where the kernel's policy discards
    /// all of it. Limited to the slot that contains `gpa`; the loss of other slots' parts of the same
    /// huge page is reported when they are accessed.
    pub lost: GuestRange,
    /// Whether it was accessed.
    pub severity: Severity,
}

impl fmt::Display for MemoryError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let severity = match self.severity {
            Severity::ActionRequired => "touched",
            Severity::ActionOptional => "found",
        };
        let Self { gpa, lost, .. } = self;
        let bytes = lost.bytes();
        write!(
            formatter,
            "uncorrected error {severity} at gpa {gpa}, {bytes} bytes lost ({lost})"
        )
    }
}

impl MemoryError {
    /// The exit for a vCPU that accessed the memory.
    pub(crate) fn exit(&self) -> FaultExit {
        FaultExit {
            gpa: self.gpa,
            size_bytes: PageSize::Size4K.bytes(),
            access: Access::Unstated,
            absent: false,
            private: false,
            poisoned: true,
            flags: 0,
        }
    }
}

/// Translates a region's loss to the guest's addresses in a slot. `None` if the slot does not contain
/// the address that failed.
fn seen_through(slot: &Slot, lost: Lost, severity: Severity) -> Option<MemoryError> {
    let region = slot.region.gpa();
    let first = slot.offset;
    let end = first.checked_add(slot.range.bytes())?;
    let offset = lost.gpa.offset_from(region)?;
    if !(first..end).contains(&offset) {
        return None;
    }
    let gpa = slot.gpa_of(offset)?;
    // The region's lost range may begin before the slot and end after it.
    let from = lost.range.start().offset_from(region)?.max(first);
    let to = lost.range.end().offset_from(region)?.min(end);
    Some(MemoryError {
        gpa,
        lost: GuestRange::new(slot.gpa_of(from)?, to.checked_sub(from)?).ok()?,
        severity,
    })
}

impl Inner {
    /// The kernel's report, with the guest's addresses; `None` if it is not this VM's memory.
    pub(crate) fn error_at(&self, report: Report, severity: Severity) -> Option<MemoryError> {
        let Report { at, size } = report;
        self.slots().values().find_map(|slot| {
            let lost = slot.region.lost_at(at, size)?;
            seen_through(slot, lost, severity)
        })
    }
}

impl Vm {
    /// The memory that is lost when an access to `gpa` fails because of an uncorrected error of at
    /// least `reported`: after an exit with `poisoned` set, or when a pager's source reports lost
    /// content. `None` if no slot contains that address.
    #[must_use]
    pub fn error_of(&self, gpa: GuestAddress, reported: PageSize) -> Option<MemoryError> {
        self.inner().slots().values().find_map(|slot| {
            let at = slot.region.gpa().checked_add(slot.offset_of(gpa)?)?;
            let lost = slot.region.lost_at_gpa(at, reported)?;
            seen_through(slot, lost, Severity::ActionRequired)
        })
    }

    /// The kernel's report of an error at `hva`, with the guest's addresses: for VMMs with their own
    /// SIGBUS handler. `None` if no slot contains the address.
    #[must_use]
    pub fn error_at(
        &self,
        hva: HostAddress,
        reported: PageSize,
        severity: Severity,
    ) -> Option<MemoryError> {
        let report = Report {
            at: hva,
            size: reported,
        };
        self.inner().error_at(report, severity)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use pagetide_memory::{Backing, Region};

    use super::*;
    use crate::slot::SlotFlags;

    #[test]
    fn an_error_is_translated_by_its_slot() {
        let region = Region::new(GuestAddress(0x40_0000), 0x8000, Backing::Shmem).expect("32 KiB");
        let region = Arc::new(region);
        let hva = |offset: usize| HostAddress(region.guest().start().0 + offset);
        let slot = Slot {
            region: Arc::clone(&region),
            offset: 0x2000,
            range: GuestRange::new(GuestAddress(0x1_0000), 0x4000).expect("a range"),
            flags: SlotFlags::default(),
        };
        let seen = |offset, size| {
            let lost = region.lost_at(hva(offset), size).expect("in the region");
            seen_through(&slot, lost, Severity::ActionOptional)
        };
        assert_eq!(seen(0x1fff, PageSize::Size4K), None);
        assert_eq!(seen(0x6000, PageSize::Size4K), None);
        let error = seen(0x3008, PageSize::Size4K).expect("in the slot");
        assert_eq!(error.gpa, GuestAddress(0x1_1008));
        assert_eq!(error.lost.start(), GuestAddress(0x1_1000));
        assert_eq!(error.lost.bytes(), 0x1000);
        assert_eq!(
            error.to_string(),
            "uncorrected error found at gpa 0x11008, 4096 bytes lost (0x11000..0x12000)"
        );
        // The whole region is lost; it begins before the slot and ends after it.
        let error = seen(0x3008, PageSize::Size2M).expect("in the slot");
        assert_eq!(error.lost, slot.range);
    }
}
