//! The source's process.

use pagetide_memory::{GuestAddress, PageIndex, PageRange};

use super::guest::{Guest, PAGES, Page, index};
use super::lab::{Lab, MIGRATION, SESSION, STREAMS, VM, commit_token};
use super::wire::Greeting;
use crate::checksum::page_checksum;
use crate::convergence::Decision;
use crate::event::{SourceAction, SourceEvent};
use crate::frame::Frame;
use crate::guard::Guards;
use crate::handshake;
use crate::ids::TokenHash;
use crate::journal::{
    JournalHead, JournalWriter, KeptState, Record, RecordKind, Replay, Side, new_journal,
};
use crate::layout::PAGE_BYTES;
use crate::message::{CONTROL, Message, PageRecord, StatePart, StreamIndex};
use crate::model::{map_parts, offer};
use crate::pages::PageSet;
use crate::rounds::Round;
use crate::source::{Memory, Source};

/// The most pages of a record here, so that there are many frames.
const RECORD_PAGES: u64 = 8;

/// The state has two parts.
const STATE_PART_BYTES: usize = 5;

#[derive(Debug)]
pub(super) struct SourceHost {
    /// `None`: it died, and cannot go on.
    pub(super) machine: Option<Source>,
    pub(super) memory: Vec<Page>,
    pub(super) log: PageSet,
    pub(super) state: u64,
    pub(super) runs: bool,
    journal: Option<(Vec<u8>, JournalWriter)>,
}

impl SourceHost {
    pub(super) fn new(guards: Guards, guest: &Guest) -> Self {
        Self {
            machine: Some(Source::with_guards(commit_token(), PAGES, STREAMS, guards)),
            memory: guest.truth.clone(),
            log: PageSet::empty(PAGES),
            state: 0,
            runs: true,
            journal: None,
        }
    }
}

impl SourceHost {
    pub(super) fn has_recorded(&self, kind: RecordKind) -> bool {
        let journal = self.journal.as_ref();
        let replay = journal.map(|(bytes, _)| Replay::read(bytes, Side::Source, Some(MIGRATION)));
        replay.is_some_and(|replay| replay.unwrap().kinds().contains(&kind))
    }
}

impl Lab {
    pub(super) fn source_step(&mut self) -> Result<(), String> {
        for stream in (0..STREAMS).map(StreamIndex) {
            self.read_at_source(stream)?;
            self.send_pages(stream);
        }
        Ok(())
    }

    fn read_at_source(&mut self, stream: StreamIndex) -> Result<(), String> {
        loop {
            let Some(connection) = &mut self.connections[usize::from(stream.0)] else {
                return Ok(());
            };
            if connection.at_source == Greeting::Closed {
                return Ok(());
            }
            let Some(frame) = connection.to_source.receive() else {
                if connection.to_source.has_ended() {
                    let was_up = std::mem::replace(&mut connection.at_source, Greeting::Closed)
                        == Greeting::Up;
                    connection.to_destination.cut();
                    if was_up {
                        self.tell_source(SourceEvent::StreamDown(stream));
                    }
                }
                return Ok(());
            };
            self.frame_at_source(stream, &frame)?;
        }
    }

    fn frame_at_source(&mut self, stream: StreamIndex, frame: &Frame) -> Result<(), String> {
        let message = Message::of(frame)
            .map_err(|error| error.to_string())?
            .message;
        let Some(connection) = &mut self.connections[usize::from(stream.0)] else {
            return Ok(());
        };
        let Message::Welcome(welcome) = message else {
            self.tell_source(SourceEvent::Received(stream, message));
            return Ok(());
        };
        let hello = connection.hello;
        connection.at_source = Greeting::Up;
        let is_join = hello.purpose == handshake::Purpose::Join;
        let proof = handshake::answer(&hello, &welcome, is_join.then_some(&SESSION))
            .map_err(|error| error.to_string())?;
        match proof {
            Some(proof) => self.send(Side::Source, stream, &Message::Proof(proof), &[]),
            None => {
                let mut offer = offer(PAGES);
                (offer.vm, offer.session, offer.commit_hash) = (VM, SESSION, commit_token().hash());
                self.send(Side::Source, stream, &Message::Offer(Box::new(offer)), &[]);
            }
        }
        self.tell_source(SourceEvent::StreamUp(stream));
        Ok(())
    }

    fn send_pages(&mut self, stream: StreamIndex) {
        let connection = self.connections[usize::from(stream.0)].as_ref();
        let is_up = connection.is_some_and(|connection| {
            connection.at_source == Greeting::Up && connection.to_destination.is_empty()
        });
        if is_up {
            self.tell_source(SourceEvent::Room(stream, 16));
        }
    }

    pub(super) fn tell_source(&mut self, event: SourceEvent) {
        let Some(machine) = &mut self.source.machine else {
            return;
        };
        let is_message = matches!(event, SourceEvent::Received(..));
        let actions = match machine.handle(event) {
            Ok(actions) => actions,
            Err(error) => return self.note_refused(Side::Source, is_message, &error),
        };
        for action in actions {
            if self.dying != Some(Side::Source) {
                self.do_for_source(action);
            }
        }
    }

