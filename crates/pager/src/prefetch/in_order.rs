//! The pages of a plan, in the order in which a guest is expected to touch them.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Instant;

use pagetide_memory::{PageIndex, PageRange, Urgency};

use super::fetch::Fetched;
use super::place::next_missing;
use super::{Ahead, Shared};
use crate::error::{PrefetchError, WAIT_SLICE};
use crate::pace::Pace;

/// So many entries in a row that are there already mean that the guest is at the same place.
const OVERTAKEN: u32 = 4;
/// Entries that the first leap skips. Each further leap in a row skips twice as many as the one before.
const FIRST_LEAP: usize = 16;

impl Ahead<'_> {
    /// Fetches the plan's first pages in their order (true), unless it is stopped (false).
    pub(super) fn in_order(&mut self) -> Result<bool, PrefetchError> {
        let Shared { pager, first, .. } = self.shared;
        let mut pace = Pace::new(Instant::now());
        let mut places = Places::new(first.len());
        while let Some(place) = places.next() {
            let Some((region, pages)) = first.get(place) else {
                break;
            };
            let batch = region.pages_in(self.batch_bytes).max(1);
            let mut rest = *pages;
            let mut is_there = true;
            while let Some(page) = next_missing(region, rest) {
                if self.shared.stopping.load(Ordering::Acquire) || pager.is_stopped() {
                    return Ok(false);
                }
                if region.is_closed() {
                    self.left_out.push((region, rest));
                    break;
                }
                is_there = false;
                let done = self.counters.pages + self.requested_pages;
                if let Some(pause) = pace.pause(Instant::now(), pager.activity.served(), done) {
                    self.counters.yields += 1;
                    thread::sleep(pause);
                }
                let seen_changes = pager.changes.count();
                let left = rest.end().0 - page.0;
                let begun = Instant::now();
                let fetched = self.fetch(region, page, batch.min(left))?;
                pace.batch_took(begun.elapsed());
                self.report();
                match fetched {
                    Fetched::NoRoom | Fetched::Held => {
                        pager.changes.wait(seen_changes, WAIT_SLICE);
                        pager.tick();
                        pager.install_delivered(Urgency::Bulk);
                    }
                    // The pages after it that the batch covered are not Absent any more.
                    Fetched::All | Fetched::Part => {
                        rest = PageRange::new(PageIndex(page.0 + 1), left - 1);
                    }
                }
            }
            if region.missing().leaves_out(*pages) {
                self.left_out.push((region, *pages));
            }
            places.found(is_there);
        }
        Ok(true)
    }
}

/// The order in which the entries of a plan are visited: upwards, but where the guest has overtaken the
/// thread, the thread leaps ahead of the guest, and visits what it has skipped at the end. Without the leap
/// both would work on the same pages, and each would wait for the other.
#[derive(Debug)]
struct Places {
    /// The rest of the part that is being visited.
    part: Range<usize>,
    /// Whether the part is the whole plan, and not one that was skipped.
    may_leap: bool,
    skipped: VecDeque<Range<usize>>,
    there_in_a_row: u32,
    leap: usize,
}

impl Places {
    fn new(entries: usize) -> Self {
        Self {
            part: 0..entries,
            may_leap: true,
            skipped: VecDeque::new(),
            there_in_a_row: 0,
            leap: FIRST_LEAP,
        }
    }

    fn next(&mut self) -> Option<usize> {
        loop {
            if let Some(place) = self.part.next() {
                return Some(place);
            }
            self.may_leap = false;
            self.part = self.skipped.pop_front()?;
        }
    }

    /// Says whether the pages of the last place were all there before it was visited.
    fn found(&mut self, is_there: bool) {
        if !is_there {
            (self.there_in_a_row, self.leap) = (0, FIRST_LEAP);
            return;
        }
        self.there_in_a_row += 1;
        if !self.may_leap || self.there_in_a_row < OVERTAKEN {
            return;
        }
        let end = self.part.end.min(self.part.start.saturating_add(self.leap));
        self.skipped.push_back(self.part.start..end);
        self.part.start = end;
        self.there_in_a_row = 0;
        self.leap = self.leap.saturating_mul(2);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The order of visits when these places are there.
    fn visits(entries: usize, is_there: impl Fn(usize) -> bool) -> Vec<usize> {
        let mut places = Places::new(entries);
        let mut order = Vec::new();
        while let Some(place) = places.next() {
            order.push(place);
            places.found(is_there(place));
        }
        order
    }

    #[test]
    fn an_overtaken_thread_leaps_and_returns() {
        let upwards: Vec<usize> = (0..100).collect();
        assert_eq!(visits(100, |_| false), upwards);
        assert_eq!(visits(100, |place| place % 4 != 0), upwards);
        // The guest has touched the first ten.
        let wanted: Vec<usize> = (0..4).chain(20..100).chain(4..20).collect();
        assert_eq!(visits(100, |place| place < 10), wanted);
        // It is further ahead: the second leap is longer.
        let wanted: Vec<usize> = (0..4)
            .chain(20..24)
            .chain(56..100)
            .chain(4..20)
            .chain(24..56)
            .collect();
        assert_eq!(visits(100, |place| place < 50), wanted);
    }

    proptest! {
        #[test]
        fn each_place_is_visited_once(there in prop::collection::vec(any::<bool>(), 0..500), all in any::<bool>()) {
            let mut order = visits(there.len(), |place| all || there[place]);
            order.sort_unstable();
            prop_assert_eq!(order, (0..there.len()).collect::<Vec<_>>());
        }
    }
}
