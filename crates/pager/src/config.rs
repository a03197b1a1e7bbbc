//! The configuration of a region that is added to a pager.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use pagetide_memory::{
    GuestAddress, GuestRange, HostRange, MapFile, PageMapImage, PageSize, PoisonMap, Region,
};
use pagetide_uapi::userfaultfd::{Mode, Userfaultfd};

use crate::fault::Fault;
use crate::memory::Memfd;
use crate::populate::Mapper;
use crate::source::{LocalSource, Source};

/// The number of userfaultfds of a region's memory. A reader thread serves all of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum UffdLayout {
    /// One for the whole region.
    #[default]
    Single,
    /// One for the whole region, which also reports when this process discards memory by `madvise`
    /// (`MADV_DONTNEED`, `MADV_REMOVE`) or unmaps it: the thread that does so waits until the pager's
    /// descriptor was served.
    WithEvents,
    /// One for each of these ranges. Together they must cover the region without overlap; each consists
    /// of whole pages of it.
    PerRange(Vec<GuestRange>),
}

/// The meaning of a hole in the page cache, for a region whose content is there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Holes {
    /// Content is missing: the region is refused. A fault on a hole that appears later fails.
    #[default]
    AreMissing,
    /// The page is zero, as in a sparse file.
    AreZero,
}

/// The origin of a region's content.
#[derive(Clone)]
pub enum Contents {
    /// The content is already in the page cache (MINOR mode): pages are only mapped.
    PageCache(Holes),
    /// The content is computed, or read from memory, without blocking.
    Local(Arc<dyn LocalSource>),
    /// The content is requested, and arrives later.
    Source(Arc<dyn Source>),
}

impl std::fmt::Debug for Contents {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::PageCache(holes) => f.debug_tuple("PageCache").field(holes).finish(),
            Self::Local(_) => f.write_str("Local"),
            Self::Source(_) => f.write_str("Source"),
        }
    }
}

/// The maximal number of bytes of a region that are requested and not installed, per class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InFlightLimits {
    /// For requests that a thread waits for.
    pub urgent_bytes: u64,
    /// For requests of prefetch.
    pub bulk_bytes: u64,
}

impl Default for InFlightLimits {
    /// 64 MiB urgent, 8 MiB bulk.
    fn default() -> Self {
        Self {
            urgent_bytes: 64 << 20,
            bulk_bytes: 8 << 20,
        }
    }
}

/// The reaction to a source that fails or does not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetryPolicy {
    /// The time limit for one request, from its submission. Then the request is cancelled, and counts
    /// as failed.
    pub deadline: Duration,
    /// The number of failures of a request that stall its region. At least 1.
    pub attempts: u32,
    /// The pause after the first failure; it doubles after each further failure.
    pub first_backoff: Duration,
    /// The longest pause.
    pub longest_backoff: Duration,
}

impl Default for RetryPolicy {
    /// A limit of 10 s, 5 attempts, pauses from 100 ms to 5 s.
    fn default() -> Self {
        Self {
            deadline: Duration::from_secs(10),
            attempts: 5,
            first_backoff: Duration::from_millis(100),
            longest_backoff: Duration::from_secs(5),
        }
    }
}

/// The thread that installs what the source of a region delivers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum InstalledBy {
    /// The thread that completes the request, so that no other is woken on the way. A thread that completes the
    /// requests of several VMs is held up by a VM whose address space takes no pages for a while.
    #[default]
    Completer,
    /// A thread that serves the pager's descriptor ([`crate::Serving`]), between faults. The thread that completes the
    /// request hands the content over, and goes on. The pager's descriptor must be served: a thread that waits in an
    /// exit looks for content only now and then.
    Serving,
}

/// The memory of a region, as its owner describes it.
#[derive(Debug)]
pub(crate) enum Described {
    Local {
        region: Arc<Region>,
        layout: UffdLayout,
    },
    Foreign {
        uffd: Arc<Userfaultfd>,
        range: HostRange,
        page_size: PageSize,
        gpa: GuestAddress,
        file: File,
        is_mapped_here: bool,
        is_inherited_again: bool,
    },
}

