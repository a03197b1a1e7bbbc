//! What can go wrong with a region.

use std::io;
use std::path::PathBuf;

use rustix::io::Errno;
use thiserror::Error;

use crate::address::GuestAddress;
use crate::backing::Backing;
use crate::page::{PageIndex, PageRange, PageSize};
use crate::range::GuestRange;

/// Why a region could not be made.
#[derive(Debug, Error)]
pub enum RegionError {
    /// A region of no bytes.
    #[error("a region needs at least one page, not 0 bytes")]
    Empty,
    /// The address or the size does not fit the backing's pages.
    #[error("{bytes} bytes at {gpa} are not whole {page_size} pages, as {backing} memory needs")]
    NotPageMultiple {
        /// Where the region would have started.
        gpa: GuestAddress,
        /// Its size in bytes.
        bytes: u64,
        /// The backing asked for.
        backing: Backing,
        /// What address and size must be multiples of.
        page_size: PageSize,
    },
    /// The region would end past the end of the guest's address space.
    #[error("{bytes} bytes at {gpa} wrap around the guest's address space")]
    Wraps {
        /// Where the region would have started.
        gpa: GuestAddress,
        /// Its size in bytes.
        bytes: u64,
    },
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
        /// Pages free and not promised to anybody.
        free: u64,
        /// The file that sets the pool's size.
        setting: PathBuf,
    },
    /// This kernel or CPU has no hugetlb pages of that size.
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
    /// The host has not that much memory left.
    #[error("{bytes} bytes of {backing} memory do not fit: {available_bytes} bytes are available")]
    DoesNotFit {
        /// Bytes asked for.
        bytes: u64,
        /// The backing asked for.
        backing: Backing,
        /// Bytes that the host still has.
        available_bytes: u64,
    },
    /// This kernel cannot keep the rest of a huge page when a part of it has an error.
    #[error(
        "this kernel has no MFD_MF_KEEP_UE_MAPPED for {backing} memory: there is the policy default \
         only"
    )]
    NoKeepPolicy {
        /// The backing asked for.
        backing: Backing,
    },
    /// `memfd_create` failed.
    #[error("memfd_create for {backing} memory")]
    CreateFile {
        /// The backing asked for.
        backing: Backing,
        /// What the kernel said.
        #[source]
        errno: Errno,
    },
    /// `ftruncate` failed.
    #[error("setting the size of the memory file to {bytes} bytes")]
    SizeFile {
        /// The size asked for.
        bytes: u64,
        /// What the kernel said.
        #[source]
        errno: Errno,
    },
    /// `mmap` failed, and not for want of memory.
    #[error("mapping {bytes} bytes")]
    Map {
        /// The size asked for.
        bytes: u64,
        /// What the kernel said.
        #[source]
        errno: Errno,
    },
    /// [`begin_paging`](crate::Region::begin_paging) a second time.
    #[error("the region is being paged already")]
    AlreadyPaged,
    /// Somebody holds a word of the service mapping
    /// ([`service_word`](crate::Region::service_word)), so that it cannot be closed.
    #[error("the service mapping is in use and cannot be closed")]
    ServiceInUse,
    /// `madvise` or `mprotect` of a region that is to be paged failed.
    #[error("making the region's mappings fit for paging")]
    BeginPaging {
        /// What the kernel said.
        #[source]
        errno: Errno,
    },
    /// `madvise` about huge pages failed.
    #[error("telling the kernel which page size to use")]
    Advise {
        /// What the kernel said.
        #[source]
        errno: Errno,
    },
}

/// Why content of a region could not be read, written or dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum AccessError {
    /// Anonymous memory has one mapping only.
    #[error("anonymous memory has no service mapping")]
    NoServiceMapping,
    /// The region is being paged with its service mapping closed.
    #[error("the service mapping is closed while the region is paged")]
    ServiceClosed,
    /// The access would leave the region.
    #[error("{len} bytes at offset {offset} of page {page} are not all in the region")]
    Outside {
        /// The page that the access starts in.
        page: PageIndex,
        /// Bytes into that page.
        offset: u64,
        /// Bytes to access.
        len: usize,
    },
    /// The run is empty or leaves the region.
    #[error("pages {pages} are not pages of the region")]
    NoSuchPages {
        /// The pages asked for.
        pages: PageRange,
    },
    /// The memory has an uncorrected error. What was to be copied is copied in part.
    #[error("an uncorrected memory error at gpa {gpa}, {lost} is lost")]
    Poisoned {
        /// The byte that failed.
        gpa: GuestAddress,
        /// What is lost with it.
        lost: GuestRange,
    },
    /// Giving memory back failed.
    #[error("punching out pages {pages}")]
    Punch {
        /// The pages asked for.
        pages: PageRange,
        /// What the kernel said.
        #[source]
        errno: Errno,
    },
    /// Dropping page table entries failed.
    #[error("zapping pages {pages} of the guest mapping")]
    Zap {
        /// The pages asked for.
        pages: PageRange,
        /// What the kernel said.
        #[source]
        errno: Errno,
    },
}

/// Why pages could not be populated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum FaultInError {
    /// The run is empty or leaves the region.
    #[error("pages {pages} are not pages of the region")]
    NoSuchPages {
        /// The pages asked for.
        pages: PageRange,
    },
    /// A signal came while the call waited. Some of the pages may be present.
    #[error("interrupted while populating pages {pages}")]
    Interrupted {
        /// The pages asked for.
        pages: PageRange,
    },
    /// One of the pages has an uncorrected memory error.
    #[error("hardware poison in pages {pages}")]
    Poisoned {
        /// The pages asked for.
        pages: PageRange,
    },
    /// The host is out of memory, or nothing is mapped there any more.
    #[error("no memory for pages {pages}, or no mapping there")]
    OutOfMemory {
        /// The pages asked for.
        pages: PageRange,
    },
    /// Anything else that the kernel says.
    #[error("populating pages {pages}")]
    FaultIn {
        /// The pages asked for.
        pages: PageRange,
        /// What the kernel said.
        #[source]
        errno: Errno,
    },
}

/// Why it is not known which pages of a region have content.
#[derive(Debug, Error)]
pub enum ContentError {
    /// The kernel does not say what the file has.
    #[error("asking which parts of the memory file have content")]
    Seek {
        /// What the kernel said.
        #[source]
        errno: Errno,
    },
    /// The kernel does not say what is mapped.
    #[error("reading /proc/self/pagemap")]
    PageTables {
        /// Why it could not be read.
        #[source]
        source: io::Error,
    },
}
