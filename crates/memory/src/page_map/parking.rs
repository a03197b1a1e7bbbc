//! Threads that sleep until a page is settled.

use std::sync::PoisonError;
use std::time::Duration;

use crossbeam_utils::CachePadded;

use crate::page::PageIndex;
use crate::sync::{AtomicU64, Condvar, Mutex, MutexGuard, Ordering};

/// Enough that threads waiting for different pages seldom share one; a power of two.
const SHARDS: usize = if cfg!(loom) { 2 } else { 64 };

/// A set of sleeping threads, on separate cache lines.
#[derive(Debug)]
struct Shard {
    lock: Mutex<()>,
    wakeup: Condvar,
}

/// Sets of sleeping threads; each page belongs to one set, by its index.
#[derive(Debug)]
pub(super) struct Parking {
    shards: Box<[CachePadded<Shard>; SHARDS]>,
    /// The number of calls of `notify_all`. Each shard's lock is taken after the change.
    epoch: AtomicU64,
}

impl Default for Parking {
    fn default() -> Self {
        Self {
            shards: Box::new(std::array::from_fn(|_| {
                CachePadded::new(Shard {
                    lock: Mutex::new(()),
                    wakeup: Condvar::new(),
                })
            })),
            epoch: AtomicU64::new(0),
        }
    }
}

impl Parking {
    fn shard(&self, page: PageIndex) -> &Shard {
        // Neighbouring pages, which are often claimed in one run, belong to different shards.
        &self.shards[page.as_usize() % SHARDS]
    }

    /// Locks the page's shard: while the lock is held, no [`Parking::notify`] for the page completes
    /// unless the holder sleeps.
    pub(super) fn lock(&self, page: PageIndex) -> Locked<'_> {
        let shard = self.shard(page);
        // The lock protects no data, so a thread that panicked with it has corrupted nothing.
        Locked {
            shard,
            guard: Some(shard.lock.lock().unwrap_or_else(PoisonError::into_inner)),
        }
    }

    /// Wakes every thread that sleeps in the page's shard.
    pub(super) fn notify(&self, page: PageIndex) {
        self.shard(page).notify();
    }

    /// The number of calls of [`Parking::notify_all`].
    pub(super) fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    /// Begins the next epoch and wakes every thread.
    pub(super) fn notify_all(&self) {
        self.epoch.fetch_add(1, Ordering::AcqRel);
        for shard in self.shards.iter() {
            shard.notify();
        }
    }
}

impl Shard {
    fn notify(&self) {
        drop(self.lock.lock().unwrap_or_else(PoisonError::into_inner));
        self.wakeup.notify_all();
    }
}

/// A locked shard.
pub(super) struct Locked<'shard> {
    shard: &'shard Shard,
    /// `None` only while the thread sleeps.
    guard: Option<MutexGuard<'shard, ()>>,
}

impl Locked<'_> {
    /// Sleeps until a notification, until `timeout`, or until a spurious wake-up. The lock is held
    /// again on return.
    pub(super) fn sleep(&mut self, timeout: Duration) {
        if let Some(guard) = self.guard.take() {
            let (guard, _) = self
                .shard
                .wakeup
                .wait_timeout(guard, timeout)
                .unwrap_or_else(PoisonError::into_inner);
            self.guard = Some(guard);
        }
    }
}
