//! Installing pages in registered memory.

use std::os::fd::AsFd;

use rustix::io::Errno;
use thiserror::Error;

use super::{UserRange, Userfaultfd, set, update};
use crate::generated as abi;

/// Whether a call that installs pages also wakes the threads that wait for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Wake {
    /// The call wakes them.
    Wake,
    /// The call does not wake them: no thread waits, as after a vCPU's exit, or a later
    /// [`Userfaultfd::wake`] does.
    DontWake,
}

/// Why not all of the pages were installed. The first `installed_bytes` of the range are installed, and
/// their waiters woken if the call was to wake them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum InstallError {
    /// The page after the installed ones is already mapped (EEXIST), for example because another thread
    /// installed it. This is not a failure. Threads that wait for that page have not been woken.
    #[error("already mapped after {installed_bytes} bytes")]
    Exists {
        /// Bytes installed before it.
        installed_bytes: u64,
    },
    /// The kernel stopped early (EAGAIN): the address space changed at the same time, or the page after
    /// the installed ones failed with an error that only the next call reports. Call again for the
    /// rest.
    #[error("stopped after {installed_bytes} bytes")]
    Again {
        /// Bytes installed before the stop.
        installed_bytes: u64,
    },
    /// The page has no content (EFAULT): it is not in the page cache, or the source of the copy could
    /// not be read.
    #[error(
        "no content to install: the page is not in the page cache, or its source is unreadable"
    )]
    NoContent,
    /// The page in the page cache has an uncorrected memory error (EIO).
    #[error("the page in the page cache is poisoned")]
    Poisoned,
    /// The range does not lie within one registered mapping (ENOENT).
    #[error("the range is not within one registered mapping")]
    NoMapping,
    /// The process that owns the memory has exited (ESRCH).
    #[error("the process has exited")]
    Gone,
    /// Any other error of the kernel.
    #[error("installing pages")]
    Io(#[source] Errno),
}

impl InstallError {
    /// Converts the outcome of an install ioctl that failed with `errno` and left `done` in its result
    /// field: bytes, or a negative errno.
    fn parse(errno: Errno, done: i64) -> Self {
        let installed_bytes = u64::try_from(done).unwrap_or(0);
        match errno {
            Errno::EXIST => Self::Exists { installed_bytes },
            Errno::AGAIN => Self::Again { installed_bytes },
            Errno::FAULT => Self::NoContent,
            Errno::IO => Self::Poisoned,
            Errno::NOENT => Self::NoMapping,
            Errno::SRCH => Self::Gone,
            errno => Self::Io(errno),
        }
    }
}

impl Wake {
    /// The mode bits for an ioctl whose "do not wake" bit is `dont_wake`.
    #[inline]
    fn mode(self, dont_wake: u32) -> u64 {
        match self {
            Self::Wake => 0,
            Self::DontWake => u64::from(dont_wake),
        }
    }
}

impl Userfaultfd {
    /// Maps the page cache's pages of `range` (`UFFDIO_CONTINUE`).
    #[inline]
    pub fn continue_pages(&self, range: UserRange, wake: Wake) -> Result<(), InstallError> {
        self.continue_with(range, wake.mode(abi::UFFDIO_CONTINUE_MODE_DONTWAKE))
    }

    /// The same, protected against writing, as by [`Self::protect`]. [`InstallError::Io`] with EINVAL if the memory is not registered
    /// for that, or the kernel is older than Linux 6.4.
    pub fn continue_pages_protected(
        &self,
        range: UserRange,
        wake: Wake,
    ) -> Result<(), InstallError> {
        let mode = wake.mode(abi::UFFDIO_CONTINUE_MODE_DONTWAKE);
        self.continue_with(range, mode | u64::from(abi::UFFDIO_CONTINUE_MODE_WP))
    }

    #[inline]
    fn continue_with(&self, range: UserRange, mode: u64) -> Result<(), InstallError> {
        let mut argument = abi::uffdio_continue {
            range: range.to_abi(),
            mode,
            mapped: 0,
        };
        // SAFETY: the argument has only addresses of registered memory.
        unsafe { update::<{ abi::UFFDIO_CONTINUE }, _>(self.as_fd(), &mut argument) }
            .map_err(|errno| InstallError::parse(errno, argument.mapped))
    }

    /// Creates new pages at `to` with the content `from` (`UFFDIO_COPY`).
    ///
    /// Never use this on a part of a huge page of shmem: KVM may have mapped the whole huge page.
    pub fn copy_pages(&self, to: u64, from: &[u8], wake: Wake) -> Result<(), InstallError> {
        let mut argument = abi::uffdio_copy {
            dst: to,
            src: from.as_ptr().expose_provenance() as u64,
            len: from.len() as u64,
            mode: wake.mode(abi::UFFDIO_COPY_MODE_DONTWAKE),
            copy: 0,
        };
        // SAFETY: `from` is borrowed for the call; `to` is in registered memory or refused.
        unsafe { update::<{ abi::UFFDIO_COPY }, _>(self.as_fd(), &mut argument) }
            .map_err(|errno| InstallError::parse(errno, argument.copy))
    }

