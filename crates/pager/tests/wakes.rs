//! Threads that sleep in a userfaultfd while something else happens: a move, a panic, a process that comes to no
//! processor, a fork. Each is woken in the end.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use pagetide_memory::{
    Access, Backing, GuestAddress, HostAddress, HostRange, PageIndex, PageSize, PageState,
};
use pagetide_pager::{
    Contents, Counters, Fault, Filled, Memfd, Mode, Observer, Pager, ReaderConfig, Readers,
    RegionConfig, Serving,
};
use pagetide_test_support::Sleeper;
use pagetide_uapi::userfaultfd::{Features, UserRange, Userfaultfd};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, MremapFlags, ProtFlags, madvise, mmap_anonymous, mremap_fixed};
use support::manual::SubmitFn;
use support::view::{View, memfd};
use support::*;

/// The first word of a page.
fn word_of(page: u64) -> u64 {
    !(GPA.0 + page * PAGE)
}

/// Private memory as another process registers it, in this process. It stays for the life of the test program.
#[derive(Clone, Copy)]
struct Memory {
    start: usize,
    pages: u64,
}

impl Memory {
    fn new(pages: u64) -> Self {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let bytes = usize::try_from(pages * PAGE).unwrap();
        let hint = std::ptr::null_mut();
        // SAFETY: a new mapping at an address that the kernel chooses.
        let start = unsafe { mmap_anonymous(hint, bytes, access, MapFlags::PRIVATE) }.unwrap();
        let start = start.expose_provenance();
        Self { start, pages }
    }

    fn bytes(&self) -> usize {
        usize::try_from(self.pages * PAGE).unwrap()
    }

    fn range(&self) -> HostRange {
        HostRange::new(HostAddress(self.start), self.bytes()).unwrap()
    }

    /// Registers it with a new userfaultfd, and describes it to a pager.
    fn config(&self, features: Features, contents: Contents) -> RegionConfig {
        let uffd = Arc::new(Userfaultfd::open(features | Features::POISON).unwrap());
        // SAFETY: mapped for the life of the process; no code relies on its zeroes.
        unsafe { uffd.register(UserRange::from(self.range()), Mode::Missing) }.unwrap();
        self.described(&uffd, contents)
    }

    fn described(&self, uffd: &Arc<Userfaultfd>, contents: Contents) -> RegionConfig {
        let size = PageSize::Size4K;
        let mode = Mode::Missing;
        RegionConfig::foreign(uffd, self.range(), size, mode, contents).gpa(GPA)
    }

    fn at(&self, page: u64) -> usize {
        self.start + usize::try_from(page * PAGE).unwrap()
    }

    /// The first word of a page, which may fault.
    fn read(&self, page: u64) -> u64 {
        let at = std::ptr::with_exposed_provenance::<u64>(self.at(page));
        // SAFETY: mapped for the life of the process, or the read ends by a signal that fails the test.
        unsafe { at.read_volatile() }
    }

    /// Writes the first word of a page, which may fault.
    fn write(&self, page: u64, value: u64) {
        let at = std::ptr::with_exposed_provenance_mut::<u64>(self.at(page));
        // SAFETY: as above.
        unsafe { at.write_volatile(value) };
    }

    /// Gives pages up. With events, it waits until they were read.
    fn drop_pages(&self, first: u64, count: u64) {
        let at = std::ptr::with_exposed_provenance_mut(self.at(first));
        let bytes = usize::try_from(count * PAGE).unwrap();
        // SAFETY: the test's own memory, whose content it drops on purpose.
        unsafe { madvise(at, bytes, Advice::LinuxDontNeed) }.unwrap();
    }

    /// Moves all of it to other memory of the same size.
    fn move_to(&self, to: &Self, flags: MremapFlags) {
        let pointer = |memory: &Self| std::ptr::with_exposed_provenance_mut(memory.start);
        let bytes = self.bytes();
        // SAFETY: the test's own memory.
        unsafe { mremap_fixed(pointer(self), bytes, bytes, flags, pointer(to)) }.unwrap();
    }
}

/// Serves until `is_over`.
fn serve_until(serving: &mut Serving, what: &str, mut is_over: impl FnMut() -> bool) {
    eventually(what, || {
        serving.process_ready().unwrap();
        is_over()
    });
}

