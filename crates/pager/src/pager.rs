//! The pager: regions and their shared state.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use arc_swap::Guard;
use pagetide_memory::{
    GuestAddress, GuestRange, PageIndex, PageMapImage, PageRange, PageState, Region, Snapshots,
    StateCounts, Urgency,
};

use crate::activity::Activity;
use crate::again::Again;
use crate::counters::Counters;
use crate::delivered::Deliveries;
use crate::error::{InstallFailure, PushError, ServeError, message_of};
use crate::fault::RegionId;
use crate::log_limit::log_limited;
use crate::notice::Notice;
use crate::others::Others;
use crate::poller::Poller;
use crate::region::{EventCount, PagedRegion};
use crate::source::Content;
use crate::table::Table;

/// The callback for notices.
type OnNotice = Box<dyn FnMut(&Notice) + Send>;

/// The progress of a pager.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Pages that are present, including zero pages and discarded pages.
    pub present: u64,
    /// Pages that are lost and will never be present.
    pub poisoned: u64,
    /// All pages.
    pub total: u64,
}

/// Pages the memory of some regions in as it is touched. All threads that resolve faults share it; the
/// [crate's documentation](crate) describes its use and the order of shutdown.
///
/// The pager starts no thread of its own, with one exception: if it changes memory whose userfaultfd
/// reports such changes, a helper thread makes the change, because that call waits until the event was
/// read. Otherwise the pager runs on the threads of faults ([`Resolver`]), of answers from sources, and
/// of those that serve its descriptor ([`crate::Serving`], [`crate::Readers`]).
pub struct Pager {
    me: Weak<Self>,
    /// Each resolver holds the table that it used last.
    pub(crate) tables: Snapshots<Table>,
    /// Held by a thread that changes the table.
    edit: Mutex<()>,
    pub(crate) poller: Poller,
    pub(crate) others: Others,
    pub(crate) next_space: AtomicU64,
    pub(crate) activity: Activity,
    pub(crate) changes: Arc<EventCount>,
    pub(crate) delivered: Deliveries,
    stopped: AtomicBool,
    on_notice: Mutex<Option<OnNotice>>,
    /// The first notice that needs action, for later callers.
    trouble: Mutex<Option<Notice>>,
    counted: Mutex<Counters>,
    begun: Instant,
    /// The time at which [`Self::tick`] has an action due, in nanoseconds since `begun`; `u64::MAX` for
    /// never.
    due: AtomicU64,
}

impl Pager {
    /// Creates a pager without regions.
    ///
    /// # Errors
    /// [`ServeError::Descriptor`] if a descriptor could not be created.
    pub fn new() -> Result<Arc<Self>, ServeError> {
        let poller = Poller::new().map_err(ServeError::Descriptor)?;
        Ok(Arc::new_cyclic(|me| Self {
            me: Weak::clone(me),
            tables: Snapshots::default(),
            edit: Mutex::new(()),
            poller,
            others: Others::default(),
            next_space: AtomicU64::new(0),
            activity: Activity::default(),
            changes: Arc::default(),
            delivered: Deliveries::default(),
            stopped: AtomicBool::new(false),
            on_notice: Mutex::new(None),
            trouble: Mutex::new(None),
            counted: Mutex::default(),
            begun: Instant::now(),
            due: AtomicU64::new(u64::MAX),
        }))
    }

    pub(crate) fn weak(&self) -> Weak<Self> {
        Weak::clone(&self.me)
    }

    #[inline]
    pub(crate) fn table(&self) -> Guard<Arc<Table>> {
        self.tables.current()
    }

    pub(crate) fn set_table(&self, table: Table) {
        self.tables.replace(table);
    }

    pub(crate) fn lock_edit(&self) -> MutexGuard<'_, ()> {
        // The table is replaced as a whole, so a panic under the lock leaves a valid one.
        self.edit.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The region and page at a home gpa.
    pub fn locate(&self, gpa: GuestAddress) -> Option<(RegionId, PageIndex)> {
        let table = self.table();
        let (region, page) = table.locate(gpa)?;
        Some((region.id, page))
    }

    /// The home gpas of `pages` of the region that contains `gpa`.
    pub fn gpa_range(&self, gpa: GuestAddress, pages: PageRange) -> Option<GuestRange> {
        self.table().locate(gpa)?.0.gpa_range(pages)
    }

    /// The current regions, in the order of their home gpas.
    pub fn region_ids(&self) -> Vec<RegionId> {
        self.table().iter().map(|region| region.id).collect()
    }

    /// The memory of a local region.
    pub fn local_region(&self, id: RegionId) -> Option<Arc<Region>> {
        self.table().region(id)?.memory.local().cloned()
    }

