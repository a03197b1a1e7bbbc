//! VMs that outlive their server: a keeper process holds what a successor needs.
//!
//! The keeper ([`keep`]) is a small process of its own that survives `kill -9` of the server. For each VM
//! it holds the userfaultfd, the connection, and two memfds: the page maps, which the server has mapped, and
//! the VM's description. A server that starts with the same directory receives all of them, and goes on.
//! `docs/design/serve.md` describes why nothing is lost.

mod book;
mod keeper;
mod store;
mod wire;

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use pagetide_memory::{MapFile, PageSize};
use pagetide_sources::FileIdentity;
use pagetide_uapi::userfaultfd::Userfaultfd;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::process::geteuid;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::handshake::{MAX_REGIONS, VmRegion, check_together, checked_region};
use crate::metrics::Metrics;
use crate::options::OnFailure;
use crate::peer::{Peer, user_of};
use crate::porter::Porter;

use book::{Book, Held};
pub use keeper::keep;
pub use store::DescriptorStore;
use wire::{Message, connect, receive, send};

/// The name of the keeper's socket in the state's directory.
const SOCKET: &str = "keeper.sock";

/// The time in which a keeper must start.
const START_LIMIT: Duration = Duration::from_secs(5);

/// How long a keeper that refuses this server may be one that is ending, or that has not noticed its server's end.
const REFUSAL_LIMIT: Duration = Duration::from_millis(500);

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

