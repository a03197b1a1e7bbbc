//! The porter's process, and its children.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::fcntl_get_seals;
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, recvmsg};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, PidfdFlags, WaitOptions, pidfd_open, wait};

use super::wire::{
    CLOSE, MAX_CLIENT_BYTES, MAX_NAME_BYTES, MAX_REQUEST_BYTES, RECEIVE, SPAWN, head, send_parts,
};
use crate::native::message::MAX_DESCRIPTORS;

/// The name of a userfaultfd in /proc/self/fd.
const USERFAULTFD: &[u8] = b"anon_inode:[userfaultfd]";

/// Before something is tried again for which there was no room.
const PAUSE: Duration = Duration::from_millis(50);

/// Children that close connections, at a time: each may hang. With as many, further connections are kept open by other
/// children.
pub(super) const MOST_CLOSING: usize = 16;

/// Connections that one child closes: a child costs more than a connection that does not hang.
const MOST_AT_ONCE: usize = 8;

/// Connections that one child keeps open.
pub(super) const MOST_KEPT: usize = 256;

/// Receives descriptors for the server at the other end of standard input, until it has ended. Closes connections that come by
/// standard output.
///
/// # Errors
/// The kernel's error, if standard input or output is no such socket.
pub fn receive_descriptors() -> io::Result<()> {
    survive_signals();
    let (server, closings) = (io::stdin(), io::stdout());
    let mut children = Children::default();
    loop {
        let [is_said, is_to_close] = children.wait(server.as_fd(), closings.as_fd())?;
        if is_to_close {
            children.take_connection(closings.as_fd());
        }
        if is_said && !children.obey(server.as_fd())? {
            return Ok(());
        }
    }
}

/// A child that has not ended. Descriptors whose closing hangs are its end, and nobody else's.
struct Child {
    /// Readable when it has ended.
    end: OwnedFd,
    purpose: Purpose,
}

enum Purpose {
    /// The server sees by this socket that the child has not ended.
    Receive {
        answer: OwnedFd,
    },
    Close,
    /// Keeps connections open until `until` is closed here.
    Keep {
        until: OwnedFd,
        /// At its end when the child receives no more.
        receives: OwnedFd,
    },
    /// The same, and receives no more.
    KeepAll {
        until: OwnedFd,
    },
    Program,
}

impl Child {
    /// A child that keeps connections has as many as it may have.
    fn has_received_all(&mut self) {
        self.purpose = match std::mem::replace(&mut self.purpose, Purpose::Program) {
            Purpose::Keep { until, .. } => Purpose::KeepAll { until },
            purpose => purpose,
        };
    }
}

impl Purpose {
    /// The descriptor whose last close tells something: to the server that the child has ended, or to the child that it is to
    /// end.
    fn told_by(&self) -> Option<&OwnedFd> {
        match self {
            Self::Receive { answer } => Some(answer),
            Self::Keep { until, .. } | Self::KeepAll { until } => Some(until),
            Self::Close | Self::Program => None,
        }
    }
}

#[derive(Default)]
struct Children {
    watched: Vec<Child>,
    /// There may be others, whose end is not seen: they are looked for now and then.
    has_unwatched: bool,
}

