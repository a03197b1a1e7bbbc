//! The memory that pages are installed in: what the engine asks of it, and its kinds.
//!
//! A page is installed by one call of the kernel, which puts content there only if there is none: neither a
//! mapping, nor (in a file) a page. So content never replaces content, whoever has put it there, and a process
//! that dies leaves a page with all of its content or with none. [`local`] has the one exception.

mod foreign;
mod local;
mod place;
mod zeroes;

use std::fmt;
use std::sync::Arc;

use pagetide_memory::{
    FaultInAccess, FaultInError, GuestAddress, HostRange, MemoryFile, PageIndex, PageRange,
    PageSize, Region,
};
use pagetide_uapi::userfaultfd::{Features, InstallError, Mode, UserRange, Userfaultfd, Wake};
use rustix::io::Errno;

use crate::error::{AddError, DiscardError, InstallFailure};

pub use foreign::Memfd;
pub(crate) use foreign::{Foreign, ForeignClone, ForeignFile};
pub(crate) use local::Local;
pub(crate) use place::{Body, Place};
use zeroes::Zeroes;

/// The minimal page size of this process's own memory.
const SMALLEST_PAGE_BYTES: usize = 4096;

/// What does not change as long as the memory is paged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    /// The home gpa of its first byte.
    pub(crate) gpa: GuestAddress,
    /// Its addresses when it was handed over. REMAP events move it.
    pub(crate) range: HostRange,
    pub(crate) page_size: PageSize,
    /// How missing pages fault.
    pub(crate) mode: Mode,
}

/// The memory of a region.
pub(crate) trait Memory: fmt::Debug + Send + Sync {
    fn shape(&self) -> Shape;

    /// The first page that has content although it `is_missing`: content that the region's source would not
    /// replace. `is_missing` returns the first such page of a run.
    fn first_content(
        &self,
        is_missing: &dyn Fn(PageRange) -> Option<PageIndex>,
    ) -> Result<Option<PageIndex>, AddError>;

    /// Installs content in pages that have none. Where there is some, it stays, and the call ends with
    /// [`InstallError::Exists`].
    fn put(&self, place: &Place<'_>, content: Body<'_>, wake: Wake) -> Result<(), InstallFailure>;

    /// Whether it takes content from where its source has it mapped.
    fn takes_mapped(&self) -> bool;

    /// Maps the content that a page has already. [`InstallError::NoContent`]: it has gone.
    fn take(&self, place: &Place<'_>, wake: Wake) -> Result<(), InstallError> {
        match self.shape().mode {
            Mode::Minor => match map_again(place, wake) {
                Err(InstallError::Exists { .. }) => Ok(()),
                taken => taken,
            },
            // A page of the file that is not mapped does not fault.
            Mode::Missing => Ok(()),
        }
    }

    /// Installs zeroes in a page that was discarded, unless the guest has written to it since.
    fn zero(&self, place: &Place<'_>, wake: Wake) -> Result<(), InstallError> {
        let Shape {
            mode, page_size, ..
        } = self.shape();
        if mode == Mode::Minor {
            match map_again(place, wake) {
                Err(InstallError::NoContent) => {}
                mapped => return mapped,
            }
        }
        zero_pages(page_size, place, wake)
    }

    /// Whether a page of zeroes may be the shared zero page, which a write replaces by another page.
    fn may_share_zero_page(&self) -> bool;

    /// Whether other processes may have mapped the same memory, shared.
    fn is_shared(&self) -> bool;

    /// Returns the memory of pages to the host.
    fn discard(&self, pages: PageRange) -> Result<(), DiscardError>;

    /// Whether this process can do that.
    fn can_discard(&self) -> bool;

    /// Faults a mapped page in for an access, as the access itself would. `None` if only the process
    /// that owns the memory can.
    fn fault_in(&self, page: PageIndex, access: FaultInAccess) -> Option<Result<(), FaultInError>>;

    /// Makes the memory inaccessible for good, however much of it is missing, for an owner who unmaps it next. Whether
    /// that was possible; if not, missing pages may be accessible still.
    fn close(&self) -> bool {
        false
    }

    /// Undoes what was changed so that the memory could be paged.
    fn end(&self);

