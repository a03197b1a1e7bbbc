//! Sets of guest pages, one bit a page: what is dirty, to be sent, or missing.

use std::fmt;

use pagetide_memory::{PageIndex, PageRange};
use thiserror::Error;

use crate::ids::MapDigest;

const WORD_BITS: u64 = 64;

/// A set of the pages of a VM whose number of pages never changes. To look for a page, to count them and to ask whether
/// there is one takes no longer for a VM with more memory, but for one step for each 64-fold.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct PageSet {
    pages: u64,
    count: u64,
    /// First the pages, one bit each. In each level above, bit `n` says whether word `n` of the level below has a bit. The
    /// last level is one word.
    levels: Vec<Vec<u64>>,
}

/// A part of a map that does not fit the VM's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("a map of {count} pages from page {first} on, of {pages} pages in {bytes} bytes")]
pub struct MapPartError {
    /// The part's first page.
    pub first: u64,
    /// Its pages.
    pub count: u64,
    /// The pages of the VM.
    pub pages: u64,
    /// The bytes of the part.
    pub bytes: usize,
}

/// An index into the words. The number of words fits in memory, so it fits a `usize`.
fn index(word: u64) -> usize {
    usize::try_from(word).unwrap_or(usize::MAX)
}

impl PageSet {
    /// The empty set of a VM's pages.
    pub fn empty(pages: u64) -> Self {
        let mut words = pages.div_ceil(WORD_BITS);
        let mut levels = vec![vec![0; index(words)]];
        while words > 1 {
            words = words.div_ceil(WORD_BITS);
            levels.push(vec![0; index(words)]);
        }
        Self {
            pages,
            count: 0,
            levels,
        }
    }

    /// The set of all pages.
    pub fn full(pages: u64) -> Self {
        let mut set = Self::empty(pages);
        set.insert(PageRange::new(PageIndex(0), pages));
        set
    }

