//! Records, refusal, and how the migration ends.

use super::{Destination, Step};
use crate::event::{DestinationAction, Outcome, Refused};
use crate::guard::Guard;
use crate::journal::RecordKind;
use crate::message::{CONTROL, DeclineCode, Message};
use crate::pages::PageSet;

impl Destination {
    /// Whether this side may still refuse: it has not got *c*.
    pub(super) fn may_refuse(&self) -> bool {
        match self.step {
            Step::Receiving | Step::Punching | Step::Loading | Step::Ready => true,
            Step::Entering | Step::EnterFailed | Step::Running => {
                !self.guards.has(Guard::NoRefusalAfterCommit)
            }
            _ => false,
        }
    }

    pub(super) fn refuse(&mut self, out: &mut Vec<DestinationAction>) {
        self.step = Step::Refusing;
        out.push(DestinationAction::Record(RecordKind::Refused));
    }

    /// Nothing was agreed: nobody needs this side.
    pub(super) fn decline(
        &mut self,
        code: DeclineCode,
        reasons: Vec<String>,
        out: &mut Vec<DestinationAction>,
    ) {
        self.send(Message::Declined { code, reasons }, out);
        self.end(Outcome::Refused, out);
        self.forget(out);
    }

    pub(super) fn run(&mut self, out: &mut Vec<DestinationAction>) {
        self.step = Step::Running;
        out.push(DestinationAction::Enter);
        self.say_entered(out);
    }

    /// That the VM runs here, and what it misses: the source may have been started again, and not know.
    pub(super) fn say_entered(&self, out: &mut Vec<DestinationAction>) {
        if self.streams.is_up(CONTROL) {
            out.push(DestinationAction::Send(Message::Entered));
            out.push(DestinationAction::SendMap);
            let digest = self.missing.digest();
            out.push(DestinationAction::Send(Message::Resume { digest }));
            self.say_complete(out);
        }
    }

    pub(super) fn recorded(
        &mut self,
        kind: RecordKind,
        out: &mut Vec<DestinationAction>,
    ) -> Result<(), Refused> {
        match (kind, self.step) {
            (RecordKind::Entered, Step::Entering) => self.run(out),
            (RecordKind::Refused, Step::Refusing) => {
                self.step = Step::Refused;
                self.send(Message::Refusal(self.refusal), out);
                if !self.guards.has(Guard::RefusalKept) {
                    self.end(Outcome::Refused, out);
                    self.forget(out);
                }
            }
            (RecordKind::Finished, _) | (_, Step::Ended(_)) => {}
            (RecordKind::Entered, Step::Running) if !self.guards.has(Guard::EnteredSynced) => {}
            _ => return Err(self.unexpected("recorded")),
        }
        Ok(())
    }

    pub(super) fn record_failed(
        &mut self,
        kind: RecordKind,
        out: &mut Vec<DestinationAction>,
    ) -> Result<(), Refused> {
        match (kind, self.step) {
            (RecordKind::Entered, Step::Entering)
                if !self.guards.has(Guard::FailedEnteredHidden) =>
            {
                self.run(out);
            }
            // It may be in the journal. It is written again until it is there.
            (RecordKind::Entered, Step::Entering) => self.step = Step::EnterFailed,
            (RecordKind::Refused, Step::Refusing) => self.step = Step::RefuseFailed,
            (RecordKind::Finished, _) | (_, Step::Ended(_)) => {}
            (RecordKind::Entered, Step::Running) if !self.guards.has(Guard::EnteredSynced) => {}
            _ => return Err(self.unexpected("record-failed")),
        }
        Ok(())
    }

    /// The guest ends where it runs, and needs no page any more.
    pub(super) fn guest_ended(
        &mut self,
        status: u32,
        out: &mut Vec<DestinationAction>,
    ) -> Result<(), Refused> {
        if self.step != Step::Running {
            return Err(self.unexpected("guest-ended"));
        }
        self.missing = PageSet::empty(self.missing.pages());
        self.send(Message::GuestEnded { status }, out);
        self.say_complete(out);
        Ok(())
    }

    pub(super) fn end(&mut self, outcome: Outcome, out: &mut Vec<DestinationAction>) {
        self.step = Step::Ended(outcome);
        if outcome != Outcome::Complete {
            out.push(DestinationAction::Free);
        }
        out.push(DestinationAction::Done(outcome));
    }

    /// Ends because the source has: it hears so, and nobody needs this side any more.
    pub(super) fn end_with_source(&mut self, outcome: Outcome, out: &mut Vec<DestinationAction>) {
        if !matches!(self.step, Step::Ended(_)) {
            self.end(outcome, out);
        }
        self.send(Message::Ended, out);
        self.forget(out);
    }

    pub(super) fn forget(&mut self, out: &mut Vec<DestinationAction>) {
        if !std::mem::replace(&mut self.has_forgotten, true) {
            out.push(DestinationAction::Forget);
        }
    }
}
