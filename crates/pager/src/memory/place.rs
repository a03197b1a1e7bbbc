//! Where content goes, and the content.

use pagetide_memory::PageRange;
use pagetide_uapi::userfaultfd::{UserRange, Userfaultfd};

/// The address of a run of pages for installation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place<'a> {
    pub(crate) uffd: &'a Userfaultfd,
    pub(crate) range: UserRange,
    pub(crate) pages: PageRange,
}

/// Content for claimed pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Body<'a> {
    /// The content of the page cache (UFFDIO_CONTINUE).
    PageCache,
    /// These bytes, exactly as many as the pages have.
    Bytes(&'a [u8]),
    /// The bytes at these addresses of this process, exactly as many as the pages have: only the kernel
    /// reads them.
    Mapped(UserRange),
    /// Zeroes.
    Zero,
    /// None: the content is lost.
    Poisoned,
}

impl<'a> Body<'a> {
    /// The content of a part of the pages: `bytes` bytes after the first `skip` bytes.
    pub(crate) fn part(self, skip: u64, bytes: u64) -> Self {
        let slice = |content: &'a [u8]| -> Option<&'a [u8]> {
            let (skip, bytes) = (usize::try_from(skip).ok()?, usize::try_from(bytes).ok()?);
            content.get(skip..)?.get(..bytes)
        };
        match self {
            // For a missing part the slice is empty, and the kernel refuses to copy nothing.
            Self::Bytes(content) => Self::Bytes(slice(content).unwrap_or_default()),
            Self::Mapped(from) => {
                let skip = skip.min(from.bytes);
                Self::Mapped(UserRange {
                    start: from.start + skip,
                    bytes: bytes.min(from.bytes - skip),
                })
            }
            other => other,
        }
    }
}
