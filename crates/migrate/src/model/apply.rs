//! What an act does.

use pagetide_memory::{PageIndex, PageRange};

use super::Bounds;
use super::acts::Act;
use super::world::{
    Fate, Holder, LinkState, Packet, Store, Version, World, commit_token, refusal_token,
};
use crate::convergence::Decision;
use crate::destination::Destination;
use crate::event::{DestinationAction, DestinationEvent, SourceEvent, Timer, Word};
use crate::journal::{RecordKind, Side};
use crate::message::{Content, Message, StreamIndex};
use crate::source::{Memory, Source, Step as SourceStep};

fn at(stream: StreamIndex) -> usize {
    usize::from(stream.0)
}

impl World {
    pub(crate) fn apply(&mut self, bounds: &Bounds, act: &Act) {
        if act.is_disturbance() {
            self.disturb(act);
            return;
        }
        match *act {
            Act::ToDestination(stream) => self.deliver_to_destination(stream),
            Act::ToSource(stream) => self.deliver_to_source(stream),
            Act::Room(stream) => self.source(SourceEvent::Room(stream, 1)).unwrap(),
            Act::FinishStore(stream) => self.finish_store(stream),
            Act::Loaded => {
                self.is_loading = false;
                self.destination_state = self.received_state;
                self.note_destination(DestinationEvent::Loaded);
            }
            Act::Synced(side) => self.synced(side),
            Act::Decide(decision) => self.source(SourceEvent::Decided(decision)).unwrap(),
            Act::Switch => self
                .source(SourceEvent::Decided(Decision::Postcopy))
                .unwrap(),
            Act::Reconnect(stream) => self.reconnect(stream),
            Act::NoticeLoss(stream) => self.notice_loss(stream),
            Act::Retry(Side::Source) => self.source(SourceEvent::Timer(Timer::Retry)).unwrap(),
            Act::Retry(Side::Destination) => {
                self.destination(DestinationEvent::Timer(Timer::Retry))
                    .unwrap();
            }
            Act::Restart(side, found) => self.restart(bounds, side, found),
            Act::HolderEnds => {
                self.holder = Holder::Ended;
                self.note_source(SourceEvent::HolderEnded);
            }
            Act::Write(page) => self.write(page),
            Act::Touch(page, stream) => self.touch(page, stream),
            Act::ReconnectTimer(Side::Source) => {
                self.has_given_up |= matches!(self.source.step(), SourceStep::Ended(_));
                self.note_source(SourceEvent::Timer(Timer::Reconnect));
            }
            Act::ReconnectTimer(Side::Destination) => {
                self.note_destination(DestinationEvent::Timer(Timer::Reconnect));
            }
            Act::Carry(Side::Source) => {
                self.note_source(SourceEvent::Word(Word::Accept(refusal_token())));
            }
            Act::Carry(Side::Destination) => {
                self.note_destination(DestinationEvent::Word(Word::Accept(commit_token())));
            }
            Act::Fenced(side) => self.fenced(side),
            Act::Abandon => {
                if self.source_fate != Fate::Alive {
                    self.source_fate = Fate::Gone;
                }
                self.note_destination(DestinationEvent::Word(Word::Abandon));
            }
            _ => {}
        }
    }

    /// An event that the machine may refuse.
    fn note_source(&mut self, event: SourceEvent) {
        let _ = self.source(event);
    }

    fn note_destination(&mut self, event: DestinationEvent) {
        let _ = self.destination(event);
    }

    /// A page is asked for on one of the streams, which is the caller's to choose.
    fn touch(&mut self, page: u64, stream: StreamIndex) {
        let run = PageRange::single(PageIndex(page));
        let Ok(actions) = self.destination.handle(DestinationEvent::Fault(run)) else {
            return;
        };
        for action in actions {
            match action {
                DestinationAction::Request(run) => self.answer(stream, Message::Request { run }),
                other => self.do_destination(vec![other]),
            }
        }
    }

    fn synced(&mut self, side: Side) {
        let journal = match side {
            Side::Source => &mut self.source_journal,
            Side::Destination => &mut self.destination_journal,
        };
        let Some(kind) = journal.pending.take() else {
            return;
        };
        let last = journal.synced.last().copied();
        let is_in_order = kind.may_follow(last, side);
        journal.synced.push(kind);
        journal.maybe.clear();
        self.has_wrong_journal |= !is_in_order;
        match side {
            Side::Source => self.note_source(SourceEvent::Recorded(kind)),
            Side::Destination => self.note_destination(DestinationEvent::Recorded(kind)),
        }
    }

