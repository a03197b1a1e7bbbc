//! What an uncorrected error takes of a region.

use super::{AccessError, Region};
use crate::address::{GuestAddress, HostAddress};
use crate::convert::to_u64;
use crate::guard::CopyFailure;
use crate::page::PageSize;
use crate::range::GuestRange;

/// What an uncorrected error took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lost {
    /// The address that was touched, or that the kernel named.
    pub gpa: GuestAddress,
    /// What is lost with it, by the region's policy.
    pub range: GuestRange,
}

impl Region {
    /// What is lost when the kernel reports an error at `hva`, an address in either mapping, that
    /// takes `reported` (`si_addr_lsb`). `None` if that is no address of this region.
    ///
    /// Of hugetlb memory it may be more than reported: KVM always names 4 KiB, but unless the policy
    /// is to keep them, the kernel has taken the whole huge page from everybody.
    pub fn lost_at(&self, hva: HostAddress, reported: PageSize) -> Option<Lost> {
        let mapping = [Some(self.guest()), self.service()]
            .into_iter()
            .flatten()
            .find(|mapping| mapping.contains(hva))?;
        self.lost_at_offset(to_u64(hva.0 - mapping.start().0), reported)
    }

    /// What is lost when the kernel reports an error at `gpa`; otherwise as [`Self::lost_at`].
    pub fn lost_at_gpa(&self, gpa: GuestAddress, reported: PageSize) -> Option<Lost> {
        self.lost_at_offset(self.offset_of_gpa(gpa)?, reported)
    }

    fn lost_at_offset(&self, offset: u64, reported: PageSize) -> Option<Lost> {
        let size = reported.max(self.policy.lost_per_error(self.backing));
        let gpa = self.gpa().checked_add(offset)?;
        // The piece is aligned in the host's memory, to which gpas are congruent; a small region may
        // have a part of it only.
        let start = (gpa.0 & !(size.bytes() - 1)).max(self.gpa().0);
        let end = (gpa.0 | (size.bytes() - 1)).saturating_add(1);
        let end = end.min(self.range.end().0);
        let range = GuestRange::new(GuestAddress(start), end.checked_sub(start)?).ok()?;
        Some(Lost { gpa, range })
    }

    pub(super) fn copy_error(&self, failure: CopyFailure) -> AccessError {
        let lost = self.lost_at(failure.at, PageSize::holding(failure.lsb));
        // The copy touches no other memory but its caller's buffer, and an error there is not taken
        // for one of guest memory; so there always is an answer.
        let (gpa, lost) = lost.map_or((self.gpa(), self.range), |lost| (lost.gpa, lost.range));
        AccessError::Poisoned { gpa, lost }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backing::Backing;

    #[test]
    fn either_mapping_tells_what_is_lost() {
        let region = Region::new(GuestAddress(0x40_3000), 0x5000, Backing::Shmem).unwrap();
        for mapping in [region.guest(), region.service().unwrap()] {
            let at = |offset: usize| HostAddress(mapping.start().0 + offset);
            let lost = |offset, size| region.lost_at(at(offset), size);
            let expected = |gpa, start, bytes| {
                Some(Lost {
                    gpa: GuestAddress(gpa),
                    range: GuestRange::new(GuestAddress(start), bytes).unwrap(),
                })
            };
            assert_eq!(
                lost(0x1234, PageSize::Size4K),
                expected(0x40_4234, 0x40_4000, 0x1000)
            );
            // No more than the region has.
            for size in [PageSize::Size2M, PageSize::Size1G] {
                assert_eq!(lost(0, size), expected(0x40_3000, 0x40_3000, 0x5000));
            }
            assert_eq!(lost(0x5000, PageSize::Size4K), None);
        }
    }
}
