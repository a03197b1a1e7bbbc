//! VMs that outlive their server: a keeper process holds what a successor needs.
//!
//! The keeper ([`keep`]) is a small process of its own that survives `kill -9` of the server. For each VM
//! it holds the userfaultfd, the connection, and two memfds: the page maps, which the server has mapped, and
//! the VM's description. A server that starts with the same directory receives all of them, and goes on.
//! `docs/design/serve.md` describes why nothing is lost.

mod keeper;
mod wire;

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pagetide_memory::{MapFile, PageSize};
use pagetide_sources::FileIdentity;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::process::geteuid;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::handshake::{MAX_REGIONS, VmRegion, check_together, checked_region};
use crate::peer::user_of;

pub use keeper::keep;
use wire::{Message, connect, receive, send};

/// The name of the keeper's socket in the state's directory.
const SOCKET: &str = "keeper.sock";

/// The time in which a keeper must start.
const START_LIMIT: Duration = Duration::from_secs(5);

/// The longest description of a VM.
const MAX_DESCRIPTION_BYTES: u64 = 64 << 20;

/// Where a server keeps its VMs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateOptions {
    /// The directory of the keeper's socket. It is made if it is missing, for its owner only.
    pub directory: PathBuf,
    /// The command of the keeper: a program that calls [`keep`] with that directory, and its arguments.
    pub keeper: Vec<OsString>,
}

/// Why the state cannot be used.
#[derive(Debug, Error)]
pub enum StateError {
    /// The directory cannot be used.
    #[error("the state directory {}", directory.display())]
    Directory {
        /// The directory.
        directory: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The keeper did not start.
    #[error("the keeper of {} did not start", directory.display())]
    Keeper {
        /// The directory.
        directory: PathBuf,
        /// The last error.
        #[source]
        source: io::Error,
    },
    /// Another server uses the directory.
    #[error("another server uses the state directory {}", directory.display())]
    InUse {
        /// The directory.
        directory: PathBuf,
    },
}

/// What the description of a VM and its page maps look like. A server goes on only with VMs that were kept by this number.
/// To be raised with each change of either that an earlier server would read wrongly.
const FORMAT: u32 = 1;

/// A region of a kept VM, as its VMM has described it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct KeptRegion {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) page_bytes: u64,
    pub(crate) offset: u64,
}

impl From<&VmRegion> for KeptRegion {
    fn from(region: &VmRegion) -> Self {
        Self {
            address: region.range.start().as_u64(),
            bytes: region.bytes(),
            page_bytes: region.page_size.bytes(),
            offset: region.offset,
        }
    }
}

impl KeptRegion {
    /// The region, with the bounds of the handshake. `index` is its number.
    fn vm_region(&self, index: usize) -> Option<VmRegion> {
        let sizes = [PageSize::Size4K, PageSize::Size2M, PageSize::Size1G];
        let page_size = sizes
            .into_iter()
            .find(|size| size.bytes() == self.page_bytes)?;
        checked_region(index, self.address, self.bytes, self.offset, page_size).ok()
    }
}

/// What a successor has to know of a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Description {
    /// [`FORMAT`]; 0 in the first descriptions, which had no number.
    #[serde(default)]
    format: u32,
    pub(crate) socket: String,
    pub(crate) image: String,
    pub(crate) digest: String,
    /// The image's file, if the digest does not cover all of its content.
    #[serde(default)]
    pub(crate) file: Option<FileIdentity>,
    pub(crate) regions: Vec<KeptRegion>,
    /// Its VMM speaks the native protocol.
    #[serde(default)]
    pub(crate) is_native: bool,
    /// When the recording of its working set has begun, if it is recorded: microseconds of CLOCK_MONOTONIC.
    #[serde(default)]
    pub(crate) recording_since_us: Option<u64>,
}

impl Description {
    /// That of a VM of Firecracker's protocol whose working set is not recorded.
    pub(crate) fn new(
        socket: String,
        image: String,
        digest: String,
        regions: Vec<KeptRegion>,
    ) -> Self {
        Self {
            format: FORMAT,
            socket,
            image,
            digest,
            file: None,
            regions,
            is_native: false,
            recording_since_us: None,
        }
    }

