//! Common code of the server's tests: a server in this process, and guests that touch their memory.
#![allow(
    dead_code,
    unreachable_pub,
    reason = "each test binary uses a part of this"
)]
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test helper that fails is a test that fails"
)]

pub mod child;
pub mod native;
pub mod process;

use std::ffi::OsString;
use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Once, mpsc};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use pagetide_serve::{
    Binding, Controller, Inherited, Metrics, Options, Seccomp, SeccompMode, Server, StartError,
    Stopper, Totals,
};
use pagetide_sources::image::{CreateOptions, create};
#[allow(unused_imports, reason = "each test binary uses a part of this")]
pub use pagetide_test_support::{
    PATIENCE, Sleeper, Task, equals, eventually, unread_by_peer, within_patience,
};
use pagetide_uapi::userfaultfd::{Features, Mode, OpenError, UserRange, Userfaultfd};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use tempfile::TempDir;

pub const PAGE: usize = 4096;

/// A limit of the server that no test is to reach.
pub const NEVER: Duration = Duration::from_secs(24 * 3600);

/// The features of the userfaultfd of memory with a file.
pub const FILE_FEATURES: Features = Features::from_bits(
    Features::EVENT_REMOVE.bits() | Features::MINOR_SHMEM.bits() | Features::MISSING_SHMEM.bits(),
);

/// Whether userfaultfd is usable here; prints the reason if not.
pub fn has_userfaultfd() -> bool {
    match Userfaultfd::available() {
        Ok(_) => true,
        Err(error @ (OpenError::NotSupported | OpenError::NoPermission { .. })) => {
            println!("SKIP: {error}");
            false
        }
        Err(error) => panic!("{error}"),
    }
}

/// Whether missing pages can be marked, so that an access to them is SIGBUS when no server is left (Linux 6.6).
pub fn has_poison() -> bool {
    Userfaultfd::available().unwrap().contains(Features::POISON)
}

/// The porter's process, when a server has started it.
#[test]
fn receives_descriptors() {
    if std::env::args_os().eq(porter()) {
        pagetide_serve::receive_descriptors().unwrap();
        std::process::exit(0);
    }
}

/// The command of a porter: this test binary, started again.
pub fn porter() -> Vec<OsString> {
    let program = std::env::current_exe().unwrap();
    let this = concat!(module_path!(), "::receives_descriptors");
    // Without the name of the crate.
    let (_, test) = this.split_once("::").unwrap();
    vec![program.into(), "--exact".into(), test.into()]
}

/// The content of page `page` of an image.
pub fn content(page: usize) -> Vec<u8> {
    let word = |index: usize| (page * 1_000_003 + index * 7 + 1).to_le_bytes();
    (0..PAGE / 8).flat_map(word).collect()
}

/// A directory with an image of `pages` pages.
pub struct Place {
    pub directory: TempDir,
}

impl Place {
    pub fn new(pages: usize) -> Self {
        let place = Self {
            directory: tempfile::tempdir().unwrap(),
        };
        let bytes: Vec<u8> = (0..pages).flat_map(content).collect();
        std::fs::write(place.image(), bytes).unwrap();
        place
    }

    pub fn image(&self) -> PathBuf {
        self.directory.path().join("guest.mem")
    }

    /// Cuts the image after so many pages.
    pub fn cut(&self, pages: u64) -> Cut {
        let bytes = std::fs::read(self.image()).unwrap();
        let image = std::fs::File::options().write(true).open(self.image());
        let image = image.unwrap();
        let modified = image.metadata().unwrap().modified().unwrap();
        image.set_len(pages * PAGE as u64).unwrap();
        Cut {
            image,
            bytes,
            modified,
        }
    }

