//! Prefetch below the VMM's limit of memory: what comes ahead must not end a VM that would have lived without it.

use pagetide_memory::PageRange;
use pagetide_pager::{Progress, RegionId};

use super::Vm;
use crate::log_limit::log_vm;

/// What else a VMM needs while its memory fills: page tables take a 512th of it, and it has buffers of its own.
const BESIDE: u64 = 4 << 20;

/// Room that is soon gone: other processes of the group take it between two looks, and prefetch has requested some already.
const NEAR: u64 = 64 << 20;

impl Vm<'_> {
    /// Leaves out of a plan for prefetch what the limit of the VMM's control groups has no room for: the rest of memory,
    /// and then the end of a working set.
    pub(super) fn fit(
        &self,
        first: Vec<(RegionId, PageRange)>,
        then: Vec<RegionId>,
    ) -> (Vec<(RegionId, PageRange)>, Vec<RegionId>) {
        let Some(room) = self.limit.room() else {
            return (first, then);
        };
        let missing = self.missing_bytes();
        if room >= needed(missing) {
            return (first, then);
        }
        log_vm!(
            warn,
            self.charge,
            pid = self.peer.pid,
            room,
            missing,
            "the limit of the VMM's control group has no room for all of its memory: prefetch leaves it out"
        );
        // Half of it stays for what the guest touches beside its working set.
        let mut left = room / 2;
        let fits = |(id, pages): &(RegionId, PageRange)| {
            let bytes = pages.count().saturating_mul(self.page_bytes(*id));
            let rest = left.checked_sub(bytes);
            left = rest.unwrap_or(0);
            rest.is_some()
        };
        (first.into_iter().take_while(fits).collect(), Vec::new())
    }

    /// Ends a prefetch for which there is no room any more: other processes of the group have taken it.
    pub(super) fn end_prefetch_without_room(&mut self) {
        if self.prefetch.is_none() {
            return;
        }
        let Some(room) = self.limit.room() else {
            return;
        };
        if is_near(room, self.missing_bytes()) {
            self.prefetch = None;
            log_vm!(
                warn,
                self.charge,
                pid = self.peer.pid,
                room,
                "the limit of the VMM's control group is near: prefetch has ended"
            );
        }
    }

    fn page_bytes(&self, id: RegionId) -> u64 {
        let region = self.regions.iter().find(|region| region.id == id);
        region.map_or(0, |region| region.page_size.bytes())
    }

    /// The part of the VM's memory that is missing, by its pages.
    fn missing_bytes(&self) -> u64 {
        let Progress {
            present,
            poisoned,
            total,
        } = self.pager.progress();
        let missing = total.saturating_sub(present + poisoned);
        let bytes = u128::from(self.memory_bytes) * u128::from(missing) / u128::from(total.max(1));
        u64::try_from(bytes).unwrap_or(u64::MAX)
    }
}

/// The bytes that a VMM gets while so many bytes of its memory become present.
fn needed(missing: u64) -> u64 {
    missing.saturating_add(missing / 512).saturating_add(BESIDE)
}

/// Whether prefetch ends: there is no room for the rest of memory, and the limit is near.
fn is_near(room: u64, missing: u64) -> bool {
    missing > 0 && room < needed(missing).min(NEAR)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefetch_ends_while_there_is_room_for_what_is_on_its_way() {
        const MIB: u64 = 1 << 20;
        for (room, missing, ends) in [
            (65 * MIB, 1024 * MIB, false),
            (63 * MIB, 1024 * MIB, true),
            // All of the rest fits.
            (63 * MIB, 32 * MIB, false),
            (33 * MIB, 32 * MIB, true),
            (0, 0, false),
        ] {
            assert_eq!(is_near(room, missing), ends, "{room} {missing}");
        }
    }
}
