//! What guest memory holds when the guest starts, in a file: the guest's memory byte for byte, its
//! regions one after the other, with holes where nothing was loaded.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use pagetide_memory::GuestAddress;
use pagetide_pager::{BlockingSource, Filled, ReadAt, SourceError};
use rustix::fs::SeekFrom;
use tempfile::{NamedTempFile, TempPath};

use super::layout::RamLayout;

/// Why a content file cannot be had or used.
#[derive(Debug, thiserror::Error)]
pub enum ContentError {
    /// No file for content that is not kept.
    #[error("no temporary file in {} for what guest memory holds", directory.display())]
    Temporary {
        /// Where temporary files are made.
        directory: PathBuf,
        /// What the system says.
        #[source]
        source: io::Error,
    },
    /// The file cannot be opened, made or read.
    #[error("content file {}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What the system says.
        #[source]
        source: io::Error,
    },
    /// There is something else.
    #[error("content file {} is not a regular file", path.display())]
    NotAFile {
        /// The file.
        path: PathBuf,
    },
    /// It was made for a guest with other memory.
    #[error(
        "content file {} has {found} bytes, and the guest's memory {wanted}: it was made for another guest",
        path.display()
    )]
    WrongSize {
        /// The file.
        path: PathBuf,
        /// Its size in bytes.
        found: u64,
        /// The memory's size in bytes.
        wanted: u64,
    },
    /// It was made for another kernel, initrd, command line or number of processors.
    #[error(
        "content file {} holds something else at gpa {gpa} than this kernel, initrd and command line: \
         it was made for another guest",
        path.display()
    )]
    Differs {
        /// The file.
        path: PathBuf,
        /// Where the piece begins that differs.
        gpa: GuestAddress,
    },
}

/// The file with what guest memory holds when the guest starts.
#[derive(Debug)]
pub struct ContentFile {
    file: Arc<File>,
    path: PathBuf,
    fate: Fate,
}

/// What is done with a content file.
#[derive(Debug)]
enum Fate {
    /// It is written, and gone when nobody has it open any more.
    Temporary,
    /// It is written, and gets its name when it is whole.
    Kept { unfinished: TempPath },
    /// It was there: what would be written is compared.
    Compared,
}

impl ContentFile {
    /// A file that is gone when the guest is.
    ///
    /// # Errors
    /// [`ContentError::Temporary`].
    pub fn temporary() -> Result<Self, ContentError> {
        let directory = std::env::temp_dir();
        match tempfile::tempfile() {
            Ok(file) => Ok(Self::new(file, &directory, Fate::Temporary)),
            Err(source) => Err(ContentError::Temporary { directory, source }),
        }
    }

