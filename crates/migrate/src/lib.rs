//! Live migration as a protocol, a codec and two state machines. Nothing here performs I/O, knows KVM or a VMM, or reads
//! a clock: whoever drives the machines tells them what has happened ([`SourceEvent`], [`DestinationEvent`]), and does
//! what they say ([`SourceAction`], [`DestinationAction`]), in order.
//!
//! docs/design/migration-protocol.md is the protocol: the hand-over of the VM, every message with its bounds, the
//! records, and the numbered guards.
//!
//! - [`Source`] and [`Destination`]: the machines;
//! - [`Message`], [`Frame`], [`Decoder`]: the codec; [`page_checksum`];
//! - [`handshake`]: versions, features, and the proof that a stream belongs to its session;
//! - [`journal`]: what a side must still know after its process has died;
//! - [`convergence`]: whether precopy goes on;
//! - [`times`]: what callers measure;
//! - [`PageSet`], [`RoundBytes`], [`Layout`]: missing pages, the rounds of pages, and their numbers.

mod checksum;
mod coding;
pub mod convergence;
#[cfg(test)]
mod damage_tests;
mod destination;
#[cfg(test)]
mod ending_tests;
mod event;
mod frame;
mod guard;
pub mod handshake;
#[cfg(test)]
mod hostile_tests;
mod ids;
pub mod journal;
mod layout;
mod message;
#[cfg(test)]
mod model;
mod pages;
mod rounds;
mod source;
mod state;
#[cfg(test)]
mod state_tests;
mod streams;
#[cfg(test)]
mod sweep;
mod takeover;
pub mod times;
#[cfg(test)]
mod vectors_tests;
mod wire;

pub use checksum::page_checksum;
pub use coding::Received;
pub use convergence::Decision;
pub use destination::Destination;
pub use event::{
    DestinationAction, DestinationEvent, Outcome, Owner, Phase, Refused, SourceAction, SourceEvent,
    Timer, Word,
};
pub use frame::{
    Decoder, FLAG_OPTIONAL, Frame, FrameError, HEADER_BYTES, MAGIC, MAX_UNKNOWN_BYTES,
};
pub use ids::{MapDigest, MigrationId, ParseHexError, Secret, Token, TokenHash, VmId};
pub use layout::{Area, Layout, LayoutError, MAX_AREAS, MAX_MEMORY_BYTES, PAGE_BYTES};
pub use message::{
    CONTROL, CancelCode, Content, DeclineCode, MAX_MAP_PAGES, MAX_REASONS, MAX_REQUIREMENT_BYTES,
    MAX_RUN_PAGES, MAX_STATE_BYTES, MAX_STATE_PART_BYTES, MAX_STREAMS, Message, Offer, PageRecord,
    Stage, StatePart, StreamIndex, max_payload_bytes,
};
pub use pages::{MapPartError, PageSet};
pub use rounds::{Round, RoundBytes};
pub use source::{Memory, RestartError, Source};
pub use state::CollectedState;
pub use takeover::{Former, TakeOver, TakeOverError};
pub use wire::{DecodeError, MAX_TEXT_BYTES};
