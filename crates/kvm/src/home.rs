//! Lookup of the memory at a guest-physical address. A transaction may map a part of a region at any
//! gpa, so the region's own address and the guest's address can differ.

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
    /// The address relative to [`Region::gpa`]; equal to the guest's address unless the slot was moved.
    pub gpa: GuestAddress,
}

impl Slot {
    /// The offset in the region, in bytes, of the guest's address `gpa`; None if the slot does not
    /// contain it.
    #[must_use]
    pub fn offset_of(&self, gpa: GuestAddress) -> Option<u64> {
        let offset = gpa.offset_from(self.range.start())?;
        if offset >= self.range.bytes() {
            return None;
        }
        self.offset.checked_add(offset)
    }

    /// The guest's address of the byte at `offset` in the region; the slot's end is included. None if
    /// the slot does not contain it.
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
    /// The memory at the guest's address `gpa` in the current layout; None if no slot contains it.
    ///
    /// For a fault: the slots may have changed since the vCPU exited. If the address now has no memory,
    /// or another region's, entering the guest again repeats the access under the new layout; resolving
    /// the fault of a page that was moved does no harm.
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
