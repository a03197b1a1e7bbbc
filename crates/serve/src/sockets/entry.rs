//! What is to be served at one socket.

use std::sync::Arc;
use std::time::Instant;

use crate::control::channel::Reply;
use crate::control::message::Answer;
use crate::listener::Listener;
use crate::log_limit::log_labelled;
use crate::named_image::Offer;
use crate::opening::{Purpose, Task};
use crate::options::Binding;
use crate::state::KeptVm;
use crate::usage::Usage;
use crate::vm::Common;

/// When a binding is to be opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Attempt {
    /// At this time.
    Due(Instant),
    /// It is being opened, and afterwards once more, if a reload has come meanwhile.
    Running { again: bool },
    /// It is open.
    Done,
}

/// Where a binding is from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Origin {
    /// The server's options: a reload may take it away.
    Options,
    /// A client of the control socket. It stays at a reload.
    Command,
}

/// A binding that is to be served, or a VM of a former server that waits for its image.
pub(super) struct Entry {
    pub(super) binding: Binding,
    pub(super) origin: Origin,
    pub(super) kept: Option<KeptVm>,
    /// With the options of this binding.
    pub(super) common: Arc<Common>,
    pub(super) listener: Option<Listener>,
    /// What VMs get.
    pub(super) offer: Option<Arc<Offer>>,
    pub(super) attempt: Attempt,
    /// Whether a file that was written to counts as complete.
    pub(super) is_reload: bool,
    /// Whether it was tried since the server's start, or the last reload.
    pub(super) was_tried: bool,
    pub(super) failures: u32,
    /// What the log has said last.
    pub(super) error: String,
    /// Clients of the control socket that wait until it is served, or fails.
    pub(super) waiting: Vec<Reply<Answer>>,
}

impl Entry {
    pub(super) fn new(binding: Binding, common: &Common, usage: Arc<Usage>) -> Self {
        Self {
            common: common_of(&binding, common, usage),
            binding,
            origin: Origin::Options,
            kept: None,
            listener: None,
            offer: None,
            attempt: Attempt::Due(Instant::now()),
            is_reload: false,
            was_tried: false,
            failures: 0,
            error: String::new(),
            waiting: Vec::new(),
        }
    }

    pub(super) fn is_served(&self) -> bool {
        self.offer.is_some() && self.listener.is_some()
    }

    pub(super) fn purpose(&self) -> Purpose {
        match (&self.kept, &self.listener) {
            (Some(_), _) => Purpose::Resume,
            (None, Some(_)) => Purpose::Serve,
            (None, None) => Purpose::Listen,
        }
    }

    pub(super) fn task(&self, key: u64) -> Task {
        Task {
            key,
            binding: self.binding.clone(),
            common: Arc::clone(&self.common),
            purpose: self.purpose(),
        }
    }

    /// Has it looked at again, with the options of `common`.
    pub(super) fn reload(&mut self, common: &Common) {
        let usage = Arc::clone(&self.common.usage);
        self.common = common_of(&self.binding, common, usage);
        self.is_reload = true;
        self.was_tried = false;
        self.attempt = match self.attempt {
            Attempt::Running { .. } => Attempt::Running { again: true },
            Attempt::Due(_) | Attempt::Done => Attempt::Due(Instant::now()),
        };
    }

    /// Whether it is due once more.
    pub(super) fn is_stale(&self) -> bool {
        self.attempt == Attempt::Running { again: true }
    }

    pub(super) fn due(&self) -> Option<Instant> {
        match self.attempt {
            Attempt::Due(at) => Some(at),
            Attempt::Running { .. } | Attempt::Done => None,
        }
    }
}

/// What the VMs of one binding share.
fn common_of(binding: &Binding, common: &Common, usage: Arc<Usage>) -> Arc<Common> {
    Arc::new(common.with(binding.options(&common.options), usage))
}

pub(super) fn tell_of(entry: &Entry) {
    let (socket, image) = (entry.binding.socket.display(), &entry.binding.image);
    tracing::info!(%socket, %image, "listening");
}

pub(super) fn tell_of_failure(entry: &Entry, error: &str) {
    let (socket, image) = (entry.binding.socket.display(), &entry.binding.image);
    match (&entry.kept, entry.is_served()) {
        (Some(kept), _) => log_labelled!(
            error,
            kept.description.label().as_ref(),
            vm = kept.id,
            %socket,
            error,
            "a VM of a former server stays asleep; it is tried again"
        ),
        (None, true) => tracing::error!(
            %socket,
            %image,
            error,
            "new VMs are refused as long as that is so; it is tried again"
        ),
        (None, false) => {
            tracing::error!(%socket, %image, error, "not served; it is tried again");
        }
    }
}
