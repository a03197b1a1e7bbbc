//! The book of missing pages: who asks for which of them, and what was done about it.

use std::collections::BTreeMap;

use crate::page::{PageIndex, PageRange};
use crate::page_map::{ClaimGuard, PageMap, PageState, Pend};

/// How soon the content of a page is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Urgency {
    /// No thread has touched the page: prefetch.
    Bulk,
    /// A thread waits for it.
    Urgent,
}

/// Who asks for a missing page, the more urgent the greater.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Wish {
    /// Prefetch: no thread has touched them.
    Ahead,
    /// A thread that asks for a page beside them.
    Near,
    /// A thread that looks at the page map again when the page's state changes.
    Touched,
    /// A thread that sleeps in a userfaultfd, and has to be woken.
    Asleep,
    /// The same. It must not be woken while the page is missing, because other code has mapped something else there,
    /// which the thread would read.
    AsleepForGood,
}

impl Wish {
    /// Whether a thread waits for the page.
    pub const fn is_waiting(self) -> bool {
        matches!(self, Self::Touched | Self::Asleep | Self::AsleepForGood)
    }

    /// Whether a thread sleeps in a userfaultfd until it is woken.
    pub const fn is_asleep(self) -> bool {
        matches!(self, Self::Asleep | Self::AsleepForGood)
    }
}

/// A run of missing pages for which the same holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry<Job> {
    /// The pages.
    pub pages: PageRange,
    /// Who asks for them.
    pub wish: Wish,
    /// What brings their content. `None` if nothing does at present.
    pub job: Option<Job>,
}

/// The result of [`MissingPages::touch`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Touch<Job> {
    /// These pages have become Pending, without a job.
    New(PageRange),
    /// The page was in the book, and its wish is now at least the given one. This is its entry before.
    Known(Entry<Job>),
    /// The page is in this state, and not in the book.
    Lost(PageState),
    /// The map has no such page.
    Outside,
}

/// What [`MissingPages::put_back`] leaves to the caller.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[must_use = "a thread may sleep on the pages"]
pub struct PutBack {
    /// A thread sleeps on these Absent pages. The caller wakes it, and it faults again.
    pub wake: Vec<PageIndex>,
    /// These pages are in the book, and the first thread waits for each of them since it was claimed.
    pub raised: Vec<PageIndex>,
}

/// The missing pages of a region that somebody has asked for, beside the region's [`PageMap`].
///
/// A page is Pending in the map if, and only if, it is in the book. Both change together, under the lock in which the
/// owner keeps the book. There are two exceptions, in which one thread has the entry. A claim takes the entries
/// of its pages out ([`Self::take`]). At its end it drops them, because the pages are settled, or puts them
/// back ([`Self::put_back`]). And a thread that removes or poisons a page in the map takes the entry out next.
///
/// So an entry is always in one place, and nothing has to be reconciled.
#[derive(Debug)]
pub struct MissingPages<Job> {
    /// By the number of their first page. They do not overlap.
    entries: BTreeMap<u64, Entry<Job>>,
}

impl<Job> Default for MissingPages<Job> {
    fn default() -> Self {
        Self {
            entries: BTreeMap::new(),
        }
    }
}

impl<Job: Copy + PartialEq> MissingPages<Job> {
    /// Enters that a thread asks for `page`, with the Absent pages of `window` that form a run with it.
    pub fn touch(
        &mut self,
        map: &PageMap,
        page: PageIndex,
        window: PageRange,
        wish: Wish,
    ) -> Touch<Job> {
        match map.pend_run(page, window) {
            Pend::Made(run) => {
                self.enter(run, Wish::Near);
                self.raise(page, wish);
                Touch::New(run)
            }
            Pend::Lost(PageState::Pending) => match self.raise(page, wish) {
                Some(entry) => Touch::Known(entry),
                // A claim has taken the entry since.
                None => Touch::Lost(map.state(page).unwrap_or(PageState::Removed)),
            },
            Pend::Lost(state) => Touch::Lost(state),
            Pend::Outside => Touch::Outside,
        }
    }

    /// Enters that prefetch asks for `page`, with the Absent pages of `window` that form a run with it. `None` if the
    /// page is not Absent.
    pub fn plan(&mut self, map: &PageMap, page: PageIndex, window: PageRange) -> Option<PageRange> {
        let Pend::Made(run) = map.pend_run(page, window) else {
            return None;
        };
        self.enter(run, Wish::Ahead);
        Some(run)
    }

    fn enter(&mut self, pages: PageRange, wish: Wish) {
        let entry = Entry {
            pages,
            wish,
            job: None,
        };
        self.entries.insert(pages.first().0, entry);
    }

    /// Makes the wish for a page at least `wish`. Returns the page's entry before.
    fn raise(&mut self, page: PageIndex, wish: Wish) -> Option<Entry<Job>> {
        self.entry(page)?;
        self.split(page.0);
        self.split(page.0 + 1);
        let entry = self.entries.get_mut(&page.0)?;
        let before = *entry;
        entry.wish = entry.wish.max(wish);
        Some(before)
    }

