//! The descriptor of a pager: one epoll instance for its userfaultfds, its deadlines and its end.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::io::Errno;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create, timerfd_settime,
};

use crate::channel::Channel;
use crate::log_limit::log_limited;

/// The token of the descriptor that ends waits.
pub(crate) const INTERRUPT: u64 = u64::MAX;
/// The token of the timer for deadlines.
pub(crate) const TIMER: u64 = u64::MAX - 1;
/// The token for what a thread has stored for the threads that serve: faults, and content.
pub(crate) const DEFERRED: u64 = u64::MAX - 2;

/// The token of the first descriptor of other code; those after it have lower ones.
const OTHERS: u64 = u64::MAX - 3;

/// The token of another descriptor, by the number that its owner gave it.
pub(crate) fn token_of_other(number: u32) -> u64 {
    OTHERS - u64::from(number)
}

/// The number of another descriptor, by its token.
pub(crate) fn other(token: u64) -> Option<u32> {
    u32::try_from(OTHERS.checked_sub(token)?).ok()
}

/// A descriptor that is readable when there is work.
///
/// Userfaultfds are edge-triggered: each arrival of messages is reported once, to one of the waiting
/// threads. That thread reads until no message is left.
#[derive(Debug)]
pub(crate) struct Poller {
    epoll: OwnedFd,
    timer: OwnedFd,
    setting_timer: Mutex<()>,
    interrupt: OwnedFd,
    kept: OwnedFd,
    next_token: AtomicU64,
    /// The number of threads that currently interrupt waits: while there is one, the descriptor is
    /// readable.
    interrupts: Mutex<usize>,
}

impl Poller {
    pub(crate) fn new() -> Result<Self, Errno> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let timer = timerfd_create(
            TimerfdClockId::Monotonic,
            TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK,
        )?;
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let interrupt = eventfd(0, flags)?;
        let kept = eventfd(0, flags)?;
        let edge = EventFlags::IN | EventFlags::ET;
        epoll::add(&epoll, &timer, EventData::new_u64(TIMER), edge)?;
        epoll::add(&epoll, &kept, EventData::new_u64(DEFERRED), edge)?;
        // Level-triggered: reported to all waiting threads as long as it is readable.
        epoll::add(
            &epoll,
            &interrupt,
            EventData::new_u64(INTERRUPT),
            EventFlags::IN,
        )?;
        Ok(Self {
            epoll,
            timer,
            setting_timer: Mutex::new(()),
            interrupt,
            kept,
            next_token: AtomicU64::new(0),
            interrupts: Mutex::new(0),
        })
    }

    pub(crate) fn next_token(&self) -> u64 {
        self.next_token.fetch_add(1, Ordering::Relaxed)
    }

    /// Adds a channel; does nothing if it is already there.
    pub(crate) fn add(&self, channel: &Channel) -> Result<(), Errno> {
        let data = EventData::new_u64(channel.token);
        match epoll::add(
            &self.epoll,
            &channel.uffd,
            data,
            EventFlags::IN | EventFlags::ET,
        ) {
            Ok(()) | Err(Errno::EXIST) => Ok(()),
            Err(errno) => Err(errno),
        }
    }

    /// Adds a descriptor of other code, which is reported as long as it is readable.
    pub(crate) fn add_other(&self, fd: BorrowedFd<'_>, number: u32) -> Result<(), Errno> {
        let data = EventData::new_u64(token_of_other(number));
        epoll::add(&self.epoll, fd, data, EventFlags::IN)
    }

    pub(crate) fn remove_other(&self, fd: BorrowedFd<'_>) {
        // Fails if it was never added.
        let _ = epoll::delete(&self.epoll, fd);
    }

    pub(crate) fn remove(&self, channel: &Channel) {
        // Fails if the channel was never added.
        let _ = epoll::delete(&self.epoll, &channel.uffd);
    }

    /// Reports the channel again if it has messages or stored faults, for a reader that stops before it has handled all of
    /// them.
    pub(crate) fn report_again(&self, channel: &Channel) {
        let data = EventData::new_u64(channel.token);
        let flags = EventFlags::IN | EventFlags::ET;
        let _ = epoll::modify(&self.epoll, &channel.uffd, data, flags);
        // The channel's descriptor does not report those.
        if channel.has_deferred() {
            self.report_deferred();
        }
    }

    /// Waits for ready descriptors, for `timeout` (`None`: forever). A signal ends the wait without a
    /// result.
    pub(crate) fn wait(
        &self,
        events: &mut Vec<Event>,
        timeout: Option<Duration>,
    ) -> Result<(), Errno> {
        let timeout = timeout.map(timespec);
        match epoll::wait(
            &self.epoll,
            rustix::buffer::spare_capacity(events),
            timeout.as_ref(),
        ) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(errno),
        }
    }

    /// Sets the timer to expire after the result of `after`, which is called under the lock: of two
    /// threads with a deadline each, the later deadline does not replace the earlier one.
    pub(crate) fn set_timer(&self, after: impl FnOnce() -> Option<Duration>) {
        let locked = self.setting_timer.lock();
        let _setting = locked.unwrap_or_else(std::sync::PoisonError::into_inner);
        let Some(after) = after() else {
            return;
        };
        // Zero would disarm the timer.
        let value = timespec(after.max(Duration::from_nanos(1)));
        let interval = timespec(Duration::ZERO);
        let when = Itimerspec {
            it_interval: interval,
            it_value: value,
        };
        if let Err(errno) = timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &when) {
            log_limited!(error, %errno, "setting a pager's timer");
        }
    }

    /// Reports that a channel has stored faults, or that content was delivered.
    pub(crate) fn report_deferred(&self) {
        write_one(&self.kept);
    }

    /// Ends all waits until [`Self::end_interrupt`].
    pub(crate) fn interrupt(&self) {
        let mut interrupts = self.lock_interrupts();
        *interrupts += 1;
        write_one(&self.interrupt);
    }

    pub(crate) fn end_interrupt(&self) {
        let mut interrupts = self.lock_interrupts();
        *interrupts -= 1;
        if *interrupts == 0 {
            let mut count = [0; 8];
            let _ = rustix::io::read(&self.interrupt, &mut count);
        }
    }

    fn lock_interrupts(&self) -> std::sync::MutexGuard<'_, usize> {
        let locked = self.interrupts.lock();
        locked.unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl AsFd for Poller {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

fn write_one(eventfd: &OwnedFd) {
    // Fails only if the counter is at its maximum, and then the descriptor is already readable.
    let _ = rustix::io::write(eventfd, &1_u64.to_ne_bytes());
}

fn timespec(duration: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(duration.subsec_nanos()),
    }
}
