//! The sockets at which VMs connect.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Uid, fstat, renameat, statat, unlinkat};
use rustix::io::Errno;
use rustix::net::{AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use thiserror::Error;

use crate::connection::Guarded;
use crate::porter::Porter;

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
    /// The socket could not be given to its owner.
    #[error(
        "{}: only a process with CAP_CHOWN, such as root's, can give this socket to {uid}:{gid}",
        path.display()
    )]
    Owner {
        /// The path.
        path: PathBuf,
        /// The user.
        uid: u32,
        /// The group.
        gid: u32,
        /// The kernel's error.
        #[source]
        source: io::Error,
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
    pub(crate) socket: Guarded<UnixListener>,
    path: PathBuf,
    /// The device and the number of its file; `None` if a service manager has made it.
    node: Option<(u64, u64)>,
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
        let directory = open_directory(path).map_err(failed)?;
        let name = path
            .file_name()
            .ok_or_else(|| failed(Errno::ISDIR.into()))?;
        // Whoever owns a directory above may have the path lead elsewhere meanwhile.
        check_free(&in_directory(&directory, name), path)?;
        // A path of a socket has at most 107 bytes, which the new name beside a long path would exceed. Several threads
        // bind in one directory at a time.
        static BOUND: AtomicU64 = AtomicU64::new(0);
        let number = BOUND.fetch_add(1, Ordering::Relaxed);
        let first_name = format!(".pagetide.{}.{number}", std::process::id());
        let new = in_directory(&directory, first_name.as_ref());
        let _ = std::fs::remove_file(&new);
        let socket = UnixListener::bind(&new).map_err(failed)?;
        let placed = place(&socket, &new, mode).map_err(failed).and_then(|node| {
            give(&node, path, owner)?;
            renameat(&directory, &first_name, &directory, name)
                .and_then(|()| fstat(&node))
                .map_err(|errno| failed(errno.into()))
        });
        match placed {
            Ok(status) => Ok(Self {
                socket: Guarded::guard(socket, None),
                path: path.into(),
                node: Some((status.st_dev, status.st_ino)),
            }),
            Err(error) => {
                let _ = std::fs::remove_file(&new);
                Err(error)
            }
        }
    }

    /// Has the porter close the socket in the end, with connections that nobody has accepted.
    pub(crate) fn with_porter(mut self, porter: Option<Arc<Porter>>) -> Self {
        self.socket.set_porter(porter);
        self
    }

    /// A socket that a service manager has opened; `None` if it has no path.
    pub(crate) fn inherited(socket: UnixListener) -> Option<Self> {
        // A connection has the path of its listener, too.
        if !rustix::net::sockopt::socket_acceptconn(&socket).ok()? {
            return None;
        }
        let path = socket.local_addr().ok()?.as_pathname()?.to_owned();
        socket.set_nonblocking(true).ok()?;
        Some(Self {
            socket: Guarded::guard(socket, None),
            path,
            node: None,
        })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Whether a service manager has made it.
    pub(crate) fn is_inherited(&self) -> bool {
        self.node.is_none()
    }
}

/// A file of a directory, wherever that is now.
fn in_directory(directory: &OwnedFd, name: &OsStr) -> PathBuf {
    let directory = format!("/proc/self/fd/{}", directory.as_raw_fd());
    Path::new(&directory).join(name)
}

/// Opens the directory of a path.
fn open_directory(path: &Path) -> io::Result<OwnedFd> {
    let directory = match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(rustix::fs::open(directory, flags, Mode::empty())?)
}

