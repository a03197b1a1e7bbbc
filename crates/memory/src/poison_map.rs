//! The poison map: the guest memory lost to uncorrected errors, preserved across restarts and sent
//! along with a VM that migrates.

mod encoding;
mod file;

use std::collections::BTreeMap;

use thiserror::Error;

use crate::address::GuestAddress;
use crate::page::{PageIndex, PageSize};
use crate::range::GuestRange;

pub use encoding::ParsePoisonError;
pub use file::{LoadError, SaveError};

/// Guest memory that is lost for good: ranges of gpas in whole 4 KiB, disjoint and not adjacent.
///
/// After a restore or a migration, the guest must not read zeroes there: a VMM reinstates the poison
/// before the guest runs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoisonMap {
    /// First byte and end of each range.
    ranges: BTreeMap<u64, u64>,
}

/// A poison map cannot hold another range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error(
    "the poison map has {} ranges, the maximum: {range} does not fit",
    PoisonMap::MAX_RANGES
)]
pub struct PoisonMapFull {
    /// The range that was to be added.
    pub range: GuestRange,
}

impl PoisonMap {
    /// The maximal number of ranges of a map, far beyond the errors of a usable host.
    pub const MAX_RANGES: usize = 1 << 16;

    /// An empty map.
    pub const fn new() -> Self {
        Self {
            ranges: BTreeMap::new(),
        }
    }

    /// Adds `range`. Returns the number of bytes that were not in the map before.
    pub fn insert(&mut self, range: GuestRange) -> Result<u64, PoisonMapFull> {
        let (mut start, mut end) = (range.start().0, range.end().0);
        let known = self.bytes_in(range);
        if known == range.bytes() {
            return Ok(0);
        }
        // Ranges that overlap it or are adjacent to it are merged with it.
        let joined: Vec<_> = self
            .ranges
            .range(..=end)
            .rev()
            .take_while(|&(_, &its_end)| its_end >= start)
            .map(|(&start, &end)| (start, end))
            .collect();
        if joined.is_empty() && self.ranges.len() >= Self::MAX_RANGES {
            return Err(PoisonMapFull { range });
        }
        for (its_start, its_end) in joined {
            self.ranges.remove(&its_start);
            start = start.min(its_start);
            end = end.max(its_end);
        }
        self.ranges.insert(start, end);
        Ok(range.bytes() - known)
    }

    /// Whether the byte at `gpa` is lost.
    pub fn contains(&self, gpa: GuestAddress) -> bool {
        self.ranges
            .range(..=gpa.0)
            .next_back()
            .is_some_and(|(_, &end)| gpa.0 < end)
    }

    /// The lost parts of `range`, in ascending order.
    pub fn lost_in(&self, range: GuestRange) -> impl Iterator<Item = GuestRange> + '_ {
        let (start, end) = (range.start().0, range.end().0);
        // A range that begins before `range` may extend into it.
        let before = self.ranges.range(..start).next_back();
        before
            .into_iter()
            .chain(self.ranges.range(start..end))
            .filter_map(move |(&its_start, &its_end)| {
                let (from, to) = (its_start.max(start), its_end.min(end));
                GuestRange::new(GuestAddress(from), to.checked_sub(from)?).ok()
            })
    }

    /// The number of lost bytes in `range`.
    pub fn bytes_in(&self, range: GuestRange) -> u64 {
        self.lost_in(range).map(GuestRange::bytes).sum()
    }

    /// The number of lost bytes.
    pub fn bytes(&self) -> u64 {
        self.iter().map(GuestRange::bytes).sum()
    }

    /// All ranges, in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = GuestRange> + '_ {
        // Each entry was made from valid ranges, so the conversion succeeds.
        self.ranges
            .iter()
            .filter_map(|(&start, &end)| GuestRange::new(GuestAddress(start), end - start).ok())
    }

    /// The number of ranges.
    pub fn len(&self) -> usize {
        self.ranges.len()
    }

    /// Whether the map is empty.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// The pages of `page_size` that contain lost bytes of `range`, counted from its first byte, which need not be at a multiple of
    /// the page size. In ascending order, each once.
    pub fn pages_in(
        &self,
        range: GuestRange,
        page_size: PageSize,
    ) -> impl Iterator<Item = PageIndex> + '_ {
        let mut next = 0;
        self.lost_in(range).flat_map(move |lost| {
            let page_of = |gpa: u64| (gpa - range.start().0) >> page_size.shift();
            let first = page_of(lost.start().0).max(next);
            let last = page_of(lost.end().0 - 1);
            next = last + 1;
            (first..=last).map(PageIndex)
        })
    }
}

#[cfg(test)]
mod tests;
