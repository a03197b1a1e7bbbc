//! Another process: it maps memory, registers it with a userfaultfd, hands that over, and then executes
//! commands. It is this test program, started again in its test `child`.

#![allow(
    dead_code,
    unreachable_pub,
    reason = "each test binary uses a part of this"
)]
#![allow(
    clippy::unwrap_used,
    reason = "a test helper that fails is a test that fails"
)]

use std::collections::HashMap;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use pagetide_memory::{GuestAddress, HostAddress, HostRange, PageMapImage, PageSize};
use pagetide_pager::{Mode, Pager, ReaderConfig, Readers, RegionConfig};
use pagetide_uapi::userfaultfd::{Features, UserRange, Userfaultfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{Advice, MapFlags, MremapFlags, ProtFlags};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use crate::support::{PAGE, PATIENCE, fill, has_unix_sockets, has_userfaultfd, pattern};

const SOCKET: &str = "PAGETIDE_TEST_CHILD";
/// The longest message in bytes.
const LONGEST: usize = 60_000;

/// Whether this process is the child; if so, it has executed all commands.
pub fn be_child() -> bool {
    let Ok(number) = std::env::var(SOCKET) else {
        return false;
    };
    // SAFETY: the parent has left this descriptor open for the child, and no other code uses it.
    let socket = unsafe { UnixDatagram::from_raw_fd(number.parse().unwrap()) };
    let mut memory = Memory::default();
    loop {
        let (text, descriptors) = receive(&socket);
        if text.is_empty() {
            return true;
        }
        let words: Vec<_> = text.split(' ').collect();
        let (answer, descriptors) = memory.act(&words, descriptors);
        let descriptors: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
        send(&socket, &answer, &descriptors);
    }
}

fn send(socket: &UnixDatagram, text: &str, descriptors: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(descriptors)));
    let text = [IoSlice::new(text.as_bytes())];
    sendmsg(socket, &text, &mut control, SendFlags::NOSIGNAL).unwrap();
}

/// Returns an empty text if the peer has exited.
fn receive(socket: &UnixDatagram) -> (String, Vec<OwnedFd>) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut text = vec![0; LONGEST];
    let received = recvmsg(
        socket,
        &mut [IoSliceMut::new(&mut text)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC,
    );
    let Ok(received) = received else {
        return (String::new(), Vec::new());
    };
    text.truncate(received.bytes);
    let descriptors = control.drain().flat_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => descriptors.collect(),
        _ => Vec::new(),
    });
    let descriptors = descriptors.collect();
    (String::from_utf8(text).unwrap(), descriptors)
}

/// A child process, which ends when this value is dropped.
pub struct Other {
    child: Child,
    socket: UnixDatagram,
}

/// Memory of a child.
pub struct Mapped {
    pub start: u64,
    pub pages: u64,
    pub file: Option<OwnedFd>,
}

impl Mapped {
    pub fn range(&self) -> HostRange {
        let start = HostAddress(usize::try_from(self.start).unwrap());
        HostRange::new(start, usize::try_from(self.pages * PAGE).unwrap()).unwrap()
    }
}

impl Other {
    /// Whether another process can be started and hand over its userfaultfd; prints the reason if not.
    pub fn can_start() -> bool {
        has_userfaultfd() && has_unix_sockets()
    }

    /// With a userfaultfd that has `events`; several mappings share it.
    pub fn start(events: &[Features]) -> (Self, Arc<Userfaultfd>) {
        let (ours, theirs) = UnixDatagram::pair().unwrap();
        ours.set_read_timeout(Some(PATIENCE)).unwrap();
        // The child inherits the duplicate.
        let theirs = rustix::io::dup(&theirs).unwrap();
        let number = std::os::fd::AsRawFd::as_raw_fd(&theirs).to_string();
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child", "--nocapture"])
            .env(SOCKET, number)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let other = Self {
            child,
            socket: ours,
        };
        let wanted = events.iter().fold(
            Features::POISON | Features::MISSING_SHMEM | Features::MINOR_SHMEM,
            |features, &event| features | event,
        );
        let (_, mut descriptors) = other.ask(&format!("open {}", wanted.bits()), &[]);
        let uffd = Userfaultfd::adopt(descriptors.remove(0), wanted).unwrap();
        (other, Arc::new(uffd))
    }

