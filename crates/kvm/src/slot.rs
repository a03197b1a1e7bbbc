//! Memory slots: the mapping from guest-physical ranges to memory of this process.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::sync::Arc;

use pagetide_memory::{GuestRange, Region};
use pagetide_uapi::generated::{
    KVM_MEM_ABSENT_MAPPING_FAULT, KVM_MEM_LOG_DIRTY_PAGES, KVM_MEM_READONLY,
};

/// Properties of a slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct SlotFlags {
    /// Accesses to absent memory leave KVM_RUN instead of waiting for a userfaultfd
    /// (KVM_MEM_ABSENT_MAPPING_FAULT, gated by KVM_CAP_ABSENT_MAPPING_FAULT). KVM's own accesses do not leave it: they
    /// wait for a userfaultfd, or fill absent memory with zeroes. So a slot gets this flag only while a pager has the
    /// region ([`Region::is_registered`]): give the region to the pager first. A slot that has the flag keeps it when
    /// the paging ends.
    pub absent_mapping_fault: bool,
    /// KVM records which pages the guest writes to (KVM_MEM_LOG_DIRTY_PAGES).
    pub log_dirty: bool,
    /// Guest writes leave KVM_RUN as MMIO (KVM_MEM_READONLY). The kernel refuses this flag together
    /// with `absent_mapping_fault`.
    pub readonly: bool,
}

impl SlotFlags {
    /// The flags as the kernel's bits.
    #[must_use]
    pub fn bits(self) -> u32 {
        [
            (self.absent_mapping_fault, KVM_MEM_ABSENT_MAPPING_FAULT),
            (self.log_dirty, KVM_MEM_LOG_DIRTY_PAGES),
            (self.readonly, KVM_MEM_READONLY),
        ]
        .into_iter()
        .filter_map(|(set, bit)| set.then_some(bit))
        .fold(0, |bits, bit| bits | bit)
    }
}

impl fmt::Display for SlotFlags {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = [
            (self.absent_mapping_fault, "absent-mapping-fault"),
            (self.log_dirty, "log-dirty"),
            (self.readonly, "readonly"),
        ];
        let mut separator = "";
        for (_, name) in names.into_iter().filter(|(set, _)| *set) {
            write!(formatter, "{separator}{name}")?;
            separator = ", ";
        }
        if separator.is_empty() {
            formatter.write_str("no flags")
        } else {
            Ok(())
        }
    }
}

/// Why a slot has no exits, and what to do.
pub(crate) const UNREGISTERED: &str = "exits for absent pages need a userfaultfd for the region as well, because KVM's \
     own accesses would fill absent pages with zeroes; give the region to a pager first, or call \
     Region::assume_registered if the program has registered it itself";

