//! Which pages of a region have content, as reported by the kernel.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use rustix::fs::{SeekFrom, fstat, seek};
use rustix::io::Errno;

use super::{ContentError, Region};
use crate::convert::to_u64;
use crate::mapping::Mapping;
use crate::page::{PageIndex, PageSize};

/// The bits "page present" and "page swapped" of an entry of `/proc/self/pagemap`.
const RESIDENT: u64 = 0b11 << 62;
const ENTRY_BYTES: u64 = 8;
/// Number of entries per read.
const CHUNK: usize = 4096;

impl Region {
    /// The first page that has content: in the region's file or, for anonymous memory, in the guest
    /// mapping. A region that is paged in userfaultfd MISSING mode must have no such page: a pager
    /// would treat the existing data as the page's content.
    ///
    /// For hugetlb memory, the kernel reports how many pages have content, but not which. If none of
    /// them is mapped here, the result is page 0.
    pub fn has_content(&self) -> Result<Option<PageIndex>, ContentError> {
        match &self.file {
            None => self.first_in_tables(&self.guest, true),
            Some(file) if self.backing.is_hugetlb() => {
                if file_bytes(file)? == 0 {
                    return Ok(None);
                }
                let mapped = self.first_in_either(true)?;
                Ok(mapped.or(Some(PageIndex(0))))
            }
            Some(file) => match seek(file, SeekFrom::Data(0)) {
                Ok(offset) => Ok(self.page_at(offset)),
                // Pages that were reserved and never written look like holes, but do not fault.
                Err(Errno::NXIO) => Ok((file_bytes(file)? > 0).then_some(PageIndex(0))),
                Err(errno) => Err(ContentError::Seek { errno }),
            },
        }
    }

    /// The first page that has no content: it is missing from the page cache or, for anonymous memory,
    /// from the guest mapping. If a pager takes a region's content from the page cache, the region must
    /// have no such page: a hole would read as zeroes.
    ///
    /// For hugetlb memory the result may be a later page than the first, as for
    /// [`Region::has_content`].
    pub fn first_hole(&self) -> Result<Option<PageIndex>, ContentError> {
        match &self.file {
            None => self.first_in_tables(&self.guest, false),
            Some(file) if self.backing.is_hugetlb() => {
                if file_bytes(file)? >= self.bytes() {
                    return Ok(None);
                }
                let unmapped = self.first_in_either(false)?;
                Ok(unmapped.or(Some(PageIndex(0))))
            }
            Some(file) => match seek(file, SeekFrom::Hole(0)) {
                // Every file ends in a hole.
                Ok(offset) => Ok(self.page_at(offset)),
                Err(errno) => Err(ContentError::Seek { errno }),
            },
        }
    }

    fn page_at(&self, offset: u64) -> Option<PageIndex> {
        (offset < self.bytes()).then(|| PageIndex(offset >> self.page_size().shift()))
    }

    /// The first page that is mapped (or unmapped) in one of the mappings.
    fn first_in_either(&self, resident: bool) -> Result<Option<PageIndex>, ContentError> {
        let guest = self.first_in_tables(&self.guest, resident)?;
        let service = match &self.service {
            Some(service) => self.first_in_tables(service, resident)?,
            None => None,
        };
        Ok(guest.into_iter().chain(service).min())
    }

    /// The first page of `mapping` with a page table entry, or the first without one.
    fn first_in_tables(
        &self,
        mapping: &Mapping,
        resident: bool,
    ) -> Result<Option<PageIndex>, ContentError> {
        let failed = |source| ContentError::PageTables { source };
        let tables = File::open("/proc/self/pagemap").map_err(failed)?;
        let first = mapping.range().start().as_u64() >> PageSize::Size4K.shift();
        let all = self.bytes() >> PageSize::Size4K.shift();
        let mut bytes = vec![0; CHUNK * size_of::<u64>()];
        let mut done = 0;
        while done < all {
            let wanted = (all - done).min(to_u64(CHUNK));
            let part = bytes
                .get_mut(..crate::convert::to_usize(wanted * ENTRY_BYTES))
                .ok_or_else(|| failed(io::Error::from(io::ErrorKind::InvalidInput)))?;
            tables
                .read_exact_at(part, (first + done) * ENTRY_BYTES)
                .map_err(failed)?;
            let (entries, _) = part.as_chunks::<8>();
            let found = entries
                .iter()
                .position(|entry| (u64::from_le_bytes(*entry) & RESIDENT != 0) == resident);
            if let Some(at) = found {
                return Ok(self.page_at((done + to_u64(at)) << PageSize::Size4K.shift()));
            }
            done += wanted;
        }
        Ok(None)
    }
}

/// The amount of memory of a file in bytes.
fn file_bytes(file: impl std::os::fd::AsFd) -> Result<u64, ContentError> {
    /// The unit of `st_blocks`, independent of the file system's block size.
    const BLOCK_BYTES: u64 = 512;
    let status = fstat(file).map_err(|errno| ContentError::Seek { errno })?;
    Ok(u64::try_from(status.st_blocks)
        .unwrap_or(0)
        .saturating_mul(BLOCK_BYTES))
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use rustix::fs::{FallocateFlags, fallocate};

    use super::*;
    use crate::{Backing, GuestAddress};

    /// Reserved pages read as zeroes without a fault, although the kernel reports them as holes.
    #[test]
    fn reserved_pages_are_content() {
        let region = Region::new(GuestAddress(0), 8 << 12, Backing::Shmem).unwrap();
        assert_eq!(region.has_content().unwrap(), None);
        let file = region.file.as_ref().unwrap();
        fallocate(file, FallocateFlags::empty(), 3 << 12, 1 << 12).unwrap();
        assert_eq!(region.has_content().unwrap(), Some(PageIndex(0)));
        region.punch(region.all_pages()).unwrap();
        assert_eq!(region.has_content().unwrap(), None);
    }
}
