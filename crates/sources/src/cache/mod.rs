//! Blocks of objects in files, shared by the processes of one user.
//!
//! ```text
//!   DIRECTORY/lock                 flock: one process writes or evicts at a time; its content is the usage
//!   DIRECTORY/OBJECT/BLOCK         a block's content, then its checksum
//!   DIRECTORY/OBJECT/new-PID-N     a block that is being written
//! ```
//!
//! Readers take no lock: a block's file appears by a rename, is never changed, and its checksum decides
//! whether its content is used. The checksum covers the object and the block's number, so that a file
//! under a wrong name counts as damaged. A crash of the machine may leave a file without all of its
//! content; its checksum is then wrong, hence nothing is synchronised to the disk.

mod directory;
mod options;
mod store;
#[cfg(test)]
mod tests;

use std::fmt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::{
    AtFlags, Mode, OFlags, ResolveFlags, Timespec, Timestamps, UTIME_NOW, fstat, futimens, openat,
    openat2, unlinkat,
};
use rustix::io::{Errno, ReadWriteFlags, preadv2};

use crate::object::Block;
use directory::Directory;
pub use options::{CacheError, CacheOptions};
use store::Writer;

/// The length of a checksum, in bytes.
const CHECKSUM_BYTES: usize = 32;
/// The bound of blocks that wait for the disk, in bytes.
const WAITING_BYTES: usize = 16 << 20;
/// A block's time of use is noted at most this often.
const TOUCH_EVERY: Duration = Duration::from_secs(60);

/// What makes an object's content: equal keys, equal blocks.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct ObjectKey([u8; 32]);

impl ObjectKey {
    /// The key of an object with this strong ETag.
    pub(crate) fn of(identity: &str, version: &str, bytes: u64, block_bytes: usize) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("pagetide disk cache 1");
        for text in [identity, version] {
            hasher.update(&(text.len() as u64).to_le_bytes());
            hasher.update(text.as_bytes());
        }
        hasher.update(&bytes.to_le_bytes());
        hasher.update(&(block_bytes as u64).to_le_bytes());
        Self(*hasher.finalize().as_bytes())
    }

    fn checksum(&self, index: u64, content: &[u8]) -> [u8; CHECKSUM_BYTES] {
        let mut hasher = blake3::Hasher::new_keyed(&self.0);
        hasher.update(&index.to_le_bytes());
        hasher.update(content);
        *hasher.finalize().as_bytes()
    }
}

impl fmt::Display for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&blake3::Hash::from_bytes(self.0).to_hex())
    }
}

impl fmt::Debug for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ObjectKey({self})")
    }
}

/// What the cache has of a block.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// Its content.
    Block(Vec<u8>),
    /// Nothing.
    Absent,
    /// A file whose checksum or length is wrong. It has been removed.
    Damaged,
}

/// The cached blocks of one object.
#[derive(Debug)]
pub(crate) struct DiskCache {
    directory: Arc<Directory>,
    key: ObjectKey,
    /// The object's directory below the cache's.
    folder: String,
    has_warned: AtomicBool,
    /// To the thread that writes; `None` if it could not be started.
    jobs: Option<SyncSender<(u64, Block)>>,
}

impl DiskCache {
    /// Opens or creates the cache, for blocks of `block_bytes` bytes.
    ///
    /// # Errors
    /// [`CacheError`]. A directory that is only read-only or full is no error: it is read, and a
    /// warning is logged when a block cannot be written.
    pub(crate) fn open(
        options: &CacheOptions,
        key: ObjectKey,
        block_bytes: usize,
    ) -> Result<Self, CacheError> {
        let directory = Arc::new(Directory::open(&options.directory)?);
        let folder = key.to_string();
        let writer = Writer::new(Arc::clone(&directory), key, folder.clone(), options.bytes);
        let waiting = (WAITING_BYTES / block_bytes.max(1)).clamp(1, 1024);
        let (jobs, received) = sync_channel::<(u64, Block)>(waiting);
        // It ends when the sender does: with the blob.
        let started = thread::Builder::new()
            .name("pagetide-cache".into())
            .spawn(move || {
                for (index, block) in received {
                    writer.write(index, &block);
                }
            });
        if let Err(error) = &started {
            let directory = options.directory.display();
            tracing::warn!(%directory, %error, "no thread for the cache: nothing is added to it");
        }
        Ok(Self {
            directory,
            key,
            folder,
            has_warned: AtomicBool::new(false),
            jobs: started.is_ok().then_some(jobs),
        })
    }

