//! Adding a region. All refusals happen here, before a guest runs on the region.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use pagetide_memory::{
    Backing, GuestAddress, GuestRange, PageIndex, PageMap, PageRange, PageSize, PageState, Region,
    ServiceAccess,
};
use pagetide_uapi::host::check_page_size;
use pagetide_uapi::userfaultfd::{EventBuffer, Features, Mode, OpenError, UserRange, Userfaultfd};

use crate::channel::{Channel, Span};
use crate::config::{
    Contents, Described, File, Holes, KeptIn, Misplaced, RegionConfig, UffdLayout,
};
use crate::error::AddError;
use crate::fault::RegionId;
use crate::kept_open::leave_to;
use crate::memory::{Foreign, ForeignClone, ForeignFile, Local, Memory, Shape};
use crate::missing::Missing;
use crate::pager::Pager;
use crate::region::{PagedRegion, Parts, Served, Supply};
use crate::requests::Requests;
use crate::table::Table;

/// The maximal fault-around: the number of pages that one page table maps.
const MAX_FAULT_AROUND_PAGES: u64 = 512;

impl Pager {
    /// Begins to page a region. From here on its missing pages fault: threads must serve the pager's
    /// descriptor ([`crate::Serving`], [`crate::Readers`]), and resolve vCPUs' exits.
    ///
    /// A local region with a file first loses the guest mappings of its missing pages, including the poison
    /// markers of an earlier pager, so that the mappings agree with the page map. What a map to resume from
    /// ([`RegionConfig::resume_from`]) has as settled stays mapped. The region's content in the page cache stays.
    /// A region whose content comes from elsewhere must have none, unless the configuration trusts existing pages.
    /// In MISSING mode the service mapping is closed while the region is paged.
    ///
    /// # Errors
    /// [`AddError`]; nothing has changed then.
    pub fn add(&self, config: RegionConfig) -> Result<RegionId, AddError> {
        check_page_size()?;
        check(&config)?;
        let _edit = self.lock_edit();
        let table = self.table();
        let id = table.next_id();
        let limits = config.limits;
        let retry = config.retry;
        let (memory, layout, uffd) = memory_of(config.memory, config.mode)?;
        check_file(&table, &*memory)?;
        let Shape {
            gpa,
            range: addresses,
            page_size,
            ..
        } = memory.shape();
        let bytes = addresses.bytes() as u64;
        let pages = bytes >> page_size.shift();
        let range = check_place(&table, gpa, bytes, page_size)?;
        for lost in config.poison.iter() {
            if lost.start() < range.start() || lost.end() > range.end() {
                return Err(AddError::PoisonOutside { range: lost });
            }
        }
        let map = match &config.kept_in {
            Some(kept) => PageMap::in_file(&kept.file, kept.map_offset, pages)?,
            None => PageMap::new(pages)?,
        };
        if let Some(image) = &config.resume_from {
            map.import(image)?;
        }

        let (served, can_poison) = match &uffd {
            None => self.open_channels(&*memory, config.mode, &layout)?,
            Some(uffd) => {
                let journal = config.kept_in.as_ref();
                let served = self.adopt_channel(&table, uffd, pages, journal)?;
                (vec![served], uffd.can_poison())
            }
        };
        let page_bytes = page_size.bytes();
        let mut source = None;
        let supply = match config.contents {
            Contents::PageCache(holes) => Supply::PageCache(holes),
            Contents::Local(source) => Supply::Local(source),
            Contents::Source(its) => {
                source = Some(its);
                Supply::Source
            }
        };
        let missing = Missing::new(Requests::new(limits, retry, page_bytes), source);
        let parts = Parts {
            id,
            map,
            supply,
            served,
            fault_around_pages: config.fault_around_pages,
            no_progress_limit: config.no_progress_limit.get(),
            can_poison,
            trusts_existing: config.trusts_existing,
            installed_by: config.installed_by,
            mapper: config.mapper,
            observer: config.observer,
            lost: config.poison,
            memory,
        };
        let region = Arc::new(PagedRegion::new(parts, missing));

        if let Some(local) = region.memory.local() {
            local.begin_paging(match config.mode {
                Mode::Minor => ServiceAccess::ReadWrite,
                Mode::Missing => ServiceAccess::Closed,
            })?;
        }
        // If a later step fails, the steps from here on are undone.
        let begun = self
            .begin(&table, &region, config.resume_from.is_some())
            .and_then(|()| {
                // Before waiting for messages, because their addresses are looked up in the table.
                if region.memory.local().is_some() {
                    self.set_table(table.with(Arc::clone(&region)));
                }
                let mut channels = region.served.iter().map(|served| &served.channel);
                channels
                    .try_for_each(|channel| self.poller.add(channel))
                    .map_err(AddError::Poll)
            });
        if let Err(error) = begun {
            self.set_table(Table::clone(&table));
            self.undo(&region);
            return Err(error);
        }
        if region.memory.local().is_none() {
            // A fault that was read earlier may be lost: a reader found no region for it, or a
            // predecessor consumed it. The wake-up repeats it.
            self.wake_all(&region);
        }
        Ok(id)
    }

