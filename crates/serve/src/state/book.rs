//! What a server keeps at its keeper, and the thread that talks to it.
//!
//! The server has all that the keeper has. A keeper that has ended is noticed at once, another one is started, and gets all
//! VMs again. Nobody waits for a keeper but a VM that begins, and that for a second at most.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pagetide_memory::MapFile;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;

use super::store::DescriptorStore;
use super::wire::{Message, receive, send_now};
use super::write_description;
use crate::log_limit::{LogLimit, log_limited, log_within};
use crate::native::label::VmLabel;

/// How long a VM that begins waits for its keeper.
const PATIENCE: Duration = Duration::from_secs(1);

/// The pause between two attempts to start a keeper.
const PAUSE: Duration = Duration::from_secs(1);

/// What becomes of a keeper: one that is killed again and again, or that has no room for descriptors now and then.
static LOGGED: LogLimit = LogLimit::new();

/// VMs that the service manager has no room for: clients can start any number.
static NO_ROOM: LogLimit = LogLimit::new();

/// An open descriptor, whatever owns it.
pub(crate) trait Descriptor: AsFd + fmt::Debug + Send + Sync {}

impl<T: AsFd + fmt::Debug + Send + Sync> Descriptor for T {}

/// A VM that a keeper holds, or is to hold.
#[derive(Debug)]
pub(crate) struct Held {
    /// The VM's userfaultfd.
    pub(crate) uffd: Arc<dyn Descriptor>,
    pub(crate) stream: OwnedFd,
    pub(crate) maps: Arc<MapFile>,
    /// As JSON.
    pub(crate) description: Vec<u8>,
    /// What is logged of it, if it has one.
    pub(crate) label: Option<VmLabel>,
}

impl Held {
    fn descriptors<'a>(&'a self, description: &'a OwnedFd) -> [BorrowedFd<'a>; 4] {
        let maps: &MapFile = &self.maps;
        [
            self.uffd.as_fd(),
            self.stream.as_fd(),
            maps.as_fd(),
            description.as_fd(),
        ]
    }
}

#[derive(Debug)]
struct Entry {
    held: Held,
    is_sent: bool,
    is_acknowledged: bool,
    /// There is no room for it now: it is sent when another VM's end has made room.
    is_refused: bool,
}

impl Entry {
    /// Whether nothing more is to be waited for.
    fn is_settled(&self) -> bool {
        self.is_acknowledged || self.is_refused
    }
}

#[derive(Debug, Default)]
struct Pages {
    vms: BTreeMap<u64, Entry>,
    /// VMs that the keeper is to give up.
    forgotten: Vec<u64>,
    /// There is no keeper now.
    is_lost: bool,
    /// The keeper has not answered in time: nobody waits for it until it does.
    is_silent: bool,
    /// This process cannot tell the keeper of VMs now.
    lacks: bool,
    is_ending: bool,
}

impl Pages {
    /// Whether the keeper's answer is not waited for.
    fn has_no_hope(&self) -> bool {
        self.is_lost || self.is_silent || self.lacks
    }
}

/// The VMs, for all threads.
#[derive(Debug)]
pub(super) struct Book {
    pages: Mutex<Pages>,
    changed: Condvar,
    /// Wakes the thread that talks.
    wake: OwnedFd,
}

/// How a keeper that has ended is replaced: the connection to another one.
pub(super) type Replace = Box<dyn Fn() -> io::Result<OwnedFd> + Send>;

impl Book {
    pub(super) fn new() -> Result<Self, Errno> {
        Ok(Self {
            pages: Mutex::default(),
            changed: Condvar::new(),
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        })
    }

    /// Has the keeper hold a VM. Waits until it does, unless there is none or it does not answer.
    pub(super) fn keep(&self, id: u64, held: Held) {
        self.insert(id, held, false);
        let mut pages = self.wait_for(id, Instant::now() + PATIENCE);
        let is_settled = pages.vms.get(&id).is_none_or(Entry::is_settled);
        if !is_settled && !pages.has_no_hope() {
            pages.is_silent = true;
            log_limited!(
                error,
                LOGGED,
                "the keeper does not answer: VMs are served, and not handed over"
            );
        }
    }

    /// Notes a VM that the keeper has handed to this server, and still holds.
    pub(super) fn take_over(&self, id: u64, held: Held) {
        self.insert(id, held, true);
    }

