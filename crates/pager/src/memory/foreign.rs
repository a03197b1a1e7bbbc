//! Memory that other code has mapped and registered: another process, or this one.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use pagetide_memory::{
    AccessError, FaultInAccess, FaultInError, HostRange, MemoryFile, MemoryFileError, PageIndex,
    PageRange, PageSize, Region,
};
use pagetide_uapi::userfaultfd::{InstallError, Wake};
use rustix::io::Errno;
use rustix::mm::{Advice, MprotectFlags};

use super::{Memory, Shape, copy, span, zero_pages};
use crate::error::{AddError, DiscardError, InstallFailure};
use crate::log_limit::log_limited;
use crate::memory::Body;
use crate::memory::Place;

/// The file of a region's memory, handed over by its owner.
#[derive(Debug)]
pub struct Memfd {
    /// The file.
    pub file: OwnedFd,
    /// The offset of the region's first byte in the file.
    pub offset_bytes: u64,
}

impl Memfd {
    pub(crate) fn part(
        self,
        range: HostRange,
        page_size: PageSize,
    ) -> Result<MemoryFile, MemoryFileError> {
        let bytes = range.bytes() as u64;
        MemoryFile::new(self.file, self.offset_bytes, bytes, page_size)
    }
}

/// Memory known by its addresses only.
#[derive(Debug)]
pub(crate) struct Foreign {
    pub(crate) shape: Shape,
    /// Whether it is this process's own memory, mapped for as long as the region is paged.
    pub(crate) is_mapped_here: bool,
    /// Whether a child of this process inherits the memory again when paging has ended.
    pub(crate) is_inherited_again: bool,
}

/// Memory whose file the other process has handed over, shared with it.
#[derive(Debug)]
pub(crate) struct ForeignFile {
    pub(crate) memory: Foreign,
    pub(crate) file: MemoryFile,
}

/// A private mapping of a file to which the source writes, and which other regions may have mapped as well.
#[derive(Debug)]
pub(crate) struct ForeignClone {
    pub(crate) memory: Foreign,
}

impl Foreign {
    /// madvise() on pages of this process's own memory; None for another process's.
    fn advise(&self, pages: PageRange, advice: Advice) -> Option<Result<(), Errno>> {
        if !self.is_mapped_here {
            return None;
        }
        let span = span(self.shape.page_size, pages);
        let bytes = usize::try_from(span.bytes).ok()?;
        let start = self
            .shape
            .range
            .start()
            .0
            .checked_add(usize::try_from(span.start).ok()?)?;
        let start = std::ptr::with_exposed_provenance_mut::<std::ffi::c_void>(start);
        // SAFETY: madvise requires memory that is the caller's, because some advice drops content. The
        // creator of a region with `is_mapped_here` has promised that the range is this process's,
        // stays mapped, and that no code relies on the content of missing pages (RegionConfig::mapped).
        Some(unsafe { rustix::mm::madvise(start, bytes, advice) })
    }
}

impl Memory for Foreign {
    fn shape(&self) -> Shape {
        self.shape
    }

    /// Unknown: its owner must not hand over memory with content.
    fn first_content(
        &self,
        _: &dyn Fn(PageRange) -> Option<PageIndex>,
    ) -> Result<Option<PageIndex>, AddError> {
        Ok(None)
    }

    fn put(&self, place: &Place<'_>, content: Body<'_>, wake: Wake) -> Result<(), InstallFailure> {
        Ok(copy(self.shape.page_size, place, content, wake)?)
    }

    fn takes_mapped(&self) -> bool {
        true
    }

    /// Unknown: it may be private memory.
    fn may_share_zero_page(&self) -> bool {
        true
    }

    fn is_shared(&self) -> bool {
        false
    }

    fn discard(&self, pages: PageRange) -> Result<(), DiscardError> {
        let discarded = self.advise(pages, Advice::LinuxDontNeed);
        discarded
            .ok_or(DiscardError::NotOurs)?
            .map_err(|errno| DiscardError::Punch(AccessError::Punch { pages, errno }))
    }

    fn can_discard(&self) -> bool {
        self.is_mapped_here
    }

    fn fault_in(&self, page: PageIndex, access: FaultInAccess) -> Option<Result<(), FaultInError>> {
        let pages = PageRange::single(page);
        let advice = match access {
            FaultInAccess::Read => Advice::LinuxPopulateRead,
            FaultInAccess::Write => Advice::LinuxPopulateWrite,
        };
        Some(match self.advise(pages, advice)? {
            // The fault recurs if necessary.
            Ok(()) | Err(Errno::AGAIN) => Ok(()),
            Err(Errno::INTR) => Err(FaultInError::Interrupted { pages }),
            Err(Errno::HWPOISON) => Err(FaultInError::Poisoned { pages }),
            Err(errno) => Err(FaultInError::FaultIn { pages, errno }),
        })
    }

