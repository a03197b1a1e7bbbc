//! Sets of guest pages, one bit a page: what is dirty, to be sent, or missing.

use std::fmt;

use pagetide_memory::{PageIndex, PageRange};
use thiserror::Error;

use crate::ids::MapDigest;

const WORD_BITS: u64 = 64;

/// A set of the pages of a VM whose number of pages never changes.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct PageSet {
    pages: u64,
    words: Vec<u64>,
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
        let words = vec![0; index(pages.div_ceil(WORD_BITS))];
        Self { pages, words }
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

    /// Calls `change` for each word that has some of `run`, with the bits of those pages.
    fn update(&mut self, run: PageRange, change: impl Fn(&mut u64, u64)) {
        let run = run.intersection(self.whole());
        let (mut at, end) = (run.first().0, run.end().0);
        while at < end {
            let bit = at % WORD_BITS;
            let count = (WORD_BITS - bit).min(end - at);
            let ones = u64::MAX >> (WORD_BITS - count);
            if let Some(word) = self.words.get_mut(index(at / WORD_BITS)) {
                change(word, ones << bit);
            }
            at += count;
        }
    }

    /// Adds a run. Pages that the VM does not have are ignored.
    pub fn insert(&mut self, run: PageRange) {
        self.update(run, |word, bits| *word |= bits);
    }

    /// Takes a run out.
    pub fn remove(&mut self, run: PageRange) {
        self.update(run, |word, bits| *word &= !bits);
    }

    /// Adds another set of the same VM.
    pub fn insert_all(&mut self, other: &Self) {
        for (word, more) in self.words.iter_mut().zip(&other.words) {
            *word |= more;
        }
    }

    /// Whether the set has the page.
    pub fn contains(&self, page: PageIndex) -> bool {
        let word = self.words.get(index(page.0 / WORD_BITS));
        word.is_some_and(|word| word >> (page.0 % WORD_BITS) & 1 == 1)
    }

    /// Whether the set has every page of the run. True for an empty run.
    pub fn contains_all(&self, run: PageRange) -> bool {
        run.iter().all(|page| self.contains(page))
    }

    /// Whether the set has no page.
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|word| *word == 0)
    }

    /// The number of pages in the set.
    pub fn count(&self) -> u64 {
        self.words
            .iter()
            .map(|word| u64::from(word.count_ones()))
            .sum()
    }

    /// The first page of the set from `from` on.
    fn next(&self, from: u64) -> Option<u64> {
        let first = index(from / WORD_BITS);
        let head = self.words.get(first)? & u64::MAX << (from % WORD_BITS);
        let tail = self.words.get(first + 1..)?.iter().copied();
        let mut base = from - from % WORD_BITS;
        for word in std::iter::once(head).chain(tail) {
            if word != 0 {
                return Some(base + u64::from(word.trailing_zeros()));
            }
            base += WORD_BITS;
        }
        None
    }

    /// The first run of at most `limit` pages of the set, from `from` on.
    pub fn next_run(&self, from: PageIndex, limit: u64) -> Option<PageRange> {
        let first = self.next(from.0)?;
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
            let page = self.next(at)?;
            at = page + 1;
            Some(PageIndex(page))
        })
    }

    /// The bits of up to `count` pages from `first` on, which is a multiple of 8: page `first` is bit 0 of byte 0. Bits
    /// behind the last page are 0.
    pub fn part(&self, first: u64, count: u64) -> Vec<u8> {
        let end = self.pages.min(first.saturating_add(count));
        let bytes = (first..end).step_by(8).map(|at| {
            let word = self.words.get(index(at / WORD_BITS)).copied().unwrap_or(0);
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
            if let Some(word) = self.words.get_mut(index(at / WORD_BITS)) {
                *word |= u64::from(*byte) << (at % WORD_BITS);
            }
        }
        Ok(())
    }

    /// The digest that both sides compute of the missing map.
    pub fn digest(&self) -> MapDigest {
        let mut hasher = blake3::Hasher::new_derive_key("pagetide missing map 1");
        hasher.update(&self.pages.to_le_bytes());
        for word in &self.words {
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