    /// A file that is kept. If it is missing it is made, whole or not at all; if it is there it is used as
    /// it is, for a guest with `memory_bytes` of memory.
    ///
    /// # Errors
    /// [`ContentError`]; of a file that is there, also that its size is not that of the memory.
    pub fn kept(path: &Path, memory_bytes: u64) -> Result<Self, ContentError> {
        let failed = |source| {
            let path = path.to_owned();
            ContentError::File { path, source }
        };
        match std::fs::metadata(path) {
            Ok(found) if !found.is_file() => {
                let path = path.to_owned();
                return Err(ContentError::NotAFile { path });
            }
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let directory = match path.parent() {
                    Some(parent) if !parent.as_os_str().is_empty() => parent,
                    _ => Path::new("."),
                };
                let made = NamedTempFile::new_in(directory).map_err(failed)?;
                let (file, unfinished) = made.into_parts();
                return Ok(Self::new(file, path, Fate::Kept { unfinished }));
            }
            Err(error) => return Err(failed(error)),
        }
        let file = File::open(path).map_err(failed)?;
        let found = file.metadata().map_err(failed)?.len();
        if found != memory_bytes {
            let (path, wanted) = (path.to_owned(), memory_bytes);
            return Err(ContentError::WrongSize {
                path,
                found,
                wanted,
            });
        }
        Ok(Self::new(file, path, Fate::Compared))
    }

    fn new(file: File, path: &Path, fate: Fate) -> Self {
        Self {
            file: Arc::new(file),
            path: path.to_owned(),
            fate,
        }
    }

    fn failed(&self, source: io::Error) -> ContentError {
        let path = self.path.clone();
        ContentError::File { path, source }
    }

    /// Loads `bytes` at a gpa below the first region's end. In a file that was there they must be already.
    pub(super) fn load(&self, gpa: u64, bytes: &[u8]) -> Result<(), ContentError> {
        if !matches!(self.fate, Fate::Compared) {
            return self
                .file
                .write_all_at(bytes, gpa)
                .map_err(|source| self.failed(source));
        }
        let mut found = vec![0; bytes.len()];
        self.file
            .read_exact_at(&mut found, gpa)
            .map_err(|source| self.failed(source))?;
        if found != bytes {
            let (path, gpa) = (self.path.clone(), GuestAddress(gpa));
            return Err(ContentError::Differs { path, gpa });
        }
        Ok(())
    }

    /// Everything is loaded: makes the file as large as the memory, and gives one that is kept its name.
    pub(super) fn finish(self, layout: RamLayout) -> Result<Content, ContentError> {
        if !matches!(self.fate, Fate::Compared) {
            self.file
                .set_len(layout.bytes())
                .map_err(|source| self.failed(source))?;
        }
        let Self { file, path, fate } = self;
        if let Fate::Kept { unfinished } = fate {
            unfinished.persist_noclobber(&path).map_err(|error| {
                let source = error.error;
                ContentError::File { path, source }
            })?;
        }
        Ok(Content { file, layout })
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
        let outside = || io::Error::from(io::ErrorKind::UnexpectedEof);
        let offset = self.layout.offset_of(gpa).ok_or_else(outside)?;
        let end = offset + buffer.len() as u64;
        let is_hole = match rustix::fs::seek(&*self.file, SeekFrom::Data(offset)) {
            Ok(data) => data >= end,
            // No more data up to the end of the file, wherever that is by now.
            Err(rustix::io::Errno::NXIO) => true,
            Err(errno) => return Err(errno.into()),
        };
        if !is_hole {
            self.file.read_exact_at(buffer, offset)?;
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
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const LOW: u64 = 3 << 30;

    #[test]
    fn what_was_loaded_is_read_and_the_rest_is_zero() {
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
        // Memory goes on at 4 GiB, and the file where the first part ends.
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
    fn a_file_that_was_cut_off_is_no_hole() {
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
    fn a_kept_file_is_made_whole_and_used_again() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("content");
        let made = ContentFile::kept(&path, MIB).unwrap();
        made.load(0x1000, b"kernel").unwrap();
        assert!(!path.exists(), "it is not whole yet");
        made.finish(RamLayout::new(MIB)).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().len(), MIB);

        let used = ContentFile::kept(&path, MIB).unwrap();
        used.load(0x1000, b"kernel").unwrap();
        let differs = used.load(0x1000, b"Kernel");
        assert!(matches!(
            differs,
            Err(ContentError::Differs {
                gpa: GuestAddress(0x1000),
                ..
            })
        ));
        used.finish(RamLayout::new(MIB)).unwrap();
        let wrong = ContentFile::kept(&path, 2 * MIB);
        assert!(
            matches!(wrong, Err(ContentError::WrongSize { found: MIB, .. })),
            "{wrong:?}"
        );
        let no_file = ContentFile::kept(directory.path(), MIB);
        assert!(
            matches!(no_file, Err(ContentError::NotAFile { .. })),
            "{no_file:?}"
        );
        let nowhere = ContentFile::kept(&directory.path().join("no/file"), MIB);
        assert!(
            matches!(nowhere, Err(ContentError::File { .. })),
            "{nowhere:?}"
        );
    }

    #[test]
    fn what_was_not_finished_leaves_no_file() {
        let directory = tempfile::tempdir().unwrap();
        let made = ContentFile::kept(&directory.path().join("content"), MIB).unwrap();
        made.load(0, b"some").unwrap();
        drop(made);
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
    }
}
