//! What a VM's thread waits for beside its faults.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::io::Errno;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};

use super::VmError;

/// A descriptor that becomes readable at intervals.
pub(super) struct Ticks(pub(super) OwnedFd);

impl Ticks {
    pub(super) fn every(interval: Duration) -> Result<Self, VmError> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let ticks = Self(timerfd_create(TimerfdClockId::Monotonic, flags).map_err(VmError::Wait)?);
        ticks.set(interval)?;
        Ok(ticks)
    }

    pub(super) fn set(&self, interval: Duration) -> Result<(), VmError> {
        let interval = Timespec::try_from(interval).map_err(|_| VmError::Wait(Errno::INVAL))?;
        let when = Itimerspec {
            it_interval: interval,
            it_value: interval,
        };
        let set = timerfd_settime(&self.0, TimerfdTimerFlags::empty(), &when);
        set.map(drop).map_err(VmError::Wait)
    }

    /// Makes it unreadable until the next tick.
    pub(super) fn take(&self) {
        // Fails if there was no tick.
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

/// The connection in an epoll instance of its own: its interest changes with a native VMM's output, and the
/// pager's instance watches descriptors for reading only.
pub(super) struct Watched<'a> {
    pub(super) poll: OwnedFd,
    stream: &'a UnixStream,
    interest: EventFlags,
}

impl<'a> Watched<'a> {
    pub(super) fn new(stream: &'a UnixStream) -> Result<Self, VmError> {
        let failed =
            |error: io::Error| VmError::Wait(Errno::from_io_error(&error).unwrap_or(Errno::IO));
        stream.set_nonblocking(true).map_err(failed)?;
        let poll = epoll::create(CreateFlags::CLOEXEC).map_err(VmError::Wait)?;
        let interest = EventFlags::IN;
        epoll::add(&poll, stream, EventData::new_u64(0), interest).map_err(VmError::Wait)?;
        Ok(Self {
            poll,
            stream,
            interest,
        })
    }

    pub(super) fn set_interest(&mut self, wanted: EventFlags) -> Result<(), VmError> {
        if wanted != self.interest {
            let data = EventData::new_u64(0);
            epoll::modify(&self.poll, self.stream, data, wanted).map_err(VmError::Wait)?;
            self.interest = wanted;
        }
        Ok(())
    }

    /// What the connection is ready for now.
    pub(super) fn ready(&self) -> Result<EventFlags, VmError> {
        let mut events = Vec::with_capacity(1);
        let now = Timespec::default();
        match epoll::wait(
            &self.poll,
            rustix::buffer::spare_capacity(&mut events),
            Some(&now),
        ) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(VmError::Wait(errno)),
        }
        Ok(events
            .first()
            .map_or(EventFlags::empty(), |event| event.flags))
    }
}
