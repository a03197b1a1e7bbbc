//! A VMM's process: memory, threads that use it and check what they read, and its end.

use std::io::{ErrorKind, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use pagetide_serve::native::client::{Client, ClientError};
use pagetide_serve::native::message::{Attach, RefusedCode, Region, WorkingSetAction};
use pagetide_test_support::{PATIENCE, Rng, eventually};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use crate::memory::{Memory, Stamp, Wrong};
use crate::place::PAGE;

pub const PLAN: &str = "PAGETIDE_STRESS_VMM";
pub const SOCKET: &str = "PAGETIDE_STRESS_SOCKET";

/// Exit statuses: wrong content, an access that does not end, no such memory, a test that has ended.
const WRONG: i32 = 3;
const STUCK: i32 = 4;
pub const NO_MEMORY: i32 = 7;
const ORPHANED: i32 = 8;

/// Threads that use the memory.
const THREADS: usize = 2;

/// Servers that may be killed before they have read a VMM's message.
const MOST_ATTEMPTS: u64 = 50;

/// A VMM's memory and protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Anonymous, 4K pages.
    Small,
    /// Anonymous, where the kernel may use huge pages.
    Transparent,
    /// hugetlb, 2M pages.
    Huge,
    /// Anonymous, by the native protocol.
    Native,
    /// A memfd, by the native protocol in MINOR mode.
    Minor,
}

impl Kind {
    pub const ALL: [Self; 5] = [
        Self::Small,
        Self::Transparent,
        Self::Huge,
        Self::Native,
        Self::Minor,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::Small => "4K",
            Self::Transparent => "THP",
            Self::Huge => "2M",
            Self::Native => "native",
            Self::Minor => "MINOR",
        }
    }

    /// The size of what is discarded as a whole.
    pub fn page_bytes(self) -> usize {
        match self {
            Self::Huge => 2 << 20,
            _ => PAGE,
        }
    }

    pub fn is_native(self) -> bool {
        matches!(self, Self::Native | Self::Minor)
    }
}

/// What a VMM is to do.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub kind: Kind,
    pub pages: usize,
    pub seed: u64,
    pub millis: u64,
}

impl Plan {
    pub fn text(&self) -> String {
        let kind = self.kind.name();
        format!("{kind} {} {} {}", self.pages, self.seed, self.millis)
    }

    fn parse(text: &str) -> Self {
        let words: Vec<&str> = text.split(' ').collect();
        let [kind, pages, seed, millis] = words[..] else {
            panic!("{text}");
        };
        let kind = Kind::ALL.into_iter().find(|k| k.name() == kind).unwrap();
        Self {
            kind,
            pages: pages.parse().unwrap(),
            seed: seed.parse().unwrap(),
            millis: millis.parse().unwrap(),
        }
    }
}

/// What a thread does now.
#[derive(Default)]
struct Doing {
    /// Milliseconds since the process began, plus one; 0 between accesses.
    since: AtomicU64,
    what: AtomicU64,
    page: AtomicU64,
}

const WORDS: [&str; 5] = ["read", "write", "discard", "hole", "first read"];

#[derive(Clone, Copy)]
enum Access {
    Read,
    Write,
    Discard,
    Hole,
    First,
}

struct World {
    begun: Instant,
    kind: Kind,
    /// The last is the main thread's.
    doing: [Doing; THREADS + 1],
    counts: [AtomicU64; WORDS.len()],
    hand_overs: AtomicU64,
    drains: AtomicU64,
    refused_drains: AtomicU64,
    working_sets: AtomicU64,
    healths: AtomicU64,
    attempts: AtomicU64,
}

impl World {
    /// Performs an access under the watchdog.
    fn watched<T>(
        &self,
        thread: usize,
        access: Access,
        page: usize,
        work: impl FnOnce() -> T,
    ) -> T {
        let doing = &self.doing[thread];
        let now = u64::try_from(self.begun.elapsed().as_millis()).unwrap();
        doing.what.store(access as u64, Ordering::Relaxed);
        doing.page.store(page as u64, Ordering::Relaxed);
        doing.since.store(now + 1, Ordering::Release);
        let result = work();
        doing.since.store(0, Ordering::Release);
        self.counts[access as usize].fetch_add(1, Ordering::Relaxed);
        result
    }

