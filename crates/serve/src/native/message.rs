//! Messages: their types and fields.

use pagetide_memory::PageSize;
use pagetide_sources::Digest;
use thiserror::Error;

use super::label::{LabelError, VmLabel};

/// The longest text of a message, in bytes.
pub const MAX_TEXT_BYTES: usize = 1024;

/// The most regions of one attach.
pub const MAX_REGIONS: usize = 16_384;

/// The most descriptors of one attach.
pub const MAX_DESCRIPTORS: usize = 16;

/// The most further address spaces of a VM.
pub const MAX_SPACES: usize = 64;

/// Why a payload is no message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum DecodeError {
    /// The type is unknown.
    #[error("a message of the unknown type {kind:#06x}")]
    Unknown {
        /// The type.
        kind: u16,
    },
    /// The payload ends inside a field.
    #[error("the message ends inside a field")]
    Short,
    /// The payload has more than its fields.
    #[error("the message has {bytes} bytes after its last field")]
    Long {
        /// The bytes after it.
        bytes: usize,
    },
    /// A field has no valid value.
    #[error("{field} has no valid value")]
    Field {
        /// The field.
        field: &'static str,
    },
    /// A label is none.
    #[error(transparent)]
    Label(#[from] LabelError),
}

/// An enum that is sent as a number.
macro_rules! numbers {
    ($(#[$doc:meta])* $name:ident: $number:ty { $($(#[$variant_doc:meta])* $variant:ident = $value:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $name {
            $($(#[$variant_doc])* $variant,)*
        }

        impl $name {
            /// Every value, in the order of their numbers.
            pub const ALL: &[Self] = &[$(Self::$variant),*];

            pub(super) fn number(self) -> $number {
                match self {
                    $(Self::$variant => $value,)*
                }
            }

            pub(super) fn of(number: $number) -> Result<Self, DecodeError> {
                match number {
                    $($value => Ok(Self::$variant),)*
                    _ => Err(DecodeError::Field { field: stringify!($name) }),
                }
            }
        }
    };
}

numbers! {
    /// Why a request was refused.
    RefusedCode: u32 {
        /// The frame cannot be decoded.
        Protocol = 1,
        /// No version in common.
        Version = 2,
        /// An unknown message, or one that is not served yet.
        Unsupported = 3,
        /// The message does not belong here.
        Order = 4,
        /// A region is invalid, overlaps, or is too large.
        Regions = 5,
        /// Too many descriptors, too few, of the wrong kind, or not named by a region.
        Descriptors = 6,
        /// A memfd that may shrink.
        NotSealed = 7,
        /// A file cannot be mapped, or does not contain the region.
        File = 8,
        /// The region cannot be paged.
        Paging = 9,
        /// The image ends before the end of the memory, or some of its pages could not be read.
        NoContent = 10,
        /// The same request is still being answered.
        Busy = 11,
        /// A page map is damaged, does not fit, or is too large.
        PageMap = 12,
        /// There is no working set, or it cannot be read or written.
        WorkingSet = 13,
        /// The server failed.
        Internal = 14,
    }
}

numbers! {
    /// How the memory of a region is filled.
    RegionMode: u8 {
        /// Content is copied into memory that is missing.
        Missing = 0,
        /// Content is written to the VMM's memfd and mapped from there.
        Minor = 1,
        /// A private mapping of the server's memfd, which all clones share.
        Clone = 2,
    }
}

numbers! {
    /// What to do with the working set.
    WorkingSetAction: u32 {
        /// Record touches from now on.
        Record = 1,
        /// Stop, and merge the recording into the image's file.
        Save = 2,
        /// Fetch the pages of the image's file now.
        Replay = 3,
        /// Stop, and forget the recording.
        Off = 4,
    }
}

numbers! {
    /// What a VM does with its working set.
    WorkingSetState: u32 {
        /// Nothing.
        Off = 0,
        /// Records it.
        Recording = 1,
        /// Fetches the recorded pages.
        Replaying = 2,
    }
}

numbers! {
    /// The state of a VM.
    VmState: u32 {
        /// Faults are served.
        Serving = 1,
        /// Content is unavailable, or memory takes none, at the moment: threads that touch missing pages wait.
        Stalled = 2,
        /// Every missing page is being fetched.
        Draining = 3,
        /// A successor serves the VM.
        HandedOver = 4,
    }
}

/// A region of a VM's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// Its address in the VMM.
    pub address: u64,
    /// Its length.
    pub bytes: u64,
    /// The offset of its content in the image.
    pub image_offset: u64,
    /// Its offset in its file, in bytes; 0 without a file.
    pub file_offset: u64,
    /// Its page size.
    pub page_size: PageSize,
    /// How it is filled.
    pub mode: RegionMode,
    /// The number of its userfaultfd among the descriptors.
    pub uffd: u8,
    /// The number of its file among the descriptors, for [`RegionMode::Minor`].
    pub file: Option<u8>,
}

impl Region {
    /// Anonymous memory of small pages, registered for MISSING with the first descriptor.
    pub fn missing(address: u64, bytes: u64, image_offset: u64) -> Self {
        Self {
            address,
            bytes,
            image_offset,
            file_offset: 0,
            page_size: PageSize::Size4K,
            mode: RegionMode::Missing,
            uffd: 0,
            file: None,
        }
    }

    /// A shared mapping of the memfd that is descriptor `file`, from `file_offset` on, registered for
    /// MISSING and MINOR with the first descriptor.
    #[must_use]
    pub fn minor(self, file: u8, file_offset: u64) -> Self {
        Self {
            mode: RegionMode::Minor,
            file: Some(file),
            file_offset,
            ..self
        }
    }

    /// A private mapping of the server's memfd at the region's offset in the image, registered for
    /// MISSING and MINOR with the first descriptor.
    #[must_use]
    pub fn cloned_image(self) -> Self {
        Self {
            mode: RegionMode::Clone,
            ..self
        }
    }
}

/// The regions of a VM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Attach {
    /// The features that the userfaultfds were opened with (`UFFD_FEATURE_*`).
    pub uffd_features: u64,
    /// The regions, 1 to [`MAX_REGIONS`].
    pub regions: Vec<Region>,
}

