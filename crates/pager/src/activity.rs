//! The faults that are being served, as seen by those who work ahead of them.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crossbeam_utils::CachePadded;
use pagetide_memory::PageIndex;

use crate::fault::RegionId;

/// How many threads may write without sharing cache lines; more of them share.
const SHARDS: usize = 32;

/// Bits of a page's number in a packed position: 2^60 bytes of the smallest pages, more than a
/// guest can address.
const PAGE_BITS: u32 = 48;

/// Which shard a thread writes to.
#[derive(Debug)]
pub(crate) struct Seat(usize);

impl Default for Seat {
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

/// How many faults brought a page in, and where the last ones were. Everything is relaxed: it
/// decides where to work and how fast, never whether a page is there.
#[derive(Debug, Default)]
pub(crate) struct Activity {
    shards: [CachePadded<Shard>; SHARDS],
}

/// What somebody has seen of a [`Activity`] so far.
#[derive(Debug, Default)]
pub(crate) struct Seen([u64; SHARDS]);

impl Activity {
    /// A thread is about to install or request `page` because of a fault.
    #[inline]
    pub(crate) fn beat(&self, seat: &Seat, region: RegionId, page: PageIndex) {
        if let Some(shard) = self.shards.get(seat.0) {
            let position = ((region.0 as u64) << PAGE_BITS) | page.0;
            shard.last.store(position, Ordering::Relaxed);
            shard.served.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// All faults so far that brought a page in.
    pub(crate) fn served(&self) -> u64 {
        let served = |shard: &CachePadded<Shard>| shard.served.load(Ordering::Relaxed);
        self.shards.iter().map(served).sum()
    }

    /// Where the last fault was of the thread that served most since the last look; `None` if none
    /// served any. A hint: the position may be of no page by the time it is used.
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
    fn the_busiest_since_the_last_look_is_told_once() {
        let activity = Activity::default();
        let mut seen = Seen::default();
        let (one, other) = (Seat(3), Seat(4));
        assert_eq!(activity.busiest(&mut seen), None);
        activity.beat(&one, RegionId(0), PageIndex(7));
        activity.beat(&other, RegionId(1), PageIndex(100));
        activity.beat(&other, RegionId(2), PageIndex((1 << 40) + 1));
        let position = (RegionId(2), PageIndex((1 << 40) + 1));
        assert_eq!(activity.busiest(&mut seen), Some(position));
        assert_eq!(activity.busiest(&mut seen), None);
        activity.beat(&one, RegionId(0), PageIndex(8));
        assert_eq!(
            activity.busiest(&mut seen),
            Some((RegionId(0), PageIndex(8)))
        );
        assert_eq!(activity.served(), 4);
    }

    #[test]
    fn threads_get_seats_of_their_own_until_there_are_too_many() {
        let seats: Vec<_> = (0..SHARDS).map(|_| Seat::default().0).collect();
        assert!(seats.iter().all(|&seat| seat < SHARDS));
        assert!(seats.windows(2).any(|pair| pair[0] != pair[1]));
    }
}
