//! Receiving a VMM's message and its descriptor.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use pagetide_uapi::userfaultfd::{AdoptError, Userfaultfd};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use thiserror::Error;

use crate::arriving::Arriving;
use crate::budgets::{Charge, Resource};
use crate::handshake::{HandshakeError, Parsed, VmRegion, parse};
use crate::intake::{IntakeError, receive};
use crate::native::frame::MAGIC;

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
    /// The descriptor is no userfaultfd, and was not passed on to the server.
    #[error("the VMM's descriptor is {name:?}: a VMM sends its userfaultfd")]
    OtherKind {
        /// The kernel's name of it.
        name: String,
    },
    /// Nothing was received.
    #[error("the VMM's message")]
    Intake(#[from] IntakeError),
    /// Waiting for the connection failed.
    #[error("waiting for the VMM's message")]
    Wait(#[source] Errno),
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
    pub(crate) message: Arriving,
}

impl Received {
    /// Forgets the bytes of the message.
    pub(crate) fn drop_message(&mut self, charge: &Charge) {
        let bytes = std::mem::take(&mut self.message).bytes.len();
        charge.give_back(Resource::Bytes, bytes as u64);
    }

    /// Whether a userfaultfd is among the descriptors: the client is a VMM.
    pub(crate) fn has_userfaultfd(&self) -> bool {
        let mut descriptors = self.descriptors.iter();
        descriptors.any(|descriptor| Userfaultfd::is_userfaultfd(descriptor.as_fd()))
    }

    /// Receives the message within `limit`; the descriptors stay in `self`, and are charged to the client.
    ///
    /// # Errors
    /// [`ReceiveError`].
    pub(crate) fn receive(
        &mut self,
        stream: &UnixStream,
        charge: &Charge,
        limit: Duration,
        stopping: impl Fn() -> bool,
    ) -> Result<First, ReceiveError> {
        let end = Instant::now() + limit;
        let mut room = vec![0; READ_BYTES];
        loop {
            if stopping() {
                return Err(ReceiveError::Stopping);
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let bytes = self.message.bytes.len();
                return Err(ReceiveError::Late { limit, bytes });
            }
            if !is_readable(stream, left.min(Duration::from_millis(200)))? {
                continue;
            }
            let _turn = charge.turn();
            if let Some(first) = self.go_on(stream, charge, &mut room)? {
                return Ok(first);
            }
        }
    }

    /// Reads once, and parses if that may say something new.
    fn go_on(
        &mut self,
        stream: &UnixStream,
        charge: &Charge,
        room: &mut [u8],
    ) -> Result<Option<First>, ReceiveError> {
        if !self.read(stream, charge, room)? {
            let bytes = self.message.bytes.len();
            return Err(ReceiveError::Ended { bytes });
        }
        if self.message.bytes.first() == MAGIC.first() {
            return Ok(Some(First::Native));
        }
        let count = self.descriptors.len() + usize::from(self.is_cut);
        if count > 1 {
            return Err(ReceiveError::Descriptors { count });
        }
        if self.message.is_worth_parsing()
            && let Parsed::Complete(regions, _) = parse(&self.message.bytes)?
        {
            return match count {
                1 => Ok(Some(First::Firecracker(regions))),
                _ => Err(ReceiveError::Descriptors { count }),
            };
        }
        Ok(None)
    }

    /// Reads once; false at the end of the stream.
    fn read(
        &mut self,
        stream: &UnixStream,
        charge: &Charge,
        room: &mut [u8],
    ) -> Result<bool, ReceiveError> {
        let got = match receive(stream, room, &mut self.descriptors, charge) {
            Err(IntakeError::Read(Errno::AGAIN | Errno::INTR)) => return Ok(true),
            got => got?,
        };
        if let Some(name) = got.other {
            return Err(ReceiveError::OtherKind { name });
        }
        charge
            .take(Resource::Bytes, got.bytes as u64)
            .map_err(IntakeError::Budget)?;
        self.message.push(room.get(..got.bytes).unwrap_or_default());
        self.is_cut |= got.is_cut;
        Ok(got.bytes > 0)
    }
}

fn is_readable(stream: &UnixStream, timeout: Duration) -> Result<bool, ReceiveError> {
    let timeout = Timespec::try_from(timeout).ok();
    let mut polled = [PollFd::new(stream, PollFlags::IN)];
    match poll(&mut polled, timeout.as_ref()) {
        Ok(ready) => Ok(ready > 0),
        Err(Errno::INTR) => Ok(false),
        Err(errno) => Err(ReceiveError::Wait(errno)),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use pagetide_test_support::{Sleeper, within_patience};

    use super::*;
    use crate::budgets::{Budgets, UserLimits};
    use crate::native::message::MAX_DESCRIPTORS;

    const NEVER: Duration = Duration::from_secs(24 * 3600);

    /// All handshakes of one user together take no more than one processor, and hold up nobody else's.
    #[test]
    fn of_one_user_one_handshake_is_worked_on_at_a_time() {
        let budgets = Budgets::new(UserLimits::default(), None);
        let [busy, same, other] = [1, 1, 2].map(|uid| budgets.charge(uid, 9).unwrap());
        let handshake = |charge: Charge| {
            move || {
                let (ours, mut theirs) = UnixStream::pair().unwrap();
                theirs.write_all(b"{}").unwrap();
                let mut received = Received::default();
                let refused = received.receive(&ours, &charge, NEVER, || false);
                refused.is_err_and(|error| matches!(error, ReceiveError::Handshake(_)))
            }
        };
        let turn = busy.turn();
        let waiting = Sleeper::spawn("the handshake of the same user", handshake(same));
        assert!(within_patience("another user's", handshake(other)));
        assert!(waiting.is_undisturbed());
        drop(turn);
        assert!(waiting.join());
    }

    /// What is not received takes none of the server's descriptors.
    #[test]
    fn descriptors_beyond_the_users_budget_are_not_received() {
        let limits = UserLimits {
            descriptors: 2 * MAX_DESCRIPTORS as u64,
            ..UserLimits::default()
        };
        let budgets = Budgets::new(limits, None);
        let (first, second) = (budgets.charge(1, 9).unwrap(), budgets.charge(1, 9).unwrap());
        let receive = |charge: &Charge| {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let sent = [ours.as_fd(); 16];
            let flags = rustix::net::SendFlags::empty();
            crate::native::socket::send(&theirs, b"[", &sent, flags).unwrap();
            let mut received = Received::default();
            let refused = received.receive(&ours, charge, NEVER, || false);
            (received.descriptors.len(), refused.unwrap_err())
        };
        let (count, error) = receive(&first);
        assert!(matches!(error, ReceiveError::Descriptors { count: 16 }));
        assert_eq!(count, 16);
        let (count, error) = receive(&second);
        let is_refused = matches!(error, ReceiveError::Intake(IntakeError::Budget(_)));
        assert!(is_refused, "{error}");
        assert_eq!(count, 0);
    }
}
