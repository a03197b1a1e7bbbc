//! Streams, records and their acknowledgements.

use pagetide_memory::PageIndex;

use super::{Sent, Source, Step};
use crate::event::Outcome;
use crate::event::{Refused, SourceAction};
use crate::guard::Guard;
use crate::journal::RecordKind;
use crate::message::{CONTROL, CancelCode, MAX_RUN_PAGES, Message, StreamIndex};
use crate::pages::PageSet;
use crate::rounds::Round;

impl Source {
    /// Whether the pages that are sent are those of the seal.
    fn is_after_seal(&self) -> bool {
        matches!(
            self.step,
            Step::Sealing
                | Step::Sealed
                | Step::Yielding
                | Step::YieldFailed
                | Step::Yielded
                | Step::Postcopy
        )
    }

    /// Whether a stream with room has something to send.
    pub fn wants_room(&self) -> bool {
        let is_sending = match self.step {
            Step::Precopy | Step::LastRound => true,
            // The seal is not said yet.
            Step::Sealing => false,
            // A page that was asked for, and was damaged or lost.
            _ => self.is_after_seal(),
        };
        is_sending && !self.to_send.is_empty()
    }

    pub(super) fn stream_up(
        &mut self,
        index: StreamIndex,
        out: &mut Vec<SourceAction>,
    ) -> Result<(), Refused> {
        if self.streams.is_up(index) {
            self.lose_sent(index);
        }
        self.streams.get(index, "stream-up")?.has_mark = false;
        self.streams.set_up(index, true, "stream-up")?;
        if self.step == Step::Marking {
            self.mark(index, out);
        }
        if index == CONTROL {
            self.greet(out);
            self.seal_if_marked(out);
        }
        Ok(())
    }

    /// What the destination may not have got before the control stream was lost.
    fn greet(&self, out: &mut Vec<SourceAction>) {
        match self.step {
            Step::Sealed => self.send_seal(out),
            // In postcopy, for a destination that has all and has heard so: it says it again.
            Step::Yielded | Step::Postcopy => self.send(Message::Commit(self.commit), out),
            Step::Ended(outcome) => self.say_end(outcome, out),
            _ => {}
        }
    }

    pub(super) fn say_end(&self, outcome: Outcome, out: &mut Vec<SourceAction>) {
        let message = match outcome {
            Outcome::Complete | Outcome::Lost => Message::Released,
            _ if self.is_refused => Message::RefusalSeen,
            _ if self.has_guest_ended => Message::Cancel {
                code: CancelCode::GuestEnded,
            },
            Outcome::Cancelled => Message::Cancel {
                code: CancelCode::Cancelled,
            },
            Outcome::Failed | Outcome::Refused => Message::Cancel {
                code: CancelCode::Failed,
            },
        };
        self.send(message, out);
    }

    pub(super) fn send_seal(&self, out: &mut Vec<SourceAction>) {
        if self.streams.is_up(CONTROL) {
            out.extend([
                SourceAction::SendMap,
                SourceAction::SendState,
                SourceAction::SendSealed(self.missing.digest()),
            ]);
        }
    }

    pub(super) fn stream_down(
        &mut self,
        index: StreamIndex,
        out: &mut Vec<SourceAction>,
    ) -> Result<(), Refused> {
        self.streams.set_up(index, false, "stream-down")?;
        self.lose_sent(index);
        if index == CONTROL && self.step == Step::Connecting {
            // Nothing was agreed.
            self.end(Outcome::Failed, out);
            self.forget(out);
        }
        self.seal_if_marked(out);
        Ok(())
    }

    /// What was sent on a stream that is lost, and not acknowledged.
    fn lose_sent(&mut self, index: StreamIndex) {
        let Ok(stream) = self.streams.get(index, "") else {
            return;
        };
        let lost = std::mem::take(&mut stream.sent);
        stream.sent_pages = 0;
        if self.guards.has(Guard::Unacknowledged) {
            lost.into_iter().for_each(|sent| self.send_again(sent));
        }
    }

    fn send_again(&mut self, sent: Sent) {
        let Sent::Pages(run) = sent else { return };
        let is_again = self.is_after_seal() || !self.guards.has(Guard::OncePerRound);
        let set = if is_again {
            &mut self.to_send
        } else {
            &mut self.dirty
        };
        set.insert(run);
    }

