//! The memory of a VM in a file of QEMU that was migrated to with the capability mapped-ram: each page has a place of its own
//! (docs/devel/migration/mapped-ram.rst of QEMU 9.0 and later).
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

use std::ops::Range;
use std::sync::Arc;

use pagetide_memory::Urgency;
use pagetide_pager::Filled;
use thiserror::Error;

use crate::blob::{Blob, BlobError};
use crate::digest::Digest;
use crate::file::FileIdentity;
use crate::guest_image::{GuestImage, ImageError, check_inside};
use crate::image::MOST_MEMORY_BYTES;
use crate::standing::Standing;

const MAGIC: u32 = 0x5145_564d;
const VERSION: u32 = 3;

/// What begins a part of the stream.
const SECTION: u8 = 1;
const SECTION_PART: u8 = 2;
const SECTION_END: u8 = 3;
const SUBSECTION: u8 = 5;
const CONFIGURATION: u8 = 7;
const COMMAND: u8 = 8;
const FOOTER: u8 = 0x7e;

/// Flags of a part of memory's section: it ends, and the threads that write pages are waited for.
const END_OF_PART: u64 = 0x10;
const FLUSH: u64 = 0x200;

/// The most parts of memory's section, each of which is one look at what the guest has written.
const MOST_PARTS: u32 = 1 << 20;

/// The flag beside the length of all RAM blocks.
const MEM_SIZE: u64 = 4;

/// The version of a RAM block's description.
const BLOCK_VERSION: u32 = 1;

/// The longest name of a machine, and the most capabilities.
const MOST_NAME_BYTES: u32 = 1024;
const MOST_CAPABILITIES: u32 = 256;

/// The most RAM blocks.
const MOST_BLOCKS: usize = 4096;

/// What is read at once of the stream, whose fields have few bytes.
const READ_BYTES: usize = 4096;

/// Why a file has no memory in QEMU's format mapped-ram.
#[derive(Debug, Error)]
pub enum MappedRamError {
    /// It is not QEMU's.
    #[error("it is no file of QEMU's migration")]
    NotQemu,
    /// It is a stream of another version.
    #[error("its stream has the version {version}, and only {VERSION} is known")]
    Version {
        /// The version.
        version: u32,
    },
    /// It is a stream in which pages have no places.
    #[error(
        "it was written without the capability mapped-ram, so that its pages have no places of their own; migrate to it with `migrate_set_capability mapped-ram on`"
    )]
    NotMapped,
    /// The memory is elsewhere.
    #[error(
        "it was written with the capability x-ignore-shared: shared memory is not in it, but in the files that QEMU maps"
    )]
    IgnoresShared,
    /// There is a part whose length depends on its name, and the name is not known.
    #[error(
        "it has {what}, whose length this program does not know; migrate without what writes that, or report the QEMU version"
    )]
    Unknown {
        /// What it is.
        what: String,
    },
    /// The bitmaps were not written yet.
    #[error(
        "the migration to it has not ended, or was cancelled: which pages it has is written at the end; wait until QEMU reports \"completed\""
    )]
    NotEnded,
    /// A number makes no sense.
    #[error("{what}: the file is damaged, or of a later version of QEMU")]
    Damaged {
        /// The number.
        what: String,
    },
    /// There is no such RAM block.
    #[error("it has no RAM block {wanted}; it has {blocks}")]
    NoBlock {
        /// The one that was asked for.
        wanted: String,
        /// Those that it has.
        blocks: String,
    },
    /// Several RAM blocks may be the guest's memory.
    #[error("several of its RAM blocks are the largest: name one of {blocks} (--block)")]
    Ambiguous {
        /// Those that it has.
        blocks: String,
    },
    /// It could not be read.
    #[error(transparent)]
    Read(#[from] BlobError),
}

/// A RAM block, and where it is in the file.
#[derive(Clone, Debug, PartialEq, Eq)]
struct RamBlock {
    name: String,
    bytes: u64,
    page_bytes: u64,
    bitmap_offset: u64,
    pages_offset: u64,
}

