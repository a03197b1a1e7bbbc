//! Messages between a server and its keeper: one packet each, with descriptors.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, bind, listen,
    recvmsg, sendmsg, socket_with,
};
use serde::{Deserialize, Serialize};

/// The longest packet.
const MAX_BYTES: usize = 256;

/// The descriptors of one VM.
pub(super) const DESCRIPTORS: usize = 4;

/// A message, as JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Message {
    /// To the keeper, with the VM's descriptors: keep it.
    Keep {
        /// The VM's number.
        id: u64,
    },
    /// To the keeper: give the VM up.
    Forget {
        /// The VM's number.
        id: u64,
    },
    /// To the keeper: end, if nothing is kept.
    End,
    /// To the server: the VM is kept.
    Acknowledged {
        /// The VM's number.
        id: u64,
    },
    /// To a new server, with the VM's descriptors.
    Kept {
        /// The VM's number.
        id: u64,
    },
    /// To a new server: that was all.
    Done,
}

fn open() -> Result<OwnedFd, Errno> {
    socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
}

/// Connects. `WouldBlock` if there has been no room among the connections that wait to be accepted, for `limit`.
pub(super) fn connect(path: &Path, limit: Duration) -> io::Result<OwnedFd> {
    let socket = open()?;
    set_socket_timeout(&socket, Timeout::Send, Some(limit))?;
    let address = SocketAddrUnix::new(path)?;
    rustix::io::retry_on_intr(|| rustix::net::connect(&socket, &address))?;
    set_socket_timeout(&socket, Timeout::Send, None)?;
    Ok(socket)
}

/// What the name of a listening socket has at its end at first.
pub(super) const NEW: &str = ".new";

/// A listening socket that only its owner may connect to.
pub(super) fn listen_at(path: &Path) -> io::Result<OwnedFd> {
    use std::os::unix::fs::PermissionsExt;
    let socket = open()?;
    let mut new = path.as_os_str().to_owned();
    new.push(NEW);
    let _ = std::fs::remove_file(&new);
    bind(&socket, &SocketAddrUnix::new(Path::new(&new))?)?;
    std::fs::set_permissions(&new, std::fs::Permissions::from_mode(0o600))?;
    listen(&socket, 8)?;
    std::fs::rename(&new, path)?;
    Ok(socket)
}

pub(super) fn send(
    socket: BorrowedFd<'_>,
    message: &Message,
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    send_with(socket, message, descriptors, SendFlags::empty())
}

/// The same without waiting for room.
pub(super) fn send_now(
    socket: BorrowedFd<'_>,
    message: &Message,
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    send_with(socket, message, descriptors, SendFlags::DONTWAIT)
}

fn send_with(
    socket: BorrowedFd<'_>,
    message: &Message,
    descriptors: &[BorrowedFd<'_>],
    flags: SendFlags,
) -> io::Result<()> {
    let text = serde_json::to_vec(message)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::Error::other(
            "more descriptors than a message has room for",
        ));
    }
    let parts = [IoSlice::new(&text)];
    let flags = flags | SendFlags::NOSIGNAL;
    rustix::io::retry_on_intr(|| sendmsg(socket, &parts, &mut ancillary, flags))?;
    Ok(())
}

/// Receives a message; `None` at the end of the connection.
pub(super) fn receive(socket: BorrowedFd<'_>) -> io::Result<Option<(Message, Vec<OwnedFd>)>> {
    let mut text = [0; MAX_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        let mut parts = [IoSliceMut::new(&mut text)];
        match recvmsg(socket, &mut parts, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => {}
            Err(Errno::CONNRESET) => return Ok(None),
            received => break received?,
        }
    };
    let mut descriptors = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(given) = message {
            descriptors.extend(given);
        }
    }
    if received.bytes == 0 {
        return Ok(None);
    }
    let text = text.get(..received.bytes).unwrap_or_default();
    Ok(Some((serde_json::from_slice(text)?, descriptors)))
}
