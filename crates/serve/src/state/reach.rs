//! How a server reaches the keeper of a state's directory, or starts it.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread::Builder;
use std::time::{Duration, Instant};

use rustix::net::sockopt::{Timeout, set_socket_timeout};

use super::access::{LOCK_LIMIT, PAUSE, check_user, lock, make_directory};
use super::left::Left;
use super::wire::{Message, NEW, connect, receive, send};
use super::{KeptVm, MAX_SOCKET_BYTES, SOCKET, StateError, StateOptions, book};
use crate::options::OnFailure;
use crate::peer::pid_of;
use crate::porter::Porter;

/// The time in which a keeper must start, the end of the one before included.
const START_LIMIT: Duration = Duration::from_secs(5);
const _: () = assert!(LOCK_LIMIT.as_secs() < START_LIMIT.as_secs());

/// How long a keeper that refuses this server may be one that is ending, or that has not noticed its server's end.
const REFUSAL_LIMIT: Duration = Duration::from_millis(500);

/// After which a keeper counts as stopped that does not accept a connection, or says nothing.
const ANSWER_LIMIT: Duration = Duration::from_secs(30);

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
    check_length(directory)?;
    make_directory(directory).map_err(failed)?;
    let path = directory.join(SOCKET);
    let mut started = None;
    let mut refused_since = None;
    loop {
        let socket = match reached(&path) {
            Ok(socket) => socket,
            Err(error) if has_no_keeper(&error) => match started {
                None => {
                    started = Some(Instant::now());
                    start_keeper(options, porter, &path)?
                }
                // Another server's keeper has just ended, and this one's takes its place.
                Some(since) if since.elapsed() < START_LIMIT => {
                    std::thread::sleep(PAUSE);
                    continue;
                }
                Some(_) => return Err(failed(error)),
            },
            // There may be a keeper, with VMs that another one would lose.
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

/// Checks that the keeper's socket in the directory can have an address, also while it is made.
pub(crate) fn check_length(directory: &Path) -> Result<(), StateError> {
    let bytes = |path: &Path| path.as_os_str().len();
    let socket = bytes(&directory.join(SOCKET)) + NEW.len();
    let bytes = bytes(directory);
    if socket > MAX_SOCKET_BYTES {
        return Err(StateError::TooLong {
            directory: directory.into(),
            bytes,
            most: (MAX_SOCKET_BYTES + bytes).saturating_sub(socket),
        });
    }
    Ok(())
}

/// How a keeper that has ended is replaced.
pub(super) fn replace(options: StateOptions, porter: Arc<Porter>) -> book::Replace {
    let path = options.directory.join(SOCKET);
    Box::new(move || {
        let socket = match reached(&path) {
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

/// A connection to the keeper.
fn reached(path: &Path) -> io::Result<OwnedFd> {
    connect(path, ANSWER_LIMIT).map_err(|error| match error.kind() {
        io::ErrorKind::WouldBlock => silent(None, ANSWER_LIMIT),
        _ => error,
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
    let set_limits = |limit| {
        set_socket_timeout(socket, Timeout::Recv, limit)
            .and_then(|()| set_socket_timeout(socket, Timeout::Send, limit))
            .map_err(|errno| failed(errno.into()))
    };
    set_limits(Some(limit))?;
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
                let pid = pid_of(socket.as_fd()).ok().filter(|&pid| pid > 0);
                return Err(failed(silent(pid, limit)));
            }
            Err(error) => return Err(failed(error)),
        }
    }
    let forget = |id| send(socket.as_fd(), &Message::Forget { id }, &[]);
    left.settle(on_failure, forget).map_err(failed)?;
    set_limits(None)?;
    Ok(left)
}

/// The error of a keeper that does not answer.
fn silent(pid: Option<i32>, limit: Duration) -> io::Error {
    let process = pid.map_or_else(
        || "its keeper".to_owned(),
        |pid| format!("its keeper (process {pid})"),
    );
    let text = format!(
        "{process} has not answered for {limit:?}: if it is stopped, continue it (kill -CONT); do not kill it, for then no server gets its VMs"
    );
    io::Error::new(io::ErrorKind::TimedOut, text)
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
    // Where another keeper has the directory, that is the reason.
    let not_started = |error| match lock(&options.directory, Duration::ZERO) {
        Err(locked) if locked.kind() == io::ErrorKind::WouldBlock => failed(locked),
        _ => failed(error),
    };
    let end = Instant::now() + START_LIMIT;
    loop {
        match reached(path) {
            Ok(socket) => {
                // Reaped if it ends before this process.
                let reaping = Builder::new().name("pt-keepers-end".into());
                let _ = child.map(|mut child| reaping.spawn(move || child.wait()));
                return Ok(socket);
            }
            Err(error) if error.kind() == io::ErrorKind::TimedOut => return Err(failed(error)),
            Err(error) if Instant::now() >= end => return Err(not_started(error)),
            Err(_) => {}
        }
        let status = child.as_mut().map(Child::try_wait);
        if let Some(Ok(Some(status))) = status {
            return Err(not_started(io::Error::other(format!("it ended: {status}"))));
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
