//! Children that a process has forked: copies of its memory, which nobody pages.
//!
//! A child's missing pages are missing in the child, too. As long as its userfaultfd is open, they fault; once
//! it is closed, they read as zeroes. So the pager keeps it, and answers each fault with poison.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use pagetide_memory::PageSize;
use pagetide_uapi::userfaultfd::{InstallError, UserRange, Wake};

use crate::channel::{Channel, Role, Span};
use crate::others::end_child;
use crate::pager::Pager;

/// The children of one pager that live at once and have their missing pages poisoned one by one. Descriptors are
/// few, and a client of a server decides how often it forks.
const MAX_CHILDREN: usize = 16;

impl Pager {
    /// Takes over a child that a process with these spans has forked.
    pub(crate) fn adopt_child(&self, parent: &Channel, spans: &[Span], fd: OwnedFd) {
        let uffd = Arc::new(parent.uffd.of_child(fd));
        let token = self.poller.next_token();
        let child = Arc::new(Channel::of_child(uffd, token, spans.to_vec()));
        let mut living = 0;
        for other in self.others.of_role(Role::Child) {
            if other.is_gone() {
                self.poller.remove(&other);
                self.others.remove(&other);
            } else {
                living += 1;
            }
        }
        if living >= MAX_CHILDREN && end_child(&child) {
            return;
        }
        self.others.add(&child);
        if let Err(error) = self.poller.add(&child) {
            // It is open, so that the child's accesses sleep.
            tracing::error!(%error, "polling the userfaultfd of a forked child");
        }
    }
}

/// Answers a fault of a child: its page is lost there.
pub(crate) fn poison_in_child(child: &Channel, address: u64) {
    let shift = child.shift_at(address).unwrap_or(PageSize::Size4K.shift());
    let bytes = 1 << shift;
    let page = UserRange {
        start: address & !(bytes - 1),
        bytes,
    };
    match child.uffd.poison_pages(page, Wake::Wake) {
        Ok(()) | Err(InstallError::Gone) => {}
        // It is there meanwhile, or not mapped.
        Err(InstallError::Exists { .. } | InstallError::Again { .. } | InstallError::NoMapping) => {
            let _ = child.uffd.wake(page);
        }
        // A kernel without UFFDIO_POISON: the thread sleeps.
        Err(error) => tracing::error!(%error, "a forked child waits for a page for ever"),
    }
}
