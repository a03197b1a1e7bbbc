//! What the owner of a region chooses when the region is added to a pager.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use pagetide_memory::{
    GuestAddress, GuestRange, HostRange, PageMapImage, PageSize, PoisonMap, Region,
};
use pagetide_uapi::userfaultfd::{Mode, Userfaultfd};

use crate::populate::Mapper;
use crate::source::{LocalSource, Source};
use crate::target::Memfd;

/// How a region's memory is spread over userfaultfds. A reader thread serves all of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum UffdLayout {
    /// One for the whole region.
    #[default]
    Single,
    /// One for the whole region, which also tells when this process gives memory up by `madvise`
    /// (`MADV_DONTNEED`, `MADV_REMOVE`) or unmaps it: the thread that does so waits until somebody
    /// has served the pager's descriptor.
    WithEvents,
    /// One for each of these ranges. Together they are the region, without overlap; each is whole
    /// pages of it.
    PerRange(Vec<GuestRange>),
}

/// What a hole in the page cache means for a region whose content is there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Holes {
    /// Content is missing: the region is refused. A hole that appears later fails the fault.
    #[default]
    AreMissing,
    /// The page is all zeroes, as in a sparse file.
    AreZero,
}

/// Where a region's content comes from.
#[derive(Clone)]
pub enum Contents {
    /// It is in the page cache already (MINOR mode): pages are only mapped.
    PageCache(Holes),
    /// It is computed, or read from memory, without blocking.
    Local(Arc<dyn LocalSource>),
    /// It is requested, and arrives some time later.
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

/// How many bytes of a region may be requested and not yet answered, per class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InFlightLimits {
    /// Requests that somebody waits for.
    pub urgent_bytes: u64,
    /// Requests that prefetch makes.
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

/// What follows when a source fails or does not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetryPolicy {
    /// How long a source has to answer one request, from its submission. Then the request is
    /// cancelled, and counts as failed.
    pub deadline: Duration,
    /// How often a request fails before its region is stalled. At least 1.
    pub attempts: u32,
    /// How long to wait after the first failure; twice as long after each further one.
    pub first_backoff: Duration,
    /// The longest such wait.
    pub longest_backoff: Duration,
}

impl Default for RetryPolicy {
    /// An answer within 10 s, 5 attempts, waits from 100 ms to 5 s.
    fn default() -> Self {
        Self {
            deadline: Duration::from_secs(10),
            attempts: 5,
            first_backoff: Duration::from_millis(100),
            longest_backoff: Duration::from_secs(5),
        }
    }
}

/// Which memory a region is.
#[derive(Debug)]
pub(crate) enum Memory {
    Local {
        region: Arc<Region>,
        layout: UffdLayout,
    },
    Foreign {
        uffd: Arc<Userfaultfd>,
        range: HostRange,
        page_size: PageSize,
        gpa: GuestAddress,
        memfd: Option<Memfd>,
        is_mapped_here: bool,
    },
}

/// One region of memory to page, and how.
#[derive(Debug)]
pub struct RegionConfig {
    pub(crate) memory: Memory,
    pub(crate) mode: Mode,
    pub(crate) contents: Contents,
    pub(crate) fault_around_pages: u64,
    pub(crate) no_progress_limit: NonZeroU32,
    pub(crate) limits: InFlightLimits,
    pub(crate) retry: RetryPolicy,
    pub(crate) poison: PoisonMap,
    pub(crate) resume_from: Option<PageMapImage>,
    pub(crate) trusts_existing: bool,
    pub(crate) sink: Option<SinkConfig>,
}

/// Who maps installed pages in stage 2, and from how many pages on a vCPU's thread does.
#[derive(Clone)]
pub(crate) struct SinkConfig {
    pub(crate) sink: Arc<dyn Mapper>,
    pub(crate) least_exit_pages: u64,
}

impl std::fmt::Debug for SinkConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SinkConfig")
            .field("least_exit_pages", &self.least_exit_pages)
            .finish_non_exhaustive()
    }
}

