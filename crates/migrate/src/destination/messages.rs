//! What the source says, and what this host answers.

use super::{Destination, Step};
use crate::event::{DestinationAction, Outcome, Refused};
use crate::guard::Guard;
use crate::ids::{MapDigest, Token};
use crate::journal::{KeptState, RecordKind};
use crate::message::{
    CONTROL, CancelCode, DeclineCode, MAX_STATE_BYTES, Message, StatePart, StreamIndex,
};

/// No message of this version compares pages, and nobody is to believe that they were compared.
const NO_VERIFY: &str = "this version does not compare the pages of both sides (--verify)";

impl Destination {
    pub(super) fn received(
        &mut self,
        index: StreamIndex,
        message: Message,
        out: &mut Vec<DestinationAction>,
    ) -> Result<(), Refused> {
        let name = message.name();
        let is_of_any_stream = matches!(
            message,
            Message::EndMark | Message::Commit(_) | Message::Alive
        );
        if !self.streams.is_up(index) || index != CONTROL && !is_of_any_stream {
            return Err(Refused::Stream {
                message: name,
                stream: index,
            });
        }
        match message {
            Message::Offer(offer) if self.step == Step::Connecting => {
                if offer.layout.pages() != self.missing.pages() {
                    return Err(self.unexpected(name));
                }
                if offer.verifies {
                    self.decline(DeclineCode::Host, vec![NO_VERIFY.to_owned()], out);
                    return Ok(());
                }
                self.commit_hash = Some(offer.commit_hash);
                self.step = Step::Admitting;
                out.push(DestinationAction::Admit);
                Ok(())
            }
            Message::EndMark => self.end_mark(index, out),
            Message::Map { first, count, bits } => self.map(first, count, &bits),
            Message::Sealed { digest, state } => self.sealed(digest, state, out),
            Message::Commit(token) => self.commit(&token, out),
            Message::Cancel { code } => self.cancelled(code, out),
            Message::RefusalSeen => self.refusal_seen(out),
            Message::Released => self.released(out),
            Message::Held { .. } | Message::Continued | Message::Alive => Ok(()),
            _ => Err(self.unexpected(name)),
        }
    }

    /// It has not entered, or has ended and never will.
    fn is_before_enter(&self) -> bool {
        !matches!(
            self.step,
            Step::Connecting
                | Step::Admitting
                | Step::Running
                | Step::Lost
                | Step::Ended(
                    Outcome::Complete | Outcome::Cancelled | Outcome::Failed | Outcome::Lost
                )
        )
    }

    pub(super) fn admitted(&mut self, out: &mut Vec<DestinationAction>) -> Result<(), Refused> {
        if self.step != Step::Admitting {
            return Err(self.unexpected("admitted"));
        }
        self.step = Step::Receiving;
        self.send(
            Message::Accepted {
                refusal_hash: self.refusal.hash(),
            },
            out,
        );
        Ok(())
    }

    fn end_mark(
        &mut self,
        index: StreamIndex,
        out: &mut Vec<DestinationAction>,
    ) -> Result<(), Refused> {
        // As for a record, the one before it is stored.
        if !self.streams.get(index, "end-mark")?.storing.is_empty() {
            return Err(Refused::Stream {
                message: "end-mark",
                stream: index,
            });
        }
        if matches!(self.step, Step::Connecting | Step::Admitting) {
            return Err(self.unexpected("end-mark"));
        }
        out.push(DestinationAction::Acknowledge(
            index,
            Message::Stored { pages: 1 },
        ));
        Ok(())
    }

    fn map(&mut self, first: u64, count: u32, bits: &[u8]) -> Result<(), Refused> {
        match self.step {
            Step::Receiving => self.missing.set_part(first, u64::from(count), bits)?,
            // The source repeats its seal when the link is up again.
            _ if self.is_before_enter() => {}
            _ => return Err(self.unexpected("map")),
        }
        Ok(())
    }

    /// A part of the state is the first, which begins the state anew, or follows the one before it.
    pub(super) fn state_part(
        &mut self,
        index: StreamIndex,
        part: StatePart,
        digest: [u8; 32],
        out: &mut Vec<DestinationAction>,
    ) -> Result<(), Refused> {
        if !self.streams.is_up(index) || index != CONTROL {
            return Err(Refused::Stream {
                message: "state",
                stream: index,
            });
        }
        match self.step {
            Step::Receiving => {}
            // The source repeats its seal when the link is up again.
            _ if self.is_before_enter() => return Ok(()),
            _ => return Err(self.unexpected("state")),
        }
        let StatePart {
            offset,
            bytes,
            has_more,
        } = part;
        let follows = offset == self.state.bytes && !self.has_whole_state;
        let end = offset.saturating_add(u64::from(bytes));
        if offset != 0 && !follows || bytes == 0 || end > MAX_STATE_BYTES {
            let bytes = self.state.bytes;
            return Err(Refused::State { offset, bytes });
        }
        self.state = KeptState { bytes: end, digest };
        self.has_whole_state = !has_more;
        out.push(DestinationAction::TakeState);
        Ok(())
    }

