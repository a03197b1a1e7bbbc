//! The further address spaces of a region: of processes that share its memory.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

use pagetide_memory::{HostRange, PageRange};
use pagetide_uapi::userfaultfd::UserRange;

use crate::channel::Channel;
use crate::counters::Counters;
use crate::fault::RegionId;

/// The number of an address space that was attached; unique in the pager.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AddressSpaceId(pub(crate) u64);

/// One more address space of a region.
#[derive(Debug)]
pub(crate) struct AddressSpace {
    pub(crate) id: AddressSpaceId,
    pub(crate) channel: Arc<Channel>,
    /// The addresses at which it was attached.
    pub(crate) range: HostRange,
}

/// A region's further address spaces.
#[derive(Debug, Default)]
pub(crate) struct Spaces {
    list: RwLock<Vec<Arc<AddressSpace>>>,
    /// Whether there has been one: most regions have none, and look no further.
    any: AtomicBool,
}

impl Spaces {
    fn read(&self) -> RwLockReadGuard<'_, Vec<Arc<AddressSpace>>> {
        self.list.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The address spaces at this moment.
    #[inline]
    pub(crate) fn all(&self) -> Vec<Arc<AddressSpace>> {
        if !self.any.load(Ordering::Acquire) {
            return Vec::new();
        }
        self.read().clone()
    }

    pub(crate) fn add(&self, space: Arc<AddressSpace>) {
        let list = self.list.write();
        list.unwrap_or_else(PoisonError::into_inner).push(space);
        self.any.store(true, Ordering::Release);
    }

    pub(crate) fn take(&self, id: AddressSpaceId) -> Vec<Arc<AddressSpace>> {
        let mut list = self.list.write().unwrap_or_else(PoisonError::into_inner);
        let (taken, left) = list.drain(..).partition(|space| space.id == id);
        *list = left;
        taken
    }

    /// Takes the address spaces of a process that has gone.
    pub(crate) fn take_of(&self, channel: &Channel) {
        let mut list = self.list.write().unwrap_or_else(PoisonError::into_inner);
        list.retain(|space| space.channel.token != channel.token);
    }

    /// Wakes the threads that sleep there on pages of a region.
    #[inline]
    pub(crate) fn wake(&self, region: RegionId, counters: &mut Counters, pages: PageRange) {
        if self.any.load(Ordering::Acquire) {
            self.wake_all(region, counters, pages);
        }
    }

    #[cold]
    fn wake_all(&self, region: RegionId, counters: &mut Counters, pages: PageRange) {
        for space in self.all() {
            for range in space.parts(region, pages) {
                counters.wakes += 1;
                // Fails if the range is not mapped any more, where no thread sleeps.
                let _ = space.channel.uffd.wake(range);
            }
        }
    }
}

impl AddressSpace {
    pub(crate) fn home(&self) -> std::ops::Range<u64> {
        let start = self.range.start().as_u64();
        start..start + self.range.bytes() as u64
    }

    /// Where pages of a region are in it now.
    pub(crate) fn parts(&self, region: RegionId, pages: PageRange) -> Vec<UserRange> {
        let spans = self.channel.spans_of(region, &self.home());
        let parts = spans.into_iter().filter_map(|span| {
            let part = span.pages.intersection(pages);
            let skip = part.first().0.checked_sub(span.pages.first().0)?;
            let range = UserRange {
                start: span.start + (skip << span.shift),
                bytes: part.count() << span.shift,
            };
            (!part.is_empty()).then_some(range)
        });
        parts.collect()
    }
}
