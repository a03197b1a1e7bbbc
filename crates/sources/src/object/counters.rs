//! What reading an object has cost.

#[cfg(feature = "objects")]
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Totals of one open object since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ObjectCounters {
    /// GETs that were sent, hedges and retries included.
    pub gets: u64,
    /// GETs that were sent because an earlier one had not answered yet.
    pub hedges: u64,
    /// Hedges that answered first.
    pub hedges_won: u64,
    /// Attempts after a failed one.
    pub retries: u64,
    /// Bytes of bodies that were received, also of answers that were not used.
    pub bytes: u64,
    /// Blocks that were found in memory.
    pub memory_hits: u64,
    /// Blocks that were found in the disk cache.
    pub disk_hits: u64,
    /// Blocks that were neither in memory nor in the disk cache.
    pub misses: u64,
    /// Files of the disk cache that were damaged, and removed.
    pub disk_damaged: u64,
    /// Blocks that were not written to the disk cache, because the disk was slow, full or read-only.
    pub disk_skipped: u64,
}

impl ObjectCounters {
    /// The sum of both.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self {
            gets: self.gets + other.gets,
            hedges: self.hedges + other.hedges,
            hedges_won: self.hedges_won + other.hedges_won,
            retries: self.retries + other.retries,
            bytes: self.bytes + other.bytes,
            memory_hits: self.memory_hits + other.memory_hits,
            disk_hits: self.disk_hits + other.disk_hits,
            misses: self.misses + other.misses,
            disk_damaged: self.disk_damaged + other.disk_damaged,
            disk_skipped: self.disk_skipped + other.disk_skipped,
        }
    }
}

/// The totals while they grow.
#[cfg(feature = "objects")]
#[derive(Debug, Default)]
pub(crate) struct Counting {
    pub(crate) gets: AtomicU64,
    pub(crate) hedges: AtomicU64,
    pub(crate) hedges_won: AtomicU64,
    pub(crate) retries: AtomicU64,
    pub(crate) bytes: AtomicU64,
    pub(crate) memory_hits: AtomicU64,
    pub(crate) disk_hits: AtomicU64,
    pub(crate) misses: AtomicU64,
    pub(crate) disk_damaged: AtomicU64,
    pub(crate) disk_skipped: AtomicU64,
}

#[cfg(feature = "objects")]
impl Counting {
    pub(crate) fn add(counter: &AtomicU64, number: u64) {
        counter.fetch_add(number, Relaxed);
    }

    pub(crate) fn totals(&self) -> ObjectCounters {
        ObjectCounters {
            gets: self.gets.load(Relaxed),
            hedges: self.hedges.load(Relaxed),
            hedges_won: self.hedges_won.load(Relaxed),
            retries: self.retries.load(Relaxed),
            bytes: self.bytes.load(Relaxed),
            memory_hits: self.memory_hits.load(Relaxed),
            disk_hits: self.disk_hits.load(Relaxed),
            misses: self.misses.load(Relaxed),
            disk_damaged: self.disk_damaged.load(Relaxed),
            disk_skipped: self.disk_skipped.load(Relaxed),
        }
    }
}
