//! Content for missing pages that needs no request: from a local source, or from a source that has it now.

use std::panic::{AssertUnwindSafe, catch_unwind};

use pagetide_memory::{PageIndex, PageRange, PageState, Urgency};
use pagetide_uapi::userfaultfd::{InstallError, UserRange};

use crate::error::{InstallFailure, message_of};
use crate::memory::Body;
use crate::region::PagedRegion;
use crate::source::{Filled, LocalSource, ReadAt, Room, Source, SourceError};

/// The run of absent pages around `page`, within `window`.
pub(crate) fn absent_run(region: &PagedRegion, page: PageIndex, window: PageRange) -> PageRange {
    let is_absent = |page: u64| region.map.state(PageIndex(page)) == Some(PageState::Absent);
    let mut first = page.0;
    while first > window.first().0 && is_absent(first - 1) {
        first -= 1;
    }
    let mut end = page.0 + 1;
    while end < window.end().0 && is_absent(end) {
        end += 1;
    }
    PageRange::new(PageIndex(first), end - first)
}

/// Fills the first bytes of `buffer` with the content of `pages` from a local source.
pub(crate) fn fill_buffer(
    region: &PagedRegion,
    source: &dyn LocalSource,
    pages: PageRange,
    buffer: &mut Vec<u8>,
) -> Result<Filled, SourceError> {
    let mut room = Room::new(buffer, region.bytes_of(pages));
    let room = room.buffer().ok_or(SourceError::NoMemory)?;
    // A panic of the source is caught: the thread's other faults must not be lost.
    let gpa = region.gpa_of(pages.first());
    catch_unwind(AssertUnwindSafe(|| source.fill(gpa, room))).unwrap_or_else(|panic| {
        let message = message_of(&*panic);
        Err(SourceError::Panicked { message })
    })
}

/// Fills the first bytes of `buffer` with the content of `pages`, if the source has it without waiting.
pub(crate) fn fill_buffer_now(
    region: &PagedRegion,
    source: &dyn Source,
    pages: PageRange,
    urgency: Urgency,
    buffer: &mut Vec<u8>,
) -> Option<Filled> {
    let mut room = Room::new(buffer, region.bytes_of(pages));
    let at = read_at(region, pages, urgency);
    // The request that follows a panic will report it.
    catch_unwind(AssertUnwindSafe(|| source.fill_now(at, &mut room))).unwrap_or_default()
}

/// The content of `pages`, if the source has it mapped and available without waiting.
pub(crate) fn mapped_now(
    region: &PagedRegion,
    source: &dyn Source,
    pages: PageRange,
    urgency: Urgency,
) -> Option<Body<'static>> {
    if !region.memory.takes_mapped() {
        return None;
    }
    let bytes = region.bytes_of(pages);
    let at = read_at(region, pages, urgency);
    let mapped = catch_unwind(AssertUnwindSafe(|| source.mapped_now(at, bytes)));
    let from = UserRange::from(mapped.unwrap_or_default()?);
    (from.bytes == bytes).then_some(Body::Mapped(from))
}

/// Whether mapped content could not be installed because it is not there any more.
pub(crate) fn is_gone(failure: &InstallFailure, content: Body<'_>) -> bool {
    matches!(content, Body::Mapped(_))
        && matches!(failure, InstallFailure::Kernel(InstallError::NoContent))
}

fn read_at(region: &PagedRegion, pages: PageRange, urgency: Urgency) -> ReadAt {
    ReadAt {
        region: region.id,
        offset_bytes: pages.first().0 << region.page_shift(),
        gpa: region.gpa_of(pages.first()),
        urgency,
    }
}

/// The content of `pages` in the first bytes of `buffer`.
pub(crate) fn content_of<'b>(region: &PagedRegion, pages: PageRange, buffer: &'b [u8]) -> Body<'b> {
    Body::Bytes(buffer).part(0, region.bytes_of(pages))
}
