//! Where the memory at a guest-physical address comes from: a transaction may put a part of a region
//! anywhere, so a region's own address and what the guest sees are two things.

use std::sync::Arc;

use pagetide_memory::{GuestAddress, PageIndex, Region};

use crate::slot::Slot;
use crate::vcpu::Vcpu;
use crate::vm::{Inner, Vm};

/// The memory behind a guest-physical address.
#[derive(Clone, Debug)]
pub struct Home {
    /// The region.
    pub region: Arc<Region>,
    /// The page of the region.
    pub page: PageIndex,
    /// The address by the region's own count, from [`Region::gpa`] on; the same as the guest's unless
    /// the slot was moved.
    pub gpa: GuestAddress,
}

impl Slot {
    /// The offset in the region, in bytes, of what the guest sees at `gpa`; None if that is not in
    /// the slot.
    #[must_use]
    pub fn offset_of(&self, gpa: GuestAddress) -> Option<u64> {
        let offset = gpa.offset_from(self.range.start())?;
        if offset >= self.range.bytes() {
            return None;
        }
        self.offset.checked_add(offset)
    }

    /// Where the guest sees the byte of the region at `offset`, or the end of the slot; None if that
    /// is not in the slot.
    #[must_use]
    pub fn gpa_of(&self, offset: u64) -> Option<GuestAddress> {
        let within = offset.checked_sub(self.offset)?;
        if within > self.range.bytes() {
            return None;
        }
        self.range.start().checked_add(within)
    }

    fn home_of(&self, gpa: GuestAddress) -> Option<Home> {
        let offset = self.offset_of(gpa)?;
        Some(Home {
            region: Arc::clone(&self.region),
            page: PageIndex(offset >> self.region.page_size().shift()),
            gpa: self.region.gpa().checked_add(offset)?,
        })
    }
}

impl Inner {
    fn home_of(&self, gpa: GuestAddress) -> Option<Home> {
        self.slots().values().find_map(|slot| slot.home_of(gpa))
    }
}

impl Vm {
    /// The memory that the guest sees at `gpa`, under the slots of this moment; None if no slot has
    /// that address.
    ///
    /// For a fault: the slots may have changed since the vCPU left the guest. If nothing is there
    /// now, or another region, entering the guest again repeats the access under the new layout; to
    /// resolve the fault of a page that is no longer there does no harm.
    #[must_use]
    pub fn home_of(&self, gpa: GuestAddress) -> Option<Home> {
        self.inner().home_of(gpa)
    }
}

impl Vcpu {
    /// As [`Vm::home_of`], of this vCPU's VM.
    #[must_use]
    pub fn home_of(&self, gpa: GuestAddress) -> Option<Home> {
        self.vm().home_of(gpa)
    }
}
