//! A userfaultfd and the addresses of the pages that it serves.
//!
//! # The order of events
//!
//! A process that discards memory reports this first: it waits until its REMOVE event was read, and
//! then removes its mappings. A process that unmaps or moves memory changes its mappings first, and
//! then waits until its UNMAP or REMAP event was read. From before the first of the two steps until
//! after the event was read, the kernel refuses to install (EAGAIN). Without further measures, content
//! that is installed after the event was read could therefore land on a discarded page. The following
//! rule excludes it:
//!
//! - Pages of a userfaultfd with events are claimed and installed under the channel's lock, held for
//!   reading ([`Channel::lock_installs`]).
//! - Events are read, and the page map and the addresses of pages changed, under the same lock, held
//!   for writing ([`Channel::read`]).
//!
//! An installation thus either precedes the reading of an event, and the event discards the installed
//! page; or follows it, and finds the page Removed. An installer that gets EAGAIN gives up its claim
//! and the lock, reads the event itself, and retries.

use std::collections::VecDeque;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use pagetide_memory::{PageIndex, PageRange};
use pagetide_uapi::userfaultfd::{Event, EventBuffer, Features, PageFault, ReadError, Userfaultfd};
use rustix::io::Errno;

use crate::fault::RegionId;
use crate::lack::Unread;

/// The most ranges that a process has moved its memory away from and that are told apart.
const MOST_VACATED: usize = 1024;

/// Pages of one region that are contiguous in the address space that faults.
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

    /// The part of the span in `start..end`, in whole pages.
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

/// The messages of one read.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    pub(crate) messages: usize,
    /// Whether the buffer is full.
    pub(crate) is_full: bool,
    /// Whether one stays unread ([`crate::unread`]).
    pub(crate) lacks: bool,
}

/// What an address space is to the regions that have pages there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// The regions' own.
    Region,
    /// One that shares their memory ([`crate::spaces`]).
    Space,
    /// A copy that a fork has made, which nobody pages ([`crate::children`]).
    Child,
}

/// A userfaultfd and the pages that it serves.
#[derive(Debug)]
pub(crate) struct Channel {
    pub(crate) uffd: Arc<Userfaultfd>,
    /// The channel's number at the poller.
    pub(crate) token: u64,
    pub(crate) role: Role,
    /// Whether it may report memory that is discarded, unmapped or moved.
    pub(crate) has_events: bool,
    /// Whether it may report forks.
    pub(crate) has_forks: bool,
    /// Sorted by address, without overlap.
    spans: RwLock<Vec<Span>>,
    /// Whether the process has moved a part of its memory. Set with the spans locked for writing.
    has_moved: AtomicBool,
    /// Faults that a thread has read and another one is to resolve, or the same one later.
    pending: Mutex<VecDeque<PageFault>>,
    /// Whether there may be some.
    has_pending: AtomicBool,
    /// What the process has moved away from and kept (`MREMAP_DONTUNMAP`): it is still registered, has no
    /// pages of a region, and reads as zeroes.
    vacated: Mutex<Vec<Range<u64>>>,
    /// Whether more addresses count as moved away from than were.
    is_guessing: AtomicBool,
    /// Messages are read into this buffer, which outlives the process, in place of the reader's own.
    journal: Option<Mutex<EventBuffer>>,
    /// Whether a message stayed unread.
    pub(crate) unread: Unread,
    /// A successor reads the messages. Held for reading while a thread reads messages.
    is_handed_over: RwLock<bool>,
}

/// The right to claim and install pages of a channel with events; for other channels there is no lock.
#[derive(Debug)]
pub(crate) struct InstallLock<'c> {
    spans: Option<RwLockReadGuard<'c, Vec<Span>>>,
}

impl InstallLock<'_> {
    /// The address of the first of `pages`, and the pages that follow it contiguously. `None` if the
    /// first is not mapped.
    ///
    /// `home` is the first one's address if it was not moved.
    pub(crate) fn find(
        &self,
        region: RegionId,
        pages: PageRange,
        home: u64,
    ) -> Option<(u64, PageRange)> {
        let spans = self.spans.as_ref()?;
        let is_it = |span: &&Span| span.region == region && span.pages.contains(pages.first());
        let after = spans.partition_point(|span| span.start <= home);
        let at_home = after.checked_sub(1).and_then(|index| spans.get(index));
        let span = at_home.filter(is_it).or_else(|| spans.iter().find(is_it))?;
        let skip = pages.first().0 - span.pages.first().0;
        let start = span.start + (skip << span.shift);
        Some((start, pages.intersection(span.pages)))
    }
}

