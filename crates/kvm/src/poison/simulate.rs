//! Simulated errors for tests and benchmarks.

use std::io;

use pagetide_memory::{GuestAddress, Region};
use rustix::io::Errno;
use rustix::mm::{Advice, madvise};

use super::{SigbusError, catching, install_sigbus_handler};

/// The kernel's treatment of a simulated error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Simulated {
    /// The kernel took the page out of use; or the page stays mapped, where the region's policy is to
    /// keep it.
    Handled,
    /// The page counts as poisoned, but the kernel could not take it out of use: a huge page could not
    /// be split because of a concurrent reference, for instance by a vCPU (`EHWPOISON`), or the page
    /// has further users (`EBUSY`). The kernel does not retry. An access fails where the page has to be
    /// mapped again, and otherwise reads the old content.
    ///
    /// Also: the page already had an error and is still mapped, as where the region's policy is to keep
    /// it. Then the amount of corrupted memory does not increase.
    Unhandled,
}

/// Why no error could be simulated.
#[derive(Debug, thiserror::Error)]
pub enum SimulateError {
    /// The region does not contain the address.
    #[error("gpa {gpa} is not in the region")]
    Outside {
        /// The address.
        gpa: GuestAddress,
    },
    /// The SIGBUS handler could not be installed.
    #[error(transparent)]
    Sigbus(#[from] SigbusError),
    /// The process lacks CAP_SYS_ADMIN, or the kernel CONFIG_MEMORY_FAILURE.
    #[error("MADV_HWPOISON at gpa {gpa} is refused: it needs root and CONFIG_MEMORY_FAILURE")]
    Refused {
        /// The address.
        gpa: GuestAddress,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// Any other error of the kernel.
    #[error("MADV_HWPOISON at gpa {gpa}")]
    Failed {
        /// The address.
        gpa: GuestAddress,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

/// Makes the kernel treat the 4 KiB at `gpa` as memory with an uncorrected error (`MADV_HWPOISON`), and
/// returns its treatment. The memory becomes present if it was absent. As after a real error, the next
/// access to the memory reports it; but unlike a real error, an [`ErrorWatch`](super::ErrorWatch) does
/// not receive it.
///
/// The machine loses the memory until it reboots: use this for VMs of a lab.
///
/// # Errors
/// [`SimulateError`].
pub fn simulate_error(region: &Region, gpa: GuestAddress) -> Result<Simulated, SimulateError> {
    let hva = region
        .gpa_to_hva(GuestAddress(gpa.0 & !0xfff))
        .ok_or(SimulateError::Outside { gpa })?;
    install_sigbus_handler()?;
    loop {
        // The kernel treats the calling thread as the accessing one, and sends SIGBUS.
        let (result, _) = catching(|| {
            let at = std::ptr::with_exposed_provenance_mut(hva.0);
            // SAFETY: madvise requires memory of the caller: it is a page of a region, whose content
            // may change at any time and to which there is no reference.
            unsafe { madvise(at, 4096, Advice::LinuxHwPoison) }
        });
        let Err(errno) = result else {
            return Ok(Simulated::Handled);
        };
        let source = io::Error::from(errno);
        return Err(match errno {
            Errno::INTR | Errno::AGAIN => continue,
            Errno::HWPOISON | Errno::BUSY => return Ok(Simulated::Unhandled),
            Errno::PERM | Errno::INVAL => SimulateError::Refused { gpa, source },
            _ => SimulateError::Failed { gpa, source },
        });
    }
}