    /// Holds the userfaultfd of a VM by the descriptor that it is served by.
    pub(super) fn serve(&self, id: u64, uffd: Arc<dyn Descriptor>) {
        let before = self
            .lock()
            .vms
            .get_mut(&id)
            .map(|vm| std::mem::replace(&mut vm.held.uffd, uffd));
        // Closed without the lock.
        drop(before);
    }

    fn insert(&self, id: u64, held: Held, is_there: bool) {
        let entry = Entry {
            held,
            is_sent: is_there,
            is_acknowledged: is_there,
            is_refused: false,
        };
        self.lock().vms.insert(id, entry);
        self.wake();
    }

    pub(super) fn forget(&self, id: u64) {
        let mut pages = self.lock();
        if pages.vms.remove(&id).is_some_and(|vm| vm.is_sent) {
            pages.forgotten.push(id);
        }
        drop(pages);
        self.wake();
    }

    /// Whether a successor gets the VM: the keeper has said that it holds it, and has not ended.
    pub(super) fn is_held(&self, id: u64) -> bool {
        let pages = self.wait_for(id, Instant::now() + PATIENCE);
        !pages.is_lost && pages.vms.get(&id).is_some_and(|vm| vm.is_acknowledged)
    }

    pub(super) fn is_lost(&self) -> bool {
        self.lock().is_lost
    }

    /// Whether VMs that begin now are not handed over: there is no keeper, or it cannot be told of them.
    pub(super) fn takes_none(&self) -> bool {
        let pages = self.lock();
        pages.is_lost || pages.lacks
    }

    /// Ends the thread that talks, when it has said all.
    pub(super) fn end(&self) {
        self.lock().is_ending = true;
        self.wake();
        // It may be waiting for another keeper.
        self.changed.notify_all();
    }