    /// Opens one userfaultfd for each range of the layout.
    fn open_channels(
        &self,
        memory: &dyn Memory,
        mode: Mode,
        layout: &UffdLayout,
    ) -> Result<(Vec<Served>, bool), AddError> {
        let Some(region) = memory.local() else {
            return Ok((Vec::new(), false));
        };
        let mut features = features(region.backing(), mode);
        let available = Userfaultfd::available()?;
        if available.contains(Features::POISON) {
            features = features | Features::POISON;
        }
        if *layout == UffdLayout::WithEvents {
            features = features | Features::EVENT_REMOVE | Features::EVENT_UNMAP;
        }
        let channel = || -> Result<Arc<Channel>, OpenError> {
            let uffd = Arc::new(Userfaultfd::open(features)?);
            Ok(Arc::new(Channel::new(uffd, self.poller.next_token())))
        };
        let runs = match layout {
            UffdLayout::Single | UffdLayout::WithEvents => vec![region.all_pages()],
            UffdLayout::PerRange(ranges) => runs(region, ranges)?,
        };
        let mut served = Vec::with_capacity(runs.len());
        for pages in runs {
            let channel = channel()?;
            served.push(Served { pages, channel });
        }
        Ok((served, features.contains(Features::POISON)))
    }

    /// The channel of a userfaultfd that another process handed over; several regions may share it.
    fn adopt_channel(
        &self,
        table: &Table,
        uffd: &Arc<Userfaultfd>,
        pages: u64,
        kept: Option<&KeptIn>,
    ) -> Result<Served, AddError> {
        let is_same = |channel: &&Arc<Channel>| Arc::ptr_eq(&channel.uffd, uffd);
        if self.others.of_space(uffd).is_some() {
            return Err(AddError::SpaceAttached);
        }
        let channel = match table.channels().iter().find(is_same) {
            Some(channel) => Arc::clone(channel),
            None => {
                // SAFETY: in_file requires that nothing else uses the bytes. The file's owner has promised
                // that they are this userfaultfd's alone (RegionConfig::kept_in), and there is one channel
                // for a userfaultfd.
                let in_file = |kept: &KeptIn| unsafe { EventBuffer::in_file(kept.file.as_fd(), 0) };
                let journal = kept.map(in_file).transpose().map_err(AddError::Journal)?;
                let (uffd, token) = (Arc::clone(uffd), self.poller.next_token());
                let channel = Arc::new(Channel::with_journal(uffd, token, journal));
                leave_to(&channel);
                channel
            }
        };
        let pages = PageRange::new(PageIndex(0), pages);
        Ok(Served { pages, channel })
    }

    /// Applies what a predecessor that died has read from the userfaultfds and may not have applied:
    /// pages that the process had discarded read as zeroes. Call it after all regions of a predecessor
    /// were added ([`RegionConfig::kept_in`]) and before their faults are served, and then wake the
    /// threads that sleep there (`UFFDIO_WAKE`): the predecessor may have read their messages, too.
    pub fn recover(&self) {
        for channel in self.table().channels() {
            channel.recover(|spans, event| self.apply(channel, spans, event));
        }
    }

