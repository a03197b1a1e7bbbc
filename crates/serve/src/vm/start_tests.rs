//! The beginning of a VM: one that a former server has left, and a new one.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use pagetide_memory::{HostAddress, HostRange, MapFile};
use pagetide_pager::{Content, Mode, Serving};
use pagetide_sources::{Location, OpenOptions, open};
use pagetide_test_support::eventually;
use pagetide_uapi::userfaultfd::{Event, EventBuffer, Features, OpenError, UserRange, Userfaultfd};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous};

use super::*;
use crate::budgets::Charge;
use crate::connection::Connection;
use crate::metrics::Metrics;
use crate::options::Options;
use crate::parking::Parking;
use crate::peer::Peer;
use crate::state::{State, map_file};
use crate::stopper::Stopper;
use crate::vm::End;

/// Marking so many pages takes longer than it takes prefetch to ask for some of them.
const PAGES: usize = 1 << 23;
const PAGE: usize = 4096;

/// Memory of a guest that is registered with a userfaultfd. It stays mapped until the process ends.
fn registered() -> Option<(Arc<Userfaultfd>, UserRange)> {
    let uffd = match Userfaultfd::open(Features::EVENT_REMOVE) {
        Ok(uffd) => Arc::new(uffd),
        Err(error @ (OpenError::NotSupported | OpenError::NoPermission { .. })) => {
            println!("SKIP: {error}");
            return None;
        }
        Err(error) => panic!("{error}"),
    };
    let (access, flags) = (
        ProtFlags::READ | ProtFlags::WRITE,
        MapFlags::PRIVATE | MapFlags::NORESERVE,
    );
    // SAFETY: mmap without MAP_FIXED replaces no other mapping.
    let start = unsafe { mmap_anonymous(std::ptr::null_mut(), PAGES * PAGE, access, flags) };
    let range = UserRange {
        start: start.unwrap() as u64,
        bytes: (PAGES * PAGE) as u64,
    };
    // SAFETY: the memory is new, stays mapped, and no code relies on its zeroes.
    unsafe { uffd.register(range, Mode::Missing) }.unwrap();
    Some((uffd, range))
}

/// The number of its pages that are mapped.
fn resident(range: UserRange) -> usize {
    use std::os::unix::fs::FileExt;
    let map = fs_err::File::open("/proc/self/pagemap").unwrap();
    let mut entries = vec![0; PAGES * 8];
    let at = range.start / PAGE as u64 * 8;
    map.file().read_exact_at(&mut entries, at).unwrap();
    let is_there = |entry: &&[u8]| entry[7] & 0x80 != 0;
    entries.chunks(8).filter(is_there).count()
}

/// A source that sees whether what a predecessor has read was applied before it is asked.
struct Watching {
    maps: Arc<MapFile>,
    is_early: Arc<AtomicBool>,
}

impl Source for Watching {
    fn submit(&self, request: Request) {
        let mut first = [0; 8];
        rustix::io::pread(&self.maps, &mut first, 0).unwrap();
        if first != [0; 8] {
            self.is_early.store(true, Ordering::Release);
        }
        request.complete(Content::Zero);
    }
}

/// What a server has, with a source in place of the image's.
fn common(path: PathBuf, source: Arc<dyn Source>, prefetch: bool) -> (Common, Arc<ServedImage>) {
    let options = Options {
        prefetch,
        working_set: WorkingSetMode::Off,
        ..Options::default()
    };
    let location = Location::Path(path);
    let metrics = Metrics::default();
    let image = open(&location, &OpenOptions::default()).unwrap();
    let image = ServedImage::alone(image, &location, &options);
    image.read_by(source);
    let stopper = Stopper::new(Options::default().stop_limit).unwrap();
    let left = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
    let parking = Parking::new(stopper.clone(), Arc::new(left)).unwrap();
    let common = Common {
        usage: Arc::default(),
        options: Arc::new(options),
        metrics,
        stopper,
        state: None,
        parking: Arc::new(parking),
        porter: None,
    };
    (common, Arc::new(image))
}

fn attached(uffd: Arc<Userfaultfd>, range: UserRange) -> AttachedRegion {
    let start = HostAddress(usize::try_from(range.start).unwrap());
    AttachedRegion {
        region: VmRegion {
            range: HostRange::new(start, PAGES * PAGE).unwrap(),
            offset: 0,
            page_size: PageSize::Size4K,
        },
        memory: Memory::Missing,
        uffd,
        maps: Vec::new(),
    }
}