/// What is known of the file of memory that other code has mapped.
#[derive(Debug)]
pub(crate) enum File {
    /// Nothing.
    Unknown,
    /// The region is a shared mapping of it.
    Shared(Memfd),
    /// The region is a private mapping of it, and the source writes to it.
    FilledBySource,
}

/// A setting that means nothing for the memory that it was made for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Misplaced {
    pub(crate) setting: &'static str,
    pub(crate) memory: &'static str,
}

/// What a region of [`RegionConfig::local`] is called in errors.
const LOCAL: &str = "memory of this process that the pager registers";
/// The same for the other constructors.
const FOREIGN: &str = "memory that other code has registered";

/// Where messages and the page map are kept for a successor.
#[derive(Debug)]
pub(crate) struct KeptIn {
    pub(crate) file: Arc<MapFile>,
    pub(crate) map_offset: u64,
}

/// A region of memory to page, and its options.
#[derive(Debug)]
pub struct RegionConfig {
    pub(crate) memory: Described,
    pub(crate) mode: Mode,
    pub(crate) contents: Contents,
    pub(crate) fault_around_pages: u64,
    pub(crate) no_progress_limit: NonZeroU32,
    pub(crate) limits: InFlightLimits,
    pub(crate) retry: RetryPolicy,
    pub(crate) poison: PoisonMap,
    pub(crate) resume_from: Option<PageMapImage>,
    pub(crate) kept_in: Option<KeptIn>,
    pub(crate) trusts_existing: bool,
    pub(crate) mapper: Option<MapperConfig>,
    pub(crate) observer: Option<ObserverConfig>,
    pub(crate) installed_by: InstalledBy,
    pub(crate) misplaced: Option<Misplaced>,
}

/// Sees the faults of a region, for example to record its working set.
pub trait Observer: Send + Sync {
    /// A thread has touched a missing page. Called on the thread that resolves the fault, before the
    /// page is installed; must not block. The same page may be reported more than once.
    fn touched(&self, fault: &Fault);

    /// A thread writes to a page that is protected against writing: the protection ends after this call, and the
    /// thread goes on. For a VMM that tracks writes by `UFFDIO_WRITEPROTECT` on the userfaultfd of a foreign region.
    /// A page that is missing when it is protected is not protected any more when its content has come.
    /// Called on the thread that serves the pager's descriptor; must not block.
    fn written(&self, fault: &Fault) {
        let _ = fault;
    }
}

/// The observer of a region.
#[derive(Clone)]
pub(crate) struct ObserverConfig(pub(crate) Arc<dyn Observer>);

impl std::fmt::Debug for ObserverConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Observer")
    }
}

/// The mapper for installed pages, and the smallest run that a vCPU's thread passes to it.
#[derive(Clone)]
pub(crate) struct MapperConfig {
    pub(crate) mapper: Arc<dyn Mapper>,
    pub(crate) least_exit_pages: u64,
}

impl std::fmt::Debug for MapperConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MapperConfig")
            .field("least_exit_pages", &self.least_exit_pages)
            .finish_non_exhaustive()
    }
}

impl RegionConfig {
    fn new(memory: Described, mode: Mode, contents: Contents) -> Self {
        Self {
            memory,
            mode,
            contents,
            fault_around_pages: 1,
            no_progress_limit: NonZeroU32::new(1000).unwrap_or(NonZeroU32::MAX),
            limits: InFlightLimits::default(),
            retry: RetryPolicy::default(),
            poison: PoisonMap::new(),
            resume_from: None,
            kept_in: None,
            trusts_existing: false,
            mapper: None,
            observer: None,
            installed_by: InstalledBy::default(),
            misplaced: None,
        }
    }

    /// Refuses a setting when the region is added.
    fn misplace(&mut self, setting: &'static str, memory: &'static str) {
        self.misplaced.get_or_insert(Misplaced { setting, memory });
    }

