//! The sockets at which VMs connect.

use std::io;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::fs::{Gid, Uid};
use thiserror::Error;

/// Why a socket could not be bound.
#[derive(Debug, Error)]
pub enum ListenError {
    /// Another server listens there.
    #[error("{}: another process listens at this socket", path.display())]
    InUse {
        /// The path.
        path: PathBuf,
    },
    /// Another kind of file is in the way.
    #[error("{}: there is a file that is no socket", path.display())]
    NotASocket {
        /// The path.
        path: PathBuf,
    },
    /// Any other error.
    #[error("listening at {}", path.display())]
    Bind {
        /// The path.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

/// A listening socket. Its file is removed when it is dropped, unless a service manager has made it.
#[derive(Debug)]
pub(crate) struct Listener {
    pub(crate) socket: UnixListener,
    path: PathBuf,
    is_inherited: bool,
}

impl Listener {
    /// Listens at `path`, in place of a socket that a server has left behind. The socket appears with its
    /// permissions and when it accepts connections, not before.
    pub(crate) fn bind(
        path: &Path,
        mode: u32,
        owner: Option<(u32, u32)>,
    ) -> Result<Self, ListenError> {
        let failed = |source| ListenError::Bind {
            path: path.into(),
            source,
        };
        check_free(path)?;
        let mut name = path.as_os_str().to_owned();
        name.push(format!(".{}", std::process::id()));
        let new = PathBuf::from(name);
        let _ = std::fs::remove_file(&new);
        let socket = UnixListener::bind(&new).map_err(failed)?;
        let placed = place(&socket, &new, path, mode, owner);
        if let Err(error) = placed {
            let _ = std::fs::remove_file(&new);
            return Err(failed(error));
        }
        Ok(Self {
            socket,
            path: path.into(),
            is_inherited: false,
        })
    }

    /// A socket that a service manager has opened; `None` if it has no path.
    pub(crate) fn inherited(socket: UnixListener) -> Option<Self> {
        let path = socket.local_addr().ok()?.as_pathname()?.to_owned();
        socket.set_nonblocking(true).ok()?;
        Some(Self {
            socket,
            path,
            is_inherited: true,
        })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

fn place(
    socket: &UnixListener,
    new: &Path,
    path: &Path,
    mode: u32,
    owner: Option<(u32, u32)>,
) -> io::Result<()> {
    socket.set_nonblocking(true)?;
    std::fs::set_permissions(new, std::fs::Permissions::from_mode(mode))?;
    if let Some((uid, gid)) = owner {
        let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
        rustix::fs::chown(new, Some(uid), Some(gid))?;
    }
    std::fs::rename(new, path)
}

fn check_free(path: &Path) -> Result<(), ListenError> {
    let status = match std::fs::symlink_metadata(path) {
        Ok(status) => status,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(source) => {
            let path = path.into();
            return Err(ListenError::Bind { path, source });
        }
    };
    if !status.file_type().is_socket() {
        return Err(ListenError::NotASocket { path: path.into() });
    }
    match UnixStream::connect(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Ok(()),
        _ => Err(ListenError::InUse { path: path.into() }),
    }
}

/// Removes a socket at which no process listens.
pub(crate) fn remove_stale(path: &Path) -> io::Result<()> {
    match check_free(path) {
        Ok(()) => match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        },
        Err(error) => Err(io::Error::other(error)),
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if self.is_inherited {
            return;
        }
        let _ = std::fs::remove_file(&self.path);
    }
}
