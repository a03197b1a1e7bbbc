//! A userfaultfd, and which pages it serves where.
//!
//! # The order of events
//!
//! A process that discards memory tells so first: it waits until its REMOVE event was read, and then
//! drops its mappings. One that unmaps or moves memory changes its mappings first, and then waits until
//! its UNMAP or REMAP event was read. From before the first of the two until after the event was read,
//! the kernel refuses to install (EAGAIN). So content that is installed after the event was read could
//! land on a page that was given up. The rule that excludes it:
//!
//! - Pages that a userfaultfd with events serves are claimed and installed under the channel's lock,
//!   held for reading ([`Channel::order`]).
//! - Events are read, and the page map and the places of pages changed, under the same lock held for
//!   writing ([`Channel::read`]).
//!
//! An installation therefore comes wholly before an event was read, and what it installed is discarded
//! with the rest; or after, and finds the page Removed. An installer that gets EAGAIN gives its claim and
//! the lock back, reads the event itself, and looks again.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use pagetide_memory::{PageIndex, PageRange};
use pagetide_uapi::userfaultfd::{Event, EventBuffer, Features, PageFault, ReadError, Userfaultfd};

use crate::fault::RegionId;

/// Pages of one region that lie one behind the other in the memory that faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    /// The address of the first page.
    pub(crate) start: u64,
    pub(crate) region: RegionId,
    pub(crate) pages: PageRange,
    pub(crate) shift: u32,
}

impl Span {
    pub(crate) fn bytes(&self) -> u64 {
        self.pages.count() << self.shift
    }

    pub(crate) fn end(&self) -> u64 {
        self.start.saturating_add(self.bytes())
    }

    /// The part of the span that lies in `start..end`, whole pages.
    pub(crate) fn part(&self, start: u64, end: u64) -> Option<Self> {
        let from = start.max(self.start) - self.start;
        let to = end.min(self.end()).checked_sub(self.start)?;
        let first = from.div_ceil(1 << self.shift);
        let count = (to >> self.shift)
            .checked_sub(first)
            .filter(|&count| count > 0)?;
        Some(Self {
            start: self.start + (first << self.shift),
            pages: PageRange::new(PageIndex(self.pages.first().0 + first), count),
            ..*self
        })
    }
}

/// What a read of a channel gave: faults, and how many messages there were.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    pub(crate) messages: usize,
    pub(crate) is_full: bool,
}

/// A userfaultfd and the pages that it serves.
#[derive(Debug)]
pub(crate) struct Channel {
    pub(crate) uffd: Arc<Userfaultfd>,
    /// Its number at the poller.
    pub(crate) token: u64,
    /// Whether it may tell of memory that is discarded, unmapped or moved.
    pub(crate) has_events: bool,
    /// Sorted by address, without overlap.
    spans: RwLock<Vec<Span>>,
    /// Faults that were read by a thread that looked for events.
    pending: Mutex<VecDeque<PageFault>>,
    /// A successor reads the messages. Held for reading by whoever reads messages.
    is_handed_over: RwLock<bool>,
}

/// The right to claim and install pages of a channel with events. Nothing for others.
#[derive(Debug)]
pub(crate) struct Order<'c> {
    spans: Option<RwLockReadGuard<'c, Vec<Span>>>,
}

impl Order<'_> {
    /// Where `pages` start, and how many of them lie there one behind the other. `None` if the first
    /// is not mapped anywhere.
    pub(crate) fn find(&self, region: RegionId, pages: PageRange) -> Option<(u64, PageRange)> {
        let spans = self.spans.as_ref()?;
        let span = spans
            .iter()
            .find(|span| span.region == region && span.pages.contains(pages.first()))?;
        let skip = pages.first().0 - span.pages.first().0;
        let start = span.start + (skip << span.shift);
        Some((start, pages.intersection(span.pages)))
    }
}

