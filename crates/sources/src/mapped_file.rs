//! A file's page cache, mapped: content that the kernel can copy without a call that reads it.
//!
//! A copy from a page that is not in the page cache would wait for the disk, on a thread that must not
//! wait. Before a chunk of the file is used, mincore() therefore finds out whether the page cache has all
//! of it; the result is good for [`GOOD_FOR_MS`]. A page that leaves the cache within that time costs the
//! thread that needs it one wait. (cachestat() takes a twentieth of the time, but counts pages whose read
//! has not ended.) The first copy from each 64 KiB fills the mapping's page table; MADV_POPULATE_READ takes
//! several times as long.

use std::fs::File;
use std::sync::atomic::{AtomicU64, Ordering};

use pagetide_memory::{HostAddress, HostRange};
use rustix::fs::{Access, accessat};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::process::geteuid;
use rustix::time::{ClockId, clock_gettime};

use crate::image::MOST_MEMORY_BYTES;

/// The unit in which the page cache is looked at.
const CHUNK_BYTES: u64 = 512 << 10;

/// The smallest page.
const PAGE_BYTES: usize = 4096;

/// The most pages of a chunk.
const CHUNK_PAGES: usize = (512 << 10) / PAGE_BYTES;

/// How long a look at a chunk is good for, in milliseconds.
const GOOD_FOR_MS: u64 = 1000;

/// A mapping of a file's whole pages that only the kernel reads.
#[derive(Debug)]
pub(crate) struct MappedFile {
    range: HostRange,
    /// What was seen of each chunk, as [`seen`] encodes it; 0 if nothing was.
    chunks: Box<[AtomicU64]>,
}

/// What was seen at a time in milliseconds.
fn seen(at_ms: u64, is_cached: bool) -> u64 {
    (at_ms << 1 | u64::from(is_cached)).max(2)
}

impl MappedFile {
    /// Maps the whole pages of `file`. `None` if there are none, if the kernel refuses, or would not say what
    /// is in the page cache.
    pub(crate) fn new(file: &File, bytes: u64) -> Option<Self> {
        if !may_look(file) {
            return None;
        }
        let bytes = bytes / PAGE_BYTES as u64 * PAGE_BYTES as u64;
        let length = usize::try_from(bytes).ok().filter(|&length| length > 0)?;
        // A sparse file may be as long as its file system permits, and takes 8 bytes for each chunk.
        if bytes > MOST_MEMORY_BYTES {
            return None;
        }
        let (none, flags) = (std::ptr::null_mut(), MapFlags::SHARED | MapFlags::NORESERVE);
        // SAFETY: mmap without MAP_FIXED replaces no other mapping. Nothing of this process refers to the
        // mapping's content, so it does not matter that others may change it.
        let start = unsafe { mmap(none, length, ProtFlags::READ, flags, file, 0) }.ok()?;
        // The kernel maps whole pages, below the end of the address space.
        let range = HostRange::new(HostAddress(start.expose_provenance()), length).ok()?;
        let chunks = (0..bytes.div_ceil(CHUNK_BYTES))
            .map(|_| AtomicU64::new(0))
            .collect();
        Some(Self { range, chunks })
    }

    /// The addresses of a part of the file, if the page cache has it. The caller has seen that the file is as long as it was:
    /// from the page in which a truncated one ends, the kernel copies zeroes for what is missing.
    pub(crate) fn find(&self, offset: u64, bytes: u64) -> Option<HostRange> {
        let last = offset.checked_add(bytes)?.checked_sub(1)?;
        if last >= self.range.bytes() as u64 {
            return None;
        }
        let now_ms = now_ms();
        for chunk in offset / CHUNK_BYTES..=last / CHUNK_BYTES {
            let cell = self.chunks.get(usize::try_from(chunk).ok()?)?;
            let before = cell.load(Ordering::Relaxed);
            let is_good = now_ms.saturating_sub(before >> 1) < GOOD_FOR_MS;
            let is_cached = if before != 0 && is_good {
                before & 1 != 0
            } else {
                let is_cached = self.look(chunk * CHUNK_BYTES);
                cell.store(seen(now_ms, is_cached), Ordering::Relaxed);
                is_cached
            };
            if !is_cached {
                return None;
            }
        }
        let (offset, bytes) = (usize::try_from(offset).ok()?, usize::try_from(bytes).ok()?);
        let start = self.range.start().checked_add(offset)?;
        HostRange::new(start, bytes).ok()
    }

