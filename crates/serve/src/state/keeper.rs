//! The keeper's process.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::SocketFlags;
use rustix::net::accept_with;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{WaitOptions, wait};

use super::SOCKET;
use super::access::{LOCK_LIMIT, check_user, lock};
use super::wire::{DESCRIPTORS, Message, listen_at, receive, send, send_now};
use crate::connection::is_empty_for_good;

/// How long a keeper without VMs waits for a server.
const IDLE_LIMIT: Duration = Duration::from_secs(30);

/// How long a new server may leave the keeper's messages unread.
const SEND_LIMIT: Duration = Duration::from_secs(5);

/// The descriptor of a VM's connection among those of the VM.
const STREAM: usize = 1;

/// Keeps VMs for servers that use `directory`, until there is neither a VM nor a server. A server may be
/// killed: its VMs stay until another connects, or until their VMMs have gone.
///
/// # Errors
/// The kernel's error, if the directory's socket cannot be used; or that the directory has another keeper, which does not end.
pub fn keep(directory: &Path) -> io::Result<()> {
    let lock = lock(directory, LOCK_LIMIT)?;
    let path = directory.join(SOCKET);
    let mut keeper = Keeper::new(&path)?;
    let result = keeper.run();
    // Under the lock: it is this keeper's.
    let _ = std::fs::remove_file(&path);
    // Before the keeper's descriptors, of which a close may hang.
    drop(lock);
    result
}