impl Channel {
    pub(crate) fn new(uffd: Arc<Userfaultfd>, token: u64) -> Self {
        Self::with_journal(uffd, token, None)
    }

    /// A channel whose messages outlive this process until they are handled, if it has events.
    pub(crate) fn with_journal(
        uffd: Arc<Userfaultfd>,
        token: u64,
        journal: Option<EventBuffer>,
    ) -> Self {
        let events = [
            Features::EVENT_REMOVE,
            Features::EVENT_UNMAP,
            Features::EVENT_REMAP,
            Features::EVENT_FORK,
        ];
        let has_events = events.iter().any(|&event| uffd.features().contains(event));
        Self {
            has_forks: uffd.features().contains(Features::EVENT_FORK),
            uffd,
            token,
            role: Role::Region,
            has_events,
            spans: RwLock::default(),
            has_moved: AtomicBool::new(false),
            pending: Mutex::default(),
            has_pending: AtomicBool::new(false),
            vacated: Mutex::default(),
            is_guessing: AtomicBool::new(false),
            journal: journal.map(Mutex::new),
            unread: Unread::default(),
            is_handed_over: RwLock::new(false),
        }
    }

    /// The channel of a child that was forked when its parent had these spans.
    pub(crate) fn of_child(uffd: Arc<Userfaultfd>, token: u64, spans: Vec<Span>) -> Self {
        Self {
            spans: RwLock::new(spans),
            ..Self::with_role(uffd, token, Role::Child)
        }
    }

    /// The channel of a child that was forked when nobody paged its parent's memory any more.
    pub(crate) fn child_without_pages(&self, descriptor: OwnedFd) -> Self {
        let uffd = Arc::new(self.uffd.of_child(descriptor));
        Self::with_role(uffd, self.token, Role::Child)
    }

    /// Whether a successor reads the messages, or nobody.
    pub(crate) fn is_handed_over(&self) -> bool {
        let locked = self.is_handed_over.read();
        *locked.unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn with_role(uffd: Arc<Userfaultfd>, token: u64, role: Role) -> Self {
        Self {
            role,
            ..Self::new(uffd, token)
        }
    }

    /// Whether the process has exited, or executes another program. Takes no lock: a thread may ask that has the
    /// spans locked.
    pub(crate) fn is_gone(&self) -> bool {
        self.uffd.is_gone()
    }

    /// All spans.
    pub(crate) fn all_spans(&self) -> Vec<Span> {
        let spans = self.spans.read().unwrap_or_else(PoisonError::into_inner);
        spans.clone()
    }

    /// The page size at `address`, as a shift.
    pub(crate) fn shift_at(&self, address: u64) -> Option<u32> {
        let spans = self.spans.read().unwrap_or_else(PoisonError::into_inner);
        let mut spans = spans.iter();
        let span = spans.find(|span| (span.start..span.end()).contains(&address))?;
        Some(span.shift)
    }

    /// Adds `span` to the channel; fails with the first shared address if it overlaps another span.
    /// Calls `begin` before any thread can find the span.
    pub(crate) fn add(&self, span: Span, begin: impl FnOnce()) -> Result<(), u64> {
        let mut spans = self.lock_spans();
        // They do not overlap each other: the first that ends behind the span's start decides.
        let at = spans.partition_point(|other| other.end() <= span.start);
        if let Some(other) = spans.get(at).filter(|other| other.start < span.end()) {
            return Err(other.start.max(span.start));
        }
        begin();
        self.forget_vacated(&(span.start..span.end()));
        spans.insert(at, span);
        Ok(())
    }

    /// Removes the spans of `region`, which was added at these addresses. Returns whether other spans remain.
    pub(crate) fn remove(&self, region: RegionId, home: &Range<u64>) -> bool {
        let mut spans = self.lock_spans();
        let place = self.place_of(&spans, home);
        let others = spans.get(place.clone()).unwrap_or_default().iter();
        let others: Vec<_> = others
            .filter(|span| span.region != region)
            .copied()
            .collect();
        spans.splice(place, others);
        !spans.is_empty()
    }

    /// Where the spans of a region are that was added at these addresses.
    fn place_of(&self, spans: &[Span], home: &Range<u64>) -> Range<usize> {
        if self.has_moved.load(Ordering::Acquire) {
            return 0..spans.len();
        }
        let first = spans.partition_point(|span| span.end() <= home.start);
        first
            ..spans
                .partition_point(|span| span.start < home.end)
                .max(first)
    }

    /// Records that some span is not where it was added.
    pub(crate) fn note_moved(&self) {
        self.has_moved.store(true, Ordering::Release);
    }

    /// Leaves the messages to a successor, or reverts that. Afterwards no thread here reads a message,
    /// so that none is lost to the successor.
    pub(crate) fn set_handed_over(&self, is_handed_over: bool) {
        let locked = self.is_handed_over.write();
        *locked.unwrap_or_else(PoisonError::into_inner) = is_handed_over;
    }

    /// The current addresses of the pages of `region`, which was added at the addresses `home`.
    pub(crate) fn spans_of(&self, region: RegionId, home: &Range<u64>) -> Vec<Span> {
        let spans = self.spans.read().unwrap_or_else(PoisonError::into_inner);
        let near = spans.get(self.place_of(&spans, home)).unwrap_or_default();
        let of_region = near.iter().filter(|span| span.region == region);
        of_region.copied().collect()
    }

    /// Locks the channel for an installation, from before the claim until after the installation.
    #[inline]
    pub(crate) fn lock_installs(&self) -> InstallLock<'_> {
        let spans = self
            .has_events
            .then(|| self.spans.read().unwrap_or_else(PoisonError::into_inner));
        InstallLock { spans }
    }

