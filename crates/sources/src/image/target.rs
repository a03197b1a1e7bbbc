//! A file that appears under its name when it is complete, and not before.

use std::ffi::{OsStr, OsString};
use std::hash::{BuildHasher as _, RandomState};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::fs::{
    AtFlags, CWD, Mode, OFlags, RenameFlags, fsync, linkat, openat, renameat, renameat_with,
    unlinkat,
};
use rustix::io::Errno;
use thiserror::Error;

use crate::object::{ObjectOptions, Upload};
use crate::open::Location;
use crate::upload::UploadError;

/// Why a file could not be written.
#[derive(Debug, Error)]
pub enum TargetError {
    /// Something has its name, and may not be replaced.
    #[error("{} exists", path.display())]
    Exists {
        /// The file.
        path: PathBuf,
    },
    /// Something has its name that no file replaces: a device, a pipe or a socket, which programs share.
    #[error("{} is no regular file: it is not replaced", path.display())]
    Special {
        /// Its path.
        path: PathBuf,
    },
    /// The path ends with no file name.
    #[error("{} names no file", path.display())]
    NoName {
        /// The path.
        path: PathBuf,
    },
    /// No file can be made in the directory.
    #[error("cannot write to the directory {}", directory.display())]
    Directory {
        /// The directory.
        directory: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The URL has no new object.
    #[error(transparent)]
    Upload(#[from] UploadError),
    /// What is put at a URL could not be written to a temporary file before.
    #[error(
        "cannot write what is for {name} to a temporary file in {}; TMPDIR names another directory",
        directory.display()
    )]
    Temporary {
        /// The URL, without credentials.
        name: String,
        /// The directory.
        directory: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The file could not be written, or given its name.
    #[error("cannot write {}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

impl TargetError {
    /// Whether the request made no sense, so that nothing was tried.
    pub(crate) fn is_refusal(&self) -> bool {
        match self {
            Self::Exists { .. }
            | Self::Special { .. }
            | Self::NoName { .. }
            | Self::Directory { .. } => true,
            Self::Upload(error) => error.is_refusal(),
            Self::Write { .. } | Self::Temporary { .. } => false,
        }
    }
}

/// Where a target ends.
#[derive(Debug)]
enum Place {
    File {
        path: PathBuf,
        name: OsString,
        may_replace: bool,
    },
    Object {
        upload: Box<Upload>,
        /// Without credentials.
        name: String,
        directory: PathBuf,
    },
}

/// A file that is being written. Without [`Target::finish`] nothing of it stays; a process that is killed
/// leaves nothing either, where the file system has files without a name.
#[derive(Debug)]
pub(crate) struct Target {
    file: std::fs::File,
    directory: OwnedFd,
    /// Its name so far, if it has one.
    temporary: Option<OsString>,
    place: Place,
}

/// The directory of a file.
pub(crate) fn directory_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    }
}

impl Target {
    /// Begins the file or object that will be at `location`, with these permissions, less the process's umask. It has guest
    /// memory: nobody reads it who may not read where the memory came from. An object is a file of the directory for
    /// temporary files until it is complete.
    ///
    /// # Errors
    /// [`TargetError`].
    pub(crate) fn begin(
        location: &Location,
        mode: u32,
        may_replace: bool,
        options: &ObjectOptions,
    ) -> Result<Self, TargetError> {
        match location {
            Location::Path(path) => Self::begin_file(path, mode, may_replace),
            Location::Url(url) => {
                let upload = Upload::begin(url, options, may_replace)?;
                Self::begin_object(upload, location.to_string())
            }
        }
    }

    fn begin_file(path: &Path, mode: u32, may_replace: bool) -> Result<Self, TargetError> {
        let path = path.to_owned();
        let Some(name) = path.file_name().map(OsStr::to_owned) else {
            return Err(TargetError::NoName { path });
        };
        // Also a link that leads nowhere has the name.
        match path.symlink_metadata() {
            Ok(found) if !may_replace || found.is_dir() => {
                return Err(TargetError::Exists { path });
            }
            Ok(found) if !found.is_file() && !found.is_symlink() => {
                return Err(TargetError::Special { path });
            }
            _ => {}
        }
        let failed = |errno: Errno| TargetError::Directory {
            directory: directory_of(&path).to_owned(),
            source: errno.into(),
        };
        let opened = opened(directory_of(&path), mode & 0o666).map_err(failed)?;
        let place = Place::File {
            path,
            name,
            may_replace,
        };
        Ok(Self::of(opened, place))
    }

