//! Synchronises copies through the service mapping with its closing.

use crossbeam_utils::CachePadded;

use crate::page::PageIndex;
use crate::sync::{AtomicUsize, Ordering, yield_now};

/// Enough that threads which copy to different pages seldom share a counter; a power of two.
const SHARDS: usize = if cfg!(loom) { 2 } else { 16 };
/// The mapping is closed. The other bits count the copies in progress.
const CLOSED: usize = 1 << (usize::BITS - 1);

/// The number of copies in progress, on a separate cache line.
type Copies = CachePadded<AtomicUsize>;

/// Keeps the service mapping unchanged while copies are in progress: a copy that met a mapping being
/// closed would end the process.
///
/// A read-write lock would do the same, but each copy by each thread would write to the same cache
/// line.
#[derive(Debug)]
pub(super) struct ServiceGate {
    copies: Box<[Copies; SHARDS]>,
}

/// The service mapping stays unchanged for as long as this value lives.
pub(super) struct Passage<'gate>(&'gate Copies);

impl ServiceGate {
    pub(super) fn new() -> Self {
        Self {
            copies: Box::new(std::array::from_fn(|_| Copies::new(AtomicUsize::new(0)))),
        }
    }

    /// Begins a copy to or from `page`; `None` if the mapping is closed.
    #[inline]
    pub(super) fn pass(&self, page: PageIndex) -> Option<Passage<'_>> {
        let copies = &self.copies[page.as_usize() % SHARDS];
        // Acquire: a thread that finds the gate open again also finds the mapping accessible.
        let before = copies.fetch_add(1, Ordering::Acquire);
        let passage = Passage(copies);
        (before & CLOSED == 0).then_some(passage)
    }

    /// Prevents new copies and waits until those in progress have ended. They do not block: the service
    /// mapping has no userfaultfd.
    pub(super) fn close(&self) {
        for copies in self.copies.iter() {
            copies.fetch_or(CLOSED, Ordering::Relaxed);
        }
        for copies in self.copies.iter() {
            // Acquire: the copies that ended precede the caller's change of the mapping.
            while copies.load(Ordering::Acquire) != CLOSED {
                yield_now();
            }
        }
    }

    /// Permits copies again.
    pub(super) fn open(&self) {
        for copies in self.copies.iter() {
            // Release: the caller's change of the mapping precedes the copies that begin.
            copies.fetch_and(!CLOSED, Ordering::Release);
        }
    }
}

impl Drop for Passage<'_> {
    #[inline]
    fn drop(&mut self) {
        // Release: the copy precedes the change by a thread that sees the decreased count.
        self.0.fetch_sub(1, Ordering::Release);
    }
}

#[cfg(test)]
#[cfg(loom)]
mod loom_tests {
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    #[test]
    fn loom_no_copy_runs_while_the_mapping_is_closed() {
        loom::model(|| {
            // loom reports an access to the cell during a concurrent change.
            let shared = Arc::new((ServiceGate::new(), UnsafeCell::new(true)));
            let copying: Vec<_> = (0..2)
                .map(|page| {
                    let shared = Arc::clone(&shared);
                    thread::spawn(move || {
                        let (gate, is_accessible) = &*shared;
                        if let Some(_passage) = gate.pass(PageIndex(page)) {
                            // SAFETY: loom checks that no thread changes the value meanwhile.
                            is_accessible.with(|value| assert!(unsafe { *value }));
                        }
                    })
                })
                .collect();
            let (gate, is_accessible) = &*shared;
            gate.close();
            // SAFETY: loom checks that this is the only access.
            is_accessible.with_mut(|value| unsafe { *value = false });
            // SAFETY: as above.
            is_accessible.with_mut(|value| unsafe { *value = true });
            gate.open();
            for thread in copying {
                thread.join().unwrap();
            }
        });
    }
}
