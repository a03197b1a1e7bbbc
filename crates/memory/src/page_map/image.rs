//! A page map as bytes, to hand partly present memory to a successor.
//!
//! All numbers are little-endian.
//!
//! | bytes | content |
//! |---|---|
//! | 8 | `PTPAGMAP` |
//! | 4 | version: 1 |
//! | 8 | number of pages |
//! | any | runs of pages in the same state, from page 0 on |
//! | 4 | CRC-32 (IEEE 802.3) of everything before |
//!
//! A run is one number in LEB128, of at most 64 bits and in its shortest form: the number of pages (at
//! least 1) times 8 plus their state (0 Absent, 1 Present, 2 Zero, 3 Removed, 4 Poisoned). Neighbouring
//! runs differ in state, and the runs' pages add up to the number in the header.

use thiserror::Error;

use super::PageMap;
use super::cell::{ABSENT, POISONED, PageState, STATE, update};
use crate::convert::to_u64;
use crate::page::{PageIndex, PageRange};
use crate::sync::Ordering;

const MAGIC: [u8; 8] = *b"PTPAGMAP";
const VERSION: u32 = 1;
const HEADER_BYTES: usize = 20;
const CHECKSUM_BYTES: usize = 4;
const SHORTEST: usize = HEADER_BYTES + CHECKSUM_BYTES;

/// Why bytes are not an image of a page map, or why an image does not fit a map.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ImportError {
    /// The bytes do not begin with the magic number.
    #[error("not an image of a page map")]
    NotAnImage,
    /// The version is unknown.
    #[error("an image of a page map of version {version}; only version {VERSION} is supported")]
    UnknownVersion {
        /// The image's version.
        version: u32,
    },
    /// The image is truncated.
    #[error("an image of a page map of {bytes} bytes; at least {SHORTEST} are needed")]
    TooShort {
        /// The image's length in bytes.
        bytes: usize,
    },
    /// The checksum does not match the content.
    #[error("a damaged image: checksum {found:#010x}, its content has {computed:#010x}")]
    WrongChecksum {
        /// The stored checksum.
        found: u32,
        /// The checksum of the content.
        computed: u32,
    },
    /// A run is truncated, not in its shortest form, empty, of an unknown state, or of the same state
    /// as the run before it.
    #[error("run {index} of the image is invalid")]
    BadRun {
        /// The run's number, from 0 on.
        index: usize,
    },
    /// The runs' pages do not add up to the number in the header.
    #[error("an image of {pages} pages whose runs have {found} pages")]
    WrongSum {
        /// The number of pages in the header.
        pages: u64,
        /// The number of pages of all runs, or of the runs up to the first that exceeds the number.
        found: u64,
    },
    /// The map has a different number of pages.
    #[error("an image of {image} pages for a map of {map}")]
    OtherSize {
        /// Pages of the image.
        image: u64,
        /// Pages of the map.
        map: u64,
    },
    /// The map is in use: a page of it is not Absent.
    #[error("page {page} of the map is {state:?} and not Absent")]
    InUse {
        /// The first such page.
        page: PageIndex,
        /// Its state.
        state: PageState,
    },
}

/// The settled states of a [`PageMap`], which a successor need not fetch again. A page that was not
/// settled is Absent in the image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageMapImage {
    pages: u64,
    runs: Vec<Run>,
}

/// Consecutive pages in the same state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    /// The page after the last one.
    end: u64,
    /// The page's byte, without flags.
    state: u8,
}

impl PageMapImage {
    /// The number of pages.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// The memory in bytes that it takes.
    pub fn memory_bytes(&self) -> usize {
        Self::most_memory_bytes(self.runs.capacity())
    }

    /// The most memory in bytes that images of so many bytes take when they are decoded: each run takes one byte of these at least.
    pub fn most_memory_bytes(encoded_bytes: usize) -> usize {
        encoded_bytes.saturating_mul(size_of::<Run>())
    }

    /// The state of `page`; `None` if there is no such page.
    pub fn state(&self, page: PageIndex) -> Option<PageState> {
        let run = self.runs.partition_point(|run| run.end <= page.0);
        Some(PageState::of(self.runs.get(run)?.state))
    }

    fn push(&mut self, count: u64, state: u8) {
        self.pages += count;
        match self.runs.last_mut() {
            Some(last) if last.state == state => last.end = self.pages,
            _ => self.runs.push(Run {
                end: self.pages,
                state,
            }),
        }
    }

