//! One user at a time for a directory of the cache.

use std::fs::File;
use std::path::Path;

use anyhow::{Context, Result};

/// Holds a lock until it is dropped.
#[derive(Debug)]
pub(crate) struct Lock {
    _file: File,
}

/// Takes the lock of `dir` (made if it is missing), waiting for another xtask that has it.
pub(crate) fn take(dir: &Path) -> Result<Lock> {
    std::fs::create_dir_all(dir).with_context(|| format!("create {}", dir.display()))?;
    let name = dir.join("lock");
    let file = File::options()
        .create(true)
        .write(true)
        .truncate(false)
        .open(&name)
        .with_context(|| format!("open {}", name.display()))?;
    match file.try_lock() {
        Ok(()) => {}
        Err(std::fs::TryLockError::WouldBlock) => {
            eprintln!("waiting for another xtask that uses {}", dir.display());
            file.lock()
                .with_context(|| format!("lock {}", name.display()))?;
        }
        Err(std::fs::TryLockError::Error(error)) => {
            return Err(error).with_context(|| format!("lock {}", name.display()));
        }
    }
    Ok(Lock { _file: file })
}
