//! Connections: two pipes each, which can be cut within a frame.

use crate::frame::{Decoder, Frame, MAGIC};
use crate::handshake::{Hello, Welcome};
use crate::message::Message;

/// How far a connection's handshake is, at one end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Greeting {
    /// The source waits for a welcome; the destination for a hello.
    First,
    /// The destination waits for a proof.
    Proof(Hello, Welcome),
    /// The machines know of the stream.
    Up,
    /// This end has found out that the connection is lost.
    Closed,
}

/// One direction.
#[derive(Debug)]
pub(super) struct Pipe {
    bytes: Vec<u8>,
    decoder: Decoder,
    /// No byte arrives behind those that are there.
    is_cut: bool,
}

impl Pipe {
    fn new() -> Self {
        Self {
            bytes: MAGIC.to_vec(),
            decoder: Decoder::default(),
            is_cut: false,
        }
    }

    /// Sends a frame; at most `limit` bytes of it arrive. Returns its length.
    pub(super) fn send(&mut self, message: &Message, content: &[u8], limit: usize) -> usize {
        let mut frame = Vec::new();
        message.encode(content, &mut frame).unwrap();
        if !self.is_cut {
            self.bytes
                .extend_from_slice(&frame[..limit.min(frame.len())]);
        }
        frame.len()
    }

    pub(super) fn cut(&mut self) {
        self.is_cut = true;
    }

    /// What was on the way is lost.
    pub(super) fn lose(&mut self) {
        self.is_cut = true;
        self.bytes.clear();
        self.decoder = Decoder::default();
    }

    pub(super) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The next frame. `None`: none is whole.
    pub(super) fn receive(&mut self) -> Option<Frame> {
        self.decoder.push(&std::mem::take(&mut self.bytes));
        self.decoder.next_frame().unwrap()
    }

    /// Whether nothing can arrive any more.
    pub(super) fn has_ended(&self) -> bool {
        self.is_cut && self.bytes.is_empty()
    }
}

/// One connection.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) hello: Hello,
    pub(super) to_destination: Pipe,
    pub(super) to_source: Pipe,
    pub(super) at_source: Greeting,
    pub(super) at_destination: Greeting,
    /// The destination does not read it yet.
    pub(super) is_late: bool,
}

impl Connection {
    pub(super) fn new(hello: Hello) -> Self {
        Self {
            hello,
            to_destination: Pipe::new(),
            to_source: Pipe::new(),
            at_source: Greeting::First,
            at_destination: Greeting::First,
            is_late: false,
        }
    }

    pub(super) fn is_closed(&self) -> bool {
        self.at_source == Greeting::Closed && self.at_destination == Greeting::Closed
    }
}
