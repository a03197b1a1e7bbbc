//! Rounds of precopy, and the newest round of each page at the destination.

use std::fmt;

use pagetide_memory::PageRange;

/// A round of precopy: 1 is the first. [`Round::POSTCOPY`] marks pages that are sent after the seal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Round(pub u8);

impl Round {
    /// The first round, which sends all pages.
    pub const FIRST: Self = Self(1);
    /// The last round that precopy may have.
    pub const LAST: Self = Self(250);
    /// No round: the content at the seal, which is the newest and the last.
    pub const POSTCOPY: Self = Self(255);

    /// Whether it is a round of precopy.
    pub fn is_precopy(self) -> bool {
        (Self::FIRST..=Self::LAST).contains(&self)
    }

    /// The round after it; `None` after the last.
    pub fn next(self) -> Option<Self> {
        (self < Self::LAST).then(|| Self(self.0.saturating_add(1)))
    }
}

impl fmt::Display for Round {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// For each page, the newest round whose content was taken: one byte a page, 0 for none.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RoundBytes(Vec<u8>);

impl RoundBytes {
    /// No page was taken.
    pub fn new(pages: u64) -> Self {
        Self(vec![0; usize::try_from(pages).unwrap_or(usize::MAX)])
    }

    fn of(&self, run: PageRange) -> Option<&[u8]> {
        let first = usize::try_from(run.first().0).ok()?;
        self.0.get(first..usize::try_from(run.end().0).ok()?)
    }

    /// Whether `round` is newer than what was taken of every page of the run.
    pub fn is_newer(&self, run: PageRange, round: Round) -> bool {
        self.of(run)
            .is_some_and(|taken| taken.iter().all(|taken| *taken < round.0))
    }

    /// The longest part at the beginning of the run of which all pages, or none, have older content. `None` for an empty
    /// run, or one that is not within the VM.
    pub fn uniform(&self, run: PageRange, round: Round) -> Option<(u64, bool)> {
        let taken = self.of(run)?;
        let is_newer = *taken.first()? < round.0;
        let count = taken
            .iter()
            .take_while(|taken| (**taken < round.0) == is_newer)
            .count();
        Some((u64::try_from(count).unwrap_or(0), is_newer))
    }

    /// Enters that the content of `round` was taken.
    pub fn take(&mut self, run: PageRange, round: Round) {
        let range = usize::try_from(run.first().0).unwrap_or(usize::MAX)
            ..usize::try_from(run.end().0).unwrap_or(usize::MAX);
        self.0.get_mut(range).unwrap_or_default().fill(round.0);
    }
}

#[cfg(test)]
mod tests {
    use pagetide_memory::PageIndex;

    use super::*;

    fn run(first: u64, count: u64) -> PageRange {
        PageRange::new(PageIndex(first), count)
    }

    #[test]
    fn only_newer_rounds_are_taken() {
        let mut bytes = RoundBytes::new(4);
        assert!(bytes.is_newer(run(0, 4), Round(1)));
        bytes.take(run(1, 2), Round(2));
        assert!(!bytes.is_newer(run(0, 4), Round(2)));
        assert!(bytes.is_newer(run(0, 4), Round(3)));
        assert_eq!(bytes.uniform(run(0, 4), Round(2)), Some((1, true)));
        assert_eq!(bytes.uniform(run(1, 3), Round(2)), Some((2, false)));
        assert_eq!(bytes.uniform(run(3, 1), Round(2)), Some((1, true)));
        assert_eq!(bytes.uniform(run(3, 2), Round(2)), None);
        assert!(!bytes.is_newer(run(3, 2), Round(9)));
    }

    #[test]
    fn rounds_end() {
        assert_eq!(Round::FIRST.next(), Some(Round(2)));
        assert_eq!(Round::LAST.next(), None);
        assert!(!Round::POSTCOPY.is_precopy() && !Round(0).is_precopy());
    }
}
