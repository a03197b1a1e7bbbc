//! The directory that results go to.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// A directory for results, made sure to be writable before anything is measured.
///
/// Directories that were made for it and stay empty, because the benchmark failed, are removed.
#[derive(Debug)]
pub struct OutDir {
    path: PathBuf,
    /// Directories that did not exist before, the innermost first.
    made: Vec<PathBuf>,
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
        let out = Self {
            path: path.to_owned(),
            made: absent.map(Path::to_owned).collect(),
        };
        fs::create_dir_all(path).map_err(|source| OutError::Make {
            path: path.to_owned(),
            source,
        })?;
        let probe = path.join(format!(".pagetide-{}", std::process::id()));
        let tried = fs::write(&probe, b"").and_then(|()| fs::remove_file(&probe));
        tried.map_err(|source| OutError::NotWritable {
            path: path.to_owned(),
            source,
        })?;
        Ok(out)
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
        let path = self.path.join(name);
        let part = self.path.join(format!(".{name}-{}", std::process::id()));
        let written = fs::write(&part, content).and_then(|()| fs::rename(&part, &path));
        if let Err(source) = written {
            // The failure to report is the first one.
            let _ = fs::remove_file(&part);
            return Err(OutError::Write { path, source });
        }
        Ok(())
    }
}

impl Drop for OutDir {
    fn drop(&mut self) {
        for made in &self.made {
            // Fails for a directory that is not empty, or that could not be made; that is the
            // point.
            let _ = fs::remove_dir(made);
        }
    }
}

#[cfg(test)]
mod tests {
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
