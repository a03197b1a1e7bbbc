//! Why a transaction is refused before anything is done.

use pagetide_memory::{GuestRange, RangeError};

use crate::slot::SlotFlags;
use crate::transaction::SlotRef;

/// Why a transaction is refused. Nothing has been changed.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// The VM has no such slot, or the reference is another transaction's.
    #[error("{slot} does not exist")]
    UnknownSlot {
        /// The slot.
        slot: SlotRef,
    },
    /// An earlier step of the transaction deleted the slot or made others of it.
    #[error("{slot} ({range}) was used up by an earlier step of the transaction")]
    UsedUp {
        /// The slot.
        slot: SlotRef,
        /// What it held.
        range: GuestRange,
    },
    /// A slot would be empty, not be whole pages, or wrap around the address space.
    #[error("{slot}: bad guest-physical range")]
    BadRange {
        /// The slot.
        slot: SlotRef,
        /// What is wrong, with address and size.
        #[source]
        source: RangeError,
    },
    /// A slot's memory would start within a page.
    #[error("{slot} ({range}): offset {offset:#x} into its region is not a multiple of 4 KiB")]
    UnalignedOffset {
        /// The slot.
        slot: SlotRef,
        /// The range that was asked for.
        range: GuestRange,
        /// The offset in bytes.
        offset: u64,
    },
    /// A slot would need memory that its region does not have.
    #[error(
        "{slot} ({range}): from offset {offset:#x} it leaves its region of {region_bytes} bytes"
    )]
    OutsideRegion {
        /// The slot.
        slot: SlotRef,
        /// The range that was asked for.
        range: GuestRange,
        /// Where in the region it starts, in bytes.
        offset: u64,
        /// The region's size in bytes.
        region_bytes: u64,
    },
    /// A slot was to be split elsewhere than inside, or within a page.
    #[error("{slot} ({range}) cannot be split after {at:#x} bytes")]
    BadSplit {
        /// The slot.
        slot: SlotRef,
        /// What it holds.
        range: GuestRange,
        /// The size of the first part, in bytes.
        at: u64,
    },
    /// Two slots were to become one and do not follow each other in the guest's memory, or not in
    /// one region.
    #[error("{slot} ({range}) and {other} ({other_range}) do not follow each other in one region")]
    NotAdjacent {
        /// The first slot.
        slot: SlotRef,
        /// What it holds.
        range: GuestRange,
        /// The second slot.
        other: SlotRef,
        /// What that holds.
        other_range: GuestRange,
    },
    /// Two slots were to become one and have different flags.
    #[error("{slot} ({range}; {flags}) and {other} ({other_range}; {other_flags}) differ in flags")]
    FlagsDiffer {
        /// The first slot.
        slot: SlotRef,
        /// What it holds.
        range: GuestRange,
        /// Its flags.
        flags: SlotFlags,
        /// The second slot.
        other: SlotRef,
        /// What that holds.
        other_range: GuestRange,
        /// Its flags.
        other_flags: SlotFlags,
    },
    /// A slot would have flags that exclude each other.
    #[error("{slot} ({range}): {flags} exclude each other")]
    FlagsConflict {
        /// The slot.
        slot: SlotRef,
        /// What it would hold.
        range: GuestRange,
        /// The flags that were asked for.
        flags: SlotFlags,
    },
    /// A slot would need a capability that the kernel lacks.
    #[error(
        "{slot} ({range}): this kernel does not have {capability} ({number}); run a kernel with \
         Pagetide's patches"
    )]
    MissingCapability {
        /// The slot.
        slot: SlotRef,
        /// What it would hold.
        range: GuestRange,
        /// The capability's name.
        capability: &'static str,
        /// The capability's number.
        number: u32,
    },
    /// Two slots would overlap in the layout that the transaction ends in.
    #[error("{slot} ({range}) and {other} ({other_range}) would overlap")]
    Overlap {
        /// The one that starts first.
        slot: SlotRef,
        /// What it would hold.
        range: GuestRange,
        /// The other one.
        other: SlotRef,
        /// What that would hold.
        other_range: GuestRange,
    },
    /// No slot number is free that was free before as well.
    #[error("{slot} ({range}): all {slots} slot numbers of this kernel are in use")]
    NoFreeSlot {
        /// The slot.
        slot: SlotRef,
        /// What it would hold.
        range: GuestRange,
        /// How many slots a VM may have (KVM_CAP_NR_MEMSLOTS).
        slots: u32,
    },
    /// The change has more elements than one call takes (KVM_MEMORY_REGION_LIST_MAX). The limit
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