    /// Whether the page cache has the whole chunk at `offset`. A chunk with holes does not count: to read
    /// them would give them memory on tmpfs.
    fn look(&self, offset: u64) -> bool {
        let mut pages = [0_u8; CHUNK_PAGES];
        let looked_at = self.pages_of_chunk(offset, &mut pages);
        looked_at.is_some_and(|pages| pages.iter().all(|page| page & 1 != 0))
    }

    /// What mincore() says of the chunk at `offset`: bit 0 of a page's byte if the page cache has it.
    fn pages_of_chunk<'p>(
        &self,
        offset: u64,
        pages: &'p mut [u8; CHUNK_PAGES],
    ) -> Option<&'p [u8]> {
        let length = (self.range.bytes() as u64).checked_sub(offset)?;
        let length = usize::try_from(length.min(CHUNK_BYTES)).ok()?;
        let start = self.range.start().as_u64() + offset;
        let start =
            std::ptr::with_exposed_provenance_mut::<libc::c_void>(usize::try_from(start).ok()?);
        // SAFETY: mincore writes a byte for each page of the range, and `pages` has as many.
        let result = unsafe { libc::mincore(start, length, pages.as_mut_ptr()) };
        pages
            .get(..length.div_ceil(PAGE_BYTES))
            .filter(|_| result == 0)
    }
}

/// The numbers of the 4 KiB pages of a file that the page cache has, in order. `None` if the kernel does not say: it
/// tells only the file's owner and those who may write to it.
pub fn cached_pages(file: &File) -> Option<Vec<u64>> {
    let bytes = file.metadata().ok()?.len();
    if bytes < PAGE_BYTES as u64 {
        return may_look(file).then(Vec::new);
    }
    let mapped = MappedFile::new(file, bytes)?;
    let mut cached = Vec::new();
    let mut pages = [0_u8; CHUNK_PAGES];
    for offset in (0..mapped.range.bytes() as u64).step_by(CHUNK_PAGES * PAGE_BYTES) {
        let first = offset / PAGE_BYTES as u64;
        let chunk = mapped.pages_of_chunk(offset, &mut pages)?;
        let numbered = (first..).zip(chunk);
        cached.extend(
            numbered
                .filter(|(_, page)| **page & 1 != 0)
                .map(|(page, _)| page),
        );
    }
    Some(cached)
}

impl Drop for MappedFile {
    fn drop(&mut self) {
        let start = std::ptr::with_exposed_provenance_mut(self.range.start().0);
        // SAFETY: munmap requires that nothing uses the mapping any more: only the kernel reads it, for
        // calls of users of this value.
        let _ = unsafe { munmap(start, self.range.bytes()) };
    }
}

/// Whether mincore tells the truth: to a process that neither owns the file nor may write to it, it says
/// that all pages are there.
fn may_look(file: &File) -> bool {
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::MetadataExt;
    let owns = file
        .metadata()
        .is_ok_and(|status| status.uid() == geteuid().as_raw());
    let link = format!("/proc/self/fd/{}", file.as_raw_fd());
    let flags = rustix::fs::AtFlags::EACCESS;
    owns || accessat(rustix::fs::CWD, link, Access::WRITE_OK, flags).is_ok()
}

fn now_ms() -> u64 {
    let now = clock_gettime(ClockId::MonotonicCoarse);
    u64::try_from(now.tv_sec).unwrap_or(0) * 1000
        + u64::try_from(now.tv_nsec).unwrap_or(0) / 1_000_000
}

#[cfg(test)]
mod tests {
    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;

    fn file(chunks: u64) -> File {
        let file = tempfile::tempfile().unwrap();
        let bytes = vec![7; usize::try_from(chunks * CHUNK_BYTES).unwrap()];
        std::os::unix::fs::FileExt::write_all_at(&file, &bytes, 0).unwrap();
        file
    }

