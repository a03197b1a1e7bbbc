//! Pages that came with a faulting one, on their way to the populator.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError, TryLockError};

use pagetide_memory::GuestRange;

use crate::ranges::{Inserted, Ranges};

/// How far the queue's life has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// It has no populator, so no ranges are kept.
    Free,
    /// Ranges come in and are taken.
    Open,
    /// What is there is still taken; nothing comes in.
    Draining,
    /// Nothing comes in and nothing is taken any more, but the populator has not gone yet.
    Closed,
}

#[derive(Debug)]
struct Queue {
    phase: Phase,
    ranges: Ranges,
    /// Whether the populator sleeps until something changes.
    is_asleep: bool,
    counts: QueueCounts,
}

/// What came in and what became of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct QueueCounts {
    pub(crate) ranges: u64,
    pub(crate) merged: u64,
    pub(crate) dropped: u64,
    pub(crate) dropped_bytes: u64,
}

/// A bounded queue of what has been installed. Whatever finds no room is dropped and counted: the
/// guest then takes a fault there that KVM resolves by itself, and nothing else happens.
#[derive(Debug)]
pub(crate) struct Arrivals {
    /// Whether to bother at all; the phase, under the lock, is what counts.
    is_open: AtomicBool,
    queue: Mutex<Queue>,
    changed: Condvar,
    /// Dropped because the lock was taken.
    missed: AtomicU64,
    missed_bytes: AtomicU64,
}

impl Default for Arrivals {
    fn default() -> Self {
        Self {
            is_open: AtomicBool::new(false),
            queue: Mutex::new(Queue {
                phase: Phase::Free,
                ranges: Ranges::new(0, 0),
                is_asleep: false,
                counts: QueueCounts::default(),
            }),
            changed: Condvar::new(),
            missed: AtomicU64::new(0),
            missed_bytes: AtomicU64::new(0),
        }
    }
}

impl Arrivals {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        // Nothing panics under the lock.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes ranges from now on, at most `most` at a time, which grow together up to `batch_bytes`.
    /// False if it has a populator.
    pub(crate) fn open(&self, most: usize, batch_bytes: u64) -> bool {
        let mut queue = self.lock();
        if queue.phase != Phase::Free {
            return false;
        }
        *queue = Queue {
            phase: Phase::Open,
            ranges: Ranges::new(most, batch_bytes),
            is_asleep: false,
            counts: QueueCounts::default(),
        };
        self.missed.store(0, Ordering::Relaxed);
        self.missed_bytes.store(0, Ordering::Relaxed);
        self.is_open.store(true, Ordering::Relaxed);
        true
    }

    /// Takes no more ranges, and gives none.
    ///
    /// Also called when the pager stops, whoever the populator is.
    pub(crate) fn close(&self) {
        self.leave_open(Phase::Closed);
    }

    /// Takes no more ranges, and gives those that there are.
    pub(crate) fn drain(&self) {
        self.leave_open(Phase::Draining);
    }

    fn leave_open(&self, phase: Phase) {
        self.is_open.store(false, Ordering::Relaxed);
        let mut queue = self.lock();
        if matches!(queue.phase, Phase::Free | Phase::Closed) {
            return;
        }
        queue.phase = phase;
        queue.is_asleep = false;
        drop(queue);
        self.changed.notify_all();
    }

    /// The populator has gone: another may come.
    pub(crate) fn release(&self) {
        self.close();
        self.lock().phase = Phase::Free;
    }

    /// Forgets what it has.
    pub(crate) fn clear(&self) {
        self.lock().ranges.clear();
    }

    #[inline]
    pub(crate) fn is_open(&self) -> bool {
        self.is_open.load(Ordering::Relaxed)
    }

    /// Hands over a range that was just installed. A thread that serves a fault never waits, not even
    /// for the lock: then the range is dropped and counted.
    pub(crate) fn give(&self, range: GuestRange) {
        let mut queue = match self.queue.try_lock() {
            Ok(queue) => queue,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => {
                self.missed.fetch_add(1, Ordering::Relaxed);
                self.missed_bytes
                    .fetch_add(range.bytes(), Ordering::Relaxed);
                return;
            }
        };
        if queue.phase != Phase::Open {
            return;
        }
        queue.counts.ranges += 1;
        match queue.ranges.insert(range) {
            Inserted::New => {}
            Inserted::Merged => queue.counts.merged += 1,
            Inserted::Full => {
                queue.counts.dropped += 1;
                queue.counts.dropped_bytes += range.bytes();
            }
        }
        // A system call only if somebody sleeps, and once only.
        if std::mem::take(&mut queue.is_asleep) {
            drop(queue);
            self.changed.notify_one();
        }
    }

