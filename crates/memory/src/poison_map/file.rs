//! Poison maps in files.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use thiserror::Error;

use super::{ParsePoisonError, PoisonMap};

/// Why a poison map could not be read from a file. Do not start a VM whose map cannot be read as if it
/// had no poison.
#[derive(Debug, Error)]
pub enum LoadError {
    /// The file cannot be opened or read.
    #[error("reading the poison map {}", .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The operating system's error.
        #[source]
        source: io::Error,
    },
    /// The path is a directory, a pipe, or the like.
    #[error("the poison map {} is not a regular file", .path.display())]
    NotAFile {
        /// The path.
        path: PathBuf,
    },
    /// The file is longer than the largest map.
    #[error(
        "the poison map {} has more than {} bytes", .path.display(), PoisonMap::MAX_ENCODED_BYTES
    )]
    TooLong {
        /// The file.
        path: PathBuf,
    },
    /// The content is not a poison map.
    #[error("the poison map {}", .path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// Why the content was refused.
        #[source]
        source: ParsePoisonError,
    },
}

/// Why a poison map could not be saved. The file is unchanged.
#[derive(Debug, Error)]
#[error("saving the poison map {}", .path.display())]
pub struct SaveError {
    /// The file.
    pub path: PathBuf,
    /// The operating system's error.
    #[source]
    pub source: io::Error,
}

impl PoisonMap {
    /// Reads a map from a file, whose content is not trusted: reads at most the length of the largest
    /// map, and refuses the map unless all of it is valid.
    pub fn load(path: &Path) -> Result<Self, LoadError> {
        let failed = |source| LoadError::Read {
            path: path.to_owned(),
            source,
        };
        // Opening a pipe must not wait for a writer.
        let flags = (OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY).bits();
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(flags.cast_signed())
            .open(path)
            .map_err(failed)?;
        if !file.metadata().map_err(failed)?.is_file() {
            return Err(LoadError::NotAFile {
                path: path.to_owned(),
            });
        }
        let mut bytes = Vec::new();
        file.take(Self::MAX_ENCODED_BYTES as u64 + 1)
            .read_to_end(&mut bytes)
            .map_err(failed)?;
        if bytes.len() > Self::MAX_ENCODED_BYTES {
            return Err(LoadError::TooLong {
                path: path.to_owned(),
            });
        }
        Self::decode(&bytes).map_err(|source| LoadError::Parse {
            path: path.to_owned(),
            source,
        })
    }

    /// Writes the map to a file. After a crash at any moment the file has either the old or the new
    /// content. The caller serialises calls for the same path.
    pub fn save(&self, path: &Path) -> Result<(), SaveError> {
        self.replace(path).map_err(|source| SaveError {
            path: path.to_owned(),
            source,
        })
    }

    fn replace(&self, path: &Path) -> io::Result<()> {
        let name = path
            .file_name()
            .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidFilename))?;
        let folder = match path.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder,
            _ => Path::new("."),
        };
        let mut new_name = OsString::from(".");
        new_name.push(name);
        new_name.push(format!(".{}.new", std::process::id()));
        let new = folder.join(new_name);
        // A process with the same number may have left this file when it was killed.
        match fs::remove_file(&new) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let written = self
            .write_new(&new)
            .and_then(|()| fs::rename(&new, path))
            .and_then(|()| File::open(folder)?.sync_all());
        if written.is_err() {
            // After a successful rename the file is gone.
            let _ = fs::remove_file(&new);
        }
        written
    }

    fn write_new(&self, path: &Path) -> io::Result<()> {
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(path)?;
        file.write_all(&self.encode())?;
        file.sync_all()
    }
}