    /// Makes the region's missing pages fault.
    fn begin(
        &self,
        table: &Table,
        region: &Arc<PagedRegion>,
        is_resumed: bool,
    ) -> Result<(), AddError> {
        let hva = region.memory.shape().range.start().as_u64();
        let shift = region.page_shift();
        check_content(region, is_resumed)?;
        for served in &region.served {
            let span = Span {
                start: hva + (served.pages.first().0 << shift),
                region: region.id,
                pages: served.pages,
                shift,
            };
            if region.memory.local().is_none() {
                let range = UserRange {
                    start: span.start,
                    bytes: span.bytes(),
                };
                // If this wake-up fails, other ioctls would fail as well.
                let woken = served.channel.uffd.wake(range);
                woken.map_err(|source| AddError::NotReady { source })?;
            }
            let added = served.channel.add(span, || {
                // If the userfaultfd already serves other regions, its messages may be read at any
                // moment. They are looked up in the table, and an event reports each page only once.
                if region.memory.local().is_none() {
                    self.set_table(table.with(Arc::clone(region)));
                }
            });
            added.map_err(|start| AddError::HostOverlap { start })?;
            served.channel.set_handed_over(false);
            if region.memory.local().is_some() {
                let range = UserRange {
                    start: span.start,
                    bytes: span.bytes(),
                };
                // SAFETY: register requires memory that is the caller's and stays mapped for as long as
                // the userfaultfd is open, and that no code relies on its zeroes. It is the guest
                // mapping of a Region that the paged region keeps; the region's pages are unregistered
                // before that is dropped (close_region), and a Region promises nothing about the
                // content of its pages.
                unsafe { served.channel.uffd.register(range, region.mode) }?;
                region.count_registered();
            }
        }
        if let Some(local) = region.memory.local()
            && local.backing().has_file()
        {
            self.zap_missing(region, local)?;
        }
        self.reinstate_poison(region, is_resumed)
    }
}

impl Pager {
    /// Removes the mappings of a local region's missing pages. Settled pages, of a map to resume from, keep theirs.
    fn zap_missing(&self, region: &PagedRegion, local: &Region) -> Result<(), AddError> {
        for missing in region.runs(|state| !state.is_settled()) {
            let zapped = self.with_events_read(region, || local.zap_guest(missing));
            zapped.map_err(AddError::NoThread)?.map_err(AddError::Zap)?;
        }
        Ok(())
    }
}

/// The memory that a configuration describes, its layout, and the userfaultfd that was handed over.
type Given = (Box<dyn Memory>, UffdLayout, Option<Arc<Userfaultfd>>);

fn memory_of(described: Described, mode: Mode) -> Result<Given, AddError> {
    Ok(match described {
        Described::Local { region, layout } => (Box::new(Local { region, mode }), layout, None),
        Described::Foreign {
            uffd,
            range,
            page_size,
            gpa,
            file,
            is_mapped_here,
            is_inherited_again,
        } => {
            let shape = Shape {
                gpa,
                range,
                page_size,
                mode,
            };
            let memory = Foreign {
                shape,
                is_mapped_here,
                is_inherited_again,
            };
            let memory: Box<dyn Memory> = match file {
                File::Unknown => Box::new(memory),
                File::FilledBySource => Box::new(ForeignClone { memory }),
                File::Shared(memfd) => {
                    let file = memfd.part(range, page_size)?;
                    Box::new(ForeignFile { memory, file })
                }
            };
            (memory, UffdLayout::Single, Some(uffd))
        }
    })
}

/// Checks that no other region has pages of the same file.
fn check_file(table: &Table, memory: &dyn Memory) -> Result<(), AddError> {
    let Some(file) = memory.file() else {
        return Ok(());
    };
    let mut regions = table.iter();
    let same = regions.find(|other| other.memory.file().is_some_and(|its| its.overlaps(file)));
    match same {
        Some(other) => Err(AddError::SameFile { other: other.id }),
        None => Ok(()),
    }
}

/// Checks that the content that is in the memory already suits the region.
fn check_content(region: &PagedRegion, is_resumed: bool) -> Result<(), AddError> {
    match (&region.supply, region.memory.local()) {
        (Supply::PageCache(Holes::AreMissing), Some(local)) => {
            let hole = local.first_hole().map_err(AddError::Content)?;
            // A page that was lost before needs no content.
            let is_lost = |page| {
                let range = region.gpa_range(PageRange::single(page));
                let is_lost = range.is_some_and(|range| region.lost.bytes_in(range) > 0);
                is_lost || region.map.state(page).is_some_and(PageState::is_settled)
            };
            if let Some(page) = hole.filter(|&page| !is_lost(page)) {
                return Err(AddError::Hole { page });
            }
        }
        (Supply::PageCache(_), _) => {}
        _ if region.trusts_existing || is_resumed => {}
        // (Reserved pages in a part of a file are not detected: the owner must not hand over such memory.)
        _ => {
            let is_missing = |pages: PageRange| {
                let mut missing = pages.iter();
                missing.find(|&page| {
                    let state = region.map.state(page);
                    state.is_some_and(|state| !state.is_settled()) && !region.map.was_begun(page)
                })
            };
            if let Some(page) = region.memory.first_content(&is_missing)? {
                return Err(AddError::NotEmpty { page });
            }
        }
    }
    Ok(())
}

