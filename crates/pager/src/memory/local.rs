//! Memory of this process, with two mappings of one file, or without a file.

use std::sync::Arc;

use pagetide_memory::{
    Backing, FaultInAccess, FaultInError, MemoryFile, PageIndex, PageRange, Region,
};
use pagetide_uapi::userfaultfd::{InstallError, Mode, Wake};

use super::{Memory, Shape, copy};
use crate::error::{AddError, DiscardError, InstallFailure};
use crate::memory::Body;
use crate::memory::Place;

/// A [`Region`].
#[derive(Debug)]
pub(crate) struct Local {
    pub(crate) region: Arc<Region>,
    pub(crate) mode: Mode,
}

impl Local {
    /// Writes content to the file, and then maps it. Only for [`Backing::Thp`]: the file consists of huge
    /// pages, of which the first write creates all 512 small ones, so that the kernel cannot tell which of
    /// them have content. Nobody else may write there: the service mapping is the pager's, and the file is in
    /// no other process.
    fn write(
        &self,
        place: &Place<'_>,
        content: Body<'_>,
        wake: Wake,
    ) -> Result<(), InstallFailure> {
        match content {
            Body::Bytes(bytes) => self.region.write_service(place.pages.first(), 0, bytes)?,
            Body::Zero => self.region.zero_service(place.pages)?,
            Body::PageCache => {}
            // Bytes that only the kernel can read.
            Body::Mapped(_) | Body::Poisoned => return Err(InstallError::NoContent.into()),
        }
        Ok(place.uffd.continue_pages(place.range, wake)?)
    }
}

impl Memory for Local {
    fn shape(&self) -> Shape {
        Shape {
            gpa: self.region.gpa(),
            range: self.region.guest(),
            page_size: self.region.page_size(),
            mode: self.mode,
        }
    }

    fn first_content(
        &self,
        is_missing: &dyn Fn(PageRange) -> Option<PageIndex>,
    ) -> Result<Option<PageIndex>, AddError> {
        let found = self.region.has_content().map_err(AddError::Content)?;
        Ok(found.filter(|_| is_missing(self.region.all_pages()).is_some()))
    }

    fn put(&self, place: &Place<'_>, content: Body<'_>, wake: Wake) -> Result<(), InstallFailure> {
        if self.region.backing() == Backing::Thp {
            return self.write(place, content, wake);
        }
        Ok(copy(self.region.page_size(), place, content, wake)?)
    }

    fn takes_mapped(&self) -> bool {
        self.region.backing() != Backing::Thp
    }

    fn may_share_zero_page(&self) -> bool {
        self.region.backing() == Backing::Anonymous
    }

    fn is_shared(&self) -> bool {
        self.region.backing().has_file()
    }

    fn discard(&self, pages: PageRange) -> Result<(), DiscardError> {
        self.region.punch(pages).map_err(DiscardError::Punch)
    }

    fn can_discard(&self) -> bool {
        true
    }

    fn fault_in(&self, page: PageIndex, access: FaultInAccess) -> Option<Result<(), FaultInError>> {
        Some(self.region.fault_in(PageRange::single(page), access))
    }

    fn end(&self) {
        self.region.end_paging();
    }

    fn file(&self) -> Option<&MemoryFile> {
        None
    }

    fn local(&self) -> Option<&Arc<Region>> {
        Some(&self.region)
    }
}
