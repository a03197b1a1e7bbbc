//! What can happen in a state, and what it does.

use pagetide_memory::{PageIndex, PageRange};

use super::Bounds;
use super::world::{
    Fate, LinkState, Packet, Version, World, commit_token, old_token, refusal_token,
};
use crate::convergence::Decision;
use crate::destination::{Destination, Step as DestinationStep};
use crate::event::{DestinationEvent, SourceEvent, Timer, Word};
use crate::ids::Token;
use crate::journal::{RecordKind, Side};
use crate::message::{CONTROL, Message, StreamIndex};
use crate::source::{Source, Step as SourceStep};

/// One step of the environment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Act {
    // What happens by itself.
    ToDestination(StreamIndex),
    ToSource(StreamIndex),
    Room(StreamIndex),
    FinishStore(StreamIndex),
    Loaded,
    Synced(Side),
    Decide(Decision),
    Reconnect(StreamIndex),
    /// The destination finds out that a stream is lost.
    NoticeLoss(StreamIndex),
    Retry(Side),
    Restart(Side, Option<RecordKind>),
    // The guest, clocks and operators.
    Write(u64),
    Touch(u64),
    ReconnectTimer(Side),
    Carry(Side),
    Fenced(Side),
    Abandon,
    // Disturbances.
    Cut(StreamIndex, LinkState),
    SyncFails(Side),
    Crash(Side),
    BlackoutLimit,
    Cancel,
    Refuse,
    WrongToken(Side, Token),
    Damage(StreamIndex),
}

impl Act {
    /// Whether it happens sooner or later if nobody disturbs: from every state such acts lead to the end.
    pub(crate) fn is_fair(&self) -> bool {
        matches!(
            self,
            Self::ToDestination(_)
                | Self::ToSource(_)
                | Self::Room(_)
                | Self::FinishStore(_)
                | Self::Loaded
                | Self::Synced(_)
                | Self::Decide(Decision::Postcopy | Decision::StopAndCopy)
                | Self::Reconnect(_)
                | Self::NoticeLoss(_)
                | Self::Retry(_)
                | Self::Restart(..)
        )
    }

    pub(crate) fn is_disturbance(&self) -> bool {
        matches!(
            self,
            Self::Cut(..)
                | Self::SyncFails(_)
                | Self::Crash(..)
                | Self::BlackoutLimit
                | Self::Cancel
                | Self::Refuse
                | Self::WrongToken(..)
                | Self::Damage(_)
        )
    }
}

fn at(stream: StreamIndex) -> usize {
    usize::from(stream.0)
}

impl World {
    pub(crate) fn acts(&self, bounds: &Bounds, out: &mut Vec<Act>) {
        if let Some(act) = self.independent() {
            out.push(act);
            return;
        }
        self.stream_acts(bounds, out);
        if self.source_fate == Fate::Alive {
            self.source_acts(bounds, out);
        }
        if self.destination_fate == Fate::Alive {
            self.destination_acts(bounds, out);
        }
        for side in [Side::Source, Side::Destination] {
            let (journal, fate) = self.of(side);
            if fate == Fate::Dead {
                out.push(Act::Restart(side, None));
                out.extend(
                    journal
                        .maybe
                        .iter()
                        .map(|kind| Act::Restart(side, Some(*kind))),
                );
            }
        }
        if self.disturbances_left > 0 {
            self.disturbances(out);
        }
    }

    /// An act whose effect does not depend on when it happens, if nothing disturbs any more: the other acts can wait, and
    /// the states in which they did not are left out.
    fn independent(&self) -> Option<Act> {
        if self.disturbances_left > 0 || self.source_fate != Fate::Alive {
            return None;
        }
        let mut links = (0..).map(StreamIndex).zip(&self.links);
        let is_stored = |message: &Message| matches!(message, Message::Stored { .. });
        let (stream, _) = links.find(|(_, link)| link.to_source.front().is_some_and(is_stored))?;
        Some(Act::ToSource(stream))
    }

    fn of(&self, side: Side) -> (&super::world::Journal, Fate) {
        match side {
            Side::Source => (&self.source_journal, self.source_fate),
            Side::Destination => (&self.destination_journal, self.destination_fate),
        }
    }

