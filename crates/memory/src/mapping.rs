//! One mapping of memory into this process, unmapped when dropped.

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

/// Memory of this process that was mapped by [`Mapping::new`], and nothing else.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: *mut u8,
    bytes: usize,
    /// Known to be guest memory for as long as it is mapped.
    listed: Option<Listed>,
}

/// Where in a file a mapping begins.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FilePart<'fd> {
    pub(crate) file: BorrowedFd<'fd>,
    /// In bytes, a multiple of the size of the file's pages.
    pub(crate) offset: u64,
}

// SAFETY: a Mapping is an address and a length. All access goes through methods that copy bytes
// where the compiler does not look, or that hand the range to the kernel; neither depends on the
// thread.
unsafe impl Send for Mapping {}
// SAFETY: as above; no method takes a reference into the mapped memory.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `bytes` bytes, readable and writable, of a file (shared), or of anonymous
    /// memory (private). The address is congruent to `congruent_to` modulo `alignment`,
    /// so that gpa, hva and file offset allow the same huge pages.
    pub(crate) fn new(
        file: Option<FilePart<'_>>,
        bytes: usize,
        alignment: PageSize,
        congruent_to: u64,
    ) -> Result<Self, Errno> {
        let alignment_bytes = to_usize(alignment.bytes());
        let reserved = bytes.checked_add(alignment_bytes).ok_or(Errno::NOMEM)?;
        // SAFETY: mmap_anonymous requires that a hint which is null or MAP_FIXED does not replace
        // memory that something else uses; null without MAP_FIXED never does.
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
            // SAFETY: MAP_FIXED replaces what is mapped at start..start+bytes, which lies within
            // the reservation just made (skip < alignment_bytes), so within memory that is ours.
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

    /// madvise() on `bytes` bytes from `offset` on. Both must lie within the mapping, or EINVAL.
    pub(crate) fn advise(&self, offset: usize, bytes: usize, advice: Advice) -> Result<(), Errno> {
        if offset.checked_add(bytes).is_none_or(|end| end > self.bytes) {
            return Err(Errno::INVAL);
        }
        let start: *mut c_void = self.start.wrapping_add(offset).cast();
        // SAFETY: madvise requires a range that belongs to the caller, because some advice drops
        // content. The range was just checked to be within this mapping, and no reference into it
        // is ever handed out, so content may change at any time.
        unsafe { mm::madvise(start, bytes, advice) }
    }
}

impl Mapping {
    /// madvise() on all of it.
    pub(crate) fn advise_all(&self, advice: Advice) -> Result<(), Errno> {
        self.advise(0, self.bytes, advice)
    }

    /// mprotect() on all of it. While it is inaccessible, nobody may use [`Mapping::as_ptr`].
    pub(crate) fn protect(&self, access: MprotectFlags) -> Result<(), Errno> {
        // SAFETY: mprotect requires that nobody relies on the access that is taken away; the range
        // is this mapping's own, and no reference into it is handed out here. Those who take its
        // pointer keep from using it meanwhile, see ServiceGate.
        unsafe { mm::mprotect(self.start.cast(), self.bytes, access) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // First: something else may be mapped there at once.
        self.listed = None;
        unmap(self.start, self.bytes);
    }
}

/// Unmaps part of a mapping or reservation that is ours. Does nothing for no bytes.
fn unmap(start: *mut u8, bytes: usize) {
    if bytes == 0 {
        return;
    }
    // SAFETY: munmap requires that nobody uses the range any more. Every caller passes (part of)
    // a reservation that it made and whose address it has not handed out, or the whole of a Mapping
    // that is being dropped.
    let result = unsafe { mm::munmap(start.cast(), bytes) };
    debug_assert!(result.is_ok(), "munmap of our own range: {result:?}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_address_is_congruent_to_what_was_asked() {
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
