//! The server's end of a connection: frames in, frames out, never waiting.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::net::SendFlags;
use thiserror::Error;

use super::frame::{Decoder, FrameError, HEADER_BYTES, MAGIC, MAX_PAYLOAD_BYTES};
use super::message::{DecodeError, MAX_DESCRIPTORS, Message, PageMapPart, RefusedCode};
use super::socket;
use crate::budgets::{Charge, HeldBytes, OverBudget, Resource};
use crate::handshake::VmRegion;
use crate::intake::{IntakeError, receive};

/// The size of one read.
const READ_BYTES: usize = 64 << 10;

/// Above this many bytes that the client has not read, no further request is read.
const OUT_PAUSE_BYTES: usize = 64 << 10;

/// Above this many bytes, notices are dropped.
const OUT_NOTICE_BYTES: usize = 128 << 10;

/// Answers with a descriptor to one client, which needs one. Those that it does not read hold it, here and in the socket.
const MAX_SHARED: u32 = 16;

/// The bytes of a page map in one frame.
const MAP_CHUNK_BYTES: usize = 256 << 10;

/// Why no further message can be read from a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub(crate) enum SessionError {
    /// The bytes are no frames.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The frame is no message.
    #[error(transparent)]
    Decode(#[from] DecodeError),
    /// More descriptors than one message has.
    #[error("more than {MAX_DESCRIPTORS} descriptors")]
    Descriptors,
    /// A descriptor after attach, for which no feature was agreed.
    #[error("a descriptor came with a message that takes none")]
    Unexpected,
    /// There is no room for its descriptors.
    #[error(transparent)]
    Budget(#[from] OverBudget),
    /// A descriptor is of no use, and was not passed on to the server.
    #[error("a descriptor is neither a userfaultfd nor memory")]
    OtherKind,
    /// The process that receives descriptors has no answer.
    #[error("the server could not receive descriptors")]
    Porter(#[source] Errno),
    /// The client has asked for more files than it can need.
    #[error("more than {MAX_SHARED} answers with a descriptor")]
    TooManyShared,
}

impl SessionError {
    pub(crate) fn code(&self) -> RefusedCode {
        match self {
            Self::Frame(_) | Self::Decode(_) => RefusedCode::Protocol,
            Self::Budget(error) => error.code(),
            Self::Porter(_) => RefusedCode::Internal,
            Self::Descriptors | Self::Unexpected | Self::OtherKind | Self::TooManyShared => {
                RefusedCode::Descriptors
            }
        }
    }
}

/// A message that has arrived.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Arrived {
    pub(crate) id: u32,
    /// Another part of the same page map follows.
    pub(crate) more: bool,
    /// `None` for a type that is unknown and may not be skipped.
    pub(crate) message: Result<Message, DecodeError>,
}

/// Bytes to send, and the descriptor beside the first.
#[derive(Debug)]
struct Outgoing {
    bytes: Vec<u8>,
    sent: usize,
    descriptor: Option<OwnedFd>,
}

/// The server's end of a connection.
#[derive(Debug)]
pub(crate) struct Session<'a> {
    stream: &'a UnixStream,
    /// What the client has taken.
    charge: &'a Charge,
    /// Descriptors that it was sent.
    shared: u32,
    decoder: Decoder,
    /// What has arrived of messages.
    buffered: HeldBytes<'a>,
    /// Descriptors that have arrived.
    pub(crate) descriptors: Vec<OwnedFd>,
    /// Of those that were taken from here, the ones that are charged.
    taken: usize,
    /// No more descriptors are taken.
    takes_none: bool,
    out: VecDeque<Outgoing>,
    out_bytes: usize,
    /// Page maps that are sent as the client reads them, with the id of their request, and the message
    /// that follows the last.
    maps: VecDeque<(u32, PageMapPart)>,
    after_maps: Option<(u32, Message)>,
    /// The stream has lost its meaning: nothing more is read from it.
    is_deaf: bool,
    /// What has arrived stays in the socket: there is no room for its descriptors, or nobody who receives them.
    is_stuck: bool,
}

