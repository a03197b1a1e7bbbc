//! Which guest addresses a VM has, and the numbers of its pages.

use pagetide_memory::{GuestAddress, PageIndex, PageRange};
use thiserror::Error;

/// The bytes of a page: 4 KiB, also where either host maps huge pages.
pub const PAGE_BYTES: u64 = 4096;

/// The most areas of a layout.
pub const MAX_AREAS: usize = 1024;

/// The most memory of a VM: 64 TiB.
pub const MAX_MEMORY_BYTES: u64 = 64 << 40;

/// One area of guest memory without a hole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Area {
    /// Its first address.
    pub start: GuestAddress,
    /// Its length in bytes.
    pub bytes: u64,
}

/// The areas of a VM's memory, in ascending order. Pages are numbered over all of them from 0 on, so that a hole in the
/// guest's addresses has no number.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Layout {
    areas: Vec<Area>,
    /// The number of each area's first page.
    firsts: Vec<u64>,
    pages: u64,
}

/// Why areas are no layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum LayoutError {
    /// No area, or too many.
    #[error("{count} areas of memory: 1 to {MAX_AREAS} are allowed")]
    Count {
        /// The number of areas.
        count: usize,
    },
    /// An area that is empty, not whole pages, beyond the last address, or not behind the one before it.
    #[error(
        "area {number} of the memory is empty, not of whole pages, or not behind the area before it"
    )]
    Area {
        /// Its place in the list.
        number: usize,
    },
    /// Too much memory.
    #[error("{bytes} bytes of memory: {MAX_MEMORY_BYTES} is the limit")]
    Memory {
        /// All areas together.
        bytes: u64,
    },
}

impl Layout {
    /// Checks the areas.
    ///
    /// # Errors
    /// [`LayoutError`].
    pub fn new(areas: Vec<Area>) -> Result<Self, LayoutError> {
        let count = areas.len();
        if count == 0 || count > MAX_AREAS {
            return Err(LayoutError::Count { count });
        }
        let (mut last_end, mut total) = (0, 0_u64);
        let mut firsts = Vec::with_capacity(count);
        for (number, area) in areas.iter().enumerate() {
            let start = area.start.0;
            let is_whole = start % PAGE_BYTES == 0 && area.bytes % PAGE_BYTES == 0;
            let end = area.start.checked_add(area.bytes);
            match end {
                Some(end) if is_whole && area.bytes > 0 && start >= last_end => last_end = end.0,
                _ => return Err(LayoutError::Area { number }),
            }
            firsts.push(total / PAGE_BYTES);
            total = total.saturating_add(area.bytes);
        }
        if total > MAX_MEMORY_BYTES {
            return Err(LayoutError::Memory { bytes: total });
        }
        Ok(Self {
            areas,
            firsts,
            pages: total / PAGE_BYTES,
        })
    }

    /// The areas.
    pub fn areas(&self) -> &[Area] {
        &self.areas
    }

    /// The pages of all areas.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// An area, and the number of its first page.
    fn area(&self, number: Option<usize>) -> Option<(&Area, u64)> {
        let number = number?;
        Some((self.areas.get(number)?, *self.firsts.get(number)?))
    }

    /// The pages of `count` pages from an address on. `None` if they are not whole pages of one area.
    pub fn run(&self, start: GuestAddress, count: u64) -> Option<PageRange> {
        let behind = self.areas.partition_point(|area| area.start <= start);
        let (area, first) = self.area(behind.checked_sub(1))?;
        let offset = start.offset_from(area.start)?;
        let room = area.bytes.checked_sub(offset)? / PAGE_BYTES;
        let is_inside = offset < area.bytes && offset.is_multiple_of(PAGE_BYTES) && count <= room;
        let run = PageRange::new(PageIndex(first + offset / PAGE_BYTES), count);
        is_inside.then_some(run)
    }

    /// The address of a page, and how many pages its area has from there on.
    pub fn address(&self, page: PageIndex) -> Option<(GuestAddress, u64)> {
        let behind = self.firsts.partition_point(|first| *first <= page.0);
        let (area, first) = self.area(behind.checked_sub(1))?;
        let (pages, offset) = (area.bytes / PAGE_BYTES, page.0.checked_sub(first)?);
        let room = pages.checked_sub(offset).filter(|room| *room > 0)?;
        Some((area.start.checked_add(offset * PAGE_BYTES)?, room))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn area(start: u64, bytes: u64) -> Area {
        Area {
            start: GuestAddress(start),
            bytes,
        }
    }

    #[test]
    fn pages_are_numbered_over_holes() {
        let layout = Layout::new(vec![area(0, 0x2000), area(0x1_0000, 0x3000)]).unwrap();
        assert_eq!(layout.pages(), 5);
        for page in 0..5 {
            let (address, room) = layout.address(PageIndex(page)).unwrap();
            let run = PageRange::new(PageIndex(page), room);
            assert_eq!(layout.run(address, room), Some(run));
            assert_eq!(layout.run(address, room + 1), None, "no run crosses a hole");
        }
        assert_eq!(layout.address(PageIndex(5)), None);
        assert_eq!(layout.run(GuestAddress(0x8000), 1), None);
        assert_eq!(layout.run(GuestAddress(0x800), 1), None);
    }

    #[test]
    fn areas_that_are_no_layout_are_refused() {
        let refused = |areas| Layout::new(areas).unwrap_err();
        assert_eq!(refused(vec![]), LayoutError::Count { count: 0 });
        let many = vec![area(0, 0x1000); MAX_AREAS + 1];
        assert_eq!(
            refused(many),
            LayoutError::Count {
                count: MAX_AREAS + 1
            }
        );
        for wrong in [
            area(0, 0),
            area(0, 1),
            area(1, 0x1000),
            area(!0xfff, 0x1000),
        ] {
            assert_eq!(refused(vec![wrong]), LayoutError::Area { number: 0 });
        }
        let overlap = vec![area(0, 0x2000), area(0x1000, 0x1000)];
        assert_eq!(refused(overlap), LayoutError::Area { number: 1 });
        let bytes = MAX_MEMORY_BYTES + PAGE_BYTES;
        assert_eq!(refused(vec![area(0, bytes)]), LayoutError::Memory { bytes });
    }
}
