//! Receiving a VMM's message and its descriptor.

use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use pagetide_uapi::userfaultfd::{AdoptError, Userfaultfd};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use thiserror::Error;

use crate::handshake::{HandshakeError, Parsed, VmRegion, parse};
use crate::native::frame::MAGIC;

/// The most descriptors that one read takes. The kernel closes more, and reports that it did.
const MAX_DESCRIPTORS: usize = 16;

/// The size of one read.
const READ_BYTES: usize = 64 << 10;

/// Why a VMM was not served.
#[derive(Debug, Error)]
pub enum ReceiveError {
    /// The message makes no sense.
    #[error(transparent)]
    Handshake(#[from] HandshakeError),
    /// The VMM has closed the connection before its message was complete.
    #[error("the VMM closed the connection after {bytes} bytes of its message")]
    Ended {
        /// The bytes that arrived.
        bytes: usize,
    },
    /// The message was not complete in time.
    #[error("the message was not complete within {} s: {bytes} bytes arrived", limit.as_secs())]
    Late {
        /// The time limit.
        limit: Duration,
        /// The bytes that arrived.
        bytes: usize,
    },
    /// Not exactly one descriptor.
    #[error("the message came with {count} descriptors: a VMM sends one, its userfaultfd")]
    Descriptors {
        /// Their number; of more than sixteen, the kernel drops the rest.
        count: usize,
    },
    /// The descriptor is no userfaultfd.
    #[error("the VMM's descriptor cannot be used")]
    NotUserfaultfd(#[from] AdoptError),
    /// The connection failed.
    #[error("reading the VMM's message")]
    Read(#[source] Errno),
    /// The server ends.
    #[error("the server ends")]
    Stopping,
}

/// The protocol that a VMM speaks.
#[derive(Debug)]
pub(crate) enum First {
    /// Firecracker's, with its regions.
    Firecracker(Vec<VmRegion>),
    /// Pagetide's own. What has arrived stays in [`Received`].
    Native,
}

/// What a VMM has sent. The descriptor stays open even if the message is refused: it may be the last one,
/// and closing that would let the guest read zeroes.
#[derive(Debug, Default)]
pub(crate) struct Received {
    /// The descriptors, in their order.
    pub(crate) descriptors: Vec<OwnedFd>,
    /// There were more than sixteen; the kernel has closed the rest.
    pub(crate) is_cut: bool,
    pub(crate) message: Vec<u8>,
    /// The length of the message when it was parsed last.
    parsed: usize,
}

impl Received {
    /// Whether a userfaultfd is among the descriptors: the client is a VMM.
    pub(crate) fn has_userfaultfd(&self) -> bool {
        let mut descriptors = self.descriptors.iter();
        descriptors.any(|descriptor| Userfaultfd::is_userfaultfd(descriptor.as_fd()))
    }

    /// Receives the message within `limit`; the descriptors stay in `self`.
    ///
    /// # Errors
    /// [`ReceiveError`].
    pub(crate) fn receive(
        &mut self,
        stream: &UnixStream,
        limit: Duration,
        stopping: impl Fn() -> bool,
    ) -> Result<First, ReceiveError> {
        let end = Instant::now() + limit;
        loop {
            if stopping() {
                return Err(ReceiveError::Stopping);
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let bytes = self.message.len();
                return Err(ReceiveError::Late { limit, bytes });
            }
            if !is_readable(stream, left.min(Duration::from_millis(200)))? {
                continue;
            }
            if !self.read(stream)? {
                let bytes = self.message.len();
                return Err(ReceiveError::Ended { bytes });
            }
            if self.message.first() == MAGIC.first() {
                return Ok(First::Native);
            }
            let count = self.descriptors.len() + usize::from(self.is_cut);
            if count > 1 {
                return Err(ReceiveError::Descriptors { count });
            }
            if self.may_be_complete()
                && let Parsed::Complete(regions, _) = parse(&self.message)?
            {
                return match count {
                    1 => Ok(First::Firecracker(regions)),
                    _ => Err(ReceiveError::Descriptors { count }),
                };
            }
        }
    }

    /// Whether the message is worth parsing: a client that sends one byte at a time must not make the
    /// server parse a long message as often.
    fn may_be_complete(&mut self) -> bool {
        let is_array = self.message.trim_ascii_end().ends_with(b"]");
        let is_due = self.message.len() - self.parsed >= READ_BYTES || self.parsed == 0;
        if is_array || is_due {
            self.parsed = self.message.len();
        }
        is_array || is_due
    }

    /// Reads once; false at the end of the stream.
    fn read(&mut self, stream: &UnixStream) -> Result<bool, ReceiveError> {
        let start = self.message.len();
        self.message.resize(start + READ_BYTES, 0);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let room = self.message.get_mut(start..).unwrap_or_default();
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let received = recvmsg(stream, &mut [IoSliceMut::new(room)], &mut ancillary, flags);
        let bytes = received.as_ref().map_or(0, |message| message.bytes);
        self.message.truncate(start + bytes);
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                self.descriptors.extend(descriptors);
            }
        }
        match received {
            Ok(message) => {
                self.is_cut |= message.flags.contains(rustix::net::ReturnFlags::CTRUNC);
                Ok(message.bytes > 0)
            }
            Err(Errno::AGAIN | Errno::INTR) => Ok(true),
            Err(errno) => Err(ReceiveError::Read(errno)),
        }
    }
}

fn is_readable(stream: &UnixStream, timeout: Duration) -> Result<bool, ReceiveError> {
    let timeout = Timespec::try_from(timeout).ok();
    let mut polled = [PollFd::new(stream, PollFlags::IN)];
    match poll(&mut polled, timeout.as_ref()) {
        Ok(ready) => Ok(ready > 0),
        Err(Errno::INTR) => Ok(false),
        Err(errno) => Err(ReceiveError::Read(errno)),
    }
}