    /// Options with an image in chunks of a page, of which `page` is damaged, and what mends it. Unlike raw memory it may
    /// be written to while it is served.
    pub fn damaged(&self, page: usize) -> (Options, Damage) {
        let path = self.directory.path().join("image");
        let chunks_of_a_page = CreateOptions {
            chunk_bytes: 4096,
            ..CreateOptions::default()
        };
        create(
            &self.image(),
            &path.clone().into(),
            &chunks_of_a_page,
            &mut |_, _| {},
        )
        .unwrap();
        let bytes = std::fs::read(&path).unwrap();
        // The records of the stored chunks, all of which are different, end the file; each begins with its offset.
        let pages = usize::try_from(std::fs::metadata(self.image()).unwrap().len()).unwrap() / PAGE;
        let record = bytes.len() - (pages - page) * 48;
        let offset = u64::from_le_bytes(bytes[record..record + 8].try_into().unwrap());
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        let damage = Damage {
            file,
            offset,
            byte: bytes[usize::try_from(offset).unwrap()],
        };
        damage.write(!damage.byte);
        let mut options = self.options();
        options.bindings[0].image = pagetide_sources::Location::Path(path);
        (options, damage)
    }

    pub fn socket(&self) -> PathBuf {
        self.directory.path().join("guest.sock")
    }

    pub fn working_set(&self) -> PathBuf {
        self.directory.path().join("guest.mem.working-set")
    }

    pub fn options(&self) -> Options {
        Options {
            bindings: vec![Binding::new(
                self.socket(),
                pagetide_sources::Location::Path(self.image()),
            )],
            prefetch: false,
            working_set: pagetide_serve::WorkingSetMode::Off,
            stop_limit: NEVER,
            handshake_limit: NEVER,
            ..Options::default()
        }
    }
}

/// A raw image that was cut.
pub struct Cut {
    image: std::fs::File,
    bytes: Vec<u8>,
    modified: std::time::SystemTime,
}

impl Cut {
    /// Gives it the content and the time of before, as `cp --preserve` does.
    pub fn mend(&self) {
        self.image.write_all_at(&self.bytes, 0).unwrap();
        let times = std::fs::FileTimes::new().set_modified(self.modified);
        self.image.set_times(times).unwrap();
    }
}

/// A damaged chunk of an image.
pub struct Damage {
    file: std::fs::File,
    offset: u64,
    byte: u8,
}

impl Damage {
    fn write(&self, byte: u8) {
        self.file.write_all_at(&[byte], self.offset).unwrap();
    }

    pub fn mend(&self) {
        self.write(self.byte);
    }
}

/// A server in this process. It is stopped when it is dropped.
pub struct Running {
    pub stopper: Stopper,
    pub metrics: Metrics,
    pub controller: Controller,
    thread: Option<JoinHandle<std::io::Result<()>>>,
}

impl Running {
    /// Starts a server whose threads may make the system calls that `pagetide serve` permits.
    pub fn start(options: Options) -> Self {
        Self::try_start(options).unwrap()
    }

    /// The same for one that may not start.
    pub fn try_start(options: Options) -> Result<Self, StartError> {
        Self::with(options, Inherited::default())
    }

    /// The same with what a service manager gives to it.
    pub fn with(options: Options, inherited: Inherited) -> Result<Self, StartError> {
        print_failures_at_once();
        let (send, started) = mpsc::channel();
        let thread = thread::spawn(move || {
            // With a state's directory it starts a process, as it does before `pagetide serve` filters.
            if options.state.is_none() {
                confine_thread(options.bindings.iter().any(is_url));
            }
            match Server::bind_with(options, inherited) {
                Ok(server) => {
                    let handles = (server.stopper(), server.metrics(), server.controller());
                    send.send(Ok(handles)).unwrap();
                    server.run()
                }
                Err(error) => {
                    send.send(Err(error)).unwrap();
                    Ok(())
                }
            }
        });
        let (stopper, metrics, controller) = started
            .recv()
            .expect("the server starts, or says why not")?;
        Ok(Self {
            stopper,
            metrics,
            controller,
            thread: Some(thread),
        })
    }

    /// Waits until the server ends by itself.
    pub fn wait(mut self) {
        let thread = self.thread.take().unwrap();
        within_patience("the server's end", move || thread.join().unwrap().unwrap());
    }

    pub fn stop(self) {
        self.stopper.stop();
        self.wait();
    }