    /// The number of pages that the VM has.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    fn whole(&self) -> PageRange {
        PageRange::new(PageIndex(0), self.pages)
    }

    /// The pages, one bit each.
    fn words(&self) -> &[u64] {
        self.levels.first().map_or(&[], Vec::as_slice)
    }

    /// Changes one word of pages, and what the levels above say of it.
    fn change(&mut self, at: u64, change: impl FnOnce(u64) -> u64) {
        let words = self.levels.first_mut();
        let Some(word) = words.and_then(|words| words.get_mut(index(at))) else {
            return;
        };
        let before = std::mem::replace(word, change(*word));
        let after = *word;
        self.count = self.count + u64::from(after.count_ones()) - u64::from(before.count_ones());
        if (before == 0) != (after == 0) {
            self.mark(at, after != 0);
        }
    }

    /// Says in the levels above whether a word of pages has a bit.
    fn mark(&mut self, at: u64, has_bit: bool) {
        let mut at = at;
        for level in self.levels.iter_mut().skip(1) {
            let Some(word) = level.get_mut(index(at / WORD_BITS)) else {
                return;
            };
            let (before, bit) = (*word, 1 << (at % WORD_BITS));
            *word = if has_bit { before | bit } else { before & !bit };
            if (before == 0) == (*word == 0) {
                return;
            }
            at /= WORD_BITS;
        }
    }

    /// Calls `change` for each word that has some of `run`, with the bits of those pages.
    fn update(&mut self, run: PageRange, change: impl Fn(u64, u64) -> u64) {
        let run = run.intersection(self.whole());
        let (mut at, end) = (run.first().0, run.end().0);
        while at < end {
            let bit = at % WORD_BITS;
            let count = (WORD_BITS - bit).min(end - at);
            let ones = u64::MAX >> (WORD_BITS - count);
            self.change(at / WORD_BITS, |word| change(word, ones << bit));
            at += count;
        }
    }

    /// Adds a run. Pages that the VM does not have are ignored.
    pub fn insert(&mut self, run: PageRange) {
        self.update(run, |word, bits| word | bits);
    }

    /// Takes a run out.
    pub fn remove(&mut self, run: PageRange) {
        self.update(run, |word, bits| word & !bits);
    }

    /// Adds another set of the same VM. It looks at each word.
    pub fn insert_all(&mut self, other: &Self) {
        for (at, more) in (0..).zip(other.words()) {
            if *more != 0 {
                self.change(at, |word| word | more);
            }
        }
    }

    /// Whether the set has the page.
    pub fn contains(&self, page: PageIndex) -> bool {
        let word = self.words().get(index(page.0 / WORD_BITS));
        word.is_some_and(|word| word >> (page.0 % WORD_BITS) & 1 == 1)
    }

    /// Whether the set has every page of the run. True for an empty run.
    pub fn contains_all(&self, run: PageRange) -> bool {
        run.iter().all(|page| self.contains(page))
    }

    /// Whether the set has no page.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The number of pages in the set.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The first page of the set from `from` on. `looks` counts the words that were looked at.
    fn next(&self, from: u64, looks: &mut usize) -> Option<u64> {
        let (mut at, mut level) = (from, 0);
        // Up, until a word has a bit that is not before the place.
        loop {
            let word = self.levels.get(level)?.get(index(at / WORD_BITS))?;
            *looks += 1;
            let rest = word & u64::MAX << (at % WORD_BITS);
            if rest != 0 {
                at = at - at % WORD_BITS + u64::from(rest.trailing_zeros());
                break;
            }
            at = at / WORD_BITS + 1;
            level += 1;
        }
        // Down again, to the first bit below it.
        while level > 0 {
            level -= 1;
            let word = self.levels.get(level)?.get(index(at))?;
            *looks += 1;
            at = at * WORD_BITS + u64::from(word.trailing_zeros());
        }
        Some(at)
    }

    /// The first run of at most `limit` pages of the set, from `from` on.
    pub fn next_run(&self, from: PageIndex, limit: u64) -> Option<PageRange> {
        let first = self.next(from.0, &mut 0)?;
        let mut count = 1;
        while count < limit && self.contains(PageIndex(first + count)) {
            count += 1;
        }
        Some(PageRange::new(PageIndex(first), count))
    }

    /// Every page of the set, in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = PageIndex> {
        let mut at = 0;
        std::iter::from_fn(move || {
            let page = self.next(at, &mut 0)?;
            at = page + 1;
            Some(PageIndex(page))
        })
    }

    /// The bits of up to `count` pages from `first` on, which is a multiple of 8: page `first` is bit 0 of byte 0. Bits
    /// behind the last page are 0.
    pub fn part(&self, first: u64, count: u64) -> Vec<u8> {
        let end = self.pages.min(first.saturating_add(count));
        let bytes = (first..end).step_by(8).map(|at| {
            let word = self.words().get(index(at / WORD_BITS)).copied();
            let word = word.unwrap_or(0);
            let [byte, ..] = (word >> (at % WORD_BITS)).to_le_bytes();
            byte
        });
        bytes.collect()
    }

    /// Replaces the bits of a part by those that [`Self::part`] made.
    ///
    /// # Errors
    /// [`MapPartError`]: the part is no part of this VM, has another length, or has bits behind its last page. The set
    /// is as before.
    pub fn set_part(&mut self, first: u64, count: u64, bytes: &[u8]) -> Result<(), MapPartError> {
        let error = MapPartError {
            first,
            count,
            pages: self.pages,
            bytes: bytes.len(),
        };
        let end = first
            .checked_add(count)
            .filter(|end| *end <= self.pages)
            .ok_or(error)?;
        let is_length_right = u64::try_from(bytes.len()) == Ok(count.div_ceil(8));
        // Only the last part of a map ends within a byte.
        let is_aligned = first.is_multiple_of(8) && (count.is_multiple_of(8) || end == self.pages);
        let spare = u32::try_from(count.div_ceil(8) * 8 - count).unwrap_or(0);
        let is_spare_empty = bytes
            .last()
            .is_none_or(|last| last.leading_zeros() >= spare);
        if count == 0 || !is_length_right || !is_aligned || !is_spare_empty {
            return Err(error);
        }
        self.remove(PageRange::new(PageIndex(first), count));
        for (at, byte) in (first..).step_by(8).zip(bytes) {
            let bits = u64::from(*byte) << (at % WORD_BITS);
            self.change(at / WORD_BITS, |word| word | bits);
        }
        Ok(())
    }

    /// The digest that both sides compute of the missing map.
    pub fn digest(&self) -> MapDigest {
        let mut hasher = blake3::Hasher::new_derive_key("pagetide missing map 1");
        hasher.update(&self.pages.to_le_bytes());
        for word in self.words() {
            hasher.update(&word.to_le_bytes());
        }
        MapDigest(*hasher.finalize().as_bytes())
    }
}

impl fmt::Debug for PageSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut from = PageIndex(0);
        let runs = std::iter::from_fn(|| {
            let run = self.next_run(from, u64::MAX)?;
            from = run.end();
            Some(run.to_string())
        });
        write!(f, "{{{}}}", runs.collect::<Vec<_>>().join(" "))
    }
}

#[cfg(test)]
#[path = "pages_tests.rs"]
mod tests;
