//! The caller of the machines, as the model has it: it does what they want at once, but for records, stores and loading.

use pagetide_memory::{PageIndex, PageRange};

use super::Bounds;
use super::world::{Fate, Holder, LinkState, Packet, Store, Version, World};
use crate::event::{DestinationAction, DestinationEvent, Refused, SourceAction, SourceEvent};
use crate::ids::{Secret, VmId};
use crate::journal::{KeptState, RecordKind};
use crate::layout::{Area, Layout};
use crate::message::{CONTROL, Content, Message, Offer, PageRecord, StatePart, StreamIndex};
use crate::pages::PageSet;
use crate::rounds::Round;

fn at(stream: StreamIndex) -> usize {
    usize::from(stream.0)
}

fn page_at(page: PageIndex) -> usize {
    usize::try_from(page.0).unwrap()
}

/// What the seal says of a state.
fn kept_state(version: Version) -> KeptState {
    KeptState {
        bytes: 1,
        digest: [version; 32],
    }
}

/// The parts of a map as they are sent.
pub(crate) fn map_parts(map: &PageSet) -> impl Iterator<Item = Message> {
    let part = 1 << 12;
    (0..map.pages()).step_by(part).map(move |first| {
        let count = (map.pages() - first).min(part as u64);
        Message::Map {
            first,
            count: u32::try_from(count).unwrap(),
            bits: map.part(first, count),
        }
    })
}

pub(crate) fn offer(pages: u64) -> Offer {
    let area = Area {
        start: pagetide_memory::GuestAddress(0),
        bytes: pages * 4096,
    };
    Offer {
        vm: VmId([1; 16]),
        session: Secret([2; 32]),
        commit_hash: super::world::commit_token().hash(),
        layout: Layout::new(vec![area]).unwrap(),
        vcpus: 1,
        is_paused: false,
        verifies: false,
    }
}

impl World {
    /// From the first connection until the first page.
    pub(crate) fn agree(&mut self, bounds: &Bounds) {
        for stream in (0..bounds.streams).map(StreamIndex) {
            self.connect(stream);
        }
        let offer = Message::Offer(Box::new(offer(bounds.pages)));
        self.destination(DestinationEvent::Received(CONTROL, offer))
            .unwrap();
        self.deliver_to_source(CONTROL);
    }

    pub(crate) fn connect(&mut self, stream: StreamIndex) {
        self.lose_at_destination(stream);
        self.links[at(stream)].state = LinkState::Up;
        self.destination(DestinationEvent::StreamUp(stream))
            .unwrap();
        self.source(SourceEvent::StreamUp(stream)).unwrap();
    }

    /// Tells the source's machine, and does what it wants. Words and messages may be refused.
    pub(crate) fn source(&mut self, event: SourceEvent) -> Result<(), Refused> {
        let actions = self.source.handle(event)?;
        self.do_source(actions);
        Ok(())
    }

    pub(crate) fn do_source(&mut self, actions: Vec<SourceAction>) {
        for action in actions {
            self.do_for_source(action);
        }
    }

    fn do_for_source(&mut self, action: SourceAction) {
        match action {
            SourceAction::OpenJournal { .. } => self.source(SourceEvent::JournalOpened).unwrap(),
            SourceAction::Send(message) => self.send(CONTROL, Packet::Message(message)),
            SourceAction::SendEndMark(stream) => {
                self.send(stream, Packet::Message(Message::EndMark));
            }
            SourceAction::SendPages(stream, run, round) => self.send_pages(stream, run, round),
            SourceAction::SendMap => {
                let parts: Vec<_> = map_parts(self.source.missing()).collect();
                parts
                    .into_iter()
                    .for_each(|part| self.send(CONTROL, Packet::Message(part)));
            }
            SourceAction::SendState => self.send(CONTROL, Packet::State(self.source_state)),
            SourceAction::SendSealed(digest) => {
                let state = kept_state(self.source_state);
                let sealed = Message::Sealed { digest, state };
                self.send(CONTROL, Packet::Message(sealed));
            }
            SourceAction::Harvest => self.harvest(),
            SourceAction::Pause => {
                self.source_runs = false;
                self.source(SourceEvent::Paused).unwrap();
            }
            SourceAction::Record(kind) => {
                if kind == RecordKind::Sealed {
                    self.sealed_state = self.source_state;
                }
                self.source_journal.pending = Some(kind);
            }
            SourceAction::EndHolder => self.holder = Holder::Ending,
            SourceAction::Run => self.source_runs = true,
            SourceAction::Free => (self.is_freed, self.holder) = (true, Holder::Ended),
            SourceAction::Forget => self.source_fate = Fate::Forgotten,
            SourceAction::ArmLog | SourceAction::RoundEnded(_) | SourceAction::Done(_) => {}
        }
    }