/// The kernel moves first and reports then, and hands out faults before events: a reader that takes one message
/// at a time sees the fault before it knows the address.
#[test]
fn a_fault_at_the_new_address_of_moved_memory_is_served() {
    for messages in [1, 64] {
        if !has_userfaultfd() {
            return;
        }
        let (old, new) = (Memory::new(4), Memory::new(4));
        let pager = Pager::new().unwrap();
        let config = old.config(Features::EVENT_REMAP, pattern());
        pager.add(config).unwrap();
        let mover = spawn_asleep("a move", move || old.move_to(&new, MremapFlags::MAYMOVE));
        // The memory has moved, and the mover waits until its event was read.
        let read = spawn_asleep("a read", move || new.read(2));
        let mut serving = Serving::new(&pager, messages);
        serve_until(&mut serving, "the read", || read.is_finished());
        assert_eq!(read.join(), word_of(2), "{messages} messages at a time");
        mover.join();
    }
}

/// The memory that was moved away from is mapped, registered, and nobody's.
#[test]
fn memory_that_was_moved_away_from_and_kept_reads_as_zeroes() {
    if !has_userfaultfd() {
        return;
    }
    let (old, new) = (Memory::new(4), Memory::new(4));
    let pager = Pager::new().unwrap();
    let events = Features::EVENT_REMAP | Features::EVENT_UNMAP;
    let id = pager.add(old.config(events, pattern())).unwrap();
    let _readers = Readers::spawn(&pager, ReaderConfig::new(1)).unwrap();
    let flags = MremapFlags::MAYMOVE | MremapFlags::DONTUNMAP;
    within_patience("a move", move || old.move_to(&new, flags));
    assert_eq!(
        within_patience("a read there", move || new.read(1)),
        word_of(1)
    );
    assert_eq!(within_patience("a read here", move || old.read(1)), 0);
    assert_eq!(within_patience("a read here", move || old.read(3)), 0);
    assert_eq!(
        within_patience("a read there", move || new.read(3)),
        word_of(3)
    );
    assert_eq!(pager.page_state(id, PageIndex(2)), Some(PageState::Absent));
    assert_no_trouble(&pager);
}

/// Kind: a sleeper that nobody wakes. Without UNMAP events nobody knows whose memory is there by now: zeroes could be wrong.
#[test]
fn memory_that_was_moved_away_from_is_lost_where_unmapping_is_not_reported() {
    if !has_userfaultfd() || !can_poison() {
        return;
    }
    let (old, new) = (Memory::new(4), Memory::new(4));
    let pager = Pager::new().unwrap();
    let _id = pager
        .add(old.config(Features::EVENT_REMAP, pattern()))
        .unwrap();
    let _readers = Readers::spawn(&pager, ReaderConfig::new(1)).unwrap();
    let flags = MremapFlags::MAYMOVE | MremapFlags::DONTUNMAP;
    within_patience("a move", move || old.move_to(&new, flags));
    let touched = within_patience("a touch here", move || {
        let at = std::ptr::with_exposed_provenance_mut(old.at(1));
        let bytes = usize::try_from(PAGE).unwrap();
        // SAFETY: mapped for the life of the process.
        unsafe { madvise(at, bytes, Advice::LinuxPopulateRead) }
    });
    assert_eq!(touched, Err(Errno::HWPOISON));
    assert_eq!(
        within_patience("a read there", move || new.read(1)),
        word_of(1)
    );
    assert_no_trouble(&pager);
}

/// Records the pages that were written to although they were protected.
#[derive(Default)]
struct Written(Mutex<Vec<u64>>);

impl Observer for Written {
    fn touched(&self, _: &Fault) {}

    fn written(&self, fault: &Fault) {
        self.0.lock().unwrap().push(fault.page.0);
    }
}

