//! The memory of a VM in a file of QEMU that was migrated to with the capability mapped-ram: each page has a place of its own
//! (docs/devel/migration/mapped-ram.rst of QEMU 9.0 and later).

mod stream;
#[cfg(test)]
mod tests;

use std::ops::Range;
use std::sync::Arc;

use pagetide_memory::Urgency;
use pagetide_pager::Filled;
use thiserror::Error;

use crate::blob::{Blob, BlobError};
use crate::digest::Digest;
use crate::file::FileIdentity;
use crate::guest_image::{GuestImage, ImageError, check_inside};
use crate::standing::Standing;
use stream::{RamBlock, Stream, VERSION, damaged};

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
