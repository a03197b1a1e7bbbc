//! Zeroes to copy where the kernel has no zero page: in a hugetlb pool.

use std::ffi::c_void;
use std::ptr;

use pagetide_uapi::userfaultfd::{InstallError, UserRange};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

/// The content of one page, read-only. It takes page tables and no other memory, since the kernel maps its zero page for
/// each read. To allocate as much as 1 GiB would take it, and an allocation that fails ends the process.
pub(super) struct Zeroes {
    start: *mut c_void,
    bytes: usize,
}

impl Zeroes {
    /// The zero page is mapped at once, where there is memory for page tables. Without it the kernel, which first copies with
    /// faults disabled, takes a second huge page for a moment, which the pool may lack.
    pub(super) fn map(bytes: u64) -> Result<Self, InstallError> {
        let bytes = usize::try_from(bytes).map_err(|_| InstallError::Io(Errno::NOMEM))?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::POPULATE;
        // SAFETY: mmap_anonymous requires that a hint or MAP_FIXED does not replace memory in use; a null hint
        // without MAP_FIXED never does.
        let start = unsafe { mmap_anonymous(ptr::null_mut(), bytes, ProtFlags::READ, flags) };
        let start = start.map_err(InstallError::Io)?;
        Ok(Self { start, bytes })
    }

    /// Where they are.
    pub(super) fn range(&self) -> UserRange {
        UserRange {
            start: self.start.expose_provenance() as u64,
            bytes: self.bytes as u64,
        }
    }
}

impl Drop for Zeroes {
    fn drop(&mut self) {
        // SAFETY: munmap requires memory that nothing uses any more: `map` has made this mapping, and only the
        // kernel has read it. It cannot fail for a whole mapping.
        let _ = unsafe { munmap(self.start, self.bytes) };
    }
}