impl Children {
    /// Waits for the server's next word, and forgets children that have ended. Returns whether there is a word, and whether
    /// there is a connection to close.
    fn wait(
        &mut self,
        server: BorrowedFd<'_>,
        closings: BorrowedFd<'_>,
    ) -> Result<[bool; 2], Errno> {
        // There is one at most.
        let receiving = self.watched.iter().find_map(|child| match &child.purpose {
            Purpose::Keep { receives, .. } => Some(receives),
            _ => None,
        });
        let of_closings = match receiving {
            Some(receives) => PollFd::new(receives, PollFlags::IN),
            None => PollFd::from_borrowed_fd(closings, PollFlags::IN),
        };
        let is_receiving = receiving.is_some();
        let mut polled = vec![PollFd::from_borrowed_fd(server, PollFlags::IN), of_closings];
        let ends = self.watched.iter().map(|child| &child.end);
        polled.extend(ends.map(|end| PollFd::new(end, PollFlags::IN)));
        let timeout = self.has_unwatched.then_some(Timespec {
            tv_sec: 1,
            tv_nsec: 0,
        });
        match poll(&mut polled, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
        let ready: Vec<bool> = polled
            .iter()
            .map(|polled| !polled.revents().is_empty())
            .collect();
        let mut ready = ready.into_iter();
        let is_said = ready.next().unwrap_or(false);
        let is_second = ready.next().unwrap_or(false);
        let mut ended = ready;
        self.watched.retain(|_| !ended.next().unwrap_or(false));
        self.has_unwatched &= reap();
        if is_receiving && is_second {
            self.watched.iter_mut().for_each(Child::has_received_all);
        }
        if self.closing() < MOST_CLOSING {
            self.end_keeping();
        }
        Ok([is_said, is_second && !is_receiving])
    }

    /// Handles one message of the server. False: it has ended.
    fn obey(&mut self, server: BorrowedFd<'_>) -> io::Result<bool> {
        let mut text = [0; MAX_REQUEST_BYTES];
        let (bytes, given) = match receive_from_server(server, &mut text, RecvFlags::empty()) {
            Err(Errno::INTR) => return Ok(true),
            Err(Errno::CONNRESET) => return Ok(false),
            received => received?,
        };
        let text = text.get(..bytes).unwrap_or_default();
        if text.is_empty() {
            return Ok(false);
        }
        if let Some(command) = text.strip_prefix(SPAWN) {
            let child = spawn(command).and_then(|pid| self.watch(pid, Purpose::Program));
            self.watched.extend(child);
        } else if text == RECEIVE
            && let [Some(client), Some(answer)] = given
        {
            let child = self.receive(&client, answer);
            self.watched.extend(child);
        }
        Ok(true)
    }

    /// Has a child receive once, and answer. Without one, the server finds the end of the answer's socket.
    fn receive(&mut self, client: &OwnedFd, answer: OwnedFd) -> Option<Child> {
        let pid = self.fork(|| bring(client.as_fd(), answer.as_fd()).is_err());
        self.watch(pid, Purpose::Receive { answer })
    }

    /// Has a child receive connections that are to be closed. No other process but the server has them open.
    fn take_connection(&mut self, closings: BorrowedFd<'_>) {
        match self.closing() < MOST_CLOSING {
            true => self.close_some(closings),
            false => self.keep_open(closings),
        }
    }

    /// Has a child receive connections, and keep them open while others hang.
    fn keep_open(&mut self, closings: BorrowedFd<'_>) {
        let pipe = || pipe_with(PipeFlags::CLOEXEC);
        let (Ok((end, until)), Ok((receives, is_full))) = (pipe(), pipe()) else {
            return std::thread::sleep(PAUSE);
        };
        let pid = self.fork(|| {
            close(&until);
            keep_until(closings, &end, &is_full)
        });
        match self.watch(pid, Purpose::Keep { until, receives }) {
            Some(child) => self.watched.push(child),
            None => std::thread::sleep(PAUSE),
        }
    }

    /// The child that keeps connections open ends, and with it what it has kept, which may hang.
    fn end_keeping(&mut self) {
        for child in &mut self.watched {
            if matches!(
                child.purpose,
                Purpose::Keep { .. } | Purpose::KeepAll { .. }
            ) {
                child.purpose = Purpose::Close;
            }
        }
    }

    /// Has a child receive connections that have come, and close them by its end.
    fn close_some(&mut self, closings: BorrowedFd<'_>) {
        // At its end when the child has received, and not before: the connection would be received twice.
        let Ok((has_received, receives)) = pipe_with(PipeFlags::CLOEXEC) else {
            return std::thread::sleep(PAUSE);
        };
        let pid = self.fork(|| close_by_end(closings, &receives));
        drop(receives);
        match self.watch(pid, Purpose::Close) {
            Some(child) => {
                wait_for_end(has_received.as_fd());
                self.watched.push(child);
            }
            None => std::thread::sleep(PAUSE),
        }
    }

    /// A child with the descriptor that tells of its end; `None` if there is no child, or no descriptor.
    fn watch(&mut self, pid: i32, purpose: Purpose) -> Option<Child> {
        let pid = Pid::from_raw(pid.max(0))?;
        let end = pidfd_open(pid, PidfdFlags::empty());
        self.has_unwatched |= end.is_err();
        let end = end.ok()?;
        Some(Child { end, purpose })
    }

    fn closing(&self) -> usize {
        let is_closing = |child: &&Child| matches!(child.purpose, Purpose::Close);
        self.watched.iter().filter(is_closing).count()
    }

    /// Has a child do something, and end with status 1 if that returns true. Returns its pid, which is negative if there is
    /// none.
    fn fork(&self, work: impl FnOnce() -> bool) -> i32 {
        // SAFETY: fork requires that the child calls nothing that another thread of this process may have been in: it makes
        // system calls on memory of its own stack, and ends by _exit.
        match unsafe { libc::fork() } {
            0 => {
                // Otherwise this child's end would be waited for, too.
                for child in &self.watched {
                    child.purpose.told_by().map(close);
                }
                let status = i32::from(work());
                // SAFETY: _exit requires nothing. It does not return.
                unsafe { libc::_exit(status) }
            }
            pid => pid,
        }
    }
}

/// Receives one message, with up to two descriptors, without allocation.
fn receive_from_server(
    server: BorrowedFd<'_>,
    text: &mut [u8],
    flags: RecvFlags,
) -> Result<(usize, [Option<OwnedFd>; 2]), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [IoSliceMut::new(text)];
    let flags = flags | RecvFlags::CMSG_CLOEXEC;
    let bytes = recvmsg(server, &mut parts, &mut ancillary, flags)?.bytes;
    let mut given = [None, None];
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
            for (place, descriptor) in given.iter_mut().zip(descriptors) {
                *place = Some(descriptor);
            }
        }
    }
    Ok((bytes, given))
}

