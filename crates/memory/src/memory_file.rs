//! A part of a memory file that another process created.

use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{
    FallocateFlags, FileType, Mode, OFlags, SeekFrom, fallocate, fstat, fstatfs, open, seek,
};
use rustix::io::Errno;
use thiserror::Error;

use crate::page::PageSize;

/// `TMPFS_MAGIC` of `linux/magic.h`, the file system of memfds.
const TMPFS: u64 = 0x0102_1994;
/// `HUGETLBFS_MAGIC`.
const HUGETLBFS: u64 = 0x9584_58f6;

/// Why a file cannot be used as memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum MemoryFileError {
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
    /// The part is empty, or not a whole number of pages.
    #[error("{bytes} bytes at offset {offset} are not whole {page_size} pages")]
    NotPageMultiple {
        /// The part's offset in the file.
        offset: u64,
        /// The part's length in bytes.
        bytes: u64,
        /// The page size that both must be multiples of.
        page_size: PageSize,
    },
    /// The part ends after the end of the file.
    #[error("{bytes} bytes at offset {offset} are not in a file of {file_bytes} bytes")]
    OutsideFile {
        /// The part's offset in the file.
        offset: u64,
        /// The part's length in bytes.
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
}

/// Why the content of a memory file could not be found or discarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum MemoryFileAccessError {
    /// The kernel could not report which parts of the file have content.
    #[error("looking for content in the file")]
    Seek {
        /// The kernel's error.
        #[source]
        errno: Errno,
    },
    /// Punching a hole into the file failed: for example, it is open for reading only.
    #[error("punching a hole of {bytes} bytes at offset {offset}")]
    Punch {
        /// The offset in the part.
        offset: u64,
        /// The length in bytes.
        bytes: u64,
        /// The kernel's error.
        #[source]
        errno: Errno,
    },
    /// The hole does not lie within the part.
    #[error("{bytes} bytes at offset {offset} are not all in a part of {part_bytes} bytes")]
    Outside {
        /// The offset in the part.
        offset: u64,
        /// The length in bytes.
        bytes: u64,
        /// The length of the part in bytes.
        part_bytes: u64,
    },
}

/// Whole pages of a memory file (a memfd, or a file of tmpfs or hugetlbfs) that another process created. This
/// process does not map it. Offsets are in bytes from the start of the part.
///
/// The file's other owners are not trusted: they may write to it, and truncate it, at any time.
#[derive(Debug)]
pub struct MemoryFile {
    file: OwnedFd,
    offset: u64,
    bytes: u64,
    page_size: PageSize,
    inode: Inode,
}

/// A file, whatever its names and descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Inode {
    device: u64,
    number: u64,
}

impl MemoryFile {
    /// The part of `bytes` bytes of `file` from `offset` on, both multiples of `page_size`, the file's page
    /// size. The file need not be sealed.
    pub fn new(
        file: OwnedFd,
        offset: u64,
        bytes: u64,
        page_size: PageSize,
    ) -> Result<Self, MemoryFileError> {
        let ask = |errno| MemoryFileError::Ask { errno };
        let status = fstat(&file).map_err(ask)?;
        if FileType::from_raw_mode(status.st_mode) != FileType::RegularFile {
            return Err(MemoryFileError::NotMemory);
        }
        let system = fstatfs(&file).map_err(ask)?;
        let file_page = match u64::try_from(system.f_type) {
            Ok(TMPFS) => PageSize::Size4K.bytes(),
            Ok(HUGETLBFS) => u64::try_from(system.f_bsize).unwrap_or(0),
            _ => return Err(MemoryFileError::NotMemory),
        };
        if file_page != page_size.bytes() {
            return Err(MemoryFileError::OtherPages {
                page_size,
                file_bytes: file_page,
            });
        }
        if bytes == 0 || !page_size.divides(offset) || !page_size.divides(bytes) {
            return Err(MemoryFileError::NotPageMultiple {
                offset,
                bytes,
                page_size,
            });
        }
        let file_bytes = u64::try_from(status.st_size).unwrap_or(0);
        if offset.checked_add(bytes).is_none_or(|end| end > file_bytes) {
            return Err(MemoryFileError::OutsideFile {
                offset,
                bytes,
                file_bytes,
            });
        }
        Ok(Self {
            file,
            offset,
            bytes,
            page_size,
            inode: Inode {
                device: status.st_dev,
                number: status.st_ino,
            },
        })
    }

    /// Its length in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Its offset in the file.
    pub(crate) fn offset(&self) -> u64 {
        self.offset
    }

    /// The length of the whole file at this moment.
    pub(crate) fn file_bytes(&self) -> u64 {
        fstat(&self.file).map_or(0, |status| u64::try_from(status.st_size).unwrap_or(0))
    }

    /// Whether both parts have some page of one file in common.
    pub fn overlaps(&self, other: &Self) -> bool {
        self.inode == other.inode
            && self.offset < other.offset + other.bytes
            && other.offset < self.offset + self.bytes
    }

    /// Returns `bytes` bytes at `offset`, whole pages, to the host: punches a hole into the file, which
    /// affects every process that has mapped it.
    pub fn punch(&self, offset: u64, bytes: u64) -> Result<(), MemoryFileAccessError> {
        if offset.checked_add(bytes).is_none_or(|end| end > self.bytes) {
            return Err(MemoryFileAccessError::Outside {
                offset,
                bytes,
                part_bytes: self.bytes,
            });
        }
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        // The part's end in the file does not overflow.
        fallocate(&self.file, flags, self.offset + offset, bytes).map_err(|errno| {
            MemoryFileAccessError::Punch {
                offset,
                bytes,
                errno,
            }
        })
    }

    /// The first bytes from `from` on that are in the file: written, and neither discarded nor truncated
    /// since. The kernel does not say for hugetlbfs: then, and behind the last such bytes, `None`.
    ///
    /// Pages that fallocate has reserved and that were never written are found only if the part is the
    /// whole file and nothing was written: the kernel reports how many pages there are but not which, and the
    /// result is then the whole part.
    pub fn content_from(&self, from: u64) -> Result<Option<Range<u64>>, MemoryFileAccessError> {
        if self.page_size != PageSize::Size4K || from >= self.bytes {
            return Ok(None);
        }
        let failed = |errno| MemoryFileAccessError::Seek { errno };
        // A separate open file, whose position the file's other owners do not share.
        let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        let own = open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).map_err(failed)?;
        let inside = |at: u64| at.saturating_sub(self.offset).min(self.bytes);
        match seek(&own, SeekFrom::Data(self.offset + from)) {
            Ok(found) if inside(found) < self.bytes => {
                // Every file ends in a hole, also one that was truncated meanwhile.
                let end = match seek(&own, SeekFrom::Hole(found)) {
                    Ok(end) => end,
                    Err(Errno::NXIO) => found + 1,
                    Err(errno) => return Err(failed(errno)),
                };
                return Ok(Some(inside(found)..inside(end)));
            }
            // There is no data from that offset on, or the file ends before it.
            Ok(_) | Err(Errno::NXIO) => {}
            Err(errno) => return Err(failed(errno)),
        }
        if from > 0 {
            return Ok(None);
        }
        let status = fstat(&own).map_err(failed)?;
        let is_whole =
            self.offset == 0 && u64::try_from(status.st_size).is_ok_and(|size| size <= self.bytes);
        Ok((is_whole && status.st_blocks > 0).then_some(0..self.bytes))
    }
}

impl AsFd for MemoryFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests;
