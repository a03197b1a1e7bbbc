//! A userfaultfd: it reports that a thread of a process, or KVM on behalf of a guest, touched missing
//! memory, and it installs that memory.
//!
//! Source: the kernel's `Documentation/admin-guide/mm/userfaultfd.rst` and the manual pages
//! userfaultfd(2), ioctl_userfaultfd(2) and UFFDIO_*(2const).

mod ask;
mod events;
mod features;
mod install;
mod range;

use std::fs::OpenOptions;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::PathBuf;

use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::ioctl::{self, Opcode, Setter, Updater};
use rustix::mm::UserfaultfdFlags;
use thiserror::Error;

use crate::generated as abi;

pub use events::{Event, EventBuffer, Events, PageFault, ReadError};
pub use features::Features;
pub use install::{InstallError, Wake};
pub use range::UserRange;

/// What the kernel calls a userfaultfd.
const NAME: &str = "anon_inode:[userfaultfd]";

/// What a descriptor is, as the kernel names it (`proc(5)`, /proc/pid/fd).
fn name_of(fd: BorrowedFd<'_>) -> std::io::Result<PathBuf> {
    std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))
}

/// Which faults a registered range reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mode {
    /// Faults on pages that do not exist (`UFFDIO_REGISTER_MODE_MISSING`). A copy of the content or the
    /// zero page resolves them.
    Missing,
    /// Faults on pages that are in the page cache and not mapped (`UFFDIO_REGISTER_MODE_MINOR`), and on
    /// pages that do not exist. To resolve either, a pager writes the content to the page cache through
    /// another mapping, and then maps the page. A registration for minor faults alone would let the
    /// guest read zeroes from a page without content.
    Minor,
}

impl Mode {
    fn bits(self) -> u64 {
        let missing = u64::from(abi::UFFDIO_REGISTER_MODE_MISSING);
        match self {
            Self::Missing => missing,
            Self::Minor => missing | u64::from(abi::UFFDIO_REGISTER_MODE_MINOR),
        }
    }

    /// The ioctl that resolves the faults of this mode.
    fn resolver(self) -> u32 {
        match self {
            Self::Missing => abi::_UFFDIO_COPY,
            Self::Minor => abi::_UFFDIO_CONTINUE,
        }
    }
}

/// Why a userfaultfd could not be opened.
#[derive(Debug, Error)]
pub enum OpenError {
    /// The kernel was built without userfaultfd.
    #[error("this kernel has no userfaultfd (CONFIG_USERFAULTFD)")]
    NotSupported,
    /// Neither the system call nor the device gives this user a userfaultfd that serves faults from
    /// within the kernel, such as KVM's.
    #[error(
        "no permission for a userfaultfd that serves KVM's faults: run as root, give the process \
         CAP_SYS_PTRACE, make /dev/userfaultfd accessible to it, or set \
         /proc/sys/vm/unprivileged_userfaultfd to 1"
    )]
    NoPermission {
        /// The error from opening the device.
        #[source]
        device: std::io::Error,
    },
    /// This kernel lacks requested features.
    #[error("this kernel's userfaultfd lacks {missing}")]
    MissingFeatures {
        /// The features that it lacks.
        missing: Features,
    },
    /// Any other error of the kernel.
    #[error("opening a userfaultfd")]
    Open(#[source] Errno),
}