    fn send_pages(&mut self, stream: StreamIndex, run: PageRange, round: Round) {
        let record = PageRecord {
            run,
            round,
            content: Content::Bytes,
            checksum: 0,
        };
        let pages = run.iter();
        let versions = pages
            .map(|page| self.source_memory[page_at(page)])
            .collect();
        let packet = Packet::Pages {
            record,
            versions,
            is_intact: true,
        };
        self.send(stream, packet);
    }

    fn harvest(&mut self) {
        let pages = self.source.missing().pages();
        let mut written = PageSet::empty(pages);
        for page in (0..pages).filter(|page| self.log >> page & 1 == 1) {
            written.insert(PageRange::single(PageIndex(page)));
        }
        self.log = 0;
        self.source(SourceEvent::Harvested(written)).unwrap();
    }

    fn send(&mut self, stream: StreamIndex, packet: Packet) {
        let link = &mut self.links[at(stream)];
        if link.state == LinkState::Up {
            link.to_destination.push_back(packet);
        }
    }

    /// Tells the destination's machine, and does what it wants.
    pub(crate) fn destination(&mut self, event: DestinationEvent) -> Result<(), Refused> {
        let actions = self.destination.handle(event)?;
        self.do_destination(actions);
        Ok(())
    }

    pub(crate) fn do_destination(&mut self, actions: Vec<DestinationAction>) {
        for action in actions {
            self.do_for_destination(action);
        }
    }

    pub(crate) fn answer(&mut self, stream: StreamIndex, message: Message) {
        let link = &mut self.links[at(stream)];
        if link.state == LinkState::Up {
            link.to_source.push_back(message);
        }
    }

    fn do_for_destination(&mut self, action: DestinationAction) {
        match action {
            DestinationAction::Admit => self.destination(DestinationEvent::Admitted).unwrap(),
            DestinationAction::Send(message) => self.answer(CONTROL, message),
            DestinationAction::Request(run) => self.answer(CONTROL, Message::Request { run }),
            DestinationAction::Acknowledge(stream, message) => self.answer(stream, message),
            // The caller has them from the record.
            DestinationAction::Store(..) | DestinationAction::Later(_) => {}
            DestinationAction::Close(stream) => self.close(stream),
            DestinationAction::Punch => {
                for page in self.destination.missing().iter() {
                    self.destination_memory[page_at(page)] = None;
                }
                self.destination(DestinationEvent::Punched).unwrap();
            }
            DestinationAction::TakeState => {}
            DestinationAction::Load => self.is_loading = true,
            DestinationAction::SendMap => {
                let parts: Vec<_> = map_parts(self.destination.missing()).collect();
                parts
                    .into_iter()
                    .for_each(|part| self.answer(CONTROL, part));
            }
            DestinationAction::Record(kind) => self.destination_journal.pending = Some(kind),
            DestinationAction::Enter => self.destination_runs = true,
            DestinationAction::Poison(pages) => {
                pages.iter().for_each(|page| self.poisoned |= 1 << page.0);
            }
            DestinationAction::Free => self.destination_memory.fill(None),
            DestinationAction::Done(_) => {}
            DestinationAction::Forget => self.destination_fate = Fate::Forgotten,
        }
    }

    /// The destination closes a stream; the source finds out by and by.
    fn close(&mut self, stream: StreamIndex) {
        self.lose_at_destination(stream);
        let link = &mut self.links[at(stream)];
        let was_up = link.state == LinkState::Up;
        link.state = LinkState::Down;
        link.to_source.clear();
        if was_up && self.source_fate == Fate::Alive {
            self.source(SourceEvent::StreamDown(stream)).unwrap();
        }
    }

    pub(crate) fn deliver_to_source(&mut self, stream: StreamIndex) {
        let message = self.links[at(stream)].to_source.pop_front().unwrap();
        let result = self.source(SourceEvent::Received(stream, message));
        self.note(&result);
        // It closes a stream whose message it refuses.
        if result.is_err() {
            self.cut(stream, self.state_after_cut(stream));
        }
    }

