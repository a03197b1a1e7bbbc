//! A local file, and what it is known by.

use std::fmt;
use std::fs::Metadata;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use fs_err::File;
use fs_err::os::unix::fs::OpenOptionsExt;
use pagetide_memory::{HostRange, Urgency};
use rustix::fs::{SeekFrom, fstat, fstatfs, seek};
use rustix::io::{Errno, ReadWriteFlags, preadv2};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use crate::blob::{Blob, BlobError};
use crate::mapped_file::MappedFile;
use crate::standing::Standing;

/// f_type of tmpfs and ramfs, whose content is in memory.
pub(crate) const IN_MEMORY: [u32; 2] = [0x0102_1994, 0x8584_58f6];

/// The maximal number of ranges of data that are told apart. A file with more holes is read as one
/// range.
const MOST_RANGES: usize = 1 << 20;

/// What a file is known by that was neither replaced nor written to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileIdentity {
    /// The number of its device; 0 if the kernel makes one up for each mount (overlayfs, NFS, tmpfs).
    pub device: u64,
    /// Its number in the file system.
    pub inode: u64,
    /// Its length.
    pub bytes: u64,
    /// Seconds of its last modification.
    pub modified_s: i64,
    /// Nanoseconds of that second.
    pub modified_ns: i64,
}

impl FileIdentity {
    fn of(status: &Metadata) -> Self {
        Self {
            device: device(status.dev()),
            inode: status.ino(),
            bytes: status.len(),
            modified_s: status.mtime(),
            modified_ns: status.mtime_nsec(),
        }
    }

    /// That of an open file, by the call that takes least.
    fn of_open(file: BorrowedFd<'_>) -> Result<Self, Errno> {
        let status = fstat(file)?;
        Ok(Self {
            device: device(status.st_dev),
            inode: status.st_ino,
            bytes: u64::try_from(status.st_size).unwrap_or(0),
            modified_s: status.st_mtime,
            modified_ns: i64::try_from(status.st_mtime_nsec).unwrap_or(0),
        })
    }
}

/// A device's number, if it is of the same device tomorrow.
fn device(number: u64) -> u64 {
    match rustix::fs::major(number) {
        0 => 0,
        _ => number,
    }
}

impl fmt::Display for FileIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            device,
            inode,
            bytes,
            modified_s,
            modified_ns,
        } = self;
        write!(
            f,
            "{bytes} bytes, modified at {modified_s}.{modified_ns:09}, inode {inode} of device {device:#x}"
        )
    }
}

/// What a file was when it was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp {
    identity: FileIdentity,
    /// The time of the last change of its status: seconds and nanoseconds. A rename, and another name for the file,
    /// move it, too: it alone does not say that the content has changed.
    changed: (i64, i64),
}

impl Stamp {
    fn of(status: &Metadata) -> Self {
        Self {
            identity: FileIdentity::of(status),
            changed: (status.ctime(), status.ctime_nsec()),
        }
    }

    /// What the file that has the name `now` is to the one that had it.
    fn standing(&self, now: &Self) -> Standing {
        let (before, after) = (self.identity, now.identity);
        if (before.device, before.inode) != (after.device, after.inode) {
            return Standing::Replaced;
        }
        if before != after {
            return Standing::Rewritten { before, now: after };
        }
        // Somebody may have written to it and set the former time. Those who opened it cannot tell that from a
        // change of its mode; opening it anew is right in both cases.
        match self.changed == now.changed {
            true => Standing::Same,
            false => Standing::Replaced,
        }
    }
}

/// The time of the clock that files' times come from; it advances once in a tick of the kernel.
fn tick() -> u64 {
    let now = clock_gettime(ClockId::MonotonicCoarse);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    let nanoseconds = u64::try_from(now.tv_nsec).unwrap_or(0);
    seconds * 1_000_000_000 + nanoseconds
}

/// A local file, opened for reading.
#[derive(Debug)]
pub struct FileBlob {
    file: File,
    path: PathBuf,
    name: String,
    bytes: u64,
    stamp: Stamp,
    /// The tick in which the file was last seen unchanged.
    seen_at: AtomicU64,
    is_in_memory: bool,
    mapped: Option<MappedFile>,
}

