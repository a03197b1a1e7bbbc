//! Children that a process has forked: copies of its memory, which nobody pages.
//!
//! A child's missing pages are missing in the child, too. As long as its userfaultfd is open, they fault; once
//! it is closed, they read as zeroes. So the pager keeps it, and answers each fault with poison.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use pagetide_memory::PageSize;
use pagetide_uapi::userfaultfd::{PageFault, UserRange};

use crate::again::Again;
use crate::channel::{Channel, Role, Span};
use crate::log_limit::log_limited;
use crate::mark::{Mark, poison_range};
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
            log_limited!(error, %error, "polling the userfaultfd of a forked child");
        }
    }
}

/// Answers a fault by poison: a page that is missing is lost at its address. One that is write-protected is so no more.
pub(crate) fn answer_by_poison(channel: &Channel, message: &PageFault) {
    let shift = channel.shift_at(message.address);
    let bytes = 1 << shift.unwrap_or(PageSize::Size4K.shift());
    let page = UserRange {
        start: message.address & !(bytes - 1),
        bytes,
    };
    let is_answered = match message.write_protected {
        true => channel.uffd.unprotect(page).is_ok(),
        false => {
            let mut again = Again::for_a_turn();
            let mark = poison_range(&channel.uffd, page, bytes, &mut again, |_| false);
            // A kernel without UFFDIO_POISON: the thread sleeps.
            mark != Mark::EventsFirst
        }
    };
    if !is_answered {
        let _ = channel.uffd.wake(page);
    }
}
