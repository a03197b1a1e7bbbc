//! The word to a running server: to end, or to use other options.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;

use crate::options::Options;

/// Ends a server, from any thread. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Stopper(Arc<StopState>);

#[derive(Debug)]
struct StopState {
    event: OwnedFd,
    /// Written to when there are new options.
    reload: OwnedFd,
    options: Mutex<Option<Options>>,
    is_stopping: AtomicBool,
    /// [`Options::stop_limit`] of the options with which the server was bound.
    limit: Duration,
    deadline: Mutex<Option<Instant>>,
}

impl Stopper {
    pub(crate) fn new(limit: Duration) -> Result<Self, Errno> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Self(Arc::new(StopState {
            event: eventfd(0, flags)?,
            reload: eventfd(0, flags)?,
            options: Mutex::new(None),
            is_stopping: AtomicBool::new(false),
            limit,
            deadline: Mutex::new(None),
        })))
    }

    /// Begins the end: no VM is accepted any more, and those that are there are drained for at most
    /// [`Options::stop_limit`]. The second call ends the drain.
    pub fn stop(&self) {
        let now = Instant::now();
        let mut deadline = self
            .0
            .deadline
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        *deadline = Some(match *deadline {
            None => now + self.0.limit,
            Some(_) => now,
        });
        drop(deadline);
        self.0.is_stopping.store(true, Ordering::Release);
        // It fails only if the counter is full, and then it is readable.
        let _ = rustix::io::write(&self.0.event, &1_u64.to_ne_bytes());
    }

    /// Uses other options for VMs that connect from now on. Sockets that are not among the bindings any
    /// more are closed, and new ones are opened; VMs that are being served go on. A binding whose image or socket cannot be
    /// opened fails alone: an error is logged, and it is tried again. At a socket that gets another image, VMs wait until that is
    /// open. An image that was named before is opened anew if its name leads elsewhere; if that fails, its new VMs are refused as
    /// long as that is so. Options that make no sense change nothing.
    pub fn reload(&self, options: Options) {
        let mut waiting = self
            .0
            .options
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        *waiting = Some(options);
        drop(waiting);
        let _ = rustix::io::write(&self.0.reload, &1_u64.to_ne_bytes());
    }

    /// Readable once there are new options.
    pub(crate) fn reloads(&self) -> BorrowedFd<'_> {
        self.0.reload.as_fd()
    }

    pub(crate) fn take_options(&self) -> Option<Options> {
        let _ = rustix::io::read(&self.0.reload, &mut [0; 8]);
        self.0
            .options
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
    }

    /// Whether [`Self::stop`] was called.
    pub fn is_stopping(&self) -> bool {
        self.0.is_stopping.load(Ordering::Acquire)
    }

    /// When draining ends.
    pub(crate) fn deadline(&self) -> Instant {
        let deadline = self
            .0
            .deadline
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        deadline.unwrap_or_else(Instant::now)
    }
}

impl AsFd for Stopper {
    /// Readable once [`Self::stop`] was called.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.event.as_fd()
    }
}