impl FileBlob {
    /// Opens a regular file. A pipe or a device is refused, and not waited for.
    ///
    /// # Errors
    /// [`BlobError::NotFound`], [`BlobError::Forbidden`]; [`BlobError::Failed`] if it is no regular file.
    pub fn open(path: &Path) -> Result<Self, BlobError> {
        let name = path.display().to_string();
        let failed = |error| BlobError::io(path.display().to_string(), error);
        let is_file = |status: &Metadata| match status.is_file() {
            true => Ok(()),
            false => Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "it is not a regular file",
            )),
        };
        // Before it is opened, because to open a device may do something; and after, because the name may lead
        // elsewhere by then: to a pipe, whose opening would wait for a writer without O_NONBLOCK.
        is_file(&fs_err::metadata(path).map_err(failed)?).map_err(failed)?;
        let file = fs_err::OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(path)
            .map_err(failed)?;
        let status = file.metadata().map_err(failed)?;
        is_file(&status).map_err(failed)?;
        let is_in_memory = fstatfs(&file).is_ok_and(|system| {
            u32::try_from(system.f_type).is_ok_and(|kind| IN_MEMORY.contains(&kind))
        });
        Ok(Self {
            bytes: status.len(),
            stamp: Stamp::of(&status),
            seen_at: AtomicU64::new(0),
            path: path.to_owned(),
            mapped: MappedFile::new(file.file(), status.len()),
            file,
            name,
            is_in_memory,
        })
    }

    /// The same file with an offset of its own, whatever has its name by now.
    pub(crate) fn opened_again(&self) -> Result<File, BlobError> {
        let link = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        File::open(link).map_err(|error| self.failed(error))
    }

    pub(crate) fn identity(&self) -> FileIdentity {
        self.stamp.identity
    }

    fn whole(&self) -> Vec<Range<u64>> {
        std::iter::once(0..self.bytes).collect()
    }

    fn failed(&self, error: io::Error) -> BlobError {
        BlobError::io(self.name.clone(), error)
    }
}

impl Blob for FileBlob {
    fn name(&self) -> &str {
        &self.name
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8], _: Urgency) -> Result<(), BlobError> {
        let wanted = buffer.len() as u64;
        let mut given = 0;
        while let Some(rest) = buffer.get_mut(given..).filter(|rest| !rest.is_empty()) {
            match self.file.file().read_at(rest, offset + given as u64) {
                Ok(0) => {
                    return Err(BlobError::Short {
                        name: self.name.clone(),
                        offset,
                        given: given as u64,
                        wanted,
                    });
                }
                Ok(bytes) => given += bytes,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.failed(error)),
            }
        }
        Ok(())
    }

    /// Content in the page cache, or of a file system in memory.
    fn read_now(&self, offset: u64, buffer: &mut [u8]) -> bool {
        let flags = match self.is_in_memory {
            true => ReadWriteFlags::empty(),
            false => ReadWriteFlags::NOWAIT,
        };
        let wanted = buffer.len();
        let mut parts = [io::IoSliceMut::new(buffer)];
        // Part of it in the cache: the rest would have to be waited for.
        matches!(preadv2(self.file.as_fd(), &mut parts, offset, flags), Ok(bytes) if bytes == wanted)
    }

    fn file_identity(&self) -> Option<FileIdentity> {
        Some(self.stamp.identity)
    }

    fn mode(&self) -> Option<u32> {
        let status = self.file.metadata();
        status.ok().map(|status| status.mode() & 0o777)
    }

    fn standing(&self) -> Result<Standing, BlobError> {
        let status = fs_err::metadata(&self.path).map_err(|error| self.failed(error))?;
        Ok(self.stamp.standing(&Stamp::of(&status)))
    }

    fn check_unchanged_now(&self) -> Result<(), BlobError> {
        let tick = tick();
        let now = FileIdentity::of_open(self.file.as_fd());
        if now.map_err(|errno| self.failed(errno.into()))? != self.stamp.identity {
            let name = self.name.clone();
            return Err(BlobError::Changed { name });
        }
        self.seen_at.store(tick, Ordering::Relaxed);
        Ok(())
    }

    /// Looks at the file once in a tick of the clock that files' times come from.
    fn check_unchanged_lately(&self) -> Result<(), BlobError> {
        match self.seen_at.load(Ordering::Relaxed) == tick() {
            true => Ok(()),
            false => self.check_unchanged_now(),
        }
    }

    fn mapped(&self, offset: u64, bytes: u64) -> Option<HostRange> {
        self.mapped.as_ref()?.find(offset, bytes)
    }

    fn data(&self) -> Result<Vec<Range<u64>>, BlobError> {
        let mut ranges = Vec::new();
        let mut at = 0;
        while at < self.bytes {
            let start = match seek(&self.file, SeekFrom::Data(at)) {
                Ok(start) => start,
                // Only a hole is left.
                Err(Errno::NXIO) => break,
                Err(Errno::INVAL | Errno::OPNOTSUPP) => return Ok(self.whole()),
                Err(errno) => return Err(self.failed(errno.into())),
            };
            let end = seek(&self.file, SeekFrom::Hole(start)).map_err(|e| self.failed(e.into()))?;
            ranges.push(start..end.min(self.bytes));
            if end <= start || ranges.len() == MOST_RANGES {
                return Ok(self.whole());
            }
            at = end;
        }
        Ok(ranges)
    }
}
