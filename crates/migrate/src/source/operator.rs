//! The operator's words at the source.

use super::{Source, Step};
use crate::event::{Outcome, Refused, SourceAction, Word};
use crate::guard::Guard;
use crate::ids::Token;
use crate::message::CONTROL;

impl Source {
    pub(super) fn word(&mut self, word: &Word, out: &mut Vec<SourceAction>) -> Result<(), Refused> {
        match word {
            // It needs *r*, which may still come.
            Word::Cancel if self.step == Step::Yielded && self.guards.has(Guard::RefusalNeeded) => {
                self.is_cancelled = true;
                Ok(())
            }
            Word::Cancel => {
                self.give_up(Outcome::Cancelled, out)?;
                self.is_cancelled = true;
                Ok(())
            }
            Word::Accept(token) => self.accept(token, out),
            Word::Fenced => self.fenced(out),
            Word::Release => match self.step {
                Step::Yielded | Step::Postcopy | Step::Lost => {
                    self.end(Outcome::Lost, out);
                    Ok(())
                }
                Step::Ended(_) if !self.has_forgotten => {
                    self.forget(out);
                    Ok(())
                }
                _ => Err(Refused::Word {
                    phase: self.phase(),
                }),
            },
            Word::Refuse | Word::Abandon => Err(Refused::Word {
                phase: self.phase(),
            }),
        }
    }

    fn accept(&mut self, token: &Token, out: &mut Vec<SourceAction>) -> Result<(), Refused> {
        match self.step {
            // The same token again.
            Step::Ended(_) if self.is_refused && self.refusal_hash == Some(token.hash()) => Ok(()),
            Step::Ended(_) => Err(Refused::Word {
                phase: self.phase(),
            }),
            _ => self.refusal(token, out),
        }
    }

    /// The operator's word that the destination's host is dead, in place of *r*.
    fn fenced(&mut self, out: &mut Vec<SourceAction>) -> Result<(), Refused> {
        match self.step {
            Step::Postcopy | Step::Lost if self.guards.has(Guard::NoFenceAfterEntered) => {
                return Err(Refused::HasRun);
            }
            Step::Yielded | Step::Postcopy => {}
            _ => {
                return Err(Refused::Word {
                    phase: self.phase(),
                });
            }
        }
        if self.streams.is_up(CONTROL) {
            return Err(Refused::LinkUp);
        }
        self.is_fenced = true;
        self.return_to_vm(Outcome::Failed, out);
        Ok(())
    }
}
