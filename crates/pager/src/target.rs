//! The memory that pages are installed in: this process's own, or another's.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use pagetide_memory::{
    AccessError, Backing, FaultInAccess, FaultInError, FileAccessError, FileView, FileViewError,
    GuestAddress, HostRange, PageIndex, PageRange, PageSize, Region,
};

use rustix::io::Errno;
use rustix::mm::Advice;

use crate::error::{DiscardError, InstallFailure};

/// The file of a region's memory, handed over by its owner.
#[derive(Debug)]
pub struct Memfd {
    /// The file.
    pub file: OwnedFd,
    /// The offset of the region's first byte in the file.
    pub offset_bytes: u64,
}

/// The memory of a region.
#[derive(Debug)]
pub(crate) enum Target {
    /// Created by this process, with two mappings.
    Local(Arc<Region>),
    /// Created by other code or another process, known by its addresses.
    Foreign(Foreign),
}

/// Memory that was not created by [`Region`].
#[derive(Debug)]
pub(crate) struct Foreign {
    pub(crate) gpa: GuestAddress,
    /// Its addresses at the time of the hand-over. REMAP events move it.
    pub(crate) range: HostRange,
    pub(crate) page_size: PageSize,
    /// Its file, if it was handed over.
    pub(crate) view: Option<FileView>,
    /// Whether it is this process's own memory, mapped for as long as the region is paged.
    pub(crate) is_mapped_here: bool,
    /// Whether it is a private mapping of a file to which the source writes.
    pub(crate) source_fills_file: bool,
}

impl Target {
    pub(crate) fn gpa(&self) -> GuestAddress {
        match self {
            Self::Local(region) => region.gpa(),
            Self::Foreign(foreign) => foreign.gpa,
        }
    }

    pub(crate) fn range(&self) -> HostRange {
        match self {
            Self::Local(region) => region.guest(),
            Self::Foreign(foreign) => foreign.range,
        }
    }

    pub(crate) fn page_size(&self) -> PageSize {
        match self {
            Self::Local(region) => region.page_size(),
            Self::Foreign(foreign) => foreign.page_size,
        }
    }

    pub(crate) fn local(&self) -> Option<&Arc<Region>> {
        match self {
            Self::Local(region) => Some(region),
            Self::Foreign(_) => None,
        }
    }

    /// Whether a page of zeroes may be the shared zero page, which a write replaces by another page.
    /// For foreign memory without a file this is unknown.
    pub(crate) fn may_share_zero_page(&self) -> bool {
        match self {
            Self::Local(region) => region.backing() == Backing::Anonymous,
            Self::Foreign(foreign) => foreign.view.is_none(),
        }
    }

    /// Whether the pages belong to a hugetlb pool, which has no zero page.
    pub(crate) fn is_hugetlb(&self) -> bool {
        self.page_size() != PageSize::Size4K
    }

    /// Whether content is in the page cache before it arrives here. Other regions may have mapped the
    /// same file, so a page of zeroes must not be written there.
    pub(crate) fn is_filled_by_source(&self) -> bool {
        matches!(self, Self::Foreign(foreign) if foreign.source_fills_file)
    }

    /// Writes content to the page cache, which causes no fault.
    pub(crate) fn write(&self, page: PageIndex, content: &[u8]) -> Result<(), InstallFailure> {
        match self {
            Self::Local(region) => region.write_service(page, 0, content)?,
            Self::Foreign(foreign) => {
                let offset = page.0 << foreign.page_size.shift();
                foreign.view()?.write(offset, content)?;
            }
        }
        Ok(())
    }

    /// Writes zeroes to pages in the page cache.
    pub(crate) fn zero(&self, pages: PageRange) -> Result<(), InstallFailure> {
        match self {
            Self::Local(region) => region.zero_service(pages)?,
            Self::Foreign(foreign) => {
                let shift = foreign.page_size.shift();
                let (offset, bytes) = (pages.first().0 << shift, pages.count() << shift);
                foreign.view()?.zero(offset, bytes)?;
            }
        }
        Ok(())
    }

