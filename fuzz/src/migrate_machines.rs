//! The migration's machines (`pagetide_migrate::Source`, `Destination`): both, with events in any order, valid and
//! invalid, and messages that no honest side sends. Neither panics, what is refused changes nothing, and never do both
//! sides run the VM.

use std::collections::VecDeque;

use pagetide_memory::{GuestAddress, PageIndex, PageRange};
use pagetide_migrate::journal::{KeptState, RecordKind};
use pagetide_migrate::{
    Area, CONTROL, Content, Decision, Destination, DestinationAction, DestinationEvent, Frame,
    Layout, Message, Offer, PageRecord, PageSet, Phase, Round, Secret, Source, SourceAction,
    SourceEvent, StatePart, StreamIndex, Timer, Token, VmId, Word,
};

use crate::take;

const PAGES: u64 = 12;
const STREAMS: u16 = 2;
/// Of the VM's state, however it comes.
const STATE_DIGEST: [u8; 32] = [7; 32];

/// A secret that no input hits upon.
fn secret(seed: u8) -> Secret {
    Secret(*blake3::hash(&[seed]).as_bytes())
}

/// Two machines, and what is between them.
struct Pair {
    source: Source,
    destination: Destination,
    to_source: VecDeque<(StreamIndex, Message)>,
    to_destination: VecDeque<(StreamIndex, Message)>,
    source_runs: bool,
    destination_runs: bool,
    source_record: Option<RecordKind>,
    destination_record: Option<RecordKind>,
    /// The source, and the destination.
    has_forgotten: (bool, bool),
}

impl Pair {
    fn new() -> Self {
        let commit = Token::new(secret(1));
        let refusal = Token::new(secret(2));
        let area = Area {
            start: GuestAddress(0),
            bytes: PAGES * 4096,
        };
        let offer = Offer {
            vm: VmId([1; 16]),
            session: Secret([2; 32]),
            commit_hash: commit.hash(),
            layout: Layout::new(vec![area]).expect("a layout"),
            vcpus: 1,
            is_paused: false,
            verifies: false,
        };
        Self {
            source: Source::new(commit, PAGES, STREAMS),
            destination: Destination::new(refusal, PAGES, STREAMS),
            to_source: VecDeque::new(),
            to_destination: VecDeque::from([(CONTROL, Message::Offer(Box::new(offer)))]),
            source_runs: true,
            destination_runs: false,
            source_record: None,
            destination_record: None,
            has_forgotten: (false, false),
        }
    }

    fn source(&mut self, event: SourceEvent) {
        let before = self.source.clone();
        match self.source.handle(event) {
            Ok(actions) => actions
                .into_iter()
                .for_each(|action| self.do_for_source(action)),
            Err(_) => assert_eq!(self.source, before, "what is refused changes nothing"),
        }
    }

    fn do_for_source(&mut self, action: SourceAction) {
        match action {
            SourceAction::OpenJournal { .. } => self.source(SourceEvent::JournalOpened),
            SourceAction::Send(message) => self.to_destination.push_back((CONTROL, message)),
            SourceAction::SendEndMark(stream) => {
                self.to_destination.push_back((stream, Message::EndMark));
            }
            SourceAction::SendPages(stream, run, round) => {
                assert!(run.count() > 0 && run.end().0 <= PAGES);
                let record = PageRecord {
                    run,
                    round,
                    content: Content::Zero,
                    checksum: 0,
                };
                self.to_destination
                    .push_back((stream, Message::Pages(record)));
            }
            SourceAction::SendMap => {
                let bits = self.source.missing().part(0, PAGES);
                self.to_destination.push_back((
                    CONTROL,
                    Message::Map {
                        first: 0,
                        count: 12,
                        bits,
                    },
                ));
            }
            SourceAction::Harvest => self.source(SourceEvent::Harvested(PageSet::empty(PAGES))),
            SourceAction::Pause => {
                self.source_runs = false;
                self.source(SourceEvent::Paused);
            }
            SourceAction::Record(kind) => self.source_record = Some(kind),
            SourceAction::EndHolder => self.source(SourceEvent::HolderEnded),
            SourceAction::Forget => {
                assert!(!self.has_forgotten.0, "it forgets once");
                self.has_forgotten.0 = true;
            }
            SourceAction::Run => self.source_runs = true,
            SourceAction::SendState => {
                let part = StatePart {
                    offset: 0,
                    bytes: 4,
                    has_more: false,
                };
                self.to_destination
                    .push_back((CONTROL, Message::State(part)));
            }
            SourceAction::SendSealed(digest) => {
                let state = KeptState {
                    bytes: 4,
                    digest: STATE_DIGEST,
                };
                self.to_destination
                    .push_back((CONTROL, Message::Sealed { digest, state }));
            }
            SourceAction::ArmLog
            | SourceAction::RoundEnded(_)
            | SourceAction::Free
            | SourceAction::Done(_) => {}
        }
    }

