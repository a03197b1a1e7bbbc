//! The destination's process.

use pagetide_memory::{GuestAddress, PageIndex};

use super::guest::{PAGES, Page, index};
use super::lab::{Lab, MIGRATION, SESSION, STREAMS, VM, refusal_token};
use super::wire::Greeting;
use crate::checksum::page_checksum;
use crate::destination::{Destination, Step};
use crate::event::{DestinationAction, DestinationEvent};
use crate::frame::Frame;
use crate::guard::Guards;
use crate::handshake::{self, Hello, Prover, Purpose};
use crate::ids::TokenHash;
use crate::journal::{
    JournalHead, JournalWriter, KeptState, Record, Replay, SLOT_BYTES, Side, new_journal,
};
use crate::layout::PAGE_BYTES;
use crate::message::{CONTROL, Message, PageRecord, StatePart, StreamIndex};
use crate::model::map_parts;
use crate::state::CollectedState;

#[derive(Debug)]
pub(super) struct DestinationHost {
    /// `None`: it died, and its journal has nothing.
    pub(super) machine: Option<Destination>,
    pub(super) memory: Vec<Page>,
    pub(super) state: Option<u64>,
    pub(super) runs: bool,
    pub(super) had_entered: bool,
    received_state: CollectedState,
    is_loading: bool,
    /// What is being stored, by streams.
    storing: Vec<Vec<(PageIndex, Page)>>,
    /// A record that must wait until another is stored.
    waiting: Vec<Option<Frame>>,
    commit_hash: Option<TokenHash>,
    journal: Option<(Vec<u8>, JournalWriter)>,
}

pub(super) fn write_record(bytes: &mut [u8], writer: &mut JournalWriter, record: Record) {
    let (at, slot) = writer.encode(&record).unwrap();
    bytes[index(at)..][..SLOT_BYTES].copy_from_slice(&slot);
    writer.synced();
}

impl DestinationHost {
    pub(super) fn new(guards: Guards) -> Self {
        let streams = usize::from(STREAMS);
        Self {
            machine: Some(Destination::with_guards(
                refusal_token(),
                PAGES,
                STREAMS,
                guards,
            )),
            memory: vec![Page::Absent; index(PAGES)],
            state: None,
            runs: false,
            had_entered: false,
            received_state: CollectedState::default(),
            is_loading: false,
            storing: vec![Vec::new(); streams],
            waiting: vec![None; streams],
            commit_hash: None,
            journal: None,
        }
    }

    fn drop_stream(&mut self, stream: StreamIndex) {
        self.storing[usize::from(stream.0)].clear();
        self.waiting[usize::from(stream.0)] = None;
    }
}

impl Lab {
    pub(super) fn destination_step(&mut self) -> Result<(), String> {
        for stream in (0..STREAMS).map(StreamIndex) {
            self.finish_store(stream);
        }
        if std::mem::take(&mut self.destination.is_loading) {
            let state = self.destination.received_state.bytes();
            let state = state.try_into().map_err(|_| "a state of another length")?;
            self.destination.state = Some(u64::from_le_bytes(state));
            self.tell_destination(DestinationEvent::Loaded);
        }
        for stream in (0..STREAMS).map(StreamIndex) {
            self.read_at_destination(stream)?;
        }
        Ok(())
    }

    fn finish_store(&mut self, stream: StreamIndex) {
        let storing = std::mem::take(&mut self.destination.storing[usize::from(stream.0)]);
        let connection = self.connections[usize::from(stream.0)].as_ref();
        let is_lost = connection
            .is_some_and(|connection| connection.to_destination.has_ended() && !connection.is_late);
        if storing.is_empty() {
            return;
        }
        if is_lost {
            // What was being stored when the connection was lost is not stored.
            return self.close_at_destination(stream);
        }
        for (page, content) in storing {
            self.destination.memory[index(page.0)] = content;
        }
        self.tell_destination(DestinationEvent::Stored(stream));
    }

    fn read_at_destination(&mut self, stream: StreamIndex) -> Result<(), String> {
        let index = usize::from(stream.0);
        while self.destination.storing[index].is_empty() {
            let step = self
                .destination
                .machine
                .as_ref()
                .map(|machine| *machine.step());
            let Some(connection) = &mut self.connections[index] else {
                return Ok(());
            };
            let is_before_seal = matches!(
                step,
                Some(Step::Connecting | Step::Admitting | Step::Receiving)
            );
            if connection.at_destination == Greeting::Closed || connection.is_late && is_before_seal
            {
                return Ok(());
            }
            let waiting = self.destination.waiting[index].take();
            let Some(frame) = waiting.or_else(|| connection.to_destination.receive()) else {
                if connection.to_destination.has_ended() {
                    self.close_at_destination(stream);
                }
                return Ok(());
            };
            self.frame_at_destination(stream, &frame)?;
            if self.destination.waiting[index].is_some() {
                return Ok(());
            }
        }
        Ok(())
    }

