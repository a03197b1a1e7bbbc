//! The porter's process, and its children.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::process::{Command, Stdio};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::fcntl_get_seals;
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, recvmsg};
use rustix::process::{Pid, PidfdFlags, WaitOptions, pidfd_open, waitpid};

use super::wire::{
    MAX_CLIENT_BYTES, MAX_NAME_BYTES, MAX_REQUEST_BYTES, RECEIVE, SPAWN, head, send_parts,
};
use crate::native::message::MAX_DESCRIPTORS;

/// The name of a userfaultfd in /proc/self/fd.
const USERFAULTFD: &[u8] = b"anon_inode:[userfaultfd]";

/// Receives descriptors for the server at the other end of standard input, until it has ended.
///
/// # Errors
/// The kernel's error, if standard input is no such socket.
pub fn receive_descriptors() -> io::Result<()> {
    survive_signals();
    let mut children: Vec<Child> = Vec::new();
    let server = io::stdin();
    loop {
        let is_said = wait(server.as_fd(), &mut children)?;
        if is_said && !obey(server.as_fd(), &mut children)? {
            return Ok(());
        }
    }
}

/// A child that has not ended. Descriptors whose closing hangs are its end, and nobody else's.
struct Child {
    pid: Pid,
    /// Readable when it has ended.
    end: OwnedFd,
    /// The server sees by it that the child has not ended.
    _answer: Option<OwnedFd>,
}

/// Waits for the server's next word, and forgets children that have ended. Returns whether there is a word.
fn wait(server: BorrowedFd<'_>, children: &mut Vec<Child>) -> io::Result<bool> {
    let mut polled = vec![PollFd::from_borrowed_fd(server, PollFlags::IN)];
    let ends = children.iter().map(|child| &child.end);
    polled.extend(ends.map(|end| PollFd::new(end, PollFlags::IN)));
    match poll(&mut polled, None) {
        Ok(_) | Err(Errno::INTR) => {}
        Err(errno) => return Err(errno.into()),
    }
    let mut ready = polled.iter().map(|polled| !polled.revents().is_empty());
    let is_said = ready.next().unwrap_or(false);
    let ended: Vec<bool> = ready.collect();
    let mut ended = ended.into_iter();
    children.retain(|child| {
        let has_ended = ended.next().unwrap_or(false);
        if has_ended {
            let _ = waitpid(Some(child.pid), WaitOptions::NOHANG);
        }
        !has_ended
    });
    Ok(is_said)
}

/// Handles one message of the server. False: it has ended.
fn obey(server: BorrowedFd<'_>, children: &mut Vec<Child>) -> io::Result<bool> {
    let mut text = [0; MAX_REQUEST_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [IoSliceMut::new(&mut text)];
    let bytes = match recvmsg(server, &mut parts, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
        Err(Errno::INTR) => return Ok(true),
        Err(Errno::CONNRESET) => return Ok(false),
        received => received?.bytes,
    };
    let mut given = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
            given.extend(descriptors);
        }
    }
    let text = text.get(..bytes).unwrap_or_default();
    if text.is_empty() {
        return Ok(false);
    }
    if let Some(command) = text.strip_prefix(SPAWN) {
        children.extend(spawn(command));
    } else if text == RECEIVE
        && let Ok([client, answer]) = <[OwnedFd; 2]>::try_from(given)
    {
        children.extend(receive_in_child(&client, answer));
    }
    Ok(true)
}

/// Starts a program. If that fails, whoever waits for it says so.
fn spawn(command: &[u8]) -> Option<Child> {
    let mut words = super::command_of(command);
    let mut command = Command::new(words.next()?);
    command
        .args(words)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    let pid = command.spawn().ok()?.id();
    watched(Pid::from_raw(i32::try_from(pid).ok()?)?, None)
}

fn watched(pid: Pid, answer: Option<OwnedFd>) -> Option<Child> {
    let end = pidfd_open(pid, PidfdFlags::empty()).ok()?;
    Some(Child {
        pid,
        end,
        _answer: answer,
    })
}

/// Has a child receive once, and answer. Without one, the server finds the end of the answer's socket.
fn receive_in_child(client: &OwnedFd, answer: OwnedFd) -> Option<Child> {
    // SAFETY: fork requires that the child calls nothing that another thread of this process may have been in: it makes
    // system calls on memory of its own stack, and ends by _exit.
    match unsafe { libc::fork() } {
        0 => {
            let status = i32::from(bring(client.as_fd(), answer.as_fd()).is_err());
            // SAFETY: _exit requires nothing. It does not return.
            unsafe { libc::_exit(status) }
        }
        pid => watched(Pid::from_raw(pid)?, Some(answer)),
    }
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
    send_parts(answer, &parts, good.get(..count_good).unwrap_or_default())
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