    /// Waits until there is something to take. False if there never will be.
    pub(crate) fn wait(&self) -> bool {
        let mut queue = self.lock();
        loop {
            match (queue.phase, queue.ranges.is_empty()) {
                (Phase::Free | Phase::Closed, _) | (Phase::Draining, true) => return false,
                (Phase::Open | Phase::Draining, false) => return true,
                (Phase::Open, true) => {
                    queue.is_asleep = true;
                    queue = self
                        .changed
                        .wait(queue)
                        .unwrap_or_else(PoisonError::into_inner);
                }
            }
        }
    }

    /// Takes a range, if there is one.
    pub(crate) fn take(&self) -> Option<GuestRange> {
        let mut queue = self.lock();
        match queue.phase {
            Phase::Free | Phase::Closed => None,
            Phase::Open | Phase::Draining => queue.ranges.take(),
        }
    }

    /// What came in since it was opened.
    pub(crate) fn counts(&self) -> QueueCounts {
        let counts = self.lock().counts;
        let missed = self.missed.load(Ordering::Relaxed);
        QueueCounts {
            ranges: counts.ranges + missed,
            dropped: counts.dropped + missed,
            dropped_bytes: counts.dropped_bytes + self.missed_bytes.load(Ordering::Relaxed),
            ..counts
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, mpsc};
    use std::thread;
    use std::time::Duration;

    use pagetide_memory::GuestAddress;

    use super::*;

    fn page(index: u64) -> GuestRange {
        GuestRange::new(GuestAddress(index << 12), 4096).unwrap()
    }

    #[test]
    fn a_closed_queue_takes_and_gives_nothing() {
        let arrivals = Arrivals::default();
        arrivals.give(page(0));
        assert!(!arrivals.wait());
        assert_eq!(arrivals.take(), None);
        assert!(arrivals.open(4, 4096));
        assert!(!arrivals.open(4, 4096));
        arrivals.give(page(1));
        assert!(arrivals.wait());
        arrivals.close();
        assert!(!arrivals.wait());
        assert_eq!(arrivals.take(), None);
        arrivals.drain();
        assert!(!arrivals.wait(), "what is closed stays closed");
        assert_eq!(arrivals.counts().ranges, 1);
        assert!(!arrivals.open(4, 4096), "until its populator has gone");
        arrivals.release();
        assert!(arrivals.open(4, 4096));
        assert!(arrivals.take().is_none());
    }

    #[test]
    fn a_draining_queue_gives_what_it_has() {
        let arrivals = Arrivals::default();
        arrivals.open(4, 4096);
        arrivals.give(page(1));
        arrivals.drain();
        arrivals.give(page(3));
        assert!(arrivals.wait());
        assert_eq!(arrivals.take(), Some(page(1)));
        assert!(!arrivals.wait());
    }

    #[test]
    fn what_finds_no_room_is_counted() {
        let arrivals = Arrivals::default();
        arrivals.open(1, 8192);
        for index in [0, 2, 1, 4] {
            arrivals.give(page(index));
        }
        let expected = QueueCounts {
            ranges: 4,
            merged: 1,
            dropped: 2,
            dropped_bytes: 8192,
        };
        assert_eq!(arrivals.counts(), expected);
    }

    #[test]
    fn a_fault_does_not_wait_for_the_lock() {
        let arrivals = Arrivals::default();
        arrivals.open(4, 4096);
        let held = arrivals.lock();
        arrivals.give(page(0));
        drop(held);
        assert_eq!(arrivals.counts().dropped_bytes, 4096);
        assert_eq!(arrivals.take(), None);
    }

    #[test]
    fn no_range_is_slept_over() {
        let arrivals = Arc::new(Arrivals::default());
        arrivals.open(4, 4096);
        let taker = Arc::clone(&arrivals);
        let (send, receive) = mpsc::channel();
        thread::spawn(move || {
            while taker.wait() {
                let _ = send.send(taker.take());
            }
        });
        let soon = Duration::from_secs(5);
        // One by one, so that the taker is about to sleep whenever one comes.
        for index in 0..10_000 {
            let missed = arrivals.counts().dropped;
            arrivals.give(page(2 * index));
            if arrivals.counts().dropped > missed {
                continue;
            }
            assert_eq!(receive.recv_timeout(soon), Ok(Some(page(2 * index))));
        }
        arrivals.drain();
        receive.recv_timeout(soon).unwrap_err();
    }
}
