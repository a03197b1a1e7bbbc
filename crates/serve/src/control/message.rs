//! What a server is asked at its control socket, and what it answers.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::binding_table::BindingTable;

/// A request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Request {
    /// Serve an image at a socket. Answered when VMs can connect.
    Add {
        /// The socket's path.
        socket: PathBuf,
        /// What is served.
        binding: BindingTable,
    },
    /// Close a socket. Its VMs are served as long as they run.
    Remove {
        /// The socket's path.
        socket: PathBuf,
    },
    /// Name all sockets.
    List,
    /// Close a socket, or all of them, and fetch all that its VMs lack. Answered when no VM needs the server any more.
    Drain {
        /// The socket's path.
        #[serde(default)]
        socket: Option<PathBuf>,
    },
    /// Tell how the server is.
    Status,
}

/// An answer to a request that was done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Answer {
    /// VMs can connect.
    Added {
        /// The digest of the image.
        digest: String,
    },
    /// The socket is closed.
    Removed {
        /// VMs of it that are still served.
        vms: usize,
    },
    /// All sockets.
    Sockets(Vec<Socket>),
    /// No VM needs the server any more.
    Drained,
    /// How the server is.
    Status(Status),
}

/// A socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Socket {
    /// Its path.
    pub socket: String,
    /// Its image.
    pub image: String,
    /// What has become of it.
    pub state: SocketState,
    /// The VMs that have connected there and have not gone, and connections that are none yet.
    pub vms: usize,
    /// The digest of the image, if it is open.
    pub digest: Option<String>,
    /// Why it is not open.
    pub error: Option<String>,
}

/// What has become of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SocketState {
    /// VMs can connect.
    Served,
    /// Its image is being opened for the first time.
    Opening,
    /// Its image or the socket cannot be opened, and is tried again.
    Waiting,
    /// It is closed, and its VMs are served as long as they run.
    Closed,
    /// It is closed, and its VMs are given all that they lack.
    Draining,
}

impl SocketState {
    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Served => "served",
            Self::Opening => "opening",
            Self::Waiting => "waiting",
            Self::Closed => "closed",
            Self::Draining => "draining",
        }
    }
}

/// How a server is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Status {
    /// The version of the program.
    pub version: String,
    /// Its process.
    pub pid: u32,
    /// Whether it takes further VMs.
    pub ready: bool,
    /// All that is wrong.
    pub troubles: Vec<String>,
    /// Sockets that are served.
    pub sockets: usize,
    /// Sockets that are not served yet.
    pub sockets_waiting: usize,
    /// VMs that are served, and connections that are none yet.
    pub vms: usize,
    /// VMs that have connected.
    pub vms_accepted: u64,
    /// VMs that were refused.
    pub vms_refused: u64,
    /// Bytes of memory of the VMs that are served.
    pub memory_bytes: u64,
    /// Regions of VMs that wait for content.
    pub stalled_regions: u64,
}
