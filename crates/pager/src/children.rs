//! Children that a process has forked: copies of its memory, which nobody pages.
//!
//! A child's missing pages are missing in the child, too. As long as its userfaultfd is open, they fault; once
//! it is closed, they read as zeroes. So the pager keeps it, and answers each fault with poison.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use pagetide_memory::PageSize;
use pagetide_uapi::userfaultfd::{InstallError, UserRange, Wake};

use crate::channel::{Channel, Role, Span};
use crate::pager::Pager;

/// Whether the process has exited, or executes another program.
pub(crate) fn is_gone(child: &Channel) -> bool {
    let Some(span) = child.first_span() else {
        return false;
    };
    let page = UserRange {
        start: span.start,
        bytes: 1 << span.shift,
    };
    // Installs at most what the memory's file has, which is the page's content.
    let asked = child.uffd.continue_pages(page, Wake::DontWake);
    asked == Err(InstallError::Gone)
}

impl Pager {
    /// Takes over a child that a process with these spans has forked.
    pub(crate) fn adopt_child(&self, parent: &Channel, spans: &[Span], fd: OwnedFd) {
        let uffd = Arc::new(parent.uffd.of_child(fd));
        let token = self.poller.next_token();
        let child = Arc::new(Channel::of_child(uffd, token, spans.to_vec()));
        for gone in self
            .others
            .take_if(|other| other.role == Role::Child && is_gone(other))
        {
            self.poller.remove(&gone);
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
