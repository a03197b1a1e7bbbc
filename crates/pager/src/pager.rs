//! The pager: regions, and what they share.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use arc_swap::Guard;
use pagetide_memory::{
    GuestAddress, GuestRange, PageIndex, PageRange, PageState, Region, Snapshots, StateCounts,
    Urgency,
};

use crate::activity::Activity;
use crate::counters::Counters;
use crate::error::{PushError, ServeError, message_of};
use crate::fault::RegionId;
use crate::notice::Notice;
use crate::poller::Poller;
use crate::region::{Bell, PagedRegion};
use crate::resolver::Resolver;
use crate::source::Content;
use crate::table::Table;

/// Called with each notice.
type OnNotice = Box<dyn FnMut(&Notice) + Send>;

/// How far a pager has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Pages that are present, the zero page and pages that were given up included.
    pub present: u64,
    /// Pages that are lost: they will never be present.
    pub poisoned: u64,
    /// All pages.
    pub total: u64,
}

/// Brings the pages of some regions in as they are touched. Shared by all threads that resolve
/// faults; see the [crate's documentation](crate) for how it is used and in which order things stop.
///
/// The pager starts no thread of its own, with one exception: while it changes memory whose userfaultfd
/// tells of changes, a helper thread makes the change, because that call waits until somebody has read
/// the event. It waits for nothing else, and is driven by faults ([`Resolver`]), by
/// answers of sources, and by whoever serves its descriptor ([`crate::Serving`], [`crate::Readers`]).
pub struct Pager {
    me: Weak<Self>,
    /// Each resolver holds the table that it used last.
    pub(crate) tables: Snapshots<Table>,
    /// Held by whoever changes the table.
    edit: Mutex<()>,
    pub(crate) poller: Poller,
    pub(crate) activity: Activity,
    pub(crate) bell: Arc<Bell>,
    stopped: AtomicBool,
    on_notice: Mutex<Option<OnNotice>>,
    /// The first notice that needs action, for those who ask later.
    trouble: Mutex<Option<Notice>>,
    counted: Mutex<Counters>,
    begun: Instant,
    /// When [`Self::tick`] has something to do, in nanoseconds since `begun`; `u64::MAX` for never.
    due: AtomicU64,
}

