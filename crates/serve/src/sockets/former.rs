//! VMs of a former server that wait for their image.

use std::collections::btree_map;
use std::path::PathBuf;
use std::sync::Arc;

use pagetide_pager::Source;
use pagetide_sources::Location;
use rustix::event::epoll::{self, EventData, EventFlags};

use super::Sockets;
use super::commanded::Closed;
use super::entry::Entry;
use crate::connection::Connection;
use crate::log_limit::log_labelled;
use crate::named_image::Offer;
use crate::options::Binding;
use crate::state::KeptVm;
use crate::usage::Usage;
use crate::vm::{Common, VmError};

/// A VM of a former server whose image is open: it goes on, or it is given back.
pub(crate) struct Resumed {
    pub(crate) kept: KeptVm,
    pub(super) offer: Arc<Offer>,
    pub(super) entry: Entry,
}

impl Resumed {
    pub(crate) fn common(&self) -> &Arc<Common> {
        &self.entry.common
    }

    /// The threads that read its image: they are there before the VM's own thread, and as long as somebody has this.
    ///
    /// # Errors
    /// [`VmError`].
    pub(crate) fn readers(&self) -> Result<Arc<dyn Source>, VmError> {
        let image = self.offer.opened(&self.entry.common.options)?;
        Ok(image.source()?)
    }

    pub(crate) fn into_parts(self) -> (KeptVm, Arc<Offer>, Arc<Common>) {
        (self.kept, self.offer, self.entry.common)
    }
}

impl Sockets {
    /// Goes on with a VM of a former server, as soon as its image is open.
    pub(crate) fn resume(&mut self, kept: KeptVm, location: &Location) {
        let socket = PathBuf::from(&kept.description.socket);
        let is_its = |entry: &&Entry| {
            entry.kept.is_none()
                && entry.binding.socket == socket
                && entry.binding.image == *location
        };
        let now = self.entries.values().find(is_its);
        // What it records goes where its socket's recordings go, and what is required of an image was required then.
        let binding = Binding {
            digest: None,
            state_file: None,
            ..now.map_or_else(
                || Binding::new(socket.clone(), location.clone()),
                |now| now.binding.clone(),
            )
        };
        let usage = now.map(|now| Arc::clone(&now.common.usage));
        let usage = usage.unwrap_or_else(|| self.usage_of_former(&binding));
        // It is there, also while its image is not.
        usage.begin();
        let entry = Entry::new(binding, &self.common, usage);
        self.hold(kept, entry);
    }

    /// Holds a VM of a former server until its image is open, and sees whether it ends before. Returns its key.
    fn hold(&mut self, kept: KeptVm, mut entry: Entry) -> u64 {
        self.last_key += 1;
        // Nobody else looks at it: while there is a server, the keeper does not.
        let token = EventData::new_u64(self.last_key);
        if let Err(error) = epoll::add(&self.poll, &kept.stream, token, EventFlags::RDHUP) {
            let text = "the end of a VM is not seen before its image is there";
            let label = kept.description.label();
            log_labelled!(warn, label.as_ref(), vm = kept.id, %error, "{text}");
        }
        entry.kept = Some(kept);
        self.entries.insert(self.last_key, entry);
        self.last_key
    }

    /// Takes back a VM that could not go on now, and tries again later.
    pub(crate) fn give_back(&mut self, resumed: Resumed, error: String) {
        let Resumed { kept, entry, .. } = resumed;
        let key = self.hold(kept, entry);
        self.fail(key, error);
    }

    /// Forgets the VM of a former server with this key, if there is one that waits for its image: its VMM has gone.
    pub(crate) fn end_kept(&mut self, key: u64) -> bool {
        let Entry { kept, common, .. } = match self.entries.entry(key) {
            btree_map::Entry::Occupied(entry) if entry.get().kept.is_some() => entry.remove(),
            _ => return false,
        };
        let Some(kept) = kept else {
            return false;
        };
        let (vm, label) = (kept.id, kept.description.label());
        log_labelled!(
            info,
            label.as_ref(),
            vm,
            socket = kept.description.socket,
            "a VM of a former server has ended before its image was there"
        );
        let _ = epoll::delete(&self.poll, &kept.stream);
        if let Some(state) = &common.state {
            state.forget(vm);
        }
        // Its last close may hang, which is the porter's affair then.
        drop(Connection::new(kept.stream, common.porter.clone()));
        common.usage.end();
        self.update();
        true
    }

    /// The VMs of a former server at a socket that is not served with their image.
    fn usage_of_former(&mut self, binding: &Binding) -> Arc<Usage> {
        let known = self.closed.iter().find(|closed| closed.is_of(binding));
        if let Some(known) = known {
            return Arc::clone(known.usage());
        }
        let closed = Closed::of_former(binding);
        let usage = Arc::clone(closed.usage());
        self.closed.push(closed);
        usage
    }

    /// Whether a VM of a former server waits for its image.
    pub(crate) fn has_kept(&self) -> bool {
        self.entries.values().any(|entry| entry.kept.is_some())
    }
}
