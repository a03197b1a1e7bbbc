//! The porter: a process that receives descriptors for the server, and hands it those that it can use.
//!
//! A descriptor that is received is open, and has to be closed: closing a file of a FUSE mount asks the process that serves
//! the mount, which may be the client's and never answer. Neither a thread nor a process can be ended meanwhile. So a client's
//! descriptors are received by a child of the porter that lives for one message: it passes on userfaultfds and memory files,
//! whose closing waits for nobody, and closes all others by its end. Descriptors that nobody has received are closed with their
//! connection, for which there is a child, too.

mod process;
#[cfg(test)]
mod tests;
mod wire;

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair, sockopt};

use crate::stopper::Stopper;

pub use process::receive_descriptors;
use wire::Reply;

/// The longest wait for the porter without a look at the end of the server.
const SLICE: Duration = Duration::from_millis(200);

/// How long a socket that is to be closed waits for room. The porter takes each of them at once.
const SEND_LIMIT: Duration = Duration::from_secs(1);

/// The porter, as its server sees it.
#[derive(Debug)]
pub(crate) struct Porter {
    socket: OwnedFd,
    /// For sockets that are to be closed.
    closings: OwnedFd,
    /// Those of which it does not have its own descriptor yet.
    not_taken: Mutex<Vec<OwnedFd>>,
    stopper: Stopper,
    /// It has ended. Nothing is received by it any more.
    is_gone: Arc<AtomicBool>,
}

/// What a child of the porter has received.
#[derive(Debug)]
pub(crate) struct Brought {
    pub(crate) bytes: usize,
    pub(crate) descriptors: Vec<OwnedFd>,
    /// More came than one message may have.
    pub(crate) is_cut: bool,
    /// The name of one that is of no use.
    pub(crate) other: Option<String>,
    /// At its end when all of these are closed.
    pub(crate) closing: OwnedFd,
}

impl Porter {
    /// Starts a porter: a command that calls [`receive_descriptors`].
    pub(crate) fn start(command: &[OsString], stopper: Stopper) -> io::Result<Self> {
        let Some((program, arguments)) = command.split_first() else {
            return Err(io::Error::other("no command for it"));
        };
        let (ours, theirs) = pair()?;
        let (family, flags) = (AddressFamily::UNIX, SocketFlags::CLOEXEC);
        // A stream has room for more messages than the few of a socket of packets.
        let (closings, theirs_of_closings) = socketpair(family, SocketType::STREAM, flags, None)?;
        sockopt::set_socket_timeout(&closings, sockopt::Timeout::Send, Some(SEND_LIMIT))?;
        let mut child = Command::new(program)
            .args(arguments)
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::from(theirs_of_closings))
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()?;
        // Reaped if it ends before this process.
        let reaping = std::thread::Builder::new().name("pt-porter".into());
        let is_gone: Arc<AtomicBool> = Arc::default();
        let has_ended = Arc::clone(&is_gone);
        let _ = reaping.spawn(move || {
            let _ = child.wait();
            tell_of_end(&has_ended);
        });
        Ok(Self {
            socket: ours,
            closings,
            not_taken: Mutex::default(),
            stopper,
            is_gone,
        })
    }

    /// Whether it has ended.
    pub(crate) fn is_gone(&self) -> bool {
        self.is_gone.load(Ordering::Relaxed)
    }

    /// Has the next message of a connection received, of which a look has shown that descriptors are beside it.
    ///
    /// # Errors
    /// The kernel's error; [`Errno::PIPE`] if the porter has ended.
    pub(crate) fn receive(&self, stream: &UnixStream, room: &mut [u8]) -> Result<Brought, Errno> {
        let (ours, theirs) = pair()?;
        let beside = [stream.as_fd(), theirs.as_fd()];
        let sent = self.send(wire::RECEIVE, &beside);
        drop(theirs);
        sent?;
        let Some((reply, descriptors)) = self.reply(ours.as_fd(), room)? else {
            // Its child was killed, or it could not make one.
            return Err(Errno::CHILD);
        };
        Ok(Brought {
            bytes: reply.result?,
            descriptors,
            is_cut: reply.is_cut,
            other: reply.other,
            closing: ours,
        })
    }

    /// Closes a socket. Its last close, which may take as long as a client likes, is the porter's. What the porter cannot take
    /// now stays open until the next call.
    pub(crate) fn close(&self, socket: OwnedFd) {
        let open = self.not_taken.lock();
        let mut open = open.unwrap_or_else(PoisonError::into_inner);
        open.push(socket);
        if self.is_gone() {
            return open.clear();
        }
        while let Some(next) = open.last() {
            // At its end when it is closed here, and that only after the socket.
            let Ok(is_closed) = self.hand_over(next.as_fd()) else {
                return;
            };
            open.pop();
            drop(is_closed);
        }
    }

    fn hand_over(&self, socket: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
        let (ours, theirs) = pair()?;
        let beside = [socket, theirs.as_fd()];
        wire::send(self.closings.as_fd(), wire::CLOSE, &beside)?;
        Ok(ours)
    }

    /// Has another process started, which this one may not start any more. It is not waited for.
    pub(crate) fn spawn(&self, command: &[OsString]) -> Result<(), Errno> {
        let words: Vec<&[u8]> = command.iter().map(|word| word.as_bytes()).collect();
        self.send(&[wire::SPAWN, &words.join(&0)].concat(), &[])
    }

    fn send(&self, text: &[u8], beside: &[BorrowedFd<'_>]) -> Result<(), Errno> {
        let sent = wire::send(self.socket.as_fd(), text, beside);
        if let Err(Errno::PIPE | Errno::CONNRESET | Errno::CONNREFUSED) = sent {
            tell_of_end(&self.is_gone);
        }
        sent
    }

    /// Waits for a child's answer; `None` if there is none.
    fn reply(
        &self,
        socket: BorrowedFd<'_>,
        room: &mut [u8],
    ) -> Result<Option<(Reply, Vec<OwnedFd>)>, Errno> {
        loop {
            let mut polled = [PollFd::new(&socket, PollFlags::IN)];
            let timeout = Timespec::try_from(SLICE).ok();
            match poll(&mut polled, timeout.as_ref()) {
                Ok(0) if self.stopper.is_stopping() => return Err(Errno::CANCELED),
                Ok(0) | Err(Errno::INTR) => {}
                Ok(_) => return wire::receive_reply(socket, room),
                Err(errno) => return Err(errno),
            }
        }
    }
}

impl Drop for Porter {
    fn drop(&mut self) {
        // It ends with its server, and nobody is told: not by a start that fails, either.
        self.is_gone.store(true, Ordering::Relaxed);
    }
}

/// Says once that the porter has ended.
fn tell_of_end(is_gone: &AtomicBool) {
    if !is_gone.swap(true, Ordering::Relaxed) {
        tracing::error!(
            "the porter has ended: descriptors are received by the server itself, and a client can hang its end; restart it"
        );
    }
}

/// The command of a process, out of a message.
fn command_of(words: &[u8]) -> impl Iterator<Item = &OsStr> {
    words.split(|&byte| byte == 0).map(OsStr::from_bytes)
}

fn pair() -> Result<(OwnedFd, OwnedFd), Errno> {
    let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
    socketpair(AddressFamily::UNIX, kind, flags, None)
}