    /// The regions; `None` if no VMM could have sent them.
    pub(crate) fn vm_regions(&self) -> Option<Vec<VmRegion>> {
        if self.regions.is_empty() || self.regions.len() > MAX_REGIONS {
            return None;
        }
        let numbered = self.regions.iter().enumerate();
        let regions: Option<Vec<_>> = numbered
            .map(|(index, kept)| kept.vm_region(index))
            .collect();
        regions.filter(|regions| check_together(regions).is_ok())
    }
}

/// A VM that a former server has left.
#[derive(Debug)]
pub(crate) struct KeptVm {
    pub(crate) id: u64,
    pub(crate) uffd: OwnedFd,
    pub(crate) stream: UnixStream,
    pub(crate) maps: Arc<MapFile>,
    pub(crate) description: Description,
}

/// The connection to the keeper.
#[derive(Debug)]
pub(crate) struct State {
    socket: Mutex<OwnedFd>,
    next_id: AtomicU64,
}

impl State {
    /// Connects to the directory's keeper, or starts it. Returns the VMs that a former server has left.
    pub(crate) fn open(options: &StateOptions) -> Result<(Self, Vec<KeptVm>), StateError> {
        let directory = &options.directory;
        let failed = |source: io::Error| StateError::Directory {
            directory: directory.clone(),
            source,
        };
        make_directory(directory).map_err(failed)?;
        let path = directory.join(SOCKET);
        let socket = match connect(&path) {
            Ok(socket) => socket,
            Err(error) if has_no_keeper(&error) => start_keeper(options, &path)?,
            // There may be a keeper, with VMs that another one would lose.
            Err(error) => return Err(failed(error)),
        };
        check_user(socket.as_fd()).map_err(failed)?;
        let (mut vms, mut next_id) = (Vec::new(), 1);
        loop {
            let received = receive(socket.as_fd()).map_err(failed)?;
            match received {
                None => {
                    return Err(StateError::InUse {
                        directory: directory.clone(),
                    });
                }
                Some((Message::Kept { id }, descriptors)) => {
                    // Also those that stay with the keeper: their numbers are taken.
                    next_id = next_id.max(id.saturating_add(1));
                    match kept_vm(id, descriptors) {
                        Ok(vm) => vms.push(vm),
                        Err(error) => tracing::error!(
                            vm = id,
                            %error,
                            "a VM of a former server is not served: it sleeps, and stays with the keeper"
                        ),
                    }
                }
                Some((Message::Done, _)) => break,
                Some(_) => {}
            }
        }
        Ok((
            Self {
                socket: Mutex::new(socket),
                next_id: AtomicU64::new(next_id),
            },
            vms,
        ))
    }

    /// One without a keeper.
    #[cfg(test)]
    pub(crate) fn unattended() -> Self {
        let (socket, _) = UnixStream::pair().unwrap();
        Self {
            socket: Mutex::new(socket.into()),
            next_id: AtomicU64::new(1),
        }
    }

    /// Keeps a VM. Returns its number at the keeper.
    pub(crate) fn keep(
        &self,
        uffd: BorrowedFd<'_>,
        stream: &UnixStream,
        maps: BorrowedFd<'_>,
        description: &Description,
    ) -> io::Result<u64> {
        let text = serde_json::to_vec(description)?;
        let file = memfd_create(
            "pagetide-vm",
            MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
        )?;
        let mut written = 0;
        while let Some(rest) = text.get(written..).filter(|rest| !rest.is_empty()) {
            written += rustix::io::write(&file, rest)?;
        }
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let descriptors = [uffd, stream.as_fd(), maps, file.as_fd()];
        send(self.lock().as_fd(), &Message::Keep { id }, &descriptors)?;
        Ok(id)
    }