/// The VMs of a server, and its keeper.
#[derive(Debug)]
pub(crate) struct State {
    book: Arc<Book>,
    next_id: AtomicU64,
    /// Talks to the keeper.
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl State {
    /// Connects to the directory's keeper, or starts it: by the porter, if there is one, which also starts others later.
    /// Returns the VMs that a former server has left.
    pub(crate) fn open(
        options: &StateOptions,
        porter: Option<Arc<Porter>>,
        on_failure: OnFailure,
        metrics: &Metrics,
    ) -> Result<(Self, Vec<KeptVm>), StateError> {
        let directory = &options.directory;
        let failed = |source: io::Error| StateError::Directory {
            directory: directory.clone(),
            source,
        };
        make_directory(directory).map_err(failed)?;
        let path = directory.join(SOCKET);
        let mut is_started = false;
        let mut refused_since = None;
        let (socket, (vms, next_id)) = loop {
            let socket = match connect(&path) {
                Ok(socket) => socket,
                Err(error) if has_no_keeper(&error) && !is_started => {
                    is_started = true;
                    start_keeper(options, porter.as_deref(), &path)?
                }
                // There may be a keeper, with VMs that another one would lose.
                Err(error) => return Err(failed(error)),
            };
            match left_by_others(&socket, directory, on_failure) {
                Err(refused @ StateError::InUse { .. }) => {
                    let since = *refused_since.get_or_insert_with(Instant::now);
                    if since.elapsed() > REFUSAL_LIMIT {
                        return Err(refused);
                    }
                    std::thread::sleep(Duration::from_millis(5));
                }
                left => break (socket, left?),
            }
        };
        let book = Book::new().map_err(|errno| failed(errno.into()))?;
        let state = Self {
            book: Arc::new(book),
            next_id: AtomicU64::new(next_id),
            thread: Mutex::default(),
        };
        let replace = porter.map(|porter| replace(options.clone(), porter, path));
        let metrics = metrics.clone();
        let lost = move || metrics.count(|totals| totals.keeper_ends = 1);
        state.start(socket, lost, replace).map_err(failed)?;
        Ok((state, vms))
    }

    /// The same with a service manager as the keeper.
    pub(crate) fn at_store(
        mut store: DescriptorStore,
        on_failure: OnFailure,
    ) -> io::Result<(Self, Vec<KeptVm>)> {
        let mut left = Left::default();
        for (id, descriptors) in store.take_given() {
            match descriptors {
                Ok(descriptors) => left.add(id, descriptors),
                Err(error) => left.unreadable.push((id, None, error)),
            }
        }
        left.settle(on_failure, |id| store.remove(id))?;
        let state = Self {
            book: Arc::new(Book::new()?),
            next_id: AtomicU64::new(left.next_id),
            thread: Mutex::default(),
        };
        let book = Arc::clone(&state.book);
        let thread = Builder::new().name("pt-store".into());
        let thread = thread.spawn(move || book.talk_to_store(&store))?;
        *state.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
        Ok((state, left.vms))
    }

    /// Starts the thread that talks to the keeper.
    fn start(
        &self,
        socket: OwnedFd,
        lost: impl Fn() + Send + 'static,
        replace: Option<book::Replace>,
    ) -> io::Result<()> {
        let book = Arc::clone(&self.book);
        let thread = Builder::new().name("pt-keeper".into());
        let thread = thread.spawn(move || book.talk(socket, lost, replace.as_ref()))?;
        *self.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
        Ok(())
    }

    /// One without a keeper.
    #[cfg(test)]
    pub(crate) fn unattended() -> Self {
        Self {
            book: Arc::new(Book::new().unwrap()),
            next_id: AtomicU64::new(1),
            thread: Mutex::default(),
        }
    }

    /// Keeps a VM, now or as soon as there is a keeper. Returns its number there.
    pub(crate) fn keep(&self, uffd: &Arc<Userfaultfd>, vm: Kept<'_>) -> io::Result<u64> {
        let held = held(uffd, vm)?;
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        self.book.keep(id, held);
        Ok(id)
    }

    /// Goes on keeping a VM that the keeper has handed to this server.
    pub(crate) fn take_over(
        &self,
        id: u64,
        uffd: &Arc<Userfaultfd>,
        vm: Kept<'_>,
    ) -> io::Result<()> {
        self.book.take_over(id, held(uffd, vm)?);
        Ok(())
    }

    /// Whether the keeper has said that it holds a VM, and is there: a successor gets it.
    pub(crate) fn is_held(&self, id: u64) -> bool {
        self.book.is_held(id)
    }

    /// Whether there is no keeper now.
    pub(crate) fn is_lost(&self) -> bool {
        self.book.is_lost()
    }

    /// Gives a VM up: it has gone, or needs no server any more.
    pub(crate) fn forget(&self, id: u64) {
        self.book.forget(id);
    }

    /// Ends the connection to the keeper, which goes on if it keeps VMs, and ends otherwise.
    fn end(&self) {
        self.book.end();
        if self.is_lost() {
            // It may be starting another, which nobody needs.
            return;
        }
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        // A panic was logged by the thread.
        let _ = thread.take().map(JoinHandle::join);
    }
}

/// The connection to the keeper, which ends when this is dropped: with the server, or with a start that fails. The keeper has one
/// server at a time, which may be the next one of this process.
#[derive(Debug)]
pub(crate) struct KeeperConnection(Arc<State>);

impl KeeperConnection {
    pub(crate) fn of(state: &Arc<State>) -> Self {
        Self(Arc::clone(state))
    }
}

impl Drop for KeeperConnection {
    fn drop(&mut self) {
        // After a panic, threads may go on serving VMs: no other server may have these, too.
        if !std::thread::panicking() {
            self.0.end();
        }
    }
}

/// What a keeper gets of a VM beside its userfaultfd.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kept<'a> {
    pub(crate) stream: &'a UnixStream,
    pub(crate) maps: &'a Arc<MapFile>,
    pub(crate) description: &'a Description,
}

fn held(uffd: &Arc<Userfaultfd>, vm: Kept<'_>) -> io::Result<Held> {
    Ok(Held {
        uffd: Arc::clone(uffd),
        stream: vm.stream.try_clone()?.into(),
        maps: Arc::clone(vm.maps),
        description: serde_json::to_vec(vm.description)?,
    })
}

