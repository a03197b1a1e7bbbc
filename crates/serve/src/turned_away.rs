//! Clients above a limit, with the policy that a VMM without content is killed.
//!
//! Only a process that has sent a userfaultfd is a VMM: a program that looks whether somebody listens, and a client that
//! sends anything else, are let go.

use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, OnceLock};
use std::thread::Builder;
use std::time::Duration;

use crate::budgets::Charge;
use crate::peer::Peer;
use crate::receive::Received;
use crate::vm::{Common, kill};

/// Clients that wait to be looked at. Above that they are let go.
const MOST: usize = 64;

/// How long a client's message is waited for: a VMM sends it as soon as it has connected.
const PATIENCE: Duration = Duration::from_secs(1);

struct Client {
    common: Arc<Common>,
    peer: Peer,
    stream: UnixStream,
    charge: Charge,
}

/// The thread that looks at them, once there is one.
#[derive(Default)]
pub(crate) struct TurnedAway(OnceLock<Option<SyncSender<Client>>>);

impl TurnedAway {
    /// Kills the process behind a connection if it is a VMM.
    pub(crate) fn kill_if_vmm(
        &self,
        common: &Arc<Common>,
        peer: Peer,
        stream: UnixStream,
        charge: Charge,
    ) {
        let client = Client {
            common: Arc::clone(common),
            peer,
            stream,
            charge,
        };
        let Some(queue) = self.0.get_or_init(start) else {
            return;
        };
        if queue.try_send(client).is_err() {
            tracing::error!("a client above the limit was let go: too many are looked at already");
        }
    }
}

fn start() -> Option<SyncSender<Client>> {
    let (send, clients) = sync_channel(MOST);
    let thread = Builder::new().name("pt-turned-away".into());
    match thread.spawn(move || look_at(&clients)) {
        Ok(_) => Some(send),
        Err(error) => {
            tracing::error!(%error, "VMMs above the limit are not killed");
            None
        }
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
        } = client;
        let mut received = Received::default();
        let stopping = || common.stopper.is_stopping();
        // Whatever the message says: it is not served.
        let _ = received.receive(&stream, &charge, PATIENCE, stopping);
        if received.has_userfaultfd() {
            kill(&common, &peer);
        }
    }
}
