//! What the destination says.

use pagetide_memory::PageRange;

use super::{Sent, Source, Step};
use crate::event::{Outcome, Refused, SourceAction};
use crate::guard::Guard;
use crate::ids::{MapDigest, Token};
use crate::journal::RecordKind;
use crate::message::{CONTROL, Message, StreamIndex};
use crate::pages::PageSet;
use crate::rounds::Round;

impl Source {
    pub(super) fn received(
        &mut self,
        index: StreamIndex,
        message: Message,
        out: &mut Vec<SourceAction>,
    ) -> Result<(), Refused> {
        let name = message.name();
        let is_of_any_stream = matches!(
            message,
            Message::Stored { .. }
                | Message::Damaged { .. }
                | Message::Request { .. }
                | Message::Refusal(_)
                | Message::Alive
        );
        if !self.streams.is_up(index) || index != CONTROL && !is_of_any_stream {
            return Err(Refused::Stream {
                message: name,
                stream: index,
            });
        }
        match message {
            Message::Stored { pages } => self.acknowledged(index, pages, false, out),
            Message::Damaged { pages } => self.acknowledged(index, pages, true, out),
            Message::Accepted { refusal_hash } if self.step == Step::Connecting => {
                self.refusal_hash = Some(refusal_hash);
                self.step = Step::Opening;
                out.push(SourceAction::OpenJournal { refusal_hash });
                Ok(())
            }
            Message::Declined { .. } if self.step == Step::Connecting => {
                self.give_up(Outcome::Refused, out)
            }
            Message::Ready { digest } => self.ready(digest, out),
            Message::Refusal(token) => self.refusal(&token, out),
            Message::Entered => self.entered(out),
            Message::Request { run } => self.request(index, run, out),
            Message::Map { first, count, bits } => self.map(first, count, &bits),
            Message::Resume { digest } => self.resume(digest),
            Message::Complete => self.complete(out),
            Message::Lost => self.peer_lost(),
            // *complete* follows, or is repeated to a source that was released.
            Message::GuestEnded { .. }
                if matches!(
                    self.step,
                    Step::Postcopy | Step::Ended(Outcome::Complete | Outcome::Lost)
                ) =>
            {
                Ok(())
            }
            Message::Ended if matches!(self.step, Step::Ended(_)) => {
                self.forget(out);
                Ok(())
            }
            Message::Held { .. } | Message::Continued | Message::Alive => Ok(()),
            _ => Err(self.unexpected(name)),
        }
    }

    fn ready(&mut self, digest: MapDigest, out: &mut Vec<SourceAction>) -> Result<(), Refused> {
        match self.step {
            Step::Sealed => {}
            // The destination repeats it when the seal was repeated.
            Step::Yielding
            | Step::YieldFailed
            | Step::Yielded
            | Step::Returning
            | Step::ReturnFailed => {
                return Ok(());
            }
            Step::Ended(outcome) => {
                self.say_end(outcome, out);
                return Ok(());
            }
            _ => return Err(self.unexpected("ready")),
        }
        if digest != self.missing.digest() && self.guards.has(Guard::SameMap) {
            self.return_to_vm(Outcome::Failed, out);
            return Ok(());
        }
        self.step = Step::Yielding;
        out.push(SourceAction::Record(RecordKind::Yielded));
        if !self.guards.has(Guard::YieldSynced) {
            self.send(Message::Commit(self.commit), out);
        }
        Ok(())
    }

    /// *r*, from the peer or from an operator.
    pub(super) fn refusal(
        &mut self,
        token: &Token,
        out: &mut Vec<SourceAction>,
    ) -> Result<(), Refused> {
        if self.refusal_hash != Some(token.hash()) && self.guards.has(Guard::RefusalVerified) {
            return Err(Refused::WrongToken);
        }
        match self.step {
            // A destination that has entered has no *r* to give.
            Step::Connecting | Step::Postcopy | Step::Lost | Step::Ended(Outcome::Complete) => {
                return Err(self.unexpected("refusal"));
            }
            // It was released before it heard this.
            Step::Ended(Outcome::Lost) => self.say_end(Outcome::Lost, out),
            Step::Ended(_) => {
                self.is_refused = true;
                self.send(Message::RefusalSeen, out);
            }
            Step::Sealing | Step::Yielding => self.is_refused = true,
            Step::Returning | Step::ReturnFailed => self.is_refused = true,
            Step::Sealed | Step::YieldFailed | Step::Yielded => {
                self.is_refused = true;
                self.return_to_vm(Outcome::Refused, out);
            }
            _ => {
                self.is_refused = true;
                self.give_up(Outcome::Refused, out)?;
            }
        }
        Ok(())
    }