/// Starts a program. If that fails, whoever waits for it says so.
fn spawn(command: &[u8]) -> Option<i32> {
    let mut words = super::command_of(command);
    let mut command = Command::new(words.next()?);
    command
        .args(words)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    let pid = command.spawn().ok()?.id();
    i32::try_from(pid).ok()
}

/// Reaps all children that have ended, also those of which there is no descriptor. Returns whether others are left.
fn reap() -> bool {
    loop {
        // Not those of one process group: a program has its own.
        match wait(WaitOptions::NOHANG) {
            Ok(Some(_)) | Err(Errno::INTR) => {}
            left => return left.is_ok(),
        }
    }
}

/// The child: receives connections that have come, and leaves their last close to its end. Returns whether it has failed.
fn close_by_end(closings: BorrowedFd<'_>, receives: &OwnedFd) -> bool {
    let mut count = 0;
    while count < MOST_AT_ONCE && receive_connection(closings) {
        count += 1;
    }
    close(receives);
    count == 0
}

/// Receives a connection, if there is one, and waits until the server has closed it.
fn receive_connection(closings: BorrowedFd<'_>) -> bool {
    let mut text = [0; CLOSE.len()];
    let received = receive_from_server(closings, &mut text, RecvFlags::DONTWAIT);
    let Ok((1.., [Some(client), Some(is_released)])) = received else {
        return false;
    };
    // Not to be closed by the end of a scope.
    let _ = client.into_raw_fd();
    wait_for_end(is_released.as_fd());
    true
}

/// The child: receives connections, and leaves their last close to its end. Returns whether it has failed.
fn keep_until(closings: BorrowedFd<'_>, end: &OwnedFd, is_full: &OwnedFd) -> bool {
    let mut has_failed = false;
    for _ in 0..MOST_KEPT {
        let mut polled = [
            PollFd::new(end, PollFlags::IN),
            PollFd::from_borrowed_fd(closings, PollFlags::IN),
        ];
        let _ = poll(&mut polled, None);
        if !polled[0].revents().is_empty() {
            return has_failed;
        }
        if !receive_connection(closings) {
            has_failed = true;
            break;
        }
    }
    close(is_full);
    wait_for_end(end.as_fd());
    has_failed
}