    /// Memory of this process that [`Region`] created. The pager opens the userfaultfds.
    pub fn local(region: Arc<Region>, mode: Mode, contents: Contents) -> Self {
        let layout = UffdLayout::Single;
        Self::new(Described::Local { region, layout }, mode, contents)
    }

    /// Memory of another process (or of this one, mapped and registered by other code): `range` is its
    /// address range there, in pages of `page_size`. It is already registered in `mode` with `uffd`,
    /// which that process handed over. Several regions may share one userfaultfd: pass clones of the
    /// same `Arc`.
    pub fn foreign(
        uffd: &Arc<Userfaultfd>,
        range: HostRange,
        page_size: PageSize,
        mode: Mode,
        contents: Contents,
    ) -> Self {
        let memory = Described::Foreign {
            uffd: Arc::clone(uffd),
            range,
            page_size,
            gpa: GuestAddress(0),
            file: File::Unknown,
            is_mapped_here: false,
            is_inherited_again: false,
        };
        Self::new(memory, mode, contents)
    }

    /// Memory of this process that other code than [`Region`] mapped, for VMMs with their own guest
    /// memory; registered in `mode` with `uffd`, as for [`Self::foreign`]. The pager can discard its
    /// pages and make them writable, which it cannot do for another process's memory.
    ///
    /// # Safety
    ///
    /// The range is this process's own and stays mapped until the region was removed from the pager or
    /// the pager was dropped. No code relies on the content of its missing pages.
    pub unsafe fn mapped(
        uffd: &Arc<Userfaultfd>,
        range: HostRange,
        page_size: PageSize,
        mode: Mode,
        contents: Contents,
    ) -> Self {
        let mut config = Self::foreign(uffd, range, page_size, mode, contents);
        if let Described::Foreign { is_mapped_here, .. } = &mut config.memory {
            *is_mapped_here = true;
        }
        config
    }

    /// A child of this process inherits the memory again when paging has ended.
    pub(crate) fn inherited_again(mut self) -> Self {
        if let Described::Foreign {
            is_inherited_again, ..
        } = &mut self.memory
        {
            *is_inherited_again = true;
        }
        self
    }

    /// The gpa of a foreign region's first byte: its home gpa, by which [`crate::Pager::locate`] finds
    /// the region. A local region has its own.
    #[must_use]
    pub fn gpa(mut self, at: GuestAddress) -> Self {
        match &mut self.memory {
            Described::Foreign { gpa, .. } => *gpa = at,
            Described::Local { .. } => self.misplace("a gpa", LOCAL),
        }
        self
    }

    /// The file of a foreign region, which is a shared mapping of it. MINOR mode needs it. The file must contain
    /// none of the region's missing pages, not even reserved ones (fallocate), which read as zeroes; unless
    /// existing pages are trusted.
    ///
    /// Another owner of the file may truncate it: content for the pages beyond its end cannot be installed then,
    /// and the region stalls.
    #[must_use]
    pub fn memfd(mut self, memfd: Memfd) -> Self {
        match &mut self.memory {
            Described::Foreign { file, .. } => *file = File::Shared(memfd),
            Described::Local { .. } => self.misplace("a memfd", LOCAL),
        }
        self
    }

    /// Declares that the source of a foreign MINOR region writes content to the region's file before it
    /// answers, and that the region is a private mapping of that file: several regions may share one
    /// file. The pager then maps the file's pages and writes none of them. Pages of zeroes, and pages
    /// that were discarded, become the shared zero page.
    #[must_use]
    pub fn filled_by_source(mut self) -> Self {
        match &mut self.memory {
            Described::Foreign { file, .. } => *file = File::FilledBySource,
            Described::Local { .. } => self.misplace("a source that fills the file", LOCAL),
        }
        self
    }

    /// The userfaultfds of a local region; one by default.
    #[must_use]
    pub fn userfaultfds(mut self, wanted: UffdLayout) -> Self {
        match &mut self.memory {
            Described::Local { layout, .. } => *layout = wanted,
            Described::Foreign { .. } => self.misplace("a layout of userfaultfds", FOREIGN),
        }
        self
    }

