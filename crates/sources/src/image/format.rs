//! The bytes of a Pagetide image, without I/O: the header. docs/design/image-format.md describes them.

use thiserror::Error;

use super::base::{BasePlace, BaseReference};
use crate::digest::Digest;

/// The first bytes of an image.
pub(crate) const MAGIC: [u8; 16] = *b"\x89pagetide image\n";
/// How many bytes of the magic a file has, at least, that is taken for an image whose first bytes are
/// damaged, and not for raw memory.
const MAGIC_RESEMBLED: usize = 8;
/// The version that this code reads and writes.
pub const VERSION: u32 = 1;
/// Bytes of the header.
pub(crate) const HEADER_BYTES: u32 = 4096;
/// Bytes of guest memory in a chunk, unless the writer is told otherwise.
pub const DEFAULT_CHUNK_BYTES: u32 = 64 << 10;
/// The smallest chunk, in bytes.
pub const LEAST_CHUNK_BYTES: u32 = 4 << 10;
/// The largest chunk, in bytes.
pub const MOST_CHUNK_BYTES: u32 = 4 << 20;
/// The largest guest memory, in bytes: 16 TiB.
pub const MOST_MEMORY_BYTES: u64 = 16 << 40;

/// The bytes of the map's entry of one chunk of guest memory.
pub(super) const ENTRY_BYTES: u64 = 4;
/// The bytes of the index's record of one stored chunk.
pub(super) const RECORD_BYTES: u64 = 48;
/// The first number that names no stored chunk.
pub(super) const RESERVED: u32 = 0xffff_fff0;

// Offsets in the header.
const AT_VERSION: usize = 16;
const AT_CHUNK_BYTES: usize = 20;
const AT_MEMORY_BYTES: usize = 24;
const AT_INDEX_OFFSET: usize = 32;
const AT_INDEX_BYTES: usize = 40;
const AT_STORED_CHUNKS: usize = 48;
const AT_DIGEST: usize = 64;
const AT_BASE_DIGEST: usize = 96;
const AT_BASE_KIND: usize = 128;
const AT_BASE_BYTES: usize = 132;
const AT_BASE: usize = 136;
const AT_CHECKSUM: usize = HEADER_LEN - 32;
const HEADER_LEN: usize = HEADER_BYTES as usize;

/// The maximal length of the base's name, path or URL, in bytes.
pub const MOST_BASE_BYTES: usize = AT_CHECKSUM - AT_BASE;

/// Why bytes are no Pagetide image that this version reads.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum FormatError {
    /// The first bytes are another file's.
    #[error("it is no Pagetide image")]
    NotAnImage,
    /// The file is not as long as its header says.
    #[error("the image is damaged: it has {bytes} bytes, and should have {wanted}")]
    Length {
        /// Its length.
        bytes: u64,
        /// The length that follows from the header; that of the header if the file is shorter.
        wanted: u64,
    },
    /// The header differs from its checksum.
    #[error("the image is damaged: its header differs from its checksum")]
    HeaderDamaged,
    /// The index differs from the header's digest.
    #[error("the image is damaged: its index differs from its digest")]
    IndexDamaged,
    /// A version that this code does not read.
    #[error(
        "the image has version {found} of the format, and this program reads version {VERSION}"
    )]
    Version {
        /// The image's version.
        found: u32,
    },
    /// A chunk size that is no power of two from 4K to 4M.
    #[error("chunks of {bytes} bytes: the size must be a power of two from 4K to 4M")]
    ChunkBytes {
        /// The size in bytes.
        bytes: u32,
    },
    /// Guest memory that is too long.
    #[error("{bytes} bytes of guest memory: the most is 16 TiB, in fewer than 2^32 - 16 chunks")]
    MemoryBytes {
        /// The length of guest memory.
        bytes: u64,
    },
    /// The index is not where it must be, or not as long as its counts say.
    #[error(
        "an index of {bytes} bytes at offset {offset} does not fit {entries} chunks, {stored} of them stored"
    )]
    Index {
        /// Its offset in the file.
        offset: u64,
        /// Its length.
        bytes: u64,
        /// Chunks of guest memory.
        entries: u64,
        /// Stored chunks.
        stored: u32,
    },
    /// A byte of the header that must be zero is not.
    #[error("byte {offset} of the header is not zero, as version {VERSION} has it")]
    Reserved {
        /// Its offset.
        offset: usize,
    },
    /// The base's location is malformed.
    #[error("the base's location is malformed")]
    BasePlace,
    /// An entry of the chunk map that names nothing.
    #[error("chunk {chunk} of guest memory refers to {entry}, which the image does not have")]
    Entry {
        /// The chunk of guest memory.
        chunk: u64,
        /// The entry.
        entry: u32,
    },
    /// Stored chunks that no entry of the map names.
    #[error("{unnamed} stored chunks belong to no chunk of guest memory")]
    Unnamed {
        /// How many.
        unnamed: u32,
    },
    /// A stored chunk that overlaps another, leaves a gap, lies outside the data, or has an impossible
    /// length or encoding.
    #[error(
        "stored chunk {number}, {bytes} bytes at offset {offset} with encoding {encoding}, is not as it must be"
    )]
    Stored {
        /// Its number.
        number: u32,
        /// Its offset in the file.
        offset: u64,
        /// Its length in the file.
        bytes: u32,
        /// The number of its encoding.
        encoding: u32,
    },
}

