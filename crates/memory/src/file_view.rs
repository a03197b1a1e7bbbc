//! A mapping of another process's memory file.

use std::os::fd::{AsFd, OwnedFd};

use rustix::io::Errno;
use rustix::mm::Advice;
use thiserror::Error;

use crate::convert::{to_u64, to_usize};
use crate::guard::{CopyFailure, copy_in, copy_out};
use crate::mapping::{FilePart, Mapping};
use crate::memory_file::{MemoryFile, MemoryFileError};
use crate::page::PageSize;

/// Why a file could not be mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum FileViewError {
    /// The file cannot be used as memory.
    #[error(transparent)]
    File(#[from] MemoryFileError),
    /// `mmap` or `madvise` failed, for example because the file is sealed against writing or open for
    /// reading only.
    #[error("mapping {bytes} bytes at offset {offset} of the file")]
    Map {
        /// The view's offset in the file.
        offset: u64,
        /// The view's length in bytes.
        bytes: u64,
        /// The kernel's error.
        #[source]
        errno: Errno,
    },
}

/// Why the file could not be read or written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum FileAccessError {
    /// The access does not lie within the view.
    #[error("{len} bytes at offset {offset} are not all in a view of {bytes} bytes")]
    Outside {
        /// The offset of the access in the view.
        offset: u64,
        /// The length of the access in bytes.
        len: u64,
        /// The length of the view in bytes.
        bytes: u64,
    },
    /// The file's owner has truncated it. Part of the data has been copied.
    #[error("the file ends before offset {at} of the view")]
    Truncated {
        /// The first missing byte of the view.
        at: u64,
    },
    /// The memory has an uncorrected error, or the hugetlb pool has no free page. Part of the data has
    /// been copied.
    #[error("accessing the memory at offset {at} of the view")]
    Failed {
        /// The byte of the view whose access failed.
        at: u64,
    },
}

/// A mapping of a part of a memory file, through which this process writes the file's pages. Offsets are in
/// bytes from the start of that part.
///
/// The file's other owners are not trusted. They may write to the file at any time, so reads may return
/// any bytes; and they may truncate it. Then copies fail with [`FileAccessError::Truncated`], provided
/// that the process has a SIGBUS handler that takes threads out of copies ([`crate::guard`]) for the
/// code `BUS_ADRERR` too. Without such a handler, SIGBUS ends the process.
///
/// A write creates the pages that it writes to and no others, whatever the host's setting for transparent
/// huge pages. A child of this process does not inherit the mapping.
#[derive(Debug)]
pub struct FileView {
    file: MemoryFile,
    mapping: Mapping,
}

impl FileView {
    /// Maps `bytes` bytes of `file` from `offset` on, both multiples of `page_size`, the file's page
    /// size. Allocates no pages. The file need not be sealed.
    pub fn map(
        file: OwnedFd,
        offset: u64,
        bytes: u64,
        page_size: PageSize,
    ) -> Result<Self, FileViewError> {
        let file = MemoryFile::new(file, offset, bytes, page_size)?;
        let no_mapping = |errno| FileViewError::Map {
            offset,
            bytes,
            errno,
        };
        let part = FilePart {
            file: file.as_fd(),
            offset,
        };
        // Congruent to the file, so that its huge pages can be mapped as huge pages.
        let alignment = page_size.max(PageSize::Size2M);
        let mapping =
            Mapping::new(Some(part), to_usize(bytes), alignment, offset).map_err(no_mapping)?;
        mapping
            .advise_all(Advice::LinuxDontFork)
            .map_err(no_mapping)?;
        if page_size == PageSize::Size4K {
            // Of a huge page, only a part would have content, and the rest would read as zeroes.
            match mapping.advise_all(Advice::LinuxNoHugepage) {
                // A kernel without transparent huge pages refuses the advice, and then needs none.
                Ok(()) | Err(Errno::INVAL) => {}
                Err(errno) => return Err(no_mapping(errno)),
            }
        }
        Ok(Self { file, mapping })
    }

    /// Its length in bytes.
    pub fn bytes(&self) -> u64 {
        self.file.bytes()
    }

    /// Writes `bytes` at `offset`.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), FileAccessError> {
        let at = self.check(offset, to_u64(bytes.len()))?;
        // SAFETY: copy_in requires bytes.len() mapped, writable bytes at the pointer, which this
        // process accesses by guarded copies only: check found the span within the view. The mapping
        // covers the view for as long as self lives, and no other code here can reach it. Where the
        // file has been truncated, the access raises a signal, which guarded copies handle.
        unsafe { copy_in(self.mapping.as_ptr().wrapping_add(at), bytes) }
            .map_err(|failure| self.failed(failure))
    }

    /// Reads into `bytes` from `offset` on. A page that was never written reads as zeroes and then is
    /// in the file.
    pub fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), FileAccessError> {
        let at = self.check(offset, to_u64(bytes.len()))?;
        // SAFETY: as in write, in the other direction.
        unsafe { copy_out(self.mapping.as_ptr().wrapping_add(at), bytes) }
            .map_err(|failure| self.failed(failure))
    }

    fn check(&self, offset: u64, len: u64) -> Result<usize, FileAccessError> {
        let bytes = self.bytes();
        match offset.checked_add(len) {
            Some(end) if end <= bytes => Ok(to_usize(offset)),
            _ => Err(FileAccessError::Outside { offset, len, bytes }),
        }
    }

    fn failed(&self, failure: CopyFailure) -> FileAccessError {
        let at = to_u64(failure.at.0.saturating_sub(self.mapping.range().start().0));
        if self.file.offset().saturating_add(at) >= self.file.file_bytes() {
            FileAccessError::Truncated { at }
        } else {
            FileAccessError::Failed { at }
        }
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests;
