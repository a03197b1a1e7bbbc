//! The destination: it takes pages, loads the VM's state, and runs the VM when it has *c*.

mod ending;
mod messages;
mod pages;

use pagetide_memory::PageRange;

use crate::event::{
    DestinationAction, DestinationEvent, Outcome, Owner, Phase, Refused, Timer, Word,
};
use crate::guard::Guards;
use crate::ids::{MapDigest, Token, TokenHash};
use crate::journal::{KeptState, RecordKind};
use crate::message::{CONTROL, Message, StreamIndex};
use crate::pages::PageSet;
use crate::rounds::RoundBytes;
use crate::streams::Streams;
use crate::takeover::TakeOver;

/// What the destination waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Step {
    /// The source's offer.
    Connecting,
    /// Whether this host can take the VM.
    Admitting,
    /// Pages, and the seal.
    Receiving,
    /// That missing pages have no content.
    Punching,
    /// The vCPUs' and devices' state.
    Loading,
    /// *c*.
    Ready,
    /// The record *entered*.
    Entering,
    /// The same, which failed to sync.
    EnterFailed,
    /// Missing pages, then the source's *released*: the VM runs.
    Running,
    /// The record *refused*.
    Refusing,
    /// The same, which failed to sync.
    RefuseFailed,
    /// That the source has *r*.
    Refused,
    /// The operator's release: the VM is lost.
    Lost,
    /// Nothing.
    Ended(Outcome),
}

/// One stream.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub(crate) struct Stream {
    /// The parts of a record that are being stored.
    storing: Vec<PageRange>,
    /// The whole record's pages.
    record_pages: u32,
    /// The record that is being stored is one of postcopy.
    is_postcopy: bool,
}

/// What a finished migration was: *finished* itself does not say.
fn finished_as(records: &[RecordKind]) -> Outcome {
    if records.contains(&RecordKind::Entered) {
        Outcome::Complete
    } else if records.contains(&RecordKind::Refused) {
        Outcome::Refused
    } else {
        // It never entered, and gave no *r*: as if it had never accepted.
        Outcome::Failed
    }
}

/// The destination's machine.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Destination {
    guards: Guards,
    step: Step,
    refusal: Token,
    commit_hash: Option<TokenHash>,
    /// The newest round that was taken of each page.
    rounds: RoundBytes,
    /// The missing map: as it comes in until the seal, then what is still missing.
    missing: PageSet,
    /// The digest of the map as it was at the seal.
    map_digest: Option<MapDigest>,
    /// What has come of the state: its length and its digest up to there.
    state: KeptState,
    has_whole_state: bool,
    streams: Streams<Stream>,
    /// Records of postcopy that were dropped because their pages were there.
    duplicates: u64,
    /// [`DestinationAction::Forget`] was said.
    has_forgotten: bool,
}

impl Destination {
    /// The destination of a migration that begins. `pages` is what its host has admitted.
    pub fn new(refusal: Token, pages: u64, streams: u16) -> Self {
        Self::with_guards(refusal, pages, streams, Guards::default())
    }

    pub(crate) fn with_guards(refusal: Token, pages: u64, streams: u16, guards: Guards) -> Self {
        Self {
            guards,
            step: Step::Connecting,
            refusal,
            commit_hash: None,
            rounds: RoundBytes::new(pages),
            missing: PageSet::empty(pages),
            map_digest: None,
            state: KeptState::default(),
            has_whole_state: false,
            streams: Streams::new(streams),
            duplicates: 0,
            has_forgotten: false,
        }
    }

    /// The destination after its process has died, and its memory with it, by all records of its journal.
    pub fn restart(
        _former: &TakeOver,
        refusal: Token,
        commit_hash: TokenHash,
        pages: u64,
        streams: u16,
        records: &[RecordKind],
    ) -> (Self, Vec<DestinationAction>) {
        Self::new(refusal, pages, streams).restarted(commit_hash, records)
    }