    fn lock_spans(&self) -> RwLockWriteGuard<'_, Vec<Span>> {
        // Spans are replaced as whole values, so a panic under the lock leaves valid spans.
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

    /// Reads messages: appends faults to `faults`, and calls `apply` with each event and the spans to
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
        if self.has_deferred() {
            let mut pending = self.lock_pending();
            faults.extend(pending.drain(..));
            self.has_pending.store(false, Ordering::Release);
        }
        if !self.has_events {
            let events = match self.uffd.read_events(buffer) {
                Ok(events) => events,
                Err(error) => return unread(error),
            };
            let messages = events.len();
            for event in events {
                match event {
                    Event::PageFault(fault) => faults.push(fault),
                    event => apply(&mut self.lock_spans(), event),
                }
            }
            return Ok(self.batch(messages, buffer));
        }
        let mut spans = self.lock_spans();
        // One thread at a time, because it holds the spans for writing.
        let mut journal = self.journal.as_ref().map(lock_journal);
        let buffer = journal.as_deref_mut().unwrap_or(buffer);
        let events = match self.uffd.read_events(buffer) {
            Ok(events) => events,
            Err(error) => return unread(error),
        };
        let messages = events.len();
        for event in events {
            match event {
                Event::PageFault(fault) => faults.push(fault),
                event => apply(&mut spans, event),
            }
        }
        let batch = self.batch(messages, buffer);
        if let Some(mut journal) = journal {
            journal.clear();
        }
        Ok(batch)
    }

    /// What a read means that gave so many messages.
    fn batch(&self, messages: usize, buffer: &EventBuffer) -> Batch {
        if messages == 0 {
            self.unread.end();
        }
        Batch {
            messages,
            is_full: messages == buffer.capacity(),
            lacks: false,
        }
    }

    /// Applies the events that a predecessor has read and may not have applied, which is harmless for
    /// those that it has. Its faults do not matter: their threads are woken.
    pub(crate) fn recover(&self, mut apply: impl FnMut(&mut Vec<Span>, Event)) {
        let mut spans = self.lock_spans();
        let Some(mut journal) = self.journal.as_ref().map(lock_journal) else {
            return;
        };
        for event in journal.unhandled() {
            if matches!(event, Event::Remove { .. } | Event::Unmap { .. }) {
                apply(&mut spans, event);
            }
        }
        journal.clear();
    }

    /// Stores faults for the next reader.
    pub(crate) fn defer(&self, faults: impl IntoIterator<Item = PageFault>) {
        let mut pending = self.lock_pending();
        pending.extend(faults);
        // Under the lock, as where the faults are taken.
        self.has_pending
            .store(!pending.is_empty(), Ordering::Release);
    }

    /// Whether there are stored faults.
    #[inline]
    pub(crate) fn has_deferred(&self) -> bool {
        self.has_pending.load(Ordering::Acquire)
    }

    fn lock_vacated(&self) -> MutexGuard<'_, Vec<Range<u64>>> {
        self.vacated.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that the process has moved its memory away from these addresses. If they are not mapped any more,
    /// an UNMAP event says so next, if the process reports those.
    pub(crate) fn vacate(&self, addresses: Range<u64>) {
        let mut vacated = self.lock_vacated();
        // A process that moves its memory on and on: each address that no region has counts.
        if vacated.len() >= MOST_VACATED {
            vacated.clear();
            vacated.push(0..u64::MAX);
            self.is_guessing.store(true, Ordering::Relaxed);
        }
        vacated.push(addresses);
    }

    /// Whether what was moved away from is known exactly: the process reports what it unmaps, and has not moved too often.
    pub(crate) fn knows_vacated(&self) -> bool {
        let reports = self.uffd.features().contains(Features::EVENT_UNMAP);
        reports && !self.is_guessing.load(Ordering::Relaxed)
    }

    /// Records that these addresses are not mapped any more, or have other memory.
    pub(crate) fn forget_vacated(&self, addresses: &Range<u64>) {
        let mut vacated = self.lock_vacated();
        let parts = vacated.drain(..).flat_map(|one| {
            let before = one.start..one.end.min(addresses.start);
            let behind = one.start.max(addresses.end)..one.end;
            [before, behind]
        });
        *vacated = parts.filter(|part| !part.is_empty()).collect();
    }

    /// Whether the process has moved its memory away from `address`.
    pub(crate) fn is_vacated(&self, address: u64) -> bool {
        self.lock_vacated().iter().any(|one| one.contains(&address))
    }
}