    /// The file, if another process has handed it over.
    fn file(&self) -> Option<&MemoryFile>;

    /// The memory that this process has mapped, whose userfaultfds the pager opens.
    fn local(&self) -> Option<&Arc<Region>>;
}

/// Maps what the file has of pages that were mapped before.
///
/// Their owner may have protected them against writing since, and the kernel may have taken the mapping away, as it does for memory
/// that it swaps out: it leaves a mark, which a mapping without protection would replace, and the next write would go unnoticed.
/// Where the owner can track writes, the pages are protected: a write that is reported once too often does no harm.
pub(crate) fn map_again(place: &Place<'_>, wake: Wake) -> Result<(), InstallError> {
    if place
        .uffd
        .features()
        .contains(Features::WRITE_PROTECT_FILES)
    {
        match place.uffd.continue_pages_protected(place.range, wake) {
            // It does not track writes here, or the kernel is older than Linux 6.4.
            Err(InstallError::Io(Errno::INVAL)) => {}
            mapped => return mapped,
        }
    }
    place.uffd.continue_pages(place.range, wake)
}

/// Installs content as it is given.
fn copy(
    page_size: PageSize,
    place: &Place<'_>,
    content: Body<'_>,
    wake: Wake,
) -> Result<(), InstallError> {
    match content {
        Body::PageCache => place.uffd.continue_pages(place.range, wake),
        Body::Bytes(bytes) => place.uffd.copy_pages(place.range.start, bytes, wake),
        Body::Mapped(from) => place.uffd.copy_pages_from(place.range.start, from, wake),
        Body::Zero => zero_pages(page_size, place, wake),
        Body::Poisoned => Err(InstallError::NoContent),
    }
}

/// Installs zeroes in pages without content.
fn zero_pages(page_size: PageSize, place: &Place<'_>, wake: Wake) -> Result<(), InstallError> {
    zero_range(page_size, place.uffd, place.range, wake)
}

/// The same by addresses.
pub(crate) fn zero_range(
    page_size: PageSize,
    uffd: &Userfaultfd,
    range: UserRange,
    wake: Wake,
) -> Result<(), InstallError> {
    if page_size == PageSize::Size4K {
        return match uffd.zero_pages(range, wake) {
            Err(InstallError::Exists { installed_bytes: 0 }) => copy_zeroes(uffd, range, wake),
            // The next call begins at what was found.
            Err(InstallError::Exists { installed_bytes }) => {
                Err(InstallError::Again { installed_bytes })
            }
            zeroed => zeroed,
        };
    }
    // A hugetlb pool has no zero page.
    let page_bytes = page_size.bytes();
    let zeroes = Zeroes::map(page_bytes)?;
    let mut done = 0;
    while done < range.bytes {
        match uffd.copy_pages_from(range.start + done, zeroes.range(), wake) {
            Ok(()) => done += page_bytes,
            Err(InstallError::Exists { .. }) => {
                return Err(InstallError::Exists {
                    installed_bytes: done,
                });
            }
            Err(InstallError::Again { .. }) => {
                return Err(InstallError::Again {
                    installed_bytes: done,
                });
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Installs zeroes in the first page of a range, where UFFDIO_ZEROPAGE has found something. If the owner of the page
/// has protected it against writing while it was missing, that is only a mark, which UFFDIO_COPY replaces. (It also
/// replaces the mark of a page that was lost at this very moment. Its content was zeroes.)
#[cold]
fn copy_zeroes(uffd: &Userfaultfd, range: UserRange, wake: Wake) -> Result<(), InstallError> {
    const ZEROES: [u8; SMALLEST_PAGE_BYTES] = [0; SMALLEST_PAGE_BYTES];
    uffd.copy_pages(range.start, &ZEROES, wake)?;
    match ZEROES.len() as u64 {
        bytes if bytes == range.bytes => Ok(()),
        installed_bytes => Err(InstallError::Again { installed_bytes }),
    }
}

/// The part of a range of pages that begins at the first of them, in bytes.
fn span(page_size: PageSize, pages: PageRange) -> UserRange {
    let shift = page_size.shift();
    UserRange {
        start: pages.first().0 << shift,
        bytes: pages.count() << shift,
    }
}
