//! Writing blocks and evicting them, by one process at a time.

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use pagetide_pager::log_limit::log_once;

use super::directory::Directory;
use super::{CHECKSUM_BYTES, ObjectKey, block_name};

/// The unit in which file systems give space, in bytes.
const UNIT: u64 = 4096;
/// An eviction leaves this part of the bound, in percent, so that not every block evicts.
const LEFT_PERCENT: u64 = 90;
/// After a failure nothing is written for this long.
const REST: Duration = Duration::from_secs(30);

/// Distinguishes the temporary files of this process.
static WRITES: AtomicU64 = AtomicU64::new(0);

/// Writes the blocks of one object.
#[derive(Debug)]
pub(super) struct Writer {
    directory: Arc<Directory>,
    key: ObjectKey,
    folder: String,
    bound: u64,
    has_warned: AtomicBool,
    rests_until: Mutex<Option<Instant>>,
}

impl Writer {
    pub(super) fn new(
        directory: Arc<Directory>,
        key: ObjectKey,
        folder: String,
        bound: u64,
    ) -> Self {
        Self {
            directory,
            key,
            folder,
            bound,
            has_warned: AtomicBool::new(false),
            rests_until: Mutex::new(None),
        }
    }

    /// Writes a block, if there is room and the disk takes it. A failure is logged once.
    pub(super) fn write(&self, index: u64, content: &[u8]) {
        let mut rests = self
            .rests_until
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if rests.is_some_and(|until| Instant::now() < until) {
            return;
        }
        match self.try_write(index, content) {
            Ok(()) => *rests = None,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                tracing::debug!("another process occupies the cache: a block is left out");
            }
            Err(error) => {
                *rests = Some(Instant::now() + REST);
                let directory = self.directory.path().display();
                log_once!(self.has_warned, warn, %directory, %error, "the disk cache cannot be written: paging goes on without it");
            }
        }
    }

    fn try_write(&self, index: u64, content: &[u8]) -> io::Result<()> {
        let size = occupied(content.len() as u64 + CHECKSUM_BYTES as u64);
        let target = self.directory.path().join(block_name(&self.folder, index));
        if size > self.bound || target.exists() {
            return Ok(());
        }
        let lock = self.directory.lock()?;
        let mut usage = match lock.usage() {
            Some(usage) => usage,
            None => self.evict(u64::MAX)?,
        };
        if usage.saturating_add(size) > self.bound {
            let left = self.bound / 100 * LEFT_PERCENT;
            usage = self.evict(left.min(self.bound - size))?;
        }
        // Noted before the file exists: if the process ends in between, the cache counts too much until
        // the next eviction counts anew, and never too little.
        lock.set_usage(usage.saturating_add(size))?;
        if let Err(error) = self.write_file(&target, index, content) {
            // Nothing can be done about a second failure; the next eviction counts anew.
            let _ = lock.set_usage(usage);
            return Err(error);
        }
        Ok(())
    }

    fn write_file(&self, target: &Path, index: u64, content: &[u8]) -> io::Result<()> {
        let folder = self.directory.path().join(&self.folder);
        match fs::DirBuilder::new().mode(0o700).create(&folder) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        let number = WRITES.fetch_add(1, Relaxed);
        let new = folder.join(format!("new-{}-{number}", std::process::id()));
        let written = (|| {
            let mut options = fs::OpenOptions::new();
            let mut file = options
                .write(true)
                .create_new(true)
                .mode(0o600)
                .open(&new)?;
            file.write_all(content)?;
            file.write_all(&self.key.checksum(index, content))?;
            fs::rename(&new, target)
        })();
        if written.is_err() {
            // It may not exist.
            let _ = fs::remove_file(&new);
        }
        written
    }

    /// Removes the least recently used blocks until at most `left` bytes are left, and all files that
    /// killed writers left behind. Returns what is left. The caller holds the lock: no
    /// file is being written.
    fn evict(&self, left: u64) -> io::Result<u64> {
        let mut folders: Vec<PathBuf> = Vec::new();
        let mut files: Vec<(SystemTime, u64, usize, String)> = Vec::new();
        let mut usage = 0u64;
        for folder in fs::read_dir(self.directory.path())? {
            let folder = folder?;
            if !folder.file_type()?.is_dir() || !is_object(&folder.file_name().to_string_lossy()) {
                continue;
            }
            folders.push(folder.path());
            for file in fs::read_dir(folder.path())? {
                let file = file?;
                // Removed by a reader that found it damaged.
                let Ok(status) = file.metadata() else {
                    continue;
                };
                let name = file.file_name().to_string_lossy().into_owned();
                if name.starts_with("new-") {
                    let _ = fs::remove_file(file.path());
                    continue;
                }
                let used = status.modified().unwrap_or(SystemTime::UNIX_EPOCH);
                let size = occupied(status.size());
                usage = usage.saturating_add(size);
                files.push((used, size, folders.len() - 1, name));
            }
        }
        files.sort_unstable();
        let mut evicted = 0u64;
        for (_, size, folder, name) in files {
            if usage <= left {
                break;
            }
            let Some(folder) = folders.get(folder) else {
                continue;
            };
            match fs::remove_file(folder.join(&name)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {
                    usage = usage.saturating_sub(size);
                    evicted += 1;
                }
            }
        }
        if evicted > 0 {
            for folder in &folders {
                // Only an empty one can be removed; writers create it again.
                let _ = fs::remove_dir(folder);
            }
            tracing::debug!(evicted, usage, "blocks were evicted from the disk cache");
        }
        Ok(usage)
    }
}

/// The space that a file of `bytes` bytes takes.
fn occupied(bytes: u64) -> u64 {
    bytes.div_ceil(UNIT).saturating_mul(UNIT)
}

/// Whether this is the name of an object's folder: nothing else below the directory is removed.
fn is_object(name: &str) -> bool {
    name.len() == 64 && name.bytes().all(|byte| byte.is_ascii_hexdigit())
}
