//! Page sizes, page numbers, and ranges of pages.

use std::fmt;

use crate::convert::to_usize;

/// The page sizes of x86_64 (and of arm64 with a 4 KiB granule).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PageSize {
    /// 4 KiB.
    Size4K,
    /// 2 MiB.
    Size2M,
    /// 1 GiB.
    Size1G,
}

impl PageSize {
    /// The size in bytes.
    pub const fn bytes(self) -> u64 {
        1 << self.shift()
    }

    /// Binary logarithm of the size in bytes.
    pub const fn shift(self) -> u32 {
        match self {
            Self::Size4K => 12,
            Self::Size2M => 21,
            Self::Size1G => 30,
        }
    }

    /// The smallest size of at least `1 << shift` bytes; 1 GiB for any larger shift.
    pub const fn holding(shift: u32) -> Self {
        match shift {
            0..=12 => Self::Size4K,
            13..=21 => Self::Size2M,
            _ => Self::Size1G,
        }
    }

    /// Whether `value` (an address or a length in bytes) is a multiple of this size.
    pub const fn divides(self, value: u64) -> bool {
        value & (self.bytes() - 1) == 0
    }
}

impl fmt::Display for PageSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Size4K => "4K",
            Self::Size2M => "2M",
            Self::Size1G => "1G",
        })
    }
}

/// A page's number within its region: 0 is the page at the region's first byte. The page size is the
/// install granularity of the region's backing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct PageIndex(pub u64);

impl PageIndex {
    /// The page number as an index into a slice.
    pub(crate) const fn as_usize(self) -> usize {
        to_usize(self.0)
    }
}

impl fmt::Display for PageIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// A run of consecutive pages of one region: `count` pages from `first` on. May be empty. Its end never
/// overflows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PageRange {
    first: PageIndex,
    count: u64,
}

impl PageRange {
    /// `count` pages from `first` on. A count whose end would overflow is cut short.
    pub const fn new(first: PageIndex, count: u64) -> Self {
        let room = u64::MAX - first.0;
        Self {
            first,
            count: if count < room { count } else { room },
        }
    }

    /// The single page `page`.
    pub const fn single(page: PageIndex) -> Self {
        Self::new(page, 1)
    }

    /// The first page.
    pub const fn first(self) -> PageIndex {
        self.first
    }

    /// The number of pages.
    pub const fn count(self) -> u64 {
        self.count
    }

    /// The page after the last one.
    pub const fn end(self) -> PageIndex {
        PageIndex(self.first.0 + self.count)
    }

    /// Whether the run is empty.
    pub const fn is_empty(self) -> bool {
        self.count == 0
    }

    /// Whether the run contains `page`.
    pub const fn contains(self, page: PageIndex) -> bool {
        page.0 >= self.first.0 && page.0 - self.first.0 < self.count
    }

    /// The pages that are in both runs.
    pub fn intersection(self, other: Self) -> Self {
        let first = self.first.max(other.first);
        let end = self.end().min(other.end());
        Self::new(first, end.0.saturating_sub(first.0))
    }

    /// The first `count` pages, and the rest.
    pub fn split_at(self, count: u64) -> (Self, Self) {
        let count = count.min(self.count);
        let rest = PageIndex(self.first.0 + count);
        (
            Self::new(self.first, count),
            Self::new(rest, self.count - count),
        )
    }

    /// Every page of the run, in ascending order.
    pub fn iter(self) -> impl ExactSizeIterator<Item = PageIndex> + DoubleEndedIterator {
        let first = self.first.0;
        (0..to_usize(self.count)).map(move |offset| PageIndex(first + offset as u64))
    }

    /// The aligned window of `pages` pages that contains `page`. A `pages` that is not a power of two
    /// is rounded up to one.
    pub fn window(page: PageIndex, pages: u64) -> Self {
        let pages = pages.checked_next_power_of_two().unwrap_or(1 << 63);
        Self::new(PageIndex(page.0 & !(pages - 1)), pages)
    }
}

impl fmt::Display for PageRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}+{}", self.first, self.count)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn sizes_and_shifts_agree() {
        for (size, bytes) in [
            (PageSize::Size4K, 4096),
            (PageSize::Size2M, 2 << 20),
            (PageSize::Size1G, 1 << 30),
        ] {
            assert_eq!(size.bytes(), bytes);
            assert!(size.divides(3 * bytes));
            assert!(!size.divides(3 * bytes + 1));
        }
    }

    #[test]
    fn a_count_whose_end_overflows_is_cut_short() {
        let range = PageRange::new(PageIndex(u64::MAX - 2), 100);
        assert_eq!(range.count(), 2);
        assert_eq!(range.end(), PageIndex(u64::MAX));
    }

    proptest! {
        #[test]
        fn a_window_is_aligned_and_contains_its_page(page in 0u64..1 << 40, shift in 0u32..12) {
            let window = PageRange::window(PageIndex(page), 1 << shift);
            prop_assert!(window.contains(PageIndex(page)));
            prop_assert_eq!(window.count(), 1 << shift);
            prop_assert_eq!(window.first().0 % (1 << shift), 0);
        }

        #[test]
        fn splitting_loses_no_page(first in 0u64..1000, count in 0u64..1000, at in 0u64..2000) {
            let range = PageRange::new(PageIndex(first), count);
            let (head, tail) = range.split_at(at);
            prop_assert_eq!(head.first(), range.first());
            prop_assert_eq!(head.end(), tail.first());
            prop_assert_eq!(tail.end(), range.end());
        }

        #[test]
        fn an_intersection_contains_the_common_pages(
            a in 0u64..64, a_count in 0u64..64, b in 0u64..64, b_count in 0u64..64, page in 0u64..128,
        ) {
            let (left, right) =
                (PageRange::new(PageIndex(a), a_count), PageRange::new(PageIndex(b), b_count));
            let page = PageIndex(page);
            prop_assert_eq!(
                left.intersection(right).contains(page),
                left.contains(page) && right.contains(page)
            );
        }
    }
}
