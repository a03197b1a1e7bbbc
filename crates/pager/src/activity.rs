//! Counts the faults that are being served, for threads that work ahead of them.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crossbeam_utils::CachePadded;
use pagetide_memory::PageIndex;

use crate::fault::RegionId;

/// The number of threads that can write without sharing cache lines; further threads share them.
const SHARDS: usize = 32;

/// Bits of the page number in a packed position: 2^60 bytes of the smallest pages, more than a guest
/// can address.
const PAGE_BITS: u32 = 48;

/// The shard that a thread writes to.
#[derive(Debug)]
pub(crate) struct ShardIndex(usize);

impl Default for ShardIndex {
    fn default() -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed) % SHARDS)
    }
}

#[derive(Debug, Default)]
struct Shard {
    served: AtomicU64,
    last: AtomicU64,
}

/// The number of faults that installed or requested a page, and the position of each thread's last one.
/// All accesses are relaxed: they influence where and how fast prefetch works, never whether a page is
/// present.
#[derive(Debug, Default)]
pub(crate) struct Activity {
    shards: [CachePadded<Shard>; SHARDS],
}

/// The state of an [`Activity`] at an observer's last look.
#[derive(Debug, Default)]
pub(crate) struct Seen([u64; SHARDS]);

/// The most pages between two positions of one run of accesses: 2 MiB of small pages.
const NEAR_PAGES: u64 = 512;

/// Tells positions that follow each other from scattered ones. To fetch the pages after a random access
/// fetches nothing that is needed soon, and leaves small gaps everywhere, each of which takes a call.
#[derive(Debug, Default)]
pub(crate) struct Locality(Option<(RegionId, PageIndex)>);

impl Locality {
    /// The position, if it is near the one before, or the first one.
    pub(crate) fn follow(
        &mut self,
        position: Option<(RegionId, PageIndex)>,
    ) -> Option<(RegionId, PageIndex)> {
        let (region, page) = position?;
        let before = self.0.replace((region, page));
        before
            .is_none_or(|(its, last)| its == region && page.0.abs_diff(last.0) <= NEAR_PAGES)
            .then_some((region, page))
    }
}

impl Activity {
    /// Records that a thread is about to install or request `page` because of a fault.
    #[inline]
    pub(crate) fn record(&self, shard: &ShardIndex, region: RegionId, page: PageIndex) {
        if let Some(shard) = self.shards.get(shard.0) {
            let position = ((region.0 as u64) << PAGE_BITS) | page.0;
            shard.last.store(position, Ordering::Relaxed);
            shard.served.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The number of faults so far that installed or requested a page.
    pub(crate) fn served(&self) -> u64 {
        let served = |shard: &CachePadded<Shard>| shard.served.load(Ordering::Relaxed);
        self.shards.iter().map(served).sum()
    }

    /// The last position of the thread that served most faults since the last call; `None` if no thread
    /// served any. A hint: the position may no longer name a page when it is used.
    pub(crate) fn busiest(&self, seen: &mut Seen) -> Option<(RegionId, PageIndex)> {
        let mut busiest = (0, 0);
        for (shard, seen) in self.shards.iter().zip(&mut seen.0) {
            let served = shard.served.load(Ordering::Relaxed);
            let since = served.wrapping_sub(*seen);
            *seen = served;
            if since > busiest.0 {
                busiest = (since, shard.last.load(Ordering::Relaxed));
            }
        }
        let (since, position) = busiest;
        let region = usize::try_from(position >> PAGE_BITS).ok()?;
        let page = PageIndex(position & ((1 << PAGE_BITS) - 1));
        (since > 0).then_some((RegionId(region), page))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_busiest_position_is_returned_once() {
        let activity = Activity::default();
        let mut seen = Seen::default();
        let (one, other) = (ShardIndex(3), ShardIndex(4));
        assert_eq!(activity.busiest(&mut seen), None);
        activity.record(&one, RegionId(0), PageIndex(7));
        activity.record(&other, RegionId(1), PageIndex(100));
        activity.record(&other, RegionId(2), PageIndex((1 << 40) + 1));
        let position = (RegionId(2), PageIndex((1 << 40) + 1));
        assert_eq!(activity.busiest(&mut seen), Some(position));
        assert_eq!(activity.busiest(&mut seen), None);
        activity.record(&one, RegionId(0), PageIndex(8));
        assert_eq!(
            activity.busiest(&mut seen),
            Some((RegionId(0), PageIndex(8)))
        );
        assert_eq!(activity.served(), 4);
    }

    #[test]
    fn only_positions_near_each_other_are_followed() {
        let mut locality = Locality::default();
        let at = |region, page| Some((RegionId(region), PageIndex(page)));
        let mut follow = |region, page| locality.follow(at(region, page)).is_some();
        assert!(follow(0, 100_000), "nothing better is known");
        assert!(follow(0, 100_001) && follow(0, 100_001 + NEAR_PAGES) && follow(0, 100_001));
        assert!(!follow(1, 100_000), "another region");
        assert!(!follow(1, 0) && !follow(1, 5000) && !follow(1, 90_000));
        assert!(follow(1, 90_000 - NEAR_PAGES));
        assert_eq!(locality.follow(None), None);
        assert_eq!(locality.follow(at(1, 90_001)), None, "just too far");
    }

    #[test]
    fn threads_have_separate_shards_until_there_are_too_many() {
        let shards: Vec<_> = (0..SHARDS).map(|_| ShardIndex::default().0).collect();
        assert!(shards.iter().all(|&shard| shard < SHARDS));
        assert!(shards.windows(2).any(|pair| pair[0] != pair[1]));
    }
}
