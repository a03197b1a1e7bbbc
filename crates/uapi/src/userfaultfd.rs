//! A userfaultfd: how a process learns that one of its threads, or KVM on behalf of a guest, touched
//! memory that is not there, and how it puts the memory there.
//!
//! Source: the kernel's `Documentation/admin-guide/mm/userfaultfd.rst` and the manual pages
//! userfaultfd(2), ioctl_userfaultfd(2) and UFFDIO_*(2const).

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

/// How threads that touch a registered range are held up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mode {
    /// Faults on pages that do not exist (`UFFDIO_REGISTER_MODE_MISSING`). They are resolved by
    /// copying content in, or with the zero page.
    Missing,
    /// Faults on pages that are in the page cache and not mapped
    /// (`UFFDIO_REGISTER_MODE_MINOR`), and on pages that do not exist. Both are resolved by filling
    /// the page cache through another mapping and mapping what is there. A registration for minor
    /// faults alone would let a page that was not yet filled read as zeroes.
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

    /// The ioctl that resolves faults of this mode.
    fn resolver(self) -> u32 {
        match self {
            Self::Missing => abi::_UFFDIO_COPY,
            Self::Minor => abi::_UFFDIO_CONTINUE,
        }
    }
}

/// Why there is no userfaultfd.
#[derive(Debug, Error)]
pub enum OpenError {
    /// The kernel was built without it.
    #[error("this kernel has no userfaultfd (CONFIG_USERFAULTFD)")]
    NotSupported,
    /// Neither the system call nor the device lets this user have one that serves faults from
    /// within the kernel, as KVM's are.
    #[error(
        "no permission for a userfaultfd that serves KVM's faults: run as root, give the process \
         CAP_SYS_PTRACE, make /dev/userfaultfd accessible to it, or set \
         /proc/sys/vm/unprivileged_userfaultfd to 1"
    )]
    NoPermission {
        /// What opening the device said.
        #[source]
        device: std::io::Error,
    },
    /// This kernel lacks features that were asked for.
    #[error("this kernel's userfaultfd lacks {missing}")]
    MissingFeatures {
        /// The ones that it lacks.
        missing: Features,
    },
    /// Anything else that the kernel says.
    #[error("opening a userfaultfd")]
    Open(#[source] Errno),
}

/// Why a descriptor is not taken for a userfaultfd.
#[derive(Debug, Error)]
pub enum AdoptError {
    /// It is something else.
    #[error("the descriptor is no userfaultfd but {}", name.display())]
    NotUserfaultfd {
        /// What `/proc` says that it is.
        name: PathBuf,
    },
    /// What it is could not be found out.
    #[error("asking /proc what the descriptor is")]
    Look(#[source] std::io::Error),
    /// It could not be made non-blocking.
    #[error("making a userfaultfd non-blocking")]
    Flags(#[source] Errno),
}

/// Why a range could not be registered or unregistered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum RegisterError {
    /// The memory there cannot be served in that mode, is not mapped, or is not aligned.
    #[error("{range} is no memory that userfaultfd can serve in {mode:?} mode")]
    NotServable {
        /// The range asked for.
        range: UserRange,
        /// The mode asked for.
        mode: Mode,
    },
    /// Another userfaultfd has (part of) the range.
    #[error("another userfaultfd serves part of {range}")]
    Busy {
        /// The range asked for.
        range: UserRange,
    },
    /// Anything else that the kernel says.
    #[error("registering {range} with a userfaultfd")]
    Register {
        /// The range asked for.
        range: UserRange,
        /// What the kernel said.
        #[source]
        errno: Errno,
    },
}

/// An open userfaultfd: non-blocking, closed on exec, API negotiated.
///
/// Closing it wakes everyone who waits for it and ends its registrations: absent pages of private
/// memory then read as zeroes. Stop whatever runs on the memory first.
#[derive(Debug)]
pub struct Userfaultfd {
    fd: OwnedFd,
    features: Features,
    /// Others have the descriptor too, and may change its flags.
    is_shared: bool,
}

impl Userfaultfd {
    /// Opens a userfaultfd that also serves faults from within the kernel, with the features
    /// `wanted`. Tries the system call, then `/dev/userfaultfd`.
    pub fn open(wanted: Features) -> Result<Self, OpenError> {
        let fd = Self::open_raw()?;
        match negotiate(fd.as_fd(), wanted) {
            Ok(_) => Ok(Self {
                fd,
                features: wanted,
                is_shared: false,
            }),
            // A handshake that was refused leaves no word about what would have been accepted.
            Err(Errno::INVAL) => {
                let missing = wanted.without(Self::available()?);
                if missing == Features::NONE {
                    return Err(OpenError::Open(Errno::INVAL));
                }
                Err(OpenError::MissingFeatures { missing })
            }
            Err(errno) => Err(OpenError::Open(errno)),
        }
    }