    /// Ends the process if an access does not end: a wake-up was lost.
    fn guard(&self, memory: impl Fn(u64) -> String) {
        loop {
            // The time between two looks.
            thread::sleep(Duration::from_millis(200));
            let now = u64::try_from(self.begun.elapsed().as_millis()).unwrap();
            for doing in &self.doing {
                let since = doing.since.load(Ordering::Acquire);
                let waited = Duration::from_millis(now.saturating_sub(since));
                if since > 0 && waited > PATIENCE {
                    let page = doing.page.load(Ordering::Relaxed);
                    let what = WORDS[usize::try_from(doing.what.load(Ordering::Relaxed)).unwrap()];
                    let (kind, about) = (self.kind.name(), memory(page));
                    eprintln!(
                        "a {what} of page {page} of {kind} memory waits for {waited:?}: {about}"
                    );
                    std::process::exit(STUCK);
                }
            }
        }
    }

    fn wrong(&self, wrong: &Wrong) -> ! {
        eprintln!("wrong content in {} memory: {wrong}", self.kind.name());
        std::process::exit(WRONG);
    }

    fn access_of_discard(&self) -> Access {
        match self.kind {
            Kind::Minor => Access::Hole,
            _ => Access::Discard,
        }
    }
}

/// The VMM's process; returns at once in the test itself.
pub fn run() {
    let (Ok(plan), Some(socket)) = (std::env::var(PLAN), std::env::var_os(SOCKET)) else {
        return;
    };
    // The test holds the other end.
    thread::spawn(|| {
        let _ = std::io::stdin().lines().count();
        std::process::exit(ORPHANED);
    });
    let (plan, socket) = (Plan::parse(&plan), PathBuf::from(socket));
    let world = Arc::new(World {
        begun: Instant::now(),
        kind: plan.kind,
        doing: Default::default(),
        counts: Default::default(),
        hand_overs: AtomicU64::new(0),
        drains: AtomicU64::new(0),
        refused_drains: AtomicU64::new(0),
        working_sets: AtomicU64::new(0),
        healths: AtomicU64::new(0),
        attempts: AtomicU64::new(0),
    });
    {
        let world = Arc::clone(&world);
        thread::spawn(move || world.guard(|page| format!("page {page} of the plan {plan:?}")));
    }
    let (memory, mut link) = begin(&world, plan, &socket);
    let end = world.begun + Duration::from_millis(plan.millis);
    let memory = &*memory;
    thread::scope(|scope| {
        for index in 0..THREADS {
            let world = &world;
            scope.spawn(move || {
                use_memory(world, memory, Rng::new(plan.seed, index as u64), index, end);
            });
        }
        if let Link::Native(client) = &mut link {
            control(&world, memory, client, &socket, plan, end);
        }
    });
    for page in (0..memory.pages()).filter(|page| owner(page / memory.unit_pages()).is_none()) {
        let checked = world.watched(THREADS, Access::Read, page, || memory.check(page));
        checked.unwrap_or_else(|wrong| world.wrong(&wrong));
    }
    let count = |access: Access| world.counts[access as usize].load(Ordering::Relaxed);
    println!(
        "\ndone {} reads, {} writes, {} discards, {} holes, {} hand-overs by clients, {} drains, {} refused drains, \
         {} requests about working sets, {} health requests, {} other attempts",
        count(Access::Read),
        count(Access::Write),
        count(Access::Discard),
        count(Access::Hole),
        world.hand_overs.load(Ordering::Relaxed),
        world.drains.load(Ordering::Relaxed),
        world.refused_drains.load(Ordering::Relaxed),
        world.working_sets.load(Ordering::Relaxed),
        world.healths.load(Ordering::Relaxed),
        world.attempts.load(Ordering::Relaxed),
    );
    std::process::exit(0);
}