/// Why a slot was refused.
#[derive(Debug, thiserror::Error)]
pub enum SlotError {
    /// The kernel lacks the capability that gates a flag.
    #[error(
        "memory slot {slot} ({range}): this kernel lacks {capability} ({number}); run a \
         kernel with Pagetide's patches"
    )]
    MissingCapability {
        /// The slot.
        slot: u32,
        /// Its guest-physical range.
        range: GuestRange,
        /// The capability's name.
        capability: &'static str,
        /// The capability's number.
        number: u32,
    },
    /// Exits are asked for, and no userfaultfd is known to be registered for the region.
    #[error("memory slot {slot} ({range}): {UNREGISTERED}")]
    NotRegistered {
        /// The slot.
        slot: u32,
        /// Its guest-physical range.
        range: GuestRange,
    },
    /// The slot number exceeds the kernel's maximum (KVM_CAP_NR_MEMSLOTS).
    #[error("memory slot {slot}: this kernel has slots 0 to {}", slots - 1)]
    NoSuchSlot {
        /// The slot.
        slot: u32,
        /// The number of slots.
        slots: u32,
    },
    /// The slot already has a region.
    #[error("memory slot {slot} is in use for {range}")]
    InUse {
        /// The slot.
        slot: u32,
        /// The slot's range.
        range: GuestRange,
    },
    /// The memory of an adopted slot does not lie within its region.
    #[error("memory slot {slot}: the memory of {range} is not all in the region")]
    OutsideRegion {
        /// The slot.
        slot: u32,
        /// The slot's range in the guest.
        range: GuestRange,
    },
    /// The slot has no region.
    #[error("memory slot {slot} is empty")]
    Empty {
        /// The slot.
        slot: u32,
    },
    /// Another slot covers a part of the range (EEXIST).
    #[error("memory slot {slot}: {range} overlaps another slot")]
    Overlap {
        /// The slot.
        slot: u32,
        /// The requested range.
        range: GuestRange,
        /// EEXIST.
        #[source]
        source: io::Error,
    },
    /// The kernel refuses the range or the combination of flags (EINVAL).
    #[error("memory slot {slot}: the kernel refuses {range} with {flags}")]
    Invalid {
        /// The slot.
        slot: u32,
        /// The requested range.
        range: GuestRange,
        /// The requested flags.
        flags: SlotFlags,
        /// EINVAL.
        #[source]
        source: io::Error,
    },
    /// Any other errno, for instance ENOMEM.
    #[error("memory slot {slot}: cannot set {range} with {flags}")]
    Failed {
        /// The slot.
        slot: u32,
        /// The requested range.
        range: GuestRange,
        /// The requested flags.
        flags: SlotFlags,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

/// The content of a slot: a part of a region, at a guest-physical address. Holding one keeps the region
/// mapped.
#[derive(Clone, Debug)]
pub struct Slot {
    /// The memory.
    pub region: Arc<Region>,
    /// The slot's start in the region in bytes; a multiple of 4 KiB.
    pub offset: u64,
    /// The slot's range in the guest. For a region at its own address, the region's range or a part of
    /// it.
    pub range: GuestRange,
    /// Its properties.
    pub flags: SlotFlags,
}

impl Slot {
    /// A slot with all of a region, at the region's own address.
    #[must_use]
    pub fn whole(region: Arc<Region>, flags: SlotFlags) -> Self {
        Self {
            offset: 0,
            range: region.range(),
            region,
            flags,
        }
    }

    /// The address of the slot's memory in this process: the kernel's `userspace_addr`.
    pub(crate) fn userspace_address(&self) -> u64 {
        self.region.guest().start().as_u64() + self.offset
    }

    /// Whether both have the same memory at the same address, so that changing one to the other changes
    /// at most flags.
    #[must_use]
    pub fn is_same_memory(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.region, &other.region)
            && (self.offset, self.range) == (other.offset, other.range)
    }
}

/// A VM's slots by their numbers.
pub type SlotLayout = BTreeMap<u32, Slot>;

/// Whether a slot with exits has memory of this region. The region was registered then, and once its paging has ended,
/// no page is absent: further slots of the region may have exits, too.
pub(crate) fn has_exits(slots: &SlotLayout, region: &Arc<Region>) -> bool {
    slots
        .values()
        .any(|slot| slot.flags.absent_mapping_fault && Arc::ptr_eq(&slot.region, region))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_have_the_kernels_bits() {
        let table = [
            (SlotFlags::default(), 0),
            (
                SlotFlags {
                    log_dirty: true,
                    ..SlotFlags::default()
                },
                1,
            ),
            (
                SlotFlags {
                    readonly: true,
                    ..SlotFlags::default()
                },
                2,
            ),
            (
                SlotFlags {
                    absent_mapping_fault: true,
                    ..SlotFlags::default()
                },
                1 << 8,
            ),
            (
                SlotFlags {
                    absent_mapping_fault: true,
                    log_dirty: true,
                    readonly: true,
                },
                0x103,
            ),
        ];
        for (flags, bits) in table {
            assert_eq!(flags.bits(), bits, "{flags}");
        }
    }
}
