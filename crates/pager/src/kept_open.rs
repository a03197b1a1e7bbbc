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
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::Builder;

use pagetide_uapi::userfaultfd::{Event, EventBuffer, Userfaultfd};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;

use crate::channel::{Channel, Role};

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

/// A userfaultfd that stays open.
struct Kept {
    channel: Arc<Channel>,
    /// The pager's channel of the same userfaultfd, if it serves memory again. Locked while messages are read.
    again: Mutex<Weak<Channel>>,
    /// Of the thread that reads, if there is one: readable when that is to end.
    end: Option<OwnedFd>,
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
    if all.iter().any(|kept| Arc::ptr_eq(&kept.channel, channel)) {
        return;
    }
    all.push(Kept::new(channel));
}

/// Closes those whose processes have gone. Called whenever the paging of a region ends.
pub(crate) fn close_gone() {
    let gone: Vec<_> = lock()
        .extract_if(.., |kept| kept.channel.is_gone())
        .collect();
    for kept in gone {
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
    for kept in same {
        *kept.lock_again() = Arc::downgrade(channel);
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
            again: Mutex::default(),
            end: (channel.has_events && has_room)
                .then(|| eventfd(0, EventfdFlags::CLOEXEC).ok())
                .flatten(),
        });
        if kept.end.is_some() {
            READERS.fetch_add(1, Ordering::Relaxed);
            let its = Reading(Arc::clone(&kept));
            let thread = Builder::new().name("pt-kept-open".into());
            // If none starts, the process waits if it discards memory, as it would without this thread.
            let _ = thread.spawn(move || its.read_events());
        }
        kept
    }

    fn lock_again(&self) -> MutexGuard<'_, Weak<Channel>> {
        self.again.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The thread: reads events, and forgets faults, whose threads sleep on.
    fn read_events(&self, end: &OwnedFd) {
        let mut buffer = EventBuffer::new(EVENTS_AT_ONCE);
        loop {
            let is_paged = self.is_paged(&self.lock_again());
            let mut polled = vec![PollFd::new(end, PollFlags::IN)];
            if !is_paged {
                polled.push(PollFd::new(&*self.channel.uffd, PollFlags::IN));
            }
            match poll(&mut polled, is_paged.then_some(&LOOK_AGAIN)) {
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
            if !seen.contains(PollFlags::IN) || !self.read_some(&mut buffer) {
                return;
            }
        }
    }

    /// Whether a pager reads the messages: another region's, which has pages by this userfaultfd, or that which serves
    /// memory by it again.
    fn is_paged(&self, again: &Weak<Channel>) -> bool {
        // Nobody pages a child, which has the pages that its parent had.
        let is_shared = self.channel.role != Role::Child && !self.channel.all_spans().is_empty();
        is_shared || again.strong_count() > 0
    }

    /// Reads what there is. Children that were forked are kept open, too. False: nothing can be read any more.
    fn read_some(&self, buffer: &mut EventBuffer) -> bool {
        let mut children = Vec::new();
        let again = self.lock_again();
        if self.is_paged(&again) {
            return true;
        }
        let read = self.channel.read(buffer, &mut Vec::new(), |_, event| {
            if let Event::Fork { descriptor } = event
                && let Ok(raw) = RawFd::try_from(descriptor)
            {
                // SAFETY: from_raw_fd requires an open descriptor without another owner: the kernel created it for the
                // reader of this message, and the message is read once.
                children.push(unsafe { OwnedFd::from_raw_fd(raw) });
            }
        });
        drop(again);
        for child in children {
            keep_open(&Arc::new(self.channel.child_without_pages(child)));
        }
        if let Err(error) = &read {
            tracing::error!(%error, "reading the events of a userfaultfd that stays open");
        }
        // A channel that was handed over has no messages for this process.
        read.is_ok() && !self.channel.is_handed_over()
    }
}