impl RamBlock {
    /// For messages.
    fn told(&self) -> String {
        // Whoever wrote the file chose the name.
        let name = self.name.escape_debug();
        format!("{name} ({} bytes)", self.bytes)
    }

    fn bitmap_bytes(&self) -> u64 {
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
struct Stream<'a> {
    blob: &'a dyn Blob,
    at: u64,
    /// What was read, and from where on.
    read: (u64, Vec<u8>),
}

impl<'a> Stream<'a> {
    fn new(blob: &'a dyn Blob) -> Self {
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
    fn blocks(&mut self) -> Result<Vec<RamBlock>, MappedRamError> {
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

fn damaged(what: impl Into<String>) -> MappedRamError {
    MappedRamError::Damaged { what: what.into() }
}

fn within(value: u32, most: u32, what: &str) -> Result<(), MappedRamError> {
    match value <= most {
        true => Ok(()),
        false => Err(damaged(what.replace("{}", &value.to_string()))),
    }
}

/// A RAM block of a file in QEMU's format mapped-ram, as guest memory: its content is at the offsets in the block.
#[derive(Debug)]
pub struct MappedRam {
    blob: Arc<dyn Blob>,
    block: RamBlock,
    others: Vec<String>,
    bitmap: Vec<u8>,
    digest: Digest,
}

impl MappedRam {
    /// Opens a file's RAM block of this name, or its largest.
    ///
    /// # Errors
    /// [`MappedRamError`].
    pub fn open(blob: Arc<dyn Blob>, wanted: Option<&str>) -> Result<Self, MappedRamError> {
        let blocks = Stream::new(&*blob).blocks()?;
        let chosen = choose(&blocks, wanted)?;
        let others = blocks.iter().filter(|block| block.name != chosen.name);
        let others = others.map(RamBlock::told).collect();
        let block = chosen.clone();
        // At most 512 MiB, which the file has: memory's end is behind it.
        let bitmap_bytes = usize::try_from(block.bitmap_bytes());
        let bitmap_bytes = bitmap_bytes.map_err(|_| damaged("a bitmap is longer than memory"))?;
        let mut bitmap = vec![0; bitmap_bytes];
        blob.read_at(block.bitmap_offset, &mut bitmap, Urgency::Urgent)?;
        blob.check_unchanged_now()?;
        let mut hasher = blake3::Hasher::new();
        hasher.update(b"pagetide mapped-ram 1");
        hasher.update(&block.bytes.to_le_bytes());
        hasher.update(&bitmap);
        let digest = hasher.finalize().into();
        Ok(Self {
            blob,
            block,
            others,
            bitmap,
            digest,
        })
    }

    /// The RAM block, with its length, for messages.
    pub fn block(&self) -> String {
        self.block.told()
    }

    /// The file's other RAM blocks, in the same way.
    pub fn others(&self) -> &[String] {
        &self.others
    }

    /// The permissions of its file, if it is one.
    pub(crate) fn mode(&self) -> Option<u32> {
        self.blob.mode()
    }

    /// Whether the page at this offset is in the file.
    fn is_there(&self, offset: u64) -> bool {
        let page = offset / self.block.page_bytes;
        let byte = usize::try_from(page / 8).ok();
        let byte = byte.and_then(|byte| self.bitmap.get(byte));
        byte.is_some_and(|byte| byte & (1 << (page % 8)) != 0)
    }

    /// The parts of a range that are in the file, in pages or cut by the range.
    fn parts(&self, range: Range<u64>) -> Vec<Range<u64>> {
        let mut parts: Vec<Range<u64>> = Vec::new();
        let mut at = range.start;
        while at < range.end {
            let next = (at / self.block.page_bytes + 1) * self.block.page_bytes;
            let end = next.min(range.end);
            if self.is_there(at) {
                match parts.last_mut() {
                    Some(last) if last.end == at => last.end = end,
                    _ => parts.push(at..end),
                }
            }
            at = end;
        }
        parts
    }
}

/// The block of this name, or else the largest.
fn choose<'b>(
    blocks: &'b [RamBlock],
    wanted: Option<&str>,
) -> Result<&'b RamBlock, MappedRamError> {
    let names = || {
        blocks
            .iter()
            .map(RamBlock::told)
            .collect::<Vec<_>>()
            .join(", ")
    };
    if let Some(wanted) = wanted {
        let found = blocks.iter().find(|block| block.name == wanted);
        return found.ok_or_else(|| MappedRamError::NoBlock {
            wanted: wanted.to_owned(),
            blocks: names(),
        });
    }
    let most = blocks.iter().map(|block| block.bytes).max();
    let mut largest = blocks.iter().filter(|block| Some(block.bytes) == most);
    match (largest.next(), largest.next()) {
        (Some(block), None) => Ok(block),
        _ => Err(MappedRamError::Ambiguous { blocks: names() }),
    }
}

impl GuestImage for MappedRam {
    fn name(&self) -> &str {
        self.blob.name()
    }