    /// Whether the keeper has ended: nobody holds the VMs that were kept. It says nothing once a server has begun.
    pub(crate) fn is_lost(&self) -> bool {
        let socket = self.lock();
        let mut polled = [PollFd::new(&*socket, PollFlags::IN)];
        poll(&mut polled, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
    }

    /// Gives a VM up: it has gone, or needs no server any more.
    pub(crate) fn forget(&self, id: u64) {
        self.tell(&Message::Forget { id });
    }

    /// Ends the keeper, if it keeps nothing.
    pub(crate) fn end(&self) {
        self.tell(&Message::End);
    }

    fn tell(&self, message: &Message) {
        if let Err(error) = send(self.lock().as_fd(), message, &[]) {
            tracing::error!(%error, "the keeper does not answer: VMs do not outlive this server");
        }
    }

    fn lock(&self) -> MutexGuard<'_, OwnedFd> {
        self.socket.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether a failed connection means that nobody listens.
fn has_no_keeper(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
    )
}

fn make_directory(directory: &Path) -> io::Result<()> {
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

/// Checks that the process at the other end is of this one's user, or root's.
fn check_user(socket: BorrowedFd<'_>) -> io::Result<()> {
    let (other, user) = (user_of(socket)?, geteuid().as_raw());
    match other == user || other == 0 {
        true => Ok(()),
        false => Err(refused(format!(
            "the process at the other end of {SOCKET} runs as user {other}, and this one as {user}"
        ))),
    }
}

/// Starts the keeper as a process that a signal to this one's group does not reach.
fn start_keeper(options: &StateOptions, path: &Path) -> Result<OwnedFd, StateError> {
    let failed = |source| StateError::Keeper {
        directory: options.directory.clone(),
        source,
    };
    let Some((program, arguments)) = options.keeper.split_first() else {
        return Err(failed(io::Error::other("no command for it")));
    };
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .process_group(0)
        .spawn()
        .map_err(failed)?;
    let end = Instant::now() + START_LIMIT;
    loop {
        match connect(path) {
            Ok(socket) => {
                // Reaped if it ends before this process.
                let reaping = std::thread::Builder::new().name("pt-keeper".into());
                let _ = reaping.spawn(move || child.wait());
                return Ok(socket);
            }
            Err(error) if Instant::now() >= end => return Err(failed(error)),
            Err(_) => {}
        }
        if let Ok(Some(status)) = child.try_wait() {
            return Err(failed(io::Error::other(format!("it ended: {status}"))));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn kept_vm(id: u64, descriptors: Vec<OwnedFd>) -> io::Result<KeptVm> {
    let wrong = || io::Error::other("the keeper sent other descriptors");
    let [uffd, stream, maps, file]: [OwnedFd; 4] = descriptors.try_into().map_err(|_| wrong())?;
    let bytes = u64::try_from(rustix::fs::fstat(&file)?.st_size).unwrap_or(u64::MAX);
    if bytes > MAX_DESCRIPTION_BYTES {
        return Err(wrong());
    }
    let mut text = vec![0; usize::try_from(bytes).unwrap_or(0)];
    let read = rustix::io::pread(&file, &mut text, 0)?;
    let description: Description = serde_json::from_slice(text.get(..read).unwrap_or_default())?;
    let format = description.format;
    if format != FORMAT {
        return Err(io::Error::other(format!(
            "it was kept by another version of the server (format {format}, not {FORMAT}), which can go on with it"
        )));
    }
    Ok(KeptVm {
        id,
        uffd,
        stream: UnixStream::from(stream),
        maps: MapFile::open(Arc::new(maps)).map_err(io::Error::other)?,
        description,
    })
}

/// A memfd for page maps of `bytes` bytes together.
pub(crate) fn map_file(bytes: u64) -> io::Result<Arc<MapFile>> {
    let file = memfd_create(
        "pagetide-maps",
        MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
    )?;
    ftruncate(&file, bytes)?;
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW)?;
    MapFile::open(Arc::new(file)).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn description(regions: &[(u64, u64, u64, u64)]) -> Description {
        let kept = |&(address, bytes, page_bytes, offset): &_| KeptRegion {
            address,
            bytes,
            page_bytes,
            offset,
        };
        Description {
            format: FORMAT,
            socket: "a.sock".into(),
            image: "a.mem".into(),
            digest: String::new(),
            file: None,
            is_native: false,
            recording_since_us: None,
            regions: regions.iter().map(kept).collect(),
        }
    }

    /// It may keep VMs.
    #[test]
    fn a_keeper_that_cannot_be_reached_is_not_replaced() {
        use std::os::unix::net::UnixDatagram;
        let directory = tempfile::tempdir().unwrap();
        // Connecting fails, and not because nobody is there.
        let path = directory.path().join(SOCKET);
        let _socket = UnixDatagram::bind(&path).unwrap();
        let replaced = directory.path().join("replaced");
        let options = StateOptions {
            directory: directory.path().to_owned(),
            keeper: vec!["touch".into(), replaced.clone().into()],
        };
        let error = State::open(&options).unwrap_err();
        assert!(matches!(error, StateError::Directory { .. }), "{error}");
        assert!(path.exists() && !replaced.exists());
        // A socket that a killed keeper has left.
        std::fs::remove_file(&path).unwrap();
        drop(wire::listen_at(&path).unwrap());
        let error = State::open(&options).unwrap_err();
        assert!(matches!(error, StateError::Keeper { .. }), "{error}");
        assert!(replaced.exists());
    }

    #[test]
    fn a_directory_that_another_user_could_write_to_is_refused() {
        use std::os::unix::fs::PermissionsExt;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("state");
        make_directory(&path).unwrap();
        for mode in [0o777, 0o770, 0o1777, 0o702] {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            let error = make_directory(&path).unwrap_err();
            assert!(
                error.to_string().contains("chmod go-w"),
                "{mode:o}: {error}"
            );
        }
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        make_directory(&path).unwrap();
        if std::os::unix::fs::chown(&path, Some(65_534), None).is_ok() && geteuid().is_root() {
            let error = make_directory(&path).unwrap_err();
            assert!(error.to_string().contains("user 65534"), "{error}");
        }
    }

    /// What it says may mean something else.
    #[test]
    fn a_vm_that_another_version_has_kept_stays_with_the_keeper() {
        let (keeper, server) = UnixStream::pair().unwrap();
        let state = State {
            socket: Mutex::new(server.into()),
            next_id: AtomicU64::new(1),
        };
        for format in [0, FORMAT, FORMAT + 1] {
            let description = Description {
                format,
                ..description(&[(4096, 8192, 4096, 0)])
            };
            let maps = map_file(4096).unwrap();
            let uffd = std::fs::File::open("/dev/null").unwrap();
            let (stream, _) = UnixStream::pair().unwrap();
            let kept = state.keep(uffd.as_fd(), &stream, maps.as_fd(), &description);
            kept.unwrap();
            let (_, descriptors) = receive(keeper.as_fd()).unwrap().unwrap();
            let taken = kept_vm(7, descriptors);
            assert_eq!(taken.is_ok(), format == FORMAT, "{taken:?}");
        }
    }

    /// Nothing that a VMM could not send is taken over, whoever wrote it.
    #[test]
    fn a_description_has_the_bounds_of_the_handshake() {
        const HUGE: u64 = 2 << 20;
        let sound = [(4096, 8192, 4096, 4096), (HUGE, HUGE, HUGE, HUGE)];
        let found = description(&sound).vm_regions().unwrap();
        assert_eq!(found.len(), 2);
        assert_eq!((found[0].bytes(), found[1].offset), (8192, HUGE));
        let unsound: [&[(u64, u64, u64, u64)]; 9] = [
            &[],
            &[(4096, 8192, 512, 0)],
            &[(4097, 8192, 4096, 0)],
            &[(4096, 8191, 4096, 0)],
            &[(4096, 0, 4096, 0)],
            &[(4096, 8192, 4096, 1)],
            &[(4096, 8192, 4096, u64::MAX - 4095)],
            &[(4096, 8 << 40, 4096, 0)],
            &[(4096, 8192, 4096, 0), (8192, 4096, 4096, 8192)],
        ];
        for regions in unsound {
            assert_eq!(description(regions).vm_regions(), None, "{regions:?}");
        }
        let many: Vec<_> = (1..=MAX_REGIONS as u64 + 1)
            .map(|page| (page << 12, 4096, 4096, page << 12))
            .collect();
        assert_eq!(description(&many).vm_regions(), None);
        assert!(description(&many[1..]).vm_regions().is_some());
    }
}