    #[test]
    fn a_part_in_the_page_cache_is_found_where_it_is_mapped() {
        let mapped = MappedFile::new(&file(3), 3 * CHUNK_BYTES).unwrap();
        let start = mapped.range.start().as_u64();
        for (offset, bytes) in [(0, 4096), (CHUNK_BYTES - 4096, 8192), (0, 3 * CHUNK_BYTES)] {
            let found = mapped.find(offset, bytes).unwrap();
            assert_eq!(found.start().as_u64(), start + offset);
            assert_eq!(found.bytes() as u64, bytes);
        }
        assert_eq!(mapped.find(3 * CHUNK_BYTES, 4096), None);
        assert_eq!(mapped.find(u64::MAX, 4096), None);
        assert_eq!(mapped.find(0, 0), None);
    }

    #[test]
    fn a_hole_is_not_found() {
        let file = file(1);
        file.set_len(2 * CHUNK_BYTES).unwrap();
        let mapped = MappedFile::new(&file, 2 * CHUNK_BYTES).unwrap();
        assert!(mapped.find(0, CHUNK_BYTES).is_some());
        assert_eq!(mapped.find(CHUNK_BYTES, 4096), None);
        assert_eq!(mapped.find(CHUNK_BYTES - 4096, 8192), None);
    }

    #[test]
    fn the_cached_pages_of_a_file_are_named() {
        let file = file(2);
        file.set_len(3 * CHUNK_BYTES).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &[1], 3 * CHUNK_BYTES - 1).unwrap();
        let pages = CHUNK_PAGES as u64;
        let wanted: Vec<u64> = (0..2 * pages).chain([3 * pages - 1]).collect();
        assert_eq!(cached_pages(&file), Some(wanted));
        file.set_len(100).unwrap();
        assert_eq!(cached_pages(&file), Some(vec![]));
    }

    #[test]
    fn what_was_seen_is_looked_at_again_after_a_while() {
        let file = file(1);
        file.set_len(2 * CHUNK_BYTES).unwrap();
        let mapped = MappedFile::new(&file, 2 * CHUNK_BYTES).unwrap();
        assert_eq!(mapped.find(CHUNK_BYTES, 4096), None);
        let bytes = vec![7; usize::try_from(CHUNK_BYTES).unwrap()];
        std::os::unix::fs::FileExt::write_all_at(&file, &bytes, CHUNK_BYTES).unwrap();
        let long_ago = now_ms().saturating_sub(GOOD_FOR_MS + 1);
        mapped.chunks[1].store(seen(long_ago, false), Ordering::Relaxed);
        assert!(mapped.find(CHUNK_BYTES, 4096).is_some());
    }

    #[test]
    fn a_file_that_ends_inside_a_page_is_mapped_up_to_there_and_unmapped_again() {
        use std::os::unix::fs::MetadataExt;
        for bytes in [CHUNK_BYTES + 100, CHUNK_BYTES, 4095] {
            let file = file(1);
            file.set_len(bytes).unwrap();
            let mapped = MappedFile::new(&file, bytes);
            assert_eq!(mapped.is_some(), bytes > 4095);
            if let Some(mapped) = &mapped {
                assert!(mapped.find(CHUNK_BYTES - 8192, 8192).is_some());
                assert_eq!(mapped.find(CHUNK_BYTES, 4096), None);
                assert_eq!(mapped.find(CHUNK_BYTES - 4096, 8192), None);
            }
            drop(mapped);
            let inode = file.metadata().unwrap().ino().to_string();
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
            let is_ours = |line: &str| line.split_whitespace().nth(4) == Some(&inode);
            assert!(!maps.lines().any(is_ours), "{bytes} bytes stay mapped");
        }
    }

    #[test]
    fn an_empty_file_is_not_mapped() {
        assert!(MappedFile::new(&tempfile::tempfile().unwrap(), 0).is_none());
    }

    /// The kernel would map it: address space is not what is short.
    #[test]
    fn a_file_that_is_longer_than_any_guest_memory_is_not_mapped() {
        let file = memory_file(MOST_MEMORY_BYTES + 4096);
        assert!(MappedFile::new(&file, MOST_MEMORY_BYTES + 4096).is_none());
        assert_eq!(cached_pages(&file), None);
    }

    /// A sparse file, as long as file systems rarely permit.
    fn memory_file(bytes: u64) -> File {
        let file = memfd_create("sparse", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, bytes).unwrap();
        file.into()
    }
}
