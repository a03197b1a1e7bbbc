//! The events of a userfaultfd: memory that is discarded, unmapped or moved, and forks.
//!
//! [`crate::channel`] defines the order in which events and installations take effect.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::panic::resume_unwind;
use std::thread::{self, Builder};

use pagetide_uapi::userfaultfd::{Event, EventBuffer, ReadError, UserRange};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::channel::{Batch, Channel, Role, Span};
use crate::counters::Counters;
use crate::fault::RegionId;
use crate::log_limit::log_limited;
use crate::notice::Notice;
use crate::pager::Pager;
use crate::region::PagedRegion;

/// The number of messages per read for a thread that only looks for events.
const EVENTS_AT_ONCE: usize = 16;

/// The most reads of a userfaultfd at its end: the events of 65,536 threads, each of which waits for one.
const LAST_READS: usize = (1 << 16) / EVENTS_AT_ONCE;

impl Pager {
    /// Reads a channel's messages, because the kernel refuses to install before its events are read.
    /// Faults among the messages are stored for the threads that serve the pager's descriptor.
    #[cold]
    pub(crate) fn read_events(&self, channel: &Channel) {
        if !channel.has_events {
            thread::yield_now();
            return;
        }
        match self.read_batch(channel) {
            Ok(batch) if batch.lacks => self.read_later(channel),
            // Another thread has read the event, and the process that caused it is about to continue.
            Ok(batch) if batch.messages == 0 => thread::yield_now(),
            Ok(_) => {}
            Err(error) => log_limited!(error, %error, "reading the events of a userfaultfd"),
        }
    }

    /// Reads what a userfaultfd has to say when nobody will read it any more. No new event comes of memory that is not
    /// registered; where it serves other memory, others go on reading. What is left after so many reads, or for want of a
    /// descriptor for a fork, waits until the userfaultfd is closed.
    pub(crate) fn read_last_events(&self, channel: &Channel) {
        if !channel.has_events {
            return;
        }
        for _ in 0..LAST_READS {
            match self.read_batch(channel) {
                Ok(batch) if batch.lacks => return self.read_later(channel),
                Ok(batch) if batch.messages == 0 => return,
                Ok(_) => {}
                Err(error) => {
                    return log_limited!(error, %error, "reading the events of a userfaultfd");
                }
            }
        }
    }

    /// Reads some messages, applies the events, and stores the faults.
    fn read_batch(&self, channel: &Channel) -> Result<Batch, ReadError> {
        let mut buffer = EventBuffer::new(EVENTS_AT_ONCE);
        let mut faults = Vec::new();
        let read = channel.read(&mut buffer, &mut faults, |spans, event| {
            self.apply(channel, spans, event);
        });
        if !faults.is_empty() {
            channel.defer(faults);
            self.poller.report_deferred();
        }
        read
    }

    /// Changes a local region's memory in a way that its userfaultfd reports. The kernel makes the
    /// changing thread wait until the event was read, and there may be no other reader: so a helper
    /// thread makes the change, and this thread reads. Called without the channel's install lock.
    ///
    /// # Errors
    /// The helper could not be started, and nothing was changed.
    pub(crate) fn with_events_read<T: Send>(
        &self,
        region: &PagedRegion,
        act: impl FnOnce() -> T + Send,
    ) -> io::Result<T> {
        let mut channels = region.served.iter().map(|served| &served.channel);
        let Some(channel) = channels.find(|channel| channel.has_events) else {
            return Ok(act());
        };
        // Readable when the helper has ended. Without a descriptor, this thread looks now and then.
        let ended = eventfd(0, EventfdFlags::CLOEXEC).ok();
        thread::scope(|scope| {
            let its = &ended;
            let helper = Builder::new().name("pt-change".to_owned());
            let acting = helper.spawn_scoped(scope, move || {
                let _ending = Ending(its.as_ref());
                act()
            })?;
            while !acting.is_finished() {
                wait_for_message(channel, ended.as_ref());
                self.read_events(channel);
            }
            Ok(acting.join().unwrap_or_else(|panic| resume_unwind(panic)))
        })
    }

