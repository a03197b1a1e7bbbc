//! A mapping of another process's memory file.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::fs::{
    FallocateFlags, FileType, Mode, OFlags, SeekFrom, fallocate, fstat, fstatfs, open, seek,
};
use rustix::io::Errno;
use rustix::mm::Advice;
use thiserror::Error;

use crate::convert::{to_u64, to_usize};
use crate::guard::{CopyFailure, copy_in, copy_out, fill_zeroes};
use crate::mapping::{FilePart, Mapping};
use crate::page::PageSize;

/// `TMPFS_MAGIC` of `linux/magic.h`, the file system of memfds.
const TMPFS: u64 = 0x0102_1994;
/// `HUGETLBFS_MAGIC`.
const HUGETLBFS: u64 = 0x9584_58f6;

/// Why a file could not be mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum FileViewError {
    /// Not a memory file. Accesses to other files may block for as long as their server takes.
    #[error("the file is neither a memfd nor a file of tmpfs or hugetlbfs")]
    NotMemory,
    /// The file consists of pages of another size.
    #[error("the file consists of pages of {file_bytes} bytes, not {page_size}")]
    OtherPages {
        /// The expected page size.
        page_size: PageSize,
        /// The file's page size in bytes.
        file_bytes: u64,
    },
    /// The view is empty, or not a whole number of pages.
    #[error("{bytes} bytes at offset {offset} are not whole {page_size} pages")]
    NotPageMultiple {
        /// The view's offset in the file.
        offset: u64,
        /// The view's length in bytes.
        bytes: u64,
        /// The page size that both must be multiples of.
        page_size: PageSize,
    },
    /// The view ends after the end of the file.
    #[error("{bytes} bytes at offset {offset} are not in a file of {file_bytes} bytes")]
    OutsideFile {
        /// The view's offset in the file.
        offset: u64,
        /// The view's length in bytes.
        bytes: u64,
        /// The file's length in bytes.
        file_bytes: u64,
    },
    /// `fstat` or `fstatfs` failed.
    #[error("determining the type of the file")]
    Ask {
        /// The kernel's error.
        #[source]
        errno: Errno,
    },
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
    /// The kernel could not report which parts of the file have content.
    #[error("looking for content in the file")]
    Seek {
        /// The kernel's error.
        #[source]
        errno: Errno,
    },
    /// Punching a hole into the file failed.
    #[error("punching a hole of {len} bytes at offset {offset}")]
    Punch {
        /// The offset in the view.
        offset: u64,
        /// The length in bytes.
        len: u64,
        /// The kernel's error.
        #[source]
        errno: Errno,
    },
}

/// A mapping of a part of a memory file that another process created, so that this process can write
/// the file's pages: a service mapping of another process's region. Offsets are in bytes from the start
/// of that part.
///
/// The file's other owners are not trusted. They may write to the file at any time, so reads may return
/// any bytes; and they may truncate it. Then copies fail with [`FileAccessError::Truncated`], provided
/// that the process has a SIGBUS handler that takes threads out of copies ([`crate::guard`]) for the
/// code `BUS_ADRERR` too. Without such a handler, SIGBUS ends the process.
///
/// A child of this process does not inherit the mapping.
#[derive(Debug)]
pub struct FileView {
    file: OwnedFd,
    offset: u64,
    is_hugetlb: bool,
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
        let ask = |errno| FileViewError::Ask { errno };
        let status = fstat(&file).map_err(ask)?;
        if FileType::from_raw_mode(status.st_mode) != FileType::RegularFile {
            return Err(FileViewError::NotMemory);
        }
        let system = fstatfs(&file).map_err(ask)?;
        let file_page = match u64::try_from(system.f_type) {
            Ok(TMPFS) => PageSize::Size4K.bytes(),
            Ok(HUGETLBFS) => u64::try_from(system.f_bsize).unwrap_or(0),
            _ => return Err(FileViewError::NotMemory),
        };
        if file_page != page_size.bytes() {
            return Err(FileViewError::OtherPages {
                page_size,
                file_bytes: file_page,
            });
        }
        if bytes == 0 || !page_size.divides(offset) || !page_size.divides(bytes) {
            return Err(FileViewError::NotPageMultiple {
                offset,
                bytes,
                page_size,
            });
        }
        let file_bytes = u64::try_from(status.st_size).unwrap_or(0);
        if offset.checked_add(bytes).is_none_or(|end| end > file_bytes) {
            return Err(FileViewError::OutsideFile {
                offset,
                bytes,
                file_bytes,
            });
        }
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
        Ok(Self {
            file,
            offset,
            is_hugetlb: page_size != PageSize::Size4K,
            mapping,
        })
    }

    /// Its length in bytes.
    pub fn bytes(&self) -> u64 {
        to_u64(self.mapping.range().bytes())
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

    /// Writes `len` zeroes at `offset`. Unlike after [`Self::punch`], whole pages are then in the file.
    pub fn zero(&self, offset: u64, len: u64) -> Result<(), FileAccessError> {
        let at = self.check(offset, len)?;
        // SAFETY: as in write.
        unsafe { fill_zeroes(self.mapping.as_ptr().wrapping_add(at), to_usize(len)) }
            .map_err(|failure| self.failed(failure))
    }

    /// Returns `len` bytes at `offset`, whole pages, to the host: punches a hole into the file, which
    /// affects every process that has mapped it.
    pub fn punch(&self, offset: u64, len: u64) -> Result<(), FileAccessError> {
        self.check(offset, len)?;
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        // check has found offset within the view, whose end in the file does not overflow.
        fallocate(&self.file, flags, self.offset + offset, len)
            .map_err(|errno| FileAccessError::Punch { offset, len, errno })
    }

    /// The offset of a page that is in the file: the first page that was written, if there is one.
    /// `None` for hugetlbfs.
    ///
    /// Pages that fallocate has reserved and that were never written are found only if the view covers
    /// the whole file; the result is then offset 0, because the kernel reports how many pages there are
    /// but not which.
    pub fn find_content(&self) -> Result<Option<u64>, FileAccessError> {
        if self.is_hugetlb {
            return Ok(None);
        }
        let failed = |errno| FileAccessError::Seek { errno };
        // A separate open file, whose position the file's other owners do not share.
        let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        let own = open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).map_err(failed)?;
        match seek(&own, SeekFrom::Data(self.offset)) {
            Ok(found) => {
                let offset = found.saturating_sub(self.offset);
                if offset < self.bytes() {
                    return Ok(Some(offset));
                }
            }
            // There is no data from that offset on, or the file ends before it.
            Err(Errno::NXIO) => {}
            Err(errno) => return Err(failed(errno)),
        }
        let status = fstat(&own).map_err(failed)?;
        let is_whole = self.offset == 0
            && u64::try_from(status.st_size).is_ok_and(|size| size <= self.bytes());
        Ok((is_whole && status.st_blocks > 0).then_some(0))
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
        let size = fstat(&self.file).map_or(0, |status| u64::try_from(status.st_size).unwrap_or(0));
        if self.offset.saturating_add(at) >= size {
            FileAccessError::Truncated { at }
        } else {
            FileAccessError::Failed { at }
        }
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests;
