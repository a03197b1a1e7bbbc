//! A guest's initial memory in a file: the guest's memory byte for byte, its regions one after the other, with
//! holes where nothing was loaded.

use std::fs::File;
use std::io::{self, IoSliceMut};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use pagetide_memory::GuestAddress;
use pagetide_pager::{BlockingSource, Filled, ReadAt, Room, SourceError};
use rustix::fs::SeekFrom;
use rustix::io::{Errno, ReadWriteFlags, preadv2};
use tempfile::{NamedTempFile, TempPath};

use super::image::is_zero;
use super::layout::RamLayout;

/// A content file cannot be made or used.
#[derive(Debug, thiserror::Error)]
#[error("content file {}", path.display())]
pub struct ContentError {
    /// The file, or the directory for a temporary one.
    pub path: PathBuf,
    /// The reason.
    #[source]
    pub problem: ContentProblem,
}

/// Why a content file cannot be made or used.
#[derive(Debug, thiserror::Error)]
pub enum ContentProblem {
    /// The file cannot be opened, made, read or written.
    #[error(transparent)]
    File(io::Error),
    /// It is no regular file.
    #[error("not a regular file")]
    NotAFile,
    /// It has another size than the guest's memory.
    #[error("{found} bytes, and the guest's memory has {wanted}: it was made for another guest")]
    WrongSize {
        /// Its size in bytes.
        found: u64,
        /// The memory's size in bytes.
        wanted: u64,
    },
    /// It was made with another kernel, initrd, command line or number of processors.
    #[error(
        "what it holds at gpa {gpa} is not this kernel, initrd and command line: it was made for another \
         guest"
    )]
    Differs {
        /// Where the first piece begins that differs.
        gpa: GuestAddress,
    },
}

/// The file with a guest's initial memory.
#[derive(Debug)]
pub struct ContentFile {
    file: Arc<File>,
    path: PathBuf,
    kind: Kind,
}

/// How a content file is used.
#[derive(Debug)]
enum Kind {
    /// Written, and deleted when it is closed.
    Temporary,
    /// Written, and renamed to its path when it is complete.
    New { unfinished: TempPath },
    /// It was there: compared with what would be written.
    Existing,
}

impl ContentFile {
    /// A file that is deleted when the guest has ended.
    ///
    /// # Errors
    /// No temporary file can be made.
    pub fn temporary() -> Result<Self, ContentError> {
        let directory = std::env::temp_dir();
        let file = tempfile::tempfile().map_err(failed(&directory))?;
        Ok(Self::new(file, &directory, Kind::Temporary))
    }

    /// A file that is kept, for a guest with `memory_bytes` of memory. A missing file is made, completely or
    /// not at all; an existing one is used as it is.
    ///
    /// # Errors
    /// See [`ContentError`].
    pub fn kept(path: &Path, memory_bytes: u64) -> Result<Self, ContentError> {
        let refused = |problem| {
            let path = path.to_owned();
            ContentError { path, problem }
        };
        // Before it is opened: to open a FIFO would wait for a writer.
        let metadata = match std::fs::metadata(path) {
            Ok(metadata) => metadata,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let directory = match path.parent() {
                    Some(parent) if !parent.as_os_str().is_empty() => parent,
                    _ => Path::new("."),
                };
                let made = NamedTempFile::new_in(directory).map_err(failed(path))?;
                let (file, unfinished) = made.into_parts();
                return Ok(Self::new(file, path, Kind::New { unfinished }));
            }
            Err(error) => return Err(failed(path)(error)),
        };
        if !metadata.is_file() {
            return Err(refused(ContentProblem::NotAFile));
        }
        let file = File::open(path).map_err(failed(path))?;
        let (found, wanted) = (metadata.len(), memory_bytes);
        if found != wanted {
            return Err(refused(ContentProblem::WrongSize { found, wanted }));
        }
        Ok(Self::new(file, path, Kind::Existing))
    }

    fn new(file: File, path: &Path, kind: Kind) -> Self {
        Self {
            file: Arc::new(file),
            path: path.to_owned(),
            kind,
        }
    }

    /// Loads `bytes` at a gpa below the first region's end. An existing file must have them already.
    pub(super) fn load(&self, gpa: u64, bytes: &[u8]) -> Result<(), ContentError> {
        let failed = failed(&self.path);
        if !matches!(self.kind, Kind::Existing) {
            // Zeroes stay a hole.
            if is_zero(bytes) {
                return Ok(());
            }
            return self.file.write_all_at(bytes, gpa).map_err(failed);
        }
        let mut found = vec![0; bytes.len()];
        self.file.read_exact_at(&mut found, gpa).map_err(failed)?;
        if found == bytes {
            return Ok(());
        }
        let (path, gpa) = (self.path.clone(), GuestAddress(gpa));
        let problem = ContentProblem::Differs { gpa };
        Err(ContentError { path, problem })
    }

    /// Everything is loaded: makes the file as large as the memory, and renames a new one to its path.
    pub(super) fn finish(self, layout: RamLayout) -> Result<Content, ContentError> {
        let Self { file, path, kind } = self;
        if !matches!(kind, Kind::Existing) {
            file.set_len(layout.bytes()).map_err(failed(&path))?;
        }
        if let Kind::New { unfinished } = kind {
            let named = unfinished.persist_noclobber(&path);
            named.map_err(|error| failed(&path)(error.error))?;
        }
        Ok(Content { file, layout })
    }
}

