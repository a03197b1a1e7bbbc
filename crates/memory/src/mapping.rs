//! A mapping of memory in this process, unmapped on drop.

use std::ffi::c_void;
use std::os::fd::BorrowedFd;
use std::ptr;

use rustix::io::Errno;
use rustix::mm::{self, Advice, MapFlags, MprotectFlags, ProtFlags};

use crate::address::HostAddress;
use crate::convert::to_usize;
use crate::guard::Listed;
use crate::page::PageSize;
use crate::range::HostRange;

/// Memory of this process that [`Mapping::new`] mapped.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: *mut u8,
    bytes: usize,
    /// Lists the mapping as guest memory for as long as it is mapped.
    listed: Option<Listed>,
}

/// The start of a mapping within a file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FilePart<'fd> {
    pub(crate) file: BorrowedFd<'fd>,
    /// In bytes, a multiple of the size of the file's pages.
    pub(crate) offset: u64,
}

// SAFETY: a Mapping is an address and a length. All access goes through methods that copy bytes by
// assembly, or that pass the range to the kernel; neither depends on the thread.
unsafe impl Send for Mapping {}
// SAFETY: as above; no method takes a reference into the mapped memory.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `bytes` bytes, readable and writable, of a file (shared) or of anonymous memory (private).
    /// The address is congruent to `congruent_to` modulo `alignment`, so that gpa, hva and file offset
    /// permit the same huge pages.
    pub(crate) fn new(
        file: Option<FilePart<'_>>,
        bytes: usize,
        alignment: PageSize,
        congruent_to: u64,
    ) -> Result<Self, Errno> {
        let alignment_bytes = to_usize(alignment.bytes());
        let reserved = bytes.checked_add(alignment_bytes).ok_or(Errno::NOMEM)?;
        // SAFETY: mmap_anonymous requires that a hint or MAP_FIXED does not replace memory in use; a
        // null hint without MAP_FIXED never does.
        let base = unsafe {
            mm::mmap_anonymous(
                ptr::null_mut(),
                reserved,
                ProtFlags::empty(),
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }?
        .cast::<u8>();

        let wanted = to_usize(congruent_to) & (alignment_bytes - 1);
        let skip = wanted.wrapping_sub(base.addr()) & (alignment_bytes - 1);
        let start = base.wrapping_add(skip);
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let mapped = match file {
            // SAFETY: MAP_FIXED replaces the memory at start..start+bytes, which lies within the
            // reservation just made (skip < alignment_bytes) and belongs to this function.
            Some(FilePart { file, offset }) => unsafe {
                let flags = MapFlags::SHARED | MapFlags::FIXED;
                mm::mmap(start.cast(), bytes, access, flags, file, offset)
            },
            // SAFETY: as above.
            None => unsafe {
                let flags = MapFlags::PRIVATE | MapFlags::FIXED;
                mm::mmap_anonymous(start.cast(), bytes, access, flags)
            },
        };
        let mapped = match mapped {
            Ok(mapped) => mapped,
            Err(errno) => {
                unmap(base, reserved);
                return Err(errno);
            }
        };

        unmap(base, skip);
        unmap(start.wrapping_add(bytes), alignment_bytes - skip);
        let mut mapping = Self {
            start: mapped.cast(),
            bytes,
            listed: None,
        };
        mapping.listed = Some(Listed::new(mapping.range()));
        Ok(mapping)
    }

    pub(crate) fn range(&self) -> HostRange {
        HostRange::trusted(HostAddress(self.start.addr()), self.bytes)
    }

    /// The first byte, with the mapping's provenance.
    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.start
    }

    /// madvise() on `bytes` bytes from `offset` on. Both must lie within the mapping; otherwise EINVAL.
    pub(crate) fn advise(&self, offset: usize, bytes: usize, advice: Advice) -> Result<(), Errno> {
        if offset.checked_add(bytes).is_none_or(|end| end > self.bytes) {
            return Err(Errno::INVAL);
        }
        let start: *mut c_void = self.start.wrapping_add(offset).cast();
        // SAFETY: madvise requires a range that belongs to the caller, because some advice drops
        // content. The range was just checked to be within this mapping, and no method returns a
        // reference into it, so content may change at any time.
        unsafe { mm::madvise(start, bytes, advice) }
    }
}

impl Mapping {
    /// madvise() on the whole mapping.
    pub(crate) fn advise_all(&self, advice: Advice) -> Result<(), Errno> {
        self.advise(0, self.bytes, advice)
    }

    /// mprotect() on the whole mapping. While it is inaccessible, no code may use [`Mapping::as_ptr`].
    pub(crate) fn protect(&self, access: MprotectFlags) -> Result<(), Errno> {
        // SAFETY: mprotect requires that no code relies on the access that is removed; the range is
        // this mapping's own, and no method returns a reference into it. Users of its pointer do not
        // use it meanwhile, see ServiceGate.
        unsafe { mm::mprotect(self.start.cast(), self.bytes, access) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // First, because another mapping may take these addresses at once.
        self.listed = None;
        unmap(self.start, self.bytes);
    }
}

/// Unmaps part of a mapping or reservation of this module. Does nothing if `bytes` is 0.
fn unmap(start: *mut u8, bytes: usize) {
    if bytes == 0 {
        return;
    }
    // SAFETY: munmap requires that no code uses the range any more. Every caller passes (part of) a
    // reservation that it made and whose address it has not passed on, or the whole of a Mapping that
    // is being dropped.
    let result = unsafe { mm::munmap(start.cast(), bytes) };
    debug_assert!(result.is_ok(), "munmap of an own range: {result:?}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_address_is_congruent_as_requested() {
        for (alignment, congruent_to) in [
            (PageSize::Size2M, 0),
            (PageSize::Size2M, 0x5000),
            (PageSize::Size1G, 0x4020_3000),
        ] {
            let mapping = Mapping::new(None, 0x3000, alignment, congruent_to).unwrap();
            let offset = mapping.range().start().as_u64().wrapping_sub(congruent_to);
            assert!(alignment.divides(offset), "{:?}", mapping.range());
        }
    }

    #[test]
    fn advice_outside_the_mapping_is_refused() {
        let mapping = Mapping::new(None, 0x3000, PageSize::Size4K, 0).unwrap();
        let advice = Advice::LinuxDontNeed;
        assert_eq!(mapping.advise(0x1000, 0x2000, advice), Ok(()));
        assert_eq!(mapping.advise(0x1000, 0x3000, advice), Err(Errno::INVAL));
        assert_eq!(
            mapping.advise(usize::MAX, 0x1000, advice),
            Err(Errno::INVAL)
        );
    }
}
