//! The memory that an uncorrected error destroys.

use super::{AccessError, Region};
use crate::address::{GuestAddress, HostAddress};
use crate::convert::to_u64;
use crate::guard::CopyFailure;
use crate::page::PageSize;
use crate::range::GuestRange;

/// The memory that an uncorrected error destroyed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lost {
    /// The address that was accessed, or that the kernel reported.
    pub gpa: GuestAddress,
    /// The range that is lost, by the region's policy.
    pub range: GuestRange,
}

impl Region {
    /// The range that is lost when the kernel reports an error of size `reported` (`si_addr_lsb`) at
    /// `hva`, an address in either mapping. `None` if the region does not contain the address.
    ///
    /// For hugetlb memory the range may exceed the reported size: KVM always reports 4 KiB, but unless
    /// the policy is [`FailurePolicy::Keep`](crate::FailurePolicy::Keep), the kernel has unmapped the
    /// whole huge page.
    pub fn lost_at(&self, hva: HostAddress, reported: PageSize) -> Option<Lost> {
        let mapping = [Some(self.guest()), self.service()]
            .into_iter()
            .flatten()
            .find(|mapping| mapping.contains(hva))?;
        self.lost_at_offset(to_u64(hva.0 - mapping.start().0), reported)
    }

    /// As [`Self::lost_at`], for an error at `gpa`.
    pub fn lost_at_gpa(&self, gpa: GuestAddress, reported: PageSize) -> Option<Lost> {
        self.lost_at_offset(self.offset_of_gpa(gpa)?, reported)
    }

    fn lost_at_offset(&self, offset: u64, reported: PageSize) -> Option<Lost> {
        let size = reported.max(self.policy.lost_per_error(self.backing));
        let gpa = self.gpa().checked_add(offset)?;
        // The lost piece is aligned in the host's memory, to which gpas are congruent; a small region
        // may contain only a part of it.
        let start = (gpa.0 & !(size.bytes() - 1)).max(self.gpa().0);
        let end = (gpa.0 | (size.bytes() - 1)).saturating_add(1);
        let end = end.min(self.range.end().0);
        let range = GuestRange::new(GuestAddress(start), end.checked_sub(start)?).ok()?;
        Some(Lost { gpa, range })
    }

    pub(super) fn copy_error(&self, failure: CopyFailure) -> AccessError {
        let lost = self.lost_at(failure.at, PageSize::holding(failure.lsb));
        // The copy accesses no memory but the region and its caller's buffer, and an error in the
        // buffer is not attributed to guest memory; so the lookup always succeeds.
        let (gpa, lost) = lost.map_or((self.gpa(), self.range), |lost| (lost.gpa, lost.range));
        AccessError::Poisoned { gpa, lost }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backing::Backing;

    #[test]
    fn the_lost_range_is_found_from_either_mapping() {
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
            // The range is limited to the region.
            for size in [PageSize::Size2M, PageSize::Size1G] {
                assert_eq!(lost(0, size), expected(0x40_3000, 0x40_3000, 0x5000));
            }
            assert_eq!(lost(0x5000, PageSize::Size4K), None);
        }
    }
}