/// For `map_err`, of an operation on the file.
fn failed(path: &Path) -> impl Fn(io::Error) -> ContentError + use<> {
    let path = path.to_owned();
    move |source| ContentError {
        path: path.clone(),
        problem: ContentProblem::File(source),
    }
}

/// A content file as the pager's source.
#[derive(Debug)]
pub(super) struct Content {
    file: Arc<File>,
    layout: RamLayout,
}

impl Content {
    fn fill(&self, gpa: GuestAddress, buffer: &mut [u8]) -> io::Result<Filled> {
        self.fill_by(gpa, buffer, |file, buffer, offset| {
            file.read_exact_at(buffer, offset)
        })
    }

    /// The same, if that needs no waiting for a disk.
    fn fill_now(&self, gpa: GuestAddress, buffer: &mut [u8]) -> io::Result<Filled> {
        self.fill_by(gpa, buffer, |file, buffer, offset| {
            let wanted = buffer.len();
            let mut part = [IoSliceMut::new(buffer)];
            match preadv2(file, &mut part, offset, ReadWriteFlags::NOWAIT) {
                Ok(bytes) if bytes == wanted => Ok(()),
                // Part of it is in the page cache: the rest would have to be waited for.
                Ok(_) => Err(Errno::AGAIN.into()),
                // A file system that cannot tell, such as one in memory.
                Err(Errno::OPNOTSUPP) => file.read_exact_at(buffer, offset),
                Err(errno) => Err(errno.into()),
            }
        })
    }

    fn fill_by(
        &self,
        gpa: GuestAddress,
        buffer: &mut [u8],
        read: impl FnOnce(&File, &mut [u8], u64) -> io::Result<()>,
    ) -> io::Result<Filled> {
        let outside = || io::Error::from(io::ErrorKind::UnexpectedEof);
        let offset = self.layout.offset_of(gpa).ok_or_else(outside)?;
        let end = offset + buffer.len() as u64;
        let is_hole = match rustix::fs::seek(&*self.file, SeekFrom::Data(offset)) {
            Ok(data) => data >= end,
            // No more data up to the present end of the file.
            Err(Errno::NXIO) => true,
            Err(errno) => return Err(errno.into()),
        };
        if !is_hole {
            read(&self.file, buffer, offset)?;
            return Ok(Filled::Bytes);
        }
        if self.file.metadata()?.len() < end {
            return Err(outside());
        }
        Ok(Filled::Zero)
    }
}

impl BlockingSource for Content {
    fn read(&self, at: ReadAt, buffer: &mut [u8]) -> Result<Filled, SourceError> {
        let unavailable = |error: io::Error| SourceError::Unavailable(error.into());
        self.fill(at.gpa, buffer).map_err(unavailable)
    }

