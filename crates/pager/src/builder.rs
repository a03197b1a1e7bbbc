//! Making a pager: everything that can be refused is refused here, before a guest runs.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use pagetide_memory::{
    AccessError, Backing, GuestAddress, GuestRange, PageIndex, PageMap, PageMapError, PageRange,
    PoisonMap, Region,
};
use pagetide_uapi::userfaultfd::{
    Features, InstallError, Mode, OpenError, RegisterError, Userfaultfd,
};
use thiserror::Error;

use crate::pager::{Pager, Settings};
use crate::site::{PagedRegion, Span};
use crate::source::{ContentIn, PageSource};

/// How the regions are spread over userfaultfds. All reader threads serve all of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UffdLayout {
    /// One for everything.
    Single,
    /// One for each of these ranges. Together they are all of the regions, without overlap; each
    /// lies within one region and is whole pages of it.
    PerRange(Vec<GuestRange>),
}

/// Why there is no pager.
#[derive(Debug, Error)]
pub enum BuildError {
    /// There is nothing to page.
    #[error("a pager needs at least one region")]
    NoRegions,
    /// Two regions share an address.
    #[error("the regions {first} and {second} overlap")]
    Overlap {
        /// The lower one.
        first: GuestRange,
        /// The higher one.
        second: GuestRange,
    },
    /// MISSING mode copies small pages in, which must not be done to huge pages of shmem: KVM may
    /// have mapped the whole of one.
    #[error("MISSING mode cannot serve thp memory: use MINOR mode, or another backing")]
    MissingOnThp,
    /// MINOR mode needs a page cache, which anonymous memory has not.
    #[error("MINOR mode cannot serve anonymous memory: use MISSING mode, or another backing")]
    MinorOnAnonymous,
    /// The source has its content in the page cache, and MISSING mode copies content.
    #[error("content that is in the page cache can only be mapped in MINOR mode")]
    PageCacheNeedsMinor,
    /// The number of pages to resolve at a time is of no use.
    #[error("fault-around of {pages} pages: it must be a power of two from 1 to {max}")]
    FaultAround {
        /// Pages asked for.
        pages: u64,
        /// The most that is allowed.
        max: u64,
    },
    /// A range for a userfaultfd is not whole pages of one region.
    #[error("the range {range} for a userfaultfd is not whole pages of one region")]
    BadRange {
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
    /// No userfaultfd, or none with the features needed.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The kernel would not serve the memory.
    #[error(transparent)]
    Register(#[from] RegisterError),
    /// Memory that was lost before is in no region: the map is another VM's, or a region is missing.
    #[error("{range} was lost before, and is not all in the regions to page")]
    PoisonOutside {
        /// The lost memory.
        range: GuestRange,
    },
    /// Memory that was lost before could not be poisoned again.
    #[error("poisoning gpa {gpa}, which was lost before")]
    Poison {
        /// The page.
        gpa: GuestAddress,
        /// What the kernel said.
        #[source]
        source: InstallError,
    },
    /// Mappings from before could not be dropped.
    #[error("dropping the mappings that guest memory had before")]
    Zap(#[source] AccessError),
}

/// The most pages that one fault may bring in: what one page table holds.
const MAX_FAULT_AROUND_PAGES: u64 = 512;

/// Collects what a [`Pager`] is made of.
pub struct PagerBuilder {
    mode: Mode,
    source: Box<dyn PageSource>,
    regions: Vec<Arc<Region>>,
    uffds: UffdLayout,
    fault_around_pages: u64,
    no_progress_limit: NonZeroU32,
    owner_timeout: Duration,
    poison: PoisonMap,
}

impl PagerBuilder {
    pub(crate) fn new(mode: Mode, source: Box<dyn PageSource>) -> Self {
        Self {
            mode,
            source,
            regions: Vec::new(),
            uffds: UffdLayout::Single,
            fault_around_pages: 1,
            no_progress_limit: NonZeroU32::new(1000).unwrap_or(NonZeroU32::MAX),
            owner_timeout: Duration::from_secs(30),
            poison: PoisonMap::new(),
        }
    }

    /// Has the pager serve `region` as well.
    #[must_use]
    pub fn region(mut self, region: Arc<Region>) -> Self {
        self.regions.push(region);
        self
    }

    /// How the regions are spread over userfaultfds; one for everything unless told.
    #[must_use]
    pub fn uffds(mut self, layout: UffdLayout) -> Self {
        self.uffds = layout;
        self
    }

    /// How many pages a fault brings in at most: the aligned window of that many pages around it, as
    /// far as its pages are absent and connected. A power of two; 1, the page alone, unless told.
    #[must_use]
    pub fn fault_around(mut self, pages: u64) -> Self {
        self.fault_around_pages = pages;
        self
    }

    /// How often the same fault may come again in a row, each time at most a second later, on a
    /// page that is present and mapped before that is an error; 1000 times unless told.
    #[must_use]
    pub fn no_progress_limit(mut self, times: NonZeroU32) -> Self {
        self.no_progress_limit = times;
        self
    }

    /// How long an exit waits for another thread to bring its page in before that is an error; 30 s
    /// unless told. It has to be longer than the source ever takes.
    #[must_use]
    pub fn owner_timeout(mut self, timeout: Duration) -> Self {
        self.owner_timeout = timeout;
        self
    }

    /// What of the memory was lost before, in the VM's life on this host or on another: a page that
    /// has lost bytes is poisoned from the start, all of it, and its content is never asked for. Until
    /// told nothing is lost. All of it must be in the regions: of a VM that is paged in part, take what
    /// [`PoisonMap::lost_in`] has of that part.
    ///
    /// Where the kernel lacks `UFFD_FEATURE_POISON` the page map alone says so: exits are told, and a
    /// thread that touches such a page is an error ([`ResolveError::CannotPoison`]).
    ///
    /// [`ResolveError::CannotPoison`]: crate::ResolveError::CannotPoison
    #[must_use]
    pub fn poison(mut self, lost: PoisonMap) -> Self {
        self.poison = lost;
        self
    }

    /// Registers all regions. From here on their absent pages are faults, so somebody has to
    /// resolve them.
    ///
    /// In MINOR mode the guest mappings are emptied first, so that the page map, on which every
    /// page is absent now, tells the truth. In MISSING mode the regions must not have been touched.
    pub fn build(self) -> Result<Arc<Pager>, BuildError> {
        let mut regions = self.regions;
        regions.sort_by_key(|region| region.gpa());
        check_regions(&regions, self.mode)?;
        let in_page_cache = self.source.content_in() == ContentIn::PageCache;
        if in_page_cache && self.mode == Mode::Missing {
            return Err(BuildError::PageCacheNeedsMinor);
        }
        let pages = self.fault_around_pages;
        if !pages.is_power_of_two() || pages > MAX_FAULT_AROUND_PAGES {
            return Err(BuildError::FaultAround {
                pages,
                max: MAX_FAULT_AROUND_PAGES,
            });
        }

        for range in self.poison.iter() {
            let paged = |region: &Arc<Region>| {
                let (start, end) = (region.gpa().0, region.range().end().0);
                let (from, to) = (start.max(range.start().0), end.min(range.end().0));
                to.saturating_sub(from)
            };
            if regions.iter().map(paged).sum::<u64>() != range.bytes() {
                return Err(BuildError::PoisonOutside { range });
            }
        }

        let features = features(&regions, self.mode)?;
        let mut spans = spans(&regions, &self.uffds)?;
        let wanted = match &self.uffds {
            UffdLayout::Single => 1,
            UffdLayout::PerRange(ranges) => ranges.len(),
        };
        let uffds = (0..wanted).map(|_| Userfaultfd::open(features));
        let uffds = uffds.collect::<Result<Vec<_>, _>>()?;

        let mut paged = Vec::with_capacity(regions.len());
        for (region, spans) in regions.into_iter().zip(&mut spans) {
            let map = PageMap::new(region.pages())?;
            paged.push(PagedRegion::new(region, map, std::mem::take(spans)));
        }
        let settings = Settings {
            mode: self.mode,
            in_page_cache,
            fault_around_pages: pages,
            no_progress_limit: self.no_progress_limit.get(),
            owner_timeout: self.owner_timeout,
            can_poison: features.contains(Features::POISON),
        };
        // From here on the pager's drop undoes what was registered.
        let pager = Pager::new(uffds, paged, self.source, settings, self.poison);
        pager.register()?;
        pager.reinstate_poison()?;
        Ok(Arc::new(pager))
    }
}

fn check_regions(regions: &[Arc<Region>], mode: Mode) -> Result<(), BuildError> {
    if regions.is_empty() {
        return Err(BuildError::NoRegions);
    }
    for (first, second) in regions.iter().zip(regions.iter().skip(1)) {
        let (first, second) = (first.range(), second.range());
        if first.overlaps(second) {
            return Err(BuildError::Overlap { first, second });
        }
    }
    for region in regions {
        match (mode, region.backing()) {
            (Mode::Missing, Backing::Thp) => return Err(BuildError::MissingOnThp),
            (Mode::Minor, Backing::Anonymous) => return Err(BuildError::MinorOnAnonymous),
            _ => {}
        }
    }
    Ok(())
}

/// The features that the regions need, and those that help if the kernel has them.
fn features(regions: &[Arc<Region>], mode: Mode) -> Result<Features, OpenError> {
    let mut features = Features::NONE;
    for region in regions {
        features = features
            | match (mode, region.backing()) {
                (_, Backing::Anonymous) => Features::NONE,
                (Mode::Missing, Backing::Shmem | Backing::Thp) => Features::MISSING_SHMEM,
                (Mode::Missing, Backing::Hugetlb2M | Backing::Hugetlb1G) => {
                    Features::MISSING_HUGETLBFS
                }
                (Mode::Minor, Backing::Shmem | Backing::Thp) => {
                    Features::MISSING_SHMEM | Features::MINOR_SHMEM
                }
                (Mode::Minor, Backing::Hugetlb2M | Backing::Hugetlb1G) => {
                    Features::MISSING_HUGETLBFS | Features::MINOR_HUGETLBFS
                }
            };
    }
    if Userfaultfd::available()?.contains(Features::POISON) {
        features = features | Features::POISON;
    }
    Ok(features)
}

/// For each region, which userfaultfd serves which of its pages.
fn spans(regions: &[Arc<Region>], layout: &UffdLayout) -> Result<Vec<Vec<Span>>, BuildError> {
    let ranges = match layout {
        UffdLayout::Single => {
            let all = |region: &Arc<Region>| {
                vec![Span {
                    pages: region.all_pages(),
                    uffd: 0,
                }]
            };
            return Ok(regions.iter().map(all).collect());
        }
        UffdLayout::PerRange(ranges) => ranges,
    };
    let mut spans: Vec<Vec<Span>> = regions.iter().map(|_| Vec::new()).collect();
    for (uffd, range) in ranges.iter().enumerate() {
        let bad = || BuildError::BadRange { range: *range };
        let (spans, pages) = regions
            .iter()
            .zip(&mut spans)
            .find_map(|(region, spans)| Some((spans, pages_of(region, *range)?)))
            .ok_or_else(bad)?;
        spans.push(Span { pages, uffd });
    }
    for (region, spans) in regions.iter().zip(&mut spans) {
        spans.sort_by_key(|span| span.pages.first());
        let mut covered = PageIndex(0);
        for span in &*spans {
            if span.pages.first() != covered {
                return Err(BuildError::NotCovered {
                    region: region.range(),
                });
            }
            covered = span.pages.end();
        }
        if covered.0 != region.pages() {
            return Err(BuildError::NotCovered {
                region: region.range(),
            });
        }
    }
    Ok(spans)
}

/// The pages of `region` that `range` is; `None` if it is not whole pages of it.
fn pages_of(region: &Region, range: GuestRange) -> Option<PageRange> {
    let page_size = region.page_size();
    let offset = range.start().offset_from(region.gpa())?;
    if !page_size.divides(offset) || !page_size.divides(range.bytes()) {
        return None;
    }
    let shift = page_size.shift();
    let pages = PageRange::new(PageIndex(offset >> shift), range.bytes() >> shift);
    (pages.end().0 <= region.pages()).then_some(pages)
}
