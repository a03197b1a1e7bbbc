//! VMMs that speak the native protocol.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use pagetide_serve::native::client::{Client, ClientError};
use pagetide_serve::native::message::{Attach, AttachSpace, RefusedCode, Region, SpaceRegion};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::mm::MapFlags;

use super::{FILE_FEATURES, Guest, PAGE, PATIENCE};

/// A connected client.
pub fn connect(socket: &Path) -> Client {
    let client = Client::connect(socket).unwrap();
    client.set_timeout(Some(PATIENCE)).unwrap();
    client
}

/// The guest's whole memory at the start of the image.
pub fn region(guest: &Guest) -> Region {
    Region::missing(guest.address(0) as u64, (guest.pages() * PAGE) as u64, 0)
}

pub fn attach_of(guest: &Guest, regions: Vec<Region>) -> Attach {
    Attach {
        uffd_features: guest.uffd.features().bits(),
        regions,
    }
}

/// All of region 0, as another process has mapped it.
pub fn space_of(back_end: &Guest) -> AttachSpace {
    AttachSpace {
        uffd_features: back_end.uffd.features().bits(),
        regions: vec![SpaceRegion {
            region: 0,
            address: back_end.address(0) as u64,
        }],
    }
}

/// Connects and attaches the guest's whole memory as MISSING.
pub fn attached(guest: &Guest, socket: &Path) -> Client {
    let mut client = connect(socket);
    let attach = attach_of(guest, vec![region(guest)]);
    let attached = client.attach(&attach, &[guest.uffd.as_fd()]).unwrap();
    assert_eq!(attached.bytes, (guest.pages() * PAGE) as u64);
    client
}

/// A clone of the image, and its connection.
pub fn cloned(socket: &Path, pages: usize) -> (Guest, Client, OwnedFd) {
    let mut client = connect(socket);
    let shared = client.share().unwrap();
    let guest = Guest::of_file(shared.file.as_fd(), pages, MapFlags::PRIVATE);
    let attach = attach_of(&guest, vec![region(&guest).cloned_image()]);
    client.attach(&attach, &[guest.uffd.as_fd()]).unwrap();
    (guest, client, shared.file)
}

/// A memfd of a VMM.
pub fn memfd(pages: usize, seals: SealFlags) -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = memfd_create("guest", flags).unwrap();
    ftruncate(&file, (pages * PAGE) as u64).unwrap();
    fcntl_add_seals(&file, seals).unwrap();
    file
}

/// Memory with a file needs features that a kernel may lack.
pub fn has_minor() -> bool {
    use pagetide_uapi::userfaultfd::Userfaultfd;
    match Userfaultfd::open(FILE_FEATURES) {
        Ok(_) => true,
        Err(error) => {
            println!("SKIP: {error}");
            false
        }
    }
}

/// The code of a refusal.
pub fn code<T: std::fmt::Debug>(result: Result<T, ClientError>) -> RefusedCode {
    match result {
        Err(ClientError::Refused { code, .. }) => code,
        other => panic!("not refused: {other:?}"),
    }
}