    fn entered(&mut self, out: &mut Vec<SourceAction>) -> Result<(), Refused> {
        match self.step {
            Step::Yielded => {
                self.step = Step::Postcopy;
                // Nothing waits for it: a source that starts again then knows it.
                out.push(SourceAction::Record(RecordKind::Entered));
                Ok(())
            }
            Step::Postcopy | Step::Lost | Step::Ended(Outcome::Complete | Outcome::Lost) => Ok(()),
            _ => Err(self.unexpected("entered")),
        }
    }

    /// Serves pages from the seal on, since loading the state may read them: on the stream that the request came on.
    fn request(
        &mut self,
        index: StreamIndex,
        run: PageRange,
        out: &mut Vec<SourceAction>,
    ) -> Result<(), Refused> {
        let is_serving = matches!(
            self.step,
            Step::Sealed | Step::Yielding | Step::YieldFailed | Step::Yielded | Step::Postcopy
        );
        if !is_serving {
            return match self.step {
                // It was on its way when the VM ran again, or was lost.
                Step::Returning | Step::ReturnFailed | Step::Lost | Step::Ended(_) => Ok(()),
                _ => Err(self.unexpected("request")),
            };
        }
        if !self.missing.contains_all(run) || run.is_empty() {
            return Err(Refused::Outside { run });
        }
        self.to_send.remove(run);
        self.streams.get(index, "request")?.push(Sent::Pages(run));
        out.push(SourceAction::SendPages(index, run, Round::POSTCOPY));
        Ok(())
    }

    fn map(&mut self, first: u64, count: u32, bits: &[u8]) -> Result<(), Refused> {
        match self.step {
            Step::Postcopy => {}
            // A destination that is complete says so again, as it has learned to.
            Step::Lost | Step::Ended(Outcome::Complete | Outcome::Lost) => return Ok(()),
            _ => return Err(self.unexpected("map")),
        }
        // It collects where precopy kept what is dirty.
        self.dirty.set_part(first, u64::from(count), bits)?;
        Ok(())
    }

    /// The destination's map is whole: it decides what is sent.
    fn resume(&mut self, digest: MapDigest) -> Result<(), Refused> {
        match self.step {
            Step::Postcopy => {}
            Step::Lost | Step::Ended(Outcome::Complete | Outcome::Lost) => return Ok(()),
            _ => return Err(self.unexpected("resume")),
        }
        if self.dirty.digest() != digest && self.guards.has(Guard::ResumedMap) {
            return Err(Refused::OtherMap);
        }
        let empty = PageSet::empty(self.dirty.pages());
        let map = std::mem::replace(&mut self.dirty, empty);
        if self.guards.has(Guard::MapDecides) {
            self.to_send = map;
        }
        Ok(())
    }

    fn complete(&mut self, out: &mut Vec<SourceAction>) -> Result<(), Refused> {
        match self.step {
            Step::Postcopy => self.end(Outcome::Complete, out),
            Step::Ended(outcome @ (Outcome::Complete | Outcome::Lost)) => {
                self.say_end(outcome, out);
            }
            _ => return Err(self.unexpected("complete")),
        }
        Ok(())
    }

    /// The destination's journal says that it had entered, and its process has died.
    fn peer_lost(&mut self) -> Result<(), Refused> {
        match self.step {
            Step::Yielded | Step::Postcopy | Step::Lost => self.step = Step::Lost,
            Step::Ended(Outcome::Complete | Outcome::Lost) => {}
            // Its host was dead, as the operator said, and has come back. It hears how this has ended.
            Step::Returning | Step::ReturnFailed | Step::Ended(_) if self.is_fenced => {}
            _ => return Err(self.unexpected("lost")),
        }
        Ok(())
    }
}
