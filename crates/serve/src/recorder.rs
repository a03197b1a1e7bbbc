//! Recording the pages that a guest touches.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use pagetide_memory::{GuestAddress, PageIndex, PageSize};
use pagetide_pager::{Fault, Observer};
use rustix::time::{ClockId, clock_gettime};

use crate::working_set::Touch;

/// The page size of recorded working sets. A touch of a huge page is one of its first small page.
pub(crate) const RECORDED: PageSize = PageSize::Size4K;

/// The most pages of one recording: 16 GiB of memory. Later touches are not recorded.
const MOST_TOUCHES: usize = 4 << 20;

/// Records the first touches of a VM, in order.
#[derive(Debug)]
pub(crate) struct Recorder {
    begun: Instant,
    touches: Mutex<Vec<Touch>>,
    /// Microseconds from `begun` to the last touch.
    last_us: AtomicU64,
    /// Whether touches are recorded.
    is_on: AtomicBool,
    /// Microseconds from `begun` to the start of the recording.
    start_us: AtomicU64,
    /// Whether a file counts this recording.
    is_counted: AtomicBool,
}

/// Microseconds of the clock that all processes have in common, until the machine restarts.
fn clock_us() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    let nanoseconds = u64::try_from(now.tv_nsec).unwrap_or(0);
    seconds * 1_000_000 + nanoseconds / 1000
}

impl Recorder {
    pub(crate) fn new() -> Self {
        Self {
            begun: Instant::now(),
            touches: Mutex::default(),
            last_us: AtomicU64::new(0),
            is_on: AtomicBool::new(true),
            start_us: AtomicU64::new(0),
            is_counted: AtomicBool::new(false),
        }
    }

    /// Goes on with the recording of a former server that has begun at this [`Self::since_us`].
    pub(crate) fn continued(since_us: u64) -> Self {
        let before = Duration::from_micros(clock_us().saturating_sub(since_us));
        let new = Self::new();
        let begun = new.begun.checked_sub(before).unwrap_or(new.begun);
        let continued = Self { begun, ..new };
        continued
            .last_us
            .store(continued.now_us(), Ordering::Relaxed);
        continued.is_counted.store(true, Ordering::Relaxed);
        continued
    }

    /// When it has begun, by the clock that all processes have in common.
    pub(crate) fn since_us(&self) -> u64 {
        clock_us().saturating_sub(self.now_us())
    }

    /// Whether a file that is written now counts this recording: the first one does.
    pub(crate) fn is_counted_now(&self) -> bool {
        !self.is_counted.swap(true, Ordering::Relaxed)
    }

    /// Begins a recording from nothing.
    pub(crate) fn restart(&self) {
        let now = self.now_us();
        self.start_us.store(now, Ordering::Relaxed);
        self.last_us.store(now, Ordering::Relaxed);
        let touches = self.touches.lock();
        touches.unwrap_or_else(PoisonError::into_inner).clear();
        self.is_counted.store(false, Ordering::Relaxed);
        self.is_on.store(true, Ordering::Release);
    }

    /// Records nothing more.
    pub(crate) fn stop(&self) {
        self.is_on.store(false, Ordering::Release);
    }

    fn now_us(&self) -> u64 {
        u64::try_from(self.begun.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    /// The touches so far; a page may be among them twice.
    pub(crate) fn touches(&self) -> Vec<Touch> {
        let touches = self.touches.lock();
        touches.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The number of these touches.
    pub(crate) fn count(&self) -> usize {
        let touches = self.touches.lock();
        touches.unwrap_or_else(PoisonError::into_inner).len()
    }

    /// The time since the last touch, or since the start.
    pub(crate) fn quiet(&self) -> Duration {
        let last = self.last_us.load(Ordering::Relaxed);
        Duration::from_micros(self.now_us().saturating_sub(last))
    }

    /// Records a touch.
    pub(crate) fn record(&self, gpa: GuestAddress) {
        if !self.is_on.load(Ordering::Acquire) {
            return;
        }
        let now = self.now_us();
        self.last_us.store(now, Ordering::Relaxed);
        let at_us = now.saturating_sub(self.start_us.load(Ordering::Relaxed));
        let mut touches = self.touches.lock().unwrap_or_else(PoisonError::into_inner);
        if touches.len() < MOST_TOUCHES {
            let page = PageIndex(gpa.0 >> RECORDED.shift());
            touches.push(Touch { page, at_us });
        }
    }
}

impl Observer for Recorder {
    fn touched(&self, fault: &Fault) {
        self.record(fault.gpa);
    }
}
