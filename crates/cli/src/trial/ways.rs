//! The ways to restore an image that are compared.

use std::fs::File;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use pagetide_pager::Urgency;
use pagetide_serve::{Binding, Metrics, Options, Server, WorkingSetMode};
use pagetide_sources::{OpenOptions, open};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::cache::Cache;
use super::guest::Memory;
use super::plan::Order;
use super::report::{Arrival, Way};
use super::{TryArguments, TryError};
use crate::failure::Failure;

/// A piece of an image that is read at once.
const PIECE_BYTES: usize = 1 << 20;
/// How often an image that is read first tells how far it is.
const ARRIVALS: u64 = 128;
/// How often the server and the memory are looked at while the guest runs.
const LOOK: Duration = Duration::from_millis(20);

/// By a server, as a VMM that has sent its userfaultfd. Returns the words that were read as well.
pub(super) fn served(
    arguments: &TryArguments,
    order: Order,
    bytes: u64,
    pages: &[u64],
    cache: &Cache<'_>,
) -> Result<(Way, Vec<u64>), Failure> {
    let directory = tempfile::tempdir().map_err(TryError::Directory);
    let directory = directory.map_err(Failure::failed)?;
    let socket = directory.path().join("pagetide.sock");
    let server = bind(arguments, order, &socket)?;
    let is_cold = cache.leave();
    let (stopper, metrics) = (server.stopper(), server.metrics());
    let running = spawn("pt-try-server", move || server.run()).map_err(Failure::failed)?;
    let memory = Memory::new(bytes).map_err(TryError::Memory);
    let memory = Arc::new(memory.map_err(Failure::failed)?);
    let begun = Instant::now();
    let stream = memory.connect(&socket).map_err(TryError::Connect);
    let stream = stream.map_err(Failure::bad_input)?;
    let (its, order) = (Arc::clone(&memory), pages.to_vec());
    let guest = spawn("pt-try-guest", move || its.touch(&order, begun)).map_err(Failure::failed)?;
    let mut arrivals = vec![Arrival::new(begun, 0)];
    while !guest.is_finished() {
        thread::sleep(LOOK);
        let has_ended = is_closed(&stream) || running.is_finished();
        match look(&memory, &metrics, has_ended) {
            Ok(present) => arrivals.push(Arrival::new(begun, present)),
            Err(error) => {
                // The guest's thread sleeps until the process ends. A server that saw the VM's end would poison its
                // memory, and the signal of lost memory would end the process without a word.
                std::mem::forget(stream);
                return Err(Failure::failed(error));
            }
        }
    }
    let touches = join(guest);
    drop(stream);
    stopper.stop();
    join(running).map_err(Failure::failed)?;
    let faults = metrics.totals().faults;
    let mut way = Way::new("pagetide serve", is_cold, &touches);
    way.arrivals = arrivals;
    way.pages_ahead = Some((pages.len() as u64).saturating_sub(faults));
    Ok((way, touches.words))
}

/// A server of the image at `socket`, as users run it by default.
fn bind(arguments: &TryArguments, order: Order, socket: &Path) -> Result<Server, Failure> {
    let binding = Binding::new(socket, arguments.image.clone());
    let options = Options {
        bindings: vec![binding],
        // Nothing is written beside the image.
        working_set: match order {
            Order::Recorded => WorkingSetMode::Replay,
            Order::Random | Order::Upwards => WorkingSetMode::Off,
        },
        ..Options::default()
    };
    Server::bind(options).map_err(Failure::bad_input)
}

/// How much of the memory is there, unless the server gives up.
fn look(memory: &Memory, metrics: &Metrics, has_ended: bool) -> Result<u64, TryError> {
    let present = memory.present_bytes().map_err(TryError::Memory)?;
    match metrics.totals().stalled_regions {
        0 if has_ended => Err(TryError::Refused),
        0 => Ok(present),
        _ => Err(TryError::Stalled),
    }
}

/// By a private mapping of the file, as with Firecracker's File backend.
pub(super) fn mapped(
    path: &Path,
    bytes: u64,
    pages: &[u64],
    cache: &Cache<'_>,
) -> Result<Way, TryError> {
    let failed = |source| TryError::Map {
        path: path.into(),
        source,
    };
    let is_cold = cache.leave();
    let begun = Instant::now();
    let file = File::open(path).map_err(failed)?;
    let memory = Memory::map(&file, bytes).map_err(failed)?;
    let touches = memory.touch(pages, begun);
    Ok(Way::new(
        "the file mapped (File backend)",
        is_cold,
        &touches,
    ))
}

/// By reading all of it before the guest runs. Returns the words that were read as well.
pub(super) fn read_first(
    arguments: &TryArguments,
    bytes: u64,
    pages: &[u64],
    cache: &Cache<'_>,
) -> Result<(Way, Vec<u64>), Failure> {
    let is_cold = cache.leave();
    let mut memory = Memory::new(bytes)
        .map_err(TryError::Memory)
        .map_err(Failure::failed)?;
    let begun = Instant::now();
    let image = open(&arguments.image, &OpenOptions::default()).map_err(Failure::failed)?;
    let (mut offset, mut told) = (0, 0);
    let mut arrivals = vec![Arrival::new(begun, 0)];
    for piece in memory.bytes_mut().chunks_mut(PIECE_BYTES) {
        let read = image.read(offset, piece, Urgency::Bulk);
        // Memory that nobody has written to is zero.
        let _ = read.map_err(TryError::Read).map_err(Failure::failed)?;
        offset += piece.len() as u64;
        if offset == bytes || offset - told >= bytes / ARRIVALS {
            arrivals.push(Arrival::new(begun, offset));
            told = offset;
        }
    }
    let touches = memory.touch(pages, begun);
    let mut way = Way::new("all of it read first", is_cold, &touches);
    way.arrivals = arrivals;
    Ok((way, touches.words))
}

/// Whether the other end of a stream is closed.
fn is_closed(stream: &UnixStream) -> bool {
    let mut polled = [PollFd::new(stream, PollFlags::RDHUP)];
    poll(&mut polled, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
}

fn spawn<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<JoinHandle<T>, TryError> {
    let thread = thread::Builder::new().name(name.into());
    thread.spawn(work).map_err(TryError::Thread)
}

fn join<T>(thread: JoinHandle<T>) -> T {
    match thread.join() {
        Ok(value) => value,
        Err(panic) => std::panic::resume_unwind(panic),
    }
}
