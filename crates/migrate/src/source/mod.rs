//! The source: it has the VM until it yields, and its memory until everything has arrived.

mod ending;
mod messages;
mod operator;
mod sending;

use std::collections::VecDeque;

use pagetide_memory::PageRange;
use thiserror::Error;

use crate::convergence::Decision;
use crate::event::{Outcome, Owner, Phase, Refused, SourceAction, SourceEvent, Timer};
use crate::guard::{Guard, Guards};
use crate::ids::{Token, TokenHash};
use crate::journal::RecordKind;
use crate::message::{CONTROL, Message};
use crate::pages::PageSet;
use crate::rounds::Round;
use crate::streams::Streams;
use crate::takeover::TakeOver;

/// What the source waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Step {
    /// The destination's *accepted*.
    Connecting,
    /// The journal.
    Opening,
    /// Room in a stream, and acknowledgements.
    Precopy,
    /// A decision, at the end of a round.
    Deciding,
    /// What was written since the last harvest.
    Harvesting,
    /// The last vCPU's stop.
    Pausing(Switch),
    /// What was written until the stop.
    LastHarvest(Switch),
    /// Room in a stream: the VM is paused, and its dirty pages are sent before the switch.
    LastRound,
    /// The acknowledgements of all end marks.
    Marking,
    /// The record *sealed*.
    Sealing,
    /// The destination's *ready*.
    Sealed,
    /// The record *yielded*.
    Yielding,
    /// A later record: *yielded* failed to sync.
    YieldFailed,
    /// The destination's *entered*, or *r*.
    Yielded,
    /// The destination's *complete*.
    Postcopy,
    /// The record *running again*.
    Returning,
    /// The same, which failed to sync.
    ReturnFailed,
    /// The operator's release: the VM is lost.
    Lost,
    /// Nothing.
    Ended(Outcome),
}

/// How the VM is moved when it has stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Switch {
    /// Dirty pages are sent first.
    StopAndCopy,
    /// Dirty pages are missing at the destination.
    Postcopy,
}

/// What was sent on a stream and is not acknowledged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Sent {
    /// Pages.
    Pages(PageRange),
    /// An end mark.
    EndMark,
}

/// One stream.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub(crate) struct Stream {
    /// The oldest first.
    sent: VecDeque<Sent>,
    /// What an acknowledgement of all of it would count.
    sent_pages: u64,
    /// Its end mark was sent on this connection.
    has_mark: bool,
}

impl Stream {
    fn push(&mut self, sent: Sent) {
        self.sent_pages += sent.pages();
        self.sent.push_back(sent);
    }
}

/// Why a source does not go on after its process has died.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum RestartError {
    /// The VM had not been sealed, so its vCPUs' state is gone.
    #[error("the VM was not sealed before its process died: it is lost")]
    NotSealed,
    /// The VM ran after the seal.
    #[error("the VM ran after its last seal: what is kept of it is old, and it is lost")]
    RanAfterSeal,
    /// The migration has ended.
    #[error("the migration has ended")]
    Finished,
    /// The holder has ended: the VM ran on without a record, or its memory was freed.
    #[error("no process keeps the VM's memory any more: it ran on, was released, or is lost")]
    NoMemory,
}

/// Whether the VM's memory is there for a source that starts again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Memory {
    /// The holder has handed it over.
    Held,
    /// There is no holder.
    Gone,
}

/// The source's machine.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Source {
    guards: Guards,
    step: Step,
    commit: Token,
    refusal_hash: Option<TokenHash>,
    round: Round,
    /// The pages of this round, or of postcopy, that are still to be sent.
    to_send: PageSet,
    /// Pages for the next round.
    dirty: PageSet,
    /// What was dirty at the seal.
    missing: PageSet,
    streams: Streams<Stream>,
    /// How it ends when the next record is settled.
    ending: Option<Outcome>,
    /// *r* has come.
    is_refused: bool,
    /// A cancel was asked for.
    is_cancelled: bool,
    /// The operator has said that the destination's host is dead. It may come back.
    is_fenced: bool,
    /// The guest ended before it was paused.
    has_guest_ended: bool,
    /// [`SourceAction::Forget`] was said.
    has_forgotten: bool,
}

impl Source {
    /// The source of a migration that begins. `pages` and `streams` are this side's own.
    pub fn new(commit: Token, pages: u64, streams: u16) -> Self {
        Self::with_guards(commit, pages, streams, Guards::default())
    }

    pub(crate) fn with_guards(commit: Token, pages: u64, streams: u16, guards: Guards) -> Self {
        Self {
            guards,
            step: Step::Connecting,
            commit,
            refusal_hash: None,
            round: Round::FIRST,
            to_send: PageSet::empty(pages),
            dirty: PageSet::empty(pages),
            missing: PageSet::empty(pages),
            streams: Streams::new(streams),
            ending: None,
            is_refused: false,
            is_cancelled: false,
            is_fenced: false,
            has_guest_ended: false,
            has_forgotten: false,
        }
    }

