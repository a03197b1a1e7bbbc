//! One user at a time for a directory of the cache.

use std::path::Path;

use anyhow::Result;
use fs_err as fs;

/// Holds a lock until it is dropped.
#[derive(Debug)]
pub(crate) struct Lock {
    _file: fs::File,
}

/// Takes the lock of `dir` (made if it is missing), waiting for another xtask that has it.
pub(crate) fn take(dir: &Path) -> Result<Lock> {
    fs::create_dir_all(dir)?;
    let file = fs::OpenOptions::new()
        .create(true)
        .write(true)
        .truncate(false)
        .open(dir.join("lock"))?;
    // A file system without locks says so to lock() as well.
    if file.try_lock().is_err() {
        eprintln!("waiting for another xtask that uses {}", dir.display());
        file.lock()?;
    }
    Ok(Lock { _file: file })
}