    fn ask(&self, text: &str, descriptors: &[BorrowedFd<'_>]) -> (String, Vec<OwnedFd>) {
        send(&self.socket, text, descriptors);
        let answer = receive(&self.socket);
        assert!(!answer.0.is_empty(), "the child has no answer to {text:?}");
        answer
    }

    /// Sends the child a command, and returns its answer.
    pub fn tell(&self, text: impl AsRef<str>) -> String {
        self.ask(text.as_ref(), &[]).0
    }

    /// The same, with descriptors.
    pub fn tell_with(&self, text: impl AsRef<str>, descriptors: &[BorrowedFd<'_>]) -> String {
        self.ask(text.as_ref(), descriptors).0
    }

    /// Maps and registers memory of 4 KiB pages: anonymous for MISSING mode, a memfd for MINOR.
    pub fn map(&self, pages: u64, mode: Mode) -> Mapped {
        let (answer, mut descriptors) = self.ask(&format!("map {pages} {mode:?}"), &[]);
        Mapped {
            start: answer.parse().unwrap(),
            pages,
            file: descriptors.pop(),
        }
    }

    /// Makes the child check that pages have the content of these gpas; the result is "right" if so.
    pub fn check(&self, start: u64, pages: u64, gpa: GuestAddress) -> String {
        self.tell(format!("check {start} {pages} {}", gpa.0))
    }

    /// The same on a separate thread; the command `join` returns the answer.
    pub fn check_later(&self, start: u64, pages: u64, gpa: GuestAddress) {
        self.tell(format!("later check {start} {pages} {}", gpa.0));
    }

    /// Whether the child has a mapping there, by `/proc`.
    fn has_mapping_at(&self, start: u64) -> bool {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", self.child.id())).unwrap();
        maps.lines()
            .any(|line| line.starts_with(&format!("{start:x}-")))
    }

    /// Waits until the mapping that starts there is gone. The thread that unmaps it continues only
    /// after its userfaultfd was read.
    pub fn wait_for_end_of(&self, mapped: &Mapped) {
        crate::support::eventually("the end of a mapping", || {
            !self.has_mapping_at(mapped.start)
        });
    }

    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        // It may be asleep on a page.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A pager with two readers, and a child with a userfaultfd that has `events`. Where that is
/// impossible, prints the reason and returns `None`.
pub fn pager_and_child(
    events: &[Features],
) -> Option<(Arc<Pager>, Readers, Other, Arc<Userfaultfd>)> {
    if !Other::can_start() {
        return None;
    }
    let pager = Pager::new().unwrap();
    let readers = two_readers(&pager);
    let (other, uffd) = Other::start(events);
    Some((pager, readers, other, uffd))
}

pub fn two_readers(pager: &Arc<Pager>) -> Readers {
    Readers::spawn(pager, ReaderConfig::new(2)).unwrap()
}

/// The gpa `pages` small pages above `gpa`.
pub fn above(gpa: GuestAddress, pages: u64) -> GuestAddress {
    GuestAddress(gpa.0 + pages * PAGE)
}

/// The state of a child.
#[derive(Default)]
struct Memory {
    uffd: Option<Userfaultfd>,
    files: HashMap<u64, OwnedFd>,
    later: Vec<JoinHandle<String>>,
    serving: Option<(Arc<Pager>, Readers)>,
}

fn number(word: &str) -> u64 {
    word.parse().unwrap()
}

fn pointer(address: u64) -> *mut std::ffi::c_void {
    std::ptr::with_exposed_provenance_mut(usize::try_from(address).unwrap())
}

fn length(pages: &str) -> usize {
    usize::try_from(number(pages) * PAGE).unwrap()
}

impl Memory {
    fn act(&mut self, words: &[&str], descriptors: Vec<OwnedFd>) -> (String, Vec<OwnedFd>) {
        match *words {
            ["open", features] => {
                let features = Features::from_bits(number(features));
                let uffd = Userfaultfd::open(features).unwrap();
                let handed = uffd.as_fd().try_clone_to_owned().unwrap();
                self.uffd = Some(uffd);
                return ("ok".into(), vec![handed]);
            }
            ["map", pages, mode] => return self.map(length(pages), mode == "Minor"),
            ["later", ref rest @ ..] => {
                let words: Vec<String> = rest.iter().map(ToString::to_string).collect();
                self.later.push(thread::spawn(move || {
                    let words: Vec<_> = words.iter().map(String::as_str).collect();
                    touch(&words)
                }));
            }
            ["join"] => return (self.later.remove(0).join().unwrap(), Vec::new()),
            ["truncate", start, pages] => {
                let file = &self.files[&number(start)];
                ftruncate(file, length(pages) as u64).unwrap();
            }
            ["serve", start, pages, gpa, image] => {
                self.serve(
                    number(start),
                    length(pages),
                    number(gpa),
                    image,
                    descriptors,
                );
            }
            _ => return (touch(words), Vec::new()),
        }
        ("ok".into(), Vec::new())
    }

    fn map(&mut self, bytes: usize, is_file: bool) -> (String, Vec<OwnedFd>) {
        let null = std::ptr::null_mut();
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let file = is_file.then(|| memfd_create("child", MemfdFlags::CLOEXEC).unwrap());
        let start = match &file {
            Some(file) => {
                ftruncate(file, bytes as u64).unwrap();
                // SAFETY: null without MAP_FIXED replaces nothing.
                unsafe { rustix::mm::mmap(null, bytes, access, MapFlags::SHARED, file, 0) }
            }
            // SAFETY: as above.
            None => unsafe { rustix::mm::mmap_anonymous(null, bytes, access, MapFlags::PRIVATE) },
        };
        let start = start.unwrap();
        // SAFETY: the range was just mapped.
        unsafe { rustix::mm::madvise(start, bytes, Advice::LinuxNoHugepage) }.unwrap();
        let address = start.expose_provenance() as u64;
        let range = UserRange {
            start: address,
            bytes: bytes as u64,
        };
        let mode = if is_file { Mode::Minor } else { Mode::Missing };
        // SAFETY: no code relies on its zeroes, and unmapped memory is not used any more.
        unsafe { self.uffd.as_ref().unwrap().register(range, mode) }.unwrap();
        let handed = file.as_ref().map(|file| file.try_clone().unwrap());
        if let Some(file) = file {
            self.files.insert(address, file);
        }
        (address.to_string(), handed.into_iter().collect())
    }

    /// Pages the memory of a third process, as the successor of another pager.
    fn serve(
        &mut self,
        start: u64,
        bytes: usize,
        gpa: u64,
        image: &str,
        mut descriptors: Vec<OwnedFd>,
    ) {
        let bytes_of = |at: usize| u8::from_str_radix(&image[at..at + 2], 16).unwrap();
        let image: Vec<u8> = (0..image.len()).step_by(2).map(bytes_of).collect();
        let image = PageMapImage::decode(&image).unwrap();
        let uffd = Userfaultfd::adopt(descriptors.remove(0), Features::POISON).unwrap();
        let start = HostAddress(usize::try_from(start).unwrap());
        let range = HostRange::new(start, bytes).unwrap();
        let pager = Pager::new().unwrap();
        let size = PageSize::Size4K;
        let config = RegionConfig::foreign(&Arc::new(uffd), range, size, Mode::Missing, pattern())
            .gpa(GuestAddress(gpa))
            .resume_from(image);
        pager.add(config).unwrap();
        let readers = Readers::spawn(&pager, ReaderConfig::new(1)).unwrap();
        self.serving = Some((pager, readers));
    }
}

/// The commands that any thread of the child can execute.
fn touch(words: &[&str]) -> String {
    match *words {
        ["check", start, pages, gpa] => {
            for page in 0..number(pages) {
                let seen = read(number(start) + page * PAGE);
                let mut wanted = vec![0; seen.len()];
                fill(GuestAddress(number(gpa) + page * PAGE), &mut wanted);
                if seen != wanted {
                    let is_zero = seen.iter().all(|&byte| byte == 0);
                    return format!("page {page} is wrong, zero: {is_zero}");
                }
            }
            return "right".into();
        }
        ["zero", start, pages] => {
            for page in 0..number(pages) {
                if read(number(start) + page * PAGE)
                    .iter()
                    .any(|&byte| byte != 0)
                {
                    return format!("page {page} is not zero");
                }
            }
            return "right".into();
        }
        ["populate", start, pages] => {
            // SAFETY: populating changes no content.
            let populated = unsafe {
                rustix::mm::madvise(
                    pointer(number(start)),
                    length(pages),
                    Advice::LinuxPopulateRead,
                )
            };
            return format!("{populated:?}");
        }
        ["dontneed", start, pages] => advise(start, pages, Advice::LinuxDontNeed),
        ["remove", start, pages] => advise(start, pages, Advice::LinuxRemove),
        ["munmap", start, pages] => {
            // SAFETY: no thread uses the range any more.
            unsafe { rustix::mm::munmap(pointer(number(start)), length(pages)) }.unwrap();
        }
        ["mremap", start, pages] => {
            // To an address with room: between two existing mappings.
            let (from, bytes) = (pointer(number(start)), length(pages));
            // SAFETY: null without MAP_FIXED replaces nothing.
            let room = unsafe {
                rustix::mm::mmap_anonymous(
                    std::ptr::null_mut(),
                    bytes,
                    ProtFlags::empty(),
                    MapFlags::PRIVATE,
                )
            }
            .unwrap();
            // SAFETY: the replaced range was just mapped, and no thread uses the previous address any
            // more.
            let to =
                unsafe { rustix::mm::mremap_fixed(from, bytes, bytes, MremapFlags::MAYMOVE, room) }
                    .unwrap();
            return (to.expose_provenance() as u64).to_string();
        }
        ["fork"] => {
            // SAFETY: the child calls nothing but _exit.
            let forked = unsafe { libc::fork() };
            if forked == 0 {
                // SAFETY: the call has no requirements.
                unsafe { libc::_exit(0) };
            }
            let mut status = 0;
            // SAFETY: the status is written to a local variable.
            let waited = unsafe { libc::waitpid(forked, &raw mut status, 0) };
            assert_eq!((waited, status), (forked, 0));
        }
        _ => return format!("what is {words:?}?"),
    }
    "ok".into()
}

fn advise(start: &str, pages: &str, advice: Advice) {
    // SAFETY: the range is the test's, and its content is discarded on purpose.
    unsafe { rustix::mm::madvise(pointer(number(start)), length(pages), advice) }.unwrap();
}

fn read(address: u64) -> Vec<u8> {
    let words = (0..PAGE / 8).flat_map(|word| {
        let at = pointer(address + 8 * word).cast::<u64>();
        // SAFETY: aligned, and within memory that this process has mapped.
        unsafe { at.read_volatile() }.to_ne_bytes()
    });
    words.collect()
}
