//! The keeper's process.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::SocketFlags;
use rustix::net::accept_with;

use super::wire::{DESCRIPTORS, Message, listen_at, receive, send, send_now};
use super::{SOCKET, check_user};

/// How long a keeper without VMs waits for a server.
const IDLE_LIMIT: Duration = Duration::from_secs(30);

/// The descriptor of a VM's connection among those of the VM.
const STREAM: usize = 1;

/// Keeps VMs for servers that use `directory`, until there is neither a VM nor a server. A server may be
/// killed: its VMs stay until another connects, or until their VMMs have gone.
///
/// # Errors
/// The kernel's error, if the directory's socket cannot be used.
pub fn keep(directory: &Path) -> io::Result<()> {
    let path = directory.join(SOCKET);
    let mut keeper = Keeper {
        listener: listen_at(&path)?,
        server: None,
        vms: BTreeMap::new(),
        idle_since: Instant::now(),
    };
    let result = keeper.run();
    // A successor may have replaced it in the meantime, and then starts again.
    let _ = std::fs::remove_file(&path);
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
    idle_since: Instant,
}

impl Keeper {
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
                self.vms.remove(&id);
                self.idle_since = Instant::now();
            }
            // All that the server has said, and perhaps its end, comes before the next server.
            while is_said {
                if !self.obey()? {
                    return Ok(());
                }
                is_said = self.server.as_ref().is_some_and(is_readable);
            }
            if is_new {
                self.accept();
            }
        }
    }

    fn streams(&self) -> impl Iterator<Item = (u64, &OwnedFd)> {
        self.vms
            .iter()
            .filter_map(|(id, descriptors)| Some((*id, descriptors.get(STREAM)?)))
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
            Ok(Some((Message::Forget { id }, _))) => {
                self.vms.remove(&id);
            }
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

    /// Accepts a server, and sends it the VMs; refuses one while there is another.
    fn accept(&mut self) {
        let Ok(socket) = accept_with(&self.listener, SocketFlags::CLOEXEC) else {
            return;
        };
        if self.server.is_some() || check_user(socket.as_fd()).is_err() {
            return;
        }
        let sent = self.vms.iter().try_for_each(|(id, descriptors)| {
            let descriptors: Vec<BorrowedFd<'_>> = descriptors.iter().map(AsFd::as_fd).collect();
            send(socket.as_fd(), &Message::Kept { id: *id }, &descriptors)
        });
        if sent
            .and_then(|()| send(socket.as_fd(), &Message::Done, &[]))
            .is_ok()
        {
            self.server = Some(socket);
        }
    }
}
