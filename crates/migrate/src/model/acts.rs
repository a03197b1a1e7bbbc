//! What can happen in a state, and what it does.

use pagetide_memory::{PageIndex, PageRange};

use super::Bounds;
use super::world::{Fate, Holder, LinkState, Packet, World, old_token};
use crate::convergence::Decision;
use crate::destination::Step as DestinationStep;
use crate::ids::Token;
use crate::journal::{RecordKind, Side};
use crate::message::{CONTROL, Message, StreamIndex};
use crate::source::Step as SourceStep;

/// One step of the environment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Act {
    // What happens by itself.
    ToDestination(StreamIndex),
    ToSource(StreamIndex),
    Room(StreamIndex),
    /// A store ends, or that it has ended is reported.
    FinishStore(StreamIndex),
    Loaded,
    Synced(Side),
    Decide(Decision),
    Reconnect(StreamIndex),
    /// The destination finds out that a stream is lost.
    NoticeLoss(StreamIndex),
    Retry(Side),
    Restart(Side, Option<RecordKind>),
    HolderEnds,
    // The guest, clocks and operators.
    Write(u64),
    /// The guest, or the loading of state, reads a page that is not there; it is asked for on this stream.
    Touch(u64, StreamIndex),
    ReconnectTimer(Side),
    Carry(Side),
    Fenced(Side),
    Abandon,
    /// An operator, or a deadline, wants postcopy while a round is being sent.
    Switch,
    // Disturbances.
    Cut(StreamIndex, LinkState),
    SyncFails(Side),
    Crash(Side),
    BlackoutLimit,
    Cancel,
    Refuse,
    Release(Side),
    WrongToken(Side, Token),
    Damage(StreamIndex),
    /// How many pages a record has, which has no bytes.
    DamagePages(StreamIndex),
    DamageMap,
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
                | Self::HolderEnds
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
                | Self::Release(_)
                | Self::WrongToken(..)
                | Self::Damage(_)
                | Self::DamagePages(_)
                | Self::DamageMap
        )
    }
}

fn at(stream: StreamIndex) -> usize {
    usize::from(stream.0)
}

/// An operator can see that a process is dead, and says so only then.
fn is_dead(fate: Fate) -> bool {
    matches!(fate, Fate::Dead | Fate::Gone)
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

    /// The operator's word without which nothing goes on.
    pub(crate) fn is_for_operator(&self, act: &Act) -> bool {
        self.is_released && *act == Act::Abandon
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
        if self.holder == Holder::Ending {
            out.push(Act::HolderEnds);
        }
        if *self.source.step() == SourceStep::Deciding {
            if self.source.round().0 < bounds.rounds {
                out.push(Act::Decide(Decision::NextRound));
            }
            out.push(Act::Decide(Decision::Postcopy));
            out.push(Act::Decide(Decision::StopAndCopy));
        }
        // With more streams there would be too many states.
        if bounds.streams == 1 && *self.source.step() == SourceStep::Precopy {
            out.push(Act::Switch);
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
            if is_dead(self.destination_fate) {
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
            if have.is_none() && is_accessed && !self.is_asked_for(page) {
                let links = (0..).map(StreamIndex).zip(&self.links);
                let up = links.filter(|(_, link)| link.state == LinkState::Up);
                out.extend(up.map(|(stream, _)| Act::Touch(page, stream)));
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
            if is_dead(self.source_fate) {
                out.push(Act::Fenced(Side::Destination));
            }
        }
        let is_source_lost = self.links[0].state == LinkState::Down && is_dead(self.source_fate);
        if self.destination_runs && (is_source_lost || self.is_released) {
            out.push(Act::Abandon);
        }
    }

    /// A request for the page is under way, or its answer.
    fn is_asked_for(&self, page: u64) -> bool {
        let has = |run: &PageRange| run.contains(PageIndex(page));
        self.links.iter().any(|link| {
            let is_asked = link
                .to_source
                .iter()
                .any(|message| matches!(message, Message::Request { run } if has(run)));
            let is_answered = link
                .to_destination
                .iter()
                .any(|packet| matches!(packet, Packet::Pages { record, .. } if has(&record.run)));
            is_asked || is_answered || link.storing.iter().any(|(stored, _)| *stored == page)
        })
    }

    fn disturbances(&self, out: &mut Vec<Act>) {
        for (stream, link) in (0..).map(StreamIndex).zip(&self.links) {
            if link.state == LinkState::Up {
                out.push(Act::Cut(stream, self.state_after_cut(stream)));
            }
            let is_damageable = |packet: &Packet| {
                matches!(
                    packet,
                    Packet::Pages {
                        is_intact: true,
                        ..
                    } | Packet::Message(Message::Map { .. })
                        | Packet::State(1..)
                )
            };
            if link.to_destination.front().is_some_and(is_damageable) {
                out.push(Act::Damage(stream));
            }
            let pages = self.source.missing().pages();
            let has_room = |packet: &Packet| matches!(packet, Packet::Pages { record, is_intact: true, .. } if record.run.end().0 < pages);
            if link.to_destination.front().is_some_and(has_room) {
                out.push(Act::DamagePages(stream));
            }
        }
        let is_map = |message: &Message| matches!(message, Message::Map { .. });
        if self.links[0].to_source.front().is_some_and(is_map) {
            out.push(Act::DamageMap);
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
            out.push(Act::Release(Side::Source));
            if !self.source_runs {
                out.push(Act::BlackoutLimit);
            }
            out.push(Act::WrongToken(Side::Source, old_token()));
        }
        if self.destination_fate == Fate::Alive {
            out.push(Act::Refuse);
            out.push(Act::Release(Side::Destination));
            out.push(Act::WrongToken(Side::Destination, old_token()));
        }
    }
}