/// Gives a new socket its permissions. Returns its file.
///
/// The directory may belong to the user of a jail, who may put a link into the socket's place at any time: what
/// is changed is the file that was opened, and it is a socket.
fn place(socket: &UnixListener, new: &Path, mode: u32) -> io::Result<OwnedFd> {
    socket.set_nonblocking(true)?;
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let node = rustix::fs::open(new, flags, Mode::empty())?;
    if FileType::from_raw_mode(fstat(&node)?.st_mode) != FileType::Socket {
        return Err(io::Error::other(
            "another file was put in the socket's place",
        ));
    }
    let link = format!("/proc/self/fd/{}", node.as_raw_fd());
    std::fs::set_permissions(link, std::fs::Permissions::from_mode(mode))?;
    Ok(node)
}

/// Gives a socket to its owner.
fn give(node: &OwnedFd, path: &Path, owner: Option<(u32, u32)>) -> Result<(), ListenError> {
    let Some((uid, gid)) = owner else {
        return Ok(());
    };
    let (user, group) = (Uid::from_raw(uid), Gid::from_raw(gid));
    let given = rustix::fs::chownat(node, "", Some(user), Some(group), AtFlags::EMPTY_PATH);
    given.map_err(|errno| ListenError::Owner {
        path: path.into(),
        uid,
        gid,
        source: errno.into(),
    })
}

/// Checks that a server could listen at `path`, or that one does.
pub(crate) fn check(path: &Path) -> Result<(), ListenError> {
    match check_free(path, path) {
        Ok(()) | Err(ListenError::InUse { .. }) => {}
        Err(error) => return Err(error),
    }
    open_directory(path)
        .map(drop)
        .map_err(|source| ListenError::Bind {
            path: path.into(),
            source,
        })
}

/// Looks at the file that `path` names, by another name for it.
fn check_free(file: &Path, path: &Path) -> Result<(), ListenError> {
    let status = match std::fs::symlink_metadata(file) {
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
    match connect(file) {
        Err(Errno::CONNREFUSED) => Ok(()),
        _ => Err(ListenError::InUse { path: path.into() }),
    }
}

/// Connects, and waits for nothing: whoever listens there may accept nobody.
fn connect(file: &Path) -> Result<(), Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // A name that is short enough for an address.
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let node = rustix::fs::open(file, flags, Mode::empty())?;
    let name = format!("/proc/self/fd/{}", node.as_raw_fd());
    rustix::net::connect(&socket, &SocketAddrUnix::new(name)?)
}

/// Removes a socket at which no process listens.
pub(crate) fn remove_stale(path: &Path) -> io::Result<()> {
    match check_free(path, path) {
        Ok(()) => match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        },
        Err(error) => Err(io::Error::other(error)),
    }
}

/// Removes a file if it is still this one: the path may lead to another server's socket by now.
fn remove_if(path: &Path, node: (u64, u64)) -> io::Result<()> {
    let directory = open_directory(path)?;
    let name = path.file_name().ok_or(Errno::ISDIR)?;
    let status = statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW)?;
    if (status.st_dev, status.st_ino) == node {
        unlinkat(&directory, name, AtFlags::empty())?;
    }
    Ok(())
}