/// Why a descriptor was not adopted as a userfaultfd.
#[derive(Debug, Error)]
pub enum AdoptError {
    /// The descriptor is of another kind.
    #[error("the descriptor is not a userfaultfd but {}", name.display())]
    NotUserfaultfd {
        /// The descriptor's link in `/proc/self/fd`.
        name: PathBuf,
    },
    /// The kind of the descriptor is unknown: its link cannot be read.
    #[error("reading the descriptor's link in /proc/self/fd")]
    Look(#[source] std::io::Error),
    /// Setting `O_NONBLOCK` failed.
    #[error("making a userfaultfd non-blocking")]
    Flags(#[source] Errno),
}

/// Why a range could not be registered or unregistered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum RegisterError {
    /// The memory there does not support that mode, is not mapped, or is not aligned.
    #[error("userfaultfd cannot serve {range} in {mode:?} mode")]
    NotServable {
        /// The requested range.
        range: UserRange,
        /// The requested mode.
        mode: Mode,
    },
    /// Another userfaultfd has registered the range or a part of it.
    #[error("another userfaultfd serves part of {range}")]
    Busy {
        /// The requested range.
        range: UserRange,
    },
    /// Any other error of the kernel.
    #[error("registering {range} with a userfaultfd")]
    Register {
        /// The requested range.
        range: UserRange,
        /// The kernel's error.
        #[source]
        errno: Errno,
    },
}

/// An open userfaultfd: non-blocking, closed on exec, API negotiated.
///
/// Closing it wakes all threads that wait for it and ends its registrations; absent pages of private
/// memory then read as zeroes. Stop all users of the memory first.
#[derive(Debug)]
pub struct Userfaultfd {
    fd: OwnedFd,
    features: Features,
    /// Other processes also have the descriptor, and may change its flags.
    is_shared: bool,
}

impl Userfaultfd {
    /// Opens a userfaultfd with the features `wanted` that also serves faults from within the kernel.
    /// Tries the system call, then `/dev/userfaultfd`.
    pub fn open(wanted: Features) -> Result<Self, OpenError> {
        Self::negotiated(Self::open_raw, wanted)
    }

    /// Opens a userfaultfd that serves only faults of user mode, and needs no privilege (Linux 5.11). A system call
    /// that accesses a missing page fails with EFAULT.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn open_for_user_mode(wanted: Features) -> Result<Self, OpenError> {
        let only = UserfaultfdFlags::from_bits_retain(abi::UFFD_USER_MODE_ONLY);
        let flags = UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK | only;
        let open = || {
            // SAFETY: as in `open_raw`.
            unsafe { rustix::mm::userfaultfd(flags) }.map_err(|errno| match errno {
                Errno::NOSYS => OpenError::NotSupported,
                errno => OpenError::Open(errno),
            })
        };
        Self::negotiated(open, wanted)
    }

    fn negotiated(
        open: impl Fn() -> Result<OwnedFd, OpenError>,
        wanted: Features,
    ) -> Result<Self, OpenError> {
        let fd = open()?;
        match negotiate(fd.as_fd(), wanted) {
            Ok(_) => Ok(Self {
                fd,
                features: wanted,
                is_shared: false,
            }),
            // A refused handshake does not report which features the kernel has.
            Err(Errno::INVAL) => {
                let available = negotiate(open()?.as_fd(), Features::NONE);
                let missing = wanted.without(available.map_err(OpenError::Open)?);
                if missing == Features::NONE {
                    return Err(OpenError::Open(Errno::INVAL));
                }
                Err(OpenError::MissingFeatures { missing })
            }
            Err(errno) => Err(OpenError::Open(errno)),
        }
    }

    /// Adopts a userfaultfd that another process opened and handed over. `features` are those that the
    /// other process negotiated; the kernel cannot report them. Makes the descriptor non-blocking;
    /// every process that has the descriptor shares this flag.
    ///
    /// With `EVENT` features in `features`, the reader waits for the corresponding events. If a
    /// negotiated feature is missing from `features`, events arrive that the reader does not expect.
    ///
    /// # Errors
    /// [`AdoptError`]; the descriptor is then closed.
    pub fn adopt(fd: OwnedFd, features: Features) -> Result<Self, AdoptError> {
        let name = name_of(fd.as_fd()).map_err(AdoptError::Look)?;
        if name.as_os_str() != NAME {
            return Err(AdoptError::NotUserfaultfd { name });
        }
        let flags = rustix::fs::fcntl_getfl(&fd).map_err(AdoptError::Flags)?;
        rustix::fs::fcntl_setfl(&fd, flags | OFlags::NONBLOCK).map_err(AdoptError::Flags)?;
        Ok(Self {
            fd,
            features,
            is_shared: true,
        })
    }

    /// Whether a descriptor is that of a userfaultfd.
    pub fn is_userfaultfd(fd: BorrowedFd<'_>) -> bool {
        name_of(fd).is_ok_and(|name| name.as_os_str() == NAME)
    }

