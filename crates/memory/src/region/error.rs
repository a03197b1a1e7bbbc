//! The errors of a region.

use std::io;
use std::path::PathBuf;

use pagetide_uapi::host::PageSizeError;
use rustix::io::Errno;
use thiserror::Error;

use crate::address::GuestAddress;
use crate::backing::Backing;
use crate::page::{PageIndex, PageRange, PageSize};
use crate::range::GuestRange;

/// Why a region could not be created.
#[derive(Debug, Error)]
pub enum RegionError {
    /// The region has no bytes.
    #[error("a region needs at least one page, not 0 bytes")]
    Empty,
    /// The address or the size does not match the backing's pages.
    #[error("{bytes} bytes at {gpa} are not whole {page_size} pages, as {backing} memory needs")]
    NotPageMultiple {
        /// The start of the region.
        gpa: GuestAddress,
        /// Its size in bytes.
        bytes: u64,
        /// The requested backing.
        backing: Backing,
        /// The page size of which address and size must be multiples.
        page_size: PageSize,
    },
    /// The region would end beyond the end of the guest's address space.
    #[error("{bytes} bytes at {gpa} wrap around the guest's address space")]
    Wraps {
        /// The start of the region.
        gpa: GuestAddress,
        /// Its size in bytes.
        bytes: u64,
    },
    /// The host's pages are not 4 KiB each.
    #[error(transparent)]
    PageSize(#[from] PageSizeError),
    /// The hugetlb pool has too few free pages.
    #[error(
        "{wanted} free huge pages of {page_size} are needed and {free} are free: \
         write a larger number to {}", .setting.display()
    )]
    HugepagesNotReserved {
        /// The size of the huge pages.
        page_size: PageSize,
        /// Pages needed.
        wanted: u64,
        /// Free pages that no mapping has reserved.
        free: u64,
        /// The file that sets the pool's size.
        setting: PathBuf,
    },
    /// This kernel or CPU lacks hugetlb pages of that size.
    #[error(
        "this kernel has no huge pages of {page_size}: \
         it needs CONFIG_HUGETLBFS and a CPU with pages of that size"
    )]
    NoHugepagePool {
        /// The size of the huge pages.
        page_size: PageSize,
    },
    /// This kernel was built without transparent huge pages.
    #[error("this kernel has no transparent huge pages (CONFIG_TRANSPARENT_HUGEPAGE)")]
    NoTransparentHugepages,
    /// The host has too little memory left.
    #[error("{bytes} bytes of {backing} memory do not fit: {available_bytes} bytes are available")]
    DoesNotFit {
        /// Requested bytes.
        bytes: u64,
        /// The requested backing.
        backing: Backing,
        /// Bytes that are available on the host.
        available_bytes: u64,
    },
    /// This kernel cannot preserve the rest of a huge page when a part of it has an error.
    #[error(
        "this kernel has no MFD_MF_KEEP_UE_MAPPED for {backing} memory: use the policy default"
    )]
    NoKeepPolicy {
        /// The requested backing.
        backing: Backing,
    },
    /// `memfd_create` failed.
    #[error("memfd_create for {backing} memory")]
    CreateFile {
        /// The requested backing.
        backing: Backing,
        /// The kernel's error.
        #[source]
        errno: Errno,
    },
    /// `ftruncate` failed.
    #[error("setting the size of the memory file to {bytes} bytes")]
    SizeFile {
        /// The requested size.
        bytes: u64,
        /// The kernel's error.
        #[source]
        errno: Errno,
    },
    /// `mmap` failed for another reason than lack of memory.
    #[error("mapping {bytes} bytes")]
    Map {
        /// The requested size.
        bytes: u64,
        /// The kernel's error.
        #[source]
        errno: Errno,
    },
    /// [`begin_paging`](crate::Region::begin_paging) was called twice.
    #[error("the region is already being paged")]
    AlreadyPaged,
    /// References to words of the service mapping exist
    /// ([`service_word`](crate::Region::service_word)), so it cannot be closed.
    #[error("the service mapping is in use and cannot be closed")]
    ServiceInUse,
    /// `madvise` or `mprotect` failed at the start of paging.
    #[error("preparing the region's mappings for paging")]
    BeginPaging {
        /// The kernel's error.
        #[source]
        errno: Errno,
    },
    /// `madvise` about huge pages failed.
    #[error("advising the kernel about huge pages")]
    Advise {
        /// The kernel's error.
        #[source]
        errno: Errno,
    },
}

/// Why content of a region could not be read, written or discarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum AccessError {
    /// Anonymous memory has only one mapping.
    #[error("anonymous memory has no service mapping")]
    NoServiceMapping,
    /// The region is being paged, with its service mapping closed.
    #[error("the service mapping is closed while the region is paged")]
    ServiceClosed,
    /// The access does not lie within the region.
    #[error("{len} bytes at offset {offset} of page {page} are not all in the region")]
    Outside {
        /// The page in which the access starts.
        page: PageIndex,
        /// The offset of the access in that page.
        offset: u64,
        /// The length of the access in bytes.
        len: usize,
    },
    /// The run is empty or leaves the region.
    #[error("pages {pages} are not pages of the region")]
    NoSuchPages {
        /// The requested pages.
        pages: PageRange,
    },
    /// The memory has an uncorrected error. Part of the data has been copied.
    #[error("an uncorrected memory error at gpa {gpa}, {lost} is lost")]
    Poisoned {
        /// The byte whose access failed.
        gpa: GuestAddress,
        /// The range that is lost.
        lost: GuestRange,
    },
    /// Punching a hole into the file, or `MADV_DONTNEED`, failed.
    #[error("punching a hole at pages {pages}")]
    Punch {
        /// The requested pages.
        pages: PageRange,
        /// The kernel's error.
        #[source]
        errno: Errno,
    },
    /// Removing page table entries failed.
    #[error("zapping pages {pages} of the guest mapping")]
    Zap {
        /// The requested pages.
        pages: PageRange,
        /// The kernel's error.
        #[source]
        errno: Errno,
    },
}

/// Why pages could not be faulted in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum FaultInError {
    /// The run is empty or leaves the region.
    #[error("pages {pages} are not pages of the region")]
    NoSuchPages {
        /// The requested pages.
        pages: PageRange,
    },
    /// A signal interrupted the call. Some of the pages may be present.
    #[error("interrupted while faulting in pages {pages}")]
    Interrupted {
        /// The requested pages.
        pages: PageRange,
    },
    /// One of the pages has an uncorrected memory error.
    #[error("hardware poison in pages {pages}")]
    Poisoned {
        /// The requested pages.
        pages: PageRange,
    },
    /// The host is out of memory, or the range is not mapped any more.
    #[error("no memory for pages {pages}, or they are not mapped")]
    OutOfMemory {
        /// The requested pages.
        pages: PageRange,
    },
    /// Any other error of the kernel.
    #[error("faulting in pages {pages}")]
    FaultIn {
        /// The requested pages.
        pages: PageRange,
        /// The kernel's error.
        #[source]
        errno: Errno,
    },
}

/// Why it is unknown which pages of a region have content.
#[derive(Debug, Error)]
pub enum ContentError {
    /// The kernel could not report the content of the file.
    #[error("determining which parts of the memory file have content")]
    Seek {
        /// The kernel's error.
        #[source]
        errno: Errno,
    },
    /// The kernel could not report the mapped pages.
    #[error("reading /proc/self/pagemap")]
    PageTables {
        /// Why the file could not be read.
        #[source]
        source: io::Error,
    },
}
