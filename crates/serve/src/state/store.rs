//! The service manager as the keeper: systemd's store of descriptors.

use std::collections::{BTreeMap, BTreeSet};
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

/// Before a VM's number, to the base of [`BASE`]: the name of its descriptors. Short, for [`MOST_NAME_BYTES`], and no letter:
/// who names the sockets of a unit (`FileDescriptorName=`) writes words.
const NAME: &str = "~";
const BASE: u32 = 36;
/// What it was before, with a decimal number.
const FORMER_NAME: &str = "pagetide-vm-";

/// The bytes of the names of all VMs' descriptors. systemd passes all names in one variable, LISTEN_FDNAMES, with a colon between
/// them, and a kernel starts no program with a variable of more than 128 KiB (`MAX_ARG_STRLEN`, execve(2)). The names of
/// sockets need room, too.
const MOST_NAME_BYTES: usize = 112 << 10;

/// A service manager's store of descriptors, and what it has given back at the start of this process.
pub struct DescriptorStore {
    socket: UnixDatagram,
    limit: usize,
    given: BTreeMap<u64, Vec<OwnedFd>>,
    /// The VMs that are stored by their former names.
    former: BTreeSet<u64>,
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
            former: BTreeSet::new(),
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
            if name.starts_with(FORMER_NAME) {
                self.former.insert(number);
            }
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

    /// Whether there is room for the descriptors of so many VMs, whose names have so many bytes.
    pub(super) fn has_room_for(&self, vms: usize, name_bytes: usize) -> bool {
        let descriptors = vms.saturating_mul(DESCRIPTORS);
        descriptors <= self.limit && name_bytes <= MOST_NAME_BYTES
    }

    /// The bytes of the names of a VM's descriptors, as it is stored or will be.
    pub(super) fn name_bytes(&self, id: u64) -> usize {
        let name = match self.former.contains(&id) {
            true => format!("{FORMER_NAME}{id}"),
            false => name(id),
        };
        (name.len() + 1) * DESCRIPTORS
    }

    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Has the descriptors of a VM stored, without waiting. They stay when the other end of one closes: the next server sees that.
    pub(super) fn store(&self, id: u64, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        let name = name(id);
        self.send(&format!("FDSTORE=1\nFDPOLL=0\nFDNAME={name}"), descriptors)
    }

    pub(super) fn remove(&self, id: u64) -> io::Result<()> {
        let name = name(id);
        self.send(&format!("FDSTOREREMOVE=1\nFDNAME={name}"), &[])?;
        // A server of before may have stored it. One that is not there is no error.
        self.send(&format!("FDSTOREREMOVE=1\nFDNAME={FORMER_NAME}{id}"), &[])
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
    if let Some(number) = name.strip_prefix(FORMER_NAME) {
        return number.parse().ok();
    }
    let id = u64::from_str_radix(name.strip_prefix(NAME)?, BASE).ok()?;
    (self::name(id) == name).then_some(id)
}

/// The name of a VM's descriptors.
fn name(id: u64) -> String {
    let base = u64::from(BASE);
    let digits = std::iter::successors(Some(id), |rest| (*rest >= base).then(|| rest / base));
    let digit = |rest| char::from_digit(u32::try_from(rest % base).unwrap_or(0), BASE);
    let mut digits: Vec<char> = digits.filter_map(digit).collect();
    digits.reverse();
    format!("{NAME}{}", String::from_iter(digits))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_leads_back_to_its_number() {
        for id in [0, 1, 35, 36, 4096, 60_466_175, u64::MAX] {
            assert_eq!(number(&name(id)), Some(id));
            assert_eq!(number(&format!("{FORMER_NAME}{id}")), Some(id));
        }
        assert_eq!(name(36), "~10");
    }

    /// Kind: a short name that somebody else has given to another thing.
    #[test]
    fn names_of_sockets_are_no_vms() {
        for other in [
            "",
            "vm1",
            "varlink",
            "pagetide.socket",
            "~",
            "~-1",
            "~+1",
            "~01",
            "~A",
            "pagetide-vm-",
            "pagetide-vm-x",
        ] {
            assert_eq!(number(other), None, "{other}");
        }
    }

    /// How many VMs from `first` on have room beside others, whose names have so many bytes.
    fn vms_with_room(store: &DescriptorStore, mut bytes: usize, first: u64) -> usize {
        let ids = (first..).zip(1..);
        let with_room = ids.take_while(|&(id, vms)| {
            bytes += store.name_bytes(id);
            store.has_room_for(vms, bytes)
        });
        with_room.count()
    }

    /// Kind: a bound that counts what there is as something smaller. An upgrade leaves VMs in the store by their former names.
    #[test]
    fn former_names_are_counted_as_long_as_they_are() {
        const FORMER: u64 = 1000;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("notify");
        let _manager = UnixDatagram::bind(&path).unwrap();
        let mut store = DescriptorStore::new(path.as_os_str(), usize::MAX).unwrap();
        let former = |id| format!("{FORMER_NAME}{id}");
        for id in 1..=FORMER {
            let (descriptor, _) = io::pipe().unwrap();
            store.take_back(&former(id), descriptor.into());
            drop(store.take_given());
        }
        let bytes = (1..=FORMER).map(|id| store.name_bytes(id)).sum();
        let vms = vms_with_room(&store, bytes, FORMER + 1);
        let new = (FORMER + 1..).take(vms).map(name);
        let names = (1..=FORMER).map(former).chain(new);
        let names: Vec<_> = names.flat_map(|name| vec![name; DESCRIPTORS]).collect();
        let variable = format!("LISTEN_FDNAMES={}", names.join(":"));
        assert!(variable.len() < 128 << 10, "{vms} VMs: {}", variable.len());
        assert!(vms > 1000, "{vms}");
    }

    /// Kind: a limit of the kernel on what a service manager passes on. A server that could not be started would leave all
    /// VMs asleep.
    #[test]
    fn the_names_of_all_vms_are_no_longer_than_the_kernel_permits() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("notify");
        let _manager = UnixDatagram::bind(&path).unwrap();
        let store = DescriptorStore::new(path.as_os_str(), usize::MAX).unwrap();
        for first in [1, 1_000_000, 60_000_000, u64::MAX - 10_000] {
            let vms = vms_with_room(&store, 0, first);
            let ids = (first..).take(vms);
            let names: Vec<_> = ids.flat_map(|id| vec![name(id); DESCRIPTORS]).collect();
            let variable = format!("LISTEN_FDNAMES={}", names.join(":"));
            assert!(variable.len() < 128 << 10, "{vms} VMs: {}", variable.len());
            // As many as `--max-vms` by default, if numbers are not very large.
            assert!(first > 1_000_000 || vms >= 4096, "{vms}");
        }
    }
}
