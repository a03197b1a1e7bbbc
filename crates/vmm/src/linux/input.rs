//! The console's two ends on the host.

use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::Errno;

use crate::control::Stopper;

use super::error::LinuxRunError;
use super::guest::Guest;

/// How long input waits when the serial port has no room for it.
const FULL_WAIT: Duration = Duration::from_millis(5);

/// Where the guest's console goes, and where its input comes from.
pub struct LinuxConsole {
    pub(super) output: Box<dyn Write + Send>,
    pub(super) input: Option<OwnedFd>,
}

impl LinuxConsole {
    /// A console that is only listened to.
    pub fn output(output: impl Write + Send + 'static) -> Self {
        Self {
            output: Box::new(output),
            input: None,
        }
    }

    /// Types in what can be read from a descriptor, until its end.
    #[must_use]
    pub fn input(mut self, input: OwnedFd) -> Self {
        self.input = Some(input);
        self
    }
}

impl std::fmt::Debug for LinuxConsole {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut console = formatter.debug_struct("LinuxConsole");
        console.field("input", &self.input).finish_non_exhaustive()
    }
}

/// The thread that types in. Dropping it ends it without waiting for it.
pub(super) struct Typist {
    wake: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Typist {
    pub(super) fn start(
        input: OwnedFd,
        guest: Arc<Guest>,
        stopper: Stopper,
    ) -> Result<Self, LinuxRunError> {
        let flags = EventfdFlags::CLOEXEC;
        let wake = eventfd(0, flags).map_err(|errno| LinuxRunError::Input(errno.into()))?;
        let wake = Arc::new(wake);
        let woken = Arc::clone(&wake);
        let thread = thread::Builder::new()
            .name("console-input".into())
            .spawn(move || {
                if let Err(error) = type_in(&input, &woken, &guest) {
                    stopper.stop(error);
                }
            })
            .map_err(LinuxRunError::InputThread)?;
        Ok(Self {
            wake,
            thread: Some(thread),
        })
    }

    /// Ends it, once the run is stopped.
    pub(super) fn end(mut self) {
        self.wake();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::warn!("the thread of the console's input panicked");
        }
    }

    fn wake(&self) {
        // An eventfd takes 8 bytes unless it is full, and then it wakes as well.
        let _ = rustix::io::write(&*self.wake, &1_u64.to_ne_bytes());
    }
}

impl Drop for Typist {
    fn drop(&mut self) {
        self.wake();
    }
}

fn type_in(input: &OwnedFd, wake: &OwnedFd, guest: &Guest) -> Result<(), LinuxRunError> {
    let mut bytes = [0; 64];
    while wait(input, wake).map_err(|errno| LinuxRunError::Input(errno.into()))? {
        let count = match rustix::io::read(input, &mut bytes) {
            Ok(0) => return Ok(()),
            Ok(count) => count,
            Err(Errno::INTR | Errno::AGAIN) => continue,
            Err(errno) => return Err(LinuxRunError::Input(io::Error::from(errno))),
        };
        let mut rest = &bytes[..count];
        while !rest.is_empty() {
            if guest.is_stopped() {
                return Ok(());
            }
            let typed = guest.devices().type_in(rest)?;
            rest = &rest[typed..];
            if !rest.is_empty() {
                thread::sleep(FULL_WAIT);
            }
        }
    }
    Ok(())
}

/// Waits for input; false if it was woken instead.
fn wait(input: &OwnedFd, wake: &OwnedFd) -> Result<bool, Errno> {
    loop {
        let mut fds = [
            PollFd::from_borrowed_fd(input.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(wake.as_fd(), PollFlags::IN),
        ];
        match poll(&mut fds, None) {
            Ok(_) => return Ok(fds[1].revents().is_empty()),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
}