    fn sync_fails(&mut self, side: Side) {
        let journal = match side {
            Side::Source => &mut self.source_journal,
            Side::Destination => &mut self.destination_journal,
        };
        let Some(kind) = journal.pending.take() else {
            return;
        };
        journal.maybe.push(kind);
        match side {
            Side::Source => self.note_source(SourceEvent::RecordFailed(kind)),
            Side::Destination => self.note_destination(DestinationEvent::RecordFailed(kind)),
        }
    }

    fn reconnect(&mut self, stream: StreamIndex) {
        // What the source had not read of the connection before is gone.
        self.links[at(stream)].to_source.clear();
        self.connect(stream);
    }

    fn notice_loss(&mut self, stream: StreamIndex) {
        self.links[at(stream)].state = LinkState::Down;
        self.lose_at_destination(stream);
        self.destination(DestinationEvent::StreamDown(stream))
            .unwrap();
    }

    fn write(&mut self, page: u64) {
        self.writes_left -= 1;
        let index = usize::try_from(page).unwrap();
        let next: Version = self
            .truth
            .iter()
            .copied()
            .max()
            .unwrap_or(0)
            .max(self.truth_state)
            + 1;
        self.truth[index] = next;
        self.truth_state = next;
        if self.source_runs {
            self.source_memory[index] = next;
            self.source_state = next;
            self.log |= 1 << page;
        } else {
            self.destination_memory[index] = Some(next);
            self.destination_state = Some(next);
        }
    }

    /// An operator knows that the other host is dead. What ran only there is lost, by that word.
    fn fenced(&mut self, side: Side) {
        match side {
            Side::Source => {
                let knew = *self.source.step() == SourceStep::Postcopy;
                if self.source(SourceEvent::Word(Word::Fenced)).is_ok() {
                    self.is_fenced_wrongly |= knew;
                    self.truth.clone_from(&self.source_memory);
                    self.truth_state = self.source_state;
                    // Its host may come back: it has its journal, and no memory.
                }
            }
            Side::Destination => {
                let event = DestinationEvent::Word(Word::Fenced);
                if self.destination(event).is_ok() {
                    self.roll_back_to_seal();
                    // Its host may come back, unless it would run the VM from the seal: its journal is not used then.
                    let journal = &self.source_journal;
                    let is_bound = journal.synced.last() == Some(&RecordKind::Yielded)
                        && !journal.maybe.contains(&RecordKind::RunningAgain);
                    if !is_bound {
                        self.source_fate = Fate::Gone;
                    }
                }
            }
        }
    }

    /// The VM of a destination whose source is dead: what the source ran after its seal is lost.
    fn roll_back_to_seal(&mut self) {
        self.truth_state = self.destination_state.unwrap_or(self.truth_state);
        let pages = self.truth.iter_mut().zip(&self.destination_memory);
        pages.for_each(|(truth, have)| *truth = have.unwrap_or(*truth));
    }

    fn disturb(&mut self, act: &Act) {
        match *act {
            Act::Cut(stream, state) => self.cut(stream, state),
            Act::SyncFails(side) => self.sync_fails(side),
            Act::Crash(Side::Source) => self.crash_source(),
            Act::Crash(Side::Destination) => self.crash_destination(),
            Act::BlackoutLimit => self.note_source(SourceEvent::Timer(Timer::BlackoutLimit)),
            Act::Cancel => self.note_source(SourceEvent::Word(Word::Cancel)),
            Act::Refuse => self.note_destination(DestinationEvent::Word(Word::Refuse)),
            Act::Release(Side::Source) => self.release_source(),
            Act::Release(Side::Destination) => {
                self.note_destination(DestinationEvent::Word(Word::Release));
            }
            Act::WrongToken(Side::Source, token) => {
                self.note_source(SourceEvent::Word(Word::Accept(token)));
            }
            Act::WrongToken(Side::Destination, token) => {
                self.note_destination(DestinationEvent::Word(Word::Accept(token)));
            }
            Act::Damage(stream) => self.damage(stream),
            Act::DamagePages(stream) => self.damage_pages(stream),
            Act::DamageMap => self.damage_map(),
            _ => {}
        }
    }

    fn release_source(&mut self) {
        let has_ended = matches!(self.source.step(), SourceStep::Ended(_));
        if self.source(SourceEvent::Word(Word::Release)).is_ok() {
            self.has_given_up = true;
            self.is_released |= !has_ended;
        }
    }

