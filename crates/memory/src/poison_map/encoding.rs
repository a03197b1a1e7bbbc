//! A poison map as bytes.
//!
//! All numbers are little-endian.
//!
//! | bytes | content |
//! |---|---|
//! | 8 | `PTPOISON` |
//! | 4 | version: 1 |
//! | 4 | number of ranges, at most [`PoisonMap::MAX_RANGES`] |
//! | 16 each | first gpa and length in bytes: multiples of 4096, ascending, with gaps in between |
//! | 4 | CRC-32 (IEEE 802.3) of everything before |

use thiserror::Error;

use super::PoisonMap;
use crate::address::GuestAddress;
use crate::range::{GuestRange, RangeError};

const MAGIC: [u8; 8] = *b"PTPOISON";
const VERSION: u32 = 1;
const HEADER_BYTES: usize = 16;
const RANGE_BYTES: usize = 16;
const CHECKSUM_BYTES: usize = 4;

/// Why bytes are not a poison map.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ParsePoisonError {
    /// The bytes do not begin with the magic number.
    #[error("not a poison map")]
    NotAPoisonMap,
    /// The version is unknown.
    #[error("a poison map of version {version}; only version {VERSION} is supported")]
    UnknownVersion {
        /// The map's version.
        version: u32,
    },
    /// The header has more ranges than the maximum.
    #[error(
        "a poison map of {count} ranges; the maximum is {}",
        PoisonMap::MAX_RANGES
    )]
    TooManyRanges {
        /// The number of ranges in the header.
        count: u32,
    },
    /// The map is truncated, or followed by more bytes.
    #[error("a poison map of {bytes} bytes instead of {wanted}")]
    WrongLength {
        /// The map's length in bytes.
        bytes: usize,
        /// The length that follows from the header.
        wanted: usize,
    },
    /// The checksum does not match the content.
    #[error("a damaged poison map: checksum {found:#010x}, its content has {computed:#010x}")]
    WrongChecksum {
        /// The stored checksum.
        found: u32,
        /// The checksum of the content.
        computed: u32,
    },
    /// A range is invalid.
    #[error("range {index} of a poison map is invalid")]
    BadRange {
        /// The range's number, from 0 on.
        index: usize,
        /// The reason.
        #[source]
        source: RangeError,
    },
    /// Ranges overlap, are adjacent, or are not in ascending order.
    #[error("range {index} of a poison map ({range}) does not follow its predecessor after a gap")]
    OutOfOrder {
        /// The range's number, from 0 on.
        index: usize,
        /// The range.
        range: GuestRange,
    },
}

impl PoisonMap {
    /// The length of the largest map in bytes.
    pub const MAX_ENCODED_BYTES: usize =
        HEADER_BYTES + Self::MAX_RANGES * RANGE_BYTES + CHECKSUM_BYTES;

    /// The map as bytes, for a file or a peer.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes =
            Vec::with_capacity(HEADER_BYTES + self.len() * RANGE_BYTES + CHECKSUM_BYTES);
        bytes.extend_from_slice(&MAGIC);
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        // There are at most MAX_RANGES.
        let count = u32::try_from(self.len()).unwrap_or(u32::MAX);
        bytes.extend_from_slice(&count.to_le_bytes());
        for range in self.iter() {
            bytes.extend_from_slice(&range.start().0.to_le_bytes());
            bytes.extend_from_slice(&range.bytes().to_le_bytes());
        }
        let checksum = crc32fast::hash(&bytes);
        bytes.extend_from_slice(&checksum.to_le_bytes());
        bytes
    }

    /// Decodes exactly what [`Self::encode`] produces, and refuses everything else. Allocates no more
    /// than the length of `bytes` justifies.
    pub fn decode(bytes: &[u8]) -> Result<Self, ParsePoisonError> {
        let (magic, rest) = bytes
            .split_first_chunk::<8>()
            .ok_or(ParsePoisonError::NotAPoisonMap)?;
        if *magic != MAGIC {
            return Err(ParsePoisonError::NotAPoisonMap);
        }
        let too_short = |wanted| ParsePoisonError::WrongLength {
            bytes: bytes.len(),
            wanted,
        };
        let shortest = HEADER_BYTES + CHECKSUM_BYTES;
        let (version, rest) = rest.split_first_chunk().ok_or(too_short(shortest))?;
        let version = u32::from_le_bytes(*version);
        if version != VERSION {
            return Err(ParsePoisonError::UnknownVersion { version });
        }
        let (count, rest) = rest.split_first_chunk().ok_or(too_short(shortest))?;
        let claimed = u32::from_le_bytes(*count);
        let count = usize::try_from(claimed).unwrap_or(usize::MAX);
        if count > Self::MAX_RANGES {
            return Err(ParsePoisonError::TooManyRanges { count: claimed });
        }
        let wanted = shortest + count * RANGE_BYTES;
        if bytes.len() != wanted {
            return Err(too_short(wanted));
        }
        let (content, checksum) = bytes
            .split_last_chunk::<CHECKSUM_BYTES>()
            .ok_or(too_short(wanted))?;
        let (found, computed) = (u32::from_le_bytes(*checksum), crc32fast::hash(content));
        if found != computed {
            return Err(ParsePoisonError::WrongChecksum { found, computed });
        }
        let mut map = Self::new();
        let mut next = 0;
        let (words, _) = rest.as_chunks::<8>();
        let mut words = words.iter().map(|word| u64::from_le_bytes(*word));
        for index in 0..count {
            let (Some(start), Some(length)) = (words.next(), words.next()) else {
                return Err(too_short(wanted));
            };
            let range = GuestRange::new(GuestAddress(start), length)
                .map_err(|source| ParsePoisonError::BadRange { index, source })?;
            if index > 0 && start <= next {
                return Err(ParsePoisonError::OutOfOrder { index, range });
            }
            next = range.end().0;
            map.ranges.insert(start, next);
        }
        Ok(map)
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_checksum_is_standard_crc32() {
        // Files of older versions remain readable.
        assert_eq!(crc32fast::hash(b"123456789"), 0xcbf4_3926);
        assert_eq!(crc32fast::hash(b""), 0);
    }
}