/// A VMM that tracks writes by write protection on the same userfaultfd.
#[test]
fn writes_to_protected_pages_go_on_and_are_reported() {
    /// More often than a fault may come again without progress.
    const TIMES: u64 = 1100;
    if !has_userfaultfd() {
        return;
    }
    let memory = Memory::new(8);
    let features = Features::WRITE_PROTECT | Features::POISON;
    let uffd = match Userfaultfd::open(features) {
        Ok(uffd) => Arc::new(uffd),
        Err(error) => {
            println!("SKIP: {error}");
            return;
        }
    };
    // SAFETY: mapped for the life of the process; no code relies on its zeroes.
    let registered =
        unsafe { uffd.register_with_protection(UserRange::from(memory.range()), Mode::Missing) };
    registered.unwrap();
    let written = Arc::new(Written::default());
    let pager = Pager::new().unwrap();
    let config = memory.described(&uffd, pattern());
    pager
        .add(config.observe(Arc::<Written>::clone(&written)))
        .unwrap();
    let readers = Readers::spawn(&pager, ReaderConfig::new(1)).unwrap();
    // A missing page is installed, whatever touches it.
    within_patience("a write", move || memory.write(1, 1));
    assert_eq!(
        within_patience("a read", move || memory.read(2)),
        word_of(2)
    );
    let page = |page: u64| UserRange {
        start: memory.at(page) as u64,
        bytes: PAGE,
    };
    for time in 0..TIMES {
        uffd.protect(page(1)).unwrap();
        within_patience("a write", move || memory.write(1, time));
    }
    assert_eq!(within_patience("a read", move || memory.read(1)), TIMES - 1);
    uffd.protect(page(2)).unwrap();
    // A read is no write.
    assert_eq!(
        within_patience("a read", move || memory.read(2)),
        word_of(2)
    );
    within_patience("a write", move || memory.write(2, 2));
    let pages = written.0.lock().unwrap().clone();
    assert_eq!(
        pages.iter().filter(|&&page| page == 1).count() as u64,
        TIMES
    );
    assert_eq!(pages.last(), Some(&2));
    assert_eq!(readers.stop().protected_writes, TIMES + 1);
    assert_no_trouble(&pager);
}

/// Kind: the pager replaces what its owner has put there. The kernel takes a protected page's mapping away, as it does for memory
/// that it swaps out, and leaves a mark.
#[test]
fn a_protected_page_is_mapped_again_with_its_protection() {
    const PAGES: u64 = 8;
    if !has_userfaultfd() {
        return;
    }
    let file = memfd(PAGES * PAGE);
    let memory = View::new(&file, PAGES * PAGE);
    let Some(uffd) = memory.register_protected(Mode::Minor, Features::NONE) else {
        return;
    };
    let (range, size) = (memory.range(), PageSize::Size4K);
    let written = Arc::new(Written::default());
    let config = RegionConfig::foreign(&uffd, range, size, Mode::Minor, pattern()).gpa(GPA);
    let config = config.observe(Arc::<Written>::clone(&written));
    let offset_bytes = 0;
    let pager = Pager::new().unwrap();
    pager
        .add(config.memfd(Memfd { file, offset_bytes }))
        .unwrap();
    let readers = Readers::spawn(&pager, ReaderConfig::new(1)).unwrap();
    assert_eq!(memory.read(1), word_of(1));
    uffd.protect(UserRange::from(range)).unwrap();
    memory.drop_pages(1, 1, Advice::LinuxDontNeed);
    memory.write(1, 7);
    assert_eq!(*written.0.lock().unwrap(), [1]);
    assert_eq!(memory.read(1), 7);
    assert_eq!(readers.stop().reinstalls, 1);
    assert_no_trouble(&pager);
}

/// A mark of the protection is all that is there.
#[test]
fn zeroes_are_installed_in_missing_pages_that_are_protected() {
    let protection = Features::WRITE_PROTECT | Features::WRITE_PROTECT_MISSING;
    let features = protection | Features::EVENT_REMOVE;
    let uffd = match Userfaultfd::open(features) {
        Ok(uffd) => Arc::new(uffd),
        Err(error) => {
            println!("SKIP: {error}");
            return;
        }
    };
    let memory = Memory::new(8);
    let range = UserRange::from(memory.range());
    // SAFETY: mapped for the life of the process; no code relies on its zeroes.
    unsafe { uffd.register_with_protection(range, Mode::Missing) }.unwrap();
    let pager = Pager::new().unwrap();
    let zeroes = LocalFn(|_, _: &mut [u8]| Ok(Filled::Zero));
    let config = memory.described(&uffd, local(zeroes)).fault_around(8);
    pager.add(config).unwrap();
    let readers = Readers::spawn(&pager, ReaderConfig::new(1)).unwrap();
    assert_eq!(within_patience("a read", move || memory.read(0)), 0);
    within_patience("a discard", move || memory.drop_pages(0, 2));
    uffd.protect(range).unwrap();
    for page in 0..8 {
        let what = format!("page {page}");
        assert_eq!(within_patience(&what, move || memory.read(page)), 0);
        within_patience(&what, move || memory.write(page, page + 1));
        let read = within_patience(&what, move || memory.read(page));
        assert_eq!(read, page + 1);
    }
    readers.stop();
    assert_no_trouble(&pager);
}

struct PanicsOnce(AtomicBool);

