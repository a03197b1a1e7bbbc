//! Restores the VMs of other processes from snapshots: a userfaultfd handler for Firecracker, and for
//! VMMs that speak its protocol.
//!
//! ```text
//!  Firecracker ── Unix socket ──► Server: accepts, one thread for each VM
//!    regions (JSON) + userfaultfd      │
//!                                      ▼
//!                        Vm: handshake ─► Pager with the VM's regions
//!                         │ faults, REMOVE events          │ requests
//!                         ▼                                ▼
//!                      Serving, Prefetch            ImageSource, shared by the VMs of one image
//!                         │ first touches                  │
//!                         ▼                                ▼
//!                      Recorder ─► working set      crates/sources: a file, an image, an object
//! ```
//!
//! - [`Server`] binds the sockets, and serves until it is stopped.
//! - [`handshake`] parses Firecracker's message; [`WorkingSet`] is the file of a working set.
//! - [`control`] is what a running server is told: sockets are added, removed, drained.
//! - [`Metrics`] counts, in Prometheus' text format.
//!
//! No access of a guest ever reads zeroes in place of content. If a page's content is unavailable, the
//! thread that touches it waits, or the VMM is killed ([`OnFailure`]). When the server ends, it poisons
//! the missing pages: an access raises SIGBUS.

mod arriving;
mod binding_table;
mod budgets;
mod capture;
mod check;
mod connection;
pub mod control;
mod exporter;
#[doc(hidden)]
pub mod fuzzing;
pub mod handshake;
mod histogram;
mod image;
mod inbox;
mod intake;
mod labelled;
mod listener;
mod log_limit;
mod memory_limit;
mod metrics;
mod named_image;
pub mod native;
mod opening;
mod options;
mod parking;
mod peer;
mod porter;
mod readiness;
mod receive;
mod recorder;
mod sample;
mod seccomp;
mod server;
mod sockets;
mod state;
mod stopper;
mod task_thread;
mod turned_away;
mod usage;
mod vm;
mod working_set;
mod working_set_file;

pub use binding_table::{
    BindingTable, BindingTableError, ParseSocketError, SocketMode, SocketOwner, Switch,
};
pub use budgets::{DESCRIPTORS_OF_A_VM, UserLimits};
pub use capture::{CaptureError, Present, present_pages};
pub use check::check;
pub use exporter::{Exporter, ExporterError, MetricsAddress, ParseMetricsAddressError};
pub use intake::IntakeError;
pub use listener::ListenError;
pub use metrics::{Metrics, Totals};
pub use named_image::NoImage;
pub use options::{Binding, OnFailure, Options, ParseBindingError, WorkingSetMode};
pub use porter::receive_descriptors;
pub use receive::ReceiveError;
pub use seccomp::{Seccomp, SeccompError, SeccompMode};
pub use server::{Controller, Inherited, Server, StartError};
pub use state::{DescriptorStore, StateError, StateOptions, keep};
pub use stopper::Stopper;
pub use working_set::{FormatError, Touch, WorkingSet, WorkingSetError};