    pub(super) fn room(
        &mut self,
        index: StreamIndex,
        pages: u16,
        out: &mut Vec<SourceAction>,
    ) -> Result<(), Refused> {
        if !self.streams.is_up(index) {
            return Err(Refused::Stream {
                message: "room",
                stream: index,
            });
        }
        if !self.wants_room() {
            return Ok(());
        }
        let limit = u64::from(pages.min(MAX_RUN_PAGES));
        let run = self.to_send.next_run(PageIndex(0), limit);
        let Some(run) = run.filter(|_| pages > 0) else {
            return Ok(());
        };
        self.to_send.remove(run);
        let round = if self.is_after_seal() {
            Round::POSTCOPY
        } else {
            self.round
        };
        self.streams.get(index, "room")?.push(Sent::Pages(run));
        out.push(SourceAction::SendPages(index, run, round));
        self.end_round_if_sent(out);
        if self.step == Step::Postcopy
            && self.to_send.is_empty()
            && !self.guards.has(Guard::KeptUntilComplete)
        {
            out.push(SourceAction::Free);
        }
        Ok(())
    }

    pub(super) fn end_round_if_sent(&mut self, out: &mut Vec<SourceAction>) {
        if !self.to_send.is_empty() {
            return;
        }
        match self.step {
            Step::Precopy => {
                self.step = Step::Deciding;
                out.push(SourceAction::RoundEnded(self.round));
            }
            Step::LastRound => self.mark_all(out),
            _ => {}
        }
    }

    /// Ends precopy on all streams that are up.
    pub(super) fn mark_all(&mut self, out: &mut Vec<SourceAction>) {
        self.step = Step::Marking;
        let up: Vec<_> = self.streams.up().map(|(index, _)| index).collect();
        up.into_iter().for_each(|index| self.mark(index, out));
        self.seal_if_marked(out);
    }

    fn mark(&mut self, index: StreamIndex, out: &mut Vec<SourceAction>) {
        let Ok(stream) = self.streams.get(index, "end-mark") else {
            return;
        };
        stream.push(Sent::EndMark);
        stream.has_mark = true;
        out.push(SourceAction::SendEndMark(index));
    }

    /// Seals when nothing of precopy is under way any more on a stream that is up. Streams that are down cannot bring
    /// anything that counts: the destination closes them when it sees the seal.
    pub(super) fn seal_if_marked(&mut self, out: &mut Vec<SourceAction>) {
        if self.step != Step::Marking || !self.streams.is_up(CONTROL) {
            return;
        }
        let mut up = self.streams.up();
        let is_marked = up.all(|(_, stream)| stream.has_mark && stream.sent.is_empty())
            || !self.guards.has(Guard::EndMarksAcknowledged);
        if !is_marked {
            return;
        }
        let empty = PageSet::empty(self.dirty.pages());
        self.missing = std::mem::replace(&mut self.dirty, empty);
        self.step = Step::Sealing;
        out.push(SourceAction::Record(RecordKind::Sealed));
    }

    /// The destination has the oldest pages of a stream, or has refused them as damaged.
    pub(super) fn acknowledged(
        &mut self,
        index: StreamIndex,
        pages: u32,
        is_damaged: bool,
        out: &mut Vec<SourceAction>,
    ) -> Result<(), Refused> {
        let stream = self.streams.get(index, "stored")?;
        let (sent, mut left) = (stream.sent_pages, u64::from(pages));
        if left > sent {
            return Err(Refused::Acknowledged { pages, sent });
        }
        stream.sent_pages = sent - left;
        let mut damaged = Vec::new();
        while left > 0
            && let Some(oldest) = stream.sent.front_mut()
        {
            let count = left.min(oldest.pages());
            left -= count;
            match *oldest {
                Sent::Pages(run) => {
                    let (done, rest) = run.split_at(count);
                    damaged.push(Sent::Pages(done));
                    *oldest = Sent::Pages(rest);
                    if rest.is_empty() {
                        stream.sent.pop_front();
                    }
                }
                Sent::EndMark => {
                    stream.sent.pop_front();
                }
            }
        }
        if is_damaged {
            damaged.into_iter().for_each(|sent| self.send_again(sent));
        }
        self.seal_if_marked(out);
        Ok(())
    }
}

impl Sent {
    /// What an acknowledgement counts it as.
    pub(super) fn pages(self) -> u64 {
        match self {
            Self::Pages(run) => run.count(),
            Self::EndMark => 1,
        }
    }
}
