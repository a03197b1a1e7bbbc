//! VMs that a former server has left: nothing that they do not need keeps them asleep.

use std::fs;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::net::TcpListener;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;

use pagetide_test_support::{Sleeper, eventually, within_patience};
use pagetide_uapi::userfaultfd::{Features, Mode, UserRange, Userfaultfd};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use super::{Place, assert_refused, ended, signal};

const PAGE: usize = 4096;

/// Memory of a guest in this process, as long as the image of a [`Place`]. It stays mapped.
struct Guest {
    range: UserRange,
    uffd: Userfaultfd,
}

impl Guest {
    /// `None`, and a word why, if there are no userfaultfds here.
    fn new() -> Option<Self> {
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
    fn connect(&self, socket: &Path) -> UnixStream {
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

    /// Reads the first byte of a page, which may be missing.
    fn reader(&self, page: usize) -> impl FnOnce() -> u8 + Send + 'static {
        let start = usize::try_from(self.range.start).expect("an address");
        move || {
            let at = std::ptr::with_exposed_provenance::<u8>(start + page * PAGE);
            // SAFETY: the page lies in this guest's mapping, which stays until the process ends.
            unsafe { at.read_volatile() }
        }
    }
}

#[test]
fn metrics_and_a_control_socket_that_are_not_to_be_had_keep_no_vm_asleep() {
    let Some(guest) = Guest::new() else {
        return;
    };
    let place = Place::new();
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("bound").to_string();
    fs::write(place.path("blocked"), "a file").expect("a temporary file");
    let common = [
        "--state",
        "state",
        "--prefetch",
        "off",
        "--working-set",
        "off",
    ];
    let (metrics, control) = (["--metrics", address.as_str()], ["--control", "blocked"]);
    // Without VMs, whoever starts it is to see what is wrong.
    for (beside, wanted) in [
        (metrics, "serving the metrics at"),
        (control, "a file that is no socket"),
    ] {
        let binding = place.binding();
        let words = [&[binding.as_str()], &common[..], &beside].concat();
        let output = place.command(&words).output().expect("it starts");
        assert_refused(&output, wanted);
    }
    let mut killed = place.start(&common);
    let stream = guest.connect(&place.path("socket"));
    assert_eq!(within_patience("a page", guest.reader(0)), 7);
    killed.kill().expect("it runs");
    assert!(!ended(&mut killed).success());
    let asleep = Sleeper::spawn("the guest", guest.reader(1));
    let mut child = place.start(&[&common[..], &metrics, &control].concat());
    assert_eq!(asleep.join(), 7);
    let log = fs::read_to_string(place.path("log")).expect("UTF-8");
    for what in ["metrics", "a control socket"] {
        let wanted = format!("the server runs without {what} until its next start");
        assert!(log.contains(&wanted), "{wanted:?} is not in {log}");
    }
    drop(stream);
    signal(&child, "TERM");
    assert_eq!(ended(&mut child).code(), Some(0));
    let keeper = place.path("state/keeper.sock");
    eventually("the keeper's end", || !keeper.exists());
}
