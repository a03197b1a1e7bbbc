//! Forked children of a process whose memory is paged: copies that nobody pages, and that read no zeroes.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use pagetide_memory::PageSize;
use pagetide_pager::{Contents, Memfd, Mode, Pager, ReaderConfig, Readers, RegionConfig, Serving};
use pagetide_test_support::{NoDescriptor, Sleeper, in_a_process_of_its_own};
use pagetide_uapi::userfaultfd::{Features, UserRange};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use support::view::{View, memfd};
use support::*;

/// One test at a time: each child has all userfaultfds of this process, and one test counts descriptors.
static ALONE: Mutex<()> = Mutex::new(());

/// The first word of a page's content.
fn word_of(page: u64) -> u64 {
    !(GPA.0 + page * PAGE)
}

fn config(memory: &View) -> RegionConfig {
    config_with(memory, pattern())
}

fn config_with(memory: &View, contents: Contents) -> RegionConfig {
    let uffd = memory.register_with(Mode::Missing, Features::EVENT_FORK);
    let (size, mode) = (PageSize::Size4K, Mode::Missing);
    RegionConfig::foreign(&uffd, memory.range(), size, mode, contents).gpa(GPA)
}

/// What a forked child exits with that has read zeroes.
const ZEROES: i32 = 42;

/// Not libc's fork, which holds the allocator's lock that the reader in this process needs. And not the system call
/// fork, which arm64 lacks.
fn fork() -> i32 {
    let signal = i64::from(libc::SIGCHLD);
    // SAFETY: without a stack or flags, clone is fork. Callers make only async-signal-safe calls and memory accesses
    // in the child.
    let child = unsafe { libc::syscall(libc::SYS_clone, signal, 0_u64, 0_u64, 0_u64, 0_u64) };
    i32::try_from(child).unwrap()
}

/// In a child: ends by the signal of the access, or with what it has read.
fn read_and_exit(memory: &View, page: u64) -> ! {
    // SAFETY: async-signal-safe.
    unsafe { libc::signal(libc::SIGBUS, libc::SIG_DFL) };
    let is_zero = memory.read_here(page) == 0;
    // SAFETY: async-signal-safe.
    unsafe { libc::_exit(if is_zero { ZEROES } else { 0 }) }
}

/// The signal or the status that a child has ended with. Async-signal-safe.
fn end_of(child: i32) -> i32 {
    let mut status = 0;
    // SAFETY: requires room for the status.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    match libc::WIFSIGNALED(status) {
        true => libc::WTERMSIG(status),
        false => libc::WEXITSTATUS(status),
    }
}

/// It executes another program, or exits; until then, none of its accesses reads zeroes. Nor do those of its own
/// children, whose userfaultfds come from a child's.
#[test]
fn a_forked_child_reads_no_zeroes() {
    if !has_userfaultfd() || !can_poison() {
        return;
    }
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let memory = View::private(4 * PAGE);
    let pager = Pager::new().unwrap();
    pager.add(config(&memory)).unwrap();
    let _readers = Readers::spawn(&pager, ReaderConfig::new(1)).unwrap();
    assert_eq!(memory.read(1), word_of(1));
    for forks_again in [false, true] {
        for (page, expected) in [(0, libc::SIGBUS), (1, 0), (3, libc::SIGBUS)] {
            let child = fork();
            if child == 0 {
                if forks_again {
                    let grandchild = fork();
                    if grandchild != 0 {
                        // SAFETY: async-signal-safe.
                        unsafe { libc::_exit(end_of(grandchild)) };
                    }
                }
                read_and_exit(&memory, page);
            }
            let ended = within_patience("the child", move || end_of(child));
            assert_eq!(ended, expected, "page {page}, again: {forks_again}");
        }
    }
    // The parent's own pages are as before.
    assert_eq!(memory.read(3), word_of(3));
}

