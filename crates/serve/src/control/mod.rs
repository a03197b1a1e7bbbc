//! The control socket: a running server is told to serve another image, or to stop serving one.
//!
//! [`channel`] has the protocol's framing, a server of it and a client, for whatever requests and answers; [`message`] has those
//! of `pagetide serve`. `docs/design/control-protocol.md` describes both.

pub mod channel;
pub mod message;
