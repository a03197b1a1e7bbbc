//! Detects that a thread makes no progress.

use std::time::{Duration, Instant};

use pagetide_memory::PageIndex;

use crate::fault::RegionId;

/// The number of different pages whose faults may alternate without counting as progress. An
/// instruction accesses a handful of pages at most: its own two, those of its operands, and page
/// tables.
const REMEMBERED: usize = 8;

/// A repetition after a longer time is a new fault: during a VM's life, pages in use repeatedly lose
/// their mappings or become read-only (reclaim, NUMA balancing). A thread without progress repeats its
/// fault immediately.
const IN_A_ROW: Duration = Duration::from_secs(1);

/// Represents no page: no region has that many.
const NONE: u64 = u64::MAX;

/// A page that had a fault although it is present.
#[derive(Clone, Copy, Debug)]
struct Seen {
    /// Region and page, packed.
    fault: u64,
    /// The number of consecutive repetitions, and the time of the last one.
    repeats: u32,
    last: Option<Instant>,
}

/// Counts how often the faults of one thread recur although their pages are present. Belongs to that
/// thread; nothing is shared.
#[derive(Debug)]
pub(crate) struct Tracker {
    recent: [Seen; REMEMBERED],
    next: usize,
}

impl Default for Tracker {
    fn default() -> Self {
        let nothing = Seen {
            fault: NONE,
            repeats: 0,
            last: None,
        };
        Self {
            recent: [nothing; REMEMBERED],
            next: 0,
        }
    }
}

impl Tracker {
    /// Records progress: a page was installed, or mapped again.
    #[inline]
    pub(crate) fn progress(&mut self) {
        if self.next != 0 {
            *self = Self::default();
        }
    }

    /// Counts a fault on a present page. Returns the number of its consecutive repetitions: 0 if it is
    /// not among the last few.
    pub(crate) fn came_again(&mut self, region: RegionId, page: PageIndex) -> u32 {
        self.came_again_at(region, page, Instant::now)
    }

    fn came_again_at(
        &mut self,
        region: RegionId,
        page: PageIndex,
        now: impl FnOnce() -> Instant,
    ) -> u32 {
        // 48 bits of page are 2^60 bytes of the smallest pages, more than a guest can address.
        let fault = ((region.0 as u64) << 48) ^ page.0;
        if let Some(seen) = self.recent.iter_mut().find(|seen| seen.fault == fault) {
            let now = now();
            if seen.last.is_some_and(|last| now - last > IN_A_ROW) {
                seen.repeats = 0;
            }
            seen.repeats = seen.repeats.saturating_add(1);
            seen.last = Some(now);
            return seen.repeats;
        }
        self.recent[self.next % REMEMBERED] = Seen {
            fault,
            repeats: 0,
            last: None,
        };
        self.next = self.next.saturating_add(1);
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REGION: RegionId = RegionId(0);

    #[test]
    fn alternating_pages_are_counted() {
        let mut tracker = Tracker::default();
        assert_eq!(tracker.came_again(REGION, PageIndex(1)), 0);
        assert_eq!(tracker.came_again(REGION, PageIndex(2)), 0);
        for times in 1..5 {
            assert_eq!(tracker.came_again(REGION, PageIndex(1)), times);
            assert_eq!(tracker.came_again(REGION, PageIndex(2)), times);
        }
        assert_eq!(tracker.came_again(RegionId(1), PageIndex(2)), 0);
    }

    #[test]
    fn faults_on_new_pages_count_as_progress() {
        let mut tracker = Tracker::default();
        for round in 0..3 {
            for page in 0..100 {
                assert_eq!(
                    tracker.came_again(REGION, PageIndex(page)),
                    0,
                    "{round} {page}"
                );
            }
        }
    }

    #[test]
    fn single_repetitions_of_many_pages_do_not_add_up() {
        let mut tracker = Tracker::default();
        for page in 0..100 {
            assert_eq!(tracker.came_again(REGION, PageIndex(page)), 0);
            assert_eq!(tracker.came_again(REGION, PageIndex(page)), 1);
        }
    }

    #[test]
    fn only_immediate_repetitions_are_counted() {
        let mut tracker = Tracker::default();
        let start = Instant::now();
        let mut at = |ms| {
            let now = start + Duration::from_millis(ms);
            tracker.came_again_at(REGION, PageIndex(1), || now)
        };
        assert_eq!((at(0), at(0), at(1000), at(2000)), (0, 1, 2, 3));
        for days in 1..2000 {
            assert_eq!(at(days * 86_400_000), 1);
        }
    }

    #[test]
    fn installing_a_page_resets_the_count() {
        let mut tracker = Tracker::default();
        tracker.came_again(REGION, PageIndex(1));
        assert_eq!(tracker.came_again(REGION, PageIndex(1)), 1);
        tracker.progress();
        assert_eq!(tracker.came_again(REGION, PageIndex(1)), 0);
        assert_eq!(tracker.came_again(REGION, PageIndex(1)), 1);
    }
}