    /// A page that the file of foreign memory contains, if the file was handed over.
    pub(crate) fn find_in_file(&self) -> Result<Option<PageIndex>, FileAccessError> {
        let Self::Foreign(Foreign {
            view: Some(view),
            page_size,
            ..
        }) = self
        else {
            return Ok(None);
        };
        let found = view.find_content()?;
        Ok(found.map(|offset| PageIndex(offset >> page_size.shift())))
    }

    /// Returns the memory of pages to the host.
    pub(crate) fn punch(&self, pages: PageRange) -> Result<(), DiscardError> {
        match self {
            Self::Local(region) => region.punch(pages).map_err(DiscardError::Punch),
            Self::Foreign(foreign) => {
                let Some(view) = &foreign.view else {
                    let discarded = foreign.advise(pages, Advice::LinuxDontNeed);
                    return match discarded.ok_or(DiscardError::NotOurs)? {
                        Ok(()) => Ok(()),
                        Err(errno) => Err(DiscardError::Punch(AccessError::Punch { pages, errno })),
                    };
                };
                let shift = foreign.page_size.shift();
                let (offset, bytes) = (pages.first().0 << shift, pages.count() << shift);
                view.punch(offset, bytes).map_err(DiscardError::PunchView)
            }
        }
    }

    /// Faults a mapped page in for an access, as the access itself would. `None` if only the process
    /// that owns the memory can.
    pub(crate) fn fault_in(
        &self,
        page: PageIndex,
        access: FaultInAccess,
    ) -> Option<Result<(), FaultInError>> {
        match self {
            Self::Local(region) => Some(region.fault_in(PageRange::single(page), access)),
            Self::Foreign(foreign) => {
                let pages = PageRange::single(page);
                let advice = match access {
                    FaultInAccess::Read => Advice::LinuxPopulateRead,
                    FaultInAccess::Write => Advice::LinuxPopulateWrite,
                };
                Some(match foreign.advise(pages, advice)? {
                    // The fault recurs if necessary.
                    Ok(()) | Err(Errno::AGAIN) => Ok(()),
                    Err(Errno::INTR) => Err(FaultInError::Interrupted { pages }),
                    Err(Errno::HWPOISON) => Err(FaultInError::Poisoned { pages }),
                    Err(errno) => Err(FaultInError::FaultIn { pages, errno }),
                })
            }
        }
    }

    /// Whether this process can return its pages to the host.
    pub(crate) fn can_punch(&self) -> bool {
        match self {
            Self::Local(_) => true,
            Self::Foreign(foreign) => foreign.view.is_some() || foreign.is_mapped_here,
        }
    }
}

impl Foreign {
    /// madvise() on pages of this process's own memory; None for another process's.
    fn advise(&self, pages: PageRange, advice: Advice) -> Option<Result<(), Errno>> {
        if !self.is_mapped_here {
            return None;
        }
        let shift = self.page_size.shift();
        let offset = usize::try_from(pages.first().0 << shift).ok()?;
        let bytes = usize::try_from(pages.count() << shift).ok()?;
        let start = self.range.start().0.checked_add(offset)?;
        let start = std::ptr::with_exposed_provenance_mut::<std::ffi::c_void>(start);
        // SAFETY: madvise requires memory that is the caller's, because some advice drops content. The
        // creator of a region with `is_mapped_here` has promised that the range is this process's,
        // stays mapped, and that no code relies on the content of missing pages (RegionConfig::mapped).
        Some(unsafe { rustix::mm::madvise(start, bytes, advice) })
    }

    fn view(&self) -> Result<&FileView, InstallFailure> {
        self.view
            .as_ref()
            .ok_or(InstallFailure::Write(AccessError::NoServiceMapping))
    }
}

impl Memfd {
    pub(crate) fn map(
        self,
        range: HostRange,
        page_size: PageSize,
    ) -> Result<FileView, FileViewError> {
        FileView::map(
            self.file,
            self.offset_bytes,
            range.bytes() as u64,
            page_size,
        )
    }
}