    /// The number of pages of a region in each state. Reads one byte per page.
    pub fn counts(&self, id: RegionId) -> Option<StateCounts> {
        Some(self.table().region(id)?.map.counts())
    }

    /// The state of a page.
    pub fn page_state(&self, id: RegionId, page: PageIndex) -> Option<PageState> {
        self.table().region(id)?.map.state(page)
    }

    /// The states of a region's pages at this moment, without a hand-over: every page that is not settled is missing.
    /// Settled pages stay settled, so a later image has at least those. Reads one byte per page. Waits for installations in
    /// progress, and must not be called by a [`Mapper`](crate::Mapper) or an [`Observer`](crate::Observer), or under a lock
    /// that these take.
    ///
    /// While a VM and its devices are paused, its memory can be read as a whole, and nothing is installed: the content of a page
    /// that the image has as missing is what the source has, also if prefetch installs the page meanwhile
    /// ([`LocalSource::fill`](crate::LocalSource::fill), [`BlockingSource::read`](crate::BlockingSource::read), or what else
    /// stands behind the source). A settled page is read from memory, after
    /// [`Resolver::ensure_present`](crate::Resolver::ensure_present), unless it is poisoned. (Where
    /// [existing pages are trusted](crate::RegionConfig::trust_existing_pages), what the file of the memory has of a
    /// missing page comes first.)
    pub fn image(&self, id: RegionId) -> Option<PageMapImage> {
        let region = Arc::clone(self.table().region(id)?);
        // A thread that sleeps in the userfaultfd is awake, and may have written, before its page is settled.
        region.settle_installing();
        Some(region.map.image())
    }

    /// The number of present pages of all regions. Reads one byte per page.
    pub fn progress(&self) -> Progress {
        let mut progress = Progress::default();
        for region in self.table().iter() {
            let counts = region.map.counts();
            progress.present += counts.present + counts.zero + counts.removed;
            progress.poisoned += counts.poisoned;
            progress.total += region.map.pages();
        }
        progress
    }

    /// Installs pages that arrived without a request, as a peer pushes them in a migration, as far as
    /// they are still missing. Returns the number of installed pages.
    ///
    /// # Errors
    /// [`PushError`]; pages that were installed before the error stay.
    pub fn push(
        &self,
        id: RegionId,
        pages: PageRange,
        content: Content<'_>,
    ) -> Result<u64, PushError> {
        let table = self.table();
        let region = table.region(id).filter(|region| !region.is_closed());
        let region = region.ok_or(PushError::NoSuchRegion { region: id })?;
        if pages.is_empty() || pages.end().0 > region.map.pages() {
            return Err(PushError::NoSuchPages { pages });
        }
        let wanted = region.bytes_of(pages);
        match content {
            Content::Bytes(bytes) if bytes.len() as u64 != wanted => {
                let given = bytes.len() as u64;
                return Err(PushError::WrongSize { given, wanted });
            }
            Content::Poisoned if pages.count() > 1 => return Err(PushError::PoisonedRun),
            _ => {}
        }
        let mut counters = Counters::default();
        let mut again = Again::with_patience();
        let result = loop {
            let pushed = self.install_arrived(region, &mut counters, pages, content, Urgency::Bulk);
            match pushed {
                Err(InstallFailure::Busy { .. }) => match again.pause() {
                    Ok(()) => {}
                    busy => break busy,
                },
                result => break result,
            }
        };
        self.count(&counters);
        result?;
        Ok(counters.pages + counters.poisoned)
    }