    fn stream_acts(&self, bounds: &Bounds, out: &mut Vec<Act>) {
        for stream in (0..bounds.streams).map(StreamIndex) {
            let link = &self.links[at(stream)];
            let is_read = self.destination_fate == Fate::Alive && link.storing.is_empty();
            if is_read
                && let Some(packet) = link.to_destination.front()
                && !self.must_wait(packet)
            {
                out.push(Act::ToDestination(stream));
            }
            if self.source_fate == Fate::Alive && !link.to_source.is_empty() {
                out.push(Act::ToSource(stream));
            }
            if !link.storing.is_empty() {
                out.push(Act::FinishStore(stream));
            }
            if link.state == LinkState::Half && self.destination_fate == Fate::Alive {
                out.push(Act::NoticeLoss(stream));
            }
            // A stream without the control stream joins nothing.
            let is_joinable = stream == CONTROL || self.links[0].state == LinkState::Up;
            if link.state == LinkState::Down && is_joinable && self.is_alive() && self.wants_link()
            {
                out.push(Act::Reconnect(stream));
            }
            let room = link.state == LinkState::Up && link.to_destination.is_empty();
            if room && self.source_fate == Fate::Alive && self.source.wants_room() {
                out.push(Act::Room(stream));
            }
        }
    }

    /// The destination has told the caller to wait until a page is stored.
    fn must_wait(&self, packet: &Packet) -> bool {
        let Packet::Pages { record, .. } = packet else {
            return false;
        };
        let mut storing = self.links.iter().flat_map(|link| &link.storing);
        let has_guard = self
            .destination
            .guards()
            .has(crate::guard::Guard::OneStoreAtATime);
        has_guard && storing.any(|(page, _)| record.run.contains(PageIndex(*page)))
    }

    /// Neither side reconnects when it has ended, unless the other has not.
    fn wants_link(&self) -> bool {
        !self.is_settled()
    }

    fn source_acts(&self, bounds: &Bounds, out: &mut Vec<Act>) {
        if self.source_journal.pending.is_some() {
            out.push(Act::Synced(Side::Source));
        }
        if *self.source.step() == SourceStep::Deciding {
            if self.source.round().0 < bounds.rounds {
                out.push(Act::Decide(Decision::NextRound));
            }
            out.push(Act::Decide(Decision::Postcopy));
            out.push(Act::Decide(Decision::StopAndCopy));
        }
        if matches!(
            self.source.step(),
            SourceStep::YieldFailed | SourceStep::ReturnFailed
        ) {
            out.push(Act::Retry(Side::Source));
        }
        if self.source_runs && self.writes_left > 0 {
            out.extend((0..bounds.written_pages).map(Act::Write));
        }
        let is_down = self.links[0].state != LinkState::Up;
        if is_down {
            out.push(Act::ReconnectTimer(Side::Source));
            if self.destination_fate == Fate::Alive && self.destination.token().is_some() {
                out.push(Act::Carry(Side::Source));
            }
            if self.destination_fate != Fate::Alive {
                out.push(Act::Fenced(Side::Source));
            }
        }
    }

    fn destination_acts(&self, bounds: &Bounds, out: &mut Vec<Act>) {
        if self.is_loading {
            out.push(Act::Loaded);
        }
        if self.destination_journal.pending.is_some() {
            out.push(Act::Synced(Side::Destination));
        }
        if matches!(
            self.destination.step(),
            DestinationStep::EnterFailed | DestinationStep::RefuseFailed
        ) {
            out.push(Act::Retry(Side::Destination));
        }
        for (page, have) in (0..).zip(&self.destination_memory) {
            let is_accessed = self.destination_runs || self.is_loading;
            if have.is_none()
                && is_accessed
                && !self.is_asked_for(page)
                && self.links[0].state == LinkState::Up
            {
                out.push(Act::Touch(page));
            }
            let is_written = page < bounds.written_pages && self.writes_left > 0;
            if have.is_some() && self.destination_runs && is_written {
                out.push(Act::Write(page));
            }
        }
        if self.links[0].state == LinkState::Down {
            out.push(Act::ReconnectTimer(Side::Destination));
            if self.source_fate == Fate::Alive && self.source.token().is_some() {
                out.push(Act::Carry(Side::Destination));
            }
            if self.source_fate != Fate::Alive {
                out.push(Act::Fenced(Side::Destination));
                if self.destination_runs {
                    out.push(Act::Abandon);
                }
            }
        }
    }

    /// A request for the page is under way, or its answer.
    fn is_asked_for(&self, page: u64) -> bool {
        let has = |run: &PageRange| run.contains(PageIndex(page));
        let link = &self.links[0];
        let is_asked = link
            .to_source
            .iter()
            .any(|message| matches!(message, Message::Request { run } if has(run)));
        let is_answered = link
            .to_destination
            .iter()
            .any(|packet| matches!(packet, Packet::Pages { record, .. } if has(&record.run)));
        is_asked || is_answered || link.storing.iter().any(|(stored, _)| *stored == page)
    }

