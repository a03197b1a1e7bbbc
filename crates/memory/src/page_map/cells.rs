//! The bytes of a page map: this process's own, or in a file that outlives the process.

#[cfg(not(loom))]
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ops::Deref;
use std::ptr::NonNull;
#[cfg(not(loom))]
use std::sync::Arc;

use super::answers::PageMapError;
use super::cell::ABSENT;
#[cfg(not(loom))]
use super::map_file::MapFile;
use crate::convert::to_usize;
use crate::sync::AtomicU8;

/// One byte for each page.
#[derive(Debug)]
pub(super) struct Cells {
    start: NonNull<AtomicU8>,
    len: usize,
    /// The file that has them, if one does.
    #[cfg(not(loom))]
    file: Option<Arc<MapFile>>,
}

// SAFETY: the cells are atomic, and belong to this value alone until it is dropped.
unsafe impl Send for Cells {}
// SAFETY: as above; a shared reference gives access to atomics only.
unsafe impl Sync for Cells {}

impl Cells {
    /// Cells of pages that are all Absent. The allocator hands out memory that is zero already, which costs
    /// nothing where it is never touched.
    #[cfg(not(loom))]
    pub(super) fn new(pages: u64) -> Result<Self, PageMapError> {
        const { assert!(ABSENT == 0) };
        let none = PageMapError::OutOfMemory { pages };
        let len = to_usize(pages);
        let Ok(layout) = Layout::array::<AtomicU8>(len) else {
            return Err(none);
        };
        let start = match len {
            0 => NonNull::dangling(),
            // SAFETY: alloc_zeroed requires a layout that is not empty.
            _ => NonNull::new(unsafe { alloc_zeroed(layout) }.cast()).ok_or(none)?,
        };
        Ok(Self {
            start,
            len,
            file: None,
        })
    }

    /// Loom's cells have to be made one by one.
    #[cfg(loom)]
    pub(super) fn new(pages: u64) -> Result<Self, PageMapError> {
        let mut cells = Vec::new();
        cells.resize_with(to_usize(pages), || AtomicU8::new(ABSENT));
        let cells = NonNull::from(Box::leak(cells.into_boxed_slice()));
        Ok(Self {
            start: cells.cast(),
            len: cells.len(),
        })
    }
}

impl Deref for Cells {
    type Target = [AtomicU8];

    #[inline]
    fn deref(&self) -> &[AtomicU8] {
        // SAFETY: from_raw_parts requires `len` initialised cells at `start`, valid for the lifetime of
        // the result: the constructors made them, and they are freed when self is dropped. A file's
        // bytes are always initialised, it cannot shrink (its seal was checked), and self keeps it mapped.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl Drop for Cells {
    #[cfg(not(loom))]
    fn drop(&mut self) {
        if let Ok(layout) = Layout::array::<AtomicU8>(self.len)
            && self.file.is_none()
            && self.len > 0
        {
            // SAFETY: dealloc requires what alloc_zeroed returned for this layout, in `new`; atomics have
            // nothing to drop.
            unsafe { dealloc(self.start.as_ptr().cast(), layout) };
        }
    }

    #[cfg(loom)]
    fn drop(&mut self) {
        let cells = NonNull::slice_from_raw_parts(self.start, self.len);
        // SAFETY: from_raw requires a pointer that leak returned, once: `new` leaked a boxed slice of this
        // length.
        drop(unsafe { Box::from_raw(cells.as_ptr()) });
    }
}

#[cfg(not(loom))]
mod file {
    use std::sync::atomic::Ordering;

    use super::super::cell::{
        BEGUN, FORMER_PENDING, INSTALLING, POISONED, PageState, STATE, WAITERS, WAKE_WANTED,
    };
    use super::*;
    use crate::convert::to_u64;
    use crate::page::PageIndex;

    impl Cells {
        /// The cells in a file: settled pages stay as they are, and all others become Absent. Those that
        /// somebody was installing are marked. Holes of the file are Absent already, and are not read: the kernel would
        /// fill them.
        pub(in super::super) fn in_file(
            file: &Arc<MapFile>,
            offset_bytes: u64,
            pages: u64,
        ) -> Result<Self, PageMapError> {
            let cells = Self {
                start: file.cells(offset_bytes, pages)?,
                len: to_usize(pages),
                file: Some(Arc::clone(file)),
            };
            let end = offset_bytes + pages;
            let mut from = offset_bytes;
            while let Some(data) = file.next_data(from).filter(|data| data.start < end) {
                from = data.end;
                let page = |offset: u64| to_usize(offset.min(end).saturating_sub(offset_bytes));
                for index in page(data.start)..page(data.end) {
                    if let Some(cell) = cells.get(index) {
                        let kept = kept(cell.load(Ordering::Relaxed), index)?;
                        cell.store(kept, Ordering::Relaxed);
                    }
                }
            }
            Ok(cells)
        }
    }
    /// What a page's byte becomes.
    fn kept(byte: u8, index: usize) -> Result<u8, PageMapError> {
        let is_former = byte & (STATE | INSTALLING) == FORMER_PENDING;
        let kept = if PageState::of(byte).is_settled() && !is_former {
            byte & !(WAITERS | WAKE_WANTED)
        } else if byte & (INSTALLING | BEGUN) != 0 {
            ABSENT | BEGUN
        } else {
            ABSENT
        };
        let is_known = kept <= POISONED || kept == ABSENT | BEGUN;
        let page = PageIndex(to_u64(index));
        is_known
            .then_some(kept)
            .ok_or(PageMapError::BadState { page, byte })
    }
}