/// A child of a VMM that tracks writes: its own writes go on, and what is missing is lost there, also where it is
/// protected.
#[test]
fn a_child_of_protected_memory_writes_and_reads_no_zeroes() {
    if !has_userfaultfd() || !can_poison() {
        return;
    }
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let file = memfd(4 * PAGE);
    for (memory, mode) in [
        (View::private(4 * PAGE), Mode::Missing),
        (View::new(&file, 4 * PAGE), Mode::Minor),
    ] {
        let Some(uffd) = memory.register_protected(mode, Features::EVENT_FORK) else {
            return;
        };
        let size = PageSize::Size4K;
        let config = RegionConfig::foreign(&uffd, memory.range(), size, mode, pattern()).gpa(GPA);
        let config = match mode {
            Mode::Missing => config,
            Mode::Minor => config.memfd(Memfd {
                file: file.try_clone().unwrap(),
                offset_bytes: 0,
            }),
        };
        let pager = Pager::new().unwrap();
        pager.add(config).unwrap();
        let _readers = Readers::spawn(&pager, ReaderConfig::new(1)).unwrap();
        assert_eq!(memory.read(1), word_of(1));
        uffd.protect(UserRange::from(memory.range())).unwrap();
        for (page, expected) in [(1, 0), (3, libc::SIGBUS)] {
            let child = fork();
            if child == 0 {
                if page == 1 {
                    memory.write_here(page, !0);
                }
                read_and_exit(&memory, page);
            }
            let ended = within_patience("the child", move || end_of(child));
            assert_eq!(ended, expected, "page {page}, {mode:?}");
        }
    }
}

/// Each child has a userfaultfd, and a client decides how many children it has.
#[test]
fn many_children_cost_few_descriptors_and_none_after_the_end() {
    if !has_userfaultfd() || !can_poison() {
        return;
    }
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let memory = View::private(4 * PAGE);
    let (go, starts) = std::io::pipe().unwrap();
    let before = descriptors();
    let pager = Pager::new().unwrap();
    pager.add(config(&memory)).unwrap();
    let readers = Readers::spawn(&pager, ReaderConfig::new(1)).unwrap();
    let alone = descriptors();
    let children: Vec<i32> = (0..24)
        .map(|page| {
            let child = fork();
            if child == 0 {
                let mut byte = 0_u8;
                let from = go.as_raw_fd();
                // If the test fails, the read ends with the parent.
                // SAFETY: async-signal-safe; the child never uses it.
                unsafe { libc::close(starts.as_raw_fd()) };
                // SAFETY: async-signal-safe, with room for a byte.
                unsafe { libc::read(from, (&raw mut byte).cast(), 1) };
                read_and_exit(&memory, page % 4);
            }
            child
        })
        .collect();
    // The parent reads after the last event was read.
    assert_eq!(memory.read(1), word_of(1));
    assert!(descriptors() - alone <= 16, "{}", descriptors() - alone);
    readers.stop();
    drop(pager);
    assert!(descriptors() <= before, "{before}");
    std::io::Write::write_all(&mut &starts, &[0; 24]).unwrap();
    for child in children {
        let ended = within_patience("a child", move || end_of(child));
        assert_eq!(ended, libc::SIGBUS);
    }
}

/// A fork by another thread, which waits until its event was read. The child reads a missing page.
fn fork_asleep(memory: &Arc<View>) -> Sleeper<i32> {
    let memory = Arc::clone(memory);
    spawn_asleep("a fork", move || match fork() {
        0 => read_and_exit(&memory, 3),
        child => child,
    })
}

/// Serves until the child of a fork has ended. Returns how.
fn serve_until_end(serving: &mut Serving, fork: Sleeper<i32>) -> i32 {
    let ended = thread::spawn(move || end_of(fork.join()));
    eventually("the child's end", || {
        serving.process_ready().unwrap();
        ended.is_finished()
    });
    ended.join().unwrap()
}

/// How often this thread has gone to sleep so far. Needs no descriptor.
fn sleeps() -> i64 {
    let mut usage = MaybeUninit::<libc::rusage>::uninit();
    // SAFETY: requires room for the result.
    let asked = unsafe { libc::getrusage(libc::RUSAGE_THREAD, usage.as_mut_ptr()) };
    assert_eq!(asked, 0);
    // SAFETY: filled by the successful call.
    unsafe { usage.assume_init() }.ru_nvcsw
}

