//! The host's ends of the console.

use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::control::Stopper;

use super::error::LinuxRunError;
use super::guest::Guest;

/// How long input waits when the serial port has no room for it.
const FULL_WAIT: Duration = Duration::from_millis(5);
/// How often the thread looks whether the run was stopped.
const STOP_WAIT: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 50_000_000,
};

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

/// Starts the thread that passes input to the guest, until the run is stopped. A failure stops the run.
pub(super) fn start_input(
    input: OwnedFd,
    guest: Arc<Guest>,
    stopper: Stopper,
) -> Result<JoinHandle<()>, LinuxRunError> {
    let body = move || {
        if let Err(error) = copy_input(&input, &guest) {
            stopper.stop(error);
        }
    };
    let thread = thread::Builder::new().name("console-input".into());
    thread.spawn(body).map_err(LinuxRunError::InputThread)
}

fn copy_input(input: &OwnedFd, guest: &Guest) -> Result<(), LinuxRunError> {
    let mut bytes = [0; 64];
    while !guest.is_stopped() {
        let mut fds = [PollFd::from_borrowed_fd(input.as_fd(), PollFlags::IN)];
        let read = match poll(&mut fds, Some(&STOP_WAIT)) {
            Ok(0) => continue,
            Ok(_) => rustix::io::read(input, &mut bytes),
            Err(errno) => Err(errno),
        };
        let count = match read {
            Ok(0) => return Ok(()),
            Ok(count) => count,
            Err(Errno::INTR | Errno::AGAIN) => continue,
            Err(errno) => return Err(LinuxRunError::Input(errno.into())),
        };
        let mut rest = &bytes[..count];
        while !rest.is_empty() && !guest.is_stopped() {
            let taken = guest.devices().input(rest)?;
            rest = &rest[taken..];
            if !rest.is_empty() {
                thread::sleep(FULL_WAIT);
            }
        }
    }
    Ok(())
}