    /// The image as bytes, for a file or a peer.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(SHORTEST + 2 * self.runs.len());
        bytes.extend_from_slice(&MAGIC);
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&self.pages.to_le_bytes());
        let mut start = 0;
        for run in &self.runs {
            // A map has one byte per page, so there are fewer than 2^61 pages.
            put_leb128(&mut bytes, (run.end - start) << 3 | u64::from(run.state));
            start = run.end;
        }
        let checksum = crc32fast::hash(&bytes);
        bytes.extend_from_slice(&checksum.to_le_bytes());
        bytes
    }

    /// Decodes exactly what [`Self::encode`] produces, and refuses everything else. Allocates at most
    /// 16 bytes for each byte of `bytes`, whatever number of pages the header has.
    pub fn decode(bytes: &[u8]) -> Result<Self, ImportError> {
        let short = ImportError::TooShort { bytes: bytes.len() };
        let (magic, rest) = bytes.split_first_chunk::<8>().ok_or(short)?;
        if *magic != MAGIC {
            return Err(ImportError::NotAnImage);
        }
        let (version, rest) = rest.split_first_chunk().ok_or(short)?;
        let version = u32::from_le_bytes(*version);
        if version != VERSION {
            return Err(ImportError::UnknownVersion { version });
        }
        let (pages, rest) = rest.split_first_chunk().ok_or(short)?;
        let pages = u64::from_le_bytes(*pages);
        let (mut rest, checksum) = rest.split_last_chunk::<CHECKSUM_BYTES>().ok_or(short)?;
        let found = u32::from_le_bytes(*checksum);
        let computed = crc32fast::hash(&bytes[..bytes.len() - CHECKSUM_BYTES]);
        if found != computed {
            return Err(ImportError::WrongChecksum { found, computed });
        }
        // Each run's last byte has no bit that says that another follows.
        let runs = rest.iter().filter(|&byte| byte & 0x80 == 0).count();
        let mut image = Self {
            pages: 0,
            runs: Vec::with_capacity(runs),
        };
        while !rest.is_empty() {
            let bad = ImportError::BadRun {
                index: image.runs.len(),
            };
            let (number, after) = take_leb128(rest).ok_or(bad)?;
            rest = after;
            let (count, state) = (number >> 3, number.to_le_bytes()[0] & STATE);
            let repeated = image.runs.last().is_some_and(|last| last.state == state);
            if count == 0 || state > POISONED || repeated {
                return Err(bad);
            }
            let sum = image.pages.checked_add(count).filter(|&sum| sum <= pages);
            if sum.is_none() {
                let found = image.pages.saturating_add(count);
                return Err(ImportError::WrongSum { pages, found });
            }
            image.push(count, state);
        }
        if image.pages != pages {
            let found = image.pages;
            return Err(ImportError::WrongSum { pages, found });
        }
        Ok(image)
    }
}

impl PageMap {
    /// The settled states of all pages. Reads one page after the other; a page that is settled
    /// meanwhile may or may not be Absent in the image.
    pub fn image(&self) -> PageMapImage {
        let mut image = PageMapImage {
            pages: 0,
            runs: Vec::new(),
        };
        for cell in self.cells.iter() {
            let byte = cell.load(Ordering::Acquire);
            let settled = PageState::of(byte).is_settled();
            image.push(1, if settled { byte & STATE } else { ABSENT });
        }
        image
    }

    /// Takes over the states of `image`. The map must have as many pages as the image, all Absent;
    /// otherwise it stays unchanged. (If another thread uses the map meanwhile, an error leaves the
    /// states that were taken over before it.)
    pub fn import(&self, image: &PageMapImage) -> Result<(), ImportError> {
        if image.pages != self.pages() {
            return Err(ImportError::OtherSize {
                image: image.pages,
                map: self.pages(),
            });
        }
        let in_use = |page, byte| ImportError::InUse {
            page,
            state: PageState::of(byte),
        };
        for (page, cell) in self.cells(PageRange::new(PageIndex(0), image.pages)) {
            let byte = cell.load(Ordering::Relaxed);
            if byte != ABSENT {
                return Err(in_use(page, byte));
            }
        }
        let mut start = 0;
        for run in &image.runs {
            let pages = PageRange::new(PageIndex(start), run.end - start);
            for (page, cell) in self.cells(pages) {
                update(cell, ABSENT, |seen| (seen == ABSENT).then_some(run.state))
                    .map_err(|byte| in_use(page, byte))?;
            }
            start = run.end;
        }
        Ok(())
    }
}

/// Appends `number`, seven bits per byte, lowest bits first; all bytes but the last have the top bit
/// set.
fn put_leb128(bytes: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        bytes.push(number.to_le_bytes()[0] | 0x80);
        number >>= 7;
    }
    bytes.push(number.to_le_bytes()[0]);
}

/// Splits `bytes` into the number at its start and the rest. `None` if the number is truncated, has
/// more than 64 bits, or is not in its shortest form.
fn take_leb128(bytes: &[u8]) -> Option<(u64, &[u8])> {
    let mut number = 0;
    for (index, &byte) in bytes.iter().take(10).enumerate() {
        let bits = u64::from(byte & 0x7f);
        let shift = 7 * to_u64(index);
        if bits << shift >> shift != bits {
            return None;
        }
        number |= bits << shift;
        if byte & 0x80 == 0 {
            let shortest = byte != 0 || index == 0;
            return shortest.then(|| (number, &bytes[index + 1..]));
        }
    }
    None
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests;