    /// Applies an event to the page maps and to the spans. Called with the channel's lock held for
    /// writing, so that no installation is in progress.
    pub(crate) fn apply(&self, channel: &Channel, spans: &mut Vec<Span>, event: Event) {
        match event {
            Event::PageFault(_) => {}
            Event::Remove { start, end } => {
                let parts: Vec<_> = spans
                    .iter()
                    .filter_map(|span| span.part(start, end))
                    .collect();
                for part in parts {
                    self.discarded(channel, &part);
                }
            }
            Event::Unmap { start, end } => {
                for part in take(spans, start, end) {
                    self.discarded(channel, &part);
                }
                channel.forget_vacated(&(start..end));
                // Unmapping wakes no thread. A thread that sleeps there must fault again, and gets
                // SIGSEGV.
                wake_range(channel, start, end.saturating_sub(start));
            }
            Event::Remap { from, to, bytes } => {
                let moved = take(spans, from, from.saturating_add(bytes));
                // The mapping at the new address was replaced; an UNMAP event has already reported
                // that.
                let replaced = take(spans, to, to.saturating_add(bytes));
                for part in replaced {
                    self.discarded(channel, &part);
                }
                channel.forget_vacated(&(to..to.saturating_add(bytes)));
                if !moved.is_empty() {
                    channel.note_moved();
                    channel.vacate(from..from.saturating_add(bytes));
                }
                for part in moved {
                    let offset = part.start.saturating_sub(from);
                    let start = to.saturating_add(offset);
                    let at = spans.partition_point(|other| other.start < start);
                    spans.insert(at, Span { start, ..part });
                }
                // Moving wakes no thread either. A thread that sleeps at the previous address must
                // fault again; normally nothing is mapped there, and it gets SIGSEGV. One that sleeps at the
                // new address may have had its message read before this event, when no page was there.
                wake_range(channel, from, bytes);
                wake_range(channel, to, bytes);
            }
            Event::Fork { descriptor } => {
                if let Ok(raw) = RawFd::try_from(descriptor) {
                    // SAFETY: from_raw_fd requires an open descriptor without another owner: the kernel
                    // created it for the reader of this message, and the message is read once.
                    let fd = unsafe { OwnedFd::from_raw_fd(raw) };
                    self.adopt_child(channel, spans, fd);
                }
                let mut regions: Vec<RegionId> = spans.iter().map(|span| span.region).collect();
                regions.dedup();
                for region in regions {
                    self.notify(Notice::Forked { region });
                }
            }
            Event::Unknown(number) => {
                log_limited!(error, number, "a userfaultfd sent an unknown event");
            }
        }
    }

    /// Marks pages as Removed that were discarded or are not mapped any more: content that arrives for
    /// them is dropped, and an access reads zeroes.
    fn discarded(&self, channel: &Channel, part: &Span) {
        // What others do with their mappings changes nothing of the region's content.
        if channel.role != Role::Region {
            return;
        }
        let table = self.table();
        let Some(region) = table.region(part.region) else {
            return;
        };
        let mut wakes: Option<(u64, u64)> = None;
        for page in part.pages.iter() {
            let (_, wake) = region.remove(page);
            if wake.is_wanted() {
                let at = part.start + ((page.0 - part.pages.first().0) << part.shift);
                let end = at + (1 << part.shift);
                wakes = Some(wakes.map_or((at, end), |(start, _)| (start, end)));
            }
        }
        if let Some((start, end)) = wakes {
            let bytes = end - start;
            // Fails if the range is not mapped any more; then no thread sleeps there.
            let _ = channel.uffd.wake(UserRange { start, bytes });
            region
                .spaces
                .wake(region.id, &mut Counters::default(), part.pages);
        }
    }
}

/// Reports the end of a thread, also if it unwinds.
struct Ending<'e>(Option<&'e OwnedFd>);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        if let Some(ended) = self.0 {
            // Fails only if the counter is at its maximum.
            let _ = rustix::io::write(ended, &1_u64.to_ne_bytes());
        }
    }
}