    /// The fault-around: the maximal number of pages that one fault installs. They are the absent pages
    /// that form a run with the faulting page within the aligned window of this size. A power of two up
    /// to 512; 1 by default.
    #[must_use]
    pub fn fault_around(mut self, pages: u64) -> Self {
        self.fault_around_pages = pages;
        self
    }

    /// The number of consecutive repetitions of one fault on a present page, each within a second of
    /// the last, that count as an error; 1000 by default.
    #[must_use]
    pub fn no_progress_limit(mut self, times: NonZeroU32) -> Self {
        self.no_progress_limit = times;
        self
    }

    /// Limits the bytes that are requested from the source at a time.
    #[must_use]
    pub fn in_flight_limits(mut self, limits: InFlightLimits) -> Self {
        self.limits = limits;
        self
    }

    /// The reaction to failures of the source.
    #[must_use]
    pub fn retry_policy(mut self, policy: RetryPolicy) -> Self {
        self.retry = policy;
        self
    }

    /// The parts of the region that were lost before, on this host or another: a page with lost bytes
    /// is poisoned from the start, and its content is never requested. All parts must lie in the region
    /// ([`PoisonMap::lost_in`] returns the region's part of a VM's map).
    #[must_use]
    pub fn poison(mut self, lost: PoisonMap) -> Self {
        self.poison = lost;
        self
    }

    /// Continues from the page map of another pager, see [`crate::Pager::export`].
    #[must_use]
    pub fn resume_from(mut self, image: PageMapImage) -> Self {
        self.resume_from = Some(image);
        self
    }

    /// Keeps what a successor needs if this process dies in a file: the messages of a foreign region's userfaultfd
    /// in the first 4096 bytes ([`EventBuffer::in_file`]), which the regions of one userfaultfd share, and the
    /// region's page map from `map_offset` on (at least 4096), one byte for each page ([`PageMap::in_file`]).
    ///
    /// A successor adds its regions with the same file, and calls [`crate::Pager::recover`].
    ///
    /// # Safety
    ///
    /// As long as a region of this userfaultfd is in the pager, nothing else uses the first 4096 bytes of the file: no
    /// region of another userfaultfd, no other pager that still serves, and no other code.
    ///
    /// [`EventBuffer::in_file`]: pagetide_uapi::userfaultfd::EventBuffer::in_file
    /// [`PageMap::in_file`]: pagetide_memory::PageMap::in_file
    #[must_use]
    pub unsafe fn kept_in(mut self, file: Arc<MapFile>, map_offset: u64) -> Self {
        self.kept_in = Some(KeptIn { file, map_offset });
        if matches!(self.memory, Described::Local { .. }) {
            self.misplace("a file for a successor", LOCAL);
        }
        self
    }

    /// Trusts that a page which is missing in the page map has its content if it is mapped, or (in a region with
    /// a file) if the file has it. By default the fault on such a page fails: other code put it there, and its
    /// content cannot be trusted (it may be a forked child's zero page). The page stays as it is either way.
    #[must_use]
    pub fn trust_existing_pages(mut self) -> Self {
        self.trusts_existing = true;
        self
    }

    /// Maps installed pages in stage 2: always those that prefetch and readers install; those that a
    /// vCPU's own thread installs, for runs of at least `least_exit_pages` pages (for shorter runs, the
    /// vCPU's own accesses are cheaper).
    #[must_use]
    pub fn populate(mut self, mapper: Arc<dyn Mapper>, least_exit_pages: u64) -> Self {
        self.mapper = Some(MapperConfig {
            mapper,
            least_exit_pages,
        });
        self
    }

    /// Which thread installs what the source delivers.
    #[must_use]
    pub fn installed_by(mut self, thread: InstalledBy) -> Self {
        self.installed_by = thread;
        self
    }

    /// Reports each fault on a missing page to `observer`.
    #[must_use]
    pub fn observe(mut self, observer: Arc<dyn Observer>) -> Self {
        self.observer = Some(ObserverConfig(observer));
        self
    }
}
