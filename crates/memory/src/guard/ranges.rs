//! The list of all mappings of guest memory in this process.

use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::address::HostAddress;
use crate::range::HostRange;

/// An entry of the list. Entries are reused but never freed, so that a signal handler can walk the list
/// at any time.
#[derive(Debug)]
struct Entry {
    /// 0: the entry is free.
    start: AtomicUsize,
    end: AtomicUsize,
    next: *const Entry,
}

static FIRST: AtomicPtr<Entry> = AtomicPtr::new(ptr::null_mut());
/// Held while the list changes.
static CHANGES: Mutex<()> = Mutex::new(());

/// A range that is in the list for as long as this value lives.
#[derive(Debug)]
pub(crate) struct Listed(*const Entry);

// SAFETY: it is the address of an entry that is never freed; its fields are accessed by atomic
// operations only.
unsafe impl Send for Listed {}
// SAFETY: as above.
unsafe impl Sync for Listed {}

fn entries() -> impl Iterator<Item = &'static Entry> {
    let mut next = FIRST.load(Ordering::Acquire).cast_const();
    std::iter::from_fn(move || {
        // SAFETY: every pointer in the list is null or points to a leaked entry; its content was
        // written before the entry was linked (release, acquire), or is atomic.
        let entry = unsafe { next.as_ref() }?;
        next = entry.next;
        Some(entry)
    })
}

impl Listed {
    pub(crate) fn new(range: HostRange) -> Self {
        let _changes = CHANGES.lock().unwrap_or_else(PoisonError::into_inner);
        let (start, end) = (range.start().0, range.end().0);
        if let Some(free) = entries().find(|entry| entry.start.load(Ordering::Relaxed) == 0) {
            free.end.store(end, Ordering::Release);
            free.start.store(start, Ordering::Release);
            return Self(free);
        }
        let entry = Box::leak(Box::new(Entry {
            start: AtomicUsize::new(start),
            end: AtomicUsize::new(end),
            next: FIRST.load(Ordering::Relaxed),
        }));
        FIRST.store(entry, Ordering::Release);
        Self(entry)
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        let _changes = CHANGES.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: entries are never freed.
        let entry = unsafe { &*self.0 };
        entry.start.store(0, Ordering::Release);
    }
}

/// Whether `address` is in a mapping, guest or service, of a [`Region`](crate::Region) of this process,
/// or in a [`FileView`](crate::FileView). Async-signal-safe.
pub fn is_guest_memory(address: HostAddress) -> bool {
    entries().any(|entry| {
        let start = entry.start.load(Ordering::Acquire);
        let end = entry.end.load(Ordering::Acquire);
        // If the start has not changed, the end belongs to it: the end is written only while the start
        // is 0.
        start != 0
            && entry.start.load(Ordering::Acquire) == start
            && (start..end).contains(&address.0)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_listed_for_as_long_as_it_lives() {
        let range = |page: usize, pages: usize| {
            HostRange::new(HostAddress(page << 12), pages << 12).unwrap()
        };
        let is = |page: usize| is_guest_memory(HostAddress(page << 12));
        let (first, second) = (Listed::new(range(16, 2)), Listed::new(range(32, 1)));
        assert!(is(16) && is(17) && is(32));
        assert!(!is(15) && !is(18) && !is(31) && !is(0));
        drop(first);
        assert!(!is(16) && is(32));
        let third = Listed::new(range(48, 1));
        assert!(is(48) && !is(16));
        drop((second, third));
        assert!(!is(32) && !is(48));
    }
}
