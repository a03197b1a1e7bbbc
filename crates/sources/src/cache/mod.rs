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
mod disk;
mod files;
mod options;
mod store;
#[cfg(test)]
mod tests;
mod threads;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use crate::object::Block;
use disk::Disk;
use files::{Files, note_use};
pub use options::{CacheError, CacheOptions};
use store::Writer;

/// The length of a checksum, in bytes.
const CHECKSUM_BYTES: usize = 32;

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
    disk: Arc<Disk>,
    files: Arc<Files>,
    writer: Arc<Writer>,
}

impl DiskCache {
    /// Opens or creates the cache.
    ///
    /// # Errors
    /// [`CacheError`]. A directory that is only read-only or full is no error: it is read, and a
    /// warning is logged when a block cannot be written.
    pub(crate) fn open(options: &CacheOptions, key: ObjectKey) -> Result<Self, CacheError> {
        let disk = Disk::open(&options.directory)?;
        let directory = Arc::clone(&disk.directory);
        let folder = key.to_string();
        let files = Files {
            directory: Arc::clone(&directory),
            key,
            folder: folder.clone(),
            has_warned: AtomicBool::new(false),
        };
        Ok(Self {
            disk,
            files: Arc::new(files),
            writer: Arc::new(Writer::new(directory, key, folder, options.bytes)),
        })
    }

    /// Gives a block to the thread that writes. False if that is too far behind, so that the block is
    /// not cached.
    pub(crate) fn offer(&self, index: u64, block: Block) -> bool {
        let writer = Arc::clone(&self.writer);
        let bytes = block.len();
        self.disk.write(bytes, move || writer.write(index, &block))
    }

    /// Reads blocks, of which each is given by its number and its length in bytes. Waits for the disk; not for one that hangs.
    pub(crate) fn read(&self, wanted: &[(u64, u64)]) -> Vec<Found> {
        let now = |&(index, bytes): &(u64, u64)| self.read_now(index, bytes).map(Found::Block);
        let mut found: Vec<Option<Found>> = wanted.iter().map(now).collect();
        let left = wanted.iter().zip(&found);
        let left: Vec<(u64, u64)> = left
            .filter(|(_, found)| found.is_none())
            .map(|(one, _)| *one)
            .collect();
        let files = Arc::clone(&self.files);
        let read = move |&(index, bytes): &(u64, u64)| files.read(index, bytes);
        let answers = self.disk.ask(left, read);
        let places = found.iter_mut().filter(|found| found.is_none());
        for (place, answer) in places.zip(answers) {
            *place = answer;
        }
        let found = found.into_iter();
        found.map(|found| found.unwrap_or(Found::Absent)).collect()
    }

    /// Reads the block of `bytes` bytes if its file's name and content are in the kernel's caches. A damaged file is
    /// left to [`DiskCache::read`].
    pub(crate) fn read_now(&self, index: u64, bytes: u64) -> Option<Vec<u8>> {
        let (content, file) = self.files.read_now(index, bytes)?;
        if let Some(file) = file {
            // Where nothing is written, the order of use is lost, and no more.
            self.disk.note(move || note_use(&file));
        }
        Some(content)
    }
}

/// The path of a block's file below the cache's directory.
fn block_name(folder: &str, index: u64) -> String {
    format!("{folder}/{index:016x}")
}
