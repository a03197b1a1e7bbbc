//! The VMs of a former server, with which this one goes on.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use pagetide_sources::Location;

use super::{Server, StartError};
use crate::connection::Connection;
use crate::log_limit::log_labelled;
use crate::metrics::Metrics;
use crate::options::Options;
use crate::peer::Peer;
use crate::porter::Porter;
use crate::sockets::Resumed;
use crate::state::{DescriptorStore, KeptVm, State};
use crate::vm::{Client, chain, run};

/// Where VMs are kept, and those that a former server has left there.
pub(super) fn open_state(
    options: &Options,
    porter: &Option<Arc<Porter>>,
    store: Option<DescriptorStore>,
    metrics: &Metrics,
) -> Result<(Option<Arc<State>>, Vec<KeptVm>), StartError> {
    let on_failure = options.on_failure;
    let (state, kept) = match (&options.state, store) {
        (Some(_), Some(store)) if store.has_vms() => {
            return Err(StartError::Store(io::Error::other(
                "it has VMs of a former server, which a server with --state does not take: start one without it first",
            )));
        }
        (None, None) => return Ok((None, Vec::new())),
        (Some(keeper), _) => State::open(keeper, porter.clone(), on_failure, metrics)?,
        (None, Some(store)) => State::at_store(store, on_failure).map_err(StartError::Store)?,
    };
    Ok((Some(Arc::new(state)), kept))
}

impl Server {
    /// Goes on with the VMs of a former server.
    pub(super) fn resume_kept(&mut self) {
        for kept in std::mem::take(&mut self.kept) {
            match kept.description.image.parse::<Location>() {
                Ok(location) => self.sockets.resume(kept, &location),
                Err(error) => log_labelled!(
                    error,
                    kept.description.label().as_ref(),
                    vm = kept.id,
                    socket = kept.description.socket,
                    error = &error as &dyn std::error::Error,
                    "a VM of a former server stays asleep"
                ),
            }
        }
        self.sockets.update();
    }

    /// The client that a former server has left. It was accepted then, whatever the limits are now.
    fn client_of(&self, kept: &KeptVm) -> io::Result<Client> {
        let peer = Peer::of(&kept.stream)?;
        let charge = self.budgets.charge_anyway(peer.uid);
        if let Some(label) = kept.description.label() {
            // It has none yet.
            let _ = charge.set_label(label);
        }
        Ok(Client {
            number: kept.id,
            socket: kept.description.socket.clone(),
            stream: Connection::new(kept.stream.try_clone()?, self.common().porter.clone()),
            charge,
            peer,
            kept: None,
        })
    }

    /// Takes what was opened.
    pub(super) fn take_opened(&mut self) {
        for resumed in self.sockets.take() {
            if let Err((error, resumed)) = self.go_on(resumed) {
                self.sockets.give_back(*resumed, error);
            }
        }
        self.sockets.update();
    }

    /// Starts the thread of a VM of a former server, or gives the VM back with the reason why not.
    fn go_on(&mut self, resumed: Resumed) -> Result<(), (String, Box<Resumed>)> {
        let client = match self.client_of(&resumed.kept) {
            Ok(client) => client,
            Err(error) => return Err((error.to_string(), Box::new(resumed))),
        };
        let readers = match resumed.readers() {
            Ok(readers) => readers,
            Err(error) => return Err((chain(&error), Box::new(resumed))),
        };
        let common = Arc::clone(resumed.common());
        let held = Arc::new(Mutex::new(Some(resumed)));
        let its = Arc::clone(&held);
        let started = self.start(&common, client.number, move || {
            let Some(resumed) = take(&its) else {
                return false;
            };
            let (kept, offer, common) = resumed.into_parts();
            let description = &kept.description;
            // By the VM's own thread, so that its end is not logged before.
            log_labelled!(
                info,
                description.label().as_ref(),
                vm = kept.id,
                socket = description.socket,
                "going on with a VM of a former server"
            );
            let kept = Some(kept);
            let has_ended = run(&common, &offer, Client { kept, ..client });
            drop(readers);
            has_ended
        });
        let Err(error) = started else {
            return Ok(());
        };
        // It ended with the thread that was not started.
        common.usage.begin();
        match take(&held) {
            Some(resumed) => Err((
                format!("its thread was not started: {error}"),
                Box::new(resumed),
            )),
            None => Ok(()),
        }
    }
}

/// What the thread that was to have it has not taken.
fn take(held: &Mutex<Option<Resumed>>) -> Option<Resumed> {
    held.lock().unwrap_or_else(PoisonError::into_inner).take()
}
