//! What can go wrong, one type per operation.

use std::any::Any;
use std::time::Duration;

use pagetide_memory::{
    AccessError, ContentError, FaultInError, FileAccessError, FileViewError, GuestAddress,
    GuestRange, ImportError, PageIndex, PageMapError, PageRange, RegionError,
};
use pagetide_uapi::userfaultfd::{InstallError, OpenError, ReadError, RegisterError};
use rustix::io::Errno;
use thiserror::Error;

use crate::fault::{Fault, RegionId};
use crate::source::SourceError;

/// Why a fault could not be resolved. Nothing was installed for it: whoever faulted must stop.
#[derive(Debug, Error)]
pub enum ResolveError {
    /// The address is in none of the pager's regions.
    #[error("gpa {gpa} is in no region of the pager")]
    Outside {
        /// The address.
        gpa: GuestAddress,
    },
    /// The content could not be had from where it should be at once.
    #[error("{fault}: no content")]
    Content {
        /// The fault.
        fault: Fault,
        /// What the source said.
        #[source]
        source: SourceError,
    },
    /// The kernel would not install the page.
    #[error("{fault}: the page cannot be installed")]
    Install {
        /// The fault.
        fault: Fault,
        /// What the kernel said.
        #[source]
        source: InstallFailure,
    },
    /// The page is mapped, but could not be made present for the access.
    #[error("{fault}: the page cannot be populated")]
    FaultIn {
        /// The fault.
        fault: Fault,
        /// What the kernel said.
        #[source]
        source: FaultInError,
    },
    /// The page's content is lost, and this kernel cannot say so to the thread that waits for it.
    #[error("{fault}: the page is poisoned, and the userfaultfd cannot say so")]
    CannotPoison {
        /// The fault.
        fault: Fault,
    },
    /// The same fault keeps coming although its page is present.
    #[error("{fault}: no progress, the page is present and the fault came {times} times")]
    NoProgress {
        /// The fault.
        fault: Fault,
        /// How often it came.
        times: u32,
    },
    /// The pager was stopped while this thread waited for a page.
    #[error("{fault}: the pager was stopped")]
    Stopped {
        /// The fault.
        fault: Fault,
    },
    /// The region was removed while this thread waited for a page.
    #[error("{fault}: the region was removed")]
    Removed {
        /// The fault.
        fault: Fault,
    },
}

/// A failure on its way up: one word, so that what a fault returns that is resolved stays small.
pub(crate) type Failure = Box<ResolveError>;