impl FormatError {
    /// Whether bytes of the image were changed or lost, rather than written so.
    pub fn is_damage(&self) -> bool {
        matches!(
            self,
            Self::Length { .. } | Self::HeaderDamaged | Self::IndexDamaged
        )
    }
}

/// Whether these are the first bytes of an image, intact or not.
pub(crate) fn resembles(head: &[u8]) -> bool {
    let equal = head.iter().zip(MAGIC).filter(|(a, b)| *a == b).count();
    head.len() >= MAGIC.len() && equal >= MAGIC_RESEMBLED
}

/// The header's content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    /// The length of guest memory.
    pub(crate) memory_bytes: u64,
    /// Bytes of guest memory in a chunk.
    pub(crate) chunk_bytes: u32,
    /// The number of stored chunks.
    pub(crate) stored_chunks: u32,
    /// Where the data ends and the index begins.
    pub(crate) index_offset: u64,
    /// The image's digest.
    pub(crate) digest: Digest,
    /// The base, if there is one.
    pub(crate) base: Option<BaseReference>,
}

/// Checks a chunk size.
///
/// # Errors
/// [`FormatError::ChunkBytes`].
pub(crate) fn check_chunk_bytes(bytes: u32) -> Result<(), FormatError> {
    let bounds = LEAST_CHUNK_BYTES..=MOST_CHUNK_BYTES;
    match bytes.is_power_of_two() && bounds.contains(&bytes) {
        true => Ok(()),
        false => Err(FormatError::ChunkBytes { bytes }),
    }
}

/// Checks that guest memory of this length can be divided into chunks of this size.
///
/// # Errors
/// [`FormatError::ChunkBytes`], [`FormatError::MemoryBytes`].
pub(crate) fn check_memory_bytes(bytes: u64, chunk_bytes: u32) -> Result<(), FormatError> {
    check_chunk_bytes(chunk_bytes)?;
    let entries = bytes.div_ceil(chunk_bytes.into());
    match bytes <= MOST_MEMORY_BYTES && entries <= RESERVED.into() {
        true => Ok(()),
        false => Err(FormatError::MemoryBytes { bytes }),
    }
}

impl Header {
    /// The number of chunks of guest memory.
    pub(crate) fn entries(&self) -> u64 {
        self.memory_bytes.div_ceil(self.chunk_bytes.into())
    }

    /// The length of the index. No sum overflows: both counts are below 2^32.
    pub(crate) fn index_bytes(&self) -> u64 {
        self.entries() * ENTRY_BYTES + u64::from(self.stored_chunks) * RECORD_BYTES
    }

    /// The bytes of guest memory in a chunk: fewer in the last.
    pub(crate) fn bytes_of(&self, chunk: u64) -> u32 {
        let begin = chunk * u64::from(self.chunk_bytes);
        let rest = self.memory_bytes.saturating_sub(begin);
        u32::try_from(rest).map_or(self.chunk_bytes, |rest| rest.min(self.chunk_bytes))
    }