/// Where a further address space has a region's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpaceRegion {
    /// The number of the region in attach.
    pub region: u32,
    /// The address of its first byte there.
    pub address: u64,
}

/// A further address space of a VM's memory, as of a vhost-user back end. It has mapped the memfds of regions in mode
/// [`RegionMode::Minor`], shared and each as a whole, and registered them for MISSING and MINOR.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AttachSpace {
    /// The features that the userfaultfd was opened with (`UFFD_FEATURE_*`).
    pub uffd_features: u64,
    /// The regions that it has mapped, 1 to [`MAX_REGIONS`].
    pub regions: Vec<SpaceRegion>,
}

/// What the server permits, and what it serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Welcome {
    /// The version that both sides use.
    pub version: u16,
    /// The longest payload in bytes.
    pub max_payload_bytes: u32,
    /// The most regions of a VM.
    pub max_regions: u32,
    /// The most descriptors of one message.
    pub max_descriptors: u32,
    /// The most memory of a VM, in bytes.
    pub max_memory_bytes: u64,
    /// The most bytes of page maps before attach.
    pub max_map_bytes: u64,
    /// The features that both sides have.
    pub features: u64,
    /// The length of the image.
    pub image_bytes: u64,
    /// The digest of the image.
    pub image: Digest,
}

/// The state of a VM, and counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Health {
    /// The state.
    pub state: VmState,
    /// Pages that are present, including zero and discarded pages.
    pub present: u64,
    /// Pages that are lost for good.
    pub lost: u64,
    /// All pages.
    pub pages: u64,
    /// Faults that were read.
    pub faults: u64,
    /// How often a region has stalled.
    pub stalls: u64,
    /// The last error; empty if there was none.
    pub last_error: String,
}

/// The result of a drain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drained {
    /// Pages that are present.
    pub present: u64,
    /// Pages that are lost for good.
    pub lost: u64,
}

/// A part of a region's page map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageMapPart {
    /// The number of the region.
    pub region: u32,
    /// The first page of the part.
    pub first_page: u64,
    /// Bytes of a [`pagetide_memory::PageMapImage`]; several frames have it if it is long.
    pub bytes: Vec<u8>,
}