impl<'a> Session<'a> {
    /// Continues a connection of which `bytes` and `descriptors` have arrived.
    pub(crate) fn new(
        stream: &'a UnixStream,
        bytes: &[u8],
        descriptors: Vec<OwnedFd>,
        charge: &'a Charge,
    ) -> Self {
        let mut decoder = Decoder::new();
        decoder.push(bytes);
        let mut session = Self {
            stream,
            charge,
            shared: 0,
            decoder,
            buffered: HeldBytes::new(charge),
            descriptors,
            taken: 0,
            takes_none: false,
            out: VecDeque::new(),
            out_bytes: 0,
            maps: VecDeque::new(),
            after_maps: None,
            is_deaf: false,
            is_stuck: false,
        };
        session.queue(MAGIC.to_vec(), None);
        session
    }

    pub(crate) fn stream(&self) -> &'a UnixStream {
        self.stream
    }

    /// What the client is charged by.
    pub(crate) fn charge(&self) -> &'a Charge {
        self.charge
    }

    /// Takes descriptors again: a message after attach may have one.
    pub(crate) fn permit_descriptors(&mut self) {
        self.takes_none = false;
    }

    /// The descriptor of the next message that has one.
    pub(crate) fn take_descriptor(&mut self) -> Option<OwnedFd> {
        let taken = (!self.descriptors.is_empty()).then(|| self.descriptors.remove(0))?;
        self.taken += 1;
        Some(taken)
    }

    /// Gives back what is charged for descriptors that were taken and are closed: so many are open.
    pub(crate) fn keep_taken(&mut self, open: usize) {
        let closed = self.taken.saturating_sub(open);
        self.charge.give_back(Resource::Descriptors, closed as u64);
        self.taken -= closed;
    }

    /// From now on a descriptor is an error. Returns those that have arrived.
    pub(crate) fn take_descriptors(&mut self) -> Vec<OwnedFd> {
        self.takes_none = true;
        std::mem::take(&mut self.descriptors)
    }

    /// What the connection waits for.
    pub(crate) fn interest(&self) -> EventFlags {
        let mut flags = EventFlags::empty();
        if self.may_read() {
            flags |= EventFlags::IN;
        }
        if self.out_bytes > 0 || !self.maps.is_empty() {
            flags |= EventFlags::OUT;
        }
        flags
    }

    fn may_read(&self) -> bool {
        let is_full = self.decoder.buffered() > MAX_PAYLOAD_BYTES + HEADER_BYTES;
        !self.is_stuck && (self.is_deaf || (self.out_bytes < OUT_PAUSE_BYTES && !is_full))
    }

    /// Reads what has arrived, at most 64 KiB. Returns false at the end of the stream.
    ///
    /// # Errors
    /// [`SessionError`] for descriptors that the protocol does not permit; they were closed.
    pub(crate) fn read(&mut self) -> Result<bool, SessionError> {
        if !self.may_read() {
            return Ok(true);
        }
        let mut bytes = [0; READ_BYTES];
        let mut arrived = Vec::new();
        let got = match receive(self.stream, &mut bytes, &mut arrived, self.charge) {
            Ok(got) => got,
            Err(IntakeError::Read(Errno::AGAIN | Errno::INTR)) => return Ok(true),
            Err(IntakeError::Read(_)) => return Ok(false),
            Err(IntakeError::Budget(error)) => {
                self.is_stuck = true;
                return Err(error.into());
            }
            Err(IntakeError::Porter(errno)) => {
                self.is_stuck = true;
                return Err(SessionError::Porter(errno));
            }
        };
        if got.bytes == 0 {
            return Ok(false);
        }
        if self.is_deaf {
            return Ok(true);
        }
        if self.takes_none && (got.is_cut || !arrived.is_empty()) {
            return Err(SessionError::Unexpected);
        }
        // Those that fit stay open even if the message is refused: one may be the last userfaultfd.
        self.descriptors.extend(arrived);
        if got.other.is_some() {
            return Err(SessionError::OtherKind);
        }
        if got.is_cut || self.descriptors.len() > MAX_DESCRIPTORS {
            return Err(SessionError::Descriptors);
        }
        self.decoder
            .push(bytes.get(..got.bytes).unwrap_or_default());
        self.buffered.set(self.decoder.buffered())?;
        Ok(true)
    }

    /// The next message, if it has arrived and the client reads its answers. Optional messages of unknown
    /// types are skipped.
    ///
    /// # Errors
    /// [`SessionError`]; the connection has no further message.
    pub(crate) fn next(&mut self) -> Result<Option<Arrived>, SessionError> {
        while !self.is_deaf && self.out_bytes < OUT_PAUSE_BYTES {
            let Some(frame) = self.decoder.next_frame()? else {
                self.buffered.set(self.decoder.buffered())?;
                return Ok(None);
            };
            let message = match Message::of(&frame) {
                Err(DecodeError::Unknown { .. }) if frame.is_optional() => continue,
                Err(DecodeError::Unknown { kind }) => Err(DecodeError::Unknown { kind }),
                other => Ok(other?),
            };
            return Ok(Some(Arrived {
                id: frame.id,
                more: frame.has_more(),
                message,
            }));
        }
        Ok(None)
    }

    /// Whether [`Self::next`] may return a message without another read.
    pub(crate) fn has_buffered(&self) -> bool {
        !self.is_deaf && self.out_bytes < OUT_PAUSE_BYTES && self.decoder.has_frame()
    }

    /// Reads nothing more: what arrives is dropped.
    pub(crate) fn be_deaf(&mut self) {
        self.is_deaf = true;
        self.decoder = Decoder::new();
        // Fewer bytes have room.
        let _ = self.buffered.set(0);
    }

    /// Queues an answer.
    pub(crate) fn answer(&mut self, id: u32, message: &Message) {
        self.answer_with(id, message, None);
    }

    /// Charges an answer with a descriptor, which the client may never read.
    ///
    /// # Errors
    /// [`SessionError`] if it has had so many, or there is no room.
    pub(crate) fn charge_answer(&mut self) -> Result<(), SessionError> {
        if self.shared == MAX_SHARED {
            return Err(SessionError::TooManyShared);
        }
        self.charge.take(Resource::Descriptors, 1)?;
        self.shared += 1;
        Ok(())
    }

    /// Charges a VM of these regions, so many of which have a descriptor of their file.
    ///
    /// # Errors
    /// [`OverBudget`].
    pub(crate) fn charge_vm(&self, regions: &[VmRegion], files: usize) -> Result<(), OverBudget> {
        self.charge.take_vm(regions)?;
        self.charge.take(Resource::Descriptors, files as u64)
    }

    /// Queues an answer with a descriptor.
    pub(crate) fn answer_with(&mut self, id: u32, message: &Message, descriptor: Option<OwnedFd>) {
        let mut bytes = Vec::new();
        // The server's own messages are short.
        if message.frame(id, false).encode(&mut bytes).is_ok() {
            self.queue(bytes, descriptor);
        }
    }

    /// Queues one of several answers, unless the client has left too much unread.
    pub(crate) fn answer_if_room(&mut self, id: u32, message: &Message) {
        if self.out_bytes < OUT_NOTICE_BYTES {
            self.answer(id, message);
        }
    }

    /// Queues a notice, unless the client has left too much unread.
    pub(crate) fn notify(&mut self, message: &Message) {
        if self.out_bytes < OUT_NOTICE_BYTES {
            self.answer(0, message);
        }
    }

    /// Queues page maps, which are sent as the client reads them, and `after`.
    pub(crate) fn send_maps(&mut self, id: u32, parts: Vec<PageMapPart>, after: Message) {
        self.maps.extend(parts.into_iter().map(|part| (id, part)));
        self.after_maps = Some((id, after));
    }

    fn queue(&mut self, bytes: Vec<u8>, descriptor: Option<OwnedFd>) {
        self.out_bytes += bytes.len();
        self.out.push_back(Outgoing {
            bytes,
            sent: 0,
            descriptor,
        });
    }

    /// Queues the next piece of a page map, if little is queued.
    fn refill(&mut self) {
        while self.out_bytes < OUT_PAUSE_BYTES {
            let Some((id, mut part)) = self.maps.pop_front() else {
                if let Some((id, message)) = self.after_maps.take() {
                    self.answer(id, &message);
                }
                return;
            };
            let rest = part.bytes.split_off(part.bytes.len().min(MAP_CHUNK_BYTES));
            let more = !rest.is_empty();
            if more {
                let bytes = rest;
                self.maps.push_front((id, PageMapPart { bytes, ..part }));
            }
            let mut bytes = Vec::new();
            if Message::PageMap(part)
                .frame(id, more)
                .encode(&mut bytes)
                .is_ok()
            {
                self.queue(bytes, None);
            }
        }
    }

    /// Sends what the connection takes without waiting. Returns false if the client has gone.
    pub(crate) fn flush(&mut self) -> bool {
        loop {
            self.refill();
            let Some(next) = self.out.front_mut() else {
                return true;
            };
            let descriptor = next.descriptor.as_ref().map(AsFd::as_fd);
            let beside = descriptor.as_slice();
            let bytes = next.bytes.get(next.sent..).unwrap_or_default();
            match socket::send(self.stream, bytes, beside, SendFlags::DONTWAIT) {
                Ok(sent) => {
                    next.sent += sent;
                    next.descriptor = None;
                    self.out_bytes -= sent;
                    if next.sent == next.bytes.len() {
                        self.out.pop_front();
                    }
                }
                Err(Errno::AGAIN) => return true,
                Err(Errno::INTR) => {}
                Err(_) => return false,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::IoSlice;
    use std::mem::MaybeUninit;

    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, sendmsg};

    use super::*;
    use crate::budgets::{Budgets, UserLimits};

    fn requests(count: u32) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        for id in 1..=count {
            let frame = Message::HealthRequest.frame(id, false);
            frame.encode(&mut bytes).unwrap();
        }
        bytes
    }

    #[test]
    fn a_client_that_does_not_read_is_not_read_from() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let charge = Charge::alone();
        let mut session = Session::new(&ours, &requests(10_000), Vec::new(), &charge);
        let text = "x".repeat(900);
        let mut answered = 0;
        while let Some(arrived) = session.next().unwrap() {
            let text = text.clone();
            session.answer(arrived.id, &Message::Killed { text });
            answered += 1;
        }
        assert!((50..100).contains(&answered), "{answered}");
        assert_eq!(session.interest(), EventFlags::OUT);
        assert!(!session.has_buffered());
        for _ in 0..1000 {
            session.notify(&Message::Killed { text: text.clone() });
        }
        assert!(session.out_bytes < OUT_NOTICE_BYTES + 1000);
    }

    /// Kind: a message that stays in the socket, which therefore stays readable.
    #[test]
    fn a_message_whose_descriptors_have_no_room_is_not_waited_for_again() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let limits = UserLimits {
            descriptors: 2,
            ..UserLimits::default()
        };
        let charge = Budgets::new(limits, None).charge(1, 1).unwrap();
        let mut session = Session::new(&ours, &[], Vec::new(), &charge);
        let beside = [theirs.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(&beside)));
        let parts = [IoSlice::new(b"x")];
        sendmsg(&theirs, &parts, &mut ancillary, SendFlags::empty()).unwrap();
        assert!(session.interest().contains(EventFlags::IN));
        assert!(matches!(session.read(), Err(SessionError::Budget(_))));
        session.be_deaf();
        assert!(!session.interest().contains(EventFlags::IN));
        assert!(session.read().unwrap());
    }

    /// Nothing more arrives for requests that have arrived.
    #[test]
    fn requests_that_waited_for_room_are_served_when_there_is_room() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let charge = Charge::alone();
        let mut session = Session::new(&ours, &requests(200), Vec::new(), &charge);
        let text = "x".repeat(900);
        let mut answered = 0;
        let reader = std::thread::spawn(move || {
            let mut bytes = Vec::new();
            std::io::Read::read_to_end(&mut &theirs, &mut bytes).unwrap();
            bytes.len()
        });
        while answered < 200 {
            assert!(session.out_bytes > 0 || session.has_buffered());
            while let Some(arrived) = session.next().unwrap() {
                let text = text.clone();
                session.answer(arrived.id, &Message::Killed { text });
                answered += 1;
            }
            assert!(session.flush());
        }
        while session.out_bytes > 0 {
            assert!(session.flush());
        }
        drop(session);
        drop(ours);
        assert_eq!(reader.join().unwrap(), 8 + 200 * (12 + 902));
    }

    #[test]
    fn an_unknown_message_is_skipped_if_it_is_optional() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let charge = Charge::alone();
        let mut bytes = MAGIC.to_vec();
        for flags in [1, 0] {
            let mut frame = Message::Drain.frame(5, false);
            (frame.kind, frame.flags) = (77, flags);
            frame.encode(&mut bytes).unwrap();
        }
        let mut session = Session::new(&ours, &bytes, Vec::new(), &charge);
        let found = session.next().unwrap().unwrap();
        assert_eq!(found.message, Err(DecodeError::Unknown { kind: 77 }));
        assert_eq!(session.next(), Ok(None));
    }
}
