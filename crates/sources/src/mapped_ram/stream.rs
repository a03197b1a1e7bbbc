//! What a file in QEMU's format mapped-ram has around its pages.
//!
//! Numbers are big-endian, except the bitmap's.
//!
//! | bytes | content |
//! |---|---|
//! | 4, 4 | `QEVM`, version 3 |
//! | 1, 4, n | 7; the machine's name with its length |
//! | 1, n, 4, … | subsections of the configuration: 5; name, version, fields of a length that depends on the name |
//! | 1, 4, 4, 4, 4 | 1; the section's number; `ram` with its length; instance; version |
//! | 8 | bytes of all RAM blocks, with the flag 4 |
//! | | for each RAM block: its name with its length, its bytes; 1, bytes of a page, offsets of its bitmap and of its pages; the bitmap; from the next whole MiB on, the pages |
//! | 8, 1, 4 | the flag 16; 7e, the section's number |
//! | | parts of the same section: 2 and then 3, the section's number, flags until 16, 7e, the number; between them, commands |
//!
//! A page whose bit is clear is zero, whatever is at its place. QEMU writes the bitmaps when the migration ends, before the
//! part 3: a file without that part has bitmaps of zeroes.

use pagetide_memory::Urgency;

use super::MappedRamError;
use crate::blob::Blob;
use crate::image::MOST_MEMORY_BYTES;

pub(super) const MAGIC: u32 = 0x5145_564d;
pub(super) const VERSION: u32 = 3;

/// What begins a part of the stream.
pub(super) const SECTION: u8 = 1;
pub(super) const SECTION_PART: u8 = 2;
pub(super) const SECTION_END: u8 = 3;
pub(super) const SUBSECTION: u8 = 5;
pub(super) const CONFIGURATION: u8 = 7;
pub(super) const COMMAND: u8 = 8;
pub(super) const FOOTER: u8 = 0x7e;

/// Flags of a part of memory's section: it ends, and the threads that write pages are waited for.
pub(super) const END_OF_PART: u64 = 0x10;
pub(super) const FLUSH: u64 = 0x200;

/// The most parts of memory's section, each of which is one look at what the guest has written.
const MOST_PARTS: u32 = 1 << 20;

/// The flag beside the length of all RAM blocks.
pub(super) const MEM_SIZE: u64 = 4;

/// The version of a RAM block's description.
const BLOCK_VERSION: u32 = 1;

/// The longest name of a machine, and the most capabilities.
const MOST_NAME_BYTES: u32 = 1024;
const MOST_CAPABILITIES: u32 = 256;

/// The most RAM blocks.
const MOST_BLOCKS: usize = 4096;

/// What is read at once of the stream, whose fields have few bytes.
const READ_BYTES: usize = 4096;

/// A RAM block, and where it is in the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RamBlock {
    pub(super) name: String,
    pub(super) bytes: u64,
    pub(super) page_bytes: u64,
    pub(super) bitmap_offset: u64,
    pub(super) pages_offset: u64,
}

impl RamBlock {
    /// For messages.
    pub(super) fn told(&self) -> String {
        // Whoever wrote the file chose the name.
        let name = self.name.escape_debug();
        format!("{name} ({} bytes)", self.bytes)
    }

    pub(super) fn bitmap_bytes(&self) -> u64 {
        // Of whole words of 64 bits.
        (self.bytes / self.page_bytes).div_ceil(64) * 8
    }

    /// The end of its pages, unless its numbers make no sense where its description ends at `described`.
    fn end(&self, described: u64) -> Option<u64> {
        let is_possible = (4096..=65_536).contains(&self.page_bytes)
            && self.page_bytes.is_power_of_two()
            && (1..=MOST_MEMORY_BYTES).contains(&self.bytes)
            && self.bytes.is_multiple_of(self.page_bytes);
        if !is_possible || self.bitmap_offset != described {
            return None;
        }
        let bitmap_end = self.bitmap_offset.checked_add(self.bitmap_bytes())?;
        let is_behind = bitmap_end <= self.pages_offset;
        is_behind.then(|| self.pages_offset.checked_add(self.bytes))?
    }
}

