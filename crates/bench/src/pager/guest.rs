//! The server in this process, and a guest that speaks Firecracker's protocol to it.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::thread::{self, JoinHandle};

use pagetide_memory::Region;
use pagetide_serve::{Binding, Metrics, Options, Server, WorkingSetMode};
use pagetide_sources::Location;
use pagetide_uapi::userfaultfd::{Features, Mode, Userfaultfd};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use super::image::Image;
use super::raw::register;
use crate::benchmark::RunFailure;

/// A server for one VM.
pub(super) struct Ready {
    server: Server,
    socket: std::path::PathBuf,
}

/// A VM that is being served.
pub(super) struct Guest {
    stream: UnixStream,
    _uffd: Userfaultfd,
    metrics: Metrics,
    thread: JoinHandle<io::Result<()>>,
}

/// The server's thread panicked.
#[derive(Debug, thiserror::Error)]
#[error("the server panicked")]
struct Panicked;

impl Ready {
    /// Opens the image; `prefetch` says whether everything is fetched while the guest runs.
    pub(super) fn bind(
        image: &Image,
        working_set: WorkingSetMode,
        prefetch: bool,
    ) -> Result<Self, RunFailure> {
        let socket = image.path("socket");
        let options = Options {
            bindings: vec![Binding {
                socket: socket.clone(),
                image: Location::Path(image.path("memory")),
            }],
            working_set,
            prefetch,
            once: true,
            ..Options::default()
        };
        let server = Server::bind(options).map_err(RunFailure::failed)?;
        Ok(Self { server, socket })
    }

    /// Starts the server, and hands it the memory of `region`.
    pub(super) fn connect(self, region: &Region) -> Result<Guest, RunFailure> {
        let Self { server, socket } = self;
        let metrics = server.metrics();
        let thread = thread::spawn(move || server.run());
        // As Firecracker does.
        let uffd = register(region, Mode::Missing, Features::EVENT_REMOVE)?;
        let message = format!(
            r#"[{{"base_host_virt_addr":{},"size":{},"offset":0,"page_size":4096,"page_size_kib":4096}}]"#,
            region.guest().start().as_u64(),
            region.bytes(),
        );
        let stream = UnixStream::connect(socket).map_err(RunFailure::failed)?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let descriptors = [uffd.as_fd()];
        ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
        let message = [IoSlice::new(message.as_bytes())];
        sendmsg(&stream, &message, &mut ancillary, SendFlags::empty())
            .map_err(RunFailure::failed)?;
        Ok(Guest {
            stream,
            _uffd: uffd,
            metrics,
            thread,
        })
    }
}

impl Guest {
    /// Leaves the server, which ends, and returns the number of faults. The memory may go then.
    pub(super) fn end(self) -> Result<u64, RunFailure> {
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
        drop(self.stream);
        let ended = self
            .thread
            .join()
            .map_err(|_| RunFailure::failed(Panicked))?;
        ended.map_err(RunFailure::failed)?;
        Ok(self.metrics.totals().faults)
    }
}