    /// Makes `at` a border between entries.
    fn split(&mut self, at: u64) {
        let Some((_, entry)) = self.entries.range_mut(..at).next_back() else {
            return;
        };
        if entry.pages.end().0 > at {
            let (head, tail) = entry.pages.split_at(at - entry.pages.first().0);
            let behind = Entry {
                pages: tail,
                ..*entry
            };
            entry.pages = head;
            self.entries.insert(at, behind);
        }
    }

    /// The entry of a page.
    pub fn entry(&self, page: PageIndex) -> Option<&Entry<Job>> {
        let (_, entry) = self.entries.range(..=page.0).next_back()?;
        entry.pages.contains(page).then_some(entry)
    }

    /// The entries that have some of `pages`.
    pub fn within(&self, pages: PageRange) -> impl Iterator<Item = &Entry<Job>> {
        let first = self.entry(pages.first());
        let first = first.map_or(pages.first().0, |entry| entry.pages.first().0);
        let found = self.entries.range(first..pages.end().0.max(first));
        found.map(|(_, entry)| entry)
    }

    /// All entries, in the order of their pages.
    pub fn iter(&self) -> impl Iterator<Item = &Entry<Job>> {
        self.entries.values()
    }

    /// Replaces a job of pages by another. Entries with another job keep it.
    pub fn set_job(&mut self, pages: PageRange, from: Option<Job>, to: Option<Job>) {
        self.split(pages.first().0);
        self.split(pages.end().0);
        let range = pages.first().0..pages.end().0;
        for (_, entry) in self.entries.range_mut(range) {
            if entry.job == from {
                entry.job = to;
            }
        }
    }

    /// Takes the entries of pages out: of a claim's, or of settled pages.
    #[must_use = "a thread may sleep on the pages"]
    pub fn take(&mut self, pages: PageRange) -> Vec<Entry<Job>> {
        self.split(pages.first().0);
        self.split(pages.end().0);
        let mut taken = Vec::new();
        while let Some((&first, _)) = self.entries.range(pages.first().0..pages.end().0).next() {
            taken.extend(self.entries.remove(&first));
        }
        taken
    }

    /// Takes the entries of pages out and makes the pages Absent, because nobody delivers them any more.
    #[must_use = "a thread may sleep on the pages"]
    pub fn withdraw(&mut self, map: &PageMap, pages: PageRange) -> Vec<Entry<Job>> {
        let taken = self.take(pages);
        for entry in &taken {
            map.unpend(entry.pages);
        }
        taken
    }

    /// Ends a claim without a result: its pages are Absent or Pending as before, and their entries, which the caller
    /// had taken out, are in the book again. A thread that has left its wake-up to the claim meanwhile sleeps on if the
    /// page is Pending.
    pub fn put_back(
        &mut self,
        guard: ClaimGuard<'_>,
        entries: impl IntoIterator<Item = Entry<Job>>,
    ) -> PutBack {
        self.enter_again(entries);
        let mut left = PutBack::default();
        guard.give_back(false, |page, state| {
            if state != PageState::Pending {
                left.wake.push(page);
            } else if let Some(before) = self.raise(page, Wish::Asleep)
                && !before.wish.is_waiting()
            {
                left.raised.push(page);
            }
        });
        left
    }

    /// The same for a caller that can wake nobody, because it unwinds: each page on which a thread sleeps is Pending.
    /// Returns those for which nobody had waited before.
    pub fn keep(
        &mut self,
        guard: ClaimGuard<'_>,
        entries: impl IntoIterator<Item = Entry<Job>>,
    ) -> Vec<PageIndex> {
        self.enter_again(entries);
        let mut raised = Vec::new();
        guard.give_back(true, |page, _| match self.raise(page, Wish::Asleep) {
            Some(before) if before.wish.is_waiting() => {}
            Some(_) => raised.push(page),
            None => {
                self.enter(PageRange::single(page), Wish::Asleep);
                raised.push(page);
            }
        });
        raised
    }

    fn enter_again(&mut self, entries: impl IntoIterator<Item = Entry<Job>>) {
        for entry in entries {
            self.entries.insert(entry.pages.first().0, entry);
        }
    }
}

/// Splits entries that were taken out into those of the pages before `at`, and the rest.
pub fn split_entries<Job: Copy>(
    entries: Vec<Entry<Job>>,
    at: PageIndex,
) -> (Vec<Entry<Job>>, Vec<Entry<Job>>) {
    let (mut head, mut tail) = (Vec::new(), Vec::new());
    for entry in entries {
        let before = at.0.saturating_sub(entry.pages.first().0);
        let (first, rest) = entry.pages.split_at(before);
        for (pages, part) in [(first, &mut head), (rest, &mut tail)] {
            if !pages.is_empty() {
                part.push(Entry { pages, ..entry });
            }
        }
    }
    (head, tail)
}

#[cfg(test)]
#[cfg(loom)]
mod loom_tests;
#[cfg(test)]
#[cfg(not(loom))]
mod tests;
