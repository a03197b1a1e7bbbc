//! What an image is, from its header and index alone.

use super::base::BaseReference;
use super::format::{Header, VERSION};
use super::index::Index;
use super::layers::{Head, IndexRoom, Layer};
use crate::digest::Digest;
use crate::open::{Location, OpenError, OpenOptions, open_blob};

/// What an image is. Its base need not be there.
#[derive(Clone, Debug, PartialEq)]
pub struct ImageInfo {
    /// The file or object.
    pub name: String,
    /// The version of the format.
    pub version: u32,
    /// The length of guest memory.
    pub memory_bytes: u64,
    /// Bytes of guest memory in a chunk.
    pub chunk_bytes: u32,
    /// Chunks of guest memory.
    pub chunks: u64,
    /// Chunks that the file stores, each once.
    pub stored_chunks: u64,
    /// Chunks of guest memory that are zero.
    pub zero_chunks: u64,
    /// Chunks of guest memory that are as in the base.
    pub base_chunks: u64,
    /// Chunks of guest memory that share a stored chunk with an earlier one.
    pub duplicate_chunks: u64,
    /// Bytes of stored chunks.
    pub stored_bytes: u64,
    /// Bytes of the file: stored chunks, header and index.
    pub file_bytes: u64,
    /// The image's digest.
    pub digest: Digest,
    /// The base, if there is one.
    pub base: Option<BaseReference>,
}

impl ImageInfo {
    pub(crate) fn new(name: &str, header: &Header, index: &Index) -> Self {
        let counts = index.counts();
        Self {
            name: name.to_owned(),
            version: VERSION,
            memory_bytes: header.memory_bytes,
            chunk_bytes: header.chunk_bytes,
            chunks: header.entries(),
            stored_chunks: header.stored_chunks.into(),
            zero_chunks: counts.zero,
            base_chunks: counts.base,
            duplicate_chunks: counts.duplicate,
            stored_bytes: index
                .stored()
                .iter()
                .map(|chunk| u64::from(chunk.bytes))
                .sum(),
            file_bytes: header.index_offset + header.index_bytes(),
            digest: header.digest,
            base: header.base.clone(),
        }
    }

    /// Reads the description of the image at `location`.
    ///
    /// # Errors
    /// [`OpenError::Blob`], [`OpenError::Format`].
    pub fn read(location: &Location, options: &OpenOptions) -> Result<Self, OpenError> {
        let blob = open_blob(location, options)?;
        let head = Head::read(&*blob)?;
        let layer = Layer::open(blob, &head, &mut IndexRoom::of(options))?;
        Ok(Self::new(layer.blob.name(), &layer.header, &layer.index))
    }
}