    /// The source after its process has died, by what its journal says.
    ///
    /// # Errors
    /// [`RestartError`].
    pub fn restart(
        _former: &TakeOver,
        commit: Token,
        refusal_hash: TokenHash,
        pages: u64,
        streams: u16,
        last: Option<RecordKind>,
        memory: Memory,
    ) -> Result<(Self, Vec<SourceAction>), RestartError> {
        Self::new(commit, pages, streams).restarted(refusal_hash, last, memory)
    }

    pub(crate) fn restarted(
        mut self,
        refusal_hash: TokenHash,
        last: Option<RecordKind>,
        memory: Memory,
    ) -> Result<(Self, Vec<SourceAction>), RestartError> {
        self.refusal_hash = Some(refusal_hash);
        // What the destination misses is for the destination to say.
        self.missing = PageSet::full(self.missing.pages());
        let mut out = Vec::new();
        match last {
            None => return Err(RestartError::NotSealed),
            Some(RecordKind::RunningAgain) => return Err(RestartError::RanAfterSeal),
            Some(RecordKind::Finished) => return Err(RestartError::Finished),
            Some(_) if memory == Memory::Gone => return Err(RestartError::NoMemory),
            Some(RecordKind::Sealed) => {
                self.step = Step::Sealed;
                self.return_to_vm(Outcome::Failed, &mut out);
            }
            Some(RecordKind::Entered) => self.step = Step::Postcopy,
            // A source's journal has no *refused*.
            Some(RecordKind::Yielded | RecordKind::Refused) => self.step = Step::Yielded,
        }
        Ok((self, out))
    }

    /// What has happened. Returns what is to be done.
    ///
    /// # Errors
    /// [`Refused`]: the machine is as before.
    pub fn handle(&mut self, event: SourceEvent) -> Result<Vec<SourceAction>, Refused> {
        let mut out = Vec::new();
        match event {
            SourceEvent::StreamUp(stream) => self.stream_up(stream, &mut out)?,
            SourceEvent::StreamDown(stream) => self.stream_down(stream, &mut out)?,
            SourceEvent::Received(stream, message) => self.received(stream, message, &mut out)?,
            SourceEvent::Room(stream, pages) => self.room(stream, pages, &mut out)?,
            SourceEvent::JournalOpened => self.begin(&mut out)?,
            SourceEvent::JournalFailed if self.step == Step::Opening => {
                self.give_up(Outcome::Failed, &mut out)?;
            }
            SourceEvent::JournalFailed => return Err(self.unexpected("journal-failed")),
            SourceEvent::Decided(decision) => self.decided(decision, &mut out)?,
            SourceEvent::Paused => self.paused(&mut out)?,
            SourceEvent::Harvested(written) => self.harvested(&written, &mut out)?,
            SourceEvent::GuestEnded => self.guest_ended(&mut out)?,
            SourceEvent::Recorded(kind) => self.recorded(kind, &mut out)?,
            SourceEvent::RecordFailed(kind) => self.record_failed(kind, &mut out)?,
            SourceEvent::HolderEnded => self.holder_ended(&mut out)?,
            SourceEvent::Timer(timer) => self.timer(timer, &mut out)?,
            SourceEvent::Word(word) => self.word(&word, &mut out)?,
        }
        Ok(out)
    }

    /// The pages that were dirty at the seal.
    pub fn missing(&self) -> &PageSet {
        &self.missing
    }

    /// The pages of this round that are still to be sent, and those for the next.
    pub fn dirty_pages(&self) -> u64 {
        self.to_send.count() + self.dirty.count()
    }

    /// The round of precopy.
    pub fn round(&self) -> Round {
        self.round
    }

    /// The commit token, for an operator to carry; `None` while it must not be known.
    pub fn token(&self) -> Option<Token> {
        matches!(self.step, Step::Yielded | Step::Postcopy).then_some(self.commit)
    }

    /// Where the migration stands.
    pub fn phase(&self) -> Phase {
        match self.step {
            Step::Connecting | Step::Opening => Phase::Connecting,
            Step::Precopy | Step::Deciding | Step::Harvesting | Step::Pausing(_) => Phase::Precopy,
            Step::LastHarvest(_) | Step::LastRound | Step::Marking | Step::Sealing => Phase::Paused,
            Step::Sealed | Step::Returning | Step::ReturnFailed => Phase::Sealed,
            Step::Yielding | Step::YieldFailed => Phase::Yielded,
            Step::Yielded if self.streams.is_up(CONTROL) => Phase::Yielded,
            Step::Yielded => Phase::Undecided,
            Step::Postcopy => Phase::Postcopy,
            Step::Lost | Step::Ended(Outcome::Lost) => Phase::Lost,
            Step::Ended(Outcome::Complete) => Phase::Complete,
            Step::Ended(Outcome::Cancelled) => Phase::Cancelled,
            Step::Ended(Outcome::Failed) => Phase::Failed,
            Step::Ended(Outcome::Refused) => Phase::Refused,
        }
    }

    /// Who owns the VM, as this side knows.
    pub fn owner(&self) -> Owner {
        match self.phase() {
            Phase::Yielded | Phase::Undecided => Owner::Undecided,
            Phase::Postcopy | Phase::Complete => Owner::Peer,
            Phase::Lost => Owner::Nobody,
            _ => Owner::Own,
        }
    }