    fn begin_object(upload: Upload, name: String) -> Result<Self, TargetError> {
        let directory = std::env::temp_dir();
        match opened(&directory, 0o600) {
            Ok(opened) => {
                let place = Place::Object {
                    upload: Box::new(upload),
                    name,
                    directory,
                };
                Ok(Self::of(opened, place))
            }
            Err(errno) => Err(TargetError::Temporary {
                name,
                directory,
                source: errno.into(),
            }),
        }
    }

    fn of((directory, file, temporary): Opened, place: Place) -> Self {
        Self {
            file: file.into(),
            directory,
            temporary,
            place,
        }
    }

    fn failed(&self, source: io::Error) -> TargetError {
        match &self.place {
            Place::File { path, .. } => TargetError::Write {
                path: path.clone(),
                source,
            },
            Place::Object {
                name, directory, ..
            } => TargetError::Temporary {
                name: name.clone(),
                directory: directory.clone(),
                source,
            },
        }
    }

    /// Refuses what is longer than the place takes.
    fn check_bytes(&self, bytes: u64) -> Result<(), TargetError> {
        match &self.place {
            Place::File { .. } => Ok(()),
            Place::Object { upload, .. } => Ok(upload.check_bytes(bytes)?),
        }
    }

    /// A path by which this process opens it once more, also before it has its name.
    pub(crate) fn opened_path(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.file.as_raw_fd()).into()
    }

    /// Writes bytes at an offset.
    ///
    /// # Errors
    /// [`TargetError::Write`], [`TargetError::Temporary`], [`TargetError::Upload`].
    pub(crate) fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<(), TargetError> {
        self.check_bytes(offset.saturating_add(bytes.len() as u64))?;
        let written = self.file.write_all_at(bytes, offset);
        written.map_err(|error| self.failed(error))
    }

    /// Gives the file a length; what was not written is a hole.
    ///
    /// # Errors
    /// As [`Target::write_at`].
    pub(crate) fn set_bytes(&self, bytes: u64) -> Result<(), TargetError> {
        self.check_bytes(bytes)?;
        self.file.set_len(bytes).map_err(|error| self.failed(error))
    }

    /// Writes the content to the disk, and gives the file its name; or puts the object there, of which `progress` is told.
    ///
    /// # Errors
    /// [`TargetError::Write`], [`TargetError::Upload`]; [`TargetError::Exists`] if something has got the name meanwhile.
    pub(crate) fn finish(mut self, progress: &mut dyn FnMut(u64, u64)) -> Result<(), TargetError> {
        let (path, may_replace) = match &self.place {
            Place::File {
                path, may_replace, ..
            } => (path.clone(), *may_replace),
            Place::Object { upload, .. } => {
                let found = self.file.metadata().map_err(|error| self.failed(error))?;
                return Ok(upload.put(&self.file, found.len(), progress)?);
            }
        };
        let synced = self.file.sync_all();
        synced.map_err(|error| self.failed(error))?;
        let named = self.give_name();
        named.map_err(|errno| match errno {
            Errno::EXIST if !may_replace => TargetError::Exists { path },
            errno => self.failed(errno.into()),
        })?;
        // The name is in the directory; the directory must reach the disk as well.
        fsync(&self.directory).map_err(|errno| self.failed(errno.into()))
    }

    fn give_name(&mut self) -> Result<(), Errno> {
        let Place::File {
            name, may_replace, ..
        } = &self.place
        else {
            return Ok(());
        };
        let directory = &self.directory;
        if self.temporary.is_none() {
            let first = match may_replace {
                false => name,
                // A link cannot replace a name; a rename can.
                true => &*self.temporary.insert(temporary_name()),
            };
            let file = format!("/proc/self/fd/{}", self.file.as_raw_fd());
            linkat(CWD, file, directory, first, AtFlags::SYMLINK_FOLLOW)?;
        }
        let Some(temporary) = &self.temporary else {
            return Ok(());
        };
        match may_replace {
            true => renameat(directory, temporary, directory, name)?,
            false => {
                let flags = RenameFlags::NOREPLACE;
                renameat_with(directory, temporary, directory, name, flags)?;
            }
        }
        self.temporary = None;
        Ok(())
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        if let Some(temporary) = &self.temporary {
            // The error to report is another one.
            let _ = unlinkat(&self.directory, temporary, AtFlags::empty());
        }
    }
}

/// A name that no other file has: neither one of this process, nor one of another machine, or of a container whose processes
/// have the same numbers.
fn temporary_name() -> OsString {
    // Each RandomState has keys of its own.
    let random = RandomState::new().hash_one(std::process::id());
    format!(".pagetide-{random:016x}.part").into()
}

/// A directory, and a new file in it with its name so far, if it has one.
type Opened = (OwnedFd, OwnedFd, Option<OsString>);