impl RegionConfig {
    fn new(memory: Memory, mode: Mode, contents: Contents) -> Self {
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
            trusts_existing: false,
            sink: None,
        }
    }

    /// Memory of this process that [`Region`] made. The pager opens the userfaultfds.
    pub fn local(region: Arc<Region>, mode: Mode, contents: Contents) -> Self {
        let layout = UffdLayout::Single;
        Self::new(Memory::Local { region, layout }, mode, contents)
    }

    /// Memory of another process (or of this one, that something else mapped and registered):
    /// `range` is its address range there, in pages of `page_size`, registered already in `mode`
    /// with `uffd`, which that process handed over. Several regions may share one userfaultfd:
    /// pass clones of the same `Arc`.
    pub fn foreign(
        uffd: &Arc<Userfaultfd>,
        range: HostRange,
        page_size: PageSize,
        mode: Mode,
        contents: Contents,
    ) -> Self {
        let memory = Memory::Foreign {
            uffd: Arc::clone(uffd),
            range,
            page_size,
            gpa: GuestAddress(0),
            memfd: None,
            is_mapped_here: false,
        };
        Self::new(memory, mode, contents)
    }

    /// Memory of this process that something else than [`Region`] mapped, as a VMM does that has its
    /// guest memory already; registered in `mode` with `uffd`, as for [`Self::foreign`]. The pager can
    /// discard its pages and make them writable, which of another process's memory it cannot.
    ///
    /// # Safety
    ///
    /// The range is this process's own, stays mapped until the region was removed from the pager or
    /// the pager was dropped, and nobody takes it for granted what its missing pages hold.
    pub unsafe fn mapped(
        uffd: &Arc<Userfaultfd>,
        range: HostRange,
        page_size: PageSize,
        mode: Mode,
        contents: Contents,
    ) -> Self {
        let mut config = Self::foreign(uffd, range, page_size, mode, contents);
        if let Memory::Foreign { is_mapped_here, .. } = &mut config.memory {
            *is_mapped_here = true;
        }
        config
    }

    /// The gpa of a foreign region's first byte: its home, by which [`crate::Pager::locate`] finds it.
    /// A local region has its own.
    #[must_use]
    pub fn gpa(mut self, at: GuestAddress) -> Self {
        if let Memory::Foreign { gpa, .. } = &mut self.memory {
            *gpa = at;
        }
        self
    }

    /// The file behind a foreign region. MINOR mode needs it: content is written there. In MISSING mode it
    /// must have none of the region's pages, not even reserved ones (fallocate), which read as zeroes
    /// and never fault.
    ///
    /// Whoever else has the file may truncate it, and then a write ends in SIGBUS. In a process that
    /// takes memory from others, install a handler that ends such copies
    /// ([`pagetide_memory::guard`]; `pagetide_kvm::Signals` has one): the write fails then and the
    /// region stalls. Without a handler the process ends.
    #[must_use]
    pub fn memfd(mut self, file: Memfd) -> Self {
        if let Memory::Foreign { memfd, .. } = &mut self.memory {
            *memfd = Some(file);
        }
        self
    }

    /// How a local region is spread over userfaultfds; one for everything unless stated.
    #[must_use]
    pub fn userfaultfds(mut self, wanted: UffdLayout) -> Self {
        if let Memory::Local { layout, .. } = &mut self.memory {
            *layout = wanted;
        }
        self
    }

    /// How many pages a fault brings in at most: the aligned window of that many pages around it, as
    /// far as its pages are absent and connected. A power of two up to 512; 1 unless stated.
    #[must_use]
    pub fn fault_around(mut self, pages: u64) -> Self {
        self.fault_around_pages = pages;
        self
    }

    /// How often the same fault may come again in a row, each time at most a second later, on a page
    /// that is present before that is an error; 1000 times unless stated.
    #[must_use]
    pub fn no_progress_limit(mut self, times: NonZeroU32) -> Self {
        self.no_progress_limit = times;
        self
    }

    /// Bounds what is requested of the source at a time.
    #[must_use]
    pub fn in_flight_limits(mut self, limits: InFlightLimits) -> Self {
        self.limits = limits;
        self
    }

    /// What follows when the source fails.
    #[must_use]
    pub fn retry_policy(mut self, policy: RetryPolicy) -> Self {
        self.retry = policy;
        self
    }

    /// What of the region was lost before, in the VM's life on this host or on another: a page that
    /// has lost bytes is poisoned from the start, and its content is never asked for. All of it must
    /// be in the region ([`PoisonMap::lost_in`] gives that part of a VM's map).
    #[must_use]
    pub fn poison(mut self, lost: PoisonMap) -> Self {
        self.poison = lost;
        self
    }

    /// Goes on where another pager ended: its page map, see [`crate::Pager::export`].
    #[must_use]
    pub fn resume_from(mut self, image: PageMapImage) -> Self {
        self.resume_from = Some(image);
        self
    }

    /// A page that is mapped although the page map says that it is absent has its content. Without
    /// it such a page fails its fault: something put it there that does not know the page map, and
    /// its content cannot be trusted (a forked child's zero page, for instance).
    #[must_use]
    pub fn trust_existing_pages(mut self) -> Self {
        self.trusts_existing = true;
        self
    }

    /// Has installed pages mapped in stage 2: what prefetch and readers install, always; what a
    /// vCPU's own thread installs, from `least_exit_pages` pages on (a vCPU that waits for fewer
    /// maps them cheaper by touching them).
    #[must_use]
    pub fn populate(mut self, sink: Arc<dyn Mapper>, least_exit_pages: u64) -> Self {
        self.sink = Some(SinkConfig {
            sink,
            least_exit_pages,
        });
        self
    }
}