impl Observer for PanicsOnce {
    fn touched(&self, _: &Fault) {
        assert!(self.0.swap(true, Ordering::SeqCst), "a defect of the VMM");
    }
}

#[test]
fn a_panic_of_an_observer_loses_no_fault() {
    for (mode, backing) in SMALL_WAYS {
        let Some(region) = region(16, backing) else {
            return;
        };
        if mode == Mode::Minor {
            fill_page_cache(&region);
        }
        let contents = match mode {
            Mode::Minor => Contents::PageCache(pagetide_pager::Holes::AreMissing),
            Mode::Missing => pattern(),
        };
        let observer = Arc::new(PanicsOnce(AtomicBool::new(false)));
        let set = |config: RegionConfig| config.observe(observer);
        let paged = Paged::with(&region, mode, contents, set);
        let reads: Vec<_> = (0..8)
            .map(|page| {
                let region = Arc::clone(&region);
                spawn_asleep("a read", move || check_page(&region, page))
            })
            .collect();
        let readers = Readers::spawn(&paged.pager, ReaderConfig::new(1)).unwrap();
        for read in reads {
            read.join();
        }
        // The thread lives.
        check_page(&region, 9);
        assert_no_trouble(&paged.pager);
        readers.stop();
    }
}

/// So does one of the owner's callback, which unwinds out of `process_ready`: the other faults of that read are
/// resolved by the next call.
#[test]
fn a_panic_of_an_owners_callback_loses_no_fault() {
    let Some(region) = region(16, Backing::Shmem) else {
        return;
    };
    let paged = Paged::new(&region, Mode::Missing, pattern());
    let reads: Vec<_> = (0..8)
        .map(|page| {
            let region = Arc::clone(&region);
            spawn_asleep("a read", move || check_page(&region, page))
        })
        .collect();
    let mut serving = Serving::new(&paged.pager, 32);
    let panics = AtomicBool::new(true);
    serving.on_resolved(move |_| assert!(!panics.swap(false, Ordering::SeqCst), "a defect"));
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        serving.process_ready().unwrap();
    }));
    panicked.unwrap_err();
    serve_until(&mut serving, "the reads", || {
        reads.iter().all(Sleeper::is_finished)
    });
    for read in reads {
        read.join();
    }
}

/// Of the tests that take a processor from everybody else: one at a time.
static PROCESSOR: Mutex<()> = Mutex::new(());

/// Keeps every other thread from a processor until told to stop, as a hypervisor or a more important process does.
/// `None`, with the reason printed, if this process may not.
fn take_processor(cpu: usize, stop: &Arc<AtomicBool>) -> Option<thread::JoinHandle<()>> {
    let (send, receive) = std::sync::mpsc::channel();
    let stop = Arc::clone(stop);
    let taker = thread::spawn(move || {
        pin(cpu);
        let priority = libc::sched_param { sched_priority: 10 };
        // SAFETY: reads the structure.
        let set = unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const priority) };
        send.send(set == 0).unwrap();
        while set == 0 && !stop.load(Ordering::Acquire) {
            std::hint::spin_loop();
        }
    });
    if receive.recv().unwrap() {
        return Some(taker);
    }
    println!("SKIP: SCHED_FIFO: {}", std::io::Error::last_os_error());
    taker.join().unwrap();
    None
}

/// Keeps this thread on one processor.
fn pin(cpu: usize) {
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    rustix::thread::sched_setaffinity(None, &set).unwrap();
}

/// The processors that this thread may use.
fn processors() -> Vec<usize> {
    let set = rustix::thread::sched_getaffinity(None).unwrap();
    (0..rustix::thread::CpuSet::MAX_CPU)
        .filter(|&cpu| set.is_set(cpu))
        .collect()
}

