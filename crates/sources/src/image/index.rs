//! The bytes of a Pagetide image, without I/O: the index.

use super::format::{
    FormatError, HEADER_BYTES, Header, RECORD_BYTES, RESERVED, array_at, u32_at, u64_at,
};

/// The map's entry of a chunk that is zero.
const ZERO: u32 = 0xffff_ffff;
/// The map's entry of a chunk that is as in the base.
const BASE: u32 = 0xffff_fffe;
/// How a stored chunk is encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Encoding {
    /// As it is.
    Raw = 0,
    /// One zstd frame.
    Zstd = 1,
}

/// The index's record of a stored chunk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StoredChunk {
    /// Its offset in the file.
    pub(crate) offset: u64,
    /// Its length in the file.
    pub(crate) bytes: u32,
    pub(crate) encoding: Encoding,
    /// BLAKE3 of its bytes in the file.
    pub(crate) checksum: [u8; 32],
}

impl StoredChunk {
    /// Where it ends in the file. No sum overflows: a checked chunk lies in the file.
    pub(crate) fn end(&self) -> u64 {
        self.offset + u64::from(self.bytes)
    }
}

/// What the map says of a chunk of guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Entry {
    /// All zeroes.
    Zero,
    /// As in the base.
    Base,
    /// The number of a stored chunk.
    Stored(u32),
}

impl Entry {
    fn of(number: u32) -> Self {
        match number {
            ZERO => Self::Zero,
            BASE => Self::Base,
            number => Self::Stored(number),
        }
    }

    fn number(self) -> u32 {
        match self {
            Self::Zero => ZERO,
            Self::Base => BASE,
            Self::Stored(number) => number,
        }
    }
}

/// The index: the map of guest memory, and the stored chunks in the order of the file.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Index {
    map: Vec<u32>,
    pub(super) stored: Vec<StoredChunk>,
}

/// How many chunks of guest memory are what.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) zero: u64,
    pub(crate) base: u64,
    /// Chunks that share a stored chunk with an earlier one.
    pub(crate) duplicate: u64,
}

impl Index {
    /// What the chunk is. The caller has checked that guest memory has the chunk.
    pub(crate) fn entry(&self, chunk: usize) -> Entry {
        Entry::of(self.map[chunk])
    }

    /// Adds the next chunk of guest memory.
    pub(crate) fn push(&mut self, entry: Entry) {
        self.map.push(entry.number());
    }

    /// Adds the next stored chunk; returns its number.
    pub(crate) fn store(&mut self, chunk: StoredChunk) -> u32 {
        self.stored.push(chunk);
        // There are no more stored chunks than chunks of guest memory, which are fewer than 2^32.
        u32::try_from(self.stored.len() - 1).unwrap_or(RESERVED)
    }

    /// The stored chunks, by number.
    pub(crate) fn stored(&self) -> &[StoredChunk] {
        &self.stored
    }

    pub(crate) fn counts(&self) -> Counts {
        let mut counts = Counts::default();
        let mut named = 0;
        for &entry in &self.map {
            match Entry::of(entry) {
                Entry::Zero => counts.zero += 1,
                Entry::Base => counts.base += 1,
                Entry::Stored(_) => named += 1,
            }
        }
        counts.duplicate = named - self.stored.len() as u64;
        counts
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.map.len() * 4 + self.stored.len() * 48);
        for entry in &self.map {
            bytes.extend(entry.to_le_bytes());
        }
        for chunk in &self.stored {
            bytes.extend(chunk.offset.to_le_bytes());
            bytes.extend(chunk.bytes.to_le_bytes());
            bytes.extend((chunk.encoding as u32).to_le_bytes());
            bytes.extend(chunk.checksum);
        }
        bytes
    }

    /// Reads the index of an image with this header.
    ///
    /// # Errors
    /// [`FormatError`].
    pub(crate) fn decode(bytes: &[u8], header: &Header) -> Result<Self, FormatError> {
        let is_whole = bytes.len() as u64 == header.index_bytes();
        if !is_whole || header.digest_with(bytes) != header.digest {
            return Err(FormatError::IndexDamaged);
        }
        let records = u64::from(header.stored_chunks) * RECORD_BYTES;
        // Both parts together have the length of `bytes`.
        let split = bytes.len() - usize::try_from(records).unwrap_or(bytes.len());
        let (map, records) = bytes.split_at(split);
        let map: Vec<u32> = map
            .as_chunks()
            .0
            .iter()
            .copied()
            .map(u32::from_le_bytes)
            .collect();
        check_map(&map, header)?;
        let last = map.last().copied().map(Entry::of);
        let mut end = HEADER_BYTES.into();
        let mut stored = Vec::with_capacity(records.len() / 48);
        for (number, record) in (0..).zip(records.as_chunks::<48>().0) {
            // The last chunk of guest memory, if it is stored, is the last stored one or a full one.
            let expected = match last == Some(Entry::Stored(number)) {
                true => header.bytes_of(header.entries() - 1),
                false => header.chunk_bytes,
            };
            let chunk = decode_record(record, number, end, expected, header.index_offset)?;
            end = chunk.end();
            stored.push(chunk);
        }
        // Data that no chunk claims would be data that no checksum covers.
        match end == header.index_offset {
            true => Ok(Self { map, stored }),
            false => Err(FormatError::Index {
                offset: header.index_offset,
                bytes: header.index_bytes(),
                entries: header.entries(),
                stored: header.stored_chunks,
            }),
        }
    }
}

/// Checks that the map names each stored chunk, for the first time in ascending order, and nothing else.
fn check_map(map: &[u32], header: &Header) -> Result<(), FormatError> {
    let mut next = 0;
    let last = header.entries().saturating_sub(1);
    for (chunk, &entry) in (0..).zip(map) {
        let is_short = chunk == last && header.bytes_of(chunk) < header.chunk_bytes;
        match Entry::of(entry) {
            Entry::Zero => {}
            Entry::Base if header.base.is_some() => {}
            Entry::Stored(number) if number == next && number < header.stored_chunks => next += 1,
            // Another length than all others: its own stored chunk.
            Entry::Stored(number) if number < next && !is_short => {}
            _ => return Err(FormatError::Entry { chunk, entry }),
        }
    }
    match header.stored_chunks - next {
        0 => Ok(()),
        unnamed => Err(FormatError::Unnamed { unnamed }),
    }
}

/// Reads the record of a stored chunk of `expected` bytes of guest memory, which begins where the one
/// before ended.
fn decode_record(
    record: &[u8; 48],
    number: u32,
    begin: u64,
    expected: u32,
    data_end: u64,
) -> Result<StoredChunk, FormatError> {
    let offset = u64_at(record, 0);
    let bytes = u32_at(record, 8);
    let encoding = u32_at(record, 12);
    let refused = FormatError::Stored {
        number,
        offset,
        bytes,
        encoding,
    };
    let encoding = match encoding {
        0 if bytes == expected => Encoding::Raw,
        1 if (1..expected).contains(&bytes) => Encoding::Zstd,
        _ => return Err(refused),
    };
    let end = offset.checked_add(bytes.into());
    if offset != begin || end.is_none_or(|end| end > data_end) {
        return Err(refused);
    }
    Ok(StoredChunk {
        offset,
        bytes,
        encoding,
        checksum: array_at(record, 16),
    })
}