    fn bytes(&self) -> u64 {
        self.block.bytes
    }

    fn digest(&self) -> Digest {
        self.digest
    }

    fn file_identity(&self) -> Option<FileIdentity> {
        self.blob.file_identity()
    }

    fn standing(&self) -> Result<Standing, ImageError> {
        Ok(self.blob.standing()?)
    }

    fn read(&self, offset: u64, buffer: &mut [u8], urgency: Urgency) -> Result<Filled, ImageError> {
        check_inside(offset, buffer.len(), self.block.bytes)?;
        let parts = self.parts(offset..offset + buffer.len() as u64);
        if parts.is_empty() {
            self.blob.check_unchanged_now()?;
            return Ok(Filled::Zero);
        }
        let within = |at: u64| usize::try_from(at - offset).unwrap_or(usize::MAX);
        let mut filled = 0;
        for part in parts {
            let (begin, end) = (within(part.start), within(part.end));
            buffer[filled..begin].fill(0);
            let place = self.block.pages_offset + part.start;
            self.blob.read_at(place, &mut buffer[begin..end], urgency)?;
            filled = end;
        }
        buffer[filled..].fill(0);
        // Another migration to the file may have begun meanwhile.
        self.blob.check_unchanged_now()?;
        Ok(Filled::Bytes)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::file::FileBlob;

    fn blob(bytes: &[u8]) -> (tempfile::TempDir, Arc<dyn Blob>) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        std::fs::write(&path, bytes).unwrap();
        (directory, Arc::new(FileBlob::open(&path).unwrap()))
    }

    fn name(text: &str) -> Vec<u8> {
        let length = u8::try_from(text.len()).unwrap();
        [&[length][..], text.as_bytes()].concat()
    }

    fn capabilities(names: &[&str]) -> Vec<u8> {
        let count = u32::try_from(names.len()).unwrap();
        let mut bytes = [&[SUBSECTION][..], &name("configuration/capabilities")].concat();
        bytes.extend([1_u32, count].map(u32::to_be_bytes).concat());
        bytes.extend(names.iter().flat_map(|text| name(text)));
        bytes
    }

    fn head(parts: &[Vec<u8>], section: &str, all: u64) -> Vec<u8> {
        let mut bytes = [MAGIC, VERSION].map(u32::to_be_bytes).concat();
        bytes.push(CONFIGURATION);
        bytes.extend(2_u32.to_be_bytes());
        bytes.extend(b"pc");
        bytes.extend(parts.concat());
        bytes.push(SECTION);
        bytes.extend(1_u32.to_be_bytes());
        bytes.extend(name(section));
        bytes.extend([0_u32, 4].map(u32::to_be_bytes).concat());
        bytes.extend((all | MEM_SIZE).to_be_bytes());
        bytes
    }

