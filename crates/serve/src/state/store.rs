//! The service manager as the keeper: systemd's store of descriptors.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fmt;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use super::wire::DESCRIPTORS;

/// Before a VM's number: the name of its descriptors.
const NAME: &str = "pagetide-vm-";

/// A service manager's store of descriptors, and what it has given back at the start of this process.
pub struct DescriptorStore {
    socket: UnixDatagram,
    limit: usize,
    given: BTreeMap<u64, Vec<OwnedFd>>,
}

impl DescriptorStore {
    /// The store behind `notify` (`NOTIFY_SOCKET`), with room for so many descriptors (`FDSTORE`).
    ///
    /// # Errors
    /// The kernel's error, if nobody is there.
    pub fn new(notify: &OsStr, limit: usize) -> io::Result<Self> {
        let address = match notify.as_bytes() {
            [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
            _ => SocketAddr::from_pathname(notify)?,
        };
        let socket = UnixDatagram::unbound()?;
        socket.connect_addr(&address)?;
        socket.set_nonblocking(true)?;
        Ok(Self {
            socket,
            limit,
            given: BTreeMap::new(),
        })
    }

    /// Whether a descriptor of this name (`LISTEN_FDNAMES`) is one of a VM that was stored.
    #[must_use]
    pub fn is_of_a_vm(name: &str) -> bool {
        number(name).is_some()
    }

    /// Takes a descriptor that the service manager has given back.
    pub fn take_back(&mut self, name: &str, descriptor: OwnedFd) {
        if let Some(number) = number(name) {
            self.given.entry(number).or_default().push(descriptor);
        }
    }

    /// Whether a former server has left VMs.
    pub(crate) fn has_vms(&self) -> bool {
        !self.given.is_empty()
    }

    /// The VMs that a former server has left: the descriptors of each as a keeper has them.
    pub(super) fn take_given(&mut self) -> Vec<(u64, io::Result<Vec<OwnedFd>>)> {
        let given = std::mem::take(&mut self.given).into_iter();
        given.map(|(id, vm)| (id, sorted(vm))).collect()
    }

    /// Whether there is room for the descriptors of so many VMs.
    pub(super) fn has_room_for(&self, vms: usize) -> bool {
        vms.saturating_mul(DESCRIPTORS) <= self.limit
    }

    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Has the descriptors of a VM stored, without waiting. They stay when the other end of one closes: the next server sees that.
    pub(super) fn store(&self, id: u64, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.send(
            &format!("FDSTORE=1\nFDPOLL=0\nFDNAME={NAME}{id}"),
            descriptors,
        )
    }

    pub(super) fn remove(&self, id: u64) -> io::Result<()> {
        self.send(&format!("FDSTOREREMOVE=1\nFDNAME={NAME}{id}"), &[])
    }

    /// What is returned is at its end when all that was sent before has been handled.
    pub(super) fn barrier(&self) -> io::Result<OwnedFd> {
        let (read, write) = io::pipe()?;
        self.send("BARRIER=1", &[write.as_fd()])?;
        Ok(read.into())
    }

    fn send(&self, text: &str, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            ancillary.push(SendAncillaryMessage::ScmRights(descriptors));
        }
        let parts = [IoSlice::new(text.as_bytes())];
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        sendmsg(&self.socket, &parts, &mut ancillary, flags)?;
        Ok(())
    }
}

impl fmt::Debug for DescriptorStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DescriptorStore")
            .field("limit", &self.limit)
            .field("vms", &self.given.len())
            .finish_non_exhaustive()
    }
}

fn number(name: &str) -> Option<u64> {
    name.strip_prefix(NAME)?.parse().ok()
}

/// A VM's descriptors in the order of a keeper: the store has no order, but each is of another kind.
fn sorted(descriptors: Vec<OwnedFd>) -> io::Result<Vec<OwnedFd>> {
    const KINDS: [&[u8]; DESCRIPTORS] = [
        b"anon_inode:[userfaultfd]",
        b"socket:",
        b"/memfd:pagetide-maps",
        b"/memfd:pagetide-vm",
    ];
    let mut sorted: [Option<OwnedFd>; DESCRIPTORS] = [const { None }; DESCRIPTORS];
    for descriptor in descriptors {
        let name = std::fs::read_link(format!("/proc/self/fd/{}", descriptor.as_raw_fd()))?;
        let name = name.as_os_str().as_bytes();
        let place = KINDS.iter().position(|kind| name.starts_with(kind));
        if let Some(place) = place.and_then(|place| sorted.get_mut(place)) {
            *place = Some(descriptor);
        }
    }
    let all: Option<Vec<OwnedFd>> = sorted.into_iter().collect();
    all.ok_or_else(|| io::Error::other("the service manager has not all of its descriptors"))
}