    pub(crate) fn restarted(
        mut self,
        commit_hash: TokenHash,
        records: &[RecordKind],
    ) -> (Self, Vec<DestinationAction>) {
        self.commit_hash = Some(commit_hash);
        let mut out = Vec::new();
        match records.last() {
            Some(RecordKind::Entered) => self.step = Step::Lost,
            Some(RecordKind::Refused) => self.step = Step::Refused,
            Some(RecordKind::Finished) => self.step = Step::Ended(finished_as(records)),
            _ if self.guards.has(crate::guard::Guard::RestartRefuses) => self.refuse(&mut out),
            _ => self.step = Step::Ready,
        }
        (self, out)
    }

    /// What has happened. Returns what is to be done.
    ///
    /// # Errors
    /// [`Refused`]: the machine is as before.
    pub fn handle(&mut self, event: DestinationEvent) -> Result<Vec<DestinationAction>, Refused> {
        let mut out = Vec::new();
        match event {
            DestinationEvent::StreamUp(stream) => self.stream_up(stream, &mut out)?,
            DestinationEvent::StreamDown(stream) => self.stream_down(stream, &mut out)?,
            DestinationEvent::Received(stream, message) => {
                self.received(stream, message, &mut out)?;
            }
            DestinationEvent::Pages {
                stream,
                record,
                is_intact,
            } => {
                self.page_record(stream, &record, is_intact, &mut out)?;
            }
            DestinationEvent::State {
                stream,
                part,
                digest,
            } => self.state_part(stream, part, digest, &mut out)?,
            DestinationEvent::Admitted => self.admitted(&mut out)?,
            DestinationEvent::NotAdmitted(code, reasons) if self.step == Step::Admitting => {
                self.decline(code, reasons, &mut out);
            }
            DestinationEvent::NotAdmitted(..) => return Err(self.unexpected("not-admitted")),
            DestinationEvent::Stored(stream) => self.stored(stream, &mut out)?,
            DestinationEvent::Punched => self.punched(&mut out)?,
            DestinationEvent::Loaded => self.loaded(&mut out)?,
            DestinationEvent::LoadFailed if self.step == Step::Loading => self.refuse(&mut out),
            DestinationEvent::LoadFailed => return Err(self.unexpected("load-failed")),
            DestinationEvent::Fault(run) => self.fault(run, &mut out)?,
            DestinationEvent::GuestEnded(status) => self.guest_ended(status, &mut out)?,
            DestinationEvent::Recorded(kind) => self.recorded(kind, &mut out)?,
            DestinationEvent::RecordFailed(kind) => self.record_failed(kind, &mut out)?,
            DestinationEvent::Timer(timer) => self.timer(timer, &mut out),
            DestinationEvent::Word(word) => self.word(&word, &mut out)?,
        }
        Ok(out)
    }

    /// The pages that are missing here.
    pub fn missing(&self) -> &PageSet {
        &self.missing
    }

    /// Records of postcopy that were dropped because their pages were there.
    pub fn duplicates(&self) -> u64 {
        self.duplicates
    }

    /// The refusal token, for an operator to carry; `None` while it must not be known.
    pub fn token(&self) -> Option<Token> {
        matches!(self.step, Step::Refused | Step::Ended(Outcome::Refused)).then_some(self.refusal)
    }

    /// Where the migration stands.
    pub fn phase(&self) -> Phase {
        match self.step {
            Step::Connecting | Step::Admitting => Phase::Connecting,
            Step::Receiving => Phase::Precopy,
            Step::Punching | Step::Loading => Phase::Sealed,
            Step::Ready if self.streams.is_up(CONTROL) => Phase::Ready,
            Step::Ready => Phase::Undecided,
            Step::Entering | Step::EnterFailed => Phase::Ready,
            Step::Running => Phase::Postcopy,
            Step::Refusing | Step::RefuseFailed | Step::Refused => Phase::Refused,
            Step::Lost => Phase::Lost,
            Step::Ended(Outcome::Complete) => Phase::Complete,
            Step::Ended(Outcome::Cancelled) => Phase::Cancelled,
            Step::Ended(Outcome::Refused) => Phase::Refused,
            Step::Ended(Outcome::Failed) => Phase::Failed,
            Step::Ended(Outcome::Lost) => Phase::Lost,
        }
    }

