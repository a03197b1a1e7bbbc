//! A raw memory file: guest memory as it is, at the offsets that the VMM reports.

use std::ops::Range;
use std::sync::Arc;

use pagetide_memory::{HostRange, Urgency};
use pagetide_pager::Filled;

use crate::blob::{Blob, BlobError};
use crate::digest::Digest;
use crate::file::FileIdentity;
use crate::foreign::{check_kind, check_whole_pages};
use crate::guest_image::{GuestImage, ImageError, check_inside};
use crate::image::Head;
use crate::object::ObjectCounters;
use crate::open::OpenError;
use crate::standing::Standing;

/// The number of pages that a raw image's digest samples.
const SAMPLES: u64 = 64;
const SAMPLE_BYTES: usize = 4096;

/// A raw memory file, as Firecracker's snapshots have. Holes of the file are zero pages.
#[derive(Debug)]
pub struct RawImage {
    blob: Arc<dyn Blob>,
    /// In ascending order; all else is zeroes.
    data: Vec<Range<u64>>,
    digest: Digest,
}

impl RawImage {
    /// Uses `blob` as guest memory.
    ///
    /// The digest of a raw image is that of its length and of 64 pages spread over it, or, if the store
    /// has one, of its version (an ETag): reading all of a snapshot at each start would cost more than
    /// the paging saves. A working set that an equal digest assigns to another image costs time, and
    /// never content. For VMs that another server goes on with, files are compared by what they are known by, too, and
    /// an object without a version has what its store says of it in the digest.
    ///
    /// # Errors
    /// [`OpenError::NotMemory`], [`OpenError::Blob`].
    pub fn new(blob: Arc<dyn Blob>) -> Result<Self, OpenError> {
        let head = Head::read(&*blob)?;
        Self::with_head(blob, &head)
    }

    /// The same for a file whose first bytes were read already.
    pub(crate) fn with_head(blob: Arc<dyn Blob>, head: &Head) -> Result<Self, OpenError> {
        let checked = check_kind(blob.bytes(), head.bytes());
        let checked = checked.and_then(|()| check_whole_pages(blob.bytes()));
        checked.map_err(|source| OpenError::NotMemory {
            name: blob.name().to_owned(),
            source,
        })?;
        let data = blob.data()?;
        let mut hasher = blake3::Hasher::new();
        hasher.update(b"pagetide raw image 1");
        hasher.update(&blob.bytes().to_le_bytes());
        if let Some(version) = blob.version() {
            hasher.update(version.as_bytes());
        } else {
            let mut page = [0; SAMPLE_BYTES];
            let pages = blob.bytes() / SAMPLE_BYTES as u64;
            let samples = SAMPLES.min(pages);
            for index in 0..samples {
                // Evenly spread. No product overflows: a file has less than 2^51 pages.
                let offset = index * pages / samples * SAMPLE_BYTES as u64;
                blob.read_at(offset, &mut page, Urgency::Urgent)?;
                hasher.update(&page);
            }
            if let Some(weak) = blob.weak_version() {
                hasher.update(weak.as_bytes());
            }
        }
        let digest = hasher.finalize().into();
        Ok(Self { blob, data, digest })
    }

    /// Whether these bytes lie in a hole of the file, which is still what it was when its holes were looked for:
    /// nothing else of this image says what is zero.
    fn is_hole(&self, range: &Range<u64>) -> Result<bool, BlobError> {
        self.blob.check_unchanged_lately()?;
        let next = self.data.partition_point(|data| data.end <= range.start);
        let data = self.data.get(next);
        Ok(data.is_none_or(|data| data.start >= range.end))
    }
}

impl GuestImage for RawImage {
    fn name(&self) -> &str {
        self.blob.name()
    }

    fn bytes(&self) -> u64 {
        self.blob.bytes()
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

    fn hole_bytes(&self) -> u64 {
        let data: u64 = self.data.iter().map(|data| data.end - data.start).sum();
        self.bytes().saturating_sub(data)
    }

    fn read(&self, offset: u64, buffer: &mut [u8], urgency: Urgency) -> Result<Filled, ImageError> {
        check_inside(offset, buffer.len(), self.bytes())?;
        if self.is_hole(&(offset..offset + buffer.len() as u64))? {
            return Ok(Filled::Zero);
        }
        self.blob.read_at(offset, buffer, urgency)?;
        // It may have been written to before it was read, and after it was looked at.
        self.blob.check_unchanged_now()?;
        Ok(Filled::Bytes)
    }

    fn read_now(&self, offset: u64, buffer: &mut [u8], _: Urgency) -> Option<Filled> {
        check_inside(offset, buffer.len(), self.bytes()).ok()?;
        // A changed file is left to `read`, which says so.
        if self.is_hole(&(offset..offset + buffer.len() as u64)).ok()? {
            return Some(Filled::Zero);
        }
        let is_read = self.blob.read_now(offset, buffer);
        (is_read && self.blob.check_unchanged_now().is_ok()).then_some(Filled::Bytes)
    }

    fn counters(&self) -> Option<ObjectCounters> {
        self.blob.counters()
    }

    fn mapped(&self, offset: u64, bytes: u64) -> Option<HostRange> {
        let end = offset.checked_add(bytes)?;
        // What is given out here is not looked at again.
        self.blob.check_unchanged_now().ok()?;
        // Holes are zero pages, which need no memory.
        let is_data = end <= self.bytes() && !self.is_hole(&(offset..end)).ok()?;
        is_data.then(|| self.blob.mapped(offset, bytes))?
    }
}
