//! Userfaultfds that stay open when their memory's paging has ended.
//!
//! Some missing pages could not be marked as lost: the kernel has no `UFFDIO_POISON` (before Linux 6.6), or refused
//! it. While the userfaultfd is open, a thread that touches such a page sleeps; once it was closed, the thread would
//! read zeroes in place of content. A userfaultfd of a process that has gone is closed at the next occasion, so that
//! what stays is bounded by the processes that live.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::channel::Channel;

static KEPT: Mutex<Vec<Arc<Channel>>> = Mutex::new(Vec::new());

fn lock() -> MutexGuard<'static, Vec<Arc<Channel>>> {
    KEPT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Keeps a userfaultfd open as long as its process lives; one of this process for ever.
pub(crate) fn keep_open(channel: &Arc<Channel>) {
    let mut kept = lock();
    if kept.iter().all(|there| !Arc::ptr_eq(there, channel)) {
        kept.push(Arc::clone(channel));
    }
    drop(kept);
    close_gone();
}

/// Closes those whose processes have gone. Called whenever the paging of a region ends.
pub(crate) fn close_gone() {
    let gone: Vec<_> = lock().extract_if(.., |kept| kept.is_gone()).collect();
    // Not under the lock.
    drop(gone);
}

/// How many are open.
pub fn kept_open() -> usize {
    lock().len()
}
