//! VMs that outlive their server: a keeper process holds what a successor needs.
//!
//! The keeper ([`keep`]) is a small process of its own that survives `kill -9` of the server. For each VM
//! it holds the userfaultfd, the connection, and two memfds: the page maps, which the server has mapped, and
//! the VM's description. A server that starts with the same directory receives all of them, and goes on.
//! `docs/design/serve.md` describes why nothing is lost.

mod access;
mod book;
mod keeper;
mod left;
mod reach;
mod store;
mod wire;

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};

use pagetide_memory::{MapFile, PageSize};
use pagetide_sources::FileIdentity;
use pagetide_uapi::userfaultfd::Userfaultfd;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use serde::{Deserialize, Deserializer, Serialize};
use thiserror::Error;

use crate::handshake::{MAX_REGIONS, VmRegion, check_together, checked_region};
use crate::metrics::Metrics;
use crate::native::label::VmLabel;
use crate::options::OnFailure;
use crate::porter::Porter;

use book::{Book, Descriptor, Held};
pub use keeper::keep;
use left::Left;
pub(crate) use reach::check_length;
use reach::{Reached, reach, replace};
pub use store::DescriptorStore;

/// The name of the keeper's socket in the state's directory.
const SOCKET: &str = "keeper.sock";

/// The longest path of a Unix socket: all of its address (`sun_path`). Linux needs no zero at its end.
const MAX_SOCKET_BYTES: usize = 108;

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
    /// The keeper's socket would have a longer path than a socket can have.
    #[error(
        "the state directory {}: its path has {bytes} bytes and may have {most}, since that of a Unix socket in it has at most \
         {MAX_SOCKET_BYTES}; name a shorter one, or a link to this one",
        directory.display()
    )]
    TooLong {
        /// The directory.
        directory: PathBuf,
        /// The length of its path.
        bytes: usize,
        /// The greatest length.
        most: usize,
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
    /// The id and the traceparent of its label, if it has one. A server that knows no labels goes on without, and so does one that
    /// knows other labels.
    #[serde(default, deserialize_with = "sound_label")]
    label: Option<(String, String)>,
}

/// A VM matters more than what it is called.
fn sound_label<'de, D: Deserializer<'de>>(from: D) -> Result<Option<(String, String)>, D::Error> {
    let found = serde_json::Value::deserialize(from)?;
    Ok(serde_json::from_value(found).unwrap_or_default())
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
            label: None,
        }
    }

    pub(crate) fn set_label(&mut self, label: Option<&VmLabel>) {
        self.label = label.map(|label| (label.id().into(), label.traceparent().into()));
    }

    /// What its VMM calls the VM.
    pub(crate) fn label(&self) -> Option<VmLabel> {
        let (id, traceparent) = self.label.as_ref()?;
        VmLabel::new(id, traceparent).ok()
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
    pub(crate) uffd: Arc<OwnedFd>,
    pub(crate) stream: UnixStream,
    pub(crate) maps: Arc<MapFile>,
    pub(crate) description: Description,
}

impl KeptVm {
    /// What the keeper has of it.
    fn held(&self) -> io::Result<Held> {
        let kept = Kept {
            stream: &self.stream,
            maps: &self.maps,
            description: &self.description,
        };
        let uffd = Arc::clone(&self.uffd);
        held(uffd, kept)
    }
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
        let Reached {
            socket,
            vms,
            next_id,
        } = reach(options, porter.as_deref(), on_failure)?;
        let book = Book::new().map_err(|errno| failed(errno.into()))?;
        let state = Self {
            book: Arc::new(book),
            next_id: AtomicU64::new(next_id),
            thread: Mutex::default(),
        };
        state.take_over(&vms).map_err(failed)?;
        let replace = porter.map(|porter| replace(options.clone(), porter));
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
                Err(error) => left.add_unreadable(id, error),
            }
        }
        left.settle(on_failure, |id| store.remove(id))?;
        let state = Self {
            book: Arc::new(Book::new()?),
            next_id: AtomicU64::new(left.next_id),
            thread: Mutex::default(),
        };
        state.take_over(&left.vms)?;
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
        let uffd = Arc::clone(uffd);
        let held = held(uffd, vm)?;
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        self.book.keep(id, held);
        Ok(id)
    }

    /// Goes on keeping VMs that the keeper has handed to this server, before any of them is served: their images may be opened
    /// much later, or never.
    fn take_over(&self, vms: &[KeptVm]) -> io::Result<()> {
        for vm in vms {
            self.book.take_over(vm.id, vm.held()?);
        }
        Ok(())
    }

    /// Keeps a VM of a former server by the userfaultfd with which it is served now.
    pub(crate) fn serve(&self, id: u64, uffd: &Arc<Userfaultfd>) {
        let uffd = Arc::clone(uffd);
        self.book.serve(id, uffd);
    }

    /// Whether the keeper has said that it holds a VM, and is there: a successor gets it.
    pub(crate) fn is_held(&self, id: u64) -> bool {
        self.book.is_held(id)
    }

    /// Whether there is no keeper now.
    pub(crate) fn is_lost(&self) -> bool {
        self.book.is_lost()
    }

    /// Whether VMs that begin now do not outlive this server.
    pub(crate) fn takes_none(&self) -> bool {
        self.book.takes_none()
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

fn held(uffd: Arc<dyn Descriptor>, vm: Kept<'_>) -> io::Result<Held> {
    Ok(Held {
        uffd,
        stream: vm.stream.try_clone()?.into(),
        maps: Arc::clone(vm.maps),
        description: serde_json::to_vec(vm.description)?,
        label: vm.description.label(),
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