    /// Waits until the keeper holds a VM, or there is no hope.
    fn wait_for(&self, id: u64, end: Instant) -> MutexGuard<'_, Pages> {
        let mut pages = self.lock();
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let is_settled = pages.vms.get(&id).is_none_or(Entry::is_settled);
            if is_settled || pages.has_no_hope() || left.is_zero() {
                return pages;
            }
            let waited = self.changed.wait_timeout(pages, left);
            pages = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn wake(&self) {
        // It fails only if the counter is full, and then it is readable.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }

    fn lock(&self) -> MutexGuard<'_, Pages> {
        // An entry is there or not.
        self.pages.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Talks to keepers until the end. `lost` is called when one has ended, and `replace` until there is another.
    pub(super) fn talk(&self, mut socket: OwnedFd, lost: impl Fn(), replace: Option<&Replace>) {
        loop {
            match self.talk_to(&socket) {
                Ok(()) => return,
                Err(error) => {
                    self.lose();
                    lost();
                    log_limited!(
                        error,
                        LOGGED,
                        %error,
                        "the keeper has ended: VMs do not outlive this server until there is another one"
                    );
                }
            }
            // One that has not ended, but could not be told something, has to see that nobody uses it any more.
            drop(socket);
            let Some(new) = self.replacement(replace) else {
                return;
            };
            socket = new;
        }
    }

    /// All VMs are to be sent again.
    fn lose(&self) {
        let mut pages = self.lock();
        for vm in pages.vms.values_mut() {
            (vm.is_sent, vm.is_acknowledged) = (false, false);
        }
        pages.forgotten.clear();
        (pages.is_lost, pages.is_silent, pages.lacks) = (true, false, false);
        drop(pages);
        self.changed.notify_all();
    }

    /// Another keeper; `None` at the end of the server, or if there can be none.
    fn replacement(&self, replace: Option<&Replace>) -> Option<OwnedFd> {
        let replace = replace?;
        let mut is_said = false;
        while !self.lock().is_ending {
            match replace() {
                Ok(socket) => {
                    let mut pages = self.lock();
                    if pages.is_ending {
                        return None;
                    }
                    pages.is_lost = false;
                    log_limited!(
                        info,
                        LOGGED,
                        vms = pages.vms.len(),
                        "another keeper gets the VMs"
                    );
                    return Some(socket);
                }
                Err(error) if !is_said => {
                    is_said = true;
                    let error = &error as &dyn std::error::Error;
                    log_limited!(
                        error,
                        LOGGED,
                        error,
                        "no other keeper was started: it is tried again"
                    );
                }
                Err(_) => {}
            }
            let pages = self.lock();
            if !pages.is_ending {
                // Woken early by a VM's end: the next attempt comes early, too.
                let _ = self.changed.wait_timeout(pages, PAUSE);
            }
        }
        None
    }

    /// Talks to one keeper until the end of the server. An error is the keeper's end.
    fn talk_to(&self, socket: &OwnedFd) -> io::Result<()> {
        let mut lacked = false;
        loop {
            let said = match self.say(socket) {
                Err(error) if has_gone(&error) => return Err(error),
                said => said,
            };
            let (lacks, has_more) = (said.is_err(), !matches!(said, Ok(false)));
            if lacks != lacked {
                self.set_lacks(lacks);
            }
            if let Err(error) = said
                && !lacked
            {
                log_limited!(error, LOGGED, %error, "the keeper is not told of VMs: it is tried again");
            }
            lacked = lacks;
            if (!has_more || lacks) && self.lock().is_ending {
                return send_now(socket.as_fd(), &Message::End, &[]);
            }
            let mut flags = PollFlags::IN;
            flags.set(PollFlags::OUT, has_more && !lacks);
            let mut polled = [
                PollFd::new(socket, flags),
                PollFd::new(&self.wake, PollFlags::IN),
            ];
            // A keeper that takes nothing does not hold the end up.
            let limit = match (has_more, lacks) {
                (_, true) => Timespec::try_from(PAUSE).ok(),
                (true, false) => Timespec::try_from(PATIENCE).ok(),
                (false, false) => None,
            };
            match poll(&mut polled, limit.as_ref()) {
                Ok(0) if self.lock().is_ending => return Ok(()),
                Ok(_) | Err(Errno::INTR) => {}
                // Without memory.
                Err(_) => std::thread::sleep(PAUSE),
            }
            let _ = rustix::io::read(&self.wake, &mut [0; 8]);
            let [of_keeper, _] = polled;
            if of_keeper
                .revents()
                .intersects(PollFlags::IN | PollFlags::HUP)
            {
                match self.hear(socket) {
                    Err(error) if has_gone(&error) => return Err(error),
                    // Without memory: it is heard later.
                    Err(_) => std::thread::sleep(PAUSE),
                    Ok(()) => {}
                }
            }
        }
    }

    fn set_lacks(&self, lacks: bool) {
        self.lock().lacks = lacks;
        self.changed.notify_all();
    }

    /// Says what is to be said, without waiting. Returns whether there is more. An error is the keeper's end
    /// ([`has_gone`]), or says what this process lacks.
    fn say(&self, socket: &OwnedFd) -> io::Result<bool> {
        let mut pages = self.lock();
        while let Some(&id) = pages.forgotten.last() {
            if !said(send_now(socket.as_fd(), &Message::Forget { id }, &[]))? {
                return Ok(true);
            }
            pages.forgotten.pop();
        }
        for (&id, vm) in pages.vms.iter_mut().filter(|(_, vm)| !vm.is_sent) {
            let held = &vm.held;
            let file = write_description(&held.description)?;
            let descriptors = held.descriptors(&file);
            if !said(send_now(
                socket.as_fd(),
                &Message::Keep { id },
                &descriptors,
            ))? {
                return Ok(true);
            }
            vm.is_sent = true;
        }
        Ok(false)
    }

    fn hear(&self, socket: &OwnedFd) -> io::Result<()> {
        match receive(socket.as_fd())? {
            None => return Err(io::ErrorKind::UnexpectedEof.into()),
            Some((Message::Acknowledged { id }, _)) => {
                let mut pages = self.lock();
                pages.is_silent = false;
                if let Some(vm) = pages.vms.get_mut(&id) {
                    vm.is_acknowledged = true;
                }
            }
            Some(_) => {}
        }
        self.changed.notify_all();
        Ok(())
    }
}

/// With a service manager as the keeper: it does not end before the server, and says only that it has handled what it got.
impl Book {
    /// Talks until the end of the server.
    pub(super) fn talk_to_store(&self, store: &DescriptorStore) {
        let mut barrier: Option<(OwnedFd, Vec<u64>)> = None;
        let mut sent = Vec::new();
        let mut has_warned = false;
        loop {
            let mut failed = None;
            let has_more = self.say_to_store(store, &mut sent).unwrap_or_else(|error| {
                failed = Some(error);
                true
            });
            if failed.is_none() && barrier.is_none() && !sent.is_empty() {
                match store.barrier() {
                    Ok(end) => barrier = Some((end, std::mem::take(&mut sent))),
                    // Without room in its socket: the next turn tries again.
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Err(error) => failed = Some(error),
                }
            }
            let is_ending = self.lock().is_ending;
            if let Some(error) = &failed {
                if !std::mem::replace(&mut has_warned, true) {
                    log_limited!(error, LOGGED, %error, "the service manager takes no descriptors: it is tried again");
                }
                if is_ending {
                    return;
                }
            }
            if is_ending && !has_more && barrier.is_none() && sent.is_empty() {
                return;
            }
            let mut polled = vec![PollFd::new(&self.wake, PollFlags::IN)];
            polled.extend(
                barrier
                    .iter()
                    .map(|(end, _)| PollFd::new(end, PollFlags::IN)),
            );
            if failed.is_none() && (has_more || (barrier.is_none() && !sent.is_empty())) {
                polled.push(PollFd::from_borrowed_fd(store.socket(), PollFlags::OUT));
            }
            // A service manager that does nothing does not hold the end up.
            let limit = match (is_ending, failed.is_some()) {
                (true, _) => Timespec::try_from(PATIENCE).ok(),
                (false, true) => Timespec::try_from(PAUSE).ok(),
                (false, false) => None,
            };
            if poll(&mut polled, limit.as_ref()) == Ok(0) && is_ending {
                return;
            }
            let _ = rustix::io::read(&self.wake, &mut [0; 8]);
            let is_handled = |(end, _): &(OwnedFd, _)| {
                let mut polled = [PollFd::new(end, PollFlags::IN)];
                poll(&mut polled, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
            };
            if let Some((_, ids)) = barrier.take_if(|barrier| is_handled(barrier)) {
                self.acknowledge(&ids);
            }
        }
    }

    /// Says what is to be said, without waiting. Returns whether there is more.
    fn say_to_store(&self, store: &DescriptorStore, sent: &mut Vec<u64>) -> io::Result<bool> {
        let mut pages = self.lock();
        while let Some(&id) = pages.forgotten.last() {
            if !said(store.remove(id))? {
                return Ok(true);
            }
            pages.forgotten.pop();
        }
        let sent_before = pages.vms.iter().filter(|(_, vm)| vm.is_sent);
        let bytes = sent_before.map(|(&id, _)| store.name_bytes(id));
        let (mut stored, mut name_bytes) =
            bytes.fold((0, 0), |(stored, all), bytes| (stored + 1, all + bytes));
        for (&id, vm) in pages.vms.iter_mut().filter(|(_, vm)| !vm.is_sent) {
            let bytes = name_bytes + store.name_bytes(id);
            if !store.has_room_for(stored + 1, bytes) {
                if !std::mem::replace(&mut vm.is_refused, true) {
                    log_within!(
                        error,
                        NO_ROOM.pass(),
                        vm.held.label.as_ref(),
                        vm = id,
                        "the service manager has no room for the VM, which does not outlive this server: raise FileDescriptorStoreMax="
                    );
                }
                continue;
            }
            let file = write_description(&vm.held.description)?;
            if !said(store.store(id, &vm.held.descriptors(&file)))? {
                return Ok(true);
            }
            if std::mem::replace(&mut vm.is_refused, false) {
                log_within!(
                    info,
                    NO_ROOM.pass(),
                    vm.held.label.as_ref(),
                    vm = id,
                    "the service manager has room for the VM now"
                );
            }
            vm.is_sent = true;
            (stored, name_bytes) = (stored + 1, bytes);
            sent.push(id);
        }
        drop(pages);
        self.changed.notify_all();
        Ok(false)
    }

    fn acknowledge(&self, ids: &[u64]) {
        let mut pages = self.lock();
        pages.is_silent = false;
        for id in ids {
            if let Some(vm) = pages.vms.get_mut(id) {
                vm.is_acknowledged = true;
            }
        }
        drop(pages);
        self.changed.notify_all();
    }
}

/// Whether an error says that the keeper has gone, or that what answers is no keeper. For the kernel's other errors the reason
/// is on this side: no memory, no descriptor for a description, too many descriptors on their way.
fn has_gone(error: &io::Error) -> bool {
    let Some(errno) = Errno::from_io_error(error) else {
        return true;
    };
    matches!(
        errno,
        Errno::PIPE | Errno::CONNRESET | Errno::CONNREFUSED | Errno::NOTCONN
    )
}

/// False if there was no room for a message.
fn said(sent: io::Result<()>) -> io::Result<bool> {
    match sent {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
#[path = "book_tests.rs"]
mod tests;
