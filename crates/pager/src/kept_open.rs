//! Userfaultfds that stay open when their memory's paging has ended.
//!
//! Some missing pages could not be marked as lost: the kernel has no `UFFDIO_POISON` (before Linux 6.6), or refused
//! it. While the userfaultfd is open, a thread that touches such a page sleeps; once it was closed, the thread would
//! read zeroes in place of content. A userfaultfd of a process that has gone is closed at the next occasion, so that
//! what stays is bounded by the processes that live.
//!
//! A process that discards, unmaps or moves memory, or forks, waits until its event was read, also when nobody pages its
//! memory any more. A thread reads the events of each userfaultfd that stays open: a process that shares its userfaultfd
//! can have a read of it wait for ever, which must hold up no other.

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::Builder;
use std::time::{Duration, Instant};

use pagetide_uapi::userfaultfd::{Event, EventBuffer, Userfaultfd};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;

use crate::channel::{Batch, Channel, Role};
use crate::log_limit::log_limited;

/// Messages that are read at once.
const EVENTS_AT_ONCE: usize = 16;

/// The most threads that read: a process can have any number of userfaultfds stay open, and threads are everybody's. Beyond
/// that, processes wait.
const MOST_READERS: usize = 256;

/// After which a userfaultfd is looked at again whose messages a pager reads.
const LOOK_AGAIN: Timespec = Timespec {
    tv_sec: 1,
    tv_nsec: 0,
};

/// How long a pager waits for the end of reads that have begun. Before Linux 6.10 a process that shares the userfaultfd can
/// make a read of it last for ever, and then loses the messages that this read takes.
const READ_LIMIT: Duration = Duration::from_secs(1);

/// Who reads the messages of a userfaultfd that stays open: its thread, or a pager that serves memory by it again.
#[derive(Default)]
struct Turn {
    state: Mutex<TurnState>,
    has_read: Condvar,
}

#[derive(Default)]
struct TurnState {
    /// The pager's channel of the same userfaultfd, if it serves memory again.
    again: Weak<Channel>,
    /// Whether the thread reads. The lock is not held meanwhile.
    is_reading: bool,
}

impl Turn {
    fn lock(&self) -> MutexGuard<'_, TurnState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_left(&self) -> bool {
        self.lock().again.strong_count() > 0
    }

    /// Leaves the messages to a pager from now on. A read that has begun goes on.
    fn leave_to(&self, channel: &Arc<Channel>) {
        self.lock().again = Arc::downgrade(channel);
    }

    /// Waits for the end of a read that has begun, within a limit.
    fn wait_for_read(&self, end: Instant) {
        let limit = end.saturating_duration_since(Instant::now());
        let state = self.lock();
        let ended = self
            .has_read
            .wait_timeout_while(state, limit, |state| state.is_reading);
        drop(ended);
    }

    /// Reads, unless the messages are left to a pager: then `None`.
    fn read<T>(&self, read: impl FnOnce() -> T) -> Option<T> {
        let mut state = self.lock();
        if state.again.strong_count() > 0 {
            return None;
        }
        state.is_reading = true;
        drop(state);
        let _reading = TurnReading(self);
        Some(read())
    }
}

/// While the thread reads.
struct TurnReading<'t>(&'t Turn);

impl Drop for TurnReading<'_> {
    fn drop(&mut self) {
        self.0.lock().is_reading = false;
        self.0.has_read.notify_all();
    }
}

/// A userfaultfd that stays open.
struct Kept {
    channel: Arc<Channel>,
    turn: Turn,
    /// Of the thread that reads, if there is one: readable when that is to end.
    end: Option<OwnedFd>,
    /// Whether that thread is there.
    is_read: AtomicBool,
}

static READERS: AtomicUsize = AtomicUsize::new(0);

static KEPT: Mutex<Vec<Arc<Kept>>> = Mutex::new(Vec::new());

fn lock() -> MutexGuard<'static, Vec<Arc<Kept>>> {
    KEPT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Keeps a userfaultfd open as long as its process lives; one of this process for ever.
pub(crate) fn keep_open(channel: &Arc<Channel>) {
    close_gone();
    let mut all = lock();
    // A process may have had its memory paged by one userfaultfd again and again.
    let is_it = |kept: &Arc<Kept>| is_same(&kept.channel.uffd, &channel.uffd);
    if let Some(before) = all.iter().position(is_it) {
        let is_read = |kept: &Arc<Kept>| kept.is_read.load(Ordering::Acquire);
        if !channel.has_events || all.get(before).is_some_and(is_read) {
            return;
        }
        // Its events may be read now, as they could not be before.
        all.swap_remove(before);
    }
    all.push(Kept::new(channel));
}