fn lock_journal(journal: &Mutex<EventBuffer>) -> MutexGuard<'_, EventBuffer> {
    journal.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a failed read means: a lack passes.
fn unread(error: ReadError) -> Result<Batch, ReadError> {
    match error {
        ReadError::Read(Errno::MFILE | Errno::NFILE | Errno::NOMEM) => Ok(Batch {
            lacks: true,
            ..Batch::default()
        }),
        error => Err(error),
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
    fn a_part_consists_of_whole_pages() {
        assert_eq!(part(0, u64::MAX), Some((0x10_0000, 4, 8)));
        assert_eq!(part(0x10_1000, 0x10_3000), Some((0x10_1000, 5, 2)));
        assert_eq!(part(0x10_1001, 0x10_3fff), Some((0x10_2000, 6, 1)));
        assert_eq!(part(0x10_1001, 0x10_1fff), None);
        assert_eq!(part(0, 0x10_0000), None);
        assert_eq!(part(0x10_8000, 0x20_0000), None);
        assert_eq!(part(5, 4), None);
    }

    fn channel() -> Option<Channel> {
        channel_with(Features::NONE)
    }

    fn channel_with(features: Features) -> Option<Channel> {
        match Userfaultfd::open(features) {
            Ok(uffd) => Some(Channel::new(Arc::new(uffd), 0)),
            Err(error @ (OpenError::NotSupported | OpenError::NoPermission { .. })) => {
                println!("SKIP: {error}");
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    /// Kind: one client's cost is everybody's.
    #[test]
    fn memory_that_moves_on_and_on_is_a_bounded_list() {
        let Some(channel) = channel_with(Features::EVENT_UNMAP) else {
            return;
        };
        assert!(channel.knows_vacated());
        let range = |number: u64| number << 20..(number << 20) + 0x1000;
        let moves = 3 * MOST_VACATED as u64;
        (0..moves).for_each(|number| channel.vacate(range(number)));
        assert!(channel.lock_vacated().len() <= MOST_VACATED);
        // Zeroes could be wrong there.
        assert!(!channel.knows_vacated());
        let is_vacated = |number| channel.is_vacated(range(number).start);
        assert!((0..moves).all(is_vacated));
        channel.forget_vacated(&range(1));
        assert!(is_vacated(0) && !is_vacated(1) && is_vacated(2));
    }

    /// A message that is read meanwhile is handled only if the table has the region.
    #[test]
    fn begin_runs_before_a_span_can_be_found() {
        let Some(channel) = channel() else {
            return;
        };
        let found = |channel: &Channel| {
            let spans = channel.spans.try_read();
            // While the lock is held for writing, no thread finds a span.
            spans.is_ok_and(|spans| spans.contains(&SPAN))
        };
        let mut begun = false;
        channel
            .add(SPAN, || {
                assert!(!found(&channel), "the span can already be found");
                begun = true;
            })
            .unwrap();
        assert!(begun && found(&channel));
        let located = channel.locate(SPAN.start + 0x2345);
        assert_eq!(located, Some((SPAN.region, PageIndex(6))));
    }

    #[test]
    fn begin_does_not_run_for_an_overlapping_span() {
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
            assert_eq!(channel.spans_of(region, &(0..u64::MAX)), []);
        }
        let behind = Span {
            start: SPAN.end(),
            ..SPAN
        };
        channel.add(behind, || {}).unwrap();
    }
}