/// A new file with a description.
fn write_description(text: &[u8]) -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = memfd_create("pagetide-vm", flags)?;
    let mut written = 0;
    while let Some(rest) = text.get(written..).filter(|rest| !rest.is_empty()) {
        written += rustix::io::write(&file, rest)?;
    }
    Ok(file)
}

/// What a former server has left.
struct Left {
    vms: Vec<KeptVm>,
    /// VMs that this server cannot serve, with their connections.
    unreadable: Vec<(u64, Option<UnixStream>, io::Error)>,
    /// The first number that none of them has.
    next_id: u64,
}

impl Default for Left {
    fn default() -> Self {
        Self {
            vms: Vec::new(),
            unreadable: Vec::new(),
            next_id: 1,
        }
    }
}

impl Left {
    fn add(&mut self, id: u64, descriptors: Vec<OwnedFd>) {
        // Also those that stay with the keeper: their numbers are taken.
        self.next_id = self.next_id.max(id.saturating_add(1));
        let connection = descriptors.get(1).and_then(|fd| fd.try_clone().ok());
        match kept_vm(id, descriptors) {
            Ok(vm) => self.vms.push(vm),
            Err(error) => {
                let connection = connection.map(UnixStream::from);
                self.unreadable.push((id, connection, error));
            }
        }
    }

    /// Does with VMs that nobody serves what is the policy.
    fn settle(
        &mut self,
        on_failure: OnFailure,
        forget: impl Fn(u64) -> io::Result<()>,
    ) -> io::Result<()> {
        for (id, connection, error) in self.unreadable.drain(..) {
            self.next_id = self.next_id.max(id.saturating_add(1));
            let peer = connection.and_then(|stream| Peer::of(&stream).ok());
            match peer.filter(|_| on_failure == OnFailure::Kill) {
                Some(peer) if peer.kill().is_ok() => {
                    tracing::error!(vm = id, %error, "the VMM of a former server was killed: nobody serves it");
                    forget(id)?;
                }
                _ => tracing::error!(
                    vm = id,
                    %error,
                    "a VM of a former server is not served: it sleeps, and stays with the keeper"
                ),
            }
        }
        Ok(())
    }
}

/// The VMs that a keeper has, and the first number that none of them has.
fn left_by_others(
    socket: &OwnedFd,
    directory: &Path,
    on_failure: OnFailure,
) -> Result<(Vec<KeptVm>, u64), StateError> {
    let failed = |source: io::Error| StateError::Directory {
        directory: directory.into(),
        source,
    };
    check_user(socket.as_fd()).map_err(failed)?;
    let mut left = Left::default();
    loop {
        match receive(socket.as_fd()).map_err(failed)? {
            None => {
                return Err(StateError::InUse {
                    directory: directory.into(),
                });
            }
            Some((Message::Kept { id }, descriptors)) => left.add(id, descriptors),
            Some((Message::Done, _)) => break,
            Some(_) => {}
        }
    }
    let forget = |id| send(socket.as_fd(), &Message::Forget { id }, &[]);
    left.settle(on_failure, forget).map_err(failed)?;
    Ok((left.vms, left.next_id))
}

/// How a keeper that has ended is replaced.
fn replace(options: StateOptions, porter: Arc<Porter>, path: PathBuf) -> book::Replace {
    Box::new(move || {
        let socket = match connect(&path) {
            Ok(socket) => socket,
            Err(error) if has_no_keeper(&error) => {
                start_keeper(&options, Some(&porter), &path).map_err(io::Error::other)?
            }
            Err(error) => return Err(error),
        };
        // VMs of nobody: another keeper has come and gone in between.
        let directory = &options.directory;
        left_by_others(&socket, directory, OnFailure::Stall).map_err(io::Error::other)?;
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
        match connect(path) {
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
        std::thread::sleep(Duration::from_millis(5));
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
mod tests;
