//! What the other end of a socket has read.

use std::os::fd::AsFd;

use rustix::ioctl::{Getter, Opcode, ioctl};

/// `SIOCOUTQ`, which Linux also calls `TIOCOUTQ` (unix(7), ioctl_tty(2)).
const SIOCOUTQ: Opcode = 0x5411;

/// How many bytes of what was sent over a Unix socket the other end has not read yet.
///
/// # Panics
///
/// If the descriptor is no socket.
pub fn unread_by_peer(socket: impl AsFd) -> i32 {
    // SAFETY: SIOCOUTQ stores one int, as the getter expects.
    let getter = unsafe { Getter::<SIOCOUTQ, i32>::new() };
    // SAFETY: the getter describes the request as it is, see above.
    let unread = unsafe { ioctl(socket, getter) };
    unread.unwrap()
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::wait::{equals, eventually};

    #[test]
    fn what_was_read_is_not_unread() {
        let (mut here, mut there) = UnixStream::pair().unwrap();
        assert_eq!(unread_by_peer(&here), 0);
        here.write_all(b"abc").unwrap();
        assert!(unread_by_peer(&here) > 0);
        there.read_exact(&mut [0; 3]).unwrap();
        eventually("all is read", || equals(unread_by_peer(&here), &0));
    }
}
