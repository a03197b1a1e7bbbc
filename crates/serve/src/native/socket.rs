//! Reading and writing a socket, with descriptors beside the bytes.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use super::message::MAX_DESCRIPTORS;

/// What one read has brought.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Got {
    /// Bytes; 0 at the end of the stream.
    pub(crate) bytes: usize,
    /// More descriptors came than one read takes; the kernel has closed the rest.
    pub(crate) is_cut: bool,
}

/// Reads once. Descriptors are added to `descriptors`.
pub(crate) fn receive(
    stream: &UnixStream,
    bytes: &mut [u8],
    descriptors: &mut Vec<OwnedFd>,
    flags: RecvFlags,
) -> Result<Got, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = flags | RecvFlags::CMSG_CLOEXEC;
    let received = recvmsg(stream, &mut [IoSliceMut::new(bytes)], &mut ancillary, flags);
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(arrived) = message {
            descriptors.extend(arrived);
        }
    }
    let message = received?;
    Ok(Got {
        bytes: message.bytes,
        is_cut: message.flags.contains(ReturnFlags::CTRUNC),
    })
}

/// Writes once, `descriptors` (at most 16) beside the first byte. Returns the number of bytes.
pub(crate) fn send(
    stream: &UnixStream,
    bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
    flags: SendFlags,
) -> Result<usize, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(Errno::TOOMANYREFS);
    }
    let flags = flags | SendFlags::NOSIGNAL;
    sendmsg(stream, &[IoSlice::new(bytes)], &mut ancillary, flags)
}
