//! The host's ends of the console.

use std::io::Write;
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
    /// A console without input.
    pub fn output(output: impl Write + Send + 'static) -> Self {
        Self {
            output: Box::new(output),
            input: None,
        }
    }

    /// Reads the console's input from a descriptor, until its end.
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

/// The thread that passes input to the guest. Dropping it ends the thread, and does not wait for it.
pub(super) struct InputThread {
    wake: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl InputThread {
    pub(super) fn start(
        input: OwnedFd,
        guest: Arc<Guest>,
        stopper: Stopper,
    ) -> Result<Self, LinuxRunError> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC);
        let wake = Arc::new(wake.map_err(|errno| LinuxRunError::Input(errno.into()))?);
        let woken = Arc::clone(&wake);
        let body = move || {
            if let Err(error) = copy_input(&input, &woken, &guest) {
                stopper.stop(error);
            }
        };
        let thread = thread::Builder::new().name("console-input".into());
        let thread = Some(thread.spawn(body).map_err(LinuxRunError::InputThread)?);
        Ok(Self { wake, thread })
    }

    /// Ends the thread, once the run is stopped.
    pub(super) fn end(mut self) {
        self.wake();
        let ended = self.thread.take().map(JoinHandle::join);
        if let Some(Err(_)) = ended {
            tracing::warn!("the thread of the console's input panicked");
        }
    }

    fn wake(&self) {
        // An eventfd takes 8 bytes unless it is full, and then it wakes as well.
        let _ = rustix::io::write(&*self.wake, &1_u64.to_ne_bytes());
    }
}

impl Drop for InputThread {
    fn drop(&mut self) {
        self.wake();
    }
}

fn copy_input(input: &OwnedFd, wake: &OwnedFd, guest: &Guest) -> Result<(), LinuxRunError> {
    let mut bytes = [0; 64];
    while wait(input, wake).map_err(|errno| LinuxRunError::Input(errno.into()))? {
        let count = match rustix::io::read(input, &mut bytes) {
            Ok(0) => return Ok(()),
            Ok(count) => count,
            Err(Errno::INTR | Errno::AGAIN) => continue,
            Err(errno) => return Err(LinuxRunError::Input(errno.into())),
        };
        let mut rest = &bytes[..count];
        while !rest.is_empty() {
            if guest.is_stopped() {
                return Ok(());
            }
            let taken = guest.devices().input(rest)?;
            rest = &rest[taken..];
            if !rest.is_empty() {
                thread::sleep(FULL_WAIT);
            }
        }
    }
    Ok(())
}

/// Waits for input; false if the thread was woken to end.
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