    fn close(&self) -> bool {
        if !self.is_mapped_here {
            return false;
        }
        let Shape { range, .. } = self.shape;
        let start = std::ptr::with_exposed_provenance_mut::<std::ffi::c_void>(range.start().0);
        // SAFETY: mprotect requires that no code relies on the access that is taken away. The creator of a region with
        // `is_mapped_here` has promised that the range is this process's and mapped (RegionConfig::mapped); and only
        // Pager::remove_with_memory leads here, whose caller has promised that no code accesses it any more.
        let closed = unsafe { rustix::mm::mprotect(start, range.bytes(), MprotectFlags::empty()) };
        closed.is_ok()
    }

    fn end(&self) {
        if self.is_inherited_again {
            let bytes = self.shape.range.bytes() as u64;
            let all = PageRange::new(PageIndex(0), bytes >> self.shape.page_size.shift());
            if let Some(Err(error)) = self.advise(all, Advice::LinuxDoFork) {
                log_limited!(error, %error, range = ?self.shape.range, "MADV_DOFORK");
            }
        }
    }

    fn file(&self) -> Option<&MemoryFile> {
        None
    }

    fn local(&self) -> Option<&Arc<Region>> {
        None
    }
}

impl Memory for ForeignFile {
    fn shape(&self) -> Shape {
        self.memory.shape
    }

    fn first_content(
        &self,
        is_missing: &dyn Fn(PageRange) -> Option<PageIndex>,
    ) -> Result<Option<PageIndex>, AddError> {
        let shift = self.memory.shape.page_size.shift();
        let mut from = 0;
        while let Some(found) = self
            .file
            .content_from(from)
            .map_err(AddError::FileContent)?
        {
            let (first, end) = (found.start >> shift, found.end.div_ceil(1 << shift));
            let pages = PageRange::new(PageIndex(first), end - first);
            if let Some(page) = is_missing(pages) {
                return Ok(Some(page));
            }
            from = end << shift;
        }
        Ok(None)
    }

    fn put(&self, place: &Place<'_>, content: Body<'_>, wake: Wake) -> Result<(), InstallFailure> {
        self.memory.put(place, content, wake)
    }

    fn takes_mapped(&self) -> bool {
        true
    }

    fn may_share_zero_page(&self) -> bool {
        false
    }

    fn is_shared(&self) -> bool {
        true
    }

    fn discard(&self, pages: PageRange) -> Result<(), DiscardError> {
        let span = span(self.memory.shape.page_size, pages);
        let punched = self.file.punch(span.start, span.bytes);
        punched.map_err(DiscardError::PunchFile)
    }

    fn can_discard(&self) -> bool {
        true
    }

    fn fault_in(&self, page: PageIndex, access: FaultInAccess) -> Option<Result<(), FaultInError>> {
        self.memory.fault_in(page, access)
    }

    fn close(&self) -> bool {
        self.memory.close()
    }

    fn end(&self) {
        self.memory.end();
    }

    fn file(&self) -> Option<&MemoryFile> {
        Some(&self.file)
    }

    fn local(&self) -> Option<&Arc<Region>> {
        None
    }
}

impl Memory for ForeignClone {
    fn shape(&self) -> Shape {
        self.memory.shape
    }

    fn first_content(
        &self,
        is_missing: &dyn Fn(PageRange) -> Option<PageIndex>,
    ) -> Result<Option<PageIndex>, AddError> {
        self.memory.first_content(is_missing)
    }

    /// The source has written content to the file. A page of zeroes is not there: it becomes this mapping's own.
    fn put(&self, place: &Place<'_>, content: Body<'_>, wake: Wake) -> Result<(), InstallFailure> {
        let content = match content {
            Body::Bytes(_) => Body::PageCache,
            content => content,
        };
        self.memory.put(place, content, wake)
    }

    /// A copy would be this mapping's own, and not the file's.
    fn takes_mapped(&self) -> bool {
        false
    }

    /// The file has the content from before the discard, and none of the guest's data.
    fn zero(&self, place: &Place<'_>, wake: Wake) -> Result<(), InstallError> {
        zero_pages(self.memory.shape.page_size, place, wake)
    }

    fn may_share_zero_page(&self) -> bool {
        true
    }

    fn is_shared(&self) -> bool {
        false
    }

    fn discard(&self, pages: PageRange) -> Result<(), DiscardError> {
        self.memory.discard(pages)
    }

    fn can_discard(&self) -> bool {
        self.memory.can_discard()
    }

    fn fault_in(&self, page: PageIndex, access: FaultInAccess) -> Option<Result<(), FaultInError>> {
        self.memory.fault_in(page, access)
    }

    fn close(&self) -> bool {
        self.memory.close()
    }

    fn end(&self) {
        self.memory.end();
    }

    fn file(&self) -> Option<&MemoryFile> {
        None
    }

    fn local(&self) -> Option<&Arc<Region>> {
        None
    }
}
