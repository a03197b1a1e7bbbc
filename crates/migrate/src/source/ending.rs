//! How the source's VM runs again, and how the migration ends.

use super::{Source, Step};
use crate::event::{Outcome, Refused, SourceAction};
use crate::guard::Guard;
use crate::journal::RecordKind;
use crate::message::Message;

/// Whether the VM has left the source.
fn has_gone(outcome: Outcome) -> bool {
    matches!(outcome, Outcome::Complete | Outcome::Lost)
}

impl Source {
    /// Gives the migration up, if that is this side's to decide. The VM goes on here.
    pub(super) fn give_up(
        &mut self,
        outcome: Outcome,
        out: &mut Vec<SourceAction>,
    ) -> Result<(), Refused> {
        match self.step {
            Step::Lost | Step::Ended(_) => {
                return Err(Refused::Word {
                    phase: self.phase(),
                });
            }
            Step::Yielded if self.guards.has(Guard::RefusalNeeded) => {
                return Err(Refused::NeedsRefusal);
            }
            Step::Postcopy => return Err(Refused::HasRun),
            Step::Returning | Step::ReturnFailed => {}
            // The record may be in the journal: what follows depends on it.
            Step::Sealing | Step::Yielding => self.ending = Some(outcome),
            Step::YieldFailed if !self.guards.has(Guard::FailedYieldBinds) => {
                self.run(outcome, out);
            }
            Step::Sealed | Step::YieldFailed | Step::Yielded => self.return_to_vm(outcome, out),
            Step::Connecting => {
                // Nothing was agreed.
                self.end(outcome, out);
                self.forget(out);
            }
            Step::Opening => self.end(outcome, out),
            // The vCPUs run, or stopped without a record.
            _ => self.run(outcome, out),
        }
        Ok(())
    }

    /// Runs the VM after a seal: first it is recorded, so that no restart goes back to the seal.
    pub(super) fn return_to_vm(&mut self, outcome: Outcome, out: &mut Vec<SourceAction>) {
        let outcome = if self.is_cancelled {
            Outcome::Cancelled
        } else {
            outcome
        };
        self.ending = Some(outcome);
        if self.guards.has(Guard::RunningAgainSynced) {
            self.step = Step::Returning;
            out.push(SourceAction::Record(RecordKind::RunningAgain));
        } else {
            self.run(outcome, out);
        }
    }

    /// The journal takes no record, and the VM shall run all the same: then nobody may go on with the journal any more.
    fn return_without_record(&mut self, out: &mut Vec<SourceAction>) {
        self.step = Step::ReturnFailed;
        if self.guards.has(Guard::HolderEnded) {
            out.push(SourceAction::EndHolder);
        } else {
            self.run(self.ending.unwrap_or(Outcome::Failed), out);
        }
    }

    pub(super) fn holder_ended(&mut self, out: &mut Vec<SourceAction>) -> Result<(), Refused> {
        match self.step {
            Step::Returning | Step::ReturnFailed => {
                self.run(self.ending.unwrap_or(Outcome::Failed), out);
            }
            // The record was synced meanwhile.
            Step::Ended(_) => {}
            _ => return Err(self.unexpected("holder-ended")),
        }
        Ok(())
    }

    fn run(&mut self, outcome: Outcome, out: &mut Vec<SourceAction>) {
        out.push(SourceAction::Run);
        self.end(outcome, out);
    }

    pub(super) fn end(&mut self, outcome: Outcome, out: &mut Vec<SourceAction>) {
        self.step = Step::Ended(outcome);
        if has_gone(outcome) && self.guards.has(Guard::FreedFirst) {
            out.push(SourceAction::Free);
        }
        self.say_end(outcome, out);
        out.push(SourceAction::Done(outcome));
        if !self.guards.has(Guard::KeptUntilHeard) {
            self.forget(out);
        }
    }

    /// The destination has ended, or is not waited for any more.
    pub(super) fn forget(&mut self, out: &mut Vec<SourceAction>) {
        if let Step::Ended(outcome) = self.step
            && has_gone(outcome)
            && !self.guards.has(Guard::FreedFirst)
        {
            out.push(SourceAction::Free);
        }
        if !std::mem::replace(&mut self.has_forgotten, true) {
            out.push(SourceAction::Forget);
        }
    }

    /// The guest ends where it runs. Once it is paused, it cannot end here.
    pub(super) fn guest_ended(&mut self, out: &mut Vec<SourceAction>) -> Result<(), Refused> {
        match self.step {
            Step::Connecting
            | Step::Opening
            | Step::Precopy
            | Step::Deciding
            | Step::Harvesting
            | Step::Pausing(_) => {
                self.has_guest_ended = true;
                self.end(Outcome::Failed, out);
                Ok(())
            }
            Step::Ended(_) => Ok(()),
            _ => Err(self.unexpected("guest-ended")),
        }
    }

    pub(super) fn recorded(
        &mut self,
        kind: RecordKind,
        out: &mut Vec<SourceAction>,
    ) -> Result<(), Refused> {
        match (kind, self.step) {
            (RecordKind::Sealed, Step::Sealing) => match self.ending_asked_for() {
                Some(outcome) => self.return_to_vm(outcome, out),
                None => {
                    self.step = Step::Sealed;
                    self.send_seal(out);
                }
            },
            (RecordKind::Yielded, Step::Yielding) => {
                self.step = Step::Yielded;
                // A cancel came too late. *r* did not.
                self.ending = None;
                if self.is_refused {
                    self.return_to_vm(Outcome::Refused, out);
                } else {
                    self.send(Message::Commit(self.commit), out);
                }
            }
            (RecordKind::RunningAgain, Step::Returning) => {
                self.run(self.ending.unwrap_or(Outcome::Failed), out);
            }
            (RecordKind::Entered | RecordKind::Finished, _) | (_, Step::Ended(_)) => {}
            _ => return Err(self.unexpected("recorded")),
        }
        Ok(())
    }

    fn ending_asked_for(&self) -> Option<Outcome> {
        let refused = self.is_refused.then_some(Outcome::Refused);
        self.ending.or(refused)
    }

    pub(super) fn record_failed(
        &mut self,
        kind: RecordKind,
        out: &mut Vec<SourceAction>,
    ) -> Result<(), Refused> {
        match (kind, self.step) {
            // The seal may be in the journal, so the VM's next run is recorded.
            (RecordKind::Sealed, Step::Sealing) => {
                self.return_to_vm(self.ending_asked_for().unwrap_or(Outcome::Failed), out);
            }
            (RecordKind::Yielded, Step::Yielding) => match self.ending_asked_for() {
                Some(outcome) => self.return_to_vm(outcome, out),
                None => {
                    self.step = Step::YieldFailed;
                    if !self.guards.has(Guard::FailedYieldHidden) {
                        self.send(Message::Commit(self.commit), out);
                    }
                }
            },
            (RecordKind::RunningAgain, Step::Returning) => self.return_without_record(out),
            (RecordKind::Entered | RecordKind::Finished, _) | (_, Step::Ended(_)) => {}
            _ => return Err(self.unexpected("record-failed")),
        }
        Ok(())
    }
}