    /// Connects to a server of one VM at a time ([`Options::max_vms`]) until it accepts: then the last VM has ended.
    /// Returns how often it did not. Nobody else connects.
    pub fn connect_next(&self, connect: impl Fn() -> UnixStream) -> (UnixStream, u64) {
        let answered = |totals: Totals| totals.vms_accepted + totals.vms_refused;
        let mut turned_away = 0;
        let stream = eventually("the last VM's end", || {
            let before = self.metrics.totals();
            let stream = connect();
            eventually("an answer", || {
                answered(self.metrics.totals()) > answered(before)
            });
            let is_accepted = self.metrics.totals().vms_accepted > before.vms_accepted;
            turned_away += u64::from(!is_accepted);
            is_accepted.then_some(stream)
        });
        (stream, turned_away)
    }

    /// Waits until so many VMs have ended, and returns the counts, which have all of these VMs.
    pub fn ended(&self, vms: u64) -> Totals {
        eventually("the VMs' end", || {
            let totals = self.metrics.totals();
            match totals.vms_ended == vms && totals.vms == 0 {
                true => Ok(totals),
                false => Err(format!("{totals:?}")),
            }
        })
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            self.stopper.stop();
            self.stopper.stop();
            let _ = thread.join();
        }
    }
}

/// After a failure the server poisons what is missing, and a thread of the test that waits there gets SIGBUS: the
/// process ends before the test harness prints what it has kept.
fn print_failures_at_once() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            let _ = writeln!(std::io::stderr(), "{panic}");
            before(panic);
        }));
    });
}

fn is_url(binding: &Binding) -> bool {
    matches!(binding.image, pagetide_sources::Location::Url(_))
}

/// A kernel may have no seccomp.
fn confine_thread(network: bool) {
    if let Err(error) = Seccomp::new(SeccompMode::On, network).confine_thread() {
        println!("the server's system calls are not filtered: {error}");
    }
}

/// The same for a server in a process of its own.
pub fn confine_process(server: &Server) {
    let seccomp = Seccomp::new(SeccompMode::On, server.uses_network());
    if let Err(error) = seccomp.confine_process() {
        println!("the server's system calls are not filtered: {error}");
    }
}

/// Memory of a guest, registered with a userfaultfd, as a VMM has it.
///
/// It stays mapped when the guest is dropped: the server may still be poisoning what is missing, and the
/// kernel lets one userfaultfd of a process install in memory of another, at addresses that were used again.
pub struct Guest {
    pub uffd: Userfaultfd,
    start: usize,
    bytes: usize,
    page_bytes: usize,
}

impl Guest {
    pub fn new(pages: usize) -> Self {
        Self::with(pages * PAGE, PAGE, MapFlags::PRIVATE, Features::NONE).unwrap()
    }

    /// One whose userfaultfd reports forks: it waits in each until the server has read of it.
    pub fn that_forks(pages: usize) -> Self {
        let forks = Features::EVENT_FORK;
        Self::with(pages * PAGE, PAGE, MapFlags::PRIVATE, forks).unwrap()
    }

    /// Memory of huge pages; `None` if there are none.
    pub fn huge(bytes: usize) -> Option<Self> {
        let flags = MapFlags::PRIVATE | MapFlags::HUGETLB | MapFlags::HUGE_2MB;
        Self::with(bytes, 2 << 20, flags, Features::NONE)
    }

    fn with(bytes: usize, page_bytes: usize, flags: MapFlags, events: Features) -> Option<Self> {
        let null = std::ptr::null_mut();
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: mmap without MAP_FIXED replaces no other mapping.
        let start = match unsafe { mmap_anonymous(null, bytes, prot, flags) } {
            Ok(start) => start as usize,
            Err(error) => {
                println!("SKIP: no memory of pages of {page_bytes} bytes: {error}");
                return None;
            }
        };
        let uffd = Userfaultfd::open(Features::EVENT_REMOVE | events).unwrap();
        let range = UserRange {
            start: start as u64,
            bytes: bytes as u64,
        };
        // SAFETY: the memory is new, belongs to this guest, and stays mapped as long as it; no code
        // relies on its zeroes.
        unsafe { uffd.register(range, Mode::Missing) }.unwrap();
        Some(Self {
            uffd,
            start,
            bytes,
            page_bytes,
        })
    }

