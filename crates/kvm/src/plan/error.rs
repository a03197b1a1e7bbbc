//! Errors of a transaction's plan.

use pagetide_memory::{GuestRange, RangeError};

use crate::slot::{SlotFlags, UNREGISTERED};
use crate::transaction::SlotRef;

/// Why a transaction was refused. Nothing has changed.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// The VM has no such slot, or the reference belongs to another transaction.
    #[error("{slot} does not exist")]
    UnknownSlot {
        /// The slot.
        slot: SlotRef,
    },
    /// An earlier step of the transaction deleted or replaced the slot.
    #[error("{slot} ({range}) was deleted or replaced by an earlier step of the transaction")]
    UsedUp {
        /// The slot.
        slot: SlotRef,
        /// The slot's range.
        range: GuestRange,
    },
    /// A slot would be empty, not consist of whole pages, or wrap around the address space.
    #[error("{slot}: invalid guest-physical range")]
    BadRange {
        /// The slot.
        slot: SlotRef,
        /// The reason, with address and size.
        #[source]
        source: RangeError,
    },
    /// A slot's memory would start inside a page.
    #[error("{slot} ({range}): offset {offset:#x} into its region is not a multiple of 4 KiB")]
    UnalignedOffset {
        /// The slot.
        slot: SlotRef,
        /// The requested range.
        range: GuestRange,
        /// The offset in bytes.
        offset: u64,
    },
    /// A slot would extend beyond its region.
    #[error(
        "{slot} ({range}): from offset {offset:#x} it leaves its region of {region_bytes} bytes"
    )]
    OutsideRegion {
        /// The slot.
        slot: SlotRef,
        /// The requested range.
        range: GuestRange,
        /// The slot's start in the region, in bytes.
        offset: u64,
        /// The region's size in bytes.
        region_bytes: u64,
    },
    /// The split is not inside the slot, or not at a page boundary.
    #[error("{slot} ({range}) cannot be split after {at:#x} bytes")]
    BadSplit {
        /// The slot.
        slot: SlotRef,
        /// The slot's range.
        range: GuestRange,
        /// The size of the first part, in bytes.
        at: u64,
    },
    /// Two slots to be merged are not adjacent in the guest's memory and in one region.
    #[error("{slot} ({range}) and {other} ({other_range}) are not adjacent in one region")]
    NotAdjacent {
        /// The first slot.
        slot: SlotRef,
        /// Its range.
        range: GuestRange,
        /// The second slot.
        other: SlotRef,
        /// Its range.
        other_range: GuestRange,
    },
    /// Two slots to be merged have different flags.
    #[error(
        "{slot} ({range}; {flags}) and {other} ({other_range}; {other_flags}) have different flags"
    )]
    FlagsDiffer {
        /// The first slot.
        slot: SlotRef,
        /// Its range.
        range: GuestRange,
        /// Its flags.
        flags: SlotFlags,
        /// The second slot.
        other: SlotRef,
        /// Its range.
        other_range: GuestRange,
        /// Its flags.
        other_flags: SlotFlags,
    },
    /// The requested flags of a slot exclude each other.
    #[error("{slot} ({range}): {flags} exclude each other")]
    FlagsConflict {
        /// The slot.
        slot: SlotRef,
        /// The requested range.
        range: GuestRange,
        /// The requested flags.
        flags: SlotFlags,
    },
    /// A slot needs a capability that the kernel lacks.
    #[error(
        "{slot} ({range}): this kernel lacks {capability} ({number}); run a kernel with \
         Pagetide's patches"
    )]
    MissingCapability {
        /// The slot.
        slot: SlotRef,
        /// The requested range.
        range: GuestRange,
        /// The capability's name.
        capability: &'static str,
        /// The capability's number.
        number: u32,
    },
    /// Exits are asked for, and no userfaultfd is known to be registered for the region.
    #[error("{slot} ({range}): {UNREGISTERED}")]
    NotRegistered {
        /// The slot.
        slot: SlotRef,
        /// The requested range.
        range: GuestRange,
    },
    /// Two slots would overlap in the resulting layout.
    #[error("{slot} ({range}) and {other} ({other_range}) would overlap")]
    Overlap {
        /// The slot with the lower start.
        slot: SlotRef,
        /// Its range.
        range: GuestRange,
        /// The other slot.
        other: SlotRef,
        /// Its range.
        other_range: GuestRange,
    },
    /// No slot number is free both before and after the transaction.
    #[error("{slot} ({range}): all {slots} slot numbers of this kernel are in use")]
    NoFreeSlot {
        /// The slot.
        slot: SlotRef,
        /// The requested range.
        range: GuestRange,
        /// The number of slots that a VM may have (KVM_CAP_NR_MEMSLOTS).
        slots: u32,
    },
    /// The transaction changes more slots than one call takes (KVM_MEMORY_REGION_LIST_MAX). The limit
    /// holds for every method.
    #[error(
        "the transaction takes {entries} changes of slots, {limit} are the limit; the first beyond it is slot {slot} ({range})"
    )]
    TooManyEntries {
        /// Slots that would be changed.
        entries: usize,
        /// How many may be.
        limit: usize,
        /// The first slot that is too much.
        slot: u32,
        /// What it holds.
        range: GuestRange,
    },
}