/// Waits until the channel has a message, or `ended` is readable.
fn wait_for_message(channel: &Channel, ended: Option<&OwnedFd>) {
    /// Another thread may read the message first.
    const LOOK_AGAIN: Timespec = Timespec {
        tv_sec: 0,
        tv_nsec: 10_000_000,
    };
    let mut ready = vec![PollFd::new(&*channel.uffd, PollFlags::IN)];
    ready.extend(ended.map(|ended| PollFd::new(ended, PollFlags::IN)));
    // A signal ends it early.
    let _ = poll(&mut ready, Some(&LOOK_AGAIN));
}

fn wake_range(channel: &Channel, start: u64, bytes: u64) {
    // Fails for an invalid range, where no thread can sleep.
    let _ = channel.uffd.wake(UserRange { start, bytes });
}

/// Removes the parts in `start..end` from the spans, and returns them.
fn take(spans: &mut Vec<Span>, start: u64, end: u64) -> Vec<Span> {
    let mut taken = Vec::new();
    let mut left = Vec::with_capacity(spans.len() + 1);
    for span in spans.drain(..) {
        let Some(part) = span.part(start, end) else {
            left.push(span);
            continue;
        };
        let before = part.pages.first().0 - span.pages.first().0;
        let (head, rest) = span.pages.split_at(before);
        let (_, tail) = rest.split_at(part.pages.count());
        if !head.is_empty() {
            left.push(Span {
                pages: head,
                ..span
            });
        }
        if !tail.is_empty() {
            let skip = before + part.pages.count();
            let start = span.start + (skip << span.shift);
            left.push(Span {
                start,
                pages: tail,
                ..span
            });
        }
        taken.push(part);
    }
    *spans = left;
    taken
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, mpsc};

    use pagetide_memory::{Backing, GuestAddress, PageIndex, PageRange, Region};
    use pagetide_test_support::Sleeper;
    use pagetide_uapi::userfaultfd::{Mode, Userfaultfd};

    use super::*;
    use crate::{Contents, PatternSource, RegionConfig, UffdLayout};

    fn span(start: u64, first: u64, count: u64) -> Span {
        Span {
            start,
            region: RegionId(3),
            pages: PageRange::new(PageIndex(first), count),
            shift: 12,
        }
    }

    #[test]
    fn removing_a_part_leaves_both_ends() {
        let mut spans = vec![span(0x1000, 0, 1), span(0x10_0000, 4, 8)];
        let taken = take(&mut spans, 0x10_2000, 0x10_5000);
        assert_eq!(taken, [span(0x10_2000, 6, 3)]);
        let left = [
            span(0x1000, 0, 1),
            span(0x10_0000, 4, 2),
            span(0x10_5000, 9, 3),
        ];
        assert_eq!(spans, left);
        assert_eq!(take(&mut spans, 0, 0x1000), []);
        assert_eq!(take(&mut spans, 0, u64::MAX).len(), 3);
        assert_eq!(spans, []);
    }

    /// Kind: a wait that takes the processor, and the channel's lock, from whom it waits for.
    #[test]
    fn a_change_that_takes_long_is_waited_for_asleep() {
        if let Err(error) = Userfaultfd::available() {
            println!("SKIP: {error}");
            return;
        }
        let memory = Region::new(GuestAddress(0), 8 << 12, Backing::Anonymous).unwrap();
        let content = Contents::Local(Arc::new(PatternSource::new(|_, _: &mut [u8]| {})));
        let config = RegionConfig::local(Arc::new(memory), Mode::Missing, content);
        let pager = Pager::new().unwrap();
        let id = pager.add(config.userfaultfds(UffdLayout::WithEvents));
        let (id, its) = (id.unwrap(), Arc::clone(&pager));
        let (end, ends) = mpsc::channel::<()>();
        let changing = Sleeper::spawn("a change", move || {
            let table = its.table();
            let region = table.region(id).unwrap();
            its.with_events_read(region, move || ends.recv().unwrap())
        });
        end.send(()).unwrap();
        changing.join().unwrap();
    }
}
