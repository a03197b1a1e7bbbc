//! Refused VMMs that stay connected: one thread for all of them.
//!
//! A VMM that was refused keeps its connection and its userfaultfd until it leaves, since its guest could read zeroes
//! otherwise. It takes neither a thread nor the room of a VM, and stays charged to its user.

use std::collections::HashMap;
use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::io::Errno;

use crate::budgets::Charge;
use crate::connection::Connection;
use crate::log_limit::{LogLimit, log_limited, log_refusal};
use crate::state::State;
use crate::stopper::Stopper;

/// The end of the server, among the numbers of those that are parked.
const STOP: u64 = u64::MAX;

/// A refused VMM.
pub(crate) struct Parked {
    pub(crate) stream: Connection,
    /// What it has sent: held open.
    pub(crate) _descriptors: Vec<OwnedFd>,
    /// Its number among the VMs of a former server, if it is one: until it leaves, another server may go on with it.
    pub(crate) kept: Option<(Arc<State>, u64)>,
    /// Of these. Given back last.
    pub(crate) charge: Charge,
}

/// Those that are there.
pub(crate) struct Parking {
    poll: OwnedFd,
    stopper: Stopper,
    /// Notified when one has left.
    left: Arc<OwnedFd>,
    lot: Mutex<Lot>,
    logged: LogLimit,
}

#[derive(Default)]
struct Lot {
    parked: HashMap<u64, Parked>,
    next: u64,
    thread: Option<JoinHandle<()>>,
    /// Nobody waits for them any more.
    is_closed: bool,
}

impl Parking {
    pub(crate) fn new(stopper: Stopper, left: Arc<OwnedFd>) -> Result<Self, Errno> {
        let poll = epoll::create(CreateFlags::CLOEXEC)?;
        epoll::add(&poll, &stopper, EventData::new_u64(STOP), EventFlags::IN)?;
        Ok(Self {
            poll,
            stopper,
            left,
            lot: Mutex::default(),
            logged: LogLimit::default(),
        })
    }

    /// Keeps a refused VMM's descriptors until it leaves, or the server ends.
    pub(crate) fn park(self: &Arc<Self>, parked: Parked) {
        let mut lot = self.lock();
        if lot.is_closed || self.stopper.is_stopping() {
            return;
        }
        if lot.thread.is_none() {
            let this = Arc::clone(self);
            let thread = Builder::new().name("pt-refused".into());
            match thread.spawn(move || this.watch()) {
                Ok(thread) => lot.thread = Some(thread),
                Err(error) => {
                    let text = "a refused VMM is let go: no thread was started";
                    log_refusal!(error, parked.charge, %error, "{text}");
                    return;
                }
            }
        }
        let number = lot.next;
        lot.next += 1;
        // What it sends is left where it is: its userfaultfd may be among it, and to drop that takes as long as it likes.
        let flags = EventFlags::RDHUP;
        let data = EventData::new_u64(number);
        if let Err(error) = epoll::add(&self.poll, &*parked.stream, data, flags) {
            log_refusal!(error, parked.charge, %error, "a refused VMM is let go");
            return;
        }
        lot.parked.insert(number, parked);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.lock().parked.is_empty()
    }

    /// Waits until nobody is watched any more: the server ends.
    pub(crate) fn end(&self) {
        let thread = self.lock().thread.take();
        // A panic was logged by the thread.
        let _ = thread.map(JoinHandle::join);
    }

    fn watch(&self) {
        let mut events = Vec::with_capacity(64);
        loop {
            match epoll::wait(
                &self.poll,
                rustix::buffer::spare_capacity(&mut events),
                None,
            ) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => {
                    log_limited!(error, self.logged, %error, "refused VMMs are let go");
                    return self.close();
                }
            }
            for event in events.drain(..) {
                match event.data.u64() {
                    STOP => return self.close(),
                    number => self.forget(number),
                }
            }
        }
    }

    /// Lets go of one that has left.
    fn forget(&self, number: u64) {
        let gone = self.lock().parked.remove(&number);
        if let Some(parked) = &gone {
            // It would be watched as long as the porter has it.
            let _ = epoll::delete(&self.poll, &*parked.stream);
            if let Some((state, id)) = &parked.kept {
                state.forget(*id);
            }
        }
        drop(gone);
        let _ = rustix::io::write(&*self.left, &1_u64.to_ne_bytes());
    }

    fn close(&self) {
        let mut lot = self.lock();
        lot.is_closed = true;
        let parked = std::mem::take(&mut lot.parked);
        drop(lot);
        drop(parked);
    }

    fn lock(&self) -> MutexGuard<'_, Lot> {
        // An entry is there or not.
        self.lot.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Parking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Parking").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

    use super::*;

    /// Kind: what a client has sent is read in order to see whether it has left, and its descriptors are lost with it.
    #[test]
    fn what_a_parked_client_sends_stays_in_its_socket() {
        let stopper = Stopper::new(Duration::from_secs(24 * 3600)).unwrap();
        let left = Arc::new(eventfd(0, EventfdFlags::CLOEXEC).unwrap());
        let parking = Arc::new(Parking::new(stopper.clone(), Arc::clone(&left)).unwrap());
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let mut same = ours.try_clone().unwrap();
        theirs.write_all(b"before").unwrap();
        parking.park(Parked {
            stream: Connection::new(ours, None),
            _descriptors: Vec::new(),
            kept: None,
            charge: Charge::alone(),
        });
        theirs.write_all(b" and after").unwrap();
        drop(theirs);
        poll(
            &mut [PollFd::from_borrowed_fd(left.as_fd(), PollFlags::IN)],
            None,
        )
        .unwrap();
        assert!(parking.is_empty());
        let mut sent = String::new();
        same.read_to_string(&mut sent).unwrap();
        assert_eq!(sent, "before and after");
        // Kind: a connection that is open elsewhere, as at the porter, is watched for ever. `same` is open.
        let mut count = [0; 8];
        rustix::io::read(&*left, &mut count).unwrap();
        let (ours, theirs) = UnixStream::pair().unwrap();
        parking.park(Parked {
            stream: Connection::new(ours, None),
            _descriptors: Vec::new(),
            kept: None,
            charge: Charge::alone(),
        });
        drop(theirs);
        rustix::io::read(&*left, &mut count).unwrap();
        assert_eq!(u64::from_ne_bytes(count), 1);
        stopper.stop();
        parking.end();
    }
}
