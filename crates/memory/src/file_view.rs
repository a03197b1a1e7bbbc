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

/// Why a file is not mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum FileViewError {
    /// The file is no memory file. A touch of another one may block for as long as its server likes.
    #[error("the file is neither a memfd nor a file of tmpfs or hugetlbfs")]
    NotMemory,
    /// The file is made of other pages.
    #[error("the file is made of pages of {file_bytes} bytes, not {page_size}")]
    OtherPages {
        /// The page size that was given.
        page_size: PageSize,
        /// The file's, in bytes.
        file_bytes: u64,
    },
    /// No bytes, or not whole pages.
    #[error("{bytes} bytes at offset {offset} are not whole {page_size} pages")]
    NotPageMultiple {
        /// Where in the file it would begin.
        offset: u64,
        /// Its length in bytes.
        bytes: u64,
        /// The page size that both must be multiples of.
        page_size: PageSize,
    },
    /// The file is not that long.
    #[error("{bytes} bytes at offset {offset} are not in a file of {file_bytes} bytes")]
    OutsideFile {
        /// Where in the file it would begin.
        offset: u64,
        /// Its length in bytes.
        bytes: u64,
        /// The file's length in bytes.
        file_bytes: u64,
    },
    /// The kernel does not say what the file is.
    #[error("asking what the file is")]
    Ask {
        /// What the kernel said.
        #[source]
        errno: Errno,
    },
    /// The kernel does not map it: it is sealed against writing, or open for reading only.
    #[error("mapping {bytes} bytes at offset {offset} of the file")]
    Map {
        /// Where in the file it would begin.
        offset: u64,
        /// Its length in bytes.
        bytes: u64,
        /// What the kernel said.
        #[source]
        errno: Errno,
    },
}

/// Why the file could not be read or written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum FileAccessError {
    /// The access would leave the view.
    #[error("{len} bytes at offset {offset} are not all in a view of {bytes} bytes")]
    Outside {
        /// Where in the view it would begin.
        offset: u64,
        /// Bytes to access.
        len: u64,
        /// The length of the view in bytes.
        bytes: u64,
    },
    /// The file's owner has made it shorter. What was to be copied is copied in part.
    #[error("the file ends before offset {at} of the view")]
    Truncated {
        /// The byte of the view that is not there any more.
        at: u64,
    },
    /// The memory has an uncorrected error, or there is no huge page left. What was to be copied is
    /// copied in part.
    #[error("no access to the memory at offset {at} of the view")]
    Failed {
        /// The byte of the view that failed.
        at: u64,
    },
    /// What the file holds could not be found out.
    #[error("looking for what the file holds")]
    Seek {
        /// What the kernel said.
        #[source]
        errno: Errno,
    },
    /// Giving memory back failed.
    #[error("punching out {len} bytes at offset {offset}")]
    Punch {
        /// Where in the view.
        offset: u64,
        /// How many bytes.
        len: u64,
        /// What the kernel said.
        #[source]
        errno: Errno,
    },
}

/// A mapping of a part of a memory file that another process has made, so that its pages can be
/// filled from here: a service mapping of somebody else's region. All offsets are in bytes from the
/// start of that part.
///
/// The file's other owners are not trusted. They may write to it at any time, so what is read may be
/// anything; and they may truncate it. Then copies fail with [`FileAccessError::Truncated`], if the
/// process has a handler of SIGBUS that takes threads out of copies ([`crate::guard`]), for errors
/// with the code `BUS_ADRERR` too. Without one, SIGBUS ends the process.
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
    /// Maps `bytes` bytes of `file` from `offset` on, both multiples of `page_size`, the size of the
    /// pages that the file is made of. Populates nothing. It is not necessary that the file is sealed.
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
        // Congruent to the file, so that huge pages in it can be mapped as such.
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
        // process accesses by guarded copies only: check found the span within the view, which the
        // mapping covers for as long as self lives and which nothing else here can reach. Where the
        // file ends early the access is a signal, which the copy is made for.
        unsafe { copy_in(self.mapping.as_ptr().wrapping_add(at), bytes) }
            .map_err(|failure| self.failed(failure))
    }

    /// Reads into `bytes` from `offset` on. A page that was never written reads as zeroes, and is in
    /// the file then.
    pub fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), FileAccessError> {
        let at = self.check(offset, to_u64(bytes.len()))?;
        // SAFETY: as in write, the other way round.
        unsafe { copy_out(self.mapping.as_ptr().wrapping_add(at), bytes) }
            .map_err(|failure| self.failed(failure))
    }

    /// Writes `len` zeroes at `offset`. Whole pages are in the file then, unlike after
    /// [`Self::punch`].
    pub fn zero(&self, offset: u64, len: u64) -> Result<(), FileAccessError> {
        let at = self.check(offset, len)?;
        // SAFETY: as in write.
        unsafe { fill_zeroes(self.mapping.as_ptr().wrapping_add(at), to_usize(len)) }
            .map_err(|failure| self.failed(failure))
    }

    /// Gives `len` bytes at `offset`, whole pages, back to the host: a hole in the file, for everybody
    /// who has mapped it.
    pub fn punch(&self, offset: u64, len: u64) -> Result<(), FileAccessError> {
        self.check(offset, len)?;
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        // check has found offset within the view, whose end in the file does not wrap.
        fallocate(&self.file, flags, self.offset + offset, len)
            .map_err(|errno| FileAccessError::Punch { offset, len, errno })
    }

    /// The offset of a page that the file has, the first one that was written if there is one.
    ///
    /// Of hugetlbfs nothing is found. Pages that fallocate has reserved and nobody has written are found
    /// only if the view is of the whole file, and then the first page stands for them: the kernel counts
    /// them, and does not say where they are.
    pub fn find_content(&self) -> Result<Option<u64>, FileAccessError> {
        if self.is_hugetlb {
            return Ok(None);
        }
        let failed = |errno| FileAccessError::Seek { errno };
        // An open file of its own, with a position that the file's other owners do not share.
        let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        let own = open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).map_err(failed)?;
        match seek(&own, SeekFrom::Data(self.offset)) {
            Ok(found) => {
                let offset = found.saturating_sub(self.offset);
                if offset < self.bytes() {
                    return Ok(Some(offset));
                }
            }
            // Nothing from there on, or the file ends before.
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