    /// The userfaultfd of a child of the process that this one serves, from the message of its fork
    /// ([`Event::Fork`]). It has the same features and flags.
    pub fn of_child(&self, fd: OwnedFd) -> Self {
        Self {
            fd,
            features: self.features,
            is_shared: self.is_shared,
        }
    }

    /// The features that this kernel has.
    pub fn available() -> Result<Features, OpenError> {
        let fd = Self::open_raw()?;
        negotiate(fd.as_fd(), Features::NONE).map_err(OpenError::Open)
    }

    /// The negotiated features.
    pub fn features(&self) -> Features {
        self.features
    }

    fn open_raw() -> Result<OwnedFd, OpenError> {
        let flags = UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK;
        // SAFETY: rustix marks this unsafe because memory that is registered later behaves unlike other
        // memory; creating the descriptor changes nothing. Userfaultfd::register passes the requirement
        // on.
        match unsafe { rustix::mm::userfaultfd(flags) } {
            Ok(fd) => Ok(fd),
            Err(Errno::PERM) => Self::open_device(),
            Err(Errno::NOSYS) => Err(OpenError::NotSupported),
            Err(errno) => Err(OpenError::Open(errno)),
        }
    }

    fn open_device() -> Result<OwnedFd, OpenError> {
        let device = OpenOptions::new()
            .read(true)
            .write(true)
            .open("/dev/userfaultfd")
            .map_err(|device| OpenError::NoPermission { device })?;
        let flags = OFlags::CLOEXEC | OFlags::NONBLOCK;
        // SAFETY: USERFAULTFD_IOC_NEW takes flags by value and no pointer, as NewDescriptor passes
        // them.
        unsafe { ioctl::ioctl(&device, NewDescriptor { flags }) }.map_err(OpenError::Open)
    }

    /// Makes threads that fault in `range` wait for this userfaultfd.
    ///
    /// # Safety
    ///
    /// The range belongs to the caller, who keeps it mapped for as long as this userfaultfd is open. No
    /// code relies on absent pages of the range reading as zeroes: from now on the safe methods of any
    /// userfaultfd of this process may install other content there.
    pub unsafe fn register(&self, range: UserRange, mode: Mode) -> Result<(), RegisterError> {
        let mut register = abi::uffdio_register {
            range: range.to_abi(),
            mode: mode.bits(),
            ..abi::uffdio_register::default()
        };
        // SAFETY: the kernel reads nothing else; the rest is this function's own requirement.
        let registered =
            unsafe { update::<{ abi::UFFDIO_REGISTER }, _>(self.as_fd(), &mut register) };
        match registered {
            Ok(()) if register.ioctls & (1 << mode.resolver()) == 0 => {
                // The range is registered, but no ioctl could resolve a fault there.
                let _ = self.unregister(range);
                Err(RegisterError::NotServable { range, mode })
            }
            Ok(()) => Ok(()),
            Err(Errno::INVAL) => Err(RegisterError::NotServable { range, mode }),
            Err(Errno::BUSY) => Err(RegisterError::Busy { range }),
            Err(errno) => Err(RegisterError::Register { range, errno }),
        }
    }

    /// As [`Self::register`], and for writes to pages that [`Self::protect`] has protected.
    ///
    /// # Safety
    ///
    /// As for [`Self::register`].
    ///
    /// # Errors
    /// As for [`Self::register`].
    pub unsafe fn register_with_protection(
        &self,
        range: UserRange,
        mode: Mode,
    ) -> Result<(), RegisterError> {
        let mut register = abi::uffdio_register {
            range: range.to_abi(),
            mode: mode.bits() | u64::from(abi::UFFDIO_REGISTER_MODE_WP),
            ..abi::uffdio_register::default()
        };
        // SAFETY: the kernel reads nothing else; the rest is this function's own requirement.
        unsafe { update::<{ abi::UFFDIO_REGISTER }, _>(self.as_fd(), &mut register) }
            .map_err(|errno| RegisterError::Register { range, errno })
    }

    /// Ends the registration of `range` and wakes the threads that wait there.
    pub fn unregister(&self, range: UserRange) -> Result<(), RegisterError> {
        set::<{ abi::UFFDIO_UNREGISTER }, _>(self.as_fd(), range.to_abi())
            .map_err(|errno| RegisterError::Register { range, errno })
    }
}