macro_rules! messages {
    ($($(#[$doc:meta])* $name:ident $({ $($(#[$field_doc:meta])* $field:ident: $type:ty),* $(,)? })? $(($inner:ty))? = $kind:literal,)*) => {
        /// A message.
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub enum Message {
            $($(#[$doc])* $name $({ $($(#[$field_doc])* $field: $type),* })? $(($inner))?,)*
        }

        impl Message {
            /// The type of its frame.
            pub fn kind(&self) -> u16 {
                match self {
                    $(Self::$name { .. } => $kind,)*
                }
            }
        }
    };
}

messages! {
    /// The first message of a client.
    Hello {
        /// The lowest version that it knows.
        lowest: u16,
        /// The highest.
        highest: u16,
        /// The features that it knows.
        features: u64,
        /// Its name for logs.
        name: String,
    } = 1,
    /// The regions of the VM, with descriptors.
    Attach(Attach) = 2,
    /// Asks for the memfd that clones share.
    Share = 3,
    /// Asks for the VM's state.
    HealthRequest = 4,
    /// Asks for every missing page.
    Drain = 5,
    /// Controls the working set.
    WorkingSet(WorkingSetAction) = 6,
    /// Bytes of the image are lost in this VM.
    Poison {
        /// Offset in the image.
        offset: u64,
        /// Length.
        bytes: u64,
    } = 7,
    /// Tries stalled regions again now.
    Resume = 8,
    /// Ends the paging here, for a successor.
    HandOver = 9,
    /// A page map of the predecessor.
    ResumeMap(PageMapPart) = 10,
    /// The client leaves.
    Goodbye = 11,
    /// A further address space, with its userfaultfd.
    AttachSpace(AttachSpace) = 12,
    /// A further address space is served no more.
    DetachSpace {
        /// Its number.
        space: u32,
    } = 13,
    /// What the VM is called.
    Label(VmLabel) = 14,
    /// The answer to [`Self::Hello`].
    Welcome(Welcome) = 0x8001,
    /// Faults are served from now on.
    Attached {
        /// The number of regions.
        regions: u32,
        /// Whether the VM replays or records.
        working_set: WorkingSetState,
        /// All regions together.
        bytes: u64,
        /// The digest of the image.
        image: Digest,
    } = 0x8002,
    /// The answer to [`Self::Share`], with a memfd.
    Shared {
        /// The length of the file.
        bytes: u64,
        /// The size of its pages in bytes.
        page_bytes: u64,
    } = 0x8003,
    /// The answer to [`Self::HealthRequest`].
    Health(Health) = 0x8004,
    /// A drain goes on.
    Progress {
        /// Pages that are present.
        present: u64,
        /// All pages.
        pages: u64,
    } = 0x8005,
    /// Every page that is not lost is present.
    Drained(Drained) = 0x8006,
    /// The answer to [`Self::WorkingSet`].
    WorkingSetState {
        /// The state from now on.
        state: WorkingSetState,
        /// Pages that were saved, or are to be replayed.
        pages: u64,
    } = 0x8007,
    /// The answer to [`Self::Poison`].
    Poisoned {
        /// Pages that were not poisoned before.
        pages: u64,
    } = 0x8008,
    /// The answer to [`Self::Resume`] and [`Self::DetachSpace`].
    Done {
        /// The number of regions that were resumed or detached.
        count: u64,
    } = 0x8009,
    /// A part of a page map.
    PageMap(PageMapPart) = 0x800a,
    /// The server serves no fault any more.
    HandedOver {
        /// The number of parts that were sent.
        parts: u32,
    } = 0x800b,
    /// The server has let go of the VM.
    Left = 0x800c,
    /// The answer to [`Self::AttachSpace`]: its faults are served from now on.
    SpaceAttached {
        /// Its number.
        space: u32,
    } = 0x800d,
    /// The request was refused.
    Refused {
        /// Why.
        code: RefusedCode,
        /// Why, for people.
        text: String,
    } = 0x80ff,
    /// Notice: threads that touch missing pages wait.
    Stalled {
        /// The number of stalled regions.
        regions: u32,
        /// The error.
        text: String,
    } = 0x9001,
    /// Notice: stalled regions were resumed.
    Resumed {
        /// The number of regions.
        regions: u32,
    } = 0x9002,
    /// Notice: the server ends.
    GoingAway {
        /// Milliseconds until missing pages are poisoned.
        within_ms: u32,
    } = 0x9003,
    /// Notice: the VMM is killed.
    Killed {
        /// The error.
        text: String,
    } = 0x9004,
}