    fn destination(&mut self, event: DestinationEvent) {
        let before = self.destination.clone();
        match self.destination.handle(event) {
            Ok(actions) => actions
                .into_iter()
                .for_each(|action| self.do_for_destination(action)),
            Err(_) => assert_eq!(self.destination, before, "what is refused changes nothing"),
        }
    }

    fn do_for_destination(&mut self, action: DestinationAction) {
        match action {
            DestinationAction::Admit => self.destination(DestinationEvent::Admitted),
            DestinationAction::Send(message) => self.to_source.push_back((CONTROL, message)),
            DestinationAction::Request(run) => {
                self.to_source
                    .push_back((StreamIndex(1), Message::Request { run }));
            }
            DestinationAction::Acknowledge(stream, message) => {
                self.to_source.push_back((stream, message));
            }
            DestinationAction::Store(stream, parts) => {
                assert!(
                    parts
                        .iter()
                        .all(|part| part.count() > 0 && part.end().0 <= PAGES)
                );
                self.destination(DestinationEvent::Stored(stream));
            }
            DestinationAction::Punch => self.destination(DestinationEvent::Punched),
            DestinationAction::Load => self.destination(DestinationEvent::Loaded),
            DestinationAction::SendMap => {
                let bits = self.destination.missing().part(0, PAGES);
                self.to_source.push_back((
                    CONTROL,
                    Message::Map {
                        first: 0,
                        count: 12,
                        bits,
                    },
                ));
            }
            DestinationAction::Record(kind) => self.destination_record = Some(kind),
            DestinationAction::Forget => {
                assert!(!self.has_forgotten.1, "it forgets once");
                self.has_forgotten.1 = true;
            }
            DestinationAction::Enter => self.destination_runs = true,
            DestinationAction::Later(_)
            | DestinationAction::TakeState
            | DestinationAction::Close(_)
            | DestinationAction::Poison(_)
            | DestinationAction::Free
            | DestinationAction::Done(_) => {}
        }
    }

    fn give_to_destination(&mut self, stream: StreamIndex, message: Message) {
        match message {
            Message::Pages(record) => {
                self.destination(DestinationEvent::Pages {
                    stream,
                    record,
                    is_intact: true,
                });
            }
            Message::State(part) => self.destination(DestinationEvent::State {
                stream,
                part,
                digest: STATE_DIGEST,
            }),
            message => self.destination(DestinationEvent::Received(stream, message)),
        }
    }