    /// Everything that was on the way is lost: what comes before the cut was delivered before.
    pub(crate) fn cut(&mut self, stream: StreamIndex, state: LinkState) {
        let link = &mut self.links[at(stream)];
        link.state = state;
        link.to_source.clear();
        if state == LinkState::Down {
            self.lose_at_destination(stream);
            self.destination(DestinationEvent::StreamDown(stream))
                .unwrap();
        }
        if self.source_fate == Fate::Alive {
            self.source(SourceEvent::StreamDown(stream)).unwrap();
        }
    }

    fn crash_source(&mut self) {
        self.source_fate = Fate::Dead;
        self.source_runs = false;
        let pending = self.source_journal.pending.take();
        self.source_journal.maybe.extend(pending);
        for link in &mut self.links {
            link.to_source.clear();
            if link.state == LinkState::Up {
                link.state = LinkState::Half;
            }
        }
    }

    fn crash_destination(&mut self) {
        self.destination_fate = Fate::Dead;
        self.destination_runs = false;
        self.destination_memory.fill(None);
        (self.received_state, self.destination_state, self.is_loading) = (None, None, false);
        let pending = self.destination_journal.pending.take();
        self.destination_journal.maybe.extend(pending);
        for stream in (0..).map(StreamIndex).take(self.links.len()) {
            let link = &mut self.links[at(stream)];
            let was_up = link.state == LinkState::Up;
            link.state = LinkState::Down;
            link.to_destination.clear();
            link.to_source.clear();
            link.storing.clear();
            link.store = Store::default();
            if was_up && self.source_fate == Fate::Alive {
                self.source(SourceEvent::StreamDown(stream)).unwrap();
            }
        }
    }

    /// A process begins again with what its journal has. Of the records that may be there, `found` is.
    fn restart(&mut self, bounds: &Bounds, side: Side, found: Option<RecordKind>) {
        let journal = match side {
            Side::Source => &mut self.source_journal,
            Side::Destination => &mut self.destination_journal,
        };
        let last = journal.synced.last().copied();
        let is_in_order = found.is_none_or(|found| found.may_follow(last, side));
        journal.synced.extend(found);
        journal.maybe.clear();
        let last = found.or(last);
        self.has_wrong_journal |= !is_in_order;
        match side {
            Side::Source => {
                let fresh = Source::with_guards(
                    commit_token(),
                    bounds.pages,
                    bounds.streams,
                    bounds.guards,
                );
                let memory = match self.holder {
                    Holder::Ended => Memory::Gone,
                    // The source did not come to end it.
                    Holder::Lives | Holder::Ending => Memory::Held,
                };
                match fresh.restarted(refusal_token().hash(), last, memory) {
                    Ok((source, actions)) => {
                        self.holder = Holder::Lives;
                        // The vCPUs' state is that of the seal.
                        self.source_state = self.sealed_state;
                        self.source = source;
                        self.source_fate = Fate::Alive;
                        self.do_source(actions);
                    }
                    Err(_) => self.source_fate = Fate::Gone,
                }
            }
            Side::Destination => {
                let fresh = Destination::with_guards(
                    refusal_token(),
                    bounds.pages,
                    bounds.streams,
                    bounds.guards,
                );
                let records = &self.destination_journal.synced;
                let (destination, actions) = fresh.restarted(commit_token().hash(), records);
                self.destination = destination;
                self.destination_fate = Fate::Alive;
                self.do_destination(actions);
            }
        }
    }

    /// A record without bytes, whose length would tell.
    fn damage_pages(&mut self, stream: StreamIndex) {
        let front = self.links[at(stream)].to_destination.front_mut();
        if let Some(Packet::Pages {
            record, is_intact, ..
        }) = front
        {
            record.run = PageRange::new(record.run.first(), record.run.count() + 1);
            record.content = Content::Zero;
            *is_intact = false;
        }
    }

    fn damage_map(&mut self) {
        if let Some(Message::Map { bits, .. }) = self.links[0].to_source.front_mut() {
            self.is_map_damaged = true;
            bits.iter_mut().take(1).for_each(|byte| *byte ^= 1);
        }
    }

    fn damage(&mut self, stream: StreamIndex) {
        match self.links[at(stream)].to_destination.front_mut() {
            Some(Packet::Pages { is_intact, .. }) => *is_intact = false,
            Some(Packet::State(version)) => *version = 0,
            Some(Packet::Message(Message::Map { bits, .. })) => {
                self.is_map_damaged = true;
                bits.iter_mut().take(1).for_each(|byte| *byte ^= 1);
            }
            _ => {}
        }
    }
}
