//! What a server does.

use std::ffi::OsString;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use pagetide_sources::{Digest, Location, OpenOptions, ParseLocationError};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::budgets::UserLimits;
use crate::state::StateOptions;

/// A Unix socket, and the image of the VMs that connect to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Binding {
    /// The socket's path.
    pub socket: PathBuf,
    /// The image.
    pub image: Location,
    /// The digest that the image must have.
    pub digest: Option<Digest>,
    /// The state file of the snapshot, which a new snapshot replaces together with the image.
    pub state_file: Option<PathBuf>,
    /// Recording and replay, if not as at the other sockets.
    pub working_set: Option<WorkingSetMode>,
    /// The file of the working set of the VMs at this socket.
    pub working_set_file: Option<PathBuf>,
    /// Whether all missing pages are fetched, if not as at the other sockets.
    pub prefetch: Option<bool>,
    /// What happens to a VM whose content is unavailable, if not as at the other sockets.
    pub on_failure: Option<OnFailure>,
    /// The permissions of the socket, if not those of the others.
    pub socket_mode: Option<u32>,
    /// The owner of the socket, if not that of the others.
    pub socket_owner: Option<(u32, u32)>,
    /// Whether a server does not start without it. Otherwise, at a reload, and where a former server has left VMs
    /// (without [`Options::once`]), a binding whose image or socket cannot be opened fails alone, and is tried again.
    pub is_required: bool,
}

impl Binding {
    /// A binding without further options.
    pub fn new(socket: impl Into<PathBuf>, image: Location) -> Self {
        Self {
            socket: socket.into(),
            image,
            digest: None,
            state_file: None,
            working_set: None,
            working_set_file: None,
            prefetch: None,
            on_failure: None,
            socket_mode: None,
            socket_owner: None,
            is_required: true,
        }
    }

    /// The options for the VMs of this binding.
    pub(crate) fn options(&self, all: &Options) -> Options {
        Options {
            working_set: self.working_set.unwrap_or(all.working_set),
            prefetch: self.prefetch.unwrap_or(all.prefetch),
            on_failure: self.on_failure.unwrap_or(all.on_failure),
            socket_mode: self.socket_mode.unwrap_or(all.socket_mode),
            socket_owner: self.socket_owner.or(all.socket_owner),
            ..all.clone()
        }
    }
}

/// A text that is no `SOCKET=IMAGE`.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ParseBindingError {
    /// There is no `=`, or nothing before it.
    #[error("{text:?} is not SOCKET=IMAGE")]
    NoSocket {
        /// The text.
        text: String,
    },
    /// No image.
    #[error(transparent)]
    Image(#[from] ParseLocationError),
}

impl FromStr for Binding {
    type Err = ParseBindingError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let found = text
            .split_once('=')
            .filter(|(socket, _)| !socket.is_empty());
        let (socket, image) =
            found.ok_or_else(|| ParseBindingError::NoSocket { text: text.into() })?;
        Ok(Self::new(socket, image.parse()?))
    }
}

/// Whether working sets are recorded and replayed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WorkingSetMode {
    /// Replay if there is one of the image, and record otherwise.
    #[default]
    Auto,
    /// Record, and merge with the one that is there.
    Record,
    /// Replay; without a working set of the image this is an error of the VM, which is served
    /// nevertheless.
    Replay,
    /// Neither.
    Off,
}

impl WorkingSetMode {
    /// Whether a VM's touches may be written to a file.
    pub(crate) fn records(self) -> bool {
        matches!(self, Self::Auto | Self::Record)
    }
}

/// What happens to a VM whose content is unavailable, or whose memory takes no content.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnFailure {
    /// A thread that touches a missing page waits. The server keeps trying.
    #[default]
    Stall,
    /// The VMM's process is killed.
    Kill,
}

/// What a server does.
#[derive(Clone, Debug)]
pub struct Options {
    /// The sockets and their images.
    pub bindings: Vec<Binding>,
    /// Whether a server may start without any.
    pub may_lack_bindings: bool,
    /// Recording and replay.
    pub working_set: WorkingSetMode,
    /// The file of the working set; beside the image by default.
    pub working_set_file: Option<PathBuf>,
    /// The directory of working sets whose file is not named: by the digests of their images.
    pub working_set_directory: Option<PathBuf>,
    /// Whether clients of the native protocol may write the working set of their image.
    pub clients_record: bool,
    /// Whether a VM by Firecracker's protocol is served whose memory has another length than the image. What the image does
    /// not have is never there.
    pub any_length: bool,
    /// Whether all missing pages are fetched while the guest runs.
    pub prefetch: bool,
    /// What happens to a VM whose content is unavailable, or whose memory takes none.
    pub on_failure: OnFailure,
    /// How long the drain of a VM of the native protocol goes on in which no further page becomes present. Then
    /// it is refused.
    pub drain_patience: Duration,
    /// How long a server that ends goes on fetching what its VMs lack. With 3.5 s it ends within 5 s of SIGTERM:
    /// the rest is for poisoning what is missing.
    pub stop_limit: Duration,
    /// The pause before a stalled region is tried again.
    pub resume_after: Duration,
    /// Whether the server ends when its last VM has gone.
    pub once: bool,
    /// The most pages that one fault installs; a power of two up to 512.
    pub fault_around_pages: u64,
    /// The permissions of the sockets.
    pub socket_mode: u32,
    /// The owner of the sockets: user and group.
    pub socket_owner: Option<(u32, u32)>,
    /// The most VMs at one time; a connection counts as one.
    pub max_vms: usize,
    /// The most of these whose clients are of one user: others find room whatever that user's programs do.
    pub max_vms_per_user: usize,
    /// The time in which a VMM must send its message.
    pub handshake_limit: Duration,
    /// What else one user's clients may take; `None` for all but an eighth of what the process may have when the server is
    /// bound.
    pub user_limits: Option<UserLimits>,
    /// The command of a process that receives descriptors for the server: a program that calls
    /// [`receive_descriptors`](crate::receive_descriptors), and its arguments. If it is empty, the server receives them
    /// itself, and a client can keep its process from ending: by a file that does not let itself be closed.
    pub porter: Vec<OsString>,
    /// Where VMs are kept for a successor of this server.
    pub state: Option<StateOptions>,
    /// How images are opened.
    pub images: OpenOptions,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            bindings: Vec::new(),
            may_lack_bindings: false,
            working_set: WorkingSetMode::Auto,
            working_set_file: None,
            working_set_directory: None,
            clients_record: false,
            any_length: false,
            prefetch: true,
            on_failure: OnFailure::Stall,
            once: false,
            fault_around_pages: 1,
            socket_mode: 0o600,
            socket_owner: None,
            max_vms: 4096,
            // All but an eighth.
            max_vms_per_user: 3584,
            user_limits: None,
            handshake_limit: Duration::from_secs(10),
            // A source that answers nothing holds prefetch up for 95 s.
            drain_patience: Duration::from_secs(120),
            stop_limit: Duration::from_millis(3500),
            resume_after: Duration::from_secs(2),
            porter: Vec::new(),
            state: None,
            images: OpenOptions::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_binding_is_split_at_its_first_equals_sign() {
        let binding: Binding = "/run/a.sock=/images/a=b.mem".parse().unwrap();
        assert_eq!(binding.socket, PathBuf::from("/run/a.sock"));
        assert_eq!(binding.image, Location::Path("/images/a=b.mem".into()));
        for bad in ["", "socket", "=image", "socket=", "socket=ftp://host/x"] {
            assert!(bad.parse::<Binding>().is_err(), "{bad}");
        }
    }
}
