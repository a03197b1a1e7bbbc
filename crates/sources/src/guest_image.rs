//! Guest memory as an image: its content by offset.

use std::fmt;
use std::sync::Arc;

use pagetide_memory::{HostRange, Urgency};
use pagetide_pager::Filled;
use thiserror::Error;

use crate::blob::BlobError;
use crate::digest::Digest;
use crate::file::FileIdentity;
use crate::object::ObjectCounters;
use crate::standing::Standing;

/// Why an image did not deliver content.
#[derive(Debug, Error)]
pub enum ImageError {
    /// The image has no such page: the offset lies at or beyond its end, or it ends inside the page.
    #[error(
        "no such page: the image has {image_bytes} bytes, and {bytes} at offset {offset} were requested"
    )]
    NoSuchPage {
        /// The first requested byte.
        offset: u64,
        /// The number of requested bytes.
        bytes: u64,
        /// The image's length.
        image_bytes: u64,
    },
    /// The file or object could not be read.
    #[error(transparent)]
    Blob(#[from] BlobError),
    /// A part of the image differs from its checksum.
    #[error(
        "{name}: chunk {chunk}, at offset {offset} of the file, differs from its checksum: the image is damaged"
    )]
    Damaged {
        /// The file or object.
        name: String,
        /// The number of the damaged chunk.
        chunk: u64,
        /// Its offset in the file.
        offset: u64,
    },
    /// A part of the image has its checksum, and cannot be decompressed.
    #[error("{name}: chunk {chunk}, at offset {offset} of the file, cannot be decompressed")]
    Undecodable {
        /// The file or object.
        name: String,
        /// The number of the chunk.
        chunk: u64,
        /// Its offset in the file.
        offset: u64,
        /// The decompressor's error.
        #[source]
        source: Arc<std::io::Error>,
    },
}

impl ImageError {
    /// Whether another attempt cannot succeed either.
    pub fn is_permanent(&self) -> bool {
        match self {
            Self::NoSuchPage { .. } | Self::Damaged { .. } | Self::Undecodable { .. } => true,
            Self::Blob(error) => error.is_permanent(),
        }
    }

    const OWN_KINDS: [&'static str; 3] = ["no_such_page", "damaged", "undecodable"];

    /// All that [`Self::kind`] returns.
    pub fn kinds() -> impl Iterator<Item = &'static str> {
        Self::OWN_KINDS.into_iter().chain(BlobError::KINDS)
    }

    /// A short name for metrics.
    pub fn kind(&self) -> &'static str {
        let [no_such_page, damaged, undecodable] = Self::OWN_KINDS;
        match self {
            Self::NoSuchPage { .. } => no_such_page,
            Self::Damaged { .. } => damaged,
            Self::Undecodable { .. } => undecodable,
            Self::Blob(error) => error.kind(),
        }
    }
}

/// The memory of a guest, as a snapshot has it. All VMs that were restored from it share one.
pub trait GuestImage: Send + Sync + fmt::Debug {
    /// Its name for messages: a path or a URL, without credentials.
    fn name(&self) -> &str;

    /// Its length. Firecracker's regions are at offsets of one file.
    fn bytes(&self) -> u64;

    /// Its identity: working sets and layers name it.
    fn digest(&self) -> Digest;

    /// What tells beside the digest whether an image that is opened again is this one: the file, if the digest
    /// does not cover all of the content. It is not the same for a copy of the image.
    fn file_identity(&self) -> Option<FileIdentity> {
        None
    }

    /// What its name leads to now: for an image in layers, the names of all of them. May wait, for a store's answer.
    ///
    /// # Errors
    /// [`ImageError::Blob`]: that what has the name cannot be told.
    fn standing(&self) -> Result<Standing, ImageError>;

    /// Bytes of it that are holes of a file, and read as zeroes.
    fn hole_bytes(&self) -> u64 {
        0
    }

    /// Fills `buffer` with the content from `offset` on, or returns [`Filled::Zero`] and leaves the
    /// buffer undefined. May wait.
    ///
    /// # Errors
    /// [`ImageError`]; the buffer is then undefined.
    fn read(&self, offset: u64, buffer: &mut [u8], urgency: Urgency) -> Result<Filled, ImageError>;

    /// The same if it needs no waiting; `None` otherwise, and after an error.
    fn read_now(&self, offset: u64, buffer: &mut [u8], urgency: Urgency) -> Option<Filled> {
        let _ = (offset, buffer, urgency);
        None
    }

    /// What reading has cost so far, if the image is an object of a store.
    fn counters(&self) -> Option<ObjectCounters> {
        None
    }

    /// The addresses of `bytes` bytes of content from `offset` on, see [`crate::Blob::mapped`].
    fn mapped(&self, offset: u64, bytes: u64) -> Option<HostRange> {
        let _ = (offset, bytes);
        None
    }
}

/// Checks that an image of `image_bytes` bytes has `bytes` bytes at `offset`.
pub(crate) fn check_inside(offset: u64, bytes: usize, image_bytes: u64) -> Result<(), ImageError> {
    let bytes = bytes as u64;
    match offset.checked_add(bytes) {
        Some(end) if end <= image_bytes => Ok(()),
        _ => Err(ImageError::NoSuchPage {
            offset,
            bytes,
            image_bytes,
        }),
    }
}
