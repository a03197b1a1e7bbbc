//! The floor: the shortest loop that resolves faults from a file.

use std::num::NonZeroU32;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};

use pagetide_memory::Region;
use pagetide_uapi::userfaultfd::{
    Event, EventBuffer, Features, InstallError, Mode, ReadError, UserRange, Userfaultfd, Wake,
};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

use super::image::Mapping;
use super::plan::{PAGE, Via};
use crate::benchmark::RunFailure;

/// Bytes that one call copies where nobody waits: the fastest size here.
const RANGE_BYTES: u64 = 2 << 20;
/// Bytes that one call copies while somebody may wait: as the engine does.
const BATCH_BYTES: u64 = 256 << 10;

/// Threads that serve a userfaultfd.
pub(super) struct Loops {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<Result<(), LoopError>>>,
}

struct Shared {
    uffd: Userfaultfd,
    stop: rustix::fd::OwnedFd,
    start: u64,
    content: Arc<Mapping>,
    via: Via,
    window_bytes: u64,
    stopping: AtomicBool,
    faults: AtomicU64,
}

/// The loop could not go on; its threads were released, and read zeroes.
#[derive(Debug, thiserror::Error)]
pub(super) enum LoopError {
    #[error(transparent)]
    Read(#[from] ReadError),
    #[error(transparent)]
    Install(#[from] InstallError),
    #[error("waiting for a userfaultfd")]
    Wait(#[from] rustix::io::Errno),
    #[error("the loop panicked")]
    Panicked,
}

/// Memory whose missing pages a userfaultfd reports.
pub(super) fn register(
    region: &Region,
    mode: Mode,
    features: Features,
) -> Result<Userfaultfd, RunFailure> {
    let uffd = Userfaultfd::open(features).map_err(RunFailure::failed)?;
    let range = UserRange::from(region.guest());
    // SAFETY: the region is new and outlives the userfaultfd's users; nobody relies on its zeroes.
    unsafe { uffd.register(range, mode) }.map_err(RunFailure::failed)?;
    Ok(uffd)
}

impl Loops {
    /// Serves faults in `region` by `readers` threads, from `content`; each fault installs the aligned
    /// block of `around` pages. With `fills`, the thread also installs everything else.
    pub(super) fn begin(
        region: &Region,
        content: Arc<Mapping>,
        via: Via,
        around: u32,
        readers: NonZeroU32,
        fills: bool,
    ) -> Result<Self, RunFailure> {
        let mode = match via {
            Via::Copy => Mode::Missing,
            Via::Continue => Mode::Minor,
        };
        let flags = EventfdFlags::CLOEXEC;
        let shared = Arc::new(Shared {
            uffd: register(region, mode, Features::NONE)?,
            stop: eventfd(0, flags).map_err(RunFailure::failed)?,
            start: region.guest().start().as_u64(),
            content,
            via,
            window_bytes: u64::from(around) * PAGE,
            stopping: AtomicBool::new(false),
            faults: AtomicU64::new(0),
        });
        let bytes = region.bytes();
        let threads = (0..readers.get()).map(|_| {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                let result = shared.serve(fills, bytes);
                if result.is_err() {
                    let start = shared.start;
                    // Its threads read zeroes, which verification finds: better than to sleep for ever.
                    let _ = shared.uffd.unregister(UserRange { start, bytes });
                }
                result
            })
        });
        Ok(Self {
            threads: threads.collect(),
            shared,
        })
    }

    /// Installs all of `bytes` bytes at once: no thread faults meanwhile.
    pub(super) fn fill(&self, bytes: u64) -> Result<(), RunFailure> {
        let offsets = (0..bytes).step_by(usize::try_from(RANGE_BYTES).unwrap_or(usize::MAX));
        for at in offsets {
            let installed = self.shared.install(at, RANGE_BYTES.min(bytes - at));
            installed.map_err(RunFailure::failed)?;
        }
        Ok(())
    }

    /// Ends the threads, and returns the number of faults.
    pub(super) fn end(self) -> Result<u64, RunFailure> {
        self.shared.stopping.store(true, Ordering::Release);
        rustix::io::write(&self.shared.stop, &1_u64.to_ne_bytes()).map_err(RunFailure::failed)?;
        for thread in self.threads {
            let ended = thread.join().unwrap_or(Err(LoopError::Panicked));
            ended.map_err(RunFailure::failed)?;
        }
        Ok(self.shared.faults.load(Ordering::Acquire))
    }
}

impl Shared {
    fn serve(&self, fills: bool, bytes: u64) -> Result<(), LoopError> {
        let mut buffer = EventBuffer::new(64);
        let mut faults = 0;
        let mut filled = if fills { 0 } else { bytes };
        while !self.stopping.load(Ordering::Acquire) {
            if filled >= bytes {
                let fds = [self.uffd.as_fd(), self.stop.as_fd()];
                let mut ready = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
                poll(&mut ready, None)?;
            }
            for event in self.uffd.read_events(&mut buffer)? {
                if let Event::PageFault(fault) = event {
                    faults += 1;
                    let offset = (fault.address - self.start) / self.window_bytes;
                    self.install(offset * self.window_bytes, self.window_bytes)?;
                }
            }
            if filled < bytes {
                self.install(filled, BATCH_BYTES.min(bytes - filled))?;
                filled += BATCH_BYTES;
            }
        }
        self.faults.fetch_add(faults, Ordering::AcqRel);
        Ok(())
    }

    /// Installs pages, except for those that are there already.
    fn install(&self, mut offset: u64, mut bytes: u64) -> Result<(), InstallError> {
        while bytes > 0 {
            let start = self.start + offset;
            let installed = match self.via {
                Via::Copy => {
                    let range = usize::try_from(offset)
                        .ok()
                        .zip(usize::try_from(bytes).ok());
                    let (from, count) = range.ok_or(InstallError::NoContent)?;
                    let content = self.content.content().get(from..from + count);
                    let content = content.ok_or(InstallError::NoContent)?;
                    self.uffd.copy_pages(start, content, Wake::Wake)
                }
                Via::Continue => self
                    .uffd
                    .continue_pages(UserRange { start, bytes }, Wake::Wake),
            };
            let done = match installed {
                Ok(()) => return Ok(()),
                Err(InstallError::Exists { installed_bytes }) => {
                    // The call woke nobody who waits for the page that was there.
                    let (start, bytes) = (start + installed_bytes, PAGE);
                    self.uffd.wake(UserRange { start, bytes })?;
                    installed_bytes + PAGE
                }
                Err(InstallError::Again { installed_bytes }) => installed_bytes,
                Err(error) => return Err(error),
            };
            offset += done;
            bytes -= done;
        }
        Ok(())
    }
}
