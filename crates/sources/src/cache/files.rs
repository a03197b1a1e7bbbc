//! The files of one object's blocks, as they are read.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use pagetide_pager::log_limit::{log_limited, log_once};
use rustix::fs::{
    AtFlags, Mode, OFlags, ResolveFlags, StatxFlags, Timespec, Timestamps, UTIME_NOW, futimens,
    openat, openat2, statx, unlinkat,
};
use rustix::io::{Errno, ReadWriteFlags, preadv2};

use super::directory::Directory;
use super::{CHECKSUM_BYTES, Found, ObjectKey, block_name};

/// A block's time of use is noted at most this often.
const TOUCH_EVERY: Duration = Duration::from_secs(60);

/// Where one object's blocks are.
#[derive(Debug)]
pub(super) struct Files {
    pub(super) directory: Arc<Directory>,
    pub(super) key: ObjectKey,
    /// The object's directory below the cache's.
    pub(super) folder: String,
    pub(super) has_warned: AtomicBool,
}

impl Files {
    /// Reads the block of `bytes` bytes. May wait for the disk.
    pub(super) fn read(&self, index: u64, bytes: u64) -> Found {
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
            Ok(Some((content, used))) => {
                if is_to_be_noted(used) {
                    note_use(&file);
                }
                Found::Block(content)
            }
            Ok(None) => self.damaged(&name),
            Err(errno) => self.unreadable(errno),
        }
    }

    /// Reads the block if its file's name and content are in the kernel's caches, without waiting. The file comes with it if
    /// its use is to be noted, which may wait. A damaged file is left to [`Files::read`].
    pub(super) fn read_now(&self, index: u64, bytes: u64) -> Option<(Vec<u8>, Option<OwnedFd>)> {
        if !self.directory.can_read_now() {
            return None;
        }
        let name = self.file_name(index);
        // NOATIME: a time of access is written to the file system's journal.
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let flags = flags | OFlags::NOATIME;
        // CACHED: the name is looked up without the disk.
        let resolve = ResolveFlags::CACHED | ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        let folder = self.directory.fd();
        let file = openat2(folder, name.as_str(), flags, Mode::empty(), resolve).ok()?;
        let now = match self.directory.is_in_memory() {
            true => ReadWriteFlags::empty(),
            false => ReadWriteFlags::NOWAIT,
        };
        let (content, used) = self.content(&file, index, bytes, now).ok()??;
        Some((content, is_to_be_noted(used).then_some(file)))
    }

    /// The content of a block's file and when it was used, in seconds; `None` if it is not what was written.
    fn content(
        &self,
        file: &OwnedFd,
        index: u64,
        bytes: u64,
        flags: ReadWriteFlags,
    ) -> Result<Option<(Vec<u8>, i64)>, Errno> {
        let length = bytes + CHECKSUM_BYTES as u64;
        // What is known here: a server of files is not asked. Blocks are never changed.
        let known = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        let status = statx(file, c"", known, StatxFlags::SIZE | StatxFlags::MTIME)?;
        if status.stx_size != length {
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
        Ok(is_whole.then_some((content, status.stx_mtime.tv_sec)))
    }

    fn damaged(&self, name: &str) -> Found {
        let removed = unlinkat(self.directory.fd(), name, AtFlags::empty());
        let error = removed.err().filter(|errno| *errno != Errno::NOENT);
        log_limited!(
            warn,
            name,
            ?error,
            "a file of the cache is damaged: it is removed, and fetched again"
        );
        Found::Damaged
    }

    fn unreadable(&self, errno: Errno) -> Found {
        log_once!(self.has_warned, warn, %errno, "the disk cache cannot be read: blocks are fetched instead");
        Found::Absent
    }

    fn file_name(&self, index: u64) -> String {
        block_name(&self.folder, index)
    }
}

/// Whether the last note of a use is old enough. A time in the future is left as it is.
fn is_to_be_noted(used_seconds: i64) -> bool {
    let noted = u64::try_from(used_seconds).unwrap_or_default();
    let noted = UNIX_EPOCH + Duration::from_secs(noted);
    SystemTime::now().duration_since(noted).unwrap_or_default() > TOUCH_EVERY
}

/// Notes that a block was used now. May wait for the disk.
pub(super) fn note_use(file: &OwnedFd) {
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