    /// Takes a userfaultfd that another process opened and handed over, API negotiated with `features`,
    /// which only that process knows. Makes it non-blocking: the flag is shared with every process that
    /// has the descriptor.
    ///
    /// A descriptor that names EVENT features here makes its reader wait for events; leaving one out
    /// that was negotiated is a fault of the caller's that shows as events which nobody expects.
    ///
    /// # Errors
    /// [`AdoptError`]; the descriptor is closed then.
    pub fn adopt(fd: OwnedFd, features: Features) -> Result<Self, AdoptError> {
        let link = format!("/proc/self/fd/{}", fd.as_raw_fd());
        let name = std::fs::read_link(link).map_err(AdoptError::Look)?;
        if name.as_os_str() != "anon_inode:[userfaultfd]" {
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

    /// The features that this kernel has.
    pub fn available() -> Result<Features, OpenError> {
        let fd = Self::open_raw()?;
        negotiate(fd.as_fd(), Features::NONE).map_err(OpenError::Open)
    }

    /// The features that were asked for.
    pub fn features(&self) -> Features {
        self.features
    }

    fn open_raw() -> Result<OwnedFd, OpenError> {
        let flags = UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK;
        // SAFETY: rustix marks this unsafe because what is later registered behaves unlike memory;
        // making the descriptor alone changes nothing. Userfaultfd::register passes that on.
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

    /// Has the threads that fault in `range` wait for this userfaultfd.
    ///
    /// # Safety
    ///
    /// The range belongs to the caller, who keeps it mapped for as long as this userfaultfd is
    /// open, and nobody takes it for granted that its absent pages read as zeroes: from now on the
    /// safe methods of any userfaultfd of this process put other content there.
    pub unsafe fn register(&self, range: UserRange, mode: Mode) -> Result<(), RegisterError> {
        let mut register = abi::uffdio_register {
            range: range.to_abi(),
            mode: mode.bits(),
            ..abi::uffdio_register::default()
        };
        // SAFETY: nothing else is read; the rest is this function's own requirement.
        let registered =
            unsafe { update::<{ abi::UFFDIO_REGISTER }, _>(self.as_fd(), &mut register) };
        match registered {
            Ok(()) if register.ioctls & (1 << mode.resolver()) == 0 => {
                // Registered, and nothing could ever resolve a fault there.
                let _ = self.unregister(range);
                Err(RegisterError::NotServable { range, mode })
            }
            Ok(()) => Ok(()),
            Err(Errno::INVAL) => Err(RegisterError::NotServable { range, mode }),
            Err(Errno::BUSY) => Err(RegisterError::Busy { range }),
            Err(errno) => Err(RegisterError::Register { range, errno }),
        }
    }

    /// Ends the registration of `range`, and wakes those who wait there.
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

// SAFETY: Ioctl requires that opcode and argument match what the kernel expects and that the output
// is read as the kernel gives it: USERFAULTFD_IOC_NEW takes an integer and returns a descriptor that
// is the caller's.
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
        // SAFETY: from_raw_fd requires an open descriptor that nobody else owns: the ioctl
        // succeeded, and then its return value is one that was made for the caller.
        Ok(unsafe { OwnedFd::from_raw_fd(output) })
    }
}

/// The API handshake, which must come first and can succeed once. Returns what the kernel has.
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

/// A structure that an ioctl of a userfaultfd reads and writes, and that holds plain integers only.
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
}

/// An ioctl that reads its argument and writes results into it.
///
/// # Safety
///
/// What the argument says is to be read, is readable for the length of the call. What it says is to
/// be registered, fulfils [`Userfaultfd::register`]. The other addresses need no promise: the
/// kernel fills in pages only where memory was registered.
#[inline]
unsafe fn update<const OPCODE: Opcode, T: Argument<OPCODE>>(
    fd: BorrowedFd<'_>,
    argument: &mut T,
) -> Result<(), Errno> {
    // SAFETY: Updater requires an opcode that takes a pointer to a T: Argument says so.
    let updater = unsafe { Updater::<OPCODE, T>::new(argument) };
    // SAFETY: ioctl requires that the descriptor understands the opcode or refuses it: a
    // userfaultfd does, and the numbers are no other driver's.
    unsafe { ioctl::ioctl(fd, updater) }
}

/// An ioctl that only reads its argument.
#[inline]
fn set<const OPCODE: Opcode, T: Argument<OPCODE>>(
    fd: BorrowedFd<'_>,
    argument: T,
) -> Result<(), Errno> {
    // SAFETY: Setter requires an opcode that takes a pointer to a T: Argument says so.
    let setter = unsafe { Setter::<OPCODE, T>::new(argument) };
    // SAFETY: as in update.
    unsafe { ioctl::ioctl(fd, setter) }
}

#[cfg(test)]
mod tests;