    /// Ends every wait for a page, now and later, with [`crate::ResolveError::Stopped`], so that the VM
    /// can stop for any reason. Prefetch ends. Nothing else changes: missing pages stay missing.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        for region in self.table().iter() {
            region.map.notify_all();
        }
        self.changes.notify();
    }

    /// Reverts [`Self::stop`], for another run of the VM.
    pub fn restart(&self) {
        self.stopped.store(false, Ordering::Release);
    }

    /// Whether [`Pager::stop`] was called.
    pub fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    /// Sets the callback for notices; it replaces the previous one. If a notice that needs action was
    /// issued before, the callback is called at once with the first of them. The callback runs on the
    /// thread that issues the notice, one call at a time. It must not block, and must not call the pager:
    /// [`Self::resume`] could issue a notice, which would wait for this call to end. It tells another thread, which
    /// may call [`Self::stop`], [`Self::resume`], [`Self::replace_source`] and [`Self::abandon`].
    pub fn on_notice(&self, callback: impl FnMut(&Notice) + Send + 'static) {
        let mut slot = self.lock_on_notice();
        let callback = slot.insert(Box::new(callback));
        if let Some(trouble) = self.trouble() {
            call(callback, &trouble);
        }
    }

    /// Removes the callback.
    pub fn clear_on_notice(&self) {
        self.lock_on_notice().take();
    }

    /// The first notice that needed action, if any.
    pub fn trouble(&self) -> Option<Notice> {
        let trouble = self.trouble.lock();
        trouble.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Clears the notice that [`Self::trouble`] returns, after the owner has acted.
    pub fn clear_trouble(&self) {
        let trouble = self.trouble.lock();
        *trouble.unwrap_or_else(PoisonError::into_inner) = None;
    }

    fn lock_on_notice(&self) -> MutexGuard<'_, Option<OnNotice>> {
        self.on_notice
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn notify(&self, notice: Notice) {
        // The callback's lock is held while the notice is recorded: so either this call sees a
        // concurrent `on_notice`, or that call sees the notice.
        let mut slot = self.lock_on_notice();
        let copy = notice.clone();
        if notice.needs_action() {
            let trouble = self.trouble.lock();
            trouble
                .unwrap_or_else(PoisonError::into_inner)
                .get_or_insert(notice);
        }
        match slot.as_mut() {
            // Whoever gets the notices logs them, with a bound of its own.
            Some(callback) => call(callback, &copy),
            None => log(&copy),
        }
    }

    /// The counts of threads that have ended (stopped readers, dropped resolvers, finished prefetch)
    /// and of answers from sources.
    pub fn counted(&self) -> Counters {
        *self.lock_counted()
    }

    pub(crate) fn count(&self, counters: &Counters) {
        self.lock_counted().add(counters);
    }

    fn lock_counted(&self) -> MutexGuard<'_, Counters> {
        self.counted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Schedules an action of [`Self::tick`] for `deadline`.
    pub(crate) fn wake_at(&self, deadline: Instant) {
        let nanoseconds = deadline.saturating_duration_since(self.begun).as_nanos();
        let at = u64::try_from(nanoseconds).unwrap_or(u64::MAX - 1);
        if self.due.fetch_min(at, Ordering::AcqRel) > at {
            self.poller.set_timer(|| {
                let due = Duration::from_nanos(self.due.load(Ordering::Acquire));
                let due = self.begun.checked_add(due)?;
                Some(due.saturating_duration_since(Instant::now()))
            });
        }
    }

    /// Whether an action is due. The caller that gets true performs it, and schedules the next one.
    pub(crate) fn is_due(&self, now: Instant) -> bool {
        let due = self.due.load(Ordering::Acquire);
        if due == u64::MAX
            || self
                .begun
                .checked_add(Duration::from_nanos(due))
                .is_none_or(|at| at > now)
        {
            return false;
        }
        let taken = self
            .due
            .compare_exchange(due, u64::MAX, Ordering::AcqRel, Ordering::Relaxed);
        taken.is_ok()
    }

    /// Maps a vCPU's own installed pages in stage 2, where that costs less than the saved faults. The
    /// faulting page is one of them: at guest entry KVM would map that page alone, at a higher cost
    /// than its share of a run.
    #[inline]
    pub(crate) fn populate_after_exit(
        &self,
        region: &PagedRegion,
        pages: PageRange,
        counters: &mut Counters,
    ) {
        if let Some(config) = &region.mapper
            && pages.count() >= config.least_exit_pages
        {
            self.populate(region, pages, counters);
        }
    }

    /// Maps installed pages in stage 2, if the region has a mapper. A mapper that fails ends the
    /// region's population, not its paging.
    pub(crate) fn populate(&self, region: &PagedRegion, pages: PageRange, counters: &mut Counters) {
        let Some((mapper, range)) = region.mapper().zip(region.gpa_range(pages)) else {
            return;
        };
        let populated = catch_unwind(AssertUnwindSafe(|| mapper.populate(range)));
        let error = match populated {
            Ok(Ok(bytes)) => {
                counters.populations += 1;
                counters.populated_bytes += bytes;
                return;
            }
            Ok(Err(error)) => error,
            Err(panic) => message_of(&*panic).into(),
        };
        if region.end_population() {
            self.notify(Notice::Population {
                region: region.id,
                source: Arc::from(error),
            });
        }
    }
}

/// Logs a notice that nobody gets. Forks, of which a process can make any number, hide no stall.
fn log(notice: &Notice) {
    let error = notice as &dyn std::error::Error;
    if notice.needs_action() {
        log_limited!(warn, error, "notice");
    } else {
        log_limited!(warn, error, "notice");
    }
}

/// Calls the owner's callback; a panic is caught.
fn call(callback: &mut OnNotice, notice: &Notice) {
    if catch_unwind(AssertUnwindSafe(|| callback(notice))).is_err() {
        log_limited!(error, "the callback for notices panicked");
    }
}

impl fmt::Debug for Pager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pager")
            .field("regions", &self.table().iter().count())
            .field("trouble", &self.trouble())
            .finish_non_exhaustive()
    }
}
