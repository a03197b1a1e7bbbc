//! Pagetide's own handler protocol, beside Firecracker's at the same sockets.
//!
//! `docs/design/native-protocol.md` specifies it. [`frame`] and [`message`] encode and decode, without
//! I/O; [`client`] is a blocking client for VMMs.

pub(crate) mod attach;
mod attach_error;
pub mod client;
mod coding;
pub mod frame;
pub mod label;
pub mod message;
pub(crate) mod session;
pub(crate) mod share;
pub(crate) mod socket;
mod wire;

/// The highest version of the protocol that this program knows.
pub const VERSION: u16 = 2;

/// The lowest version of the protocol that this program knows.
pub const LOWEST_VERSION: u16 = 1;

/// The server offers a memfd of the image to clones.
pub const FEATURE_SHARE: u64 = 1;

/// The server hands a VM to a successor, and takes one over.
pub const FEATURE_HAND_OVER: u64 = 2;

/// The server serves memfds of VMMs in MINOR mode.
pub const FEATURE_MINOR: u64 = 4;

/// The server serves further address spaces of a VM's memory. From version 2 on.
pub const FEATURE_SPACES: u64 = 8;

/// The server puts what a client calls its VM into its log and its metrics. From version 2 on.
pub const FEATURE_LABELS: u64 = 16;

/// All features that this program knows.
pub const FEATURES: u64 =
    FEATURE_SHARE | FEATURE_HAND_OVER | FEATURE_MINOR | FEATURE_SPACES | FEATURE_LABELS;

/// The features among `features` that a version has.
pub(crate) fn features_of(version: u16, features: u64) -> u64 {
    match version {
        ..2 => features & FEATURES & !(FEATURE_SPACES | FEATURE_LABELS),
        _ => features & FEATURES,
    }
}

/// The most bytes of page maps that a successor takes before attach.
pub const MAX_MAP_BYTES: usize = 16 << 20;
