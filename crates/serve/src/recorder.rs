//! Recording the pages that a guest touches.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use pagetide_memory::{PageIndex, PageSize};
use pagetide_pager::{Fault, Observer};

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
}

impl Recorder {
    pub(crate) fn new() -> Self {
        Self {
            begun: Instant::now(),
            touches: Mutex::default(),
            last_us: AtomicU64::new(0),
            is_on: AtomicBool::new(true),
            start_us: AtomicU64::new(0),
        }
    }

    /// Begins a recording from nothing.
    pub(crate) fn restart(&self) {
        let now = self.now_us();
        self.start_us.store(now, Ordering::Relaxed);
        self.last_us.store(now, Ordering::Relaxed);
        let touches = self.touches.lock();
        touches.unwrap_or_else(PoisonError::into_inner).clear();
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

    /// Milliseconds since the last touch, or since the start.
    pub(crate) fn quiet_ms(&self) -> u64 {
        let now = self.now_us();
        now.saturating_sub(self.last_us.load(Ordering::Relaxed)) / 1000
    }
}

impl Observer for Recorder {
    fn touched(&self, fault: &Fault) {
        if !self.is_on.load(Ordering::Acquire) {
            return;
        }
        let now = self.now_us();
        self.last_us.store(now, Ordering::Relaxed);
        let at_us = now.saturating_sub(self.start_us.load(Ordering::Relaxed));
        let mut touches = self.touches.lock().unwrap_or_else(PoisonError::into_inner);
        if touches.len() < MOST_TOUCHES {
            let page = PageIndex(fault.gpa.0 >> RECORDED.shift());
            touches.push(Touch { page, at_us });
        }
    }
}
