//! The directory that results go to.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, openat, renameat, unlinkat};
use rustix::io::Errno;

/// A directory for results, made sure to be writable before anything is measured.
///
/// The directory is opened once: results go there even if somebody puts another one, or a link, in
/// its place meanwhile. The path that the caller gives may lead through links; names in the
/// directory are never followed, so that who else can write there cannot redirect a result.
///
/// Directories that were made for it and stay empty, because the benchmark failed, are removed.
#[derive(Debug)]
pub struct OutDir {
    path: PathBuf,
    directory: OwnedFd,
    /// Directories that did not exist before; removed with this value if they are empty.
    _made: Made,
}

/// Why results cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum OutError {
    /// The directory cannot be made, or is none.
    #[error("--out {}: cannot make the directory", .path.display())]
    Make {
        /// The directory.
        path: PathBuf,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
    /// No file can be made in it.
    #[error("--out {}: cannot write there", .path.display())]
    NotWritable {
        /// The directory.
        path: PathBuf,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
    /// A result could not be written.
    #[error("cannot write {}", .path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
}

impl OutDir {
    /// Makes the directory if need be, and sees whether files can be made in it.
    ///
    /// # Errors
    /// They cannot; nothing is left behind.
    pub fn prepare(path: &Path) -> Result<Self, OutError> {
        let absent = path
            .ancestors()
            .take_while(|ancestor| !ancestor.as_os_str().is_empty() && !ancestor.exists());
        let made = Made(absent.map(Path::to_owned).collect());
        let make = |source| OutError::Make {
            path: path.to_owned(),
            source,
        };
        fs::create_dir_all(path).map_err(make)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = openat(CWD, path, flags, Mode::empty()).map_err(|e| make(e.into()))?;
        let probe = format!(".pagetide-{}", std::process::id());
        let tried = create(&directory, &probe)
            .and_then(|_| Ok(unlinkat(&directory, &probe, AtFlags::empty())?));
        tried.map_err(|source| OutError::NotWritable {
            path: path.to_owned(),
            source,
        })?;
        Ok(Self {
            path: path.to_owned(),
            directory,
            _made: made,
        })
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes a file as a whole: a reader sees the old content or the new, never a part.
    ///
    /// # Errors
    /// The file cannot be written; what was there before is still there.
    pub fn write(&mut self, name: &str, content: &str) -> Result<(), OutError> {
        let part = format!(".{name}-{}", std::process::id());
        let written = create(&self.directory, &part)
            .and_then(|mut file| file.write_all(content.as_bytes()))
            // A link in the place of `name` is replaced, not followed.
            .and_then(|()| Ok(renameat(&self.directory, &part, &self.directory, name)?));
        if let Err(source) = written {
            // The failure to report is the first one.
            let _ = unlinkat(&self.directory, &part, AtFlags::empty());
            let path = self.path.join(name);
            return Err(OutError::Write { path, source });
        }
        Ok(())
    }
}

/// A new file. What has its name, a link or what an earlier process of the same number left, is
/// removed.
fn create(directory: &OwnedFd, name: &str) -> io::Result<File> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let mode = Mode::from_raw_mode(0o666);
    let open = || openat(directory, name, flags | OFlags::NOFOLLOW, mode);
    let file = match open() {
        Err(Errno::EXIST) => {
            unlinkat(directory, name, AtFlags::empty())?;
            open()
        }
        result => result,
    };
    Ok(file?.into())
}

/// Directories that were made, the innermost first.
#[derive(Debug)]
struct Made(Vec<PathBuf>);

impl Drop for Made {
    fn drop(&mut self) {
        for made in &self.0 {
            // Fails for a directory that is not empty, or that could not be made; that is the
            // point.
            let _ = fs::remove_dir(made);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn an_unused_directory_does_not_stay() {
        let temporary = tempfile::tempdir().unwrap();
        let wanted = temporary.path().join("a/b/c");
        let out = OutDir::prepare(&wanted).unwrap();
        assert!(wanted.is_dir());
        assert_eq!(
            fs::read_dir(&wanted).unwrap().count(),
            0,
            "the probe is gone"
        );
        drop(out);
        assert_eq!(fs::read_dir(temporary.path()).unwrap().count(), 0);
    }

    #[test]
    fn results_stay() {
        let temporary = tempfile::tempdir().unwrap();
        let wanted = temporary.path().join("a/b");
        let mut out = OutDir::prepare(&wanted).unwrap();
        out.write("x.txt", "old").unwrap();
        out.write("x.txt", "new").unwrap();
        drop(out);
        assert_eq!(fs::read_to_string(wanted.join("x.txt")).unwrap(), "new");
        assert_eq!(fs::read_dir(&wanted).unwrap().count(), 1);
    }

    #[test]
    fn links_lead_nowhere() {
        let temporary = tempfile::tempdir().unwrap();
        let wanted = temporary.path().join("results");
        let victim = temporary.path().join("victim");
        fs::create_dir(&wanted).unwrap();
        fs::write(&victim, "precious").unwrap();
        let untouched = || assert_eq!(fs::read_to_string(&victim).unwrap(), "precious");
        let plant = |name: &str| symlink(&victim, wanted.join(name)).unwrap();
        let process = std::process::id();
        plant(&format!(".pagetide-{process}"));
        let mut out = OutDir::prepare(&wanted).unwrap();
        untouched();
        plant(&format!(".x.txt-{process}"));
        plant("x.txt");
        out.write("x.txt", "result").unwrap();
        untouched();
        let written = wanted.join("x.txt");
        assert!(fs::symlink_metadata(&written).unwrap().is_file());
        assert_eq!(fs::read_to_string(&written).unwrap(), "result");
        assert_eq!(fs::read_dir(&wanted).unwrap().count(), 1);
        // Another directory in its place gets nothing.
        let elsewhere = temporary.path().join("elsewhere");
        fs::create_dir(&elsewhere).unwrap();
        let moved = temporary.path().join("moved");
        fs::rename(&wanted, &moved).unwrap();
        symlink(&elsewhere, &wanted).unwrap();
        out.write("y.txt", "result").unwrap();
        assert_eq!(fs::read_dir(&elsewhere).unwrap().count(), 0);
        assert_eq!(fs::read_to_string(moved.join("y.txt")).unwrap(), "result");
    }

    #[test]
    fn a_directory_that_was_there_stays_even_if_empty() {
        let temporary = tempfile::tempdir().unwrap();
        drop(OutDir::prepare(temporary.path()).unwrap());
        assert!(temporary.path().is_dir());
    }

    #[test]
    fn a_file_in_the_way_is_told() {
        let temporary = tempfile::tempdir().unwrap();
        let file = temporary.path().join("file");
        fs::write(&file, "x").unwrap();
        for path in [file.clone(), file.join("below")] {
            let error = OutDir::prepare(&path).unwrap_err().to_string();
            assert!(
                error.starts_with(&format!("--out {}: cannot make", path.display())),
                "{error}"
            );
        }
        assert_eq!(fs::read_to_string(&file).unwrap(), "x");
    }
}
