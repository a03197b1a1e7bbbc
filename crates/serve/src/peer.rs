//! The process at the other end of a connection.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

/// A VMM's process.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) pid: i32,
    pub(crate) uid: u32,
    /// Names the process even if its pid is used again.
    pidfd: Option<OwnedFd>,
}

impl Peer {
    /// The process that connected `stream`, by SO_PEERCRED.
    pub(crate) fn of(stream: &UnixStream) -> Result<Self, Errno> {
        let credentials = socket_peercred(stream)?;
        let pid: Pid = credentials.pid;
        Ok(Self {
            pid: pid.as_raw_nonzero().get(),
            uid: credentials.uid.as_raw(),
            pidfd: pidfd_open(pid, PidfdFlags::empty()).ok(),
        })
    }

    /// Kills the process.
    pub(crate) fn kill(&self) -> Result<(), Errno> {
        let pidfd = self.pidfd.as_ref().ok_or(Errno::SRCH)?;
        pidfd_send_signal(pidfd, Signal::KILL)
    }
}