    /// Who owns the VM, as this side knows.
    pub fn owner(&self) -> Owner {
        match self.phase() {
            Phase::Ready | Phase::Undecided => Owner::Undecided,
            Phase::Postcopy | Phase::Complete => Owner::Own,
            Phase::Lost => Owner::Nobody,
            _ => Owner::Peer,
        }
    }

    #[cfg(test)]
    pub(crate) fn guards(&self) -> Guards {
        self.guards
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
    fn send(&self, message: Message, out: &mut Vec<DestinationAction>) {
        if self.streams.is_up(CONTROL) {
            out.push(DestinationAction::Send(message));
        }
    }

    fn stream_up(
        &mut self,
        index: StreamIndex,
        out: &mut Vec<DestinationAction>,
    ) -> Result<(), Refused> {
        self.lose_stream(index)?;
        self.streams.set_up(index, true, "stream-up")?;
        if index == CONTROL {
            self.greet(out);
        }
        Ok(())
    }

    /// What the source may not have got before the control stream was lost.
    fn greet(&self, out: &mut Vec<DestinationAction>) {
        match self.step {
            Step::Running => self.say_entered(out),
            Step::Refused | Step::Ended(Outcome::Refused) => {
                self.send(Message::Refusal(self.refusal), out);
            }
            Step::Lost => self.send(Message::Lost, out),
            _ => {}
        }
    }

    fn stream_down(
        &mut self,
        index: StreamIndex,
        out: &mut Vec<DestinationAction>,
    ) -> Result<(), Refused> {
        self.lose_stream(index)?;
        if index == CONTROL && matches!(self.step, Step::Connecting | Step::Admitting) {
            // Nothing was agreed.
            self.end(Outcome::Failed, out);
            self.forget(out);
        }
        Ok(())
    }

    fn lose_stream(&mut self, index: StreamIndex) -> Result<(), Refused> {
        *self.streams.get(index, "stream-down")? = Stream::default();
        if index == CONTROL && self.step == Step::Receiving {
            // The source repeats it from its beginning.
            (self.state, self.has_whole_state) = (KeptState::default(), false);
        }
        self.streams.set_up(index, false, "stream-down")
    }

    fn timer(&mut self, timer: Timer, out: &mut Vec<DestinationAction>) {
        match (timer, self.step) {
            (Timer::Retry, Step::EnterFailed) => self.enter(out),
            (Timer::Retry, Step::RefuseFailed) => self.refuse(out),
            // It has waited as long again. *r* stays in the journal, and the caller shows it.
            (Timer::Reconnect, Step::Refused) if !self.streams.is_up(CONTROL) => {
                self.end(Outcome::Refused, out);
            }
            (Timer::Reconnect, _) if !self.streams.is_up(CONTROL) && self.may_refuse() => {
                self.refuse(out);
            }
            _ => {}
        }
    }

    fn word(&mut self, word: &Word, out: &mut Vec<DestinationAction>) -> Result<(), Refused> {
        let nothing = Refused::Word {
            phase: self.phase(),
        };
        match word {
            Word::Accept(token) => self.commit(token, out),
            Word::Refuse if self.may_refuse() => {
                self.refuse(out);
                Ok(())
            }
            // The operator's word that the source's host is dead, in place of *c*.
            Word::Fenced if self.step == Step::Ready && self.streams.is_up(CONTROL) => {
                Err(Refused::LinkUp)
            }
            Word::Fenced if self.step == Step::Ready => {
                self.enter(out);
                Ok(())
            }
            Word::Abandon if self.step == Step::Running && !self.missing.is_empty() => {
                let empty = PageSet::empty(self.missing.pages());
                out.push(DestinationAction::Poison(std::mem::replace(
                    &mut self.missing,
                    empty,
                )));
                self.say_complete(out);
                Ok(())
            }
            Word::Release => match self.step {
                Step::Running if self.missing.is_empty() => {
                    self.end(Outcome::Complete, out);
                    Ok(())
                }
                Step::Refused => {
                    self.end(Outcome::Refused, out);
                    Ok(())
                }
                Step::Lost => {
                    self.end(Outcome::Lost, out);
                    Ok(())
                }
                _ => Err(nothing),
            },
            Word::Cancel | Word::Refuse | Word::Fenced | Word::Abandon => Err(nothing),
        }
    }
}
