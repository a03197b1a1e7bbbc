//! The state's directory, and the one keeper that it has: a server reaches it, or starts it.
//!
//! A keeper holds a lock on the directory for as long as it lives. Of two that are started at once, by servers that start at once, one
//! ends: its server would otherwise hand VMs to a keeper whose socket the other one has replaced, and no successor would find them.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread::Builder;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, Mode, OFlags, flock, open};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::process::geteuid;

use super::left::Left;
use super::wire::{Message, connect, receive, send};
use super::{KeptVm, SOCKET, StateError, StateOptions, book};
use crate::options::OnFailure;
use crate::peer::{pid_of, user_of};
use crate::porter::Porter;

/// The time in which a keeper must start, the end of the one before included.
pub(super) const START_LIMIT: Duration = Duration::from_secs(5);

/// How long a keeper that refuses this server may be one that is ending, or that has not noticed its server's end.
const REFUSAL_LIMIT: Duration = Duration::from_millis(500);

/// After which a keeper that has accepted a connection and says nothing counts as stopped.
const ANSWER_LIMIT: Duration = Duration::from_secs(30);

/// How long to wait before the next attempt.
const PAUSE: Duration = Duration::from_millis(5);

/// A keeper, and what it has kept.
pub(super) struct Reached {
    pub(super) socket: OwnedFd,
    pub(super) vms: Vec<KeptVm>,
    /// The first number that none of them has.
    pub(super) next_id: u64,
}

/// Makes the directory, if it is missing, and connects to its keeper, or starts it.
pub(super) fn reach(
    options: &StateOptions,
    porter: Option<&Porter>,
    on_failure: OnFailure,
) -> Result<Reached, StateError> {
    let directory = &options.directory;
    let failed = |source| StateError::Directory {
        directory: directory.clone(),
        source,
    };
    make_directory(directory).map_err(failed)?;
    let path = directory.join(SOCKET);
    let mut is_started = false;
    let mut refused_since = None;
    loop {
        let socket = match connect(&path, ANSWER_LIMIT) {
            Ok(socket) => socket,
            Err(error) if has_no_keeper(&error) && !is_started => {
                is_started = true;
                start_keeper(options, porter, &path)?
            }
            // There may be a keeper, with VMs that another one would lose.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return Err(failed(silent(None, ANSWER_LIMIT)));
            }
            Err(error) => return Err(failed(error)),
        };
        match left_by_others(&socket, directory, on_failure, ANSWER_LIMIT) {
            Err(refused @ StateError::InUse { .. }) => {
                let since = *refused_since.get_or_insert_with(Instant::now);
                if since.elapsed() > REFUSAL_LIMIT {
                    return Err(refused);
                }
                std::thread::sleep(PAUSE);
            }
            left => {
                let Left { vms, next_id, .. } = left?;
                return Ok(Reached {
                    socket,
                    vms,
                    next_id,
                });
            }
        }
    }
}

/// How a keeper that has ended is replaced.
pub(super) fn replace(options: StateOptions, porter: Arc<Porter>) -> book::Replace {
    let path = options.directory.join(SOCKET);
    Box::new(move || {
        let socket = match connect(&path, ANSWER_LIMIT) {
            Ok(socket) => socket,
            Err(error) if has_no_keeper(&error) => {
                start_keeper(&options, Some(&porter), &path).map_err(io::Error::other)?
            }
            Err(error) => return Err(error),
        };
        // VMs of nobody: another keeper has come and gone in between.
        let directory = &options.directory;
        left_by_others(&socket, directory, OnFailure::Stall, ANSWER_LIMIT)
            .map_err(io::Error::other)?;
        Ok(socket)
    })
}

/// Whether a failed connection means that nobody listens.
fn has_no_keeper(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
    )
}

/// The VMs that a keeper has, all of which it sends within `limit` of one another.
pub(super) fn left_by_others(
    socket: &OwnedFd,
    directory: &Path,
    on_failure: OnFailure,
    limit: Duration,
) -> Result<Left, StateError> {
    let failed = |source: io::Error| StateError::Directory {
        directory: directory.into(),
        source,
    };
    check_user(socket.as_fd()).map_err(failed)?;
    let set_limit = |limit| set_socket_timeout(socket, Timeout::Recv, limit);
    set_limit(Some(limit)).map_err(|errno| failed(errno.into()))?;
    let mut left = Left::default();
    loop {
        match receive(socket.as_fd()) {
            Ok(None) => {
                return Err(StateError::InUse {
                    directory: directory.into(),
                });
            }
            Ok(Some((Message::Kept { id }, descriptors))) => left.add(id, descriptors),
            Ok(Some((Message::Done, _))) => break,
            Ok(Some(_)) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return Err(failed(silent(pid_of(socket.as_fd()).ok(), limit)));
            }
            Err(error) => return Err(failed(error)),
        }
    }
    set_limit(None).map_err(|errno| failed(errno.into()))?;
    let forget = |id| send(socket.as_fd(), &Message::Forget { id }, &[]);
    left.settle(on_failure, forget).map_err(failed)?;
    Ok(left)
}

/// The error of a keeper that does not answer.
fn silent(pid: Option<i32>, limit: Duration) -> io::Error {
    let process = pid.map_or_else(
        || "its keeper".to_owned(),
        |pid| format!("its keeper (process {pid})"),
    );
    let text = format!(
        "{process} has not answered for {limit:?}: if it is stopped, continue it (kill -CONT); if it is killed, its VMs have no server any more"
    );
    io::Error::new(io::ErrorKind::TimedOut, text)
}

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

/// Locks the directory for as long as what is returned is open: its keeper does. Waits for a keeper that is ending.
pub(super) fn lock(directory: &Path, limit: Duration) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let lock = open(directory, flags, Mode::empty())?;
    let end = Instant::now() + limit;
    loop {
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(lock),
            Err(Errno::WOULDBLOCK) if Instant::now() < end => std::thread::sleep(PAUSE),
            Err(Errno::WOULDBLOCK) => {
                return Err(io::Error::other("the directory has another keeper"));
            }
            Err(errno) => return Err(errno.into()),
        }
    }
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

/// Starts the keeper as a process that a signal to this one's group does not reach: by the porter, if there is one.
fn start_keeper(
    options: &StateOptions,
    porter: Option<&Porter>,
    path: &Path,
) -> Result<OwnedFd, StateError> {
    let failed = |source| StateError::Keeper {
        directory: options.directory.clone(),
        source,
    };
    let mut child = match porter {
        Some(porter) => {
            let asked = porter.spawn(&options.keeper);
            asked.map_err(|errno| failed(errno.into()))?;
            None
        }
        None => Some(spawn(&options.keeper).map_err(failed)?),
    };
    let end = Instant::now() + START_LIMIT;
    loop {
        match connect(path, ANSWER_LIMIT) {
            Ok(socket) => {
                // Reaped if it ends before this process.
                let reaping = Builder::new().name("pt-keepers-end".into());
                let _ = child.map(|mut child| reaping.spawn(move || child.wait()));
                return Ok(socket);
            }
            Err(error) if Instant::now() >= end => return Err(failed(error)),
            Err(_) => {}
        }
        let status = child.as_mut().map(Child::try_wait);
        if let Some(Ok(Some(status))) = status {
            return Err(failed(io::Error::other(format!("it ended: {status}"))));
        }
        std::thread::sleep(PAUSE);
    }
}

fn spawn(command: &[OsString]) -> io::Result<Child> {
    let Some((program, arguments)) = command.split_first() else {
        return Err(io::Error::other("no command for it"));
    };
    Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .process_group(0)
        .spawn()
}