    fn disturbances(&self, out: &mut Vec<Act>) {
        for (stream, link) in (0..).map(StreamIndex).zip(&self.links) {
            if link.state == LinkState::Up {
                // With nothing on the way, the destination finds out at once.
                let is_idle = link.to_destination.is_empty() && link.storing.is_empty();
                let state = if is_idle {
                    LinkState::Down
                } else {
                    LinkState::Half
                };
                out.push(Act::Cut(stream, state));
            }
            let is_damageable = |packet: &Packet| {
                matches!(
                    packet,
                    Packet::Pages {
                        is_intact: true,
                        ..
                    } | Packet::Message(Message::Map { .. })
                )
            };
            if link.to_destination.front().is_some_and(is_damageable) {
                out.push(Act::Damage(stream));
            }
        }
        for side in [Side::Source, Side::Destination] {
            let (journal, fate) = self.of(side);
            if fate != Fate::Alive {
                continue;
            }
            out.push(Act::Crash(side));
            if journal.pending.is_some() {
                out.push(Act::SyncFails(side));
            }
        }
        if self.source_fate == Fate::Alive {
            out.push(Act::Cancel);
            if !self.source_runs {
                out.push(Act::BlackoutLimit);
            }
            out.push(Act::WrongToken(Side::Source, old_token()));
        }
        if self.destination_fate == Fate::Alive {
            out.push(Act::Refuse);
            out.push(Act::WrongToken(Side::Destination, old_token()));
        }
    }

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
            Act::Reconnect(stream) => self.reconnect(stream),
            Act::NoticeLoss(stream) => self.notice_loss(stream),
            Act::Retry(Side::Source) => self.source(SourceEvent::Timer(Timer::Retry)).unwrap(),
            Act::Retry(Side::Destination) => {
                self.destination(DestinationEvent::Timer(Timer::Retry))
                    .unwrap();
            }
            Act::Restart(side, found) => self.restart(bounds, side, found),
            Act::Write(page) => self.write(page),
            Act::Touch(page) => {
                let run = PageRange::single(PageIndex(page));
                self.note_destination(DestinationEvent::Fault(run));
            }
            Act::ReconnectTimer(Side::Source) => {
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
                self.source_fate = Fate::Gone;
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

    fn synced(&mut self, side: Side) {
        let journal = match side {
            Side::Source => &mut self.source_journal,
            Side::Destination => &mut self.destination_journal,
        };
        let Some(kind) = journal.pending.take() else {
            return;
        };
        journal.synced.push(kind);
        journal.maybe.clear();
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
        let link = &mut self.links[at(stream)];
        link.state = LinkState::Down;
        link.to_destination.clear();
        link.storing.clear();
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
                    self.destination_fate = Fate::Gone;
                }
            }
            Side::Destination => {
                let event = DestinationEvent::Word(Word::Fenced);
                if self.destination(event).is_ok() {
                    self.roll_back_to_seal();
                    self.source_fate = Fate::Gone;
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
            Act::WrongToken(Side::Source, token) => {
                self.note_source(SourceEvent::Word(Word::Accept(token)));
            }
            Act::WrongToken(Side::Destination, token) => {
                self.note_destination(DestinationEvent::Word(Word::Accept(token)));
            }
            Act::Damage(stream) => self.damage(stream),
            _ => {}
        }
    }

    /// Everything that was on the way is lost: what comes before the cut was delivered before.
    fn cut(&mut self, stream: StreamIndex, state: LinkState) {
        let link = &mut self.links[at(stream)];
        link.state = state;
        link.to_source.clear();
        if state == LinkState::Down {
            link.to_destination.clear();
            link.storing.clear();
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
        journal.synced.extend(found);
        journal.maybe.clear();
        let last = journal.synced.last().copied();
        match side {
            Side::Source => {
                let fresh = Source::with_guards(
                    commit_token(),
                    bounds.pages,
                    bounds.streams,
                    bounds.guards,
                );
                match fresh.restarted(refusal_token().hash(), last) {
                    Ok((source, actions)) => {
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
                let (destination, actions) = fresh.restarted(commit_token().hash(), last);
                self.destination = destination;
                self.destination_fate = Fate::Alive;
                self.do_destination(actions);
            }
        }
    }

    fn damage(&mut self, stream: StreamIndex) {
        match self.links[at(stream)].to_destination.front_mut() {
            Some(Packet::Pages { is_intact, .. }) => *is_intact = false,
            Some(Packet::Message(Message::Map { bits, .. })) => {
                self.is_map_damaged = true;
                bits.iter_mut().take(1).for_each(|byte| *byte ^= 1);
            }
            _ => {}
        }
    }
}