/// Kind: a lack that is waited out on the thread for which others wait. A fork's message carries a descriptor.
#[test]
fn a_fork_waits_for_a_descriptor_and_the_event_loop_does_not() {
    /// More than a machine needs, however slow it is.
    const MOST_TURNS: u32 = 200;
    let this = "a_fork_waits_for_a_descriptor_and_the_event_loop_does_not";
    in_a_process_of_its_own(this, || {
        if !has_userfaultfd() || !can_poison() {
            return;
        }
        let memory = Arc::new(View::private(4 * PAGE));
        let pager = Pager::new().unwrap();
        pager.add(config(&memory)).unwrap();
        let mut serving = Serving::new(&pager, 4);
        let fork = fork_asleep(&memory);
        let none = NoDescriptor::begin();
        let timeout = Timespec::try_from(PATIENCE).unwrap();
        let (mut awake, mut asleep, mut turns) = (0, 0, 0);
        // It is tried again and again: not at once, but by itself.
        while awake < 3 || asleep < 3 {
            let before = sleeps();
            assert_eq!(serving.process_ready().unwrap(), 0);
            let after = sleeps();
            let mut fds = [PollFd::new(&serving, PollFlags::IN)];
            assert_eq!(poll(&mut fds, Some(&timeout)).unwrap(), 1);
            awake += u32::from(after == before);
            asleep += u32::from(sleeps() > after);
            turns += 1;
            assert!(
                turns < MOST_TURNS,
                "of {turns} turns, {awake} without a pause, and a wait after {asleep}"
            );
        }
        drop(none);
        assert!(fork.is_undisturbed());
        assert_eq!(serve_until_end(&mut serving, fork), libc::SIGBUS);
        assert_no_trouble(&pager);
    });
}

/// Kind: what is left unread is reported no more. The kernel hands out faults first, and then the read ends for want of a
/// descriptor.
#[test]
fn a_fork_behind_a_fault_is_read_when_there_is_a_descriptor() {
    let this = "a_fork_behind_a_fault_is_read_when_there_is_a_descriptor";
    in_a_process_of_its_own(this, || {
        if !has_userfaultfd() || !can_poison() {
            return;
        }
        let memory = Arc::new(View::private(4 * PAGE));
        let source = ManualSource::new();
        let pager = Pager::new().unwrap();
        pager.add(config_with(&memory, source.contents())).unwrap();
        let its = Arc::clone(&memory);
        let read = spawn_asleep("a read", move || its.populate_here(1));
        let fork = fork_asleep(&memory);
        let none = NoDescriptor::begin();
        let mut serving = Serving::new(&pager, 4);
        assert_eq!(serving.process_ready().unwrap(), 1);
        drop(none);
        // The content has not come.
        assert_eq!(serve_until_end(&mut serving, fork), libc::SIGBUS);
        sources::complete(source.next());
        assert_eq!(read.join(), Ok(()));
        assert_eq!(memory.read_here(1), word_of(1));
        assert_no_trouble(&pager);
    });
}

/// The same of an address space that shares a region's memory. Its fault installs a page in the region's own, which says nothing
/// of messages here.
#[test]
fn a_back_ends_fork_behind_a_fault_is_read_when_there_is_a_descriptor() {
    let this = "a_back_ends_fork_behind_a_fault_is_read_when_there_is_a_descriptor";
    in_a_process_of_its_own(this, || {
        if !has_userfaultfd() || !can_poison() {
            return;
        }
        let file = memfd(4 * PAGE);
        let [vmm, back_end] = [(); 2].map(|()| Arc::new(View::new(&file, 4 * PAGE)));
        let (size, mode) = (PageSize::Size4K, Mode::Missing);
        let uffd = vmm.register(mode);
        let config = RegionConfig::foreign(&uffd, vmm.range(), size, mode, pattern());
        let config = config.gpa(GPA).memfd(Memfd {
            file: file.try_clone().unwrap(),
            offset_bytes: 0,
        });
        let pager = Pager::new().unwrap();
        let id = pager.add(config).unwrap();
        let its = back_end.register_with(mode, Features::EVENT_FORK);
        pager.attach(&its, &[(id, back_end.range())]).unwrap();
        let reading = Arc::clone(&back_end);
        let read = spawn_asleep("a read", move || reading.populate_here(1));
        let fork = fork_asleep(&back_end);
        let none = NoDescriptor::begin();
        let mut serving = Serving::new(&pager, 4);
        assert_eq!(serving.process_ready().unwrap(), 1);
        assert_eq!(pager.progress().present, 1);
        drop(none);
        assert_eq!(serve_until_end(&mut serving, fork), libc::SIGBUS);
        assert_eq!(read.join(), Ok(()));
        assert_eq!(back_end.read_here(1), word_of(1));
        assert_no_trouble(&pager);
    });
}