    /// Memory of a file from its start on, registered for MISSING and MINOR.
    pub fn of_file(file: BorrowedFd<'_>, pages: usize, flags: MapFlags) -> Self {
        let bytes = pages * PAGE;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: mmap without MAP_FIXED replaces no other mapping.
        let start = unsafe { mmap(std::ptr::null_mut(), bytes, prot, flags, file, 0) }.unwrap();
        let guest = Self {
            uffd: Userfaultfd::open(FILE_FEATURES).unwrap(),
            start: start as usize,
            bytes,
            page_bytes: PAGE,
        };
        // SAFETY: the memory is new, belongs to this guest, and stays mapped; no code relies on zeroes.
        unsafe { guest.uffd.register(guest.range(), Mode::Minor) }.unwrap();
        guest
    }

    fn range(&self) -> UserRange {
        UserRange {
            start: self.start as u64,
            bytes: self.bytes as u64,
        }
    }

    /// Bytes of its memory by a field of `/proc/self/smaps`.
    pub fn smaps(&self, field: &str) -> u64 {
        let text = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut is_ours = false;
        let mut kib = 0;
        for line in text.lines() {
            let first = line.split(' ').next().unwrap();
            if let Some((from, to)) = first.split_once('-')
                && let Ok(from) = usize::from_str_radix(from, 16)
                && let Ok(to) = usize::from_str_radix(to, 16)
            {
                is_ours = from >= self.start && to <= self.start + self.bytes;
            } else if is_ours && first.trim_end_matches(':') == field {
                let value = line.split_whitespace().nth(1).unwrap();
                kib += value.parse::<u64>().unwrap();
            }
        }
        kib * 1024
    }

    pub fn pages(&self) -> usize {
        self.bytes / PAGE
    }

    pub fn address(&self, page: usize) -> usize {
        self.start + page * PAGE
    }

    /// The region object of `count` pages from `first` on, at this page of the image.
    pub fn region(&self, first: usize, count: usize, image_page: usize) -> String {
        format!(
            r#"{{"base_host_virt_addr":{},"size":{},"offset":{},"page_size":{},"page_size_kib":{}}}"#,
            self.address(first),
            count * PAGE,
            image_page * PAGE,
            self.page_bytes,
            self.page_bytes,
        )
    }

    /// Firecracker's message for the whole memory, at the start of the image.
    pub fn message(&self) -> String {
        format!("[{}]", self.region(0, self.pages(), 0))
    }

    /// Connects, and sends the whole message.
    pub fn connect(&self, socket: &Path) -> UnixStream {
        let stream = UnixStream::connect(socket).unwrap();
        send(&stream, self.message().as_bytes(), &[self.uffd.as_fd()]);
        stream
    }

    /// The same at a server that may have closed its end before it is sent.
    pub fn try_to_connect(&self, socket: &Path) -> UnixStream {
        let stream = UnixStream::connect(socket).unwrap();
        let _ = try_to_send(&stream, self.message().as_bytes(), &[self.uffd.as_fd()]);
        stream
    }

    /// Reads a page. Waits as long as the page is missing.
    pub fn read(&self, page: usize) -> Vec<u8> {
        read_at(self.address(page))
    }

    /// Reads a page on a thread, and fails the test if it does not arrive.
    pub fn check(&self, page: usize, wanted: &[u8]) {
        let address = self.address(page);
        let found = within_patience("a page", move || read_at(address));
        assert!(
            found == wanted,
            "page {page} has other content: {:?}",
            &found[..16]
        );
    }

    /// Writes one byte of a page. Waits as long as the page is missing.
    pub fn write(&self, page: usize, value: u8) {
        let at = std::ptr::with_exposed_provenance_mut::<u8>(self.address(page));
        // SAFETY: the page lies in this guest's mapping, which no reference points into.
        unsafe { at.write_volatile(value) };
    }