/// A file, read in order.
pub(super) struct Stream<'a> {
    blob: &'a dyn Blob,
    at: u64,
    /// What was read, and from where on.
    read: (u64, Vec<u8>),
}

impl<'a> Stream<'a> {
    pub(super) fn new(blob: &'a dyn Blob) -> Self {
        Self {
            blob,
            at: 0,
            read: (0, Vec::new()),
        }
    }

    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], MappedRamError> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), MappedRamError> {
        for byte in bytes {
            *byte = self.next()?;
        }
        Ok(())
    }

    fn next(&mut self) -> Result<u8, MappedRamError> {
        let (begin, read) = &self.read;
        let index = self.at.checked_sub(*begin);
        let index = index.and_then(|index| usize::try_from(index).ok());
        if let Some(byte) = index.and_then(|index| read.get(index)) {
            self.at += 1;
            return Ok(*byte);
        }
        let whole = self.blob.bytes();
        let left = whole.saturating_sub(self.at);
        if left == 0 {
            return Err(damaged(format!("it ends too early, after {whole} bytes")));
        }
        let bytes = usize::try_from(left).map_or(READ_BYTES, |left| left.min(READ_BYTES));
        let mut read = vec![0; bytes];
        self.blob.read_at(self.at, &mut read, Urgency::Urgent)?;
        self.read = (self.at, read);
        self.next()
    }

    /// Leaves out so many bytes.
    fn skip(&mut self, bytes: u64) -> Result<(), MappedRamError> {
        let at = self.at.checked_add(bytes);
        self.at = at.ok_or_else(|| damaged("a length is beyond all files"))?;
        Ok(())
    }

    fn u16(&mut self) -> Result<u16, MappedRamError> {
        self.bytes().map(u16::from_be_bytes)
    }

    fn u32(&mut self) -> Result<u32, MappedRamError> {
        self.bytes().map(u32::from_be_bytes)
    }

    fn u64(&mut self) -> Result<u64, MappedRamError> {
        self.bytes().map(u64::from_be_bytes)
    }

    /// A name with its length in one byte.
    fn name(&mut self) -> Result<String, MappedRamError> {
        let mut name = vec![0; self.next()?.into()];
        self.fill(&mut name)?;
        Ok(String::from_utf8_lossy(&name).into_owned())
    }

    /// What is before memory. Returns the number of memory's section, and the bytes of all RAM blocks.
    fn head(&mut self) -> Result<(u32, u64), MappedRamError> {
        if self.blob.bytes() < 8 || self.u32()? != MAGIC {
            return Err(MappedRamError::NotQemu);
        }
        let version = self.u32()?;
        if version != VERSION {
            return Err(MappedRamError::Version { version });
        }
        let mut seen = Vec::new();
        let mut capabilities = Vec::new();
        loop {
            let part = match self.next()? {
                CONFIGURATION => {
                    let bytes = self.u32()?;
                    within(bytes, MOST_NAME_BYTES, "the machine's name has {} bytes")?;
                    self.skip(bytes.into())?;
                    String::new()
                }
                SUBSECTION => self.subsection(&mut capabilities)?,
                SECTION => break,
                other => {
                    let what = format!("a part of the kind {other} before its memory");
                    return Err(MappedRamError::Unknown { what });
                }
            };
            if seen.contains(&part) {
                return Err(damaged("a part of the configuration is there twice"));
            }
            seen.push(part);
        }
        let has = |wanted: &str| capabilities.iter().any(|name| name == wanted);
        if !has("mapped-ram") {
            return Err(MappedRamError::NotMapped);
        }
        if has("x-ignore-shared") {
            return Err(MappedRamError::IgnoresShared);
        }
        let (number, name) = (self.u32()?, self.name()?);
        if name != "ram" {
            let what = format!("the section {name:?} before its memory");
            return Err(MappedRamError::Unknown { what });
        }
        let (_instance, _version) = (self.u32()?, self.u32()?);
        let all = self.u64()?;
        match all & 4095 {
            MEM_SIZE => Ok((number, all - MEM_SIZE)),
            flags => Err(damaged(format!(
                "the length of all memory has the flags {flags:#x}"
            ))),
        }
    }

    /// A subsection of the configuration, behind its first byte. Puts the names of capabilities into the list, and returns the
    /// subsection's name.
    fn subsection(&mut self, capabilities: &mut Vec<String>) -> Result<String, MappedRamError> {
        let (name, _version) = (self.name()?, self.u32()?);
        match name.as_str() {
            "configuration/target-page-bits" => self.skip(4)?,
            "configuration/uuid" => self.skip(16)?,
            "configuration/capabilities" => {
                let count = self.u32()?;
                within(count, MOST_CAPABILITIES, "it has {} capabilities")?;
                for _ in 0..count {
                    capabilities.push(self.name()?);
                }
            }
            _ => {
                let what = format!("the subsection {name:?} before its memory");
                return Err(MappedRamError::Unknown { what });
            }
        }
        Ok(name)
    }

    /// All RAM blocks of a migration that has ended.
    pub(super) fn blocks(&mut self) -> Result<Vec<RamBlock>, MappedRamError> {
        let (number, mut left) = self.head()?;
        let mut blocks: Vec<RamBlock> = Vec::new();
        while left > 0 {
            let (name, bytes) = (self.name()?, self.u64()?);
            let version = self.u32()?;
            if version != BLOCK_VERSION {
                let what = format!("the RAM block {name:?} is described by version {version}");
                return Err(damaged(what));
            }
            let block = RamBlock {
                name,
                bytes,
                page_bytes: self.u64()?,
                bitmap_offset: self.u64()?,
                pages_offset: self.u64()?,
            };
            self.at = block
                .end(self.at)
                .ok_or_else(|| damaged(format!("{block:?} makes no sense")))?;
            if blocks.len() == MOST_BLOCKS || blocks.iter().any(|one| one.name == block.name) {
                return Err(damaged("a RAM block is there twice, or too many are"));
            }
            let rest = left.checked_sub(bytes);
            left = rest.ok_or_else(|| damaged("the RAM blocks are longer than all memory"))?;
            blocks.push(block);
        }
        match self.has_ended(number) {
            Ok(true) => Ok(blocks),
            // A file ends, or has a hole, where QEMU would have gone on.
            Ok(false) | Err(MappedRamError::Damaged { .. }) => Err(MappedRamError::NotEnded),
            Err(error) => Err(error),
        }
    }

    /// Whether memory's section ends, from the end of its first part on.
    fn has_ended(&mut self, number: u32) -> Result<bool, MappedRamError> {
        let mut is_last = false;
        for _ in 0..MOST_PARTS {
            loop {
                match self.u64()? {
                    END_OF_PART => break,
                    FLUSH => {}
                    _ => return Ok(false),
                }
            }
            if self.next()? != FOOTER || self.u32()? != number {
                return Ok(false);
            }
            if is_last {
                return Ok(true);
            }
            let kind = loop {
                match self.next()? {
                    COMMAND => {
                        let (_command, bytes) = (self.u16()?, self.u16()?);
                        self.skip(bytes.into())?;
                    }
                    kind => break kind,
                }
            };
            let section = self.u32()?;
            if !matches!(kind, SECTION_PART | SECTION_END) {
                return Ok(false);
            }
            if section != number {
                let what = format!("a part of the section {section} before the end of memory");
                return Err(MappedRamError::Unknown { what });
            }
            is_last = kind == SECTION_END;
        }
        Ok(false)
    }
}

pub(super) fn damaged(what: impl Into<String>) -> MappedRamError {
    MappedRamError::Damaged { what: what.into() }
}

fn within(value: u32, most: u32, what: &str) -> Result<(), MappedRamError> {
    match value <= most {
        true => Ok(()),
        false => Err(damaged(what.replace("{}", &value.to_string()))),
    }
}