    /// Gives a block to the thread that writes. False if that is too far behind, so that the block is
    /// not cached.
    pub(crate) fn offer(&self, index: u64, block: Block) -> bool {
        let jobs = self.jobs.as_ref();
        jobs.is_some_and(|jobs| jobs.try_send((index, block)).is_ok())
    }

    /// Reads the block of `bytes` bytes. May wait for the disk.
    pub(crate) fn read(&self, index: u64, bytes: u64) -> Found {
        let name = self.file_name(index);
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let file = match openat(self.directory.fd(), name.as_str(), flags, Mode::empty()) {
            Ok(file) => file,
            Err(Errno::NOENT) => return Found::Absent,
            // A symbolic link or a folder is not of this cache.
            Err(Errno::LOOP | Errno::ISDIR) => return self.damaged(&name),
            Err(errno) => return self.unreadable(errno),
        };
        match self.content(&file, index, bytes, ReadWriteFlags::empty()) {
            Ok(Some(content)) => {
                touch(&file);
                Found::Block(content)
            }
            Ok(None) => self.damaged(&name),
            Err(errno) => self.unreadable(errno),
        }
    }

    /// Reads the block if its file's name and content are in the kernel's caches. A damaged file is
    /// left to [`DiskCache::read`].
    pub(crate) fn read_now(&self, index: u64, bytes: u64) -> Option<Vec<u8>> {
        let name = self.file_name(index);
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        // CACHED: the name is looked up without the disk.
        let resolve = ResolveFlags::CACHED | ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        let folder = self.directory.fd();
        let file = openat2(folder, name.as_str(), flags, Mode::empty(), resolve).ok()?;
        let now = match self.directory.is_in_memory() {
            true => ReadWriteFlags::empty(),
            false => ReadWriteFlags::NOWAIT,
        };
        let content = self.content(&file, index, bytes, now).ok()??;
        touch(&file);
        Some(content)
    }

    /// The content of a block's file; `None` if it is not what was written.
    fn content(
        &self,
        file: &OwnedFd,
        index: u64,
        bytes: u64,
        flags: ReadWriteFlags,
    ) -> Result<Option<Vec<u8>>, Errno> {
        let length = bytes + CHECKSUM_BYTES as u64;
        let status = fstat(file)?;
        if u64::try_from(status.st_size) != Ok(length) {
            return Ok(None);
        }
        let Ok(length) = usize::try_from(length) else {
            return Ok(None);
        };
        let mut content = vec![0; length];
        let mut given = 0;
        while let Some(rest) = content.get_mut(given..).filter(|rest| !rest.is_empty()) {
            let mut parts = [io::IoSliceMut::new(rest)];
            match preadv2(file.as_fd(), &mut parts, given as u64, flags) {
                // It was truncated since.
                Ok(0) => return Ok(None),
                // Without waiting, the rest is not there.
                Ok(part) if part < rest.len() && flags.contains(ReadWriteFlags::NOWAIT) => {
                    return Err(Errno::AGAIN);
                }
                Ok(part) => given += part,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
        let checksum = content.split_off(length - CHECKSUM_BYTES);
        // Not secret: no comparison in constant time is necessary.
        let is_whole = self.key.checksum(index, &content).as_slice() == checksum;
        Ok(is_whole.then_some(content))
    }

    fn damaged(&self, name: &str) -> Found {
        let removed = unlinkat(self.directory.fd(), name, AtFlags::empty());
        let error = removed.err().filter(|errno| *errno != Errno::NOENT);
        tracing::warn!(
            name,
            ?error,
            "a file of the cache is damaged: it is removed, and fetched again"
        );
        Found::Damaged
    }

    fn unreadable(&self, errno: Errno) -> Found {
        if !self.has_warned.swap(true, Relaxed) {
            tracing::warn!(%errno, "the disk cache cannot be read: blocks are fetched instead");
        }
        Found::Absent
    }

    fn file_name(&self, index: u64) -> String {
        block_name(&self.folder, index)
    }
}

/// The path of a block's file below the cache's directory.
fn block_name(folder: &str, index: u64) -> String {
    format!("{folder}/{index:016x}")
}

/// Notes that a block was used, unless that was noted a short while ago.
fn touch(file: &OwnedFd) {
    let Ok(status) = fstat(file) else { return };
    let noted = u64::try_from(status.st_mtime).unwrap_or_default();
    let noted = UNIX_EPOCH + Duration::from_secs(noted);
    // A time in the future is left as it is.
    let age = SystemTime::now().duration_since(noted).unwrap_or_default();
    if age > TOUCH_EVERY {
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: UTIME_NOW,
        };
        let times = Timestamps {
            last_access: now,
            last_modification: now,
        };
        // On a read-only file system the order of use is lost, and no more.
        let _ = futimens(file, &times);
    }
}
