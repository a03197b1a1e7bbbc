//! The service manager: it is told, and never waited for.

use std::borrow::Cow;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::thread::{self, Builder};
use std::time::Duration;

/// What it is told.
#[derive(Clone, Copy, Debug)]
pub(crate) enum News {
    /// The server accepts VMs.
    Ready,
    /// The server reads its options again, and says [`News::Ready`] when it uses them.
    Reloading,
    /// The server ends, within this time.
    Stopping(Duration),
}

impl News {
    fn text(self) -> Cow<'static, str> {
        match self {
            Self::Ready => "READY=1".into(),
            Self::Reloading => format!("RELOADING=1\nMONOTONIC_USEC={}", monotonic_us()).into(),
            // The unit's TimeoutStopSec= is for a server with the default drain.
            Self::Stopping(within) => {
                format!("STOPPING=1\nEXTEND_TIMEOUT_USEC={}", within.as_micros()).into()
            }
        }
    }
}

/// The time by which systemd tells the answer to this reload from that to an earlier one.
fn monotonic_us() -> i64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec * 1_000_000 + now.tv_nsec / 1_000
}

/// How long a message waits for room in the queue of the service manager's socket, between two attempts.
const PAUSE: Duration = Duration::from_millis(100);

/// Tells systemd, if it has started the process and asks to be told.
pub(crate) fn tell(news: News) {
    if let Err(error) = send(&news.text()) {
        warn(&error);
    }
}

/// The same for news without which the service manager ends the process after a while: if the queue of its socket is full, it
/// is told as soon as there is room, unless `is_void` by then.
pub(crate) fn tell_surely(news: News, is_void: impl Fn() -> bool + Send + 'static) {
    let error = match send(&news.text()) {
        Ok(()) => return,
        Err(error) => error,
    };
    if error.kind() != io::ErrorKind::WouldBlock {
        return warn(&error);
    }
    let again = move || {
        while !is_void() {
            thread::sleep(PAUSE);
            match send(&news.text()) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return warn(&error),
                Ok(()) => return,
            }
        }
    };
    let started = Builder::new().name("pt-notify".into()).spawn(again);
    if let Err(error) = started {
        warn(&error);
    }
}

fn warn(error: &io::Error) {
    tracing::warn!(%error, "the service manager was not told");
}

/// Sends a datagram to the socket that NOTIFY_SOCKET names, if there is room.
fn send(text: &str) -> io::Result<()> {
    let Some(name) = std::env::var_os("NOTIFY_SOCKET").filter(|name| !name.is_empty()) else {
        return Ok(());
    };
    let address = match name.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        _ => SocketAddr::from_pathname(&name)?,
    };
    let socket = UnixDatagram::unbound()?;
    socket.set_nonblocking(true)?;
    socket.send_to_addr(text.as_bytes(), &address).map(drop)
}