    /// One step; the first byte says which.
    fn step(&mut self, input: &mut &[u8]) {
        let [number, argument] = take(input);
        let stream = StreamIndex(u16::from(argument & 1));
        match number % 22 {
            0..=2 => {
                if let Some((stream, message)) = self.to_destination.pop_front() {
                    self.give_to_destination(stream, message);
                }
            }
            3..=5 => {
                if let Some((stream, message)) = self.to_source.pop_front() {
                    self.source(SourceEvent::Received(stream, message));
                }
            }
            6 => self.source(SourceEvent::Room(stream, u16::from(argument >> 1))),
            7 => {
                if let Some(kind) = self.source_record.take() {
                    self.source(SourceEvent::Recorded(kind));
                }
            }
            8 => {
                if let Some(kind) = self.destination_record.take() {
                    self.destination(DestinationEvent::Recorded(kind));
                }
            }
            9 => {
                if let Some(kind) = self.source_record.take() {
                    self.source(SourceEvent::RecordFailed(kind));
                }
            }
            10 => {
                if let Some(kind) = self.destination_record.take() {
                    self.destination(DestinationEvent::RecordFailed(kind));
                }
            }
            11 => {
                let timer = [Timer::Reconnect, Timer::BlackoutLimit, Timer::Retry]
                    [usize::from(argument % 3)];
                self.source(SourceEvent::Timer(timer));
                self.destination(DestinationEvent::Timer(timer));
            }
            12 => self.word_to_source(argument),
            13 => self.word_to_destination(argument),
            14 => {
                self.to_destination.retain(|(other, _)| *other != stream);
                self.to_source.retain(|(other, _)| *other != stream);
                self.source(SourceEvent::StreamDown(stream));
                self.destination(DestinationEvent::StreamDown(stream));
            }
            15 | 16 => {
                self.destination(DestinationEvent::StreamUp(stream));
                self.source(SourceEvent::StreamUp(stream));
            }
            17 => {
                let decisions = [
                    Decision::NextRound,
                    Decision::Postcopy,
                    Decision::StopAndCopy,
                    Decision::Cancel,
                ];
                self.source(SourceEvent::Decided(decisions[usize::from(argument % 4)]));
            }
            18 => {
                let first = u64::from_le_bytes(take(input));
                self.destination(DestinationEvent::Fault(PageRange::new(
                    PageIndex(first),
                    u64::from(argument),
                )));
            }
            19 => {
                let [round, count] = take(input);
                let run = PageRange::new(PageIndex(u64::from(argument)), u64::from(count));
                let record = PageRecord {
                    run,
                    round: Round(round),
                    content: Content::Zero,
                    checksum: 0,
                };
                self.destination(DestinationEvent::Pages {
                    stream,
                    record,
                    is_intact: round % 2 == 0,
                });
            }
            _ => self.hostile(argument, input),
        }
    }

    fn word_to_source(&mut self, argument: u8) {
        let words = [
            Some(Word::Cancel),
            self.destination.token().map(Word::Accept),
            Some(Word::Accept(Token::new(Secret([argument; 32])))),
            Some(Word::Refuse),
            Some(Word::Release),
        ];
        if let Some(word) = words[usize::from(argument % 5)] {
            self.source(SourceEvent::Word(word));
        }
    }

    fn word_to_destination(&mut self, argument: u8) {
        let words = [
            Some(Word::Refuse),
            self.source.token().map(Word::Accept),
            Some(Word::Accept(Token::new(Secret([argument; 32])))),
            Some(Word::Abandon),
            Some(Word::Release),
        ];
        if let Some(word) = words[usize::from(argument % 5)] {
            self.destination(DestinationEvent::Word(word));
        }
    }

    /// A message from nobody.
    fn hostile(&mut self, argument: u8, input: &mut &[u8]) {
        let [kind, length] = take(input);
        let (payload, rest) = input.split_at(usize::from(length).min(input.len()));
        *input = rest;
        let frame = Frame {
            kind: u16::from(kind % 64),
            flags: 0,
            payload: payload.to_vec(),
        };
        let Ok(received) = Message::of(&frame) else {
            return;
        };
        let stream = StreamIndex(u16::from(argument >> 1 & 3));
        match argument & 1 {
            0 => self.source(SourceEvent::Received(stream, received.message)),
            _ => self.give_to_destination(stream, received.message),
        }
    }

    fn check(&self) {
        assert!(!(self.source_runs && self.destination_runs), "two owners");
        // What is said agrees with what is.
        if self.source.phase() == Phase::Postcopy {
            assert!(!self.source_runs);
        }
        let _ = (
            self.source.owner(),
            self.destination.owner(),
            self.source.dirty_pages(),
        );
    }
}

pub(crate) fn run(mut input: &[u8]) -> bool {
    let mut pair = Pair::new();
    while !input.is_empty() {
        pair.step(&mut input);
        pair.check();
    }
    pair.destination_runs || pair.source.phase() == Phase::Cancelled
}

pub(crate) fn seeds() -> Vec<Vec<u8>> {
    let up = [15, 0, 15, 1, 0, 0, 3, 0];
    let round = [6, 0xff, 0, 0, 3, 0];
    // To the switch: end marks, acknowledgements, the seal.
    let switch = [17, 1, 0, 0, 3, 0, 0, 0, 3, 0, 7, 0, 0, 0, 0, 0, 0, 0];
    let commit = [3, 0, 7, 0, 0, 0, 8, 0];
    let complete = [3, 0, 3, 0, 3, 0, 3, 0, 0, 0];
    vec![
        [&up[..], &round, &switch, &commit, &complete].concat(),
        [&up[..], &round, &[12, 0, 0, 0]].concat(),
    ]
}
