//! The userfaultfds of address spaces that are not regions' own: of processes that share a region's memory, and of
//! forked children.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pagetide_uapi::userfaultfd::{UserRange, Userfaultfd};

use crate::again::Again;
use crate::channel::{Channel, Role};
use crate::kept_open::keep_open;
use crate::mark::{Mark, poison_range};

/// Their channels.
#[derive(Debug, Default)]
pub(crate) struct Others {
    list: Mutex<Vec<Arc<Channel>>>,
}

impl Others {
    fn lock(&self) -> MutexGuard<'_, Vec<Arc<Channel>>> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn channel(&self, token: u64) -> Option<Arc<Channel>> {
        let list = self.lock();
        list.iter().find(|other| other.token == token).cloned()
    }

    pub(crate) fn which(&self, is_it: impl Fn(&Channel) -> bool) -> Vec<Arc<Channel>> {
        let list = self.lock();
        let those = list.iter().filter(|other| is_it(other));
        those.cloned().collect()
    }

    pub(crate) fn of_role(&self, role: Role) -> Vec<Arc<Channel>> {
        self.which(|other| other.role == role)
    }

    /// The channel of an address space that is attached already.
    pub(crate) fn of_space(&self, uffd: &Arc<Userfaultfd>) -> Option<Arc<Channel>> {
        let list = self.lock();
        let is_it =
            |other: &&Arc<Channel>| other.role == Role::Space && Arc::ptr_eq(&other.uffd, uffd);
        list.iter().find(is_it).cloned()
    }

    /// Adds a channel; does nothing if it is already there.
    pub(crate) fn add(&self, channel: &Arc<Channel>) {
        let mut list = self.lock();
        if list.iter().all(|other| other.token != channel.token) {
            list.push(Arc::clone(channel));
        }
    }

    pub(crate) fn remove(&self, channel: &Channel) {
        let mut list = self.lock();
        list.retain(|other| other.token != channel.token);
    }
}

impl Drop for Others {
    fn drop(&mut self) {
        for child in self.of_role(Role::Child) {
            // A child that lives on would read zeroes.
            if !child.is_gone() && !end_child(&child) {
                keep_open(&child);
            }
        }
    }
}

/// Poisons all pages of a child that are not mapped there, so that its userfaultfd can be closed. Returns whether
/// that was possible.
pub(crate) fn end_child(child: &Channel) -> bool {
    // How many children there may be depends on it.
    let mut again = Again::for_a_turn_at_least();
    child.all_spans().into_iter().all(|span| {
        let range = UserRange {
            start: span.start,
            bytes: span.bytes(),
        };
        let page_bytes = 1 << span.shift;
        poison_range(&child.uffd, range, page_bytes, &mut again, |_| true) == Mark::Made
    })
}