    /// The destination finds out that a connection is lost.
    fn close_at_destination(&mut self, stream: StreamIndex) {
        let Some(connection) = &mut self.connections[usize::from(stream.0)] else {
            return;
        };
        let was_up = connection.at_destination == Greeting::Up;
        connection.at_destination = Greeting::Closed;
        connection.to_source.cut();
        self.destination.drop_stream(stream);
        if was_up {
            self.tell_destination(DestinationEvent::StreamDown(stream));
        }
    }

    fn frame_at_destination(&mut self, stream: StreamIndex, frame: &Frame) -> Result<(), String> {
        let received = Message::of(frame).map_err(|error| error.to_string())?;
        let content = received.content;
        match received.message {
            Message::Hello(hello) => self.hello(stream, hello)?,
            Message::Proof(proof) => {
                let Some(connection) = &mut self.connections[usize::from(stream.0)] else {
                    return Ok(());
                };
                let Greeting::Proof(hello, welcome) = connection.at_destination else {
                    return Err("a proof that was not asked for".to_owned());
                };
                handshake::check_proof(&SESSION, Prover::Source, &hello, &welcome, &proof)
                    .map_err(|error| error.to_string())?;
                connection.at_destination = Greeting::Up;
                self.tell_destination(DestinationEvent::StreamUp(stream));
            }
            Message::Pages(record) => {
                self.record(stream, record, content, frame)?;
            }
            Message::State(part) => self.state_part(stream, part, content)?,
            message => {
                if let Message::Offer(offer) = &message {
                    self.destination.commit_hash = Some(offer.commit_hash);
                }
                self.tell_destination(DestinationEvent::Received(stream, message));
            }
        }
        Ok(())
    }

    fn state_part(
        &mut self,
        stream: StreamIndex,
        part: StatePart,
        bytes: &[u8],
    ) -> Result<(), String> {
        let Some(machine) = &mut self.destination.machine else {
            return Ok(());
        };
        let state = &mut self.destination.received_state;
        let event = DestinationEvent::State {
            stream,
            part,
            digest: state.digest_with(part, bytes),
        };
        let actions = machine.handle(event).map_err(|error| error.to_string())?;
        if actions.contains(&DestinationAction::TakeState) {
            state.take(part, bytes);
        }
        Ok(())
    }

    fn hello(&mut self, stream: StreamIndex, hello: Hello) -> Result<(), String> {
        let is_join = hello.purpose == Purpose::Join;
        let nonce = self.nonce();
        let is_known = self.destination.commit_hash.is_some();
        let Some(connection) = &mut self.connections[usize::from(stream.0)] else {
            return Ok(());
        };
        if is_join && !is_known {
            // A receiver that knows nothing of the session.
            connection.at_destination = Greeting::Closed;
            connection.to_source.lose();
            connection.to_destination.lose();
            return Ok(());
        }
        let welcome = handshake::welcome(&hello, 0, nonce, is_join.then_some(&SESSION))
            .map_err(|error| error.to_string())?;
        connection.at_destination = if is_join {
            Greeting::Proof(hello, welcome)
        } else {
            Greeting::Up
        };
        self.send(Side::Destination, stream, &Message::Welcome(welcome), &[]);
        if !is_join {
            self.tell_destination(DestinationEvent::StreamUp(stream));
        }
        Ok(())
    }

    fn record(
        &mut self,
        stream: StreamIndex,
        record: PageRecord,
        bytes: &[u8],
        frame: &Frame,
    ) -> Result<(), String> {
        let gpa = GuestAddress(record.run.first().0 * PAGE_BYTES);
        let is_intact = page_checksum(VM, gpa, &record, bytes) == record.checksum;
        if !is_intact {
            return Err(format!("pages {} are damaged", record.run));
        }
        let Some(machine) = &mut self.destination.machine else {
            return Ok(());
        };
        let event = DestinationEvent::Pages {
            stream,
            record,
            is_intact,
        };
        let actions = machine.handle(event).map_err(|error| error.to_string())?;
        for action in actions {
            match action {
                DestinationAction::Store(stream, parts) => {
                    let pages = record
                        .run
                        .iter()
                        .enumerate()
                        .filter(|(_, page)| parts.iter().any(|part| part.contains(*page)));
                    let content = pages.map(|(number, page)| {
                        let bytes = bytes
                            .chunks(index(PAGE_BYTES))
                            .nth(number)
                            .unwrap_or_default();
                        (page, Page::read(record.content, page, bytes))
                    });
                    self.destination.storing[usize::from(stream.0)] = content.collect();
                }
                DestinationAction::Later(stream) => {
                    self.destination.waiting[usize::from(stream.0)] = Some(frame.clone());
                }
                action => self.do_for_destination(action),
            }
        }
        Ok(())
    }

