//! What arrives at a client's connection: bytes, and descriptors that the porter has received.

use std::io::IoSliceMut;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvFlags, ReturnFlags, recvmsg};
use thiserror::Error;

use crate::budgets::{Charge, OverBudget, Resource};
use crate::native::message::MAX_DESCRIPTORS;
use crate::native::socket;

/// Why nothing was received.
#[derive(Debug, Error)]
pub enum IntakeError {
    /// There is no room for descriptors, which stay where they are.
    #[error(transparent)]
    Budget(#[from] OverBudget),
    /// The porter has no answer.
    #[error("receiving descriptors by another process")]
    Porter(#[source] Errno),
    /// The connection failed, or has nothing now.
    #[error("reading the connection")]
    Read(#[source] Errno),
}

/// What one read has brought.
#[derive(Debug, Default)]
pub(crate) struct Got {
    /// Bytes; 0 at the end of the stream.
    pub(crate) bytes: usize,
    /// More descriptors came than one read takes; the kernel has dropped the rest.
    pub(crate) is_cut: bool,
    /// The name of a descriptor that is neither a userfaultfd nor memory. It is not here.
    pub(crate) other: Option<String>,
}

/// Reads once what is there, without waiting for the client. Descriptors are added to `arrived`, and charged.
pub(crate) fn receive(
    stream: &UnixStream,
    room: &mut [u8],
    arrived: &mut Vec<OwnedFd>,
    charge: &Charge,
) -> Result<Got, IntakeError> {
    let (bytes, has_descriptors) = peek(stream.as_fd(), room).map_err(IntakeError::Read)?;
    let mut got = Got::default();
    if !has_descriptors {
        let part = room.get_mut(..bytes).unwrap_or_default();
        got.bytes = match bytes {
            0 => 0,
            _ => {
                rustix::net::recv(stream, part, RecvFlags::DONTWAIT)
                    .map_err(IntakeError::Read)?
                    .0
            }
        };
        return Ok(got);
    }
    charge.take(Resource::Descriptors, MAX_DESCRIPTORS as u64)?;
    let before = arrived.len();
    let received = receive_beside(stream, room, arrived, charge);
    let free = MAX_DESCRIPTORS.saturating_sub(arrived.len() - before);
    charge.give_back(Resource::Descriptors, free as u64);
    received
}

/// Drops the bytes that have arrived, up to the first descriptors, which stay where they are. Waits for nothing.
pub(crate) fn drop_bytes(stream: BorrowedFd<'_>) {
    let mut room = [0; 4096];
    // Not for ever, if the client keeps sending.
    for _ in 0..16 {
        let Ok((bytes @ 1.., false)) = peek(stream, &mut room) else {
            return;
        };
        let part = room.get_mut(..bytes).unwrap_or_default();
        if rustix::net::recv(stream, part, RecvFlags::DONTWAIT).is_err() {
            return;
        }
    }
}

/// Looks at what is there. Without room for descriptors the kernel opens none of them, and says that there are some.
fn peek(stream: BorrowedFd<'_>, room: &mut [u8]) -> Result<(usize, bool), Errno> {
    let mut none = RecvAncillaryBuffer::default();
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    let got = recvmsg(stream, &mut [IoSliceMut::new(room)], &mut none, flags)?;
    Ok((got.bytes, got.flags.contains(ReturnFlags::CTRUNC)))
}

fn receive_beside(
    stream: &UnixStream,
    room: &mut [u8],
    arrived: &mut Vec<OwnedFd>,
    charge: &Charge,
) -> Result<Got, IntakeError> {
    let Some(porter) = charge.porter() else {
        return receive_here(stream, room, arrived);
    };
    let mut closings = charge.closings()?;
    let brought = match porter.receive(stream, room) {
        // It has ended meanwhile.
        Err(_) if porter.is_gone() => return receive_here(stream, room, arrived),
        Err(errno @ (Errno::AGAIN | Errno::INTR)) => return Err(IntakeError::Read(errno)),
        Err(errno) => return Err(IntakeError::Porter(errno)),
        Ok(brought) => brought,
    };
    if brought.other.is_some() {
        closings.push(brought.closing);
    }
    arrived.extend(brought.descriptors);
    Ok(Got {
        bytes: brought.bytes,
        is_cut: brought.is_cut,
        other: brought.other,
    })
}

/// Without a porter.
fn receive_here(
    stream: &UnixStream,
    room: &mut [u8],
    arrived: &mut Vec<OwnedFd>,
) -> Result<Got, IntakeError> {
    let got = socket::receive(stream, room, arrived, RecvFlags::DONTWAIT);
    let got = got.map_err(IntakeError::Read)?;
    Ok(Got {
        bytes: got.bytes,
        is_cut: got.is_cut,
        other: None,
    })
}
