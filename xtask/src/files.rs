//! Files and directories: what comes to its name only when it is whole, and what may be gone already.

use std::io::{ErrorKind, Result};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use fs_err as fs;
use sha2::{Digest, Sha256};

/// A part of a file name that no other thread, of this process or another one, has.
pub(crate) fn unique() -> String {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    format!("{}-{count}", std::process::id())
}

/// Writes a file that others may be reading: they find a whole one, the old or the new.
pub(crate) fn replace(
    file: &Path,
    write: impl FnOnce(&Path) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let temporary = file.with_extension(unique());
    write(&temporary)?;
    Ok(fs::rename(&temporary, file)?)
}

/// Removes a file or a directory with all that is in it, if it is there. Another xtask may do the same
/// at the same time.
pub(crate) fn remove(path: &Path) -> Result<()> {
    let removed = if path.is_dir() && !path.is_symlink() {
        fs::remove_dir_all(path)
    } else {
        fs::remove_file(path)
    };
    match removed {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Makes an empty directory in place of what is there.
pub(crate) fn fresh_dir(dir: &Path) -> Result<()> {
    remove(dir)?;
    fs::create_dir_all(dir)
}

/// Makes a directory among others of its kind, whose names begin with `prefix` and end with the time. The oldest ones
/// go, but for `kept`.
pub(crate) fn one_of_many(all: &Path, prefix: &str, kept: usize) -> Result<PathBuf> {
    fs::create_dir_all(all)?;
    let mut old: Vec<_> = fs::read_dir(all)?
        .flatten()
        .filter(|entry| is_one(&entry.file_name().to_string_lossy(), prefix))
        .filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.path())))
        .collect();
    old.sort();
    for (_, dir) in old.iter().rev().skip(kept) {
        // Another xtask may be faster; what is left is removed the next time.
        let _ = fs::remove_dir_all(dir);
    }
    let now = std::time::UNIX_EPOCH.elapsed().unwrap_or_default();
    let dir = all.join(format!("{prefix}{}-{}", now.as_millis(), unique()));
    fs::create_dir(&dir)?;
    Ok(dir)
}

/// Whether a directory is one of those that begin with `prefix`, and not with a longer one.
fn is_one(name: &str, prefix: &str) -> bool {
    let time = name.strip_prefix(prefix);
    time.is_some_and(|time| time.starts_with(|c: char| c.is_ascii_digit()))
}

/// A text file; empty if there is none.
pub(crate) fn text_if_any(file: &Path) -> Result<String> {
    match fs::read_to_string(file) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(String::new()),
        read => read,
    }
}

/// The lines of a list: without white space around them, empty ones, and comments, which begin with `#`.
pub(crate) fn lines(text: &str) -> impl Iterator<Item = &str> {
    let lines = text.lines().map(str::trim);
    lines.filter(|line| !line.is_empty() && !line.starts_with('#'))
}

/// A digest of several parts, in hexadecimal. Where one part ends and the next begins makes a difference.
pub(crate) fn digest<P: AsRef<[u8]>>(parts: impl IntoIterator<Item = P>) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        let part = part.as_ref();
        hash.update(part.len().to_le_bytes());
        hash.update(part);
    }
    hex(&hash.finalize())
}

/// Lower-case hexadecimal.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unique_names_differ() {
        assert_ne!(unique(), unique());
    }

    #[test]
    fn what_another_has_removed_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let tree = dir.path().join("tree");
        fs::create_dir_all(tree.join("a")).unwrap();
        remove(&tree).unwrap();
        assert!(!tree.exists());
        remove(&tree).unwrap();
    }

    #[test]
    fn of_many_directories_the_oldest_go() {
        let all = tempfile::tempdir().unwrap();
        let other = all.path().join("run-other-1");
        fs::create_dir(&other).unwrap();
        let made: Vec<_> = (0..5)
            .map(|_| one_of_many(all.path(), "run-", 2).unwrap())
            .collect();
        // Before the last one was made, two were kept.
        let left = made.iter().filter(|dir| dir.exists()).count();
        assert!(left == 3 && made[4].exists() && other.exists());
    }

    #[test]
    fn a_file_is_replaced_whole_or_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        replace(&file, |new| Ok(fs::write(new, "old")?)).unwrap();
        assert!(replace(&file, |_| anyhow::bail!("no")).is_err());
        assert_eq!(text_if_any(&file).unwrap(), "old");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        assert_eq!(text_if_any(&dir.path().join("none")).unwrap(), "");
    }
}
