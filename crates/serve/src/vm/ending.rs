//! The end of a VM's memory.
//!
//! A missing page is marked as lost before its userfaultfd is closed, so that nobody reads zeroes. At a page that the
//! VMM has never mapped there is nothing to mark, and to find that out costs two system calls: a message of a hundred bytes
//! can have the server look at as many pages as the image has. So after some of them a user's VMs end one after the other.

use std::sync::MutexGuard;
use std::time::{Duration, Instant};

use super::{End, Vm};
use crate::budgets::Charge;
use crate::stopper::Stopper;

/// So many pages of a VM are looked at in vain before its end waits for its user's turn: 256 MiB of small ones.
const FREE_LOOKS: u64 = 1 << 16;

/// What a server that ends gives to those VMs after the end of its drains. The process may then end with their userfaultfds.
const LATEST: Duration = Duration::from_secs(1);

impl Vm<'_> {
    /// Ends the paging of its memory.
    pub(super) fn end_memory(&mut self, end: End) {
        let mut pace = Pace {
            charge: self.charge,
            stopper: &self.common.stopper,
            looks: 0,
            turn: None,
        };
        for id in self.pager.region_ids() {
            if end == End::HandedOver {
                // Nothing is poisoned; threads that sleep fault again, and the successor reads that.
                let _ = self.pager.export(id);
            } else {
                // Missing pages are poisoned before the descriptor is closed.
                let mut go_on = |looks| pace.goes_on(looks);
                let _ = self.pager.remove_paced(id, &mut go_on);
            }
        }
    }
}

struct Pace<'a> {
    charge: &'a Charge,
    stopper: &'a Stopper,
    looks: u64,
    turn: Option<MutexGuard<'a, ()>>,
}

impl Pace<'_> {
    /// Waits for the user's turn, if there were many looks in vain. False: there is no time for more.
    fn goes_on(&mut self, looks: u64) -> bool {
        self.looks += looks;
        if self.looks <= FREE_LOOKS {
            return true;
        }
        // The user's others come in between.
        self.turn = None;
        self.turn = Some(self.charge.turn());
        !self.stopper.is_stopping() || Instant::now() < self.stopper.deadline() + LATEST
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Kind: work for what a client has only claimed, of which it can have any number done at once.
    #[test]
    fn many_looks_in_vain_wait_for_the_users_turn() {
        let charge = Charge::alone();
        let stopper = Stopper::new(Duration::ZERO).unwrap();
        let pace = || Pace {
            charge: &charge,
            stopper: &stopper,
            looks: 0,
            turn: None,
        };
        let mut first = pace();
        assert!(first.goes_on(FREE_LOOKS) && first.turn.is_none());
        assert!(first.goes_on(1) && first.turn.is_some());
        // Another VM of the user would wait, and one with fewer does not.
        assert!(pace().goes_on(FREE_LOOKS));
        drop(first);
        let mut second = pace();
        assert!(second.goes_on(FREE_LOOKS + 1) && second.turn.is_some());
        drop(second);
        // The server ends: there is a bound.
        stopper.stop();
        assert!(pace().goes_on(FREE_LOOKS));
        while Instant::now() < stopper.deadline() + LATEST {
            std::thread::sleep(Duration::from_millis(10));
        }
        assert!(!pace().goes_on(FREE_LOOKS + 1));
    }
}
