//! Who may use a state's directory: the processes of one user, and one keeper at a time.
//!
//! A keeper holds a lock for as long as it lives. Of two that are started at once, by servers that start at once, one ends: it would
//! otherwise replace the other one's socket, and no successor would find the VMs that the other one's server hands to it.

use std::fs::File;
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, Mode, OFlags, flock, open};
use rustix::io::Errno;
use rustix::process::geteuid;

use super::SOCKET;
use crate::peer::user_of;

/// The name of the file that a keeper locks. It stays when the keeper ends.
const LOCK: &str = "keeper.lock";

/// How long a keeper waits for the end of the one before. A server waits longer for its keeper.
pub(super) const LOCK_LIMIT: Duration = Duration::from_secs(2);

/// How long to wait before the next attempt.
pub(super) const PAUSE: Duration = Duration::from_millis(5);

pub(super) fn make_directory(directory: &Path) -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    if !directory.is_dir() {
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(directory)?;
    }
    let status = std::fs::metadata(directory)?;
    let (user, mode) = (geteuid().as_raw(), status.mode() & 0o7777);
    if status.uid() != user {
        let owner = status.uid();
        return Err(refused(format!(
            "it belongs to user {owner}, and this process runs as {user}: another user could take the VMs"
        )));
    }
    if mode & WRITABLE_BY_OTHERS != 0 {
        return Err(refused(format!(
            "it has mode {mode:o}: other users could take the VMs; chmod go-w"
        )));
    }
    Ok(())
}

/// Permission bits: of writing for the group and for others.
const WRITABLE_BY_OTHERS: u32 = 0o022;

fn refused(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, text)
}

/// What a keeper has locked, until it is dropped, or its process has ended. No other user can lock it: the file is its user's alone.
#[derive(Debug)]
pub(super) struct Lock {
    _file: File,
}

/// Locks the directory for a keeper. Waits for one that is ending.
pub(super) fn lock(directory: &Path, limit: Duration) -> io::Result<Lock> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mode = Mode::RUSR | Mode::WUSR;
    let file = File::from(open(directory.join(LOCK), flags, mode)?);
    let end = Instant::now() + limit;
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => break,
            Err(Errno::INTR) => {}
            Err(Errno::WOULDBLOCK) if Instant::now() < end => std::thread::sleep(PAUSE),
            Err(Errno::WOULDBLOCK) => return Err(locked(&file)),
            Err(errno) => return Err(errno.into()),
        }
    }
    // For who cannot lock it. Nothing but a message depends on it.
    let _ = file.set_len(0);
    let _ = file.write_at(std::process::id().to_string().as_bytes(), 0);
    Ok(Lock { _file: file })
}

/// The error of who cannot lock the directory.
fn locked(file: &File) -> io::Error {
    let mut pid = [0; 16];
    let bytes = file.read_at(&mut pid, 0).unwrap_or(0);
    let pid = pid
        .get(..bytes)
        .and_then(|pid| std::str::from_utf8(pid).ok());
    let process = match pid.map(str::parse::<u32>) {
        Some(Ok(pid)) => format!("process {pid}"),
        _ => "a process".to_owned(),
    };
    io::Error::new(
        io::ErrorKind::WouldBlock,
        format!(
            "{process} has locked {LOCK}, and does not listen at {SOCKET}: it is a keeper that is stopped, or whose socket was removed"
        ),
    )
}

/// Checks that the process at the other end is of this one's user, or root's.
pub(super) fn check_user(socket: BorrowedFd<'_>) -> io::Result<()> {
    let (other, user) = (user_of(socket)?, geteuid().as_raw());
    match other == user || other == 0 {
        true => Ok(()),
        false => Err(refused(format!(
            "the process at the other end of {SOCKET} runs as user {other}, and this one as {user}"
        ))),
    }
}