impl Channel {
    pub(crate) fn new(uffd: Arc<Userfaultfd>, token: u64) -> Self {
        let events = [
            Features::EVENT_REMOVE,
            Features::EVENT_UNMAP,
            Features::EVENT_REMAP,
            Features::EVENT_FORK,
        ];
        let has_events = events.iter().any(|&event| uffd.features().contains(event));
        Self {
            uffd,
            token,
            has_events,
            spans: RwLock::default(),
            pending: Mutex::default(),
            is_handed_over: RwLock::new(false),
        }
    }

    /// Has the channel serve `span` as well; the address where it overlaps another, if it does. Calls
    /// `begin` before anybody can find the span.
    pub(crate) fn add(&self, span: Span, begin: impl FnOnce()) -> Result<(), u64> {
        let mut spans = self.lock_spans();
        let overlaps = |other: &&Span| other.start < span.end() && span.start < other.end();
        if let Some(other) = spans.iter().find(overlaps) {
            return Err(other.start.max(span.start));
        }
        begin();
        let at = spans.partition_point(|other| other.start < span.start);
        spans.insert(at, span);
        Ok(())
    }

    /// Has the channel serve nothing of `region` any more. Returns whether anything else is left.
    pub(crate) fn remove(&self, region: RegionId) -> bool {
        let mut spans = self.lock_spans();
        spans.retain(|span| span.region != region);
        !spans.is_empty()
    }

    /// Leaves the messages to a successor, or takes that back. Afterwards nobody reads one here: what
    /// is told from now on, nobody but the successor must take for known.
    pub(crate) fn set_handed_over(&self, is_handed_over: bool) {
        let locked = self.is_handed_over.write();
        *locked.unwrap_or_else(PoisonError::into_inner) = is_handed_over;
    }

    /// Where the pages of `region` are now.
    pub(crate) fn spans_of(&self, region: RegionId) -> Vec<Span> {
        let spans = self.spans.read().unwrap_or_else(PoisonError::into_inner);
        let of_region = spans.iter().filter(|span| span.region == region);
        of_region.copied().collect()
    }

    /// To be held from before a claim to after its installation.
    #[inline]
    pub(crate) fn order(&self) -> Order<'_> {
        let spans = self
            .has_events
            .then(|| self.spans.read().unwrap_or_else(PoisonError::into_inner));
        Order { spans }
    }

    fn lock_spans(&self) -> RwLockWriteGuard<'_, Vec<Span>> {
        // Whoever panicked with the lock has left whole spans: they are replaced, not edited.
        self.spans.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_pending(&self) -> MutexGuard<'_, VecDeque<PageFault>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The region and page at `address`.
    #[inline]
    pub(crate) fn locate(&self, address: u64) -> Option<(RegionId, PageIndex)> {
        let spans = self.spans.read().unwrap_or_else(PoisonError::into_inner);
        let after = spans.partition_point(|span| span.start <= address);
        let span = spans.get(after.checked_sub(1)?)?;
        let offset = (address - span.start) >> span.shift;
        (offset < span.pages.count())
            .then(|| (span.region, PageIndex(span.pages.first().0 + offset)))
    }

    /// Reads messages: faults go to `faults`, events to `apply`, which is given the places of pages to
    /// change, before any later message is read.
    pub(crate) fn read(
        &self,
        buffer: &mut EventBuffer,
        faults: &mut Vec<PageFault>,
        mut apply: impl FnMut(&mut Vec<Span>, Event),
    ) -> Result<Batch, ReadError> {
        let is_handed_over = self.is_handed_over.read();
        let is_handed_over = is_handed_over.unwrap_or_else(PoisonError::into_inner);
        if *is_handed_over {
            return Ok(Batch::default());
        }
        if !self.has_events {
            let events = self.uffd.read_events(buffer)?;
            let messages = events.len();
            for event in events {
                match event {
                    Event::PageFault(fault) => faults.push(fault),
                    event => apply(&mut self.lock_spans(), event),
                }
            }
            let is_full = messages == buffer.capacity();
            return Ok(Batch { messages, is_full });
        }
        let mut spans = self.lock_spans();
        faults.extend(self.lock_pending().drain(..));
        let events = self.uffd.read_events(buffer)?;
        let messages = events.len();
        for event in events {
            match event {
                Event::PageFault(fault) => faults.push(fault),
                event => apply(&mut spans, event),
            }
        }
        let is_full = messages == buffer.capacity();
        Ok(Batch { messages, is_full })
    }

    /// Keeps faults for whoever reads next.
    pub(crate) fn keep(&self, faults: impl IntoIterator<Item = PageFault>) {
        self.lock_pending().extend(faults);
    }

    /// Whether faults are kept.
    pub(crate) fn has_kept(&self) -> bool {
        self.has_events && !self.lock_pending().is_empty()
    }
}

