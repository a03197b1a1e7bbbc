//! Errors for tests and benchmarks.

use std::io;

use pagetide_memory::{GuestAddress, Region};
use rustix::io::Errno;
use rustix::mm::{Advice, madvise};

use super::{SigbusError, catching, install_sigbus_handler};

/// What the kernel made of a simulated error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Simulated {
    /// The page is out of use; or it stays mapped, where the region's policy is to keep it.
    Handled,
    /// The page counts as poisoned, and the kernel could not take it out of use: a huge page that could
    /// not be split because somebody, maybe a vCPU, was just looking for it (`EHWPOISON`), or a page that
    /// has further users (`EBUSY`). It is not tried again. Touching it is an error where it has to be
    /// mapped anew, and else reads what was there.
    ///
    /// Also: the page had an error before and is mapped nonetheless, as where the region's policy is
    /// to keep it. Then nothing more counts as corrupted.
    Unhandled,
}

/// Why no error could be made.
#[derive(Debug, thiserror::Error)]
pub enum SimulateError {
    /// The region does not have that address.
    #[error("gpa {gpa} is not in the region")]
    Outside {
        /// The address.
        gpa: GuestAddress,
    },
    /// There is no handler of SIGBUS.
    #[error(transparent)]
    Sigbus(#[from] SigbusError),
    /// The process lacks CAP_SYS_ADMIN, or the kernel CONFIG_MEMORY_FAILURE.
    #[error("MADV_HWPOISON at gpa {gpa} is refused: it needs root and CONFIG_MEMORY_FAILURE")]
    Refused {
        /// The address.
        gpa: GuestAddress,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// Anything else that the kernel says.
    #[error("MADV_HWPOISON at gpa {gpa}")]
    Failed {
        /// The address.
        gpa: GuestAddress,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
}

/// Has the kernel treat the 4 KiB at `gpa` as memory with an uncorrected error (`MADV_HWPOISON`), and
/// says what it made of it. They become present if they are not. As after an error that nobody has
/// touched, whoever touches them next is told; but unlike such an error it is not told to an
/// [`ErrorWatch`](super::ErrorWatch).
///
/// The machine loses the memory until it is started anew: for VMs of a lab.
///
/// # Errors
/// [`SimulateError`].
pub fn simulate_error(region: &Region, gpa: GuestAddress) -> Result<Simulated, SimulateError> {
    let hva = region
        .gpa_to_hva(GuestAddress(gpa.0 & !0xfff))
        .ok_or(SimulateError::Outside { gpa })?;
    install_sigbus_handler()?;
    loop {
        // The kernel takes the caller for the one who touched it, and sends SIGBUS.
        let (result, _) = catching(|| {
            let at = std::ptr::with_exposed_provenance_mut(hva.0);
            // SAFETY: madvise requires memory of the caller's: it is a page of a region, whose
            // content may change at any time, and which no reference covers.
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
