//! Why a client was not attached.

use std::io;
use std::time::Duration;

use pagetide_memory::{ImportError, PageSize};
use pagetide_uapi::userfaultfd::{AdoptError, Features};
use rustix::io::Errno;
use thiserror::Error;

use super::message::{DecodeError, RefusedCode, RegionMode};
use super::session::SessionError;
use super::share::ShareError;
use super::{LOWEST_VERSION, MAX_MAP_BYTES, VERSION};
use crate::budgets::OverBudget;
use crate::handshake::HandshakeError;

/// Why a client was not attached.
#[derive(Debug, Error)]
pub(crate) enum AttachError {
    /// The client has closed the connection, or has left.
    #[error("the client has left before attach")]
    Left,
    /// There was no attach in time.
    #[error("no attach within {} s", limit.as_secs())]
    Late {
        /// The time limit.
        limit: Duration,
    },
    /// The server ends.
    #[error("the server ends")]
    Stopping,
    /// Waiting for the connection failed.
    #[error("waiting for the client")]
    Wait(#[source] Errno),
    /// The bytes or descriptors are not those of the protocol.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// The user's clients have taken too much.
    #[error(transparent)]
    Budget(#[from] OverBudget),
    /// A message of an unknown type.
    #[error(transparent)]
    Unknown(DecodeError),
    /// No version in common.
    #[error(
        "the client knows the versions {lowest} to {highest}, and the server {LOWEST_VERSION} to {VERSION}"
    )]
    Version {
        /// The client's lowest.
        lowest: u16,
        /// The client's highest.
        highest: u16,
    },
    /// A message that does not belong before attach, or before hello.
    #[error("a message of type {kind:#06x} does not belong here")]
    Order {
        /// Its type.
        kind: u16,
    },
    /// A region is invalid.
    #[error(transparent)]
    Region(#[from] HandshakeError),
    /// A region names no descriptor.
    #[error("region {region} names descriptor {number}, and {count} came")]
    NoDescriptor {
        /// The number of the region.
        region: usize,
        /// The descriptor's number.
        number: u8,
        /// How many came.
        count: usize,
    },
    /// A descriptor that no region names, or that regions name as different things.
    #[error("descriptor {number} is not one userfaultfd or one file of the regions")]
    UnusedDescriptor {
        /// Its number.
        number: usize,
    },
    /// A descriptor is no userfaultfd.
    #[error("descriptor {number} cannot be used")]
    NotUserfaultfd {
        /// Its number.
        number: usize,
        /// The reason.
        #[source]
        source: AdoptError,
    },
    /// A descriptor could not be duplicated.
    #[error("duplicating a descriptor")]
    Duplicate(#[source] io::Error),
    /// The userfaultfd was opened with features with which the mode does not work.
    #[error("region {region}: the userfaultfd needs {missing} for mode {mode:?}")]
    Features {
        /// The number of the region.
        region: usize,
        /// Its mode.
        mode: RegionMode,
        /// What is missing.
        missing: Features,
    },
    /// With `UFFD_FEATURE_SIGBUS` no fault is reported.
    #[error("a userfaultfd with UFFD_FEATURE_SIGBUS reports no fault")]
    SigbusFeature,
    /// Huge pages in MINOR or CLONE mode.
    #[error("region {region}: pages of {page_size} in mode {mode:?} are not served yet")]
    HugePages {
        /// The number of the region.
        region: usize,
        /// Its page size.
        page_size: PageSize,
        /// Its mode.
        mode: RegionMode,
    },
    /// The file may shrink, and an access beyond its end would raise SIGBUS in the server.
    #[error("region {region}: its memfd has no F_SEAL_SHRINK")]
    NotSealed {
        /// The number of the region.
        region: usize,
    },
    /// The file has no seals: it is no memfd.
    #[error("region {region}: its file is no memfd")]
    NotMemfd {
        /// The number of the region.
        region: usize,
        /// The kernel's error.
        #[source]
        errno: Errno,
    },
    /// A clone without the server's memfd.
    #[error("region {region} is a clone, and share was not asked for")]
    NotShared {
        /// The number of the region.
        region: usize,
    },
    /// Memory beyond the end of the image.
    #[error(
        "region {region} ends at offset {end} of an image of {image_bytes} bytes (--any-length permits that, but for clones)"
    )]
    BeyondImage {
        /// The number of the region.
        region: usize,
        /// The end of its content.
        end: u64,
        /// The image's length.
        image_bytes: u64,
    },
    /// The memfd could not be made.
    #[error(transparent)]
    Share(#[from] ShareError),
    /// Too many bytes of page maps.
    #[error("the page maps have more than {MAX_MAP_BYTES} bytes")]
    MapsTooLong,
    /// A page map is damaged.
    #[error("the page map of region {region} from page {first_page} on")]
    Map {
        /// The number of the region.
        region: u32,
        /// The first page.
        first_page: u64,
        /// The reason.
        #[source]
        source: ImportError,
    },
    /// A page map of no region.
    #[error("a page map of region {region}, and there are {regions}")]
    MapOfNoRegion {
        /// The number of the region.
        region: u32,
        /// How many there are.
        regions: usize,
    },
}

impl AttachError {
    /// The code for the client; `None` if it needs no answer.
    pub(crate) fn code(&self) -> Option<RefusedCode> {
        Some(match self {
            Self::Left | Self::Wait(_) => return None,
            Self::Late { .. } | Self::Order { .. } => RefusedCode::Order,
            Self::Share(error) => error.code(),
            Self::Stopping | Self::Duplicate(_) => RefusedCode::Internal,
            Self::Session(error) => error.code(),
            Self::Budget(error) => error.code(),
            Self::Unknown(_) | Self::HugePages { .. } => RefusedCode::Unsupported,
            Self::Version { .. } => RefusedCode::Version,
            Self::Region(_) | Self::NotShared { .. } => RefusedCode::Regions,
            Self::NoDescriptor { .. }
            | Self::UnusedDescriptor { .. }
            | Self::NotUserfaultfd { .. }
            | Self::Features { .. }
            | Self::SigbusFeature => RefusedCode::Descriptors,
            Self::NotSealed { .. } => RefusedCode::NotSealed,
            Self::NotMemfd { .. } => RefusedCode::File,
            Self::BeyondImage { .. } => RefusedCode::NoContent,
            Self::MapsTooLong | Self::Map { .. } | Self::MapOfNoRegion { .. } => {
                RefusedCode::PageMap
            }
        })
    }
}
