//! Memory that a guest gives up while it runs, as with a balloon.

use std::fmt;
use std::sync::Arc;

use pagetide_memory::{GuestAddress, GuestRange, PageIndex, PageRange, PageSize, Region};

use crate::hooks::HookError;

/// What is done with memory that the guest has given up.
#[derive(Clone)]
pub(super) struct OnGivenUp(Arc<dyn Fn(GuestRange) -> Result<(), HookError> + Send + Sync>);

impl OnGivenUp {
    pub(super) fn call(&self, range: GuestRange) -> Result<(), HookError> {
        (self.0)(range)
    }
}

impl<F: Fn(GuestRange) -> Result<(), HookError> + Send + Sync + 'static> From<Arc<F>>
    for OnGivenUp
{
    fn from(discard: Arc<F>) -> Self {
        Self(discard)
    }
}

impl fmt::Debug for OnGivenUp {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_tuple("OnGivenUp").finish_non_exhaustive()
    }
}

/// What a line on `ttyS1` gives up: `discard GPA BYTES`, both hexadecimal.
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

/// Gives pages back to the host; what is no memory stays.
pub(super) fn punched(regions: &[Arc<Region>]) -> OnGivenUp {
    let regions = regions.to_vec();
    let discard = move |range| {
        for region in &regions {
            if let Some(pages) = whole_pages(region, range) {
                region.punch(pages)?;
            }
        }
        Ok(())
    };
    Arc::new(discard).into()
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
