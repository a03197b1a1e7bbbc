//! What is done at the word of a client of the control socket.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::binding_table::BindingTable;
use crate::control::channel::Reply;
use crate::control::message::{Answer, Socket, SocketState};
use crate::options::Binding;

use super::{Attempt, Entry, Origin, Sockets};
use crate::metrics::SocketVms;
use crate::usage::Usage;

/// A socket that is closed, and whose VMs run.
pub(super) struct Closed {
    socket: PathBuf,
    image: String,
    usage: Arc<Usage>,
}

impl Closed {
    /// A socket of a former server, at which this one serves nothing.
    pub(super) fn of_former(binding: &Binding) -> Self {
        Self {
            socket: binding.socket.clone(),
            image: binding.image.to_string(),
            usage: Arc::default(),
        }
    }

    pub(super) fn is_of(&self, binding: &Binding) -> bool {
        self.socket == binding.socket && self.image == binding.image.to_string()
    }

    pub(super) fn usage(&self) -> &Arc<Usage> {
        &self.usage
    }

    pub(super) fn vms(&self) -> SocketVms {
        SocketVms {
            socket: self.socket.display().to_string(),
            image: self.image.clone(),
            usage: Arc::clone(&self.usage),
        }
    }
}

/// A client that waits until the VMs of a socket, or of all, need the server no more.
pub(super) struct Drain {
    socket: Option<PathBuf>,
    reply: Reply<Answer>,
}

impl Drain {
    fn is_of(&self, closed: &Closed) -> bool {
        self.socket
            .as_ref()
            .is_none_or(|socket| is_at(&closed.socket, socket))
    }
}

impl Sockets {
    /// Serves an image at a socket. Answers when VMs can connect, or why they cannot.
    pub(crate) fn add_commanded(
        &mut self,
        socket: &Path,
        table: &BindingTable,
        reply: Reply<Answer>,
    ) {
        let binding = match self.checked(socket, table) {
            Ok(binding) => binding,
            Err(error) => return reply.send(Err(error)),
        };
        let Some(key) = self.key_of(socket) else {
            let key = self.add(binding, None, Arc::default());
            if let Some(entry) = self.entries.get_mut(&key) {
                entry.origin = Origin::Command;
                entry.waiting.push(reply);
            }
            return self.update();
        };
        let Some(entry) = self.entries.get_mut(&key) else {
            return;
        };
        let is_required = entry.binding.is_required;
        if entry.binding
            != (Binding {
                is_required,
                ..binding
            })
        {
            let told = format!(
                "{}: the socket has {} already, or other options; remove it first",
                socket.display(),
                entry.binding.image
            );
            return reply.send(Err(told));
        }
        if entry.is_served() {
            return reply.send(Ok(self.added(key)));
        }
        // Now, and not when it would be tried again.
        if let Attempt::Due(_) = entry.attempt {
            entry.attempt = Attempt::Due(std::time::Instant::now());
        }
        entry.waiting.push(reply);
    }

    /// The binding, if it can be one of this server's.
    fn checked(&self, socket: &Path, table: &BindingTable) -> Result<Binding, String> {
        let binding = table.binding(socket).map_err(|error| error.to_string())?;
        if self.is_drained {
            return Err("the server is drained, and serves nothing more".to_owned());
        }
        let image = match &binding.image {
            pagetide_sources::Location::Path(path) => Some(path.as_path()),
            pagetide_sources::Location::Url(_) => None,
        };
        let paths = [
            Some(socket),
            image,
            binding.state_file.as_deref(),
            binding.working_set_file.as_deref(),
        ];
        if let Some(path) = paths.into_iter().flatten().find(|path| !path.is_absolute()) {
            return Err(format!(
                "{}: the path must be absolute: the server has another directory",
                path.display()
            ));
        }
        let is_other = |entry: &Entry| entry.binding.image != binding.image;
        if let Some(file) = &self.common.options.working_set_file
            && binding.working_set_file.is_none()
            && self.entries.values().any(is_other)
        {
            return Err(format!(
                "{} is the working set of another image: --working-set-file is for one; name this socket's own, or use --working-set-dir",
                file.display()
            ));
        }
        Ok(Binding {
            is_required: false,
            ..binding
        })
    }

    /// The key of a socket, however its path is written.
    fn key_of(&self, socket: &Path) -> Option<u64> {
        let mut entries = self.entries.iter();
        let is_its = |entry: &Entry| entry.kept.is_none() && is_at(&entry.binding.socket, socket);
        entries
            .find(|(_, entry)| is_its(entry))
            .map(|(key, _)| *key)
    }

    /// The answer that a socket is served.
    pub(super) fn added(&self, key: u64) -> Answer {
        let digest = self
            .entries
            .get(&key)
            .and_then(|entry| self.digest_of(entry));
        Answer::Added {
            digest: digest.unwrap_or_default(),
        }
    }

    fn digest_of(&self, entry: &Entry) -> Option<String> {
        let image = self.images.get(&entry.binding.image)?;
        Some(image.opened().image.digest().to_string())
    }

