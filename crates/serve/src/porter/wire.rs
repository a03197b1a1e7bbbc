//! Messages between a server, its porter and the porter's children: one packet each.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use crate::log_limit::{LogLimit, log_limited};
use crate::native::message::MAX_DESCRIPTORS;

/// With a client's connection and the socket of the answer: receive once.
pub(super) const RECEIVE: &[u8] = b"R";

/// With a client's connection, and a socket that is at its end when the server has closed the connection: close it, too. By
/// a stream for this alone, from which children receive.
pub(super) const CLOSE: &[u8] = b"C";

/// Before the words of a command, with a zero byte between two: start it.
pub(super) const SPAWN: &[u8] = b"S";

/// The longest request.
pub(super) const MAX_REQUEST_BYTES: usize = 16 << 10;

/// The most bytes of a client that one answer has.
pub(super) const MAX_CLIENT_BYTES: usize = 64 << 10;

/// The most bytes of a file's name in an answer.
pub(super) const MAX_NAME_BYTES: usize = 96;

/// The bytes of an answer before the name, which is padded, and the client's bytes.
pub(super) const FIXED_BYTES: usize = 8;

/// Bounds the lines on descriptors that were dropped.
static LOGGED: LogLimit = LogLimit::new();

/// What a child answers.
#[derive(Debug)]
pub(super) struct Reply {
    /// The client's bytes, or the kernel's error.
    pub(super) result: Result<usize, Errno>,
    pub(super) is_cut: bool,
    pub(super) other: Option<String>,
}

/// The beginning of an answer, without allocation: a child of a process with threads must not allocate.
pub(super) fn head(
    errno: i32,
    is_cut: bool,
    name: Option<&[u8]>,
) -> [u8; FIXED_BYTES + MAX_NAME_BYTES] {
    let mut head = [0; FIXED_BYTES + MAX_NAME_BYTES];
    let name_bytes = name.map_or(0, |name| name.len().min(MAX_NAME_BYTES));
    let fields = errno.to_le_bytes().into_iter().chain([
        u8::from(is_cut),
        u8::from(name.is_some()),
        u8::try_from(name_bytes).unwrap_or(0),
        0,
    ]);
    let bytes = fields.chain(name.unwrap_or_default().iter().copied());
    for (place, byte) in head.iter_mut().zip(bytes) {
        *place = byte;
    }
    head
}

pub(super) fn send(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> Result<(), Errno> {
    send_parts(socket, &[IoSlice::new(bytes)], descriptors)
}

pub(super) fn send_parts(
    socket: BorrowedFd<'_>,
    parts: &[IoSlice<'_>],
    descriptors: &[BorrowedFd<'_>],
) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(Errno::TOOMANYREFS);
    }
    rustix::io::retry_on_intr(|| sendmsg(socket, parts, &mut ancillary, SendFlags::NOSIGNAL))?;
    Ok(())
}

/// Receives an answer, whose client's bytes go to `room`; `None` if there is none.
pub(super) fn receive_reply(
    socket: BorrowedFd<'_>,
    room: &mut [u8],
) -> Result<Option<(Reply, Vec<OwnedFd>)>, Errno> {
    let mut head = [0; FIXED_BYTES + MAX_NAME_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = {
        let mut parts = [IoSliceMut::new(&mut head), IoSliceMut::new(room)];
        match recvmsg(socket, &mut parts, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::CONNRESET) => return Ok(None),
            received => received?,
        }
    };
    let mut descriptors = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(given) = message {
            descriptors.extend(given);
        }
    }
    // This process has no room for descriptors, and the kernel has dropped some. The others may be a VMM's only ones.
    let is_short = received.flags.contains(ReturnFlags::CTRUNC);
    if is_short {
        log_limited!(
            error,
            LOGGED,
            received = descriptors.len(),
            "a client's descriptors are incomplete: this process has too many open (ulimit -n, LimitNOFILE=)"
        );
    }
    let Some(bytes) = received.bytes.checked_sub(head.len()) else {
        return Ok(None);
    };
    let [e0, e1, e2, e3, is_cut, has_name, name_bytes, _, name @ ..] = head;
    let name = name.get(..usize::from(name_bytes)).unwrap_or_default();
    let reply = Reply {
        result: match i32::from_le_bytes([e0, e1, e2, e3]) {
            0 => Ok(bytes),
            errno => Err(Errno::from_raw_os_error(errno)),
        },
        is_cut: is_cut != 0 || is_short,
        other: (has_name != 0).then(|| String::from_utf8_lossy(name).into_owned()),
    };
    Ok(Some((reply, descriptors)))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;

    /// As if this process had no room for the last ones.
    #[test]
    fn an_answer_of_which_the_kernel_has_dropped_descriptors_says_so() {
        const MORE: usize = 2 * MAX_DESCRIPTORS;
        let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
        let (ours, theirs) = socketpair(AddressFamily::UNIX, kind, flags, None).unwrap();
        let head = head(0, false, None);
        for (sent, is_cut) in [(MAX_DESCRIPTORS, false), (MORE, true)] {
            let beside = vec![theirs.as_fd(); sent];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MORE))];
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            assert!(ancillary.push(SendAncillaryMessage::ScmRights(&beside)));
            let parts = [IoSlice::new(&head)];
            sendmsg(&theirs, &parts, &mut ancillary, SendFlags::empty()).unwrap();
            let (reply, received) = receive_reply(ours.as_fd(), &mut []).unwrap().unwrap();
            assert_eq!(reply.is_cut, is_cut);
            assert!((MAX_DESCRIPTORS..MORE).contains(&received.len()));
        }
    }
}