    fn do_for_source(&mut self, action: SourceAction) {
        match action {
            SourceAction::OpenJournal { refusal_hash } => {
                let head = JournalHead {
                    side: Side::Source,
                    migration: MIGRATION,
                    vm: VM,
                    session: SESSION,
                    token: *commit_token().secret(),
                    peer_hash: refusal_hash,
                };
                let (bytes, writer) = new_journal(&head);
                self.source.journal = Some((bytes.to_vec(), writer));
                self.tell_source(SourceEvent::JournalOpened);
            }
            SourceAction::Send(message) => self.send(Side::Source, CONTROL, &message, &[]),
            SourceAction::SendEndMark(stream) => {
                self.send(Side::Source, stream, &Message::EndMark, &[]);
            }
            SourceAction::SendPages(stream, run, round) => self.send_run(stream, run, round),
            SourceAction::SendMap => {
                let Some(machine) = &self.source.machine else {
                    return;
                };
                let parts: Vec<_> = map_parts(machine.missing()).collect();
                parts
                    .iter()
                    .for_each(|part| self.send(Side::Source, CONTROL, part, &[]));
            }
            SourceAction::SendState => {
                let state = self.source.state.to_le_bytes();
                for (offset, bytes) in (0_u64..)
                    .step_by(STATE_PART_BYTES)
                    .zip(state.chunks(STATE_PART_BYTES))
                {
                    let part = StatePart {
                        offset,
                        bytes: u32::try_from(bytes.len()).unwrap(),
                        has_more: index(offset) + bytes.len() < state.len(),
                    };
                    self.send(Side::Source, CONTROL, &Message::State(part), bytes);
                }
            }
            SourceAction::SendSealed(digest) => {
                let state = KeptState::of(&self.source.state.to_le_bytes());
                let sealed = Message::Sealed { digest, state };
                self.send(Side::Source, CONTROL, &sealed, &[]);
            }
            SourceAction::Harvest => {
                let written = std::mem::replace(&mut self.source.log, PageSet::empty(PAGES));
                self.tell_source(SourceEvent::Harvested(written));
            }
            SourceAction::RoundEnded(round) => {
                let next = if round == Round::FIRST {
                    Decision::NextRound
                } else {
                    self.plan.decision
                };
                self.tell_source(SourceEvent::Decided(next));
            }
            SourceAction::Pause => {
                self.source.runs = false;
                self.tell_source(SourceEvent::Paused);
            }
            SourceAction::Record(kind) => {
                self.record_at_source(kind);
                self.tell_source(SourceEvent::Recorded(kind));
            }
            SourceAction::Run => self.source.runs = true,
            SourceAction::Free => self.source.memory.fill(Page::Absent),
            SourceAction::EndHolder => self.tell_source(SourceEvent::HolderEnded),
            SourceAction::ArmLog | SourceAction::Done(_) | SourceAction::Forget => {}
        }
    }

    fn record_at_source(&mut self, kind: RecordKind) {
        let Some((bytes, writer)) = &mut self.source.journal else {
            return;
        };
        let state = match kind {
            RecordKind::Sealed => KeptState::of(&self.source.state.to_le_bytes()),
            _ => KeptState::default(),
        };
        super::destination::write_record(bytes, writer, Record { kind, state });
    }

    /// One record for each run of pages of one kind.
    fn send_run(&mut self, stream: StreamIndex, run: PageRange, round: Round) {
        let mut rest = run;
        while !rest.is_empty() {
            let kind = |page: PageIndex| self.source.memory[index(page.0)].content();
            let content = kind(rest.first());
            let count = rest
                .iter()
                .take(index(RECORD_PAGES))
                .take_while(|page| kind(*page) == content)
                .count();
            let (part, tail) = rest.split_at(count as u64);
            rest = tail;
            let mut bytes = Vec::new();
            part.iter()
                .for_each(|page| self.source.memory[index(page.0)].write_to(page, &mut bytes));
            let gpa = GuestAddress(part.first().0 * PAGE_BYTES);
            let mut record = PageRecord {
                run: part,
                round,
                content,
                checksum: 0,
            };
            record.checksum = page_checksum(VM, gpa, &record, &bytes);
            self.send(Side::Source, stream, &Message::Pages(record), &bytes);
        }
    }

    /// The holder has the memory; the journal decides.
    pub(super) fn restart_source(&mut self) {
        self.source.runs = false;
        let journal = self.source.journal.as_ref();
        let replay =
            journal.map(|(bytes, _)| Replay::read(bytes, Side::Source, Some(MIGRATION)).unwrap());
        let Some(replay) = replay else {
            self.source.machine = None;
            return;
        };
        let peer_hash: TokenHash = replay.head.peer_hash;
        let fresh = Source::with_guards(commit_token(), PAGES, STREAMS, self.plan.guards);
        match fresh.restarted(peer_hash, replay.last(), Memory::Held) {
            Ok((machine, actions)) => {
                self.source.machine = Some(machine);
                actions
                    .into_iter()
                    .for_each(|action| self.do_for_source(action));
            }
            Err(_) => self.source.machine = None,
        }
    }
}
