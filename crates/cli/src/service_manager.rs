//! The service manager: it is told, and never waited for.

use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// What it is told.
#[derive(Clone, Copy, Debug)]
pub(crate) enum News {
    /// The server accepts VMs.
    Ready,
    /// The server ends.
    Stopping,
}

impl News {
    fn text(self) -> &'static str {
        match self {
            Self::Ready => "READY=1",
            Self::Stopping => "STOPPING=1",
        }
    }
}

/// Tells systemd, if it has started the process and asks to be told.
pub(crate) fn tell(news: News) {
    if let Err(error) = send(news.text()) {
        tracing::warn!(%error, "the service manager was not told");
    }
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