    /// Reads a page that is missing on a thread, which falls asleep.
    pub fn touch(&self, page: usize) -> Sleeper<Vec<u8>> {
        let address = self.address(page);
        Sleeper::spawn(&format!("the reader of page {page}"), move || {
            read_at(address)
        })
    }

    /// Reads a page that may be there on a thread.
    pub fn begin_to_read(&self, page: usize) -> JoinHandle<Vec<u8>> {
        let address = self.address(page);
        thread::spawn(move || read_at(address))
    }

    /// Has the guest give up a page and touch it: the thread that serves it has done all of its work that came
    /// before. The kernel hands faults out in the order in which they came, and before the events.
    pub fn go_round(&self, page: usize) {
        let start = self.address(page);
        within_patience("a page that was given up", move || {
            discard_at(start, 1);
            assert!(read_at(start) == [0; PAGE], "it has other content");
        });
    }

    /// As a balloon does.
    pub fn discard(&self, first: usize, count: usize) {
        discard_at(self.address(first), count);
    }

    /// The same for memory of a file, which loses the pages.
    pub fn punch(&self, first: usize, count: usize) {
        let start = std::ptr::with_exposed_provenance_mut(self.address(first));
        // SAFETY: as above.
        unsafe { madvise(start, count * PAGE, Advice::LinuxRemove) }.unwrap();
    }

    /// How many of the pages are mapped.
    pub fn resident(&self) -> usize {
        self.residents().len()
    }

    /// The pages that are mapped.
    pub fn residents(&self) -> Vec<usize> {
        let mut map = std::fs::File::open("/proc/self/pagemap").unwrap();
        let mut entries = vec![0; self.pages() * 8];
        std::io::Seek::seek(
            &mut map,
            std::io::SeekFrom::Start((self.start / PAGE * 8) as u64),
        )
        .unwrap();
        map.read_exact(&mut entries).unwrap();
        let is_present = |entry: &[u8]| entry[7] & 0x80 != 0;
        let entries = entries.chunks(8).enumerate();
        let present = entries.filter(|(_, entry)| is_present(entry));
        present.map(|(page, _)| page).collect()
    }
}

fn discard_at(address: usize, count: usize) {
    let start = std::ptr::with_exposed_provenance_mut(address);
    // SAFETY: the pages lie in a guest's mapping, whose content nobody relies on.
    unsafe { madvise(start, count * PAGE, Advice::LinuxDontNeed) }.unwrap();
}

fn read_at(address: usize) -> Vec<u8> {
    let start = std::ptr::with_exposed_provenance::<u64>(address);
    let word = |index| {
        let at = start.wrapping_add(index);
        // SAFETY: the page lies in a guest's mapping, which stays until the process ends.
        unsafe { at.read_volatile() }.to_ne_bytes()
    };
    (0..PAGE / 8).flat_map(word).collect()
}

/// Sends bytes with descriptors.
pub fn send(stream: &UnixStream, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) {
    try_to_send(stream, bytes, descriptors).unwrap();
}

/// The same at a server that may have closed its end.
pub fn try_to_send(
    stream: &UnixStream,
    bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> std::io::Result<()> {
    send_with(stream, bytes, descriptors, SendFlags::empty())
}

/// The same with flags.
pub fn send_with(
    stream: &UnixStream,
    bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
    flags: SendFlags,
) -> std::io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(descriptors)));
    }
    let sent = sendmsg(stream, &[IoSlice::new(bytes)], &mut ancillary, flags)?;
    (&*stream).write_all(&bytes[sent..])
}

/// Waits until the server has closed its end.
pub fn wait_for_end(stream: &UnixStream) {
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut buffer = [0; 16];
    assert_eq!(
        (&*stream).read(&mut buffer).unwrap(),
        0,
        "the server sent something"
    );
}

/// Shares a guest with threads.
pub fn shared(pages: usize) -> Arc<Guest> {
    Arc::new(Guest::new(pages))
}