impl Pager {
    /// A pager without regions.
    ///
    /// # Errors
    /// [`ServeError::Descriptor`] if no descriptor to wait on is to be had.
    pub fn new() -> Result<Arc<Self>, ServeError> {
        let poller = Poller::new().map_err(ServeError::Descriptor)?;
        Ok(Arc::new_cyclic(|me| Self {
            me: Weak::clone(me),
            tables: Snapshots::default(),
            edit: Mutex::new(()),
            poller,
            activity: Activity::default(),
            bell: Arc::default(),
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
        // The table is replaced as a whole: whoever panicked has left a good one.
        self.edit.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a thread needs to resolve faults: `vcpu` names the vCPU whose exits it resolves.
    pub fn resolver(&self, vcpu: Option<u32>) -> Option<Resolver> {
        Some(Resolver::new(self.me.upgrade()?, vcpu))
    }

    /// The region and page at a home gpa.
    pub fn locate(&self, gpa: GuestAddress) -> Option<(RegionId, PageIndex)> {
        let table = self.table();
        let (region, page) = table.locate(gpa)?;
        Some((region.id, page))
    }

    /// The home gpas of `pages` of the region that `gpa` is in.
    pub fn gpa_range(&self, gpa: GuestAddress, pages: PageRange) -> Option<GuestRange> {
        self.table().locate(gpa)?.0.gpa_range(pages)
    }

    /// The regions that it serves now, in the order of their home gpas.
    pub fn region_ids(&self) -> Vec<RegionId> {
        self.table().iter().map(|region| region.id).collect()
    }

    /// The memory of a local region.
    pub fn local_region(&self, id: RegionId) -> Option<Arc<Region>> {
        self.table().region(id)?.target.local().cloned()
    }

    /// How many pages of a region are in which state. Looks at every page, at a byte each.
    pub fn counts(&self, id: RegionId) -> Option<StateCounts> {
        Some(self.table().region(id)?.map.counts())
    }

    /// The state of a page.
    pub fn page_state(&self, id: RegionId, page: PageIndex) -> Option<PageState> {
        self.table().region(id)?.map.state(page)
    }

    /// How many pages of all regions are present. Looks at every page, at a byte each.
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

    /// Installs pages that came without a request, as a peer pushes them in a migration: those that
    /// are missing still. Returns how many pages it installed.
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
        let result = self.install_arrived(region, &mut counters, pages, content, Urgency::Bulk);
        self.count(&counters);
        if let Err(failure) = result {
            // A request for these pages may have been answered, or narrowed, while they were being
            // installed here, and have passed them over: whoever waits asks anew.
            self.withdraw(region, pages);
            return Err(failure.into());
        }
        Ok(counters.pages + counters.poisoned)
    }

    /// Ends every wait for a page, now and later, with [`crate::ResolveError::Stopped`]. For when the
    /// VM has to stop for any reason. Prefetch ends. Nothing else changes: missing pages stay missing.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        for region in self.table().iter() {
            region.map.notify_all();
        }
        self.bell.ring();
    }

    /// Takes [`Self::stop`] back: for another run of the VM.
    pub fn restart(&self) {
        self.stopped.store(false, Ordering::Release);
    }

    /// Whether [`Pager::stop`] was called.
    pub fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    /// Has `callback` called with each notice from now on, and at once with the first one that needs
    /// action if there was one. It replaces the callback set before. It is called on whichever thread
    /// noticed, must not block, and must not call back into the pager but for [`Self::stop`],
    /// [`Self::resume`], [`Self::replace_source`] and [`Self::abandon`] from another thread.
    pub fn on_notice(&self, callback: impl FnMut(&Notice) + Send + 'static) {
        let mut slot = self.lock_on_notice();
        let callback = slot.insert(Box::new(callback));
        if let Some(trouble) = self.trouble() {
            call(callback, &trouble);
        }
    }

    /// Forgets the callback.
    pub fn clear_on_notice(&self) {
        self.lock_on_notice().take();
    }

    /// The first notice that needed action, if there was one.
    pub fn trouble(&self) -> Option<Notice> {
        let trouble = self.trouble.lock();
        trouble.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Forgets the notice that [`Self::trouble`] returns: the owner has dealt with it.
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
        tracing::warn!(error = &notice as &dyn std::error::Error, "notice");
        // The callback's lock is held over recording, so that `on_notice`, which takes it too, either
        // is seen here or sees the notice.
        let mut slot = self.lock_on_notice();
        let told = notice.clone();
        if notice.needs_action() {
            let trouble = self.trouble.lock();
            trouble
                .unwrap_or_else(PoisonError::into_inner)
                .get_or_insert(notice);
        }
        if let Some(callback) = slot.as_mut() {
            call(callback, &told);
        }
    }

    /// What was counted by threads that are done (readers that were stopped, resolvers that were
    /// dropped, prefetch that has ended) and by answers of sources.
    pub fn counted(&self) -> Counters {
        *self.lock_counted()
    }

    pub(crate) fn count(&self, counters: &Counters) {
        self.lock_counted().add(counters);
    }

    fn lock_counted(&self) -> MutexGuard<'_, Counters> {
        self.counted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has [`Self::tick`] do something at `deadline`.
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

    /// Whether something is due. Whoever is told so does it, and sets the next time.
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

    /// Has what a vCPU's own thread installed mapped in stage 2, where that costs less than the faults
    /// that it saves. The page that faulted is one of them: KVM would map it as the guest enters, alone
    /// and for more than its share of a run.
    #[inline]
    pub(crate) fn populate_after_exit(
        &self,
        region: &PagedRegion,
        pages: PageRange,
        counters: &mut Counters,
    ) {
        if let Some(config) = &region.sink
            && pages.count() >= config.least_exit_pages
        {
            self.populate(region, pages, counters);
        }
    }

    /// Has installed pages mapped in stage 2, if the region's owner gave a sink. A sink that fails
    /// ends the region's population, not its paging.
    pub(crate) fn populate(&self, region: &PagedRegion, pages: PageRange, counters: &mut Counters) {
        let Some((sink, range)) = region.sink().zip(region.gpa_range(pages)) else {
            return;
        };
        let populated = catch_unwind(AssertUnwindSafe(|| sink.populate(range)));
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

/// Calls a callback of somebody else's, whose panic is not ours.
fn call(callback: &mut OnNotice, notice: &Notice) {
    if catch_unwind(AssertUnwindSafe(|| callback(notice))).is_err() {
        tracing::error!("the callback for notices panicked");
    }
}

impl Drop for Pager {
    fn drop(&mut self) {
        let table = self.table();
        for region in table.iter() {
            self.close_region(region);
        }
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
