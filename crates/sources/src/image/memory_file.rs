//! A raw memory file that becomes an image: its content, and which of it are holes.

use std::io;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use pagetide_memory::Urgency;
use rustix::fs::{SeekFrom, fstatfs, seek};
use rustix::io::Errno;

use super::layers::Head;
use crate::blob::{Blob, BlobError};
use crate::file::FileBlob;
use crate::foreign::{NotMemory, check_kind};
use crate::open::OpenError;

/// The bytes of the smallest hole: a page.
const LEAST_HOLE: u64 = 4096;

/// f_type of tmpfs.
const TMPFS: u32 = 0x0102_1994;

/// What the holes of a file can say of the pages that nobody has written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HoleMap {
    /// Each page that was not written is a hole.
    Exact,
    /// There is no hole.
    None,
    /// The file has holes, and its file system names none.
    Hidden,
    /// The file system gives space in such pieces, and a page that was written takes its neighbours with it.
    Coarse {
        /// The bytes of a piece.
        bytes: u64,
    },
}

/// A raw memory file. Each thread has one of its own: a search for holes moves the file's offset.
#[derive(Debug)]
pub(crate) struct MemoryFile {
    blob: FileBlob,
    seekable: fs_err::File,
}

impl MemoryFile {
    pub(crate) fn open(path: &Path) -> Result<Self, BlobError> {
        let blob = FileBlob::open(path)?;
        let seekable = blob.opened_again()?;
        Ok(Self { blob, seekable })
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.blob.bytes()
    }

    /// Whether it is a Pagetide image.
    ///
    /// # Errors
    /// As [`Blob::read_at`].
    pub(crate) fn is_image(&self) -> Result<bool, OpenError> {
        Head::read(&self.blob).map(|head| head.is_image())
    }

    /// Whether it can be guest memory.
    ///
    /// # Errors
    /// As [`Blob::read_at`].
    pub(crate) fn check_kind(&self) -> Result<Result<(), NotMemory>, OpenError> {
        let head = Head::read(&self.blob)?;
        Ok(check_kind(self.bytes(), head.bytes()))
    }

    /// The permissions of its file.
    ///
    /// # Errors
    /// [`BlobError`].
    pub(crate) fn mode(&self) -> Result<u32, BlobError> {
        let status = self.seekable.metadata();
        let status = status.map_err(|error| self.failed(error))?;
        Ok(status.mode() & 0o777)
    }

    fn failed(&self, error: io::Error) -> BlobError {
        BlobError::io(self.blob.name().to_owned(), error)
    }

    /// Which file it is, its length and the time of its last change: equal as long as nobody writes to it.
    ///
    /// # Errors
    /// [`BlobError`].
    pub(crate) fn state(&self) -> Result<impl PartialEq + use<>, BlobError> {
        let status = self.seekable.metadata();
        let status = status.map_err(|error| self.failed(error))?;
        Ok((
            (status.dev(), status.ino(), status.len()),
            (status.mtime(), status.mtime_nsec()),
        ))
    }

    /// What its holes can say.
    ///
    /// # Errors
    /// [`BlobError`].
    pub(crate) fn hole_map(&self) -> Result<HoleMap, BlobError> {
        let status = self.seekable.metadata();
        let status = status.map_err(|error| self.failed(error))?;
        let first = match seek(&self.seekable, SeekFrom::Hole(0)) {
            Ok(hole) => hole,
            // An empty file.
            Err(Errno::NXIO) => 0,
            Err(Errno::INVAL | Errno::OPNOTSUPP) => status.len(),
            Err(errno) => return Err(self.failed(errno.into())),
        };
        if are_hidden(status.len(), status.blocks(), first) {
            return Ok(HoleMap::Hidden);
        }
        if first >= status.len() {
            return Ok(HoleMap::None);
        }
        let bytes = status.blksize();
        let is_coarse =
            bytes > LEAST_HOLE && (self.is_on_tmpfs() || !self.has_finer_edge(bytes)?);
        Ok(match is_coarse {
            true => HoleMap::Coarse { bytes },
            false => HoleMap::Exact,
        })
    }