    /// What the page cache has is installed by the thread that faults, with no other thread on the way.
    fn fill_now(&self, at: ReadAt, room: &mut Room<'_>) -> Option<Filled> {
        Self::fill_now(self, at.gpa, room.buffer()?).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const LOW: u64 = 3 << 30;

    #[test]
    fn loaded_memory_is_read_and_the_rest_is_zero() {
        let layout = RamLayout::new(LOW + MIB);
        let file = ContentFile::temporary().unwrap();
        file.load(0x5000, b"loaded").unwrap();
        let content = file.finish(layout).unwrap();
        let mut page = vec![7; 4096];
        assert_eq!(
            content.fill(GuestAddress(0x5000), &mut page).unwrap(),
            Filled::Bytes
        );
        assert_eq!((&page[..6], &page[6..8]), (&b"loaded"[..], &[0, 0][..]));
        // Memory continues at 4 GiB, and the file where the first part ends.
        content.file.write_all_at(b"high", LOW).unwrap();
        assert_eq!(
            content.fill(GuestAddress(4 << 30), &mut page).unwrap(),
            Filled::Bytes
        );
        assert_eq!(&page[..4], b"high");
        for hole in [GuestAddress(MIB), GuestAddress((4 << 30) + MIB - 4096)] {
            assert_eq!(
                content.fill(hole, &mut page).unwrap(),
                Filled::Zero,
                "{hole}"
            );
        }
        for outside in [GuestAddress(LOW), GuestAddress((4 << 30) + MIB)] {
            assert!(content.fill(outside, &mut page).is_err(), "{outside}");
        }
    }

    #[test]
    fn a_file_that_was_truncated_is_no_hole() {
        let content = ContentFile::temporary()
            .unwrap()
            .finish(RamLayout::new(MIB))
            .unwrap();
        let mut page = vec![0; 4096];
        content.file.set_len(8192).unwrap();
        assert_eq!(
            content.fill(GuestAddress(4096), &mut page).unwrap(),
            Filled::Zero
        );
        assert!(content.fill(GuestAddress(8192), &mut page).is_err());
    }

    #[test]
    fn a_kept_file_is_made_completely_and_used_again() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("content");
        let made = ContentFile::kept(&path, MIB).unwrap();
        made.load(0x1000, b"kernel").unwrap();
        assert!(!path.exists(), "it is not complete yet");
        made.finish(RamLayout::new(MIB)).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().len(), MIB);

        let used = ContentFile::kept(&path, MIB).unwrap();
        used.load(0x1000, b"kernel").unwrap();
        let problem = |result: Result<_, ContentError>| result.err().map(|error| error.problem);
        let differs = problem(used.load(0x1000, b"Kernel"));
        assert!(
            matches!(
                differs,
                Some(ContentProblem::Differs {
                    gpa: GuestAddress(0x1000)
                })
            ),
            "{differs:?}"
        );
        used.finish(RamLayout::new(MIB)).unwrap();
        let kept = |path: &Path, bytes| problem(ContentFile::kept(path, bytes).map(|_| ()));
        let wrong = kept(&path, 2 * MIB);
        assert!(
            matches!(wrong, Some(ContentProblem::WrongSize { found: MIB, .. })),
            "{wrong:?}"
        );
        let no_file = kept(directory.path(), MIB);
        assert!(
            matches!(no_file, Some(ContentProblem::NotAFile)),
            "{no_file:?}"
        );
        let nowhere = kept(&directory.path().join("no/file"), MIB);
        assert!(
            matches!(nowhere, Some(ContentProblem::File(_))),
            "{nowhere:?}"
        );
    }

    #[test]
    fn an_unfinished_file_is_deleted() {
        let directory = tempfile::tempdir().unwrap();
        let made = ContentFile::kept(&directory.path().join("content"), MIB).unwrap();
        made.load(0, b"some").unwrap();
        drop(made);
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
    }
}
