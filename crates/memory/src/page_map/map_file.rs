//! A file that keeps page maps for a successor of this process.

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU8;

use rustix::fs::{SealFlags, SeekFrom, fcntl_get_seals, fstat, seek};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::answers::PageMapError;
use crate::convert::to_usize;

/// A memfd with page maps, mapped as a whole: however many maps it has, they are one mapping of this process, of
/// which the kernel allows some 65 000. One byte for each page ([`PageMap::in_file`](crate::PageMap::in_file)).
#[derive(Debug)]
pub struct MapFile {
    file: Arc<OwnedFd>,
    start: NonNull<AtomicU8>,
    len: usize,
}

// SAFETY: the bytes are only accessed as atomics, and stay mapped until the value is dropped.
unsafe impl Send for MapFile {}
// SAFETY: as above.
unsafe impl Sync for MapFile {}

impl MapFile {
    /// Maps a file, as long as it is now.
    ///
    /// # Errors
    /// [`PageMapError::NotSealed`] if it is not sealed against shrinking (`F_SEAL_SHRINK`); [`PageMapError::Map`] if it
    /// is empty, or cannot be mapped.
    pub fn open(file: Arc<OwnedFd>) -> Result<Arc<Self>, PageMapError> {
        let failed = |errno| PageMapError::Map { errno };
        let seals = fcntl_get_seals(&file).unwrap_or(SealFlags::empty());
        if !seals.contains(SealFlags::SHRINK) {
            return Err(PageMapError::NotSealed);
        }
        let bytes = fstat(&file).map_err(failed)?.st_size;
        let len = to_usize(u64::try_from(bytes).unwrap_or(0));
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let hint = std::ptr::null_mut();
        // SAFETY: mmap without MAP_FIXED replaces no memory in use.
        let start = unsafe { mmap(hint, len, access, MapFlags::SHARED, &file, 0) };
        let start = NonNull::new(start.map_err(failed)?.cast());
        let start = start.ok_or(failed(Errno::NOMEM))?;
        Ok(Arc::new(Self { file, start, len }))
    }

    /// `pages` bytes from `offset_bytes` on.
    pub(super) fn cells(
        &self,
        offset_bytes: u64,
        pages: u64,
    ) -> Result<NonNull<AtomicU8>, PageMapError> {
        let end = offset_bytes.checked_add(pages);
        if pages == 0 || end.is_none_or(|end| end > self.len as u64) {
            return Err(PageMapError::OutsideFile {
                offset_bytes,
                pages,
                file_bytes: self.len as u64,
            });
        }
        // SAFETY: add requires that the result is within the mapping, which was just checked.
        Ok(unsafe { self.start.add(to_usize(offset_bytes)) })
    }
}

impl MapFile {
    /// The next bytes of the file from `from` on that are no hole. The descriptor's own offset, which they change, is used by
    /// nobody.
    pub(super) fn next_data(&self, from: u64) -> Option<Range<u64>> {
        let rest = from..self.len as u64;
        let start = match seek(&self.file, SeekFrom::Data(from)) {
            Ok(start) => start,
            // Nothing but a hole up to the end.
            Err(Errno::NXIO) => return None,
            Err(_) => return Some(rest).filter(|rest| !rest.is_empty()),
        };
        let end = seek(&self.file, SeekFrom::Hole(start)).unwrap_or(rest.end);
        Some(start..end.min(rest.end)).filter(|data| !data.is_empty())
    }
}

impl AsFd for MapFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for MapFile {
    fn drop(&mut self) {
        // SAFETY: munmap requires that nobody uses the mapping any more: each map in it has an Arc of self. Fails only
        // for an invalid range.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
    }
}
