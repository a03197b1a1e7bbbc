//! The cache's directory: who owns it, and who may write to it now.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, Mode, OFlags, flock, fstat, fstatfs, open, openat};
use rustix::io::{Errno, ReadWriteFlags, pread, preadv2, pwrite};
use rustix::process::geteuid;

use super::CacheError;
use crate::file::IN_MEMORY;

/// Permission bits: of writing for the group and for others.
const WRITABLE_BY_OTHERS: u32 = 0o022;
/// How long a writer waits for another process, at most. It then leaves its block out.
const LOCK_WAIT: Duration = Duration::from_millis(500);
/// The pause between two attempts to lock.
const LOCK_PAUSE: Duration = Duration::from_millis(2);

/// An open cache directory.
#[derive(Debug)]
pub(super) struct Directory {
    path: PathBuf,
    fd: OwnedFd,
    /// Device and inode.
    identity: (u64, u64),
    is_in_memory: bool,
    can_read_now: bool,
}

impl Directory {
    /// Creates the directory if necessary, and checks who can write to it.
    pub(super) fn open(path: &Path) -> Result<Self, CacheError> {
        let failed = |source: io::Error| CacheError::Directory {
            directory: path.into(),
            source,
        };
        let created = std::fs::DirBuilder::new().mode(0o700).create(path);
        // On a read-only file system the error of a directory that exists is another one.
        if let Err(error) = created
            && !path.is_dir()
        {
            return Err(failed(error));
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = open(path, flags, Mode::empty()).map_err(|errno| failed(errno.into()))?;
        let status = fstat(&fd).map_err(|errno| failed(errno.into()))?;
        let user = geteuid().as_raw();
        if status.st_uid != user {
            return Err(CacheError::Owner {
                directory: path.into(),
                owner: status.st_uid,
                user,
            });
        }
        let mode = status.st_mode & 0o7777;
        if mode & WRITABLE_BY_OTHERS != 0 {
            let directory = path.into();
            return Err(CacheError::Writable { directory, mode });
        }
        let is_in_memory = fstatfs(&fd).is_ok_and(|system| {
            u32::try_from(system.f_type).is_ok_and(|kind| IN_MEMORY.contains(&kind))
        });
        let can_read_now = is_in_memory || can_read_now(&fd);
        Ok(Self {
            path: path.into(),
            fd,
            identity: (status.st_dev, status.st_ino),
            is_in_memory,
            can_read_now,
        })
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Whether both are one directory, by one name.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        (self.identity, &self.path) == (other.identity, &other.path)
    }

    pub(super) fn is_in_memory(&self) -> bool {
        self.is_in_memory
    }

    /// Whether a file can be read without waiting. The file systems that cannot do this may wait in open() and close(), too.
    pub(super) fn can_read_now(&self) -> bool {
        self.can_read_now
    }

    /// Waits a short while to be the only writer.
    ///
    /// # Errors
    /// The kernel's; AGAIN if another process does not finish.
    pub(super) fn lock(&self) -> Result<Lock, Errno> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        // Opened each time: a descriptor of one's own also excludes other threads of the process.
        let file = openat(&self.fd, "lock", flags, Mode::RUSR | Mode::WUSR)?;
        let begun = Instant::now();
        loop {
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(Lock { file }),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) if begun.elapsed() < LOCK_WAIT => thread::sleep(LOCK_PAUSE),
                Err(errno) => return Err(errno),
            }
        }
    }
}

/// Tries it with the lock's file.
fn can_read_now(directory: &OwnedFd) -> bool {
    let own = Mode::RUSR | Mode::WUSR;
    let flags = OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let file = openat(
        directory,
        "lock",
        flags | OFlags::RDWR | OFlags::CREATE,
        own,
    );
    // On a read-only file system.
    let file = file.or_else(|_| openat(directory, "lock", flags | OFlags::RDONLY, own));
    file.is_ok_and(|file| {
        let mut byte = [0];
        let mut parts = [io::IoSliceMut::new(&mut byte)];
        let read = preadv2(&file, &mut parts, 0, ReadWriteFlags::NOWAIT);
        matches!(read, Ok(_) | Err(Errno::AGAIN))
    })
}

/// The right to write to the cache and to evict from it, until this is dropped or the process ends.
#[derive(Debug)]
pub(super) struct Lock {
    file: OwnedFd,
}

impl Lock {
    /// The bytes that all files have, as noted; `None` if nothing valid is noted.
    pub(super) fn usage(&self) -> Option<u64> {
        let mut text = [0; 16];
        let given = pread(&self.file, &mut text, 0).ok()?;
        let (usage, check) = text.get(..given)?.split_first_chunk::<8>()?;
        let usage = u64::from_le_bytes(*usage);
        (check == (!usage).to_le_bytes()).then_some(usage)
    }

    /// Notes the bytes that all files have.
    pub(super) fn set_usage(&self, usage: u64) -> Result<(), Errno> {
        let mut text = [0; 16];
        let (value, check) = text.split_at_mut(8);
        value.copy_from_slice(&usage.to_le_bytes());
        check.copy_from_slice(&(!usage).to_le_bytes());
        match pwrite(&self.file, &text, 0)? {
            16 => Ok(()),
            _ => Err(Errno::NOSPC),
        }
    }
}
