//! A guest whose memory a server of these tests fills.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;

use pagetide_serve::native::client::Client;
use pagetide_serve::native::label::VmLabel;
use pagetide_serve::native::message::{Attach, Region};
use pagetide_uapi::userfaultfd::{Features, Mode, UserRange, Userfaultfd};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

const PAGE: usize = 4096;

/// Memory of a guest in this process, as long as the image of a [`super::Place`]. It stays mapped.
pub(super) struct Guest {
    range: UserRange,
    uffd: Userfaultfd,
}

impl Guest {
    /// `None`, and a word why, if there are no userfaultfds here.
    pub(super) fn new() -> Option<Self> {
        let uffd = match Userfaultfd::open_for_user_mode(Features::NONE) {
            Ok(uffd) => uffd,
            Err(error) => {
                println!("SKIP: {error}");
                return None;
            }
        };
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let (null, bytes) = (std::ptr::null_mut(), 2 * PAGE);
        // SAFETY: mmap without MAP_FIXED replaces no other mapping.
        let start = unsafe { mmap_anonymous(null, bytes, access, MapFlags::PRIVATE) };
        let range = UserRange {
            start: start.expect("memory").expose_provenance() as u64,
            bytes: bytes as u64,
        };
        // SAFETY: the memory is new, stays mapped, and no code relies on its zeroes.
        unsafe { uffd.register(range, Mode::Missing) }.expect("it can be registered");
        Some(Self { range, uffd })
    }

    /// Connects, and sends what Firecracker does.
    pub(super) fn connect(&self, socket: &Path) -> UnixStream {
        let UserRange { start, bytes } = self.range;
        let message = format!(
            r#"[{{"base_host_virt_addr":{start},"size":{bytes},"offset":0,"page_size":{PAGE},"page_size_kib":{PAGE}}}]"#
        );
        let stream = UnixStream::connect(socket).expect("it listens");
        let descriptors = [self.uffd.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(&descriptors)));
        let parts = [IoSlice::new(message.as_bytes())];
        let sent = sendmsg(&stream, &parts, &mut ancillary, SendFlags::empty());
        assert_eq!(sent, Ok(message.len()));
        stream
    }

    /// Connects by the native protocol, says what it is called, and attaches its memory.
    pub(super) fn attach(&self, socket: &Path, label: Option<&VmLabel>) -> Client {
        let mut client = Client::connect(socket).expect("it listens");
        if let Some(label) = label {
            assert!(client.label(label).expect("it is sent"));
        }
        let attach = Attach {
            uffd_features: self.uffd.features().bits(),
            regions: vec![Region::missing(self.range.start, self.range.bytes, 0)],
        };
        let attached = client.attach(&attach, &[self.uffd.as_fd()]);
        attached.expect("it is served");
        client
    }

    /// Reads the first byte of a page, which may be missing.
    pub(super) fn reader(&self, page: usize) -> impl FnOnce() -> u8 + Send + 'static {
        let start = usize::try_from(self.range.start).expect("an address");
        move || {
            let at = std::ptr::with_exposed_provenance::<u8>(start + page * PAGE);
            // SAFETY: the page lies in this guest's mapping, which stays until the process ends.
            unsafe { at.read_volatile() }
        }
    }
}