fn check(config: &RegionConfig) -> Result<(), AddError> {
    if let Some(Misplaced { setting, memory }) = config.misplaced {
        return Err(AddError::Misplaced { setting, memory });
    }
    let pages = config.fault_around_pages;
    if !pages.is_power_of_two() || pages > MAX_FAULT_AROUND_PAGES {
        let max = MAX_FAULT_AROUND_PAGES;
        return Err(AddError::FaultAround { pages, max });
    }
    if config.retry.attempts == 0 || config.retry.deadline == Duration::ZERO {
        return Err(AddError::RetryPolicy);
    }
    let in_page_cache = matches!(config.contents, Contents::PageCache(_));
    if in_page_cache && config.mode == Mode::Missing {
        return Err(AddError::PageCacheNeedsMinor);
    }
    match (&config.memory, config.mode) {
        (Described::Local { region, .. }, Mode::Missing) if region.backing() == Backing::Thp => {
            Err(AddError::MissingOnThp)
        }
        (Described::Local { region, .. }, Mode::Minor) if !region.backing().has_file() => {
            Err(AddError::MinorWithoutFile)
        }
        (
            Described::Foreign {
                file: File::Unknown,
                ..
            },
            Mode::Minor,
        ) if !in_page_cache => Err(AddError::MinorWithoutFile),
        _ => Ok(()),
    }
}

/// The region's range of home gpas, which must not overlap another region's.
fn check_place(
    table: &Table,
    gpa: GuestAddress,
    bytes: u64,
    page_size: PageSize,
) -> Result<GuestRange, AddError> {
    let bad = |_| AddError::BadRange { gpa, bytes };
    // A region's gpas need not be aligned to its pages: a foreign region may have no gpas of its own.
    let range = GuestRange::new(gpa, bytes).map_err(bad)?;
    if !page_size.divides(bytes) {
        return Err(AddError::BadRange { gpa, bytes });
    }
    for other in table.neighbours(gpa) {
        let first = GuestRange::new(other.gpa, other.gpa_end().0 - other.gpa.0).map_err(bad)?;
        if first.overlaps(range) {
            let (first, second) = if first.start() < range.start() {
                (first, range)
            } else {
                (range, first)
            };
            return Err(AddError::Overlap { first, second });
        }
    }
    Ok(range)
}

/// The userfaultfd features that a region needs.
fn features(backing: Backing, mode: Mode) -> Features {
    let missing = match backing {
        Backing::Anonymous => return Features::NONE,
        Backing::Shmem | Backing::Thp => Features::MISSING_SHMEM,
        Backing::Hugetlb2M | Backing::Hugetlb1G => Features::MISSING_HUGETLBFS,
    };
    let minor = match (mode, backing.is_hugetlb()) {
        (Mode::Missing, _) => Features::NONE,
        (Mode::Minor, false) => Features::MINOR_SHMEM,
        (Mode::Minor, true) => Features::MINOR_HUGETLBFS,
    };
    missing | minor
}

/// The runs of pages of a layout's ranges, in ascending order.
fn runs(region: &Region, ranges: &[GuestRange]) -> Result<Vec<PageRange>, AddError> {
    let mut runs = Vec::with_capacity(ranges.len());
    for &range in ranges {
        let pages = pages_of(region, range).ok_or(AddError::BadUffdRange { range })?;
        runs.push(pages);
    }
    runs.sort_by_key(|pages: &PageRange| pages.first());
    let mut covered = PageIndex(0);
    for pages in &runs {
        if pages.first() != covered {
            break;
        }
        covered = pages.end();
    }
    let is_whole =
        covered.0 == region.pages() && runs.last().is_some_and(|last| last.end() == covered);
    if !is_whole {
        let region = region.range();
        return Err(AddError::NotCovered { region });
    }
    Ok(runs)
}

/// The pages of `region` in `range`; `None` if `range` is not whole pages of it.
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