/// Closes those whose processes have gone. Called whenever the paging of a region ends.
pub(crate) fn close_gone() {
    close_those(Channel::is_gone);
}

fn close_those(are_gone: impl Fn(&Channel) -> bool) {
    // To ask takes a lock of the process, which can hold it for long.
    let all: Vec<_> = lock().iter().map(Arc::clone).collect();
    for kept in all.iter().filter(|kept| are_gone(&kept.channel)) {
        lock().retain(|other| !Arc::ptr_eq(other, kept));
        if let Some(end) = &kept.end {
            // Fails only if the counter is at its maximum.
            let _ = rustix::io::write(end, &1_u64.to_ne_bytes());
        }
    }
}

/// Leaves the messages of a userfaultfd to a pager that serves memory by it again, as long as it does.
pub(crate) fn leave_to(channel: &Arc<Channel>) {
    let same: Vec<_> = lock()
        .iter()
        .filter(|kept| is_same(&kept.channel.uffd, &channel.uffd))
        .map(Arc::clone)
        .collect();
    for kept in &same {
        kept.turn.leave_to(channel);
    }
    let end = Instant::now() + READ_LIMIT;
    for kept in &same {
        kept.turn.wait_for_read(end);
    }
}

/// Whether two descriptors are of one userfaultfd, by kcmp(2). A kernel without that (CONFIG_KCMP) says so only of equal
/// descriptors.
fn is_same(one: &Userfaultfd, other: &Userfaultfd) -> bool {
    /// `KCMP_FILE` of include/uapi/linux/kcmp.h.
    const KCMP_FILE: libc::c_int = 0;
    let (one, other) = (one.as_fd().as_raw_fd(), other.as_fd().as_raw_fd());
    let pid = std::process::id();
    // SAFETY: kcmp takes integers alone, and writes no memory of this process.
    let compared = unsafe { libc::syscall(libc::SYS_kcmp, pid, pid, KCMP_FILE, one, other) };
    one == other || compared == 0
}

/// How many are open.
pub fn kept_open() -> usize {
    lock().len()
}

/// What a thread that reads has. Dropped when the thread has ended, or was not started.
struct Reading(Arc<Kept>);

