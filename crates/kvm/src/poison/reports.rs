//! A signal handler's report in one word, and storage for several.

use std::sync::atomic::{AtomicUsize, Ordering};

use pagetide_memory::{HostAddress, PageSize};

/// The kernel's report that memory at `at` has an uncorrected error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Report {
    /// The address, rounded down to 4 KiB.
    pub(crate) at: HostAddress,
    /// The size of the lost memory around it, as the kernel reports it.
    pub(crate) size: PageSize,
}

const OFFSET: usize = 0xfff;
const SHIFT: usize = 0x3f;

impl Report {
    /// Packs the report into a word that is neither 0 nor [`super::sigbus::INSIDE`].
    pub(super) fn pack(at: HostAddress, lsb: u32) -> usize {
        // With a shift of at least 12 the word is neither.
        let shift = (lsb as usize).clamp(12, SHIFT);
        (at.0 & !OFFSET) | shift
    }

    pub(super) fn unpack(word: usize) -> Self {
        Self {
            at: HostAddress(word & !OFFSET),
            // At most 63.
            size: PageSize::holding(u32::try_from(word & SHIFT).unwrap_or(12)),
        }
    }
}

/// Reports that have not been read. Any thread's signal handler may add one, without locks.
#[derive(Debug)]
pub(super) struct Reports<const ROOM: usize> {
    /// 0: empty.
    words: [AtomicUsize; ROOM],
}

impl<const ROOM: usize> Reports<ROOM> {
    pub(super) const fn new() -> Self {
        Self {
            words: [const { AtomicUsize::new(0) }; ROOM],
        }
    }

    /// Adds a packed report; false if there is no room. Async-signal-safe.
    pub(super) fn put(&self, word: usize) -> bool {
        self.words.iter().any(|place| {
            let put = place.compare_exchange(0, word, Ordering::Release, Ordering::Relaxed);
            // Already present: a page with two mappings is reported twice, and a repeated report
            // carries no news.
            put.is_ok() || put == Err(word)
        })
    }

    /// Removes and returns all reports, in no particular order.
    pub(super) fn take(&self) -> impl Iterator<Item = Report> + '_ {
        self.words
            .iter()
            .map(|place| place.swap(0, Ordering::Acquire))
            .filter(|&word| word != 0)
            .map(Report::unpack)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_encodes_address_and_size() {
        for (lsb, size) in [
            (0, PageSize::Size4K),
            (12, PageSize::Size4K),
            (16, PageSize::Size2M),
            (21, PageSize::Size2M),
            (30, PageSize::Size1G),
            (u32::MAX, PageSize::Size1G),
        ] {
            let report = Report::unpack(Report::pack(HostAddress(0x7fff_1234_5678), lsb));
            let at = HostAddress(0x7fff_1234_5000);
            assert_eq!(report, Report { at, size });
        }
    }

    #[test]
    fn reports_are_stored_once_and_up_to_the_limit() {
        let reports = Reports::<2>::new();
        let word = |page: usize| Report::pack(HostAddress(page << 12), 12);
        assert!(reports.put(word(1)) && reports.put(word(1)) && reports.put(word(2)));
        assert!(!reports.put(word(3)));
        let taken: Vec<_> = reports.take().map(|report| report.at.0 >> 12).collect();
        assert_eq!(taken, [1, 2]);
        assert_eq!(reports.take().count(), 0);
        assert!(reports.put(word(3)));
    }
}
