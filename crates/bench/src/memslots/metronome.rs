//! Interrupts at a steady pace, on every processor, that do nothing: for an emulator that runs
//! several processors in one thread, and that goes on to the next one only when an interrupt comes.
//!
//! QEMU up to 8.0 with `-icount` gives the processor whose turn it is all instructions until the
//! next timer is due, and nothing to the others; with a tick of 4 ms and no other timers a processor
//! may stand still for tens of milliseconds. Each processor has a pace of its own: with one for all
//! the same processor may win each time.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

use rustix::thread::{CpuSet, sched_getaffinity};

const PERF_TYPE_SOFTWARE: u64 = 1;
const PERF_COUNT_SW_CPU_CLOCK: u64 = 0;
const PERF_FLAG_FD_CLOEXEC: u64 = 1 << 3;
/// Bytes of the first version of `struct perf_event_attr`.
const ATTRIBUTES_BYTES: u64 = 64;

/// Interrupts on every processor that this thread may use, until it is dropped.
#[derive(Debug)]
pub(super) struct Metronome {
    _events: Vec<OwnedFd>,
}

impl Metronome {
    /// One interrupt every `period_ns` nanoseconds on the first processor, and 37 % of that longer
    /// for each further one. They come from the kernel's cpu-clock event, whose samples nobody
    /// reads; needs the right to count events of a whole processor (CAP_PERFMON, or root).
    ///
    /// # Errors
    /// The kernel's answer.
    pub(super) fn start(period_ns: u64) -> io::Result<Self> {
        let set = sched_getaffinity(None)?;
        let cpus = (0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu));
        let events = (0..).zip(cpus).map(|(index, cpu)| {
            let period = period_ns + period_ns * 37 / 100 * index;
            // type (low half) and size, config, sample_period; the rest is 0, so that there is
            // nothing to store with a sample.
            let mut attributes = [0u64; 8];
            attributes[0] = PERF_TYPE_SOFTWARE | ATTRIBUTES_BYTES << 32;
            attributes[1] = PERF_COUNT_SW_CPU_CLOCK;
            attributes[2] = period;
            // SAFETY: perf_event_open reads as many bytes at the pointer as the structure says,
            // 64, which the array has, and otherwise takes numbers.
            let fd = unsafe {
                libc::syscall(
                    libc::SYS_perf_event_open,
                    attributes.as_ptr(),
                    -1,
                    cpu,
                    -1,
                    PERF_FLAG_FD_CLOEXEC,
                )
            };
            let fd = i32::try_from(fd).ok().filter(|fd| *fd >= 0);
            let fd = fd.ok_or_else(io::Error::last_os_error)?;
            // SAFETY: the kernel has just made this descriptor, and nobody else has it.
            Ok(unsafe { OwnedFd::from_raw_fd(fd) })
        });
        Ok(Self {
            _events: events.collect::<io::Result<_>>()?,
        })
    }
}
