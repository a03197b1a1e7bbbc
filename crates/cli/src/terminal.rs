//! The terminal as a guest's console: every key goes to the guest, but for a way out.

use std::io::{self, PipeWriter, Read, Write};
use std::os::fd::OwnedFd;
use std::sync::mpsc::{self, Receiver, SyncSender, TrySendError};
use std::thread;

use pagetide_vmm::Stopper;
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcsetattr};

/// Ctrl-A, as in other VMMs.
const ESCAPE: u8 = 0x01;

/// How many readings, of up to 64 bytes, wait for the guest beside what a pipe holds.
const MOST_WAITING: usize = 4096;

/// Standard input in raw mode, until it is dropped.
pub(crate) struct RawTerminal {
    before: Termios,
}

impl RawTerminal {
    /// Puts standard input into raw mode. What is typed can be read from the descriptor, except for
    /// Ctrl-A X, which stops the guest.
    pub(crate) fn open(stopper: Stopper) -> io::Result<(Self, OwnedFd)> {
        let (reader, writer) = io::pipe()?;
        let before = tcgetattr(io::stdin())?;
        let mut raw = before.clone();
        raw.make_raw();
        let (keys, typed) = mpsc::sync_channel(MOST_WAITING);
        // Threads that nobody waits for: they may be reading and writing when the guest ends. Two, so that
        // the way out is seen even if the guest does not read.
        thread::Builder::new()
            .name("terminal".into())
            .spawn(move || look(io::stdin().lock(), &keys, &stopper))?;
        thread::Builder::new()
            .name("typed".into())
            .spawn(move || pass_on(&typed, writer))?;
        tcsetattr(io::stdin(), OptionalActions::Now, &raw)?;
        Ok((Self { before }, reader.into()))
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        // There is nobody left to tell.
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, &self.before);
    }
}

/// Ends with the input, or when nobody reads any more.
fn look(mut input: impl Read, guest: &SyncSender<Vec<u8>>, stopper: &Stopper) {
    let mut keys = Keys::default();
    let mut bytes = [0; 64];
    while let Ok(count @ 1..) = input.read(&mut bytes) {
        let (passed, stop) = keys.take(&bytes[..count]);
        if stop {
            stopper.end();
        }
        // What a guest does not read for so long is dropped, as a serial line would.
        if let Err(TrySendError::Disconnected(_)) = guest.try_send(passed) {
            return;
        }
    }
}

/// Ends when nothing more can come, or nobody reads any more.
fn pass_on(typed: &Receiver<Vec<u8>>, mut guest: PipeWriter) {
    for bytes in typed {
        if guest.write_all(&bytes).is_err() {
            return;
        }
    }
}

/// What was typed so far: whether the last key was the escape.
#[derive(Default)]
struct Keys {
    escaped: bool,
}

impl Keys {
    /// What of it is for the guest, and whether the guest is to stop. Ctrl-A twice is one Ctrl-A.
    fn take(&mut self, bytes: &[u8]) -> (Vec<u8>, bool) {
        let (mut passed, mut stop) = (Vec::new(), false);
        for &byte in bytes {
            if !self.escaped && byte == ESCAPE {
                self.escaped = true;
                continue;
            }
            if self.escaped && matches!(byte, b'x' | b'X') {
                stop = true;
            } else {
                passed.push(byte);
            }
            self.escaped = false;
        }
        (passed, stop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_escape_is_kept_back() {
        let mut keys = Keys::default();
        assert_eq!(keys.take(b"ls\r\x03"), (b"ls\r\x03".to_vec(), false));
        assert_eq!(keys.take(b"a\x01"), (b"a".to_vec(), false));
        assert_eq!(keys.take(b"\x01b"), (b"\x01b".to_vec(), false));
        assert_eq!(keys.take(b"\x01c"), (b"c".to_vec(), false));
        assert_eq!(keys.take(b"x\x01"), (b"x".to_vec(), false));
        assert_eq!(keys.take(b"x"), (Vec::new(), true));
        assert_eq!(keys.take(b"x"), (b"x".to_vec(), false));
    }
}