    /// The destination closes a stream whose message it refuses.
    fn refuse(&mut self, stream: StreamIndex) {
        self.close(stream);
        self.destination(DestinationEvent::StreamDown(stream))
            .unwrap();
    }

    /// With nothing on the way, the destination finds out at once.
    pub(crate) fn state_after_cut(&self, stream: StreamIndex) -> LinkState {
        let link = &self.links[at(stream)];
        if link.to_destination.is_empty() && link.storing.is_empty() {
            LinkState::Down
        } else {
            LinkState::Half
        }
    }

    pub(crate) fn deliver_to_destination(&mut self, stream: StreamIndex) {
        let packet = self.links[at(stream)].to_destination.pop_front().unwrap();
        match packet {
            Packet::Message(message) => {
                let result = self.destination(DestinationEvent::Received(stream, message));
                self.note(&result);
                if result.is_err() {
                    self.refuse(stream);
                }
            }
            Packet::State(version) => self.deliver_state(stream, version),
            Packet::Pages {
                record,
                versions,
                is_intact,
            } => {
                let event = DestinationEvent::Pages {
                    stream,
                    record,
                    is_intact,
                };
                let actions = match self.destination.handle(event) {
                    Ok(actions) => actions,
                    Err(error) => {
                        // A record that was changed may be refused.
                        if is_intact {
                            self.note(&Err(error));
                        }
                        return self.refuse(stream);
                    }
                };
                match actions.iter().find(|action| {
                    matches!(
                        action,
                        DestinationAction::Store(..) | DestinationAction::Later(_)
                    )
                }) {
                    Some(DestinationAction::Later(_)) => {
                        let packet = Packet::Pages {
                            record,
                            versions,
                            is_intact,
                        };
                        self.links[at(stream)].to_destination.push_front(packet);
                    }
                    Some(DestinationAction::Store(_, parts)) => {
                        let content = record.run.iter().zip(versions);
                        let stored = content
                            .filter(|(page, _)| parts.iter().any(|part| part.contains(*page)));
                        if record.round == Round::POSTCOPY {
                            self.links[at(stream)].store = Store::Postcopy;
                        }
                        self.links[at(stream)].storing = stored
                            // What was damaged is wrong wherever it is stored.
                            .map(|(page, version)| (page.0, if is_intact { version } else { 0 }))
                            .collect();
                    }
                    _ => {}
                }
                self.do_destination(actions);
            }
        }
    }

    /// The state is one part.
    fn deliver_state(&mut self, stream: StreamIndex, version: Version) {
        let KeptState { bytes, digest } = kept_state(version);
        let part = StatePart {
            offset: 0,
            bytes: u32::try_from(bytes).unwrap(),
            has_more: false,
        };
        let event = DestinationEvent::State {
            stream,
            part,
            digest,
        };
        match self.destination.handle(event) {
            Ok(actions) if actions.contains(&DestinationAction::TakeState) => {
                self.received_state = Some(version);
            }
            Ok(_) => {}
            Err(error) => {
                self.note(&Err(error));
                self.refuse(stream);
            }
        }
    }

    /// Nobody here is hostile, so no message is refused.
    fn note(&mut self, result: &Result<(), Refused>) {
        self.has_refused |= result.is_err() && !self.is_map_damaged;
    }

    /// A store of postcopy takes two steps: the guest may use the page before the machine knows of it.
    pub(crate) fn finish_store(&mut self, stream: StreamIndex) {
        let link = &mut self.links[at(stream)];
        if link.store != Store::Unreported {
            for (page, version) in &link.storing {
                self.destination_memory[usize::try_from(*page).unwrap()] = Some(*version);
            }
        }
        if link.store == Store::Postcopy {
            link.store = Store::Unreported;
            return;
        }
        link.storing.clear();
        link.store = Store::default();
        self.destination(DestinationEvent::Stored(stream)).unwrap();
    }

    /// What was on the way to the destination is lost. What it has stored is reported before the loss is, since the guest may
    /// have written it; what it was storing is not stored any more.
    pub(crate) fn lose_at_destination(&mut self, stream: StreamIndex) {
        if self.links[at(stream)].store == Store::Unreported {
            self.finish_store(stream);
        }
        let link = &mut self.links[at(stream)];
        link.to_destination.clear();
        link.storing.clear();
        link.store = Store::default();
    }
}