    /// The digest of an image with this header and index.
    pub(crate) fn digest_with(&self, index: &[u8]) -> Digest {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&MAGIC);
        hasher.update(&VERSION.to_le_bytes());
        hasher.update(&self.memory_bytes.to_le_bytes());
        hasher.update(&self.chunk_bytes.to_le_bytes());
        let base = self.base.as_ref();
        hasher.update(&base.map_or([0; 32], |base| base.digest.0));
        hasher.update(index);
        hasher.finalize().into()
    }

    /// The header's bytes, with its checksum.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![0; HEADER_LEN];
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        put(0, &MAGIC);
        put(AT_VERSION, &VERSION.to_le_bytes());
        put(AT_CHUNK_BYTES, &self.chunk_bytes.to_le_bytes());
        put(AT_MEMORY_BYTES, &self.memory_bytes.to_le_bytes());
        put(AT_INDEX_OFFSET, &self.index_offset.to_le_bytes());
        put(AT_INDEX_BYTES, &self.index_bytes().to_le_bytes());
        put(AT_STORED_CHUNKS, &self.stored_chunks.to_le_bytes());
        put(AT_DIGEST, &self.digest.0);
        if let Some(base) = &self.base {
            let (kind, place) = base.place.encode();
            let place = &place[..place.len().min(MOST_BASE_BYTES)];
            let length = u32::try_from(place.len()).unwrap_or_default();
            put(AT_BASE_DIGEST, &base.digest.0);
            put(AT_BASE_KIND, &kind.to_le_bytes());
            put(AT_BASE_BYTES, &length.to_le_bytes());
            put(AT_BASE, place);
        }
        seal(&mut bytes);
        bytes
    }

    /// Reads the header of a file of `file_bytes` bytes, which begins with `bytes`.
    ///
    /// # Errors
    /// [`FormatError`].
    pub(crate) fn decode(bytes: &[u8], file_bytes: u64) -> Result<Self, FormatError> {
        if !resembles(bytes) {
            return Err(FormatError::NotAnImage);
        }
        let Some(bytes) = bytes.get(..HEADER_LEN) else {
            return Err(FormatError::Length {
                bytes: file_bytes,
                wanted: HEADER_BYTES.into(),
            });
        };
        // The order matters: every version has its checksum here, so that damage is told from novelty.
        let (checked, checksum) = bytes.split_at(AT_CHECKSUM);
        if !bytes.starts_with(&MAGIC) || blake3::hash(checked) != *checksum {
            return Err(FormatError::HeaderDamaged);
        }
        let found = u32_at(bytes, AT_VERSION);
        if found != VERSION {
            return Err(FormatError::Version { found });
        }
        let mut header = Self {
            memory_bytes: u64_at(bytes, AT_MEMORY_BYTES),
            chunk_bytes: u32_at(bytes, AT_CHUNK_BYTES),
            stored_chunks: u32_at(bytes, AT_STORED_CHUNKS),
            index_offset: u64_at(bytes, AT_INDEX_OFFSET),
            digest: Digest(array_at(bytes, AT_DIGEST)),
            base: None,
        };
        check_memory_bytes(header.memory_bytes, header.chunk_bytes)?;
        header.base = decode_base(bytes)?;
        let end = AT_BASE + header.base_bytes();
        let zeroes = (AT_STORED_CHUNKS + 4..AT_DIGEST).chain(end..AT_CHECKSUM);
        if let Some(offset) = zeroes.into_iter().find(|&at| bytes[at] != 0) {
            return Err(FormatError::Reserved { offset });
        }
        let index_bytes = u64_at(bytes, AT_INDEX_BYTES);
        let index_end = header.index_offset.checked_add(index_bytes);
        let is_placed = header.index_offset >= HEADER_BYTES.into()
            && u64::from(header.stored_chunks) <= header.entries()
            && index_bytes == header.index_bytes();
        match index_end {
            Some(wanted) if is_placed && wanted == file_bytes => Ok(header),
            Some(wanted) if is_placed => Err(FormatError::Length {
                bytes: file_bytes,
                wanted,
            }),
            _ => Err(FormatError::Index {
                offset: header.index_offset,
                bytes: index_bytes,
                entries: header.entries(),
                stored: header.stored_chunks,
            }),
        }
    }

    fn base_bytes(&self) -> usize {
        let base = self.base.as_ref();
        base.map_or(0, |base| base.place.encode().1.len())
    }
}

fn decode_base(header: &[u8]) -> Result<Option<BaseReference>, FormatError> {
    let digest = Digest(array_at(header, AT_BASE_DIGEST));
    let kind = u32_at(header, AT_BASE_KIND);
    let bytes = usize::try_from(u32_at(header, AT_BASE_BYTES)).unwrap_or(usize::MAX);
    if kind == 0 {
        let is_empty = bytes == 0 && digest.0 == [0; 32];
        return is_empty.then_some(None).ok_or(FormatError::BasePlace);
    }
    let place = header[AT_BASE..AT_CHECKSUM].get(..bytes);
    let place = place.and_then(|place| BasePlace::decode(kind, place));
    let place = place.ok_or(FormatError::BasePlace)?;
    Ok(Some(BaseReference { digest, place }))
}

/// Writes the checksum of a header.
pub(crate) fn seal(header: &mut [u8]) {
    let (checked, checksum) = header.split_at_mut(AT_CHECKSUM);
    checksum.copy_from_slice(blake3::hash(checked).as_bytes());
}

pub(super) fn array_at<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut array = [0; N];
    array.copy_from_slice(&bytes[at..at + N]);
    array
}

pub(super) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array_at(bytes, at))
}

pub(super) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array_at(bytes, at))
}

#[cfg(test)]
#[path = "format_tests.rs"]
mod tests;
