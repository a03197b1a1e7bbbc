//! The server in this process, and guests that speak Firecracker's protocol and the native one to it.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use pagetide_memory::Region;
use pagetide_serve::native::client::Client;
use pagetide_serve::native::message::{Attach, Region as NativeRegion};
use pagetide_serve::{Binding, Metrics, Options, Server, Stopper, Totals, WorkingSetMode};
use pagetide_sources::Location;
use pagetide_uapi::userfaultfd::{Features, Mode, UserRange, Userfaultfd};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use super::image::{Image, Mapping};
use super::raw::register;
use crate::benchmark::RunFailure;

/// A server that runs, for one VM after the other.
pub(super) struct Ready {
    /// A clone that has all of the image, and keeps it in memory for the next ones.
    first_clone: Option<Guest>,
    socket: PathBuf,
    metrics: Metrics,
    stopper: Stopper,
    thread: Option<JoinHandle<io::Result<()>>>,
}

/// A VM that is being served.
pub(super) struct Guest {
    connection: Connection,
    _uffd: Userfaultfd,
    clone: Option<Mapping>,
    metrics: Metrics,
    before: Totals,
}

enum Connection {
    Firecracker(UnixStream),
    Native(Client),
}

/// The features that a clone's userfaultfd needs.
const CLONE_FEATURES: Features = Features::from_bits(
    Features::EVENT_REMOVE.bits() | Features::MINOR_SHMEM.bits() | Features::MISSING_SHMEM.bits(),
);

/// How long a server may take to notice the end of a VM.
const LONGEST_END: Duration = Duration::from_secs(30);

/// The server did not serve the VM to its end.
#[derive(Debug, thiserror::Error)]
enum ServerFailed {
    #[error("the server refused the VM: its log has the reason")]
    Refused,
    #[error("the server did not notice the end of the VM within {LONGEST_END:?}")]
    StillServed,
}

impl Ready {
    /// Opens a file of the image's directory and starts the server; `prefetch` says whether everything is fetched while the guest
    /// runs.
    pub(super) fn start(
        image: &Image,
        file: &str,
        working_set: WorkingSetMode,
        prefetch: bool,
    ) -> Result<Self, RunFailure> {
        let socket = image.path(&format!("{file}-{working_set:?}-{prefetch}.socket"));
        let options = Options {
            bindings: vec![Binding::new(
                socket.clone(),
                Location::Path(image.path(file)),
            )],
            working_set,
            prefetch,
            // Faults of one page each are measured in the beginning of a larger file.
            any_length: true,
            ..Options::default()
        };
        let server = Server::bind(options).map_err(RunFailure::failed)?;
        Ok(Self {
            first_clone: None,
            socket,
            metrics: server.metrics(),
            stopper: server.stopper(),
            thread: Some(thread::spawn(move || server.run())),
        })
    }

    /// Hands the server the memory of `region`, as Firecracker does.
    pub(super) fn connect(&self, region: &Region) -> Result<Guest, RunFailure> {
        let before = self.metrics.totals();
        let uffd = register(region, Mode::Missing, Features::EVENT_REMOVE)?;
        let message = format!(
            r#"[{{"base_host_virt_addr":{},"size":{},"offset":0,"page_size":4096,"page_size_kib":4096}}]"#,
            region.guest().start().as_u64(),
            region.bytes(),
        );
        let stream = UnixStream::connect(&self.socket).map_err(RunFailure::failed)?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let descriptors = [uffd.as_fd()];
        ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
        let message = [IoSlice::new(message.as_bytes())];
        sendmsg(&stream, &message, &mut ancillary, SendFlags::empty())
            .map_err(RunFailure::failed)?;
        Ok(Guest {
            connection: Connection::Firecracker(stream),
            _uffd: uffd,
            clone: None,
            metrics: self.metrics.clone(),
            before,
        })
    }

    /// Maps the first `bytes` bytes of the memfd that clones share, and attaches them.
    pub(super) fn connect_clone(&self, bytes: u64) -> Result<Guest, RunFailure> {
        let before = self.metrics.totals();
        let mut client = Client::connect(&self.socket).map_err(RunFailure::failed)?;
        let shared = client.share().map_err(RunFailure::failed)?;
        let memory = Mapping::of_clone(shared.file.as_fd(), bytes).map_err(RunFailure::failed)?;
        let uffd = Userfaultfd::open(CLONE_FEATURES).map_err(RunFailure::failed)?;
        let range = UserRange {
            start: memory.start(),
            bytes,
        };
        // SAFETY: the mapping is new and outlives the userfaultfd's users; nobody relies on its zeroes.
        unsafe { uffd.register(range, Mode::Minor) }.map_err(RunFailure::failed)?;
        let attach = Attach {
            uffd_features: uffd.features().bits(),
            regions: vec![NativeRegion::missing(memory.start(), bytes, 0).cloned_image()],
        };
        client
            .attach(&attach, &[uffd.as_fd()])
            .map_err(RunFailure::failed)?;
        Ok(Guest {
            connection: Connection::Native(client),
            _uffd: uffd,
            clone: Some(memory),
            metrics: self.metrics.clone(),
            before,
        })
    }

    /// Lets a clone fetch all of the image and stay, if there is none: the next ones find it in memory.
    pub(super) fn keep_a_clone(&mut self, bytes: u64) -> Result<(), RunFailure> {
        if self.first_clone.is_some() {
            return Ok(());
        }
        let mut guest = self.connect_clone(bytes)?;
        if let Connection::Native(client) = &mut guest.connection {
            client.drain(|_, _| {}).map_err(RunFailure::failed)?;
        }
        self.first_clone = Some(guest);
        Ok(())
    }
}

impl Drop for Ready {
    fn drop(&mut self) {
        drop(self.first_clone.take());
        self.stopper.stop();
        if let Some(thread) = self.thread.take() {
            // No VM is left, and a failure to accept one was seen as a refusal.
            let _ = thread.join();
        }
    }
}

impl Guest {
    /// Where a clone's memory begins.
    pub(super) fn start(&self) -> Option<u64> {
        self.clone.as_ref().map(Mapping::start)
    }

    /// Leaves the server, and returns the number of faults. The memory may go then.
    pub(super) fn end(self) -> Result<u64, RunFailure> {
        match self.connection {
            Connection::Firecracker(stream) => drop(stream),
            Connection::Native(client) => client.goodbye().map_err(RunFailure::failed)?,
        }
        let begun = Instant::now();
        loop {
            let now = self.metrics.totals();
            if now.vms_refused > self.before.vms_refused {
                return Err(RunFailure::failed(ServerFailed::Refused));
            }
            if now.vms_accepted > self.before.vms_accepted && now.vms_ended > self.before.vms_ended
            {
                return Ok(now.faults - self.before.faults);
            }
            if begun.elapsed() > LONGEST_END {
                return Err(RunFailure::failed(ServerFailed::StillServed));
            }
            thread::sleep(Duration::from_micros(100));
        }
    }
}
