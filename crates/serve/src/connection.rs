//! A client's connection, whose end holds up nobody.
//!
//! What a client has sent and nobody has received is closed with the connection. It may be files, and the last close of a
//! file of a FUSE mount that writes back late waits for the process behind the mount, which may be the client's. So a
//! connection that may hold something is closed by the porter ([`crate::porter`]), and so is a listening socket, which may
//! have such connections.

use std::mem::ManuallyDrop;
use std::net::Shutdown;
use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::ioctl_fionread;
use rustix::net::sockopt::set_socket_oobinline;

use crate::intake::drop_bytes;
use crate::porter::Porter;

/// A client's connection, or a socket at which clients connect.
#[derive(Debug)]
pub(crate) struct Guarded<S: Socket> {
    /// Taken by drop alone.
    socket: ManuallyDrop<S>,
    porter: Option<Arc<Porter>>,
}

/// A client's connection.
pub(crate) type Connection = Guarded<UnixStream>;

/// What is guarded.
pub(crate) trait Socket: AsFd + Into<OwnedFd> {
    /// Whether nothing is there whose close may hang, and nothing can arrive.
    fn is_empty_for_good(&self) -> bool;
}

impl Socket for UnixStream {
    fn is_empty_for_good(&self) -> bool {
        is_empty_for_good(self.as_fd())
    }
}

impl Socket for UnixListener {
    fn is_empty_for_good(&self) -> bool {
        false
    }
}

/// Whether nothing can arrive in a connection, since the client has left or was told to end, and there are no descriptors that
/// were not received. Bytes without descriptors are dropped: most clients that are refused have sent nothing else.
pub(crate) fn is_empty_for_good(stream: BorrowedFd<'_>) -> bool {
    let mut polled = [PollFd::from_borrowed_fd(stream, PollFlags::RDHUP)];
    let has_ended = poll(&mut polled, Some(&Timespec::default())).is_ok_and(|ready| ready > 0);
    if !has_ended {
        return false;
    }
    drop_bytes(stream);
    ioctl_fionread(stream).is_ok_and(|bytes| bytes == 0)
}

impl Connection {
    pub(crate) fn new(stream: UnixStream, porter: Option<Arc<Porter>>) -> Self {
        // Otherwise the kernel drops a byte that a client has sent out of band, and files beside it, while the next is read.
        let _ = set_socket_oobinline(&stream, true);
        Self::guard(stream, porter)
    }

    /// Lets the client find the end now, and not when the connection is closed.
    pub(crate) fn end(&self) {
        let _ = self.shutdown(Shutdown::Both);
    }
}

impl<S: Socket> Guarded<S> {
    pub(crate) fn guard(socket: S, porter: Option<Arc<Porter>>) -> Self {
        let socket = ManuallyDrop::new(socket);
        Self { socket, porter }
    }

    pub(crate) fn set_porter(&mut self, porter: Option<Arc<Porter>>) {
        self.porter = porter;
    }
}

impl<S: Socket> Deref for Guarded<S> {
    type Target = S;

    fn deref(&self) -> &S {
        &self.socket
    }
}

impl<S: Socket> Drop for Guarded<S> {
    fn drop(&mut self) {
        // SAFETY: take requires that the value is not used again: this is the end of its only owner.
        let socket = unsafe { ManuallyDrop::take(&mut self.socket) };
        match &self.porter {
            Some(porter) if !socket.is_empty_for_good() => porter.close(socket.into()),
            _ => drop(socket),
        }
    }
}