/// A predecessor has read that the guest discarded its memory, and was killed before it marked the pages. The
/// guest went on then, so that nothing else says so.
#[test]
fn what_a_predecessor_has_read_is_applied_before_anything_is_fetched() {
    let Some((uffd, range)) = registered() else {
        return;
    };
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("guest.mem");
    let file = fs_err::File::create(&path).unwrap();
    file.set_len((PAGES * PAGE) as u64).unwrap();
    let maps = map_file(((PAGES / PAGE + 4) * PAGE) as u64).unwrap();

    // SAFETY: nothing else uses the file now.
    let mut journal = unsafe { EventBuffer::in_file(maps.as_fd(), 0) }.unwrap();
    let balloon = thread::spawn(move || {
        let start = std::ptr::with_exposed_provenance_mut(usize::try_from(range.start).unwrap());
        // SAFETY: the pages are those of `registered`, whose content nobody relies on.
        unsafe { madvise(start, PAGES * PAGE, Advice::LinuxDontNeed) }.unwrap();
    });
    let mut polled = [PollFd::new(&uffd, PollFlags::IN)];
    assert_eq!(poll(&mut polled, None).unwrap(), 1);
    let events: Vec<_> = uffd.read_events(&mut journal).unwrap().collect();
    assert!(matches!(events[..], [Event::Remove { .. }]), "{events:?}");
    balloon.join().unwrap();
    // Not cleared, as after a kill.
    drop(journal);

    let is_early = Arc::new(AtomicBool::new(false));
    let source = Arc::new(Watching {
        maps: Arc::clone(&maps),
        is_early: Arc::clone(&is_early),
    });
    let (common, image) = common(path, source, true);
    let (client, _other) = client();
    let attached = attached(uffd, range);
    let start = Start {
        is_running: true,
        keeping: Some(Keeping {
            state: Arc::new(State::unattended()),
            id: 1,
            maps,
            is_handed_over: false,
        }),
        ..Start::default()
    };
    let mut vm = Vm::new(&common, &image, &client, vec![attached], start).unwrap();
    let ended = vm.prefetch.take().unwrap().finish().unwrap();
    assert!(ended.is_complete);
    assert!(!is_early.load(Ordering::Acquire), "fetched before");
    assert_eq!(resident(range), 0, "discarded pages have content");
    let _ = vm.end(End::Gone).unwrap();
}

/// A client that has only connected, and its other end.
fn client() -> (Client, UnixStream) {
    let (stream, other) = UnixStream::pair().unwrap();
    let client = Client {
        number: 1,
        socket: String::new(),
        peer: Peer::of(&stream).unwrap(),
        stream: Connection::new(stream, None),
        charge: Charge::alone(),
        kept: None,
    };
    (client, other)
}

/// Answers at once, as a thread does that reads the image for all its VMs.
struct AtOnce;

impl Source for AtOnce {
    fn submit(&self, request: Request) {
        request.complete(Content::Zero);
    }
}

/// A VM can hold up whoever installs its pages.
#[test]
fn what_the_images_threads_have_read_is_installed_by_the_vms_own() {
    let Some((uffd, range)) = registered() else {
        return;
    };
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("guest.mem");
    let file = fs_err::File::create(&path).unwrap();
    file.set_len((PAGES * PAGE) as u64).unwrap();
    let (common, image) = common(path, Arc::new(AtOnce), false);
    let (client, _other) = client();
    let attached = vec![attached(uffd, range)];
    let mut vm = Vm::new(&common, &image, &client, attached, Start::default()).unwrap();
    let at = usize::try_from(range.start).unwrap() + 5 * PAGE;
    let guest = thread::spawn(move || {
        // SAFETY: the memory stays mapped, and nothing else accesses it.
        unsafe { std::ptr::with_exposed_provenance::<u8>(at).read_volatile() }
    });
    let mut serving = Serving::new(&vm.pager, 1);
    eventually("the read", || {
        serving.process_ready().unwrap();
        guest.is_finished()
    });
    assert_eq!(guest.join().unwrap(), 0);
    let counted = vm.pager.counted();
    assert_eq!((counted.handed_over, counted.answers), (1, 1));
    let _ = vm.end(End::Gone).unwrap();
}
