//! An image in a memfd that the clones of a VM share: each page is written once.

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use pagetide_memory::{FileView, FileViewError, PageSize, Urgency};
use pagetide_pager::{Filled, PoolConfig, ServeError, Source};
use pagetide_sources::{BlobError, Digest, GuestImage, ImageError, ImageSource, Standing};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::Errno;
use thiserror::Error;

use super::message::RefusedCode;
use super::session::SessionError;
use crate::metrics::Metrics;

const PAGE: u64 = PageSize::Size4K.bytes();
const PAGE_BYTES: usize = 4096;

/// Why an image cannot be shared.
#[derive(Debug, Error)]
pub(crate) enum ShareError {
    /// The client has asked for too much.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// The image is empty.
    #[error("an empty image cannot be shared")]
    Empty,
    /// The file could not be created or sealed.
    #[error("creating a memfd of {bytes} bytes")]
    Create {
        /// Its length.
        bytes: u64,
        /// The kernel's error.
        #[source]
        errno: Errno,
    },
    /// The file could not be mapped.
    #[error("mapping the memfd")]
    Map(#[from] FileViewError),
    /// The threads that read the image could not be started.
    #[error("starting to read the image for clones")]
    Readers(#[from] ServeError),
    /// The descriptor could not be duplicated.
    #[error("duplicating the memfd")]
    Duplicate(#[source] io::Error),
}

impl ShareError {
    /// The code for the client.
    pub(crate) fn code(&self) -> RefusedCode {
        match self {
            Self::Session(error) => error.code(),
            _ => RefusedCode::Internal,
        }
    }
}

/// An image in a memfd. The file is freed when the last VM that has asked for it has gone.
pub(crate) struct SharedImage {
    /// The file as clients get it: sealed against everything but the server's own mapping.
    file: OwnedFd,
    bytes: u64,
    /// Reads the image into the file, and answers when a page is there.
    pub(crate) source: Arc<dyn Source>,
}

impl SharedImage {
    /// Creates the file, with no content yet.
    ///
    /// # Errors
    /// [`ShareError`].
    pub(crate) fn create(
        image: &Arc<dyn GuestImage>,
        metrics: &Metrics,
    ) -> Result<Self, ShareError> {
        let bytes = image.bytes().next_multiple_of(PAGE);
        if bytes == 0 {
            return Err(ShareError::Empty);
        }
        let failed = |errno| ShareError::Create { bytes, errno };
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = memfd_create("pagetide-image", flags).map_err(failed)?;
        ftruncate(&file, bytes).map_err(failed)?;
        let own = file.try_clone().map_err(ShareError::Duplicate)?;
        let view = FileView::map(own, 0, bytes, PageSize::Size4K)?;
        // After this mapping, which stays writable: nobody can make another one, or write, punch or
        // truncate the file. What one client does changes nothing for another.
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL;
        fcntl_add_seals(&file, seals).map_err(failed)?;
        let words = (bytes / PAGE).div_ceil(64);
        let filling = Filling {
            image: Arc::clone(image),
            view,
            filled: (0..words).map(|_| AtomicU64::new(0)).collect(),
        };
        let (reads, errors) = (metrics.clone(), metrics.clone());
        let source = ImageSource::start(
            Arc::new(filling),
            PoolConfig::default(),
            move |duration| reads.source_read(duration),
            move |error| errors.source_error(error.kind()),
        )?;
        Ok(Self {
            file,
            bytes,
            source,
        })
    }

    /// Its length: the image's, rounded up to whole pages.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The file for a client.
    ///
    /// # Errors
    /// [`ShareError::Duplicate`].
    pub(crate) fn descriptor(&self) -> Result<OwnedFd, ShareError> {
        self.file.try_clone().map_err(ShareError::Duplicate)
    }
}

impl fmt::Debug for SharedImage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedImage")
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}

/// An image whose reads fill the file.
#[derive(Debug)]
struct Filling {
    image: Arc<dyn GuestImage>,
    view: FileView,
    /// One bit for each page that is in the file as a whole.
    filled: Box<[AtomicU64]>,
}

impl Filling {
    fn pages(offset: u64, buffer: &[u8]) -> std::ops::Range<u64> {
        offset / PAGE..(offset + buffer.len() as u64) / PAGE
    }

    fn bit(&self, page: u64) -> Option<(&AtomicU64, u64)> {
        let word = usize::try_from(page / 64).ok()?;
        Some((self.filled.get(word)?, 1 << (page % 64)))
    }

    fn is_filled(&self, page: u64) -> bool {
        self.bit(page)
            .is_some_and(|(word, bit)| word.load(Ordering::Acquire) & bit != 0)
    }

    /// Reads from the file; false if it does not have all the pages.
    fn read_file(&self, offset: u64, buffer: &mut [u8]) -> bool {
        Self::pages(offset, buffer).all(|page| self.is_filled(page))
            && self.view.read(offset, buffer).is_ok()
    }

    /// Writes content to the pages of the file that are not there yet. Another thread that does so at the
    /// same time writes the same bytes.
    fn write_file(&self, offset: u64, buffer: &[u8]) -> Result<(), ImageError> {
        let pages = Self::pages(offset, buffer);
        for (page, content) in pages.zip(buffer.chunks(PAGE_BYTES)) {
            if self.is_filled(page) {
                continue;
            }
            // Nobody can truncate the file: the kernel has no memory for the page, or the page has an error.
            self.view.write(page * PAGE, content).map_err(|error| {
                let name = format!("the memfd of {}", self.image.name());
                let source = Box::new(error);
                ImageError::Blob(BlobError::Failed { name, source })
            })?;
            if let Some((word, bit)) = self.bit(page) {
                word.fetch_or(bit, Ordering::AcqRel);
            }
        }
        Ok(())
    }
}

impl GuestImage for Filling {
    fn name(&self) -> &str {
        self.image.name()
    }

    fn bytes(&self) -> u64 {
        self.image.bytes()
    }

    fn digest(&self) -> Digest {
        self.image.digest()
    }

    fn standing(&self) -> Result<Standing, ImageError> {
        self.image.standing()
    }

    fn read(&self, offset: u64, buffer: &mut [u8], urgency: Urgency) -> Result<Filled, ImageError> {
        if self.read_file(offset, buffer) {
            return Ok(Filled::Bytes);
        }
        let filled = self.image.read(offset, buffer, urgency)?;
        if filled == Filled::Bytes {
            self.write_file(offset, buffer)?;
        }
        Ok(filled)
    }

    fn read_now(&self, offset: u64, buffer: &mut [u8], urgency: Urgency) -> Option<Filled> {
        if self.read_file(offset, buffer) {
            return Some(Filled::Bytes);
        }
        let filled = self.image.read_now(offset, buffer, urgency)?;
        if filled == Filled::Bytes {
            self.write_file(offset, buffer).ok()?;
        }
        Some(filled)
    }
}