    /// tmpfs with huge pages mixes them with small ones: an edge between small ones says nothing of the others.
    fn is_on_tmpfs(&self) -> bool {
        let system = fstatfs(&self.seekable);
        system.is_ok_and(|system| u32::try_from(system.f_type).is_ok_and(|kind| kind == TMPFS))
    }

    /// Whether data begins or ends inside a piece of `bytes` bytes, which shows that the file system tells pages apart;
    /// a network's file system names the size of its transfers. True without any data, too.
    fn has_finer_edge(&self, bytes: u64) -> Result<bool, BlobError> {
        let (mut at, mut has_data) = (0, false);
        let is_finer = |edge: u64| !edge.is_multiple_of(bytes) && edge < self.bytes();
        loop {
            let begin = match seek(&self.seekable, SeekFrom::Data(at)) {
                Ok(begin) => begin,
                Err(Errno::NXIO) => return Ok(!has_data),
                Err(errno) => return Err(self.failed(errno.into())),
            };
            let end = seek(&self.seekable, SeekFrom::Hole(begin));
            let end = end.map_err(|errno| self.failed(errno.into()))?;
            if is_finer(begin) || is_finer(end) {
                return Ok(true);
            }
            if end <= at {
                return Ok(false);
            }
            (at, has_data) = (end, true);
        }
    }

    /// Fills the buffer from `offset` on, holes with zeroes; puts the ranges of the buffer that are data
    /// into `data`.
    ///
    /// # Errors
    /// [`BlobError`].
    pub(crate) fn read(
        &self,
        offset: u64,
        buffer: &mut [u8],
        data: &mut Vec<Range<usize>>,
    ) -> Result<(), BlobError> {
        data.clear();
        let end = offset + buffer.len() as u64;
        let within = |at: u64| usize::try_from(at - offset).unwrap_or(buffer.len());
        let mut at = offset;
        while at < end {
            let begin = match seek(&self.seekable, SeekFrom::Data(at)) {
                Ok(begin) if begin < end => begin,
                // Only a hole is left.
                Ok(_) | Err(Errno::NXIO) => break,
                Err(Errno::INVAL | Errno::OPNOTSUPP) => at,
                Err(errno) => return Err(self.failed(errno.into())),
            };
            let hole = match seek(&self.seekable, SeekFrom::Hole(begin)) {
                Ok(hole) if hole > begin => hole.min(end),
                Ok(_) | Err(Errno::INVAL | Errno::OPNOTSUPP) => end,
                Err(errno) => return Err(self.failed(errno.into())),
            };
            data.push(within(begin)..within(hole));
            at = hole;
        }
        match data.is_empty() {
            true => buffer.fill(0),
            false => self.blob.read_at(offset, buffer, Urgency::Bulk)?,
        }
        Ok(())
    }
}

/// Whether a file of `bytes` bytes, which occupies `blocks` blocks of 512 bytes, has holes although the
/// first that its file system names is its end.
fn are_hidden(bytes: u64, blocks: u64, first: u64) -> bool {
    let occupied = blocks.saturating_mul(512);
    occupied.saturating_add(LEAST_HOLE) <= bytes && first >= bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hidden_holes_are_noticed() {
        let cases = [
            // Bytes, blocks, the first hole: without holes, with a named hole, with a hidden one.
            (1 << 20, 2048, 1 << 20, false),
            (1 << 20, 2056, 1 << 20, false),
            ((1 << 20) - 100, 2048, (1 << 20) - 100, false),
            (1 << 20, 1024, 8192, false),
            (1 << 20, 0, 0, false),
            (0, 0, 0, false),
            (100, 0, 100, false),
            (1 << 20, 1024, 1 << 20, true),
            (1 << 20, 2040, 1 << 20, true),
            (1 << 20, 0, 1 << 20, true),
        ];
        for (bytes, blocks, first, wanted) in cases {
            assert_eq!(
                are_hidden(bytes, blocks, first),
                wanted,
                "{bytes} {blocks} {first}"
            );
        }
    }
}
