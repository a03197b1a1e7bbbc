//! The guest's memory: one region, or two around the interrupt controllers.

use std::sync::Arc;

use pagetide_memory::{
    AccessError, Backing, FailurePolicy, GuestRange, PageIndex, Region, RegionError,
};

use super::config::LinuxConfigError;
use super::image::is_zero;
use super::layout::RamLayout;

/// Allocates the memory. Nothing of it is present.
pub(super) fn allocate(
    layout: RamLayout,
    backing: Backing,
    policy: FailurePolicy,
) -> Result<Vec<Arc<Region>>, RegionError> {
    let ranges = layout.ranges().map_err(|_| RegionError::Empty)?;
    let make = |range: GuestRange| {
        Region::with_policy(range.start(), range.bytes(), backing, policy).map(Arc::new)
    };
    ranges.into_iter().map(make).collect()
}

/// Checks regions that the caller made.
pub(super) fn check(layout: RamLayout, regions: &[Arc<Region>]) -> Result<(), LinuxConfigError> {
    let needed = layout.ranges().unwrap_or_default();
    let found: Vec<_> = regions.iter().map(|region| region.range()).collect();
    if found == needed {
        return Ok(());
    }
    Err(LinuxConfigError::WrongRegions { found, needed })
}

/// Writes to the first region, through the service mapping if there is one: what is written does not
/// become present for the guest by that. Memory that stays zero is not touched.
pub(super) fn write(regions: &[Arc<Region>], gpa: u64, bytes: &[u8]) -> Result<(), AccessError> {
    let Some(region) = regions.first().filter(|_| !is_zero(bytes)) else {
        return Ok(());
    };
    let shift = region.page_size().shift();
    let (page, offset) = (PageIndex(gpa >> shift), gpa & ((1 << shift) - 1));
    if region.service().is_some() {
        region.write_service(page, offset, bytes)
    } else {
        region.write_guest(page, offset, bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn regions(bytes: u64, backing: Backing) -> Vec<Arc<Region>> {
        allocate(RamLayout::new(bytes), backing, FailurePolicy::KernelDefault).unwrap()
    }

    #[test]
    fn regions_elsewhere_are_refused() {
        let made = regions(4 << 20, Backing::Shmem);
        for bytes in [8 << 20, 5 << 30] {
            let layout = RamLayout::new(bytes);
            let refused = check(layout, &made).err();
            let Some(LinuxConfigError::WrongRegions { found, needed }) = refused else {
                panic!("{refused:?}")
            };
            assert_eq!(found, [made[0].range()]);
            assert_eq!(needed, layout.ranges().unwrap());
        }
        assert!(check(RamLayout::new(4 << 20), &made).is_ok());
    }

    #[test]
    fn every_backing_can_be_written() {
        for backing in [Backing::Shmem, Backing::Anonymous] {
            let regions = regions(4 << 20, backing);
            write(&regions, 0x1234, b"across").unwrap();
            write(&regions, 0x1ffe, b"pages").unwrap();
            let mut found = [0; 5];
            regions[0]
                .read_guest(PageIndex(1), 0xffe, &mut found)
                .unwrap();
            assert_eq!(&found, b"pages");
            for gpa in [4 << 20, (4 << 20) - 1] {
                assert!(write(&regions, gpa, b"xy").is_err(), "{gpa:#x}");
            }
        }
    }
}