/// A thread that gives memory back has had its event read, and comes to no processor to go on: for as long the
/// kernel refuses to install anything. That is nobody's failure.
#[test]
fn a_discard_that_takes_long_is_no_failure() {
    let _taken = PROCESSOR.lock().unwrap_or_else(PoisonError::into_inner);
    let here = processors();
    let [first, second, ..] = here[..] else {
        println!("SKIP: this needs two processors");
        return;
    };
    let at_once: fn() -> Contents = || Contents::Source(Arc::new(SubmitFn(sources::complete)));
    let kinds: [fn() -> Contents; 2] = [pattern, at_once];
    for contents in kinds {
        if !has_userfaultfd() {
            return;
        }
        let memory = Memory::new(16);
        let pager = Pager::new().unwrap();
        let config = memory.config(Features::EVENT_REMOVE, contents());
        pager.add(config).unwrap();
        let notices = Arc::new(Mutex::new(Vec::new()));
        let its = Arc::clone(&notices);
        pager.on_notice(move |notice| its.lock().unwrap().push(notice.to_string()));
        let read = spawn_asleep("a read", move || memory.read(5));
        let giver = spawn_asleep("a discard", move || {
            pin(second);
            memory.drop_pages(9, 1);
        });
        let mut resolver = pager.resolver(Some(0)).unwrap();
        let mut serving = Serving::new(&pager, 64);
        let stop = Arc::new(AtomicBool::new(false));
        let Some(taker) = take_processor(second, &stop) else {
            serve_until(&mut serving, "the read", || read.is_finished());
            return;
        };
        pin(first);
        // By an exit, too, whose thread has nothing else to do.
        let exit = thread::spawn(move || {
            let gpa = GuestAddress(GPA.0 + 6 * PAGE);
            resolver.resolve_exit(gpa, Access::Read).map(drop)
        });
        // Many turns, each many times as long as an EAGAIN normally lasts.
        eventually("the fault has had many turns", || {
            serving.process_ready().unwrap();
            let has_failed = !notices.lock().unwrap().is_empty();
            let has_ended = read.is_finished() || exit.is_finished();
            has_failed || has_ended || serving.counters().faults >= 10
        });
        stop.store(true, Ordering::Release);
        serve_until(&mut serving, "the read and the discard", || {
            read.is_finished() && giver.is_finished()
        });
        taker.join().unwrap();
        for_all(&here);
        exit.join().unwrap().unwrap();
        assert_eq!(read.join(), word_of(5));
        giver.join();
        assert_eq!(*notices.lock().unwrap(), Vec::<String>::new());
    }
}

/// A loop with a budget does not spend more on a fault for which the kernel installs nothing, tries it again and again, and
/// resolves other faults meanwhile.
#[test]
fn a_budget_holds_while_a_discard_takes_long() {
    const TURNS: u64 = 10;
    let _taken = PROCESSOR.lock().unwrap_or_else(PoisonError::into_inner);
    let here = processors();
    let [first, second, ..] = here[..] else {
        println!("SKIP: this needs two processors");
        return;
    };
    if !has_userfaultfd() {
        return;
    }
    let memory = Memory::new(16);
    let pager = Pager::new().unwrap();
    let config = memory.config(Features::EVENT_REMOVE, pattern());
    pager.add(config).unwrap();
    let other = Memory::new(4);
    let config = other.config(Features::EVENT_REMOVE, pattern());
    let behind = GuestAddress(GPA.0 + memory.pages * PAGE);
    pager.add(config.gpa(behind)).unwrap();
    let read = spawn_asleep("a read", move || memory.read(5));
    let giver = spawn_asleep("a discard", move || {
        pin(second);
        memory.drop_pages(9, 1);
    });
    let mut serving = Serving::new(&pager, 64);
    let stop = Arc::new(AtomicBool::new(false));
    let Some(taker) = take_processor(second, &stop) else {
        serve_until(&mut serving, "the read", || read.is_finished());
        return;
    };
    pin(first);
    let beside = spawn_asleep("a read beside", move || other.read(1));
    for _ in 0..TURNS {
        serving.process_ready_within(Duration::ZERO).unwrap();
    }
    let pages = serving.counters().pages;
    eventually("the fault has had some turns", || {
        serving.process_ready_within(Duration::ZERO).unwrap();
        read.is_finished() || serving.counters().faults >= TURNS
    });
    let Counters { faults, again, .. } = *serving.counters();
    stop.store(true, Ordering::Release);
    serve_until(&mut serving, "the read and the discard", || {
        read.is_finished() && giver.is_finished()
    });
    taker.join().unwrap();
    for_all(&here);
    assert_eq!(read.join(), word_of(5));
    assert_eq!(beside.join(), word_of(memory.pages + 1));
    giver.join();
    assert!(pages > 0, "the other fault has had none of {TURNS} turns");
    // Not the time, but what was done in it: some tries, and not the dozens of 20 ms.
    assert!(again <= 16 * faults, "{again} tries in {faults} turns");
}

/// Lets this thread use all processors again.
fn for_all(processors: &[usize]) {
    let mut set = rustix::thread::CpuSet::new();
    for &cpu in processors {
        set.set(cpu);
    }
    rustix::thread::sched_setaffinity(None, &set).unwrap();
}