    /// A RAM block of three pages, of which the first and the last are in the file.
    fn block(bytes: &mut Vec<u8>, text: &str) {
        bytes.extend(name(text));
        bytes.extend((3_u64 << 12).to_be_bytes());
        bytes.extend(1_u32.to_be_bytes());
        bytes.extend(4096_u64.to_be_bytes());
        let bitmap = bytes.len() as u64 + 16;
        let pages = (bitmap + 8).next_multiple_of(1 << 14);
        bytes.extend([bitmap, pages].map(u64::to_be_bytes).concat());
        bytes.extend(5_u64.to_le_bytes());
        bytes.resize(usize::try_from(pages).unwrap(), 0);
        for fill in [7, 8, 9] {
            bytes.extend([fill; 4096]);
        }
    }

    /// The end of memory's section, in two parts with a command between them.
    fn end() -> Vec<u8> {
        let footer = [&[FOOTER][..], &1_u32.to_be_bytes()].concat();
        let flags = |flags: &[u64]| flags.iter().flat_map(|flag| flag.to_be_bytes()).collect();
        let part = |kind| [&[kind][..], &1_u32.to_be_bytes()].concat();
        let parts: [Vec<u8>; 8] = [
            flags(&[END_OF_PART]),
            footer.clone(),
            part(SECTION_PART),
            flags(&[FLUSH, END_OF_PART]),
            footer.clone(),
            vec![COMMAND, 0, 11, 0, 1, 77],
            [part(SECTION_END), flags(&[END_OF_PART])].concat(),
            footer,
        ];
        parts.concat()
    }

    fn file(names: &[&str]) -> Vec<u8> {
        let all = (3 * names.len() as u64) << 12;
        let mut bytes = head(&[capabilities(&["mapped-ram"])], "ram", all);
        names.iter().for_each(|text| block(&mut bytes, text));
        bytes.extend(end());
        bytes
    }

    fn refused(bytes: &[u8], wanted: Option<&str>) -> MappedRamError {
        let (_directory, blob) = blob(bytes);
        MappedRam::open(blob, wanted).unwrap_err()
    }

    #[test]
    fn a_page_whose_bit_is_clear_is_zero_whatever_is_there() {
        let (_directory, blob) = blob(&file(&["a", "b"]));
        let memory = MappedRam::open(blob, Some("b")).unwrap();
        assert_eq!(memory.bytes(), 3 << 12);
        assert_eq!(memory.block(), "b (12288 bytes)");
        assert_eq!(memory.others(), ["a (12288 bytes)"]);
        let mut all = vec![1; 3 << 12];
        memory.read(0, &mut all, Urgency::Urgent).unwrap();
        let wanted = [[7_u8; 4096], [0; 4096], [9; 4096]].concat();
        assert!(all == wanted);
        let mut part = vec![1; 4096];
        let filled = memory.read(4096, &mut part, Urgency::Urgent).unwrap();
        assert_eq!(filled, Filled::Zero);
        memory.read(2048, &mut part, Urgency::Urgent).unwrap();
        assert!(part == [[7_u8; 2048], [0; 2048]].concat());
        assert!(memory.read(8192, &mut all, Urgency::Urgent).is_err());
    }

    #[test]
    fn a_block_is_chosen_by_its_length_or_its_name() {
        let two = file(&["a", "b"]);
        let error = refused(&two, None).to_string();
        assert!(
            error.contains("a (12288 bytes), b (12288 bytes)"),
            "{error}"
        );
        let error = refused(&two, Some("c")).to_string();
        assert!(error.contains("no RAM block c"), "{error}");
        let (_directory, blob) = blob(&file(&["a"]));
        let memory = MappedRam::open(blob, None).unwrap();
        assert_eq!(memory.block(), "a (12288 bytes)");
    }

    #[test]
    fn what_has_no_places_for_its_pages_is_named() {
        assert!(matches!(refused(&[0; 64], None), MappedRamError::NotQemu));
        let plain = head(&[], "ram", 4096);
        assert!(matches!(refused(&plain, None), MappedRamError::NotMapped));
        let both = capabilities(&["mapped-ram", "x-ignore-shared"]);
        let shared = head(&[both], "ram", 4096);
        assert!(matches!(
            refused(&shared, None),
            MappedRamError::IgnoresShared
        ));
        let mapped = || capabilities(&["mapped-ram"]);
        let other = [&[SUBSECTION][..], &name("configuration/new"), &[0; 4]].concat();
        let unknown = refused(&head(&[mapped(), other], "ram", 4096), None);
        assert!(
            unknown.to_string().contains("configuration/new"),
            "{unknown}"
        );
        let first = refused(&head(&[mapped()], "dirty-bitmap", 4096), None);
        assert!(first.to_string().contains("dirty-bitmap"), "{first}");
        let version = [MAGIC, 2].map(u32::to_be_bytes).concat();
        assert!(matches!(
            refused(&version, None),
            MappedRamError::Version { version: 2 }
        ));
    }