    /// As [`Self::copy_pages`], with the content at any addresses of this process. Only the kernel reads
    /// them: [`InstallError::NoContent`] if they are not mapped, or have no content (a truncated file).
    pub fn copy_pages_from(
        &self,
        to: u64,
        from: UserRange,
        wake: Wake,
    ) -> Result<(), InstallError> {
        let mut argument = abi::uffdio_copy {
            dst: to,
            src: from.start,
            len: from.bytes,
            mode: wake.mode(abi::UFFDIO_COPY_MODE_DONTWAKE),
            copy: 0,
        };
        // SAFETY: the kernel only reads at `from`, and refuses what is not mapped; `to` is in registered
        // memory or refused.
        unsafe { update::<{ abi::UFFDIO_COPY }, _>(self.as_fd(), &mut argument) }
            .map_err(|errno| InstallError::parse(errno, argument.copy))
    }

    /// Makes `range` read as zeroes (`UFFDIO_ZEROPAGE`). Not for hugetlb memory.
    pub fn zero_pages(&self, range: UserRange, wake: Wake) -> Result<(), InstallError> {
        let mut argument = abi::uffdio_zeropage {
            range: range.to_abi(),
            mode: wake.mode(abi::UFFDIO_ZEROPAGE_MODE_DONTWAKE),
            zeropage: 0,
        };
        // SAFETY: the argument has only addresses of registered memory.
        unsafe { update::<{ abi::UFFDIO_ZEROPAGE }, _>(self.as_fd(), &mut argument) }
            .map_err(|errno| InstallError::parse(errno, argument.zeropage))
    }

    /// Makes every access to `range` fail as an uncorrected memory error does (`UFFDIO_POISON`; needs
    /// [`super::Features::POISON`]). The kernel still treats the pages as absent: content that is
    /// installed later replaces the poison.
    pub fn poison_pages(&self, range: UserRange, wake: Wake) -> Result<(), InstallError> {
        let mut argument = abi::uffdio_poison {
            range: range.to_abi(),
            mode: wake.mode(abi::UFFDIO_POISON_MODE_DONTWAKE),
            updated: 0,
        };
        // SAFETY: the argument has only addresses of registered memory.
        unsafe { update::<{ abi::UFFDIO_POISON }, _>(self.as_fd(), &mut argument) }
            .map_err(|errno| InstallError::parse(errno, argument.updated))
    }

    /// Protects the pages of `range` against writing (`UFFDIO_WRITEPROTECT`): a write waits, and is reported
    /// ([`super::PageFault::write_protected`]). For memory of [`Userfaultfd::register_with_protection`].
    pub fn protect(&self, range: UserRange) -> Result<(), InstallError> {
        self.set_protection(range, abi::UFFDIO_WRITEPROTECT_MODE_WP)
    }

    /// Ends the protection of the pages of `range`, and wakes the threads that wait there.
    pub fn unprotect(&self, range: UserRange) -> Result<(), InstallError> {
        self.set_protection(range, 0)
    }

    pub(super) fn set_protection(&self, range: UserRange, mode: u32) -> Result<(), InstallError> {
        let mut argument = abi::uffdio_writeprotect {
            range: range.to_abi(),
            mode: u64::from(mode),
        };
        // SAFETY: the argument has only addresses of registered memory.
        unsafe { update::<{ abi::UFFDIO_WRITEPROTECT }, _>(self.as_fd(), &mut argument) }
            .map_err(|errno| InstallError::parse(errno, 0))
    }

    /// Wakes the threads that wait for pages of `range`; they retry their accesses (`UFFDIO_WAKE`).
    pub fn wake(&self, range: UserRange) -> Result<(), InstallError> {
        set::<{ abi::UFFDIO_WAKE }, _>(self.as_fd(), range.to_abi()).map_err(InstallError::Io)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_errno_maps_to_its_error() {
        let cases = [
            (
                Errno::EXIST,
                -17,
                InstallError::Exists { installed_bytes: 0 },
            ),
            (
                Errno::EXIST,
                8192,
                InstallError::Exists {
                    installed_bytes: 8192,
                },
            ),
            (
                Errno::AGAIN,
                4096,
                InstallError::Again {
                    installed_bytes: 4096,
                },
            ),
            (
                Errno::AGAIN,
                -11,
                InstallError::Again { installed_bytes: 0 },
            ),
            (Errno::AGAIN, 0, InstallError::Again { installed_bytes: 0 }),
            (Errno::FAULT, -14, InstallError::NoContent),
            (Errno::IO, -5, InstallError::Poisoned),
            (Errno::NOENT, -2, InstallError::NoMapping),
            (Errno::SRCH, 0, InstallError::Gone),
            (Errno::NOMEM, -12, InstallError::Io(Errno::NOMEM)),
        ];
        for (errno, done, expected) in cases {
            assert_eq!(InstallError::parse(errno, done), expected, "{errno} {done}");
        }
    }
}
