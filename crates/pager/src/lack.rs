//! What a channel remembers of a message that stays unread for lack of a descriptor.

use std::sync::atomic::{AtomicBool, Ordering};

/// Whether a message of a channel stayed unread.
#[derive(Debug, Default)]
pub(crate) struct Unread(AtomicBool);

impl Unread {
    /// Records that one did. Returns whether that is news.
    pub(crate) fn begin(&self) -> bool {
        !self.0.swap(true, Ordering::AcqRel)
    }

    /// Records that none does any more.
    pub(crate) fn end(&self) {
        if self.is_some() {
            self.0.store(false, Ordering::Release);
        }
    }

    pub(crate) fn is_some(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}
