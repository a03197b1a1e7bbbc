//! Errors, one type per operation.

use std::any::Any;
use std::io;
use std::time::Duration;

use pagetide_memory::{
    AccessError, ContentError, FaultInError, GuestAddress, GuestRange, ImportError,
    MemoryFileAccessError, MemoryFileError, PageIndex, PageMapError, PageRange, RegionError,
};
use pagetide_uapi::host::PageSizeError;
use pagetide_uapi::userfaultfd::{InstallError, OpenError, ReadError, RegisterError};
use rustix::io::Errno;
use thiserror::Error;

use crate::fault::{Fault, RegionId};
use crate::source::SourceError;

/// Why a fault could not be resolved. Nothing was installed for it, and the faulting thread must not
/// retry.
#[derive(Debug, Error)]
pub enum ResolveError {
    /// None of the pager's regions contains the address.
    #[error("gpa {gpa} is in no region of the pager")]
    Outside {
        /// The address.
        gpa: GuestAddress,
    },
    /// The local source failed.
    #[error("{fault}: no content")]
    Content {
        /// The fault.
        fault: Fault,
        /// The source's error.
        #[source]
        source: SourceError,
    },
    /// The kernel refused to install the page.
    #[error("{fault}: the page cannot be installed")]
    Install {
        /// The fault.
        fault: Fault,
        /// The kernel's error.
        #[source]
        source: InstallFailure,
    },
    /// The kernel refused to map a page that needs no content: it was discarded, or its mapping was lost.
    #[error("{fault}: the page needs no content, and cannot be mapped")]
    Remap {
        /// The fault.
        fault: Fault,
        /// The kernel's error.
        #[source]
        source: InstallError,
    },
    /// The page is mapped, but could not be faulted in for the access.
    #[error("{fault}: the page cannot be faulted in")]
    FaultIn {
        /// The fault.
        fault: Fault,
        /// The kernel's error.
        #[source]
        source: FaultInError,
    },
    /// The page's content is lost, and this kernel cannot report that to the thread that waits for it.
    #[error("{fault}: the page is poisoned, and userfaultfd cannot report that")]
    CannotPoison {
        /// The fault.
        fault: Fault,
    },
    /// The same fault recurs although its page is present.
    #[error("{fault}: no progress, the fault occurred {times} times on a present page")]
    NoProgress {
        /// The fault.
        fault: Fault,
        /// The number of repetitions.
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

impl ResolveError {
    /// The region of the fault.
    pub(crate) fn region(&self) -> Option<RegionId> {
        match self {
            Self::Outside { .. } => None,
            Self::Content { fault, .. }
            | Self::Install { fault, .. }
            | Self::Remap { fault, .. }
            | Self::FaultIn { fault, .. }
            | Self::CannotPoison { fault }
            | Self::NoProgress { fault, .. }
            | Self::Stopped { fault }
            | Self::Removed { fault } => Some(fault.region),
        }
    }

    /// Whether the kernel reports an uncorrected error of the page.
    pub(crate) fn is_poison(&self) -> bool {
        matches!(
            self,
            Self::FaultIn {
                source: FaultInError::Poisoned { .. },
                ..
            } | Self::Install {
                source: InstallFailure::Kernel(InstallError::Poisoned),
                ..
            } | Self::Remap {
                source: InstallError::Poisoned,
                ..
            }
        )
    }

    /// Whether the same fault may be resolved later. A thread that sleeps on a page that other code has
    /// mapped must never be woken: it would read that page.
    pub(crate) fn may_pass(&self) -> bool {
        match self {
            Self::Content { .. } | Self::Remap { .. } => true,
            Self::Install { source, .. } => !matches!(source, InstallFailure::Unexpected { .. }),
            _ => false,
        }
    }
}

/// Why a page could not be made present ([`Resolver::ensure_present`](crate::Resolver::ensure_present)).
#[derive(Debug, Error)]
pub enum PresenceError {
    /// Its fault could not be resolved.
    #[error(transparent)]
    Resolve(#[from] ResolveError),
    /// The page's content is lost: an access raises SIGBUS.
    #[error("gpa {gpa} is poisoned")]
    Poisoned {
        /// An address in the page.
        gpa: GuestAddress,
    },
    /// The page is not mapped any more.
    #[error("gpa {gpa} is not mapped any more")]
    Unmapped {
        /// An address in the page.
        gpa: GuestAddress,
    },
    /// The page is discarded again and again.
    #[error("the page does not stay present")]
    Busy(#[source] InstallFailure),
}

/// An error during a fault: one word, so that the result of a successful fault stays small.
pub(crate) type Failure = Box<ResolveError>;

/// Why content could not be installed.
#[derive(Debug, Error)]
pub enum InstallFailure {
    /// The kernel refused the installation.
    #[error(transparent)]
    Kernel(#[from] InstallError),
    /// The content could not be written to the memory's file.
    #[error("writing the content to the memory's file")]
    Write(#[from] AccessError),
    /// A page that is missing in the page map has content: other code than the pager has put it there, and it
    /// cannot be trusted. It stays as it is.
    #[error("page {page} had content before its own arrived, from other code than the pager")]
    Unexpected {
        /// The page.
        page: PageIndex,
    },
    /// The kernel returned EAGAIN for all of this time: the process that owns the memory has begun to change
    /// its address space, and does not come to the end of it.
    #[error("the process has been changing its address space for {waited:?}")]
    Busy {
        /// Since the first attempt.
        waited: Duration,
    },
}

/// Why a region could not be added.
#[derive(Debug, Error)]
pub enum AddError {
    /// The file that keeps messages for a successor cannot be used: it is not sealed against shrinking, is
    /// too short, or cannot be mapped.
    #[error("the file that keeps messages for a successor")]
    Journal(#[source] Errno),
    /// The host's pages are not 4 KiB each.
    #[error(transparent)]
    PageSize(#[from] PageSizeError),
    /// The region's range of gpas overlaps another region's.
    #[error("the regions {first} and {second} overlap")]
    Overlap {
        /// The lower one.
        first: GuestRange,
        /// The higher one.
        second: GuestRange,
    },
    /// A foreign region overlaps the host addresses of another one of the same userfaultfd.
    #[error(
        "the address range at {start:#x} already belongs to another region of this userfaultfd"
    )]
    HostOverlap {
        /// The first shared address.
        start: u64,
    },
    /// The region's start or length is not whole pages, or the range is empty or overflows.
    #[error("a region of {bytes} bytes at gpa {gpa} does not consist of whole pages")]
    BadRange {
        /// The gpa of its first byte.
        gpa: GuestAddress,
        /// Its length in bytes.
        bytes: u64,
    },
    /// MISSING mode copies small pages, which must not be done to a part of a huge page of shmem: KVM
    /// may have mapped the whole huge page.
    #[error("MISSING mode cannot serve thp memory: use MINOR mode, or another backing")]
    MissingOnThp,
    /// MINOR mode needs a page cache, which anonymous memory lacks.
    #[error("MINOR mode cannot serve memory without a file: use MISSING mode, or another backing")]
    MinorWithoutFile,
    /// The content is in the page cache, but MISSING mode copies content.
    #[error("content in the page cache can only be mapped in MINOR mode")]
    PageCacheNeedsMinor,
    /// The page cache lacks a page, although all of the region's content should be there.
    #[error(
        "the page cache has no page {page}: its content is missing (or zero, if the file is sparse)"
    )]
    Hole {
        /// The first such page.
        page: PageIndex,
    },
    /// A page has content already, which the source's would not replace.
    #[error("page {page} has content already, and it is not the source's")]
    NotEmpty {
        /// The first such page.
        page: PageIndex,
    },
    /// The fault-around is invalid.
    #[error("fault-around of {pages} pages: it must be a power of two from 1 to {max}")]
    FaultAround {
        /// The requested number of pages.
        pages: u64,
        /// The maximal number of pages.
        max: u64,
    },
    /// The retry policy permits no request.
    #[error("a retry policy needs at least one attempt and a deadline above zero")]
    RetryPolicy,
    /// A range of the userfaultfd layout is not whole pages of the region.
    #[error("the range {range} for a userfaultfd is not whole pages of the region")]
    BadUffdRange {
        /// The range.
        range: GuestRange,
    },
    /// The ranges of the userfaultfd layout do not cover the region, or overlap.
    #[error("the ranges for userfaultfds do not cover the region {region} exactly once")]
    NotCovered {
        /// The region.
        region: GuestRange,
    },
    /// The page map could not be created.
    #[error(transparent)]
    PageMap(#[from] PageMapError),
    /// The page map to resume from does not match.
    #[error("the page map to resume from does not match the region")]
    Import(#[from] ImportError),
    /// The region could not be prepared for paging.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// The file of a foreign region cannot be its memory.
    #[error(transparent)]
    File(#[from] MemoryFileError),
    /// Another region has pages of the same file: what is at a page would be recorded twice, and differently.
    #[error("region {other:?} has pages of the same file")]
    SameFile {
        /// The other region.
        other: RegionId,
    },
    /// The userfaultfd serves an address space that was attached to another region.
    #[error("the userfaultfd serves an address space that is attached to another region")]
    SpaceAttached,
    /// A setting means nothing for memory of this kind.
    #[error("{setting} means nothing for {memory}")]
    Misplaced {
        /// The setting.
        setting: &'static str,
        /// The kind of memory.
        memory: &'static str,
    },
    /// A userfaultfd, or one with the needed features, could not be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// A userfaultfd that was handed over cannot be used: its owner has not negotiated its API, or does
    /// not map the addresses. A reader would fail on it.
    #[error("the userfaultfd that was handed over does not serve the region's addresses")]
    NotReady {
        /// The kernel's error for a wake-up of the region.
        #[source]
        source: InstallError,
    },
    /// The kernel refused to register the memory.
    #[error(transparent)]
    Register(#[from] RegisterError),
    /// The pager could not poll the userfaultfd.
    #[error("polling a userfaultfd")]
    Poll(#[source] Errno),
    /// A range of lost memory is not in the region.
    #[error("the lost range {range} is not entirely in the region")]
    PoisonOutside {
        /// The lost memory.
        range: GuestRange,
    },
    /// It is unknown which pages of the region have content.
    #[error("determining the content of the region's memory")]
    Content(#[source] ContentError),
    /// It is unknown which pages the file of a foreign region contains.
    #[error("determining the content of the memory's file")]
    FileContent(#[source] MemoryFileAccessError),
    /// Existing mappings could not be removed.
    #[error("removing the existing mappings of guest memory")]
    Zap(#[source] AccessError),
    /// The thread could not be started that changes memory while this one reads the userfaultfd's events.
    #[error("starting a thread that changes the mappings of guest memory")]
    NoThread(#[source] io::Error),
}

/// Why pages could not be discarded.
#[derive(Debug, Error)]
pub enum DiscardError {
    /// The pager does not have the region, or no longer.
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
    /// memory has to discard it, and REMOVE events report that to the pager.
    #[error("memory of another process without its file can only be discarded by that process")]
    NotOurs,
    /// The kernel refused to discard the memory.
    #[error("returning memory to the host")]
    Punch(#[source] AccessError),
    /// The same for a file that another process handed over.
    #[error("returning memory to the host")]
    PunchFile(#[source] MemoryFileAccessError),
    /// The thread could not be started that discards while this one reads the userfaultfd's events.
    #[error("starting a thread that returns memory to the host")]
    NoThread(#[source] io::Error),
}

/// Why pushed content was not installed.
#[derive(Debug, Error)]
pub enum PushError {
    /// The pager does not have the region, or no longer.
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
    /// The content's length differs from the pages' length.
    #[error("{given} bytes were pushed for {wanted} bytes of pages")]
    WrongSize {
        /// Bytes given.
        given: u64,
        /// Bytes of the pages.
        wanted: u64,
    },
    /// Poison was pushed for more than one page: push page by page.
    #[error("poison must be pushed page by page")]
    PoisonedRun,
    /// The content could not be installed.
    #[error(transparent)]
    Install(#[from] InstallFailure),
}

/// Why an address space could not be attached or detached.
#[derive(Debug, Error)]
pub enum AttachError {
    /// The pager does not have the region, or no longer.
    #[error("region {region:?} is not in the pager")]
    NoSuchRegion {
        /// The region.
        region: RegionId,
    },
    /// There is no such address space, or no longer.
    #[error("no such address space is attached")]
    NoSuchSpace,
    /// An address space without a region.
    #[error("the address space has none of the regions")]
    NoRegions,
    /// The region's memory has no file that another process could have mapped, or is a private mapping of it.
    #[error("region {region:?} is not memory that processes share: it needs a memfd")]
    NotShared {
        /// The region.
        region: RegionId,
    },
    /// The range is not as long as the region.
    #[error("an address range of {bytes} bytes for region {region:?} of {wanted}")]
    OtherSize {
        /// The region.
        region: RegionId,
        /// The range's length in bytes.
        bytes: u64,
        /// The region's.
        wanted: u64,
    },
    /// A region was added with the userfaultfd.
    #[error("the userfaultfd serves a region's own address space")]
    InUse,
    /// An address space has a region once.
    #[error("region {region:?} is attached twice with one userfaultfd")]
    Twice {
        /// The region.
        region: RegionId,
    },
    /// The address space is detached, but its kernel could not mark all of its missing pages as lost.
    #[error(
        "missing pages of the address space cannot be poisoned: its userfaultfd stays open, so that they do not \
         read as zeroes"
    )]
    NotPoisoned,
    /// The address range overlaps another one of the same userfaultfd.
    #[error("the address range at {start:#x} is attached already")]
    HostOverlap {
        /// The first shared address.
        start: u64,
    },
    /// The userfaultfd cannot be used: its owner has not negotiated its API, or does not map the addresses.
    #[error("the userfaultfd that was handed over does not serve the addresses")]
    NotReady {
        /// The kernel's error for a wake-up of the range.
        #[source]
        source: InstallError,
    },
    /// The pager could not poll the userfaultfd.
    #[error("polling a userfaultfd")]
    Poll(#[source] Errno),
}

/// Why a region could not be handed over.
#[derive(Debug, Error)]
pub enum ExportError {
    /// The pager does not have the region, or no longer.
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
    /// The pager does not have the region, or no longer.
    #[error("region {region:?} is not in the pager")]
    NoSuchRegion {
        /// The region.
        region: RegionId,
    },
    /// The region's content is not requested from a source.
    #[error("region {region:?} has no source: its content is local")]
    NoSource {
        /// The region.
        region: RegionId,
    },
}

/// Why a pager could not be created or served.
#[derive(Debug, Error)]
pub enum ServeError {
    /// The configuration has no reader thread.
    #[error("at least one reader thread is needed")]
    NoReaders,
    /// A thread could not be started.
    #[error("starting the thread {name}")]
    Thread {
        /// The thread's name.
        name: String,
        /// The operating system's error.
        #[source]
        source: io::Error,
    },
    /// A descriptor could not be created.
    #[error("creating a descriptor of the pager")]
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
    #[error("a page could not be prefetched")]
    Resolve(#[source] ResolveError),
    /// Prefetch panicked, most likely in a local source.
    #[error("prefetch panicked: {message}")]
    Panicked {
        /// The panic's message.
        message: String,
    },
}

/// The interval at which a thread that waits for a page checks whether the pager was stopped.
pub(crate) const WAIT_SLICE: Duration = Duration::from_millis(50);

/// The message of a panic.
pub(crate) fn message_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
        .to_owned()
}
