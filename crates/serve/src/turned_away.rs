//! Clients above a limit, with the policy that a VMM without content is killed.
//!
//! Only a process that has sent a userfaultfd is a VMM: a program that looks whether somebody listens, and a client that
//! sends anything else, are let go.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use crate::budgets::Charge;
use crate::connection::Connection;
use crate::log_limit::{LogLimit, log_limited};
use crate::peer::Peer;
use crate::receive::Received;
use crate::vm::{Common, kill};

/// Clients that wait to be looked at, and those of one user. Above that they are let go.
const MOST: usize = 64;
const MOST_OF_USER: usize = 8;

/// How long a client's message is waited for: a VMM sends it as soon as it has connected.
const PATIENCE: Duration = Duration::from_secs(1);

struct Client {
    common: Arc<Common>,
    peer: Peer,
    stream: Connection,
    charge: Charge,
    _place: Place,
}

/// The thread that looks at them, once there is one.
#[derive(Default)]
pub(crate) struct TurnedAway {
    queue: Option<SyncSender<Client>>,
    thread: Option<JoinHandle<()>>,
    /// The users of those in the queue.
    waiting: Arc<Mutex<Vec<u32>>>,
    logged: LogLimit,
}

/// A client's place in the queue, until it is dropped.
struct Place {
    uid: u32,
    waiting: Arc<Mutex<Vec<u32>>>,
}

impl Place {
    fn take(uid: u32, waiting: &Arc<Mutex<Vec<u32>>>) -> Option<Self> {
        let mut users = lock(waiting);
        if users.iter().filter(|&&other| other == uid).count() >= MOST_OF_USER {
            return None;
        }
        users.push(uid);
        let waiting = Arc::clone(waiting);
        Some(Self { uid, waiting })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut users = lock(&self.waiting);
        if let Some(at) = users.iter().position(|&uid| uid == self.uid) {
            users.swap_remove(at);
        }
    }
}

fn lock(waiting: &Mutex<Vec<u32>>) -> MutexGuard<'_, Vec<u32>> {
    // One of its elements comes or goes.
    waiting.lock().unwrap_or_else(PoisonError::into_inner)
}

impl TurnedAway {
    /// Kills the process behind a connection if it is a VMM.
    pub(crate) fn kill_if_vmm(
        &mut self,
        common: &Arc<Common>,
        peer: Peer,
        stream: Connection,
        charge: Charge,
    ) {
        let uid = peer.uid;
        let client = Place::take(uid, &self.waiting).map(|place| Client {
            common: Arc::clone(common),
            peer,
            stream,
            charge,
            _place: place,
        });
        if self.thread.is_none() {
            self.start();
        }
        let send = |client| match &self.queue {
            Some(queue) => queue.try_send(client).is_ok(),
            None => false,
        };
        if !client.is_some_and(send) {
            log_limited!(
                error,
                self.logged,
                uid,
                "a client above the limit was let go: too many are looked at already"
            );
        }
    }

    fn start(&mut self) {
        let (send, clients) = sync_channel(MOST);
        let thread = Builder::new().name("pt-turned-away".into());
        match thread.spawn(move || look_at(&clients)) {
            Ok(thread) => (self.queue, self.thread) = (Some(send), Some(thread)),
            Err(error) => {
                log_limited!(error, self.logged, %error, "VMMs above the limit are not killed");
            }
        }
    }

    /// Waits until nobody is looked at any more: the server ends.
    pub(crate) fn end(&mut self) {
        self.queue = None;
        // A panic was logged by the thread.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Ends with the server, which has the other end.
fn look_at(clients: &Receiver<Client>) {
    for client in clients {
        let Client {
            common,
            peer,
            stream,
            charge,
            _place,
        } = client;
        let mut received = Received::default();
        let stopping = || common.stopper.is_stopping();
        // Whatever the message says: it is not served.
        let _ = received.receive(&stream, &charge, PATIENCE, stopping);
        if received.has_userfaultfd() {
            kill(&common, &peer, &charge);
        }
        stream.end();
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    use pagetide_test_support::within_patience;
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;
    use crate::metrics::Metrics;
    use crate::parking::Parking;
    use crate::stopper::Stopper;

    fn common() -> Arc<Common> {
        let stopper = Stopper::new(Duration::ZERO).unwrap();
        let left = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let parking = Parking::new(stopper.clone(), Arc::new(left)).unwrap();
        Arc::new(Common {
            usage: Arc::default(),
            options: Arc::default(),
            metrics: Metrics::default(),
            stopper,
            state: None,
            parking: Arc::new(parking),
            porter: None,
        })
    }

    /// Kind: a thread that is left to itself. It would be killing VMMs of a server that has ended.
    #[test]
    fn the_end_comes_when_nobody_is_looked_at_any_more() {
        let common = common();
        let mut turned_away = TurnedAway::default();
        let mut silent = || {
            let (stream, client) = UnixStream::pair().unwrap();
            let peer = Peer::of(&stream).unwrap();
            let stream = Connection::new(stream, None);
            turned_away.kill_if_vmm(&common, peer, stream, Charge::alone());
            client
        };
        // One is looked at for as long as it says nothing, and the other waits for that.
        let clients = [silent(), silent()];
        let waiting = within_patience("the end", move || {
            turned_away.end();
            turned_away.waiting
        });
        assert!(lock(&waiting).is_empty());
        for mut client in clients {
            client.set_nonblocking(true).unwrap();
            assert_eq!(client.read(&mut [0]).unwrap(), 0, "it was let go");
        }
    }

    #[test]
    fn the_clients_of_one_user_leave_room_for_those_of_others() {
        let waiting = Arc::default();
        let take = |uid| Place::take(uid, &waiting);
        let mut places: Vec<_> = (0..2 * MOST_OF_USER).map_while(|_| take(1)).collect();
        assert_eq!(places.len(), MOST_OF_USER);
        assert!(take(2).is_some());
        places.pop();
        assert!(take(1).is_some());
        drop(places);
        assert!(lock(&waiting).is_empty());
    }
}