impl AsFd for Userfaultfd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// `USERFAULTFD_IOC_NEW`: flags in by value, a descriptor out as the return value.
struct NewDescriptor {
    flags: OFlags,
}

// SAFETY: Ioctl requires that opcode and argument match what the kernel expects and that the output is
// interpreted as the kernel defines it: USERFAULTFD_IOC_NEW takes an integer and returns a descriptor
// that belongs to the caller.
unsafe impl ioctl::Ioctl for NewDescriptor {
    type Output = OwnedFd;

    const IS_MUTATING: bool = false;

    fn opcode(&self) -> Opcode {
        abi::USERFAULTFD_IOC_NEW
    }

    fn as_ptr(&mut self) -> *mut std::ffi::c_void {
        std::ptr::without_provenance_mut(self.flags.bits() as usize)
    }

    unsafe fn output_from_ptr(
        output: ioctl::IoctlOutput,
        _: *mut std::ffi::c_void,
    ) -> rustix::io::Result<OwnedFd> {
        // SAFETY: from_raw_fd requires an open descriptor without another owner: the ioctl succeeded,
        // so its return value is a descriptor that the kernel created for the caller.
        Ok(unsafe { OwnedFd::from_raw_fd(output) })
    }
}

/// The API handshake, which must come first and can succeed once. Returns the kernel's features.
fn negotiate(fd: BorrowedFd<'_>, wanted: Features) -> Result<Features, Errno> {
    let mut api = abi::uffdio_api {
        api: u64::from(abi::UFFD_API),
        features: wanted.bits(),
        ..abi::uffdio_api::default()
    };
    // SAFETY: the argument holds no address.
    unsafe { update::<{ abi::UFFDIO_API }, _>(fd, &mut api) }?;
    Ok(Features::from_bits(api.features))
}

/// A structure of integers that a userfaultfd ioctl reads and writes.
///
/// # Safety
///
/// `OPCODE` is the ioctl whose argument is a pointer to this structure.
unsafe trait Argument<const OPCODE: Opcode> {}

macro_rules! arguments {
    ($($opcode:ident => $argument:ident),* $(,)?) => {$(
        // SAFETY: linux/userfaultfd.h defines the number by this structure.
        unsafe impl Argument<{ abi::$opcode }> for abi::$argument {}
    )*};
}

arguments! {
    UFFDIO_API => uffdio_api,
    UFFDIO_REGISTER => uffdio_register,
    UFFDIO_UNREGISTER => uffdio_range,
    UFFDIO_WAKE => uffdio_range,
    UFFDIO_COPY => uffdio_copy,
    UFFDIO_CONTINUE => uffdio_continue,
    UFFDIO_ZEROPAGE => uffdio_zeropage,
    UFFDIO_POISON => uffdio_poison,
    UFFDIO_WRITEPROTECT => uffdio_writeprotect,
}

/// An ioctl that reads its argument and writes results into it.
///
/// # Safety
///
/// Memory that the argument names as a source is readable for the length of the call. A range that it
/// names for registration fulfils [`Userfaultfd::register`]. The other addresses need no promise: the
/// kernel installs pages only in registered memory.
#[inline]
unsafe fn update<const OPCODE: Opcode, T: Argument<OPCODE>>(
    fd: BorrowedFd<'_>,
    argument: &mut T,
) -> Result<(), Errno> {
    // SAFETY: Updater requires an opcode that takes a pointer to a T: by the requirement of Argument.
    let updater = unsafe { Updater::<OPCODE, T>::new(argument) };
    // SAFETY: ioctl requires that the descriptor implements the opcode or refuses it: a userfaultfd
    // does, and no other driver uses these numbers.
    unsafe { ioctl::ioctl(fd, updater) }
}

/// An ioctl that only reads its argument.
#[inline]
fn set<const OPCODE: Opcode, T: Argument<OPCODE>>(
    fd: BorrowedFd<'_>,
    argument: T,
) -> Result<(), Errno> {
    // SAFETY: Setter requires an opcode that takes a pointer to a T: by the requirement of Argument.
    let setter = unsafe { Setter::<OPCODE, T>::new(argument) };
    // SAFETY: as in update.
    unsafe { ioctl::ioctl(fd, setter) }
}

#[cfg(test)]
mod tests;
