//! Memory that a running guest gives up, as with a balloon.

use std::sync::Arc;

use pagetide_memory::{GuestAddress, GuestRange, PageIndex, PageRange, PageSize, Region};

use crate::hooks::HookError;

/// What the host does with memory that the guest gives up.
pub(super) type OnDiscard = Box<dyn Fn(GuestRange) -> Result<(), HookError> + Send + Sync>;

/// The range of a line on `ttyS1`: `discard GPA BYTES`, both hexadecimal.
pub(super) fn parse(line: &str) -> Option<GuestRange> {
    let number = |word: &str| {
        let digits = word.strip_prefix("0x").unwrap_or(word);
        u64::from_str_radix(digits, 16).ok()
    };
    let mut words = line.strip_prefix("discard ")?.split_whitespace();
    let (gpa, bytes) = (number(words.next()?)?, number(words.next()?)?);
    match words.next() {
        None => GuestRange::new(GuestAddress(gpa), bytes).ok(),
        Some(_) => None,
    }
}

/// The whole pages of `range`, if it lies in `region`.
pub(super) fn whole_pages(region: &Region, range: GuestRange) -> Option<PageRange> {
    whole_pages_of(region.range(), region.page_size(), range)
}

fn whole_pages_of(region: GuestRange, size: PageSize, range: GuestRange) -> Option<PageRange> {
    let start = range.start().offset_from(region.start())?;
    let end = start.checked_add(range.bytes());
    let end = end.filter(|end| *end <= region.bytes())?;
    let (first, end) = (start.div_ceil(size.bytes()), end / size.bytes());
    (first < end).then(|| PageRange::new(PageIndex(first), end - first))
}

/// Returns the pages to the host. Ranges that are not memory are ignored.
pub(super) fn punch(regions: &[Arc<Region>]) -> OnDiscard {
    let regions = regions.to_vec();
    Box::new(move |range| {
        for region in &regions {
            if let Some(pages) = whole_pages(region, range) {
                region.punch(pages)?;
            }
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_pages_of_the_region_are_given_up() {
        const MIB: u64 = 1 << 20;
        let range = |start, bytes| GuestRange::new(GuestAddress(start), bytes).unwrap();
        let pages = |size, start, bytes| {
            let pages = whole_pages_of(range(4 * MIB, 8 * MIB), size, range(start, bytes))?;
            Some((pages.first().0, pages.count()))
        };
        let (small, large) = (PageSize::Size4K, PageSize::Size2M);
        assert_eq!(pages(small, 4 * MIB, 8 * MIB), Some((0, 2048)));
        assert_eq!(pages(small, 4 * MIB + 0x1000, 0x3000), Some((1, 3)));
        assert_eq!(pages(small, 4 * MIB - 0x1000, 0x2000), None);
        assert_eq!(pages(small, 4 * MIB, 8 * MIB + 0x1000), None);
        assert_eq!(pages(large, 4 * MIB, 3 * MIB), Some((0, 1)));
        assert_eq!(pages(large, 5 * MIB, 7 * MIB), Some((1, 3)));
        assert_eq!(pages(large, 5 * MIB, 2 * MIB), None);
    }
}