fn is_readable(socket: &OwnedFd) -> bool {
    let mut polled = [PollFd::new(socket, PollFlags::IN)];
    poll(&mut polled, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
}

struct Keeper {
    listener: OwnedFd,
    server: Option<OwnedFd>,
    vms: BTreeMap<u64, Vec<OwnedFd>>,
    /// Descriptors of VMs that have gone, until a child can be made that closes them.
    to_close: Vec<Vec<OwnedFd>>,
    idle_since: Instant,
}

impl Keeper {
    fn new(path: &Path) -> io::Result<Self> {
        Ok(Self {
            listener: listen_at(path)?,
            server: None,
            vms: BTreeMap::new(),
            to_close: Vec::new(),
            idle_since: Instant::now(),
        })
    }

    fn run(&mut self) -> io::Result<()> {
        loop {
            if self.server.is_none()
                && self.vms.is_empty()
                && self.idle_since.elapsed() > IDLE_LIMIT
            {
                return Ok(());
            }
            let mut is_said = false;
            let mut gone = Vec::new();
            let is_new;
            {
                let mut polled = vec![PollFd::new(&self.listener, PollFlags::IN)];
                let server = self.server.as_ref();
                polled.extend(server.map(|server| PollFd::new(server, PollFlags::IN)));
                // While there is a server, it watches the connections.
                let orphans: Vec<(u64, &OwnedFd)> = match server {
                    Some(_) => Vec::new(),
                    None => self.streams().collect(),
                };
                let flags = PollFlags::RDHUP;
                polled.extend(
                    orphans
                        .iter()
                        .map(|(_, stream)| PollFd::new(*stream, flags)),
                );
                let timeout = Timespec::try_from(Duration::from_secs(1)).ok();
                match poll(&mut polled, timeout.as_ref()) {
                    Ok(_) | Err(Errno::INTR) => {}
                    Err(errno) => return Err(errno.into()),
                }
                let mut ready = polled.iter().map(|fd| !fd.revents().is_empty());
                is_new = ready.next().unwrap_or(false);
                if server.is_some() {
                    is_said = ready.next().unwrap_or(false);
                }
                let ended = orphans.iter().zip(ready).filter(|(_, is_ready)| *is_ready);
                gone.extend(ended.map(|((id, _), _)| *id));
            }
            for id in gone {
                self.forget(id);
                self.idle_since = Instant::now();
            }
            self.close_some();
            // All that the server has said, and perhaps its end, comes before the next server.
            while is_said {
                if !self.obey()? {
                    return Ok(());
                }
                is_said = self.server.as_ref().is_some_and(is_readable);
            }
            if is_new {
                self.accept(SEND_LIMIT);
            }
        }
    }

    fn streams(&self) -> impl Iterator<Item = (u64, &OwnedFd)> {
        self.vms
            .iter()
            .filter_map(|(id, descriptors)| Some((*id, descriptors.get(STREAM)?)))
    }

    fn forget(&mut self, id: u64) {
        let Some(descriptors) = self.vms.remove(&id) else {
            return;
        };
        let stream = descriptors.get(STREAM).map(AsFd::as_fd);
        if !stream.is_none_or(is_empty_for_good) {
            self.to_close.push(descriptors);
            self.close_some();
        }
    }

    /// Has a child close what a connection may hold: its last close may take as long as the client likes
    /// ([`crate::connection`]).
    fn close_some(&mut self) {
        while let Ok(Some(_)) = wait(WaitOptions::NOHANG) {}
        while let Some(descriptors) = self.to_close.pop() {
            if let Err(descriptors) = close_in_child(descriptors) {
                return self.to_close.push(descriptors);
            }
        }
    }

    /// Handles one message of the server. False: end.
    fn obey(&mut self) -> io::Result<bool> {
        let Some(server) = &self.server else {
            return Ok(true);
        };
        match receive(server.as_fd()) {
            Ok(Some((Message::Keep { id }, descriptors))) => {
                // With fewer, this process has no room for more.
                if descriptors.len() == DESCRIPTORS {
                    self.vms.insert(id, descriptors);
                    // A server that does not read is its own affair.
                    let _ = send_now(server.as_fd(), &Message::Acknowledged { id }, &[]);
                }
            }
            Ok(Some((Message::Forget { id }, _))) => self.forget(id),
            Ok(Some((Message::End, _))) if self.vms.is_empty() => return Ok(false),
            Ok(Some(_)) => {}
            // It has ended, or was killed.
            Ok(None) | Err(_) => {
                self.server = None;
                self.idle_since = Instant::now();
            }
        }
        Ok(true)
    }

    /// Accepts a server, and sends it the VMs, each within `limit`; refuses one while there is another.
    fn accept(&mut self, limit: Duration) {
        let Ok(socket) = accept_with(&self.listener, SocketFlags::CLOEXEC) else {
            return;
        };
        if self.server.is_some() || check_user(socket.as_fd()).is_err() {
            return;
        }
        // A server that does not read holds up the next one no longer.
        let set_limit = |limit| set_socket_timeout(&socket, Timeout::Send, limit);
        if set_limit(Some(limit)).is_err() {
            return;
        }
        let sent = self.vms.iter().try_for_each(|(id, descriptors)| {
            let descriptors: Vec<BorrowedFd<'_>> = descriptors.iter().map(AsFd::as_fd).collect();
            send(socket.as_fd(), &Message::Kept { id: *id }, &descriptors)
        });
        if sent
            .and_then(|()| send(socket.as_fd(), &Message::Done, &[]))
            .is_ok()
            && set_limit(None).is_ok()
        {
            self.server = Some(socket);
        }
    }
}

/// Has a child close descriptors by its end, after this process has closed them. Gives them back if there is none.
fn close_in_child(descriptors: Vec<OwnedFd>) -> Result<(), Vec<OwnedFd>> {
    // At its end when they are closed here.
    let Ok((are_closed, open)) = pipe_with(PipeFlags::CLOEXEC) else {
        return Err(descriptors);
    };
    // SAFETY: fork requires that the child calls nothing that another thread of this process may have been in: it makes system
    // calls on memory of its own stack, and ends by _exit.
    match unsafe { libc::fork() } {
        0 => {
            close_all_but(&descriptors, &are_closed);
            while let Err(Errno::INTR) = rustix::io::read(&are_closed, &mut [0; 1]) {}
            // SAFETY: _exit requires nothing. It does not return.
            unsafe { libc::_exit(0) }
        }
        ..0 => Err(descriptors),
        _ => {
            drop(descriptors);
            drop(open);
            Ok(())
        }
    }
}

/// Closes all other descriptors of a child: those of VMs that go on, which would stay open as long as it hangs.
fn close_all_but(kept: &[OwnedFd], also: &OwnedFd) {
    let close_some = |first: u32, last: u32| {
        if first <= last {
            // SAFETY: close_range requires that nothing uses these descriptors any more: this process only waits and ends.
            unsafe { libc::close_range(first, last, 0) };
        }
    };
    let is_kept = |fd: u32| {
        let mut kept = kept.iter().chain([also]);
        kept.any(|kept| u32::try_from(kept.as_raw_fd()) == Ok(fd))
    };
    let mut first = 0;
    for fd in (0..u32::MAX).filter(|&fd| is_kept(fd)).take(kept.len() + 1) {
        if let Some(last) = fd.checked_sub(1) {
            close_some(first, last);
        }
        first = fd + 1;
    }
    close_some(first, u32::MAX);
}

#[cfg(test)]
mod tests {
    use super::super::wire::connect;
    use super::*;

    /// Kind: one peer's cost is everybody's. A server that is stopped while it gets the VMs would keep them from the next one.
    #[test]
    fn a_server_that_does_not_read_is_given_up() {
        // More messages than a socket's buffer has room for: each takes some hundred bytes of it.
        let room = std::fs::read_to_string("/proc/sys/net/core/wmem_default").unwrap();
        let vms = 1000 + room.trim().parse::<u64>().unwrap() / 128;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(SOCKET);
        let mut keeper = Keeper::new(&path).unwrap();
        keeper.vms = (0..vms).map(|id| (id, Vec::new())).collect();
        let limit = Duration::from_millis(10);
        let stopped = connect(&path, limit).unwrap();
        keeper.accept(limit);
        assert!(keeper.server.is_none() && keeper.vms.len() as u64 == vms);
        // What it had been sent is all that it gets.
        let mut messages = 0;
        while receive(stopped.as_fd()).unwrap().is_some() {
            messages += 1;
        }
        assert!((1..vms).contains(&messages), "{messages}");
        // The next one gets them all.
        let next = connect(&path, limit).unwrap();
        let reading = std::thread::spawn(move || {
            let mut kept = 0;
            while let Some((message, _)) = receive(next.as_fd()).unwrap() {
                match message {
                    Message::Done => break,
                    _ => kept += 1,
                }
            }
            (next, kept)
        });
        keeper.accept(Duration::from_secs(300));
        let (_next, kept) = reading.join().unwrap();
        assert!(keeper.server.is_some() && kept == vms, "{kept}");
    }
}
