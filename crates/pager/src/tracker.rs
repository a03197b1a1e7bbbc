//! Noticing that a thread gets nowhere.

use pagetide_memory::PageIndex;

use crate::fault::RegionId;

/// How many different pages may take turns without looking like progress. An instruction touches a
/// handful of pages at most: its own two, its operands', and page tables.
const REMEMBERED: usize = 8;

/// Stands for no page: no region has that many.
const NONE: u64 = u64::MAX;

/// Counts how often the faults of one thread came back although their pages are present. Belongs to
/// that thread: nothing here is shared.
#[derive(Debug)]
pub(crate) struct Tracker {
    /// Region and page, packed.
    recent: [u64; REMEMBERED],
    next: usize,
    repeats: u32,
}

impl Default for Tracker {
    fn default() -> Self {
        Self {
            recent: [NONE; REMEMBERED],
            next: 0,
            repeats: 0,
        }
    }
}

impl Tracker {
    /// A page was brought in: that is progress.
    #[inline]
    pub(crate) fn progress(&mut self) {
        if self.next != 0 {
            *self = Self::default();
        }
    }

    /// A fault came on a page that is present. Returns how many such faults on the last few pages
    /// came again since there was progress: 0 if this page is a new one.
    pub(crate) fn came_again(&mut self, region: RegionId, page: PageIndex) -> u32 {
        // 48 bits of page are 2^60 bytes of the smallest pages, more than a guest can address.
        let fault = ((region.0 as u64) << 48) ^ page.0;
        if self.recent.contains(&fault) {
            self.repeats = self.repeats.saturating_add(1);
            return self.repeats;
        }
        self.recent[self.next % REMEMBERED] = fault;
        self.next = self.next.saturating_add(1);
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REGION: RegionId = RegionId(0);

    #[test]
    fn pages_that_take_turns_are_counted() {
        let mut tracker = Tracker::default();
        assert_eq!(tracker.came_again(REGION, PageIndex(1)), 0);
        assert_eq!(tracker.came_again(REGION, PageIndex(2)), 0);
        assert_eq!(tracker.came_again(REGION, PageIndex(1)), 1);
        assert_eq!(tracker.came_again(REGION, PageIndex(2)), 2);
        assert_eq!(tracker.came_again(RegionId(1), PageIndex(2)), 0);
    }

    #[test]
    fn ever_new_pages_are_progress_of_their_own() {
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
    fn bringing_a_page_in_starts_over() {
        let mut tracker = Tracker::default();
        tracker.came_again(REGION, PageIndex(1));
        assert_eq!(tracker.came_again(REGION, PageIndex(1)), 1);
        tracker.progress();
        assert_eq!(tracker.came_again(REGION, PageIndex(1)), 0);
        assert_eq!(tracker.came_again(REGION, PageIndex(1)), 1);
    }
}