/// What keeps a VM alive.
enum Link {
    Firecracker(#[allow(dead_code, reason = "it stays open")] UnixStream),
    Native(Client),
}

fn new_memory(plan: Plan) -> Arc<Memory> {
    let Some(memory) = Memory::new(plan.kind, plan.pages) else {
        std::process::exit(NO_MEMORY);
    };
    Arc::new(memory)
}

/// Connects. A server that is killed before it has read the message leaves nothing to its successor, and
/// the VMM learns that by the end of its connection.
fn begin(world: &Arc<World>, plan: Plan, socket: &Path) -> (Arc<Memory>, Link) {
    if plan.kind.is_native() {
        let memory = new_memory(plan);
        let mut client = connected(socket);
        attach(&mut client, &memory).unwrap();
        return (memory, Link::Native(client));
    }
    loop {
        let memory = new_memory(plan);
        let stream = stream(socket);
        if send(&stream, memory.message().as_bytes(), &[memory.uffd.as_fd()]).is_ok() {
            let first = {
                let (world, memory) = (Arc::clone(world), Arc::clone(&memory));
                thread::spawn(move || world.watched(0, Access::First, 0, || memory.check(0)))
            };
            // The time between two looks.
            stream
                .set_read_timeout(Some(Duration::from_millis(20)))
                .unwrap();
            let mut has_ended = false;
            while !first.is_finished() && !has_ended {
                has_ended = match (&stream).read(&mut [0; 8]) {
                    Ok(count) => count == 0,
                    Err(error) => {
                        !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
                    }
                };
            }
            if !has_ended {
                if let Err(wrong) = first.join().unwrap() {
                    world.wrong(&wrong);
                }
                return (memory, Link::Firecracker(stream));
            }
        }
        // The thread that waits for page 0 of this memory waits for ever, as long as the process has the
        // userfaultfd. The watchdog is not to see it.
        std::mem::forget(memory);
        world.doing[0].since.store(0, Ordering::Release);
        let attempts = world.attempts.fetch_add(1, Ordering::Relaxed);
        assert!(attempts < MOST_ATTEMPTS, "no server reads the message");
    }
}

/// A server may be between two lives.
fn stream(socket: &Path) -> UnixStream {
    eventually(&socket.display().to_string(), || {
        UnixStream::connect(socket)
    })
}

fn send(stream: &UnixStream, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> std::io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    assert!(ancillary.push(SendAncillaryMessage::ScmRights(descriptors)));
    let parts = [IoSlice::new(bytes)];
    let sent = sendmsg(stream, &parts, &mut ancillary, SendFlags::NOSIGNAL)?;
    (&*stream).write_all(&bytes[sent..])
}

fn connected(socket: &Path) -> Client {
    let client = Client::connect(socket).unwrap();
    client.set_timeout(Some(PATIENCE)).unwrap();
    client
}

fn attach(client: &mut Client, memory: &Memory) -> Result<(), ClientError> {
    let region = Region::missing(memory.address(), (memory.pages() * PAGE) as u64, 0);
    let mut descriptors = vec![memory.uffd.as_fd()];
    let region = match memory.file() {
        None => region,
        Some(file) => {
            descriptors.push(file);
            region.minor(1, 0)
        }
    };
    let attach = Attach {
        uffd_features: memory.uffd.features().bits(),
        regions: vec![region],
    };
    client.attach(&attach, &descriptors).map(drop)
}

/// What a native client asks for beside its faults.
fn control(
    world: &World,
    memory: &Memory,
    client: &mut Client,
    socket: &Path,
    plan: Plan,
    end: Instant,
) {
    let mut rng = Rng::new(plan.seed, 5);
    let has_store = socket.ends_with("steady-store.sock");
    loop {
        let pause = Duration::from_millis(50 + rng.below(400));
        if Instant::now() + pause >= end {
            return;
        }
        // Its guest uses its memory meanwhile.
        thread::sleep(pause);
        let count = |what: &AtomicU64| what.fetch_add(1, Ordering::Relaxed);
        match rng.below(6) {
            0 => match client.drain(|_, _| {}) {
                Ok(drained) => {
                    assert_eq!((drained.present, drained.lost), (memory.pages() as u64, 0));
                    count(&world.drains);
                }
                // The store has failed as often as it was asked.
                Err(ClientError::Refused {
                    code: RefusedCode::NoContent,
                    ..
                }) if has_store => {
                    count(&world.refused_drains);
                }
                Err(error) => panic!("{error:?}"),
            },
            1 => {
                count(&world.working_sets);
                let action = rng.pick(WorkingSetAction::ALL);
                // There may be no file, or the same request may be running.
                match client.working_set(action) {
                    Ok(_) | Err(ClientError::Refused { .. }) => {}
                    Err(error) => panic!("{action:?}: {error:?}"),
                }
            }
            2 => {
                assert_eq!(client.health().unwrap().pages, memory.pages() as u64);
                count(&world.healths);
            }
            _ => {
                let mut successor = connected(socket);
                let parts = match client.hand_over() {
                    Ok(parts) => parts,
                    // A working set is still being read.
                    Err(ClientError::Refused { .. }) => continue,
                    Err(error) => panic!("{error:?}"),
                };
                successor.resume_from(&parts).unwrap();
                attach(&mut successor, memory).unwrap();
                std::mem::replace(client, successor).goodbye().unwrap();
                count(&world.hand_overs);
            }
        }
    }
}

/// The thread that has a unit for itself, and may write to it; `None` if all threads share the unit.
fn owner(unit: usize) -> Option<usize> {
    (unit % 4 == 3).then_some(unit / 4 % THREADS)
}

/// Uses memory until `end`, and then checks all that this thread has for itself.
fn use_memory(world: &World, memory: &Memory, mut rng: Rng, thread: usize, end: Instant) {
    let unit_pages = memory.unit_pages();
    let own: Vec<usize> = (0..memory.units())
        .filter(|unit| owner(*unit) == Some(thread))
        .collect();
    let mut stamps = vec![Stamp::Image; memory.pages()];
    let right = |checked: Result<(), Wrong>| {
        checked.unwrap_or_else(|wrong| world.wrong(&wrong));
    };
    let any = |rng: &mut Rng, count: usize| usize::try_from(rng.below(count as u64)).unwrap();
    while Instant::now() < end {
        match rng.below(100) {
            0..8 if !own.is_empty() => {
                let unit = own[any(&mut rng, own.len())];
                let page = unit * unit_pages + any(&mut rng, unit_pages);
                let stamp = rng.next() | 1;
                world.watched(thread, Access::Write, page, || memory.write(page, stamp));
                stamps[page] = Stamp::Written(stamp);
            }
            8..14 if !own.is_empty() => {
                let unit = own[any(&mut rng, own.len())];
                let first = unit * unit_pages;
                let access = world.access_of_discard();
                world.watched(thread, access, first, || memory.discard(unit));
                stamps[first..first + unit_pages].fill(Stamp::Zero);
            }
            14..20 => {
                let unit = any(&mut rng, memory.units());
                if owner(unit).is_none() {
                    let access = world.access_of_discard();
                    let first = unit * unit_pages;
                    world.watched(thread, access, first, || memory.discard_shared(unit));
                }
            }
            // A guest does other things, too.
            20..24 => thread::sleep(Duration::from_micros(rng.below(2000))),
            _ => {
                // Some pages in order, or one.
                let first = any(&mut rng, memory.pages());
                let count = if rng.one_in(16) { 32 } else { 1 };
                let end = (first + count).min(memory.pages());
                for (page, &stamp) in (first..).zip(&stamps[first..end]) {
                    let checked = match owner(page / unit_pages) {
                        None => world.watched(thread, Access::Read, page, || memory.check(page)),
                        Some(owner) if owner == thread => {
                            world.watched(thread, Access::Read, page, || {
                                memory.check_stamp(page, stamp)
                            })
                        }
                        Some(_) => Ok(()),
                    };
                    right(checked);
                }
            }
        }
    }
    for unit in own {
        let first = unit * unit_pages;
        for (page, stamp) in (first..).zip(&stamps[first..first + unit_pages]) {
            let read = || memory.check_stamp(page, *stamp);
            right(world.watched(thread, Access::Read, page, read));
        }
    }
}
