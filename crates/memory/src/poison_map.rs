//! The poison map: which guest memory was lost to uncorrected errors, kept over restarts and sent
//! along with a VM that moves.

mod encoding;
mod file;

use std::collections::BTreeMap;

use thiserror::Error;

use crate::address::GuestAddress;
use crate::page::PageSize;
use crate::range::GuestRange;

pub use encoding::ParsePoisonError;
pub use file::{LoadError, SaveError};

/// Guest memory that is lost for good: ranges of gpas, in whole 4 KiB, that neither overlap nor
/// touch.
///
/// A guest that is started again, or moved, must not find zeroes there: what the map names is
/// poisoned again before the guest runs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoisonMap {
    /// First byte and end of each range.
    ranges: BTreeMap<u64, u64>,
}

/// A poison map has no room for another range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error(
    "the poison map has {} ranges already, no room for {range}",
    PoisonMap::MAX_RANGES
)]
pub struct PoisonMapFull {
    /// The range that was to be added.
    pub range: GuestRange,
}

impl PoisonMap {
    /// How many ranges a map may have. A host with so many errors has other worries.
    pub const MAX_RANGES: usize = 1 << 16;

    /// A map of nothing.
    pub const fn new() -> Self {
        Self {
            ranges: BTreeMap::new(),
        }
    }

    /// Adds `range`. Returns how many of its bytes are new: 0 if all of it was known.
    pub fn insert(&mut self, range: GuestRange) -> Result<u64, PoisonMapFull> {
        let (mut start, mut end) = (range.start().0, range.end().0);
        let known = self.bytes_in(range);
        if known == range.bytes() {
            return Ok(0);
        }
        // Ranges that overlap it or touch it become part of it.
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

    /// The lost parts of `range`, upwards.
    pub fn lost_in(&self, range: GuestRange) -> impl Iterator<Item = GuestRange> + '_ {
        let (start, end) = (range.start().0, range.end().0);
        // The range that begins before it may reach into it.
        let before = self.ranges.range(..start).next_back();
        before
            .into_iter()
            .chain(self.ranges.range(start..end))
            .filter_map(move |(&its_start, &its_end)| {
                let (from, to) = (its_start.max(start), its_end.min(end));
                GuestRange::new(GuestAddress(from), to.checked_sub(from)?).ok()
            })
    }

    /// How many bytes of `range` are lost.
    pub fn bytes_in(&self, range: GuestRange) -> u64 {
        self.lost_in(range).map(GuestRange::bytes).sum()
    }

    /// How many bytes are lost.
    pub fn bytes(&self) -> u64 {
        self.iter().map(GuestRange::bytes).sum()
    }

    /// All ranges, upwards.
    pub fn iter(&self) -> impl Iterator<Item = GuestRange> + '_ {
        // What is in the map came from ranges, so that each of them is one.
        self.ranges
            .iter()
            .filter_map(|(&start, &end)| GuestRange::new(GuestAddress(start), end - start).ok())
    }

    /// How many ranges there are.
    pub fn len(&self) -> usize {
        self.ranges.len()
    }

    /// Whether nothing is lost.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// The pages of `page_size` that lost bytes of `range` are in, upwards and each once.
    pub fn pages_in(
        &self,
        range: GuestRange,
        page_size: PageSize,
    ) -> impl Iterator<Item = GuestAddress> + '_ {
        let mut next = 0;
        self.lost_in(range).flat_map(move |lost| {
            let first = (lost.start().0 >> page_size.shift()).max(next);
            let last = (lost.end().0 - 1) >> page_size.shift();
            next = last + 1;
            (first..=last).map(move |page| GuestAddress(page << page_size.shift()))
        })
    }
}

#[cfg(test)]
mod tests;
