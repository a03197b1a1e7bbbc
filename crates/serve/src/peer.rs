//! The process at the other end of a connection.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

/// A VMM's process.
#[derive(Debug)]
pub(crate) struct Peer {
    /// `None` if the process is outside this process' pid namespace. Then nobody here can signal it.
    pub(crate) pid: Option<i32>,
    pub(crate) uid: u32,
    /// Names the process even if its pid is used again.
    pidfd: Option<OwnedFd>,
}

impl Peer {
    /// The process that connected `stream`, by SO_PEERCRED and, from Linux 6.5 on, SO_PEERPIDFD.
    pub(crate) fn of(stream: &UnixStream) -> Result<Self, Errno> {
        let credentials = credentials_of(stream.as_fd())?;
        // SAFETY: as above, an integer.
        let pidfd = match unsafe { get::<i32>(stream.as_fd(), libc::SO_PEERPIDFD) } {
            // SAFETY: from_raw_fd requires an open descriptor without another owner: the kernel has just
            // made it for this call.
            Ok(descriptor) => Some(unsafe { OwnedFd::from_raw_fd(descriptor) }),
            Err(_) => Pid::from_raw(credentials.pid)
                .and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok()),
        };
        Ok(Self {
            pid: Some(credentials.pid).filter(|&pid| pid != 0),
            uid: credentials.uid,
            pidfd,
        })
    }

    /// Kills the process.
    pub(crate) fn kill(&self) -> Result<(), Errno> {
        let pidfd = self.pidfd.as_ref().ok_or(Errno::SRCH)?;
        pidfd_send_signal(pidfd, Signal::KILL)
    }
}

/// The user at the other end of a Unix socket of any type, by SO_PEERCRED.
pub(crate) fn user_of(socket: BorrowedFd<'_>) -> Result<u32, Errno> {
    Ok(credentials_of(socket)?.uid)
}

/// The process there, likewise; 0 if it is outside this process' pid namespace.
pub(crate) fn pid_of(socket: BorrowedFd<'_>) -> Result<i32, Errno> {
    Ok(credentials_of(socket)?.pid)
}

fn credentials_of(socket: BorrowedFd<'_>) -> Result<libc::ucred, Errno> {
    // SAFETY: get requires a type that is valid for whatever the option writes: three integers.
    // (Not rustix's UCred, whose pid may not be 0.)
    unsafe { get(socket, libc::SO_PEERCRED) }
}

/// An option of a socket.
///
/// # Safety
///
/// Every value that the kernel writes for this option is a valid `T`.
unsafe fn get<T>(socket: BorrowedFd<'_>, option: i32) -> Result<T, Errno> {
    let mut value = MaybeUninit::<T>::zeroed();
    let mut bytes = libc::socklen_t::try_from(size_of::<T>()).map_err(|_| Errno::INVAL)?;
    // SAFETY: getsockopt requires an open socket and `bytes` writable bytes at the pointer: both live in
    // this function's frame.
    let got = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            option,
            value.as_mut_ptr().cast(),
            &raw mut bytes,
        )
    };
    if got != 0 {
        let error = std::io::Error::last_os_error();
        return Err(Errno::from_io_error(&error).unwrap_or(Errno::IO));
    }
    if usize::try_from(bytes) != Ok(size_of::<T>()) {
        return Err(Errno::INVAL);
    }
    // SAFETY: the kernel has written all bytes, and the caller has promised that they are a valid T.
    Ok(unsafe { value.assume_init() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_is_this_process_if_it_connected() {
        let (one, _other) = UnixStream::pair().unwrap();
        let peer = Peer::of(&one).unwrap();
        assert_eq!(peer.pid.map(i32::cast_unsigned), Some(std::process::id()));
        assert_eq!(peer.uid, rustix::process::getuid().as_raw());
        assert!(peer.pidfd.is_some());
    }

    #[test]
    fn another_kind_of_descriptor_is_refused() {
        let file = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        assert!(Peer::of(&UnixStream::from(file)).is_err());
    }
}