    fn sealed(
        &mut self,
        digest: MapDigest,
        state: KeptState,
        out: &mut Vec<DestinationAction>,
    ) -> Result<(), Refused> {
        match self.step {
            Step::Receiving => {}
            Step::Ready => {
                self.say_ready(out);
                return Ok(());
            }
            Step::Ended(Outcome::Refused) => {
                self.send(Message::Refusal(self.refusal), out);
                return Ok(());
            }
            _ if self.is_before_enter() => return Ok(()),
            _ => return Err(self.unexpected("sealed")),
        }
        // Every stream that is up at the source has its end mark. What comes on any other is old.
        let streams = self.streams.all();
        let storing = streams.filter(|(_, stream)| !stream.storing.is_empty());
        let old: Vec<_> = storing.map(|(index, _)| index).collect();
        for other in old {
            if self.guards.has(Guard::PrecopyEnds) {
                self.lose_stream(other)?;
                out.push(DestinationAction::Close(other));
            }
        }
        let found = self.missing.digest();
        let is_other_map = found != digest && self.guards.has(Guard::SameMap);
        let has_state = self.has_whole_state && self.state == state;
        if is_other_map || !has_state && self.guards.has(Guard::SameState) {
            self.refuse(out);
            return Ok(());
        }
        self.map_digest = Some(found);
        self.step = Step::Punching;
        if self.guards.has(Guard::MissingPunched) {
            out.push(DestinationAction::Punch);
            return Ok(());
        }
        self.punched(out)
    }

    pub(super) fn punched(&mut self, out: &mut Vec<DestinationAction>) -> Result<(), Refused> {
        if self.step != Step::Punching {
            return Err(self.unexpected("punched"));
        }
        self.step = Step::Loading;
        out.push(DestinationAction::Load);
        Ok(())
    }

    pub(super) fn loaded(&mut self, out: &mut Vec<DestinationAction>) -> Result<(), Refused> {
        if self.step != Step::Loading {
            return Err(self.unexpected("loaded"));
        }
        self.step = Step::Ready;
        self.say_ready(out);
        if !self.guards.has(Guard::CommitNeeded) {
            self.enter(out);
        }
        Ok(())
    }

    fn say_ready(&self, out: &mut Vec<DestinationAction>) {
        if let Some(digest) = self.map_digest {
            self.send(Message::Ready { digest }, out);
        }
    }

    fn cancelled(
        &mut self,
        code: CancelCode,
        out: &mut Vec<DestinationAction>,
    ) -> Result<(), Refused> {
        match self.step {
            // A source that has shown *c* cannot cancel, unless its operator knew this host to be dead: then the VM is lost
            // here.
            Step::Entering | Step::EnterFailed | Step::Running => Err(self.unexpected("cancel")),
            _ => {
                let outcome = match code {
                    CancelCode::Cancelled => Outcome::Cancelled,
                    CancelCode::Failed | CancelCode::GuestEnded => Outcome::Failed,
                };
                self.end_with_source(outcome, out);
                Ok(())
            }
        }
    }

    fn refusal_seen(&mut self, out: &mut Vec<DestinationAction>) -> Result<(), Refused> {
        match self.step {
            Step::Refused | Step::Ended(_) => self.end_with_source(Outcome::Refused, out),
            _ => return Err(self.unexpected("refusal-seen")),
        }
        Ok(())
    }

    /// The source has freed the VM's memory: all has arrived, or its operator has given up what has not.
    fn released(&mut self, out: &mut Vec<DestinationAction>) -> Result<(), Refused> {
        match self.step {
            Step::Running if self.missing.is_empty() || !self.guards.has(Guard::NothingMissing) => {
                self.end_with_source(Outcome::Complete, out);
            }
            Step::Lost => self.end_with_source(Outcome::Lost, out),
            Step::Refused | Step::Ended(_) => self.end_with_source(Outcome::Refused, out),
            // What is missing here is lost. It has not entered, so it never does.
            Step::Ready => self.refuse(out),
            // Its operator abandons what is missing; or *c* has come, or a refusal is on its way.
            Step::Running
            | Step::Entering
            | Step::EnterFailed
            | Step::Refusing
            | Step::RefuseFailed => {}
            _ => return Err(self.unexpected("released")),
        }
        Ok(())
    }

    /// *c*, from the peer or from an operator.
    pub(super) fn commit(
        &mut self,
        token: &Token,
        out: &mut Vec<DestinationAction>,
    ) -> Result<(), Refused> {
        if self.commit_hash != Some(token.hash()) && self.guards.has(Guard::CommitVerified) {
            return Err(Refused::WrongToken);
        }
        match self.step {
            Step::Ready => self.enter(out),
            // It is repeated whenever the link is up again.
            Step::Entering | Step::EnterFailed | Step::Running => {}
            // A source that was started again may not know that all is done.
            Step::Ended(Outcome::Complete) => self.say_entered(out),
            Step::Lost | Step::Ended(Outcome::Lost) => self.send(Message::Lost, out),
            Step::Refusing | Step::RefuseFailed | Step::Refused
                if !self.guards.has(Guard::RefusedForGood) =>
            {
                self.enter(out);
            }
            Step::Refusing | Step::RefuseFailed => {}
            Step::Refused | Step::Ended(Outcome::Refused) => {
                self.send(Message::Refusal(self.refusal), out);
            }
            _ => return Err(self.unexpected("commit")),
        }
        Ok(())
    }

    pub(super) fn enter(&mut self, out: &mut Vec<DestinationAction>) {
        self.step = Step::Entering;
        out.push(DestinationAction::Record(RecordKind::Entered));
        if !self.guards.has(Guard::EnteredSynced) {
            self.run(out);
        }
    }
}