    #[cfg(test)]
    pub(crate) fn step(&self) -> &Step {
        &self.step
    }

    fn unexpected(&self, message: &'static str) -> Refused {
        Refused::Unexpected {
            message,
            phase: self.phase(),
        }
    }

    /// Sends a message if the control stream is up. Whoever sends repeats it when the stream is up again.
    fn send(&self, message: Message, out: &mut Vec<SourceAction>) {
        if self.streams.is_up(CONTROL) {
            out.push(SourceAction::Send(message));
        }
    }

    fn timer(&mut self, timer: Timer, out: &mut Vec<SourceAction>) -> Result<(), Refused> {
        match timer {
            Timer::Retry => match self.step {
                Step::YieldFailed => {
                    self.step = Step::Yielding;
                    out.push(SourceAction::Record(RecordKind::Yielded));
                }
                Step::ReturnFailed => {
                    self.step = Step::Returning;
                    out.push(SourceAction::Record(RecordKind::RunningAgain));
                }
                _ => {}
            },
            Timer::Reconnect if self.streams.is_up(CONTROL) => {}
            Timer::Reconnect | Timer::BlackoutLimit => match self.step {
                // No clock decides after the yield.
                Step::Yielded | Step::Postcopy if self.guards.has(Guard::RefusalNeeded) => {}
                Step::Lost | Step::Postcopy => {}
                // The destination is not to be reached, and decides nothing any more.
                Step::Ended(_) if timer == Timer::Reconnect => self.forget(out),
                Step::Ended(_) => {}
                _ => self.give_up(Outcome::Failed, out)?,
            },
        }
        Ok(())
    }

    fn begin(&mut self, out: &mut Vec<SourceAction>) -> Result<(), Refused> {
        if self.step != Step::Opening {
            return Err(self.unexpected("journal-opened"));
        }
        // Nothing is known of earlier migrations: all pages are sent.
        self.to_send = PageSet::full(self.to_send.pages());
        self.step = Step::Precopy;
        out.push(SourceAction::ArmLog);
        self.end_round_if_sent(out);
        Ok(())
    }

    fn decided(&mut self, decision: Decision, out: &mut Vec<SourceAction>) -> Result<(), Refused> {
        match self.step {
            Step::Deciding => {}
            // An operator's switch, or a deadline: what the round has not sent is missing.
            Step::Precopy if decision == Decision::Postcopy => {}
            _ => return Err(self.unexpected("decided")),
        }
        match (decision, self.round.next()) {
            (Decision::Cancel, _) => return self.give_up(Outcome::Cancelled, out),
            (Decision::NextRound, Some(next)) => {
                self.round = next;
                self.step = Step::Harvesting;
                out.push(SourceAction::Harvest);
            }
            (Decision::StopAndCopy, Some(_)) => self.pause(Switch::StopAndCopy, out),
            // Without a further round, what is dirty is missing.
            (Decision::Postcopy | Decision::NextRound | Decision::StopAndCopy, _) => {
                self.pause(Switch::Postcopy, out);
            }
        }
        Ok(())
    }

    fn pause(&mut self, switch: Switch, out: &mut Vec<SourceAction>) {
        self.step = Step::Pausing(switch);
        out.push(SourceAction::Pause);
    }

    fn paused(&mut self, out: &mut Vec<SourceAction>) -> Result<(), Refused> {
        let Step::Pausing(switch) = self.step else {
            return Err(self.unexpected("paused"));
        };
        self.step = Step::LastHarvest(switch);
        if self.guards.has(Guard::LastHarvest) {
            out.push(SourceAction::Harvest);
            return Ok(());
        }
        self.last_harvested(switch, out);
        Ok(())
    }

    fn harvested(&mut self, written: &PageSet, out: &mut Vec<SourceAction>) -> Result<(), Refused> {
        match self.step {
            Step::Harvesting => {
                self.take_dirty(written);
                self.step = Step::Precopy;
                self.end_round_if_sent(out);
            }
            Step::LastHarvest(switch) => {
                self.dirty.insert_all(written);
                self.last_harvested(switch, out);
            }
            _ => return Err(self.unexpected("harvested")),
        }
        Ok(())
    }

    /// The pages of a new round.
    fn take_dirty(&mut self, written: &PageSet) {
        let empty = PageSet::empty(self.dirty.pages());
        let dirty = std::mem::replace(&mut self.dirty, empty);
        self.to_send.insert_all(&dirty);
        self.to_send.insert_all(written);
    }

    fn last_harvested(&mut self, switch: Switch, out: &mut Vec<SourceAction>) {
        let empty = PageSet::empty(self.dirty.pages());
        match (switch, self.round.next()) {
            (Switch::StopAndCopy, Some(next)) => {
                self.round = next;
                self.take_dirty(&empty);
                self.step = Step::LastRound;
                self.end_round_if_sent(out);
            }
            _ => {
                let rest = std::mem::replace(&mut self.to_send, empty);
                self.dirty.insert_all(&rest);
                self.mark_all(out);
            }
        }
    }
}
