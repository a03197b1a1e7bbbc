//! Four programs that use the pager, in this package's directory: `rust_vmm`, a small VMM on kvm-ioctls and
//! vm-memory that adopts the pager; `epoll_handler`, an event loop that serves another process's userfaultfd;
//! `vhost_back_end`, one memory in two processes; `custom_source`, a source that is slow and fails, with retry. And
//! `restored`, what a VMM does that `pagetide serve` restores.
//!
//! `cargo run --example NAME -p pagetide-examples` runs one; `make test` runs all. Here is what some of them share: a
//! descriptor beside a message, passed over a Unix socket.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use anyhow::{Context, ensure};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

/// Sends a descriptor (SCM_RIGHTS) beside a number, such as the address of what it serves.
///
/// # Errors
/// The kernel's.
pub fn send(socket: &UnixStream, fd: BorrowedFd<'_>, number: u64) -> anyhow::Result<()> {
    send_message(socket, &number.to_ne_bytes(), fd)
}

/// Sends a descriptor (SCM_RIGHTS) beside a message.
///
/// # Errors
/// The kernel's; or the socket took a part of the message only.
pub fn send_message(socket: &UnixStream, message: &[u8], fd: BorrowedFd<'_>) -> anyhow::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let fds = [fd];
    ensure!(
        ancillary.push(SendAncillaryMessage::ScmRights(&fds)),
        "no room for a descriptor"
    );
    let parts = [IoSlice::new(message)];
    let sent = rustix::net::sendmsg(socket, &parts, &mut ancillary, SendFlags::NOSIGNAL)?;
    ensure!(
        sent == message.len(),
        "{sent} of {} bytes were sent",
        message.len()
    );
    Ok(())
}

/// Receives what [`send`] has sent.
///
/// # Errors
/// The kernel's; or the other process has ended, or has sent something else.
pub fn receive(socket: &UnixStream) -> anyhow::Result<(OwnedFd, u64)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut message = [0; 8];
    let received = rustix::net::recvmsg(
        socket,
        &mut [IoSliceMut::new(&mut message)],
        &mut ancillary,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    ensure!(
        received.bytes == message.len(),
        "the other process has sent {} bytes, and not {}",
        received.bytes,
        message.len()
    );
    let descriptor = ancillary.drain().find_map(|part| match part {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    let descriptor = descriptor.context("no descriptor has come")?;
    Ok((descriptor, u64::from_ne_bytes(message)))
}