    /// Closes a socket.
    pub(crate) fn remove_commanded(&mut self, socket: &Path, reply: Reply<Answer>) {
        let removed = self
            .key_of(socket)
            .and_then(|key| self.entries.remove(&key));
        let Some(entry) = removed else {
            let closed = self.closed.iter();
            let vms: usize = closed
                .filter(|closed| is_at(&closed.socket, socket))
                .map(|closed| closed.usage.vms())
                .sum();
            let what = match vms {
                0 => "there is no such socket".to_owned(),
                vms => format!("the socket is closed already, and has {vms} VMs"),
            };
            return reply.send(Err(format!("{}: {what}", socket.display())));
        };
        let vms = entry.common.usage.vms();
        tracing::info!(socket = %socket.display(), vms, "the socket is closed, as was asked for");
        self.retire(entry);
        self.update();
        reply.send(Ok(Answer::Removed { vms }));
    }

    /// Closes a socket. It is listed as long as it has VMs.
    pub(super) fn retire(&mut self, mut entry: Entry) {
        for reply in entry.waiting.drain(..) {
            reply.send(Err(
                "the socket was closed before its image was open".to_owned()
            ));
        }
        if let Some(listener) = entry.listener.take() {
            // It would be watched as long as the porter has it.
            let _ = rustix::event::epoll::delete(&self.poll, &*listener.socket);
            if listener.is_inherited() {
                // Another binding may claim it. Until then VMs wait there, as before the service ran.
                self.inherited.push(listener);
            }
        }
        self.closed.push(Closed {
            socket: entry.binding.socket,
            image: entry.binding.image.to_string(),
            usage: Arc::clone(&entry.common.usage),
        });
    }

    /// Closes a socket, or all of them, and has all that its VMs lack fetched. Answers when none needs the server any more.
    pub(crate) fn drain_commanded(&mut self, socket: Option<&Path>, reply: Reply<Answer>) {
        let is_wanted = |entry: &Entry| {
            let is_its = |socket| is_at(&entry.binding.socket, socket);
            entry.kept.is_none() && socket.is_none_or(is_its)
        };
        let entries = self.entries.iter().filter(|(_, entry)| is_wanted(entry));
        for key in entries.map(|(key, _)| *key).collect::<Vec<_>>() {
            if let Some(entry) = self.entries.remove(&key) {
                self.retire(entry);
            }
        }
        if socket.is_none() {
            self.is_drained = true;
            self.readiness.set_drained();
        }
        let drain = Drain {
            socket: socket.map(Path::to_owned),
            reply,
        };
        for closed in self.closed.iter().filter(|closed| drain.is_of(closed)) {
            closed.usage.drain();
        }
        self.drains.push(drain);
        let socket = socket.map_or("all".into(), |socket| socket.display().to_string());
        tracing::info!(
            socket,
            "drained, as was asked for: no further VM is taken there"
        );
        self.update();
    }

    /// Forgets closed sockets without VMs, and answers who has waited for that.
    pub(crate) fn forget_unused(&mut self) {
        self.closed.retain(|closed| closed.usage.vms() > 0);
        if self.common.stopper.is_stopping() {
            // A VM that has ended since may lack something: whoever waits is told that the server ends.
            return;
        }
        let closed = &self.closed;
        let is_done = |drain: &Drain| !closed.iter().any(|closed| drain.is_of(closed));
        let (done, waiting): (Vec<_>, Vec<_>) = self.drains.drain(..).partition(is_done);
        self.drains = waiting;
        for drain in done {
            drain.reply.send(Ok(Answer::Drained));
        }
    }

    /// All sockets, also those that are closed and have VMs.
    pub(crate) fn list(&self) -> Vec<Socket> {
        let entries = self.entries.values().filter(|entry| entry.kept.is_none());
        let open = entries.map(|entry| Socket {
            socket: entry.binding.socket.display().to_string(),
            image: entry.binding.image.to_string(),
            state: match (entry.is_served(), entry.was_tried) {
                (true, _) => SocketState::Served,
                (false, false) => SocketState::Opening,
                (false, true) => SocketState::Waiting,
            },
            vms: entry.common.usage.vms(),
            digest: self.digest_of(entry),
            error: Some(entry.error.clone()).filter(|error| !error.is_empty()),
        });
        let closed = self.closed.iter().map(|closed| Socket {
            socket: closed.socket.display().to_string(),
            image: closed.image.clone(),
            state: match closed.usage.is_draining() {
                true => SocketState::Draining,
                false => SocketState::Closed,
            },
            vms: closed.usage.vms(),
            digest: None,
            error: None,
        });
        open.chain(closed).collect()
    }

    /// Sockets that are served.
    pub(crate) fn served(&self) -> usize {
        let served = self.entries.values().filter(|entry| entry.is_served());
        served.count()
    }

    /// Sockets that are not served yet.
    pub(crate) fn waiting(&self) -> usize {
        let waits = |entry: &&Entry| entry.kept.is_none() && !entry.is_served();
        self.entries.values().filter(waits).count()
    }
}

/// Whether a socket's path is this one.
fn is_at(socket: &Path, wanted: &Path) -> bool {
    std::path::absolute(socket).is_ok_and(|socket| Some(socket) == std::path::absolute(wanted).ok())
}