impl Drop for Listener {
    fn drop(&mut self) {
        let Some(node) = self.node else {
            return;
        };
        // If it cannot be removed, a later server takes its place.
        let _ = remove_if(&self.path, node);
        // Nobody connects any more, not even by a descriptor of the socket's file.
        let _ = rustix::net::shutdown(&*self.socket, Shutdown::Read);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    /// Any path at which a client can connect is one at which a server can listen.
    #[test]
    fn a_path_may_be_as_long_as_a_sockets_address() {
        const LONGEST: usize = 107;
        let directory = tempfile::tempdir().unwrap();
        let before = directory.path().as_os_str().len() + 1;
        let path = directory.path().join("s".repeat(LONGEST - before));
        let listener = Listener::bind(&path, 0o600, None).unwrap();
        UnixStream::connect(&path).unwrap();
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
        drop(listener);
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
    }

    /// Kind: a name is taken for the thing. Whoever owns a directory of the path has it lead to another socket.
    #[test]
    fn the_socket_of_another_directory_is_not_removed() {
        let directory = tempfile::tempdir().unwrap();
        let [first, second, elsewhere] = ["a", "b", "c"].map(|name| directory.path().join(name));
        std::fs::create_dir(&first).unwrap();
        std::fs::create_dir(&second).unwrap();
        let mine = Listener::bind(&first.join("s"), 0o600, None).unwrap();
        let other = Listener::bind(&second.join("s"), 0o600, None).unwrap();
        std::fs::rename(&first, &elsewhere).unwrap();
        std::os::unix::fs::symlink(&second, &first).unwrap();
        drop(mine);
        UnixStream::connect(second.join("s")).unwrap();
        drop(other);
        assert_eq!(std::fs::read_dir(&second).unwrap().count(), 0);
    }

    /// Kind: a name that several threads of one process use at a time.
    #[test]
    fn threads_that_bind_in_one_directory_get_their_own_sockets() {
        const THREADS: usize = 8;
        const EACH: usize = 50;
        let directory = tempfile::tempdir().unwrap();
        let begin = std::sync::Barrier::new(THREADS);
        let bind_some = |thread: usize| {
            begin.wait();
            let path = |socket: usize| directory.path().join(format!("{thread}.{socket}"));
            let bind = |socket| Listener::bind(&path(socket), 0o600, None).unwrap();
            (0..EACH).map(bind).collect::<Vec<_>>()
        };
        let bound: Vec<Listener> = std::thread::scope(|scope| {
            let start = |thread| scope.spawn(move || bind_some(thread));
            let threads: Vec<_> = (0..THREADS).map(start).collect();
            let join = |thread: std::thread::ScopedJoinHandle<'_, Vec<_>>| thread.join().unwrap();
            threads.into_iter().flat_map(join).collect()
        });
        for listener in &bound {
            let _client = UnixStream::connect(listener.path()).unwrap();
            // It does not wait: an error says that the client is at another socket.
            listener.socket.accept().unwrap();
        }
    }

    #[test]
    fn a_connection_is_no_inherited_socket() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let listener = Listener::bind(&path, 0o600, None).unwrap();
        let _client = UnixStream::connect(&path).unwrap();
        let (connection, _) = listener.socket.accept().unwrap();
        assert!(Listener::inherited(OwnedFd::from(connection).into()).is_none());
        let socket = listener.socket.try_clone().unwrap();
        assert!(Listener::inherited(socket).is_some());
    }

    /// Its queue is full, and a connection would wait for room in it.
    #[test]
    fn a_socket_whose_owner_accepts_nobody_is_in_use() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        rustix::net::bind(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        rustix::net::listen(&socket, 0).unwrap();
        let _waiting = UnixStream::connect(&path).unwrap();
        assert_eq!(connect(&path), Err(Errno::AGAIN));
        let refused = Listener::bind(&path, 0o600, None);
        assert!(matches!(refused, Err(ListenError::InUse { .. })));
    }

    /// Whoever owns the directory can put a link into the place of the new socket at any time.
    #[test]
    fn a_link_in_the_sockets_place_changes_no_other_file() {
        let directory = tempfile::tempdir().unwrap();
        let (new, secret) = (
            directory.path().join("new"),
            directory.path().join("secret"),
        );
        let socket = UnixListener::bind(&new).unwrap();
        let node = place(&socket, &new, 0o660).unwrap();
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&new), 0o660);
        std::fs::write(&secret, "").unwrap();
        std::fs::set_permissions(&secret, std::fs::Permissions::from_mode(0o600)).unwrap();
        std::fs::remove_file(&new).unwrap();
        std::os::unix::fs::symlink(&secret, &new).unwrap();
        assert!(place(&socket, &new, 0o666).is_err());
        assert_eq!(mode(&secret), 0o600);
        // The owner is that of the file which was opened.
        let uid = rustix::process::geteuid().as_raw();
        let gid = rustix::process::getegid().as_raw();
        give(&node, &new, Some((uid, gid))).unwrap();
    }
}