    pub(super) fn tell_destination(&mut self, event: DestinationEvent) {
        let Some(machine) = &mut self.destination.machine else {
            return;
        };
        let is_message = matches!(event, DestinationEvent::Received(..));
        let actions = match machine.handle(event) {
            Ok(actions) => actions,
            Err(error) => return self.note_refused(Side::Destination, is_message, &error),
        };
        for action in actions {
            if self.dying != Some(Side::Destination) {
                self.do_for_destination(action);
            }
        }
    }

    fn do_for_destination(&mut self, action: DestinationAction) {
        match action {
            DestinationAction::Admit => {
                let head = JournalHead {
                    side: Side::Destination,
                    migration: MIGRATION,
                    vm: VM,
                    session: SESSION,
                    token: *refusal_token().secret(),
                    peer_hash: self.destination.commit_hash.unwrap_or_default(),
                };
                let (bytes, writer) = new_journal(&head);
                self.destination.journal = Some((bytes.to_vec(), writer));
                self.tell_destination(DestinationEvent::Admitted);
            }
            DestinationAction::Send(message) => {
                self.send(Side::Destination, CONTROL, &message, &[]);
            }
            DestinationAction::Request(run) => {
                // Any stream will do.
                let stream = StreamIndex(u16::try_from(run.first().0).unwrap_or(0) % STREAMS);
                self.send(Side::Destination, stream, &Message::Request { run }, &[]);
            }
            DestinationAction::Acknowledge(stream, message) => {
                self.send(Side::Destination, stream, &message, &[]);
            }
            DestinationAction::Close(stream) => {
                if let Some(connection) = &mut self.connections[usize::from(stream.0)] {
                    connection.at_destination = Greeting::Closed;
                    connection.to_source.lose();
                    connection.to_destination.lose();
                }
                self.destination.drop_stream(stream);
            }
            DestinationAction::Punch => {
                let Some(machine) = &self.destination.machine else {
                    return;
                };
                machine
                    .missing()
                    .iter()
                    .for_each(|page| self.destination.memory[index(page.0)] = Page::Absent);
                self.tell_destination(DestinationEvent::Punched);
            }
            DestinationAction::Load => self.destination.is_loading = true,
            DestinationAction::SendMap => {
                let Some(machine) = &self.destination.machine else {
                    return;
                };
                let parts: Vec<_> = map_parts(machine.missing()).collect();
                parts
                    .iter()
                    .for_each(|part| self.send(Side::Destination, CONTROL, part, &[]));
            }
            DestinationAction::Record(kind) => {
                if let Some((bytes, writer)) = &mut self.destination.journal {
                    write_record(
                        bytes,
                        writer,
                        Record {
                            kind,
                            state: KeptState::default(),
                        },
                    );
                }
                self.tell_destination(DestinationEvent::Recorded(kind));
            }
            DestinationAction::Enter => {
                self.destination.runs = true;
                self.destination.had_entered = true;
            }
            DestinationAction::Store(..)
            | DestinationAction::Later(_)
            | DestinationAction::TakeState
            | DestinationAction::Poison(_)
            | DestinationAction::Free
            | DestinationAction::Done(_)
            | DestinationAction::Forget => {}
        }
    }

    /// Its memory is gone; the journal says what it may say.
    pub(super) fn restart_destination(&mut self) {
        let journal = self.destination.journal.take();
        let had_entered = self.destination.had_entered;
        self.destination = DestinationHost {
            had_entered,
            ..DestinationHost::new(self.plan.guards)
        };
        let Some((bytes, writer)) = journal else {
            self.destination.machine = None;
            return;
        };
        let replay = Replay::read(&bytes, Side::Destination, Some(MIGRATION)).unwrap();
        self.destination.journal = Some((bytes, writer));
        self.destination.commit_hash = Some(replay.head.peer_hash);
        let fresh = Destination::with_guards(refusal_token(), PAGES, STREAMS, self.plan.guards);
        let (machine, actions) = fresh.restarted(replay.head.peer_hash, &replay.kinds());
        self.destination.machine = Some(machine);
        actions
            .into_iter()
            .for_each(|action| self.do_for_destination(action));
    }
}
