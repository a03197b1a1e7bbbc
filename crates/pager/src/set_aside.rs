//! The pages of a region that bulk work leaves out, because their source has failed to deliver them, or the
//! memory to take them.
//!
//! They are Absent: a thread that touches one requests it as any other page.

use std::collections::BTreeMap;

use pagetide_memory::{PageIndex, PageRange};

/// Pages that were set aside.
#[derive(Clone, Debug, Default)]
pub(crate) struct SetAside {
    /// The page behind each run, by its first page. No two runs touch.
    runs: BTreeMap<u64, u64>,
    /// Those that are not to blame: nothing could be fetched, or nothing installed.
    doubtful: Vec<PageRange>,
    /// How often pages were taken out again.
    reconsidered: u64,
}

impl SetAside {
    /// Sets pages aside.
    pub(crate) fn insert(&mut self, pages: PageRange) {
        if pages.is_empty() {
            return;
        }
        let (mut first, mut end) = (pages.first().0, pages.end().0);
        // Runs that overlap or touch become one.
        while let Some((&at, &behind)) = self.runs.range(..=end).next_back()
            && behind >= first
        {
            (first, end) = (first.min(at), end.max(behind));
            self.runs.remove(&at);
        }
        self.runs.insert(first, end);
    }

    /// Takes these pages out again at [`Self::reconsider`].
    pub(crate) fn doubt(&mut self, pages: PageRange) {
        self.doubtful.push(pages);
    }

    /// Takes the doubtful pages out: they are tried again.
    pub(crate) fn reconsider(&mut self) {
        for pages in std::mem::take(&mut self.doubtful) {
            self.remove(pages);
            self.reconsidered += 1;
        }
    }

    fn remove(&mut self, pages: PageRange) {
        let (from, to) = (pages.first().0, pages.end().0);
        while let Some((&first, &end)) = self.runs.range(..to).next_back()
            && end > from
        {
            self.runs.remove(&first);
            if first < from {
                self.runs.insert(first, from);
            }
            if to < end {
                self.runs.insert(to, end);
            }
            if first <= from {
                break;
            }
        }
    }

    /// Takes all pages out.
    pub(crate) fn clear(&mut self) {
        if !self.runs.is_empty() {
            self.reconsidered += 1;
        }
        self.runs.clear();
        self.doubtful.clear();
    }

    /// A number that changes when pages are taken out.
    pub(crate) fn reconsidered(&self) -> u64 {
        self.reconsidered
    }

    /// The run that `page` is in.
    pub(crate) fn run_of(&self, page: PageIndex) -> Option<PageRange> {
        let (&first, &end) = self.runs.range(..=page.0).next_back()?;
        (page.0 < end).then(|| PageRange::new(PageIndex(first), end - first))
    }

    /// The part of `pages` before the first page that was set aside.
    pub(crate) fn before(&self, pages: PageRange) -> PageRange {
        if self.run_of(pages.first()).is_some() {
            return PageRange::new(pages.first(), 0);
        }
        match self.runs.range(pages.first().0..pages.end().0).next() {
            Some((&first, _)) => PageRange::new(pages.first(), first - pages.first().0),
            None => pages,
        }
    }

    /// All runs.
    pub(crate) fn runs(&self) -> impl Iterator<Item = PageRange> {
        let run = |(&first, &end): (&u64, &u64)| PageRange::new(PageIndex(first), end - first);
        self.runs.iter().map(run)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// As a plain set of pages.
        #[test]
        fn runs_are_those_of_a_set(steps in prop::collection::vec((0u64..24, 1u64..6, 0u8..16), 0..60)) {
            let mut runs = SetAside::default();
            let (mut all, mut doubtful) = (BTreeSet::new(), BTreeSet::new());
            for (first, count, what) in steps {
                let pages = PageRange::new(PageIndex(first), count);
                let numbers = first..first + count;
                match what {
                    0 => {
                        runs.reconsider();
                        all.retain(|page| !doubtful.contains(page));
                        doubtful.clear();
                    }
                    1 => {
                        runs.clear();
                        all.clear();
                        doubtful.clear();
                    }
                    _ => {
                        runs.insert(pages);
                        all.extend(numbers.clone());
                        if what < 6 {
                            runs.doubt(pages);
                            doubtful.extend(numbers);
                        }
                    }
                }
                let seen: Vec<_> = runs.runs().collect();
                let pages: Vec<_> = seen.iter().flat_map(|run| run.iter()).map(|page| page.0).collect();
                prop_assert_eq!(&pages, &all.iter().copied().collect::<Vec<_>>());
                prop_assert!(seen.windows(2).all(|two| two[0].end().0 < two[1].first().0));
                for page in 0..30 {
                    let run = runs.run_of(PageIndex(page));
                    prop_assert_eq!(run.is_some(), all.contains(&page));
                    prop_assert!(run.is_none_or(|run| run.contains(PageIndex(page)) && seen.contains(&run)));
                    let free = (page..30).take_while(|page| !all.contains(page)).count() as u64;
                    let rest = PageRange::new(PageIndex(page), 30 - page);
                    prop_assert_eq!(runs.before(rest), PageRange::new(PageIndex(page), free));
                }
            }
        }
    }
}
