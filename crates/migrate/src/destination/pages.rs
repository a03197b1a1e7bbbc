//! Page records: which of them are stored, and when they are acknowledged.

use pagetide_memory::{PageIndex, PageRange};

use super::{Destination, Step};
use crate::event::{DestinationAction, Outcome, Refused};
use crate::guard::Guard;
use crate::message::{Content, Message, PageRecord, StreamIndex};
use crate::rounds::Round;

/// A record has at most [`MAX_RUN_PAGES`](crate::MAX_RUN_PAGES).
fn pages_of(run: PageRange) -> u32 {
    u32::try_from(run.count()).unwrap_or(u32::MAX)
}

impl Destination {
    pub(super) fn page_record(
        &mut self,
        index: StreamIndex,
        record: &PageRecord,
        is_intact: bool,
        out: &mut Vec<DestinationAction>,
    ) -> Result<(), Refused> {
        self.check_record(index, record)?;
        let run = record.run;
        let pages = pages_of(run);
        if !is_intact && self.guards.has(Guard::DamagedDropped) {
            // Only bytes tell how many pages there are. An answer with another number would count for the next record.
            let is_confirmed = record.content == Content::Bytes;
            if !is_confirmed && self.guards.has(Guard::PagesConfirmed) {
                return Err(Refused::Damaged { run });
            }
            out.push(DestinationAction::Acknowledge(
                index,
                Message::Damaged { pages },
            ));
            return Ok(());
        }
        if self.is_being_stored(run) && self.guards.has(Guard::OneStoreAtATime) {
            out.push(DestinationAction::Later(index));
            return Ok(());
        }
        let is_postcopy = record.round == Round::POSTCOPY;
        let parts = if is_postcopy {
            self.postcopy_parts(run)
        } else {
            self.precopy_parts(run, record.round)
        };
        if parts.is_empty() {
            self.duplicates += u64::from(is_postcopy);
            out.push(DestinationAction::Acknowledge(
                index,
                Message::Stored { pages },
            ));
            return Ok(());
        }
        if !is_postcopy {
            parts
                .iter()
                .for_each(|part| self.rounds.take(*part, record.round));
        }
        if !self.guards.has(Guard::StoredFirst) {
            out.push(DestinationAction::Acknowledge(
                index,
                Message::Stored { pages },
            ));
        }
        let stream = self.streams.get(index, "pages")?;
        stream.storing.clone_from(&parts);
        stream.record_pages = pages;
        stream.is_postcopy = is_postcopy;
        out.push(DestinationAction::Store(index, parts));
        Ok(())
    }

    /// A record that may come now, of pages that the VM has.
    fn check_record(&mut self, index: StreamIndex, record: &PageRecord) -> Result<(), Refused> {
        let stream = self.streams.get(index, "pages")?;
        // A record is offered when the one before it is stored.
        let is_free = stream.storing.is_empty();
        if !is_free || !self.streams.is_up(index) {
            return Err(Refused::Stream {
                message: "pages",
                stream: index,
            });
        }
        if matches!(self.step, Step::Connecting | Step::Admitting) {
            return Err(self.unexpected("pages"));
        }
        let run = record.run;
        let is_outside = run.end().0 > self.missing.pages() && self.has_memory();
        if run.is_empty() || is_outside {
            return Err(Refused::Outside { run });
        }
        Ok(())
    }

    /// Whether a record may be stored. One that was started again does not know how many pages the VM has.
    fn has_memory(&self) -> bool {
        !matches!(
            self.step,
            Step::Refusing | Step::RefuseFailed | Step::Refused | Step::Lost | Step::Ended(_)
        )
    }

    fn is_being_stored(&self, run: PageRange) -> bool {
        let streams = self.streams.all();
        let mut storing = streams.flat_map(|(_, stream)| &stream.storing);
        storing.any(|other| !other.intersection(run).is_empty())
    }

    /// The parts of a record of precopy that are newer than what was taken.
    fn precopy_parts(&self, run: PageRange, round: Round) -> Vec<PageRange> {
        let has_ended = self.step != Step::Receiving;
        if has_ended && self.guards.has(Guard::PrecopyEnds) {
            return Vec::new();
        }
        if !self.guards.has(Guard::NewestRoundWins) {
            return vec![run];
        }
        let mut parts = Vec::new();
        let mut rest = run;
        while let Some((count, is_newer)) = self.rounds.uniform(rest, round) {
            let (head, tail) = rest.split_at(count);
            if is_newer {
                parts.push(head);
            }
            rest = tail;
        }
        parts
    }

    /// The parts of a record of postcopy whose pages are missing.
    fn postcopy_parts(&self, run: PageRange) -> Vec<PageRange> {
        let is_installing = matches!(
            self.step,
            Step::Loading | Step::Ready | Step::Entering | Step::EnterFailed | Step::Running
        );
        if !is_installing {
            return Vec::new();
        }
        if !self.guards.has(Guard::InstalledOnce) {
            return vec![run];
        }
        let mut parts = Vec::new();
        let mut from = run.first();
        while from < run.end()
            && let Some(next) = self.missing.next_run(from, run.end().0 - from.0)
        {
            let part = next.intersection(run);
            if part.is_empty() {
                break;
            }
            parts.push(part);
            from = PageIndex(part.end().0);
        }
        parts
    }

    /// The record that was being stored on a stream is stored.
    pub(super) fn stored(
        &mut self,
        index: StreamIndex,
        out: &mut Vec<DestinationAction>,
    ) -> Result<(), Refused> {
        let stream = self.streams.get(index, "stored")?;
        let parts = std::mem::take(&mut stream.storing);
        let (pages, is_postcopy) = (stream.record_pages, stream.is_postcopy);
        if parts.is_empty() {
            return Err(self.unexpected("stored"));
        }
        if self.guards.has(Guard::StoredFirst) {
            out.push(DestinationAction::Acknowledge(
                index,
                Message::Stored { pages },
            ));
        }
        if is_postcopy {
            let was_empty = self.missing.is_empty();
            parts.into_iter().for_each(|part| self.missing.remove(part));
            if !was_empty {
                self.say_complete(out);
            }
        }
        Ok(())
    }

    pub(super) fn say_complete(&self, out: &mut Vec<DestinationAction>) {
        let is_complete = self.missing.is_empty() || !self.guards.has(Guard::NothingMissing);
        if matches!(self.step, Step::Running | Step::Ended(Outcome::Complete)) && is_complete {
            self.send(Message::Complete, out);
        }
    }

    /// A thread waits for pages: those of them that are missing are asked for, and the others are on their way or there.
    pub(super) fn fault(
        &self,
        run: PageRange,
        out: &mut Vec<DestinationAction>,
    ) -> Result<(), Refused> {
        if !matches!(self.step, Step::Loading | Step::Running) {
            return Err(self.unexpected("fault"));
        }
        if run.is_empty() || run.end().0 > self.missing.pages() {
            return Err(Refused::Outside { run });
        }
        let limit = u64::from(crate::message::MAX_RUN_PAGES);
        let mut from = run.first();
        while from < run.end()
            && let Some(next) = self.missing.next_run(from, limit.min(run.end().0 - from.0))
        {
            let part = next.intersection(run);
            if part.is_empty() {
                break;
            }
            out.push(DestinationAction::Request(part));
            from = part.end();
        }
        Ok(())
    }
}