#[cfg(test)]
mod tests {
    use pagetide_uapi::userfaultfd::OpenError;

    use super::*;

    const SPAN: Span = Span {
        start: 0x10_0000,
        region: RegionId(0),
        pages: PageRange::new(PageIndex(4), 8),
        shift: 12,
    };

    fn part(start: u64, end: u64) -> Option<(u64, u64, u64)> {
        let part = SPAN.part(start, end)?;
        Some((part.start, part.pages.first().0, part.pages.count()))
    }

    #[test]
    fn a_part_is_whole_pages() {
        assert_eq!(part(0, u64::MAX), Some((0x10_0000, 4, 8)));
        assert_eq!(part(0x10_1000, 0x10_3000), Some((0x10_1000, 5, 2)));
        assert_eq!(part(0x10_1001, 0x10_3fff), Some((0x10_2000, 6, 1)));
        assert_eq!(part(0x10_1001, 0x10_1fff), None);
        assert_eq!(part(0, 0x10_0000), None);
        assert_eq!(part(0x10_8000, 0x20_0000), None);
        assert_eq!(part(5, 4), None);
    }

    fn channel() -> Option<Channel> {
        match Userfaultfd::open(Features::NONE) {
            Ok(uffd) => Some(Channel::new(Arc::new(uffd), 0)),
            Err(error @ (OpenError::NotSupported | OpenError::NoPermission { .. })) => {
                println!("SKIP: {error}");
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    /// A message that is read meanwhile finds the region only when the table has it.
    #[test]
    fn what_must_come_before_a_span_is_found_comes_before() {
        let Some(channel) = channel() else {
            return;
        };
        let found = |channel: &Channel| {
            let spans = channel.spans.try_read();
            // With the lock held for writing nobody finds anything.
            spans.is_ok_and(|spans| spans.contains(&SPAN))
        };
        let mut begun = false;
        channel
            .add(SPAN, || {
                assert!(!found(&channel), "it is found already");
                begun = true;
            })
            .unwrap();
        assert!(begun && found(&channel));
        let located = channel.locate(SPAN.start + 0x2345);
        assert_eq!(located, Some((SPAN.region, PageIndex(6))));
    }

    #[test]
    fn nothing_is_begun_for_a_span_that_overlaps_another() {
        let Some(channel) = channel() else {
            return;
        };
        channel.add(SPAN, || {}).unwrap();
        for (start, at) in [
            (SPAN.start, SPAN.start),
            (SPAN.start - 0x1000, SPAN.start),
            (SPAN.start + 0x7000, SPAN.start + 0x7000),
        ] {
            let region = RegionId(1);
            let other = Span {
                start,
                region,
                ..SPAN
            };
            let added = channel.add(other, || panic!("begun"));
            assert_eq!(added, Err(at));
            assert_eq!(channel.spans_of(region), []);
        }
        let behind = Span {
            start: SPAN.end(),
            ..SPAN
        };
        channel.add(behind, || {}).unwrap();
    }
}
