//! A local file.

use std::fmt;
use std::fs::Metadata;
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use fs_err::File;
use pagetide_memory::{HostRange, Urgency};
use rustix::fs::{SeekFrom, fstatfs, seek};
use rustix::io::{Errno, ReadWriteFlags, preadv2};
use serde::{Deserialize, Serialize};

use crate::blob::{Blob, BlobError};
use crate::mapped_file::MappedFile;

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
        let device = status.dev();
        let is_made_up = rustix::fs::major(device) == 0;
        Self {
            device: if is_made_up { 0 } else { device },
            inode: status.ino(),
            bytes: status.len(),
            modified_s: status.mtime(),
            modified_ns: status.mtime_nsec(),
        }
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

/// A local file, opened for reading.
#[derive(Debug)]
pub struct FileBlob {
    file: File,
    name: String,
    bytes: u64,
    identity: FileIdentity,
    is_in_memory: bool,
    mapped: Option<MappedFile>,
}

impl FileBlob {
    /// Opens a regular file.
    ///
    /// # Errors
    /// [`BlobError::NotFound`], [`BlobError::Forbidden`]; [`BlobError::Failed`] if it is no regular file.
    pub fn open(path: &Path) -> Result<Self, BlobError> {
        let name = path.display().to_string();
        let failed = |error| BlobError::io(path.display().to_string(), error);
        let file = File::open(path).map_err(failed)?;
        let status = file.metadata().map_err(failed)?;
        if !status.is_file() {
            let what = io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file");
            return Err(BlobError::io(name, what));
        }
        let is_in_memory = fstatfs(&file).is_ok_and(|system| {
            u32::try_from(system.f_type).is_ok_and(|kind| IN_MEMORY.contains(&kind))
        });
        Ok(Self {
            bytes: status.len(),
            identity: FileIdentity::of(&status),
            mapped: MappedFile::new(file.file(), status.len()),
            file,
            name,
            is_in_memory,
        })
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
        Some(self.identity)
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
