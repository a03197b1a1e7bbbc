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
    /// `None` if the process has ended, or nothing names it for certain.
    pidfd: Option<OwnedFd>,
}

impl Peer {
    /// The process that connected `stream`, by SO_PEERCRED and, from Linux 6.5 on, SO_PEERPIDFD. It may have ended, and the
    /// connection be another's by now: its number may then be that of any process.
    pub(crate) fn of(stream: &UnixStream) -> Result<Self, Errno> {
        let credentials = credentials_of(stream.as_fd())?;
        // SAFETY: get requires a type that is valid for whatever the option writes: an integer.
        let pidfd = match unsafe { get::<i32>(stream.as_fd(), libc::SO_PEERPIDFD) } {
            // SAFETY: from_raw_fd requires an open descriptor without another owner: the kernel has just
            // made it for this call.
            Ok(descriptor) => Some(unsafe { OwnedFd::from_raw_fd(descriptor) }),
            // An older kernel.
            Err(Errno::NOPROTOOPT) => by_number(credentials),
            Err(_) => None,
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

/// The process that has the number now, if it is at least one of the same user.
fn by_number(credentials: libc::ucred) -> Option<OwnedFd> {
    let pid = Pid::from_raw(credentials.pid)?;
    let pidfd = pidfd_open(pid, PidfdFlags::empty()).ok()?;
    let status = std::fs::read_to_string(format!("/proc/{}/status", credentials.pid)).ok()?;
    // Real, effective, saved: what the kernel notes of a connection is the second.
    let uids = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
    let effective = uids.split_whitespace().nth(1)?.parse::<u32>().ok()?;
    (effective == credentials.uid).then_some(pidfd)
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

    const CONNECTS_TO: &str = "PAGETIDE_TEST_CONNECTS_TO";

    /// The process that connects, when the next test has started it.
    #[test]
    fn a_client() {
        if let Some(path) = std::env::var_os(CONNECTS_TO) {
            UnixStream::connect(path).unwrap();
        }
    }

    /// Starts a process with this number, which does nothing.
    fn start_with(pid: i32) -> std::io::Result<Pid> {
        let numbers = [pid];
        // SAFETY: clone_args is integers, for which zero is a value.
        let mut args: libc::clone_args = unsafe { std::mem::zeroed() };
        args.exit_signal = libc::SIGCHLD as u64;
        args.set_tid = numbers.as_ptr() as u64;
        args.set_tid_size = 1;
        // SAFETY: clone3 without CLONE_VM requires what fork does: the child calls nothing that another thread of this process
        // may have been in. It waits for its end.
        match unsafe { libc::syscall(libc::SYS_clone3, &raw const args, size_of_val(&args)) } {
            0 => {
                // SAFETY: close_range requires that nothing uses the descriptors any more: this process only waits.
                unsafe { libc::close_range(0, libc::c_uint::MAX, 0) };
                loop {
                    // SAFETY: pause requires nothing.
                    unsafe { libc::pause() };
                }
            }
            ..0 => Err(std::io::Error::last_os_error()),
            child => Ok(Pid::from_raw(i32::try_from(child).unwrap()).unwrap()),
        }
    }

    /// Kind: a number that was given again. The process that connected has ended, and another one has its number.
    #[test]
    fn no_other_process_is_killed_for_one_that_has_ended() {
        use rustix::process::{WaitOptions, kill_process, waitpid};
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let mut client = std::process::Command::new(std::env::current_exe().unwrap());
        client.args(["--exact", "peer::tests::a_client"]);
        client.env(CONNECTS_TO, &path);
        client.stdout(std::process::Stdio::null());
        let mut client = client.spawn().unwrap();
        let (stream, _) = listener.accept().unwrap();
        assert!(client.wait().unwrap().success());
        let pid = credentials_of(stream.as_fd()).unwrap().pid;
        let bystander = match start_with(pid) {
            Ok(bystander) => bystander,
            Err(error) => {
                println!("SKIP: no process gets the number {pid} again: {error}");
                return;
            }
        };
        let peer = Peer::of(&stream);
        let killed = peer.as_ref().map_or_else(|errno| Err(*errno), Peer::kill);
        // A signal that was sent before comes first.
        kill_process(bystander, Signal::TERM).unwrap();
        let (_, status) = waitpid(Some(bystander), WaitOptions::empty())
            .unwrap()
            .unwrap();
        // Kernels before 6.5 have no better name of the process than its number.
        // SAFETY: get requires a type that is valid for whatever the option writes: an integer.
        let pidfd = unsafe { get::<i32>(stream.as_fd(), libc::SO_PEERPIDFD) };
        // SAFETY: from_raw_fd requires an open descriptor without another owner: the kernel has just made it for this call.
        let pidfd = pidfd.map(|pidfd| unsafe { OwnedFd::from_raw_fd(pidfd) });
        if matches!(pidfd, Err(Errno::NOPROTOOPT)) {
            println!("SKIP: this kernel has no SO_PEERPIDFD (Linux 6.5)");
            return;
        }
        assert_eq!(killed, Err(Errno::SRCH));
        assert_eq!(status.terminating_signal(), Some(libc::SIGTERM));
    }

    #[test]
    fn another_kind_of_descriptor_is_refused() {
        let file = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        assert!(Peer::of(&UnixStream::from(file)).is_err());
    }
}