/// Closes a descriptor of a child, which neither uses it again nor ends by a return.
fn close(descriptor: &OwnedFd) {
    // SAFETY: close requires that nothing uses the descriptor any more, also not by the end of its owner's scope.
    unsafe { libc::close(descriptor.as_raw_fd()) };
}

/// Waits until the other end is closed. Nothing is ever written there.
fn wait_for_end(reader: BorrowedFd<'_>) {
    while let Err(Errno::INTR) = rustix::io::read(reader, &mut [0; 1]) {}
}

/// The child: receives once, and sends on what the server can use. Closes nothing: that may take for ever.
fn bring(client: BorrowedFd<'_>, answer: BorrowedFd<'_>) -> Result<(), Errno> {
    let mut bytes = [0; MAX_CLIENT_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let received = recvmsg(
        client,
        &mut [IoSliceMut::new(&mut bytes)],
        &mut ancillary,
        flags,
    );
    let (count, is_cut, errno) = match &received {
        Ok(got) => (got.bytes, got.flags.contains(ReturnFlags::CTRUNC), 0),
        Err(errno) => (0, false, errno.raw_os_error()),
    };
    let mut name = [0; MAX_NAME_BYTES];
    let mut other: Option<usize> = None;
    let mut good = [None; MAX_DESCRIPTORS];
    let mut places = good.iter_mut();
    for message in ancillary.drain() {
        let RecvAncillaryMessage::ScmRights(descriptors) = message else {
            continue;
        };
        for descriptor in descriptors {
            // Not to be closed by the end of a scope.
            let raw = descriptor.into_raw_fd();
            // SAFETY: borrow_raw requires that it stays open meanwhile: it does until the process ends.
            let descriptor = unsafe { BorrowedFd::borrow_raw(raw) };
            match unusable(descriptor, &mut name) {
                None => {
                    if let Some(place) = places.next() {
                        *place = Some(descriptor);
                    }
                }
                Some(bytes) => other = Some(bytes),
            }
        }
    }
    let count_good = good.iter().flatten().count();
    let good = good.map(|descriptor| descriptor.unwrap_or(answer));
    let name = other.map(|bytes| name.get(..bytes).unwrap_or_default());
    let head = head(errno, is_cut, name);
    let parts = [
        IoSlice::new(&head),
        IoSlice::new(bytes.get(..count).unwrap_or_default()),
    ];
    let good = good.get(..count_good).unwrap_or_default();
    send_parts(answer, &parts, good)
}

/// The length of a descriptor's name if the server has no use for it. Neither look asks the file's owner: a name is the
/// kernel's, and only memory has seals.
fn unusable(descriptor: BorrowedFd<'_>, name: &mut [u8; MAX_NAME_BYTES]) -> Option<usize> {
    if fcntl_get_seals(descriptor).is_ok() {
        return None;
    }
    let mut path = [0; 32];
    let begin = b"/proc/self/fd/";
    let mut digits = [0; 10];
    let mut number = descriptor.as_raw_fd().unsigned_abs();
    let mut first = digits.len();
    for place in digits.iter_mut().rev() {
        *place = b'0' + u8::try_from(number % 10).unwrap_or(0);
        number /= 10;
        first -= 1;
        if number == 0 {
            break;
        }
    }
    let text = begin.iter().chain(digits.get(first..).unwrap_or_default());
    for (place, byte) in path.iter_mut().zip(text) {
        *place = *byte;
    }
    // SAFETY: readlink requires a string with an end, which the zeroes of `path` are, and as many writable bytes as it is
    // told of.
    let got = unsafe { libc::readlink(path.as_ptr().cast(), name.as_mut_ptr().cast(), name.len()) };
    let bytes = usize::try_from(got).unwrap_or(0);
    (name.get(..bytes) != Some(USERFAULTFD)).then_some(bytes)
}

/// A service manager that ends all processes of a service, or a terminal, ends the server, and the porter with it.
fn survive_signals() {
    extern "C" fn ignore(_: libc::c_int) {}
    for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
        // A handler, and not SIG_IGN, which a program that is started would inherit.
        // SAFETY: the handler does nothing, which is safe at any time.
        unsafe { libc::signal(signal, ignore as *const () as libc::sighandler_t) };
    }
}