impl Drop for Reading {
    fn drop(&mut self) {
        self.0.is_read.store(false, Ordering::Release);
        READERS.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Reading {
    fn read_events(&self) {
        if let Some(end) = &self.0.end {
            self.0.read_events(end);
        }
    }
}

impl Kept {
    /// Starts a thread that reads. Called with the list locked, so that their number is exact.
    fn new(channel: &Arc<Channel>) -> Arc<Self> {
        let has_room = READERS.load(Ordering::Relaxed) < MOST_READERS;
        let kept = Arc::new(Self {
            channel: Arc::clone(channel),
            turn: Turn::default(),
            end: (channel.has_events && has_room)
                .then(|| eventfd(0, EventfdFlags::CLOEXEC).ok())
                .flatten(),
            is_read: AtomicBool::new(false),
        });
        if kept.end.is_some() {
            kept.is_read.store(true, Ordering::Release);
            READERS.fetch_add(1, Ordering::Relaxed);
            let its = Reading(Arc::clone(&kept));
            let thread = Builder::new().name("pt-kept-open".into());
            // If none starts, the process waits if it discards memory, as it would without this thread.
            let _ = thread.spawn(move || its.read_events());
        }
        kept
    }

    /// The thread: reads events, and forgets faults, whose threads sleep on.
    fn read_events(&self, end: &OwnedFd) {
        let mut buffer = EventBuffer::new(EVENTS_AT_ONCE);
        let mut lacks = false;
        loop {
            // What cannot be read for now stays readable: it is tried again as seldom.
            let rests = std::mem::take(&mut lacks) || self.is_shared() || self.turn.is_left();
            let mut polled = vec![PollFd::new(end, PollFlags::IN)];
            if !rests {
                polled.push(PollFd::new(&*self.channel.uffd, PollFlags::IN));
            }
            match poll(&mut polled, rests.then_some(&LOOK_AGAIN)) {
                Ok(_) => {}
                Err(Errno::INTR) => continue,
                Err(_) => return,
            }
            let mut seen = polled.iter().map(PollFd::revents);
            if seen.next().is_some_and(|end| !end.is_empty()) {
                return;
            }
            let Some(seen) = seen.next().filter(|seen| !seen.is_empty()) else {
                continue;
            };
            // A process that shares the userfaultfd may have made reads of it wait, of which this is the sign. It harms
            // itself alone.
            if !seen.contains(PollFlags::IN) {
                return;
            }
            match self.read_some(&mut buffer) {
                Some(batch) => lacks = batch.lacks,
                None => return,
            }
        }
    }

    /// Whether a pager reads the messages: that of another region, which has pages by this userfaultfd.
    fn is_shared(&self) -> bool {
        // Nobody pages a child, which has the pages that its parent had.
        self.channel.role != Role::Child && !self.channel.all_spans().is_empty()
    }

    /// Reads what there is. Children that were forked are kept open, too. `None`: nothing can be read any more.
    fn read_some(&self, buffer: &mut EventBuffer) -> Option<Batch> {
        let mut children = Vec::new();
        let read = self.turn.read(|| {
            if self.is_shared() {
                return Ok(Batch::default());
            }
            self.channel.read(buffer, &mut Vec::new(), |_, event| {
                if let Event::Fork { descriptor } = event
                    && let Ok(raw) = RawFd::try_from(descriptor)
                {
                    // SAFETY: from_raw_fd requires an open descriptor without another owner: the kernel created it for
                    // the reader of this message, and the message is read once.
                    children.push(unsafe { OwnedFd::from_raw_fd(raw) });
                }
            })
        });
        let Some(read) = read else {
            return Some(Batch::default());
        };
        for child in children {
            keep_open(&Arc::new(self.channel.child_without_pages(child)));
        }
        if let Err(error) = &read {
            log_limited!(error, %error, "reading the events of a userfaultfd that stays open");
        }
        // A channel that was handed over has no messages for this process.
        read.ok().filter(|_| !self.channel.is_handed_over())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use pagetide_memory::{Backing, GuestAddress, PageSize, Region};
    use pagetide_test_support::{PATIENCE, in_a_process_of_its_own};
    use pagetide_uapi::userfaultfd::{Features, Mode, OpenError};

    use super::*;
    use crate::{Contents, Pager, PatternSource, RegionConfig};

    fn channel() -> Option<Arc<Channel>> {
        channel_with(Features::from_bits(0))
    }

    /// `None`, and a word why, if there are no userfaultfds here.
    fn channel_with(features: Features) -> Option<Arc<Channel>> {
        match Userfaultfd::open(features) {
            Ok(uffd) => Some(Arc::new(Channel::new(Arc::new(uffd), 0))),
            Err(error @ (OpenError::NotSupported | OpenError::NoPermission { .. })) => {
                println!("SKIP: {error}");
                None
            }
            Err(error) => unreachable!("{error}"),
        }
    }

    /// Kind: two readers of one userfaultfd.
    #[test]
    fn a_pager_that_serves_a_userfaultfd_again_is_left_its_messages() {
        let this = "kept_open::tests::a_pager_that_serves_a_userfaultfd_again_is_left_its_messages";
        in_a_process_of_its_own(this, || {
            let channels = [(); 2].map(|()| channel());
            let [Some(of_region), Some(of_space)] = channels else {
                return;
            };
            keep_open(&of_region);
            keep_open(&of_space);
            let left = || -> Vec<bool> { lock().iter().map(|kept| kept.turn.is_left()).collect() };
            let memory = |gpa| {
                let bytes = PageSize::Size4K.bytes();
                Region::new(GuestAddress(gpa), bytes, Backing::Shmem).unwrap()
            };
            let content = || Contents::Local(Arc::new(PatternSource::new(|_, _: &mut [u8]| {})));
            let pager = Pager::new().unwrap();

            let foreign = memory(0);
            let (uffd, range) = (&of_region.uffd, foreign.guest());
            let config =
                RegionConfig::foreign(uffd, range, PageSize::Size4K, Mode::Missing, content());
            pager.add(config.gpa(GuestAddress(0))).unwrap();
            assert_eq!(left(), [true, false]);

            let config = RegionConfig::local(Arc::new(memory(1 << 30)), Mode::Missing, content());
            let id = pager.add(config).unwrap();
            let other = memory(0);
            pager
                .attach(&of_space.uffd, &[(id, other.guest())])
                .unwrap();
            assert_eq!(left(), [true, true]);
            drop(pager);
            assert_eq!(left(), [false, false]);
        });
    }

    /// Kind: what a process makes another one have without a bound.
    #[test]
    fn of_userfaultfds_that_stay_open_no_more_are_read_than_there_may_be_threads() {
        let this = "kept_open::tests::of_userfaultfds_that_stay_open_no_more_are_read_than_there_may_be_threads";
        in_a_process_of_its_own(this, || {
            let channels = [(); 2].map(|()| channel_with(Features::EVENT_REMOVE));
            let [Some(last), Some(beyond)] = channels else {
                return;
            };
            READERS.store(MOST_READERS - 1, Ordering::Relaxed);
            keep_open(&last);
            keep_open(&beyond);
            let read: Vec<_> = lock().iter().map(|kept| kept.end.is_some()).collect();
            assert_eq!(read, [true, false]);
            assert_eq!(READERS.load(Ordering::Relaxed), MOST_READERS);
        });
    }

    /// Kind: a lack at one time that is never made up for.
    #[test]
    fn a_userfaultfd_whose_events_nobody_could_read_is_read_at_the_next_end() {
        let this = "kept_open::tests::a_userfaultfd_whose_events_nobody_could_read_is_read_at_the_next_end";
        in_a_process_of_its_own(this, || {
            let Some(first) = channel_with(Features::EVENT_REMOVE) else {
                return;
            };
            let again = Arc::new(Channel::new(Arc::clone(&first.uffd), 0));
            let read = || -> Vec<bool> { lock().iter().map(|kept| kept.end.is_some()).collect() };
            READERS.store(MOST_READERS, Ordering::Relaxed);
            keep_open(&first);
            assert_eq!(read(), [false]);
            READERS.store(0, Ordering::Relaxed);
            keep_open(&again);
            assert_eq!(read(), [true]);
            // One reader is enough.
            keep_open(&first);
            assert_eq!((read(), READERS.load(Ordering::Relaxed)), (vec![true], 1));
        });
    }

    /// Kind: a lock held during a system call that another process can have last for ever.
    #[test]
    fn whether_a_process_has_gone_is_asked_without_the_lock() {
        let this = "kept_open::tests::whether_a_process_has_gone_is_asked_without_the_lock";
        in_a_process_of_its_own(this, || {
            let channels = [(); 2].map(|()| channel());
            let [Some(living), Some(gone)] = channels else {
                return;
            };
            keep_open(&living);
            keep_open(&gone);
            let is_free = || KEPT.try_lock().is_ok();
            let asked = std::cell::Cell::new(0);
            close_those(|channel| {
                asked.set(asked.get() + 1);
                assert!(is_free());
                is_same(&channel.uffd, &gone.uffd)
            });
            assert_eq!((asked.get(), kept_open()), (2, 1));
        });
    }

    /// Kind: a lock held during a system call that another process can have last for ever.
    #[test]
    fn a_read_that_never_ends_holds_up_no_pager() {
        let Some(channel) = channel() else {
            return;
        };
        let turn = Turn::default();
        let (begun, has_begun) = mpsc::channel();
        thread::scope(|scope| {
            let (end, is_ended) = mpsc::channel::<()>();
            scope.spawn(|| {
                turn.read(move || {
                    begun.send(()).unwrap();
                    // Until the other end is dropped, also by a failure.
                    let _ = is_ended.recv();
                })
            });
            has_begun.recv().unwrap();
            turn.leave_to(&channel);
            turn.wait_for_read(Instant::now());
            assert!(turn.is_left());
            drop(end);
        });
        assert_eq!(turn.read(|| ()), None);
        drop(channel);
        assert_eq!(turn.read(|| ()), Some(()));
    }

    /// Kind: a state that a panic leaves as it is, and for whose end others wait.
    #[test]
    fn a_read_that_panics_has_ended() {
        let turn = Turn::default();
        let read = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            turn.read(|| panic!("the test's"))
        }));
        assert!(read.is_err());
        assert!(!turn.lock().is_reading);
    }

    /// Kind: two readers of one userfaultfd.
    #[test]
    fn a_pager_waits_until_a_read_has_ended() {
        let Some(channel) = channel() else {
            return;
        };
        let turn = Turn::default();
        let (begun, has_begun) = mpsc::channel();
        let has_read = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                turn.read(|| {
                    begun.send(()).unwrap();
                    while !turn.is_left() {
                        thread::yield_now();
                    }
                    // So long that a pager that did not wait would go on meanwhile.
                    thread::sleep(Duration::from_millis(20));
                    has_read.store(true, Ordering::SeqCst);
                })
            });
            has_begun.recv().unwrap();
            turn.leave_to(&channel);
            turn.wait_for_read(Instant::now() + PATIENCE);
            assert!(has_read.load(Ordering::SeqCst));
        });
    }
}
