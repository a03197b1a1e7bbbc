//! How much of a replayed working set a guest uses.
//!
//! Nobody sees a guest's touch of a page that is there. So a few pages of the working set, chosen at random,
//! are left out of its replay: the fraction of them on which the guest faults estimates the fraction of the
//! working set that it uses, and the rest is the waste. The price is one fault for each of them.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use pagetide_memory::{PageIndex, PageRange};
use pagetide_pager::{Fault, Observer};

use crate::recorder::RECORDED;

/// One of so many pages is left out.
const ONE_OF: u64 = 256;
/// A smaller working set is replayed wholly: its sample would say little.
const LEAST_PAGES: u64 = 2048;

/// The pages that are left out, and whether the guest has touched them.
#[derive(Debug)]
pub(crate) struct Sample {
    pages: HashMap<PageIndex, AtomicBool>,
    touched: AtomicU64,
}

impl Sample {
    /// Chooses pages of a working set, others for each `seed`. `None` if it is too small.
    pub(crate) fn choose(runs: &[PageRange], seed: u64) -> Option<Self> {
        let all: u64 = runs.iter().map(|run| run.count()).sum();
        if all < LEAST_PAGES {
            return None;
        }
        let is_chosen = |page: &PageIndex| mixed(page.0 ^ mixed(seed)).is_multiple_of(ONE_OF);
        let pages = runs.iter().flat_map(|run| run.iter()).filter(is_chosen);
        Some(Self {
            pages: pages.map(|page| (page, AtomicBool::new(false))).collect(),
            touched: AtomicU64::new(0),
        })
    }

    /// The number of its pages.
    pub(crate) fn pages(&self) -> u64 {
        self.pages.len() as u64
    }

    /// How many of them the guest has touched.
    pub(crate) fn touched(&self) -> u64 {
        self.touched.load(Ordering::Relaxed)
    }

    /// The parts of `run` that are not in the sample.
    pub(crate) fn rest_of(&self, run: PageRange, part: &mut impl FnMut(PageRange)) {
        let mut rest = run;
        for page in run.iter().filter(|page| self.pages.contains_key(page)) {
            let (before, from) = rest.split_at(page.0 - rest.first().0);
            (_, rest) = from.split_at(1);
            if !before.is_empty() {
                part(before);
            }
        }
        if !rest.is_empty() {
            part(rest);
        }
    }
}

impl Observer for Sample {
    fn touched(&self, fault: &Fault) {
        let page = PageIndex(fault.gpa.0 >> RECORDED.shift());
        if let Some(was_touched) = self.pages.get(&page)
            && !was_touched.swap(true, Ordering::Relaxed)
        {
            self.touched.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// The finaliser of SplitMix64: each bit of the input changes half of the output's.
fn mixed(mut value: u64) -> u64 {
    value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(first: u64, pages: u64) -> PageRange {
        PageRange::new(PageIndex(first), pages)
    }

    #[test]
    fn one_of_256_is_chosen_and_the_rest_is_replayed() {
        let runs = [range(0, 5000), range(10_000, 3000)];
        let sample = Sample::choose(&runs, 1).unwrap();
        assert!((15..55).contains(&sample.pages()), "{}", sample.pages());
        let mut replayed = Vec::new();
        for run in runs {
            sample.rest_of(run, &mut |part| replayed.extend(part.iter()));
        }
        let replayed: Vec<PageIndex> = replayed;
        assert_eq!(replayed.len() as u64 + sample.pages(), 8000);
        assert!(replayed.is_sorted());
        assert!(!replayed.iter().any(|page| sample.pages.contains_key(page)));
    }

    #[test]
    fn each_vm_has_another_sample_and_a_small_set_has_none() {
        let pages = |seed| {
            let sample = Sample::choose(&[range(0, 4096)], seed).unwrap();
            let mut pages: Vec<PageIndex> = sample.pages.into_keys().collect();
            pages.sort_unstable();
            pages
        };
        assert_eq!(pages(7), pages(7));
        assert_ne!(pages(7), pages(8));
        assert!(Sample::choose(&[range(0, LEAST_PAGES - 1)], 1).is_none());
    }
}