/// Opens a new file in a directory, without a name if the file system has such files.
fn opened(directory: &Path, mode: u32) -> Result<Opened, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let directory = openat(CWD, directory, flags, Mode::empty())?;
    let mode = Mode::from_raw_mode(mode);
    if let Some(file) = unnamed(&directory, mode) {
        return Ok((directory, file, None));
    }
    let (file, temporary) = named(&directory, mode)?;
    Ok((directory, file, Some(temporary)))
}

/// A file without a name, if the file system has such files and /proc can give them one.
fn unnamed(directory: &OwnedFd, mode: Mode) -> Option<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
    let file = openat(directory, ".", flags, mode).ok()?;
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    Path::new(&path).symlink_metadata().is_ok().then_some(file)
}

/// A new file with a name of its own, and the name. A file that has the name is another's.
fn named(directory: &OwnedFd, mode: Mode) -> Result<(OwnedFd, OsString), Errno> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    loop {
        let name = temporary_name();
        match openat(directory, &name, flags, mode) {
            Err(Errno::EXIST) => {}
            opened => return Ok((opened?, name)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(directory: &Path) -> Vec<OsString> {
        let entries = std::fs::read_dir(directory).expect("it is there");
        let mut names: Vec<_> = entries
            .map(|entry| entry.expect("an entry").file_name())
            .collect();
        names.sort();
        names
    }

    /// A target as on a file system without unnamed files.
    fn with_name(path: &Path, may_replace: bool) -> Target {
        let mut target = Target::begin_file(path, 0o600, may_replace).expect("it begins");
        let named = named(&target.directory, Mode::from_raw_mode(0o600));
        let (file, temporary) = named.expect("a file");
        target.file = file.into();
        target.temporary = Some(temporary);
        target
    }

    #[test]
    fn nothing_has_the_name_before_the_end() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("file");
        for begin in [with_name, |path: &Path, replace| {
            Target::begin_file(path, 0o600, replace).expect("it begins")
        }] {
            let target = begin(&path, false);
            target.write_at(3, b"content").expect("it is written");
            assert!(!path.exists());
            drop(target);
            assert_eq!(names(directory.path()), [""; 0]);

            for replace in [false, true] {
                let target = begin(&path, replace);
                target.write_at(3, b"content").expect("it is written");
                target.finish(&mut |_, _| {}).expect("it is named");
                assert_eq!(std::fs::read(&path).expect("it is there"), b"\0\0\0content");
                assert_eq!(names(directory.path()), ["file"]);
            }
            std::fs::remove_file(&path).expect("it is there");

            // The name is taken meanwhile.
            let target = begin(&path, false);
            std::fs::write(&path, "another's").expect("it is written");
            assert!(matches!(
                target.finish(&mut |_, _| {}),
                Err(TargetError::Exists { .. })
            ));
            assert_eq!(std::fs::read(&path).expect("it is there"), b"another's");
            assert_eq!(names(directory.path()), ["file"]);
            std::fs::remove_file(&path).expect("it is there");
        }
    }

    /// Kind: a name that is taken for one's own. Also where file systems have no files without a name.
    #[test]
    fn two_targets_of_one_name_do_not_meet() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("file");
        for begin in [with_name, |path: &Path, replace| {
            Target::begin_file(path, 0o600, replace).expect("it begins")
        }] {
            let (first, second) = (begin(&path, true), begin(&path, true));
            first.write_at(0, b"first").expect("it is written");
            second.set_bytes(1 << 20).expect("it is long");
            first.finish(&mut |_, _| {}).expect("it is named");
            assert_eq!(std::fs::read(&path).expect("it is there"), b"first");
            drop(second);
            assert_eq!(names(directory.path()), ["file"]);
        }
    }

    #[test]
    fn what_cannot_be_written_is_refused_at_once() {
        let directory = tempfile::tempdir().expect("a directory");
        let begin =
            |path: &Path, replace| Target::begin_file(path, 0o600, replace).expect_err("refused");
        let within = |name: &str| directory.path().join(name);
        std::fs::write(within("file"), "").expect("it is written");
        std::os::unix::fs::symlink("nowhere", within("link")).expect("a link");
        for name in ["file", "link"] {
            let error = begin(&within(name), false);
            assert!(matches!(error, TargetError::Exists { .. }), "{error}");
        }
        let _socket = std::os::unix::net::UnixListener::bind(within("socket")).expect("a socket");
        let error = begin(&within("socket"), true);
        assert!(matches!(error, TargetError::Special { .. }), "{error}");
        let error = begin(directory.path(), true);
        assert!(matches!(error, TargetError::Exists { .. }), "{error}");
        let error = begin(&within("none/file"), false);
        assert!(matches!(error, TargetError::Directory { .. }), "{error}");
        let error = begin(Path::new("/"), false);
        assert!(matches!(error, TargetError::NoName { .. }), "{error}");
    }
}