    /// Kind: what is missing reads as zeroes, and nobody says so.
    #[test]
    fn a_file_that_ends_early_has_no_memory() {
        let whole = file(&["a", "b"]);
        let (_directory, blob_of_whole) = blob(&whole);
        assert!(MappedRam::open(blob_of_whole, Some("a")).is_ok());
        for end in 0..whole.len() {
            // Each byte of what is no page, and some of the pages.
            if (500..50_000).contains(&end) && !end.is_multiple_of(1111) {
                continue;
            }
            let error = refused(&whole[..end], Some("a"));
            let is_named = matches!(
                error,
                MappedRamError::NotQemu | MappedRamError::Damaged { .. } | MappedRamError::NotEnded
            );
            assert!(is_named, "{end}: {error}");
        }
        let head = whole.len() - end().len();
        assert!(matches!(
            refused(&whole[..head], Some("a")),
            MappedRamError::NotEnded
        ));
        // QEMU that was killed leaves holes.
        let mut holes = whole.clone();
        holes[head..].fill(0);
        assert!(matches!(
            refused(&holes, Some("a")),
            MappedRamError::NotEnded
        ));
    }

    #[test]
    fn places_that_make_no_sense_are_refused() {
        let whole = file(&["a"]);
        let at = whole
            .windows(2)
            .position(|bytes| bytes == b"\x01a")
            .unwrap()
            + 2;
        // Behind the name: the block's bytes, a version, a page's bytes, the bitmap's place, the pages' place.
        for (place, number) in [
            (at, 0),
            (at, 4097),
            (at, !4095),
            (at + 12, 0),
            (at + 12, 1 << 20),
            (at + 20, 0),
            (at + 20, u64::MAX),
            (at + 28, 0),
            (at + 28, u64::MAX),
        ] {
            let mut bytes = whole.clone();
            bytes[place..place + 8].copy_from_slice(&number.to_be_bytes());
            let error = refused(&bytes, None);
            assert!(
                matches!(error, MappedRamError::Damaged { .. }),
                "{place}: {error}"
            );
        }
        let twice = refused(&file(&["a", "a"]), None).to_string();
        assert!(twice.contains("there twice"), "{twice}");
        let parts = vec![capabilities(&["mapped-ram"]); 2];
        let twice = refused(&head(&parts, "ram", 4096), None).to_string();
        assert!(twice.contains("there twice"), "{twice}");
    }

    #[test]
    fn a_file_that_is_written_to_is_no_memory_any_more() {
        let (directory, blob) = blob(&file(&["a"]));
        let memory = MappedRam::open(blob, None).unwrap();
        let path = directory.path().join("file");
        let file = std::fs::File::options().write(true).open(path).unwrap();
        file.set_len(1).unwrap();
        for offset in [0, 4096] {
            let read = memory.read(offset, &mut [0; 4096], Urgency::Urgent);
            assert!(read.is_err(), "{offset}");
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(
            changes in prop::collection::vec((0_usize..300, any::<u8>()), 0..4),
            end in 0_usize..60_000,
        ) {
            let mut bytes = file(&["a", "b"]);
            for (at, byte) in changes {
                bytes[at] = byte;
            }
            bytes.truncate(end);
            let (_directory, blob) = blob(&bytes);
            if let Ok(memory) = MappedRam::open(blob, Some("a")) {
                for page in 0..3 {
                    let _ = memory.read(page << 12, &mut [0; 4096], Urgency::Urgent);
                }
            }
        }
    }
}