/// Why content could not be installed.
#[derive(Debug, Error)]
pub enum InstallFailure {
    /// The kernel refused.
    #[error(transparent)]
    Kernel(#[from] InstallError),
    /// The content could not be written to the file behind the memory.
    #[error("writing the content to the memory's file")]
    Write(#[from] AccessError),
    /// The same, of a file that another process handed over.
    #[error("writing the content to the memory's file")]
    WriteView(#[from] FileAccessError),
    /// A page was mapped that the page map knows to be absent: something put it there without asking
    /// the pager, and its content cannot be trusted.
    #[error("page {page} was mapped before its content arrived, by something else than the pager")]
    Unexpected {
        /// The page.
        page: PageIndex,
    },
    /// The kernel said EAGAIN again and again.
    #[error("the kernel put the installation off {tries} times")]
    Busy {
        /// How often it was tried.
        tries: u32,
    },
}

/// Why a region could not be added.
#[derive(Debug, Error)]
pub enum AddError {
    /// The region has a gpa range that another one has.
    #[error("the regions {first} and {second} overlap")]
    Overlap {
        /// The lower one.
        first: GuestRange,
        /// The higher one.
        second: GuestRange,
    },
    /// A foreign region shares host addresses with another one of the same userfaultfd.
    #[error("the address range at {start:#x} is served for another region of this userfaultfd")]
    HostOverlap {
        /// The first shared address.
        start: u64,
    },
    /// The region's range, start or length, is not whole pages, is empty, or wraps.
    #[error("a region of {bytes} bytes at gpa {gpa} is not whole pages of an address space")]
    BadRange {
        /// The gpa of its first byte.
        gpa: GuestAddress,
        /// Its length.
        bytes: u64,
    },
    /// MISSING mode copies small pages in, which must not be done to huge pages of shmem: KVM may
    /// have mapped the whole of one.
    #[error("MISSING mode cannot serve thp memory: use MINOR mode, or another backing")]
    MissingOnThp,
    /// MINOR mode needs a page cache, which anonymous memory has not.
    #[error("MINOR mode cannot serve memory without a file: use MISSING mode, or another backing")]
    MinorWithoutFile,
    /// The content is in the page cache, and MISSING mode copies content.
    #[error("content that is in the page cache can only be mapped in MINOR mode")]
    PageCacheNeedsMinor,
    /// The page cache lacks a page, and the region says that all content is there.
    #[error(
        "the page cache has no page {page}: its content is missing (or zero, if the file is sparse)"
    )]
    Hole {
        /// The first such page.
        page: PageIndex,
    },
    /// A MISSING region has content already: such pages never fault, and their content is not the
    /// source's.
    #[error("page {page} has content already, so it would never fault")]
    NotEmpty {
        /// The first such page.
        page: PageIndex,
    },
    /// The number of pages to resolve at a time is of no use.
    #[error("fault-around of {pages} pages: it must be a power of two from 1 to {max}")]
    FaultAround {
        /// Pages asked for.
        pages: u64,
        /// The most that is allowed.
        max: u64,
    },
    /// A limit or policy makes no progress possible.
    #[error("a retry policy needs at least one attempt and a deadline above zero")]
    RetryPolicy,
    /// A range for a userfaultfd is not whole pages of the region.
    #[error("the range {range} for a userfaultfd is not whole pages of the region")]
    BadUffdRange {
        /// The range.
        range: GuestRange,
    },
    /// The ranges for userfaultfds leave something out, or have something twice.
    #[error("the ranges for userfaultfds do not add up to the region {region}")]
    NotCovered {
        /// The region.
        region: GuestRange,
    },
    /// No page map.
    #[error(transparent)]
    PageMap(#[from] PageMapError),
    /// The page map to resume from does not fit.
    #[error("the page map to resume from does not fit the region")]
    Import(#[from] ImportError),
    /// The region would not be paged.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// The file of a foreign region cannot be mapped.
    #[error(transparent)]
    File(#[from] FileViewError),
    /// No userfaultfd, or none with the features needed.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// A userfaultfd that was handed over cannot be used: its owner has not negotiated its API, or the
    /// addresses are none. A reader would fail at it.
    #[error("the userfaultfd that was handed over does not serve the region's addresses")]
    NotReady {
        /// What the kernel said to a wake-up of the region.
        #[source]
        source: InstallError,
    },
    /// The kernel would not serve the memory.
    #[error(transparent)]
    Register(#[from] RegisterError),
    /// The pager could not wait for the userfaultfd's messages.
    #[error("waiting for the messages of a userfaultfd")]
    Poll(#[source] Errno),
    /// Memory that was lost before is not in the region.
    #[error("{range} was lost before, and is not all in the region")]
    PoisonOutside {
        /// The lost memory.
        range: GuestRange,
    },
    /// What the region's memory holds could not be found out.
    #[error("looking at what the region's memory holds")]
    Content(#[source] ContentError),
    /// What the file of a foreign region holds could not be found out.
    #[error("looking at what the file of the region's memory holds")]
    FileContent(#[source] FileAccessError),
    /// Mappings from before could not be dropped.
    #[error("dropping the mappings that guest memory had before")]
    Zap(#[source] AccessError),
}

/// Why pages could not be discarded.
#[derive(Debug, Error)]
pub enum DiscardError {
    /// The pager has no such region, or no longer.
    #[error("region {region:?} is not in the pager")]
    NoSuchRegion {
        /// The region.
        region: RegionId,
    },
    /// The region has no such pages.
    #[error("pages {pages} are not pages of the region")]
    NoSuchPages {
        /// The pages.
        pages: PageRange,
    },
    /// The pager has neither a mapping of this process nor a file to punch: the process that owns the
    /// memory has to discard, and REMOVE events tell the pager.
    #[error("memory of another process without its file can only be discarded by that process")]
    NotOurs,
    /// The kernel refused.
    #[error("giving memory back to the host")]
    Punch(#[source] AccessError),
    /// The same, of a file that another process handed over.
    #[error("giving memory back to the host")]
    PunchView(#[source] FileAccessError),
}

/// Why pushed content was not installed.
#[derive(Debug, Error)]
pub enum PushError {
    /// The pager has no such region, or no longer.
    #[error("region {region:?} is not in the pager")]
    NoSuchRegion {
        /// The region.
        region: RegionId,
    },
    /// The region has no such pages.
    #[error("pages {pages} are not pages of the region")]
    NoSuchPages {
        /// The pages.
        pages: PageRange,
    },
    /// The content is not as long as the pages.
    #[error("{given} bytes were pushed for {wanted} bytes of pages")]
    WrongSize {
        /// Bytes given.
        given: u64,
        /// Bytes of the pages.
        wanted: u64,
    },
    /// The content is poison for more than one page: push page by page.
    #[error("poison is pushed page by page")]
    PoisonedRun,
    /// It could not be installed.
    #[error(transparent)]
    Install(#[from] InstallFailure),
}

/// Why a page map could not be handed over.
#[derive(Debug, Error)]
pub enum ExportError {
    /// The pager has no such region, or no longer.
    #[error("region {region:?} is not in the pager")]
    NoSuchRegion {
        /// The region.
        region: RegionId,
    },
    /// The region's memory is a mapping of this process, which a successor elsewhere cannot serve.
    #[error("region {region:?} is local memory: only another process's memory can be handed over")]
    IsLocal {
        /// The region.
        region: RegionId,
    },
}

/// Why a region cannot be changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum RegionChangeError {
    /// The pager has no such region, or no longer.
    #[error("region {region:?} is not in the pager")]
    NoSuchRegion {
        /// The region.
        region: RegionId,
    },
    /// The region's content is not requested of a source.
    #[error("region {region:?} has no source: its content is local")]
    NoSource {
        /// The region.
        region: RegionId,
    },
}

/// Why there is no pager, or no way to serve one.
#[derive(Debug, Error)]
pub enum ServeError {
    /// Nobody would serve the userfaultfds.
    #[error("at least one reader thread is needed")]
    NoReaders,
    /// The operating system has no more threads.
    #[error("starting the thread {name}")]
    Thread {
        /// The thread's name.
        name: String,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
    /// A descriptor for waiting could not be made.
    #[error("making what a pager waits on")]
    Descriptor(#[source] Errno),
    /// Waiting for messages failed.
    #[error("waiting for messages of userfaultfds")]
    Wait(#[source] Errno),
    /// A userfaultfd could not be read.
    #[error("reading a userfaultfd")]
    Read(#[source] ReadError),
}

/// Why prefetch ended early.
#[derive(Debug, Error)]
pub enum PrefetchError {
    /// The pager was stopped.
    #[error("the pager was stopped")]
    Stopped,
    /// Local content could not be installed.
    #[error("a page could not be brought in")]
    Resolve(#[source] ResolveError),
    /// Prefetch panicked, most likely in a local source.
    #[error("prefetch panicked: {message}")]
    Panicked {
        /// What it said.
        message: String,
    },
}

/// How long a thread waits for a page before it looks whether the pager was stopped.
pub(crate) const WAIT_SLICE: Duration = Duration::from_millis(50);

/// What a panic said.
pub(crate) fn message_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
        .to_owned()
}
