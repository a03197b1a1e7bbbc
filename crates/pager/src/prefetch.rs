//! Prefetch: fetches pages before first touch.

mod in_order;
mod place;

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, Builder, JoinHandle};

use pagetide_memory::{Claim, PageIndex, PageRange, PageState, Request, Urgency};
use pagetide_uapi::userfaultfd::InstallError;

use crate::activity::{Locality, Seen};
use crate::arrival::{Purpose, arrive};
use crate::config::Holes;
use crate::content::{content_of, fill_buffer, fill_buffer_now, is_gone, mapped_now};
use crate::counters::Counters;
use crate::error::{
    InstallFailure, PrefetchError, ResolveError, ServeError, WAIT_SLICE, message_of,
};
use crate::fault::{Delivery, Fault, RegionId};
use crate::install::{Body, Installed, Installer, Sleepers};
use crate::notice::Notice;
use crate::pace::Pace;
use crate::pager::Pager;
use crate::region::{PagedRegion, Requesting, Served, Supply};
use crate::requests::Wanted;
use crate::source::{Filled, LocalSource};
use crate::walk::Step;
use place::Place;

/// The configuration of prefetch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefetchConfig {
    /// The size of a batch, installed or requested from a source at once; at least one page. Larger
    /// batches take fewer calls, but a fault on a page that is being installed waits for the whole
    /// batch.
    pub batch_bytes: u64,
}

impl Default for PrefetchConfig {
    /// 256 KiB: 64 small pages.
    fn default() -> Self {
        Self {
            batch_bytes: 256 << 10,
        }
    }
}

/// What a prefetch fetches, and in which order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PrefetchPlan {
    /// These pages first, in this order: a recorded working set.
    pub first: Vec<(RegionId, PageRange)>,
    /// Then all missing pages of these regions.
    pub then: Vec<RegionId>,
}

/// The result of a prefetch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefetchEnd {
    /// The counts of its thread. [`Pager::counted`] has those of answers from sources.
    pub counters: Counters,
    /// Whether every page is settled: present, discarded, or poisoned. If not, the prefetch was stopped, or
    /// has left out pages that their source failed to deliver
    /// ([`SourceStatus::set_aside_pages`](crate::SourceStatus::set_aside_pages)).
    pub is_complete: bool,
}

/// A thread that fetches the missing pages of all regions that the pager had when the thread was
/// started, and ends when no page is missing.
///
/// A page that a source fails to deliver as often as the [`RetryPolicy`](crate::RetryPolicy) allows is left
/// out, for the first thread that touches it. The prefetch goes on with the rest, ends, and is not complete.
/// The next one tries the page again.
///
/// It works upwards, from the position of the latest faults if they are near each other (faults at random
/// places say nothing about the next one). It installs local content itself, in
/// batches that it claims like a fault. From sources it requests batches within the region's bulk
/// limit; the thread that delivers an answer installs it, and a fault on a page that is already
/// requested repeats the request with urgency. Discarded pages are skipped. Prefetch pauses in favour
/// of faults (see the rule in the [crate's documentation](crate#back-pressure)). Dropping it stops it,
/// as does [`Pager::stop`].
///
/// The pager's descriptor must be served meanwhile.
#[derive(Debug)]
pub struct Prefetch {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    pager: Arc<Pager>,
    /// The pages to fetch first.
    first: Vec<(Arc<PagedRegion>, PageRange)>,
    /// The regions to fetch wholly.
    regions: Vec<Arc<PagedRegion>>,
    /// The regions of both.
    every: Vec<Arc<PagedRegion>>,
    stopping: AtomicBool,
    /// Set by the thread at its end.
    ended: Mutex<Option<Result<PrefetchEnd, Arc<PrefetchError>>>>,
}

impl Prefetch {
    /// Starts to fetch pages.
    ///
    /// Local content that is unavailable or cannot be installed ends the prefetch, with a notice. Lost
    /// content is not an error: its pages are poisoned. For a stalled region the thread waits.
    ///
    /// # Errors
    /// [`ServeError::Thread`] if the thread could not be started.
    pub fn spawn(pager: &Arc<Pager>, config: PrefetchConfig) -> Result<Self, ServeError> {
        let then = pager.region_ids();
        let first = Vec::new();
        Self::spawn_plan(pager, config, PrefetchPlan { first, then })
    }

    /// Starts to fetch pages in the order of a plan. Parts of the plan that are in no region are
    /// skipped. [`PrefetchEnd::is_complete`] then says that every page of the plan was fetched, requested
    /// or found; what was requested may still be set aside.
    ///
    /// # Errors
    /// As [`Self::spawn`].
    pub fn spawn_plan(
        pager: &Arc<Pager>,
        config: PrefetchConfig,
        plan: PrefetchPlan,
    ) -> Result<Self, ServeError> {
        let table = pager.table();
        let region_of = |id: RegionId| table.region(id).map(Arc::clone);
        let part_of = |(id, pages): (RegionId, PageRange)| {
            let region = region_of(id)?;
            let pages = pages.intersection(region.all_pages());
            Some((region, pages))
        };
        let first = plan.first.iter().map(|(id, _)| *id);
        let planned: HashSet<RegionId> = first.chain(plan.then.iter().copied()).collect();
        let is_planned = |region: &&Arc<PagedRegion>| planned.contains(&region.id);
        let every: Vec<_> = table.iter().filter(is_planned).map(Arc::clone).collect();
        for requesting in every.iter().filter_map(|region| region.requesting()) {
            requesting.lock().requests.forget_set_aside();
        }
        let shared = Arc::new(Shared {
            pager: Arc::clone(pager),
            every,
            first: plan.first.into_iter().filter_map(part_of).collect(),
            regions: plan.then.into_iter().filter_map(region_of).collect(),
            stopping: AtomicBool::new(false),
            ended: Mutex::new(None),
        });
        let its = Arc::clone(&shared);
        let name = "pt-prefetch".to_owned();
        let thread = Builder::new()
            .name(name.clone())
            .spawn(move || run(&its, config))
            .map_err(|source| ServeError::Thread { name, source })?;
        Ok(Self {
            shared,
            thread: Some(thread),
        })
    }

    /// Whether it has ended, for any reason.
    pub fn is_finished(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits until it ends: when every page is settled, or the pager was stopped. Its counts are also
    /// added to [`Pager::counted`].
    ///
    /// # Errors
    /// [`PrefetchError`] if it ended early by itself.
    pub fn finish(mut self) -> Result<PrefetchEnd, Arc<PrefetchError>> {
        self.end()
    }

    /// Ends it after the current batch, and withdraws its requests that no thread waits for.
    ///
    /// # Errors
    /// As [`Self::finish`].
    pub fn stop(mut self) -> Result<PrefetchEnd, Arc<PrefetchError>> {
        self.shared.stop();
        self.end()
    }

    fn end(&mut self) -> Result<PrefetchEnd, Arc<PrefetchError>> {
        if let Some(thread) = self.thread.take() {
            // The thread has caught and recorded a panic.
            let _ = thread.join();
        }
        let ended = self.shared.ended.lock();
        let mut ended = ended.unwrap_or_else(PoisonError::into_inner);
        ended.take().unwrap_or(Ok(PrefetchEnd {
            counters: Counters::default(),
            is_complete: false,
        }))
    }
}

impl Shared {
    fn stop(&self) {
        self.stopping.store(true, Ordering::Release);
        for region in &self.every {
            region.map.notify_all();
        }
        self.pager.changes.notify();
    }
}

impl Drop for Prefetch {
    fn drop(&mut self) {
        if self.thread.is_some() {
            self.shared.stop();
            // A failure is also a notice.
            let _ = self.end();
        }
    }
}

fn run(shared: &Shared, config: PrefetchConfig) {
    let pager = &*shared.pager;
    let mut ahead = Ahead {
        shared,
        batch_bytes: config.batch_bytes,
        counters: Counters::default(),
        reported: Counters::default(),
        buffer: Vec::new(),
        requested_pages: 0,
        left_out: Vec::new(),
    };
    // Its counters and buffer are valid after a panic.
    let walked = catch_unwind(AssertUnwindSafe(|| Ok(ahead.in_order()? && ahead.walk()?)));
    ahead.report();
    let counters = ahead.counters;
    let is_through = matches!(&walked, Ok(Ok(true)));
    let result = match walked {
        Ok(Ok(_)) => Ok(PrefetchEnd {
            counters,
            is_complete: is_through && ahead.has_everything(),
        }),
        Ok(Err(error)) => Err(Arc::new(error)),
        Err(panic) => Err(Arc::new(PrefetchError::Panicked {
            message: message_of(&*panic),
        })),
    };
    // What a plan has requested last may still be on its way.
    if !is_through {
        for region in &shared.every {
            pager.withdraw_bulk(region);
        }
    }
    if let Err(error) = &result {
        pager.notify(Notice::Prefetch(Arc::clone(error)));
    }
    *shared.ended.lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
}

/// The thread's state.
struct Ahead<'s> {
    shared: &'s Shared,
    batch_bytes: u64,
    counters: Counters,
    /// Those of `counters` that the pager has.
    reported: Counters,
    buffer: Vec<u8>,
    /// Pages that were requested from sources.
    requested_pages: u64,
    /// Pages that were set aside when they were due.
    left_out: Vec<(&'s PagedRegion, PageRange)>,
}

/// The result of fetching a run of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fetched {
    /// All pages are installed or requested, by this thread or another.
    All,
    /// Some pages failed, or the run was not contiguous.
    Part,
    /// Nothing was done: the region's source is stalled, or its bulk limit is reached.
    NoRoom,
}

impl Ahead<'_> {
    /// Adds what was counted since the last call to the pager's counts, which others may watch.
    fn report(&mut self) {
        let since = self.counters.since(&self.reported);
        self.shared.pager.count(&since);
        self.reported = self.counters;
    }

    /// Whether no page is missing that was left out.
    fn has_everything(&self) -> bool {
        let is_there = |(region, pages): &(&PagedRegion, PageRange)| {
            region.map.next_unsettled(*pages).is_none()
        };
        self.left_out.iter().all(is_there)
    }

    /// Fetches pages until none is missing but those that were set aside (true), or it is stopped (false).
    fn walk(&mut self) -> Result<bool, PrefetchError> {
        let Shared { pager, regions, .. } = self.shared;
        let mut places: Vec<Place> = regions.iter().map(|region| Place::new(region)).collect();
        // The current region. The others follow in turn when it has no work.
        let mut current = 0;
        let mut pace = Pace::new();
        let (mut seen, mut locality) = (Seen::default(), Locality::default());
        // After a failure in a run, the next runs have one page, then two, and so on: a page whose
        // content is lost affects its neighbours for few calls, and is identified.
        let mut most = u64::MAX;
        loop {
            if self.shared.stopping.load(Ordering::Acquire) || pager.is_stopped() {
                return Ok(false);
            }
            let done = self.counters.pages + self.requested_pages;
            if let Some(pause) = pace.pause(pager.activity.served(), done) {
                self.counters.yields += 1;
                thread::sleep(pause);
            }
            // Before the checks below, so that a later change ends the wait.
            let seen_changes = pager.changes.count();
            let busiest = locality.follow(pager.activity.busiest(&mut seen));
            let slot = |id| regions.iter().position(|region| region.id == id);
            if let Some((slot, page)) = busiest.and_then(|(id, page)| Some((slot(id)?, page)))
                && let Some(place) = places.get_mut(slot)
            {
                place.walk.go_to(page);
                (current, place.pending) = (slot, None);
            }
            let mut goes_on = false;
            let mut waits_for_source = false;
            let mut waits_for = None;
            let in_turn = (current..regions.len()).chain(0..current);
            for slot in in_turn {
                let (Some(region), Some(place)) = (regions.get(slot), places.get_mut(slot)) else {
                    continue;
                };
                if region.is_closed() {
                    continue;
                }
                let step = place.step(region);
                match step {
                    Step::Absent(page) => {
                        most = most.min(region.pages_in(self.batch_bytes).max(1));
                        let fetched = pace.batch(|| self.fetch(region, page, most))?;
                        self.report();
                        match fetched {
                            Fetched::All => most = most.saturating_mul(2),
                            Fetched::Part => most = 1,
                            Fetched::NoRoom => {
                                waits_for_source = true;
                                continue;
                            }
                        }
                        (current, goes_on) = (slot, true);
                        break;
                    }
                    Step::Pending(page) => {
                        place.pending = Some(page);
                        waits_for_source |= region.requesting().is_some();
                        waits_for.get_or_insert((region, page));
                    }
                    Step::Done => {}
                }
            }
            match waits_for {
                _ if goes_on => {}
                _ if waits_for_source => pager.changes.wait(seen_changes, WAIT_SLICE),
                Some((region, page)) => {
                    region.map.wait(page, WAIT_SLICE);
                }
                None => {
                    let walked = regions.iter().zip(&places);
                    let left_out = walked.filter(|(_, place)| place.walk.has_left_out());
                    let all = left_out.map(|(region, _)| (&**region, region.all_pages()));
                    self.left_out.extend(all);
                    return Ok(true);
                }
            }
            if !goes_on {
                pager.tick();
            }
        }
    }

    /// Fetches `page` and the absent pages after it, at most `most` pages, unless another thread has
    /// claimed or requested it.
    fn fetch(
        &mut self,
        region: &PagedRegion,
        page: PageIndex,
        most: u64,
    ) -> Result<Fetched, PrefetchError> {
        let Some(served) = region.served(page) else {
            return Ok(Fetched::All);
        };
        let window = PageRange::new(page, most).intersection(served.pages);
        match &region.supply {
            Supply::PageCache(holes) => {
                let all = self.install(region, served, page, window, *holes)?;
                Ok(if all { Fetched::All } else { Fetched::Part })
            }
            Supply::Local(source) => {
                let all = self.fill(region, page, window, &**source)?;
                Ok(if all { Fetched::All } else { Fetched::Part })
            }
            Supply::Source(requesting) => {
                let window = requesting.lock().requests.set_aside().before(window);
                if self.fill_now(region, requesting, page, window)? {
                    return Ok(Fetched::All);
                }
                Ok(self.request(region, requesting, page, window))
            }
        }
    }

    fn install(
        &mut self,
        region: &PagedRegion,
        served: &Served,
        page: PageIndex,
        window: PageRange,
        holes: Holes,
    ) -> Result<bool, PrefetchError> {
        let pager = &*self.shared.pager;
        let lock = served.channel.lock_installs();
        let Claim::Won(claim) = region.map.claim_run(page, window) else {
            self.counters.lost_claims += 1;
            return Ok(true);
        };
        let claimed = claim.pages();
        let settled = |counters: &Counters| counters.pages + counters.exists + counters.poisoned;
        let before = settled(&self.counters);
        let mut installer = Installer {
            region,
            served,
            lock: &lock,
            counters: &mut self.counters,
            // Wake before populating: population may wait for a slot update, which may wait for a
            // thread that sleeps here.
            sleepers: Sleepers::Some,
            ahead: Some(pager),
        };
        let installed = installer.install(claim, Body::PageCache, Some(page));
        drop(lock);
        if let (Ok(Installed::Piece(pages)), true) = (&installed, served.channel.has_events) {
            pager.populate(region, *pages, &mut self.counters);
        }
        match installed {
            Ok(Installed::EventsFirst) => pager.read_events(&served.channel),
            Ok(Installed::Unmapped { page, is_gone }) => pager.unmapped(region, page, is_gone),
            Ok(_) => {}
            Err(InstallFailure::Kernel(InstallError::NoContent)) if holes == Holes::AreZero => {
                let hole = PageRange::single(page);
                arrive(
                    pager,
                    region,
                    &mut self.counters,
                    hole,
                    Body::Zero,
                    Purpose::Ahead,
                )
                .map_err(|source| self.failed(region, page, source))?;
            }
            Err(source) => return Err(self.failed(region, page, source)),
        }
        Ok(settled(&self.counters) - before == claimed.count())
    }

    fn fill(
        &mut self,
        region: &PagedRegion,
        page: PageIndex,
        window: PageRange,
        source: &dyn LocalSource,
    ) -> Result<bool, PrefetchError> {
        let is_absent = |&page: &PageIndex| region.map.state(page) == Some(PageState::Absent);
        let count = window.iter().take_while(is_absent).count() as u64;
        let pages = PageRange::new(page, count);
        if pages.is_empty() {
            return Ok(true);
        }
        let content = match fill_buffer(region, source, pages, &mut self.buffer) {
            Ok(Filled::Bytes) => content_of(region, pages, &self.buffer),
            Ok(Filled::Zero) => Body::Zero,
            Ok(Filled::Poisoned) if count == 1 => Body::Poisoned,
            // Page by page, because it is unknown which of them failed.
            Ok(Filled::Poisoned) | Err(_) if count > 1 => {
                return self
                    .fill(region, page, PageRange::single(page), source)
                    .map(|_| false);
            }
            Ok(Filled::Poisoned) => return Ok(false),
            Err(source) => {
                let fault = fault(region, page);
                return Err(PrefetchError::Resolve(ResolveError::Content {
                    fault,
                    source,
                }));
            }
        };
        let pager = &self.shared.pager;
        let arrived = arrive(
            pager,
            region,
            &mut self.counters,
            pages,
            content,
            Purpose::Ahead,
        );
        arrived.map_err(|source| self.failed(region, page, source))?;
        Ok(true)
    }

    /// Installs a batch if the source has its content without waiting. False: it has to be requested.
    fn fill_now(
        &mut self,
        region: &PagedRegion,
        requesting: &Requesting,
        page: PageIndex,
        window: PageRange,
    ) -> Result<bool, PrefetchError> {
        let source = requesting.source();
        let is_absent = |&page: &PageIndex| region.map.state(page) == Some(PageState::Absent);
        let count = window.iter().take_while(is_absent).count() as u64;
        let pages = PageRange::new(page, count);
        if pages.is_empty() {
            return Ok(true);
        }
        let content = match mapped_now(region, &*source, pages, Urgency::Bulk) {
            Some(content) => content,
            None => {
                let buffer = &mut self.buffer;
                match fill_buffer_now(region, &*source, pages, Urgency::Bulk, buffer) {
                    Some(Filled::Bytes) => content_of(region, pages, buffer),
                    Some(Filled::Zero) => Body::Zero,
                    Some(Filled::Poisoned) | None => return Ok(false),
                }
            }
        };
        let pager = &self.shared.pager;
        let counters = &mut self.counters;
        match arrive(pager, region, counters, pages, content, Purpose::Ahead) {
            Ok(_) => Ok(true),
            Err(failure) if is_gone(&failure, content) => Ok(false),
            Err(failure) => Err(self.failed(region, page, failure)),
        }
    }

    /// Requests a batch if the bulk limit permits it.
    fn request(
        &mut self,
        region: &PagedRegion,
        requesting: &Requesting,
        page: PageIndex,
        window: PageRange,
    ) -> Fetched {
        if !requesting.lock().requests.has_bulk_room(window.count()) {
            return Fetched::NoRoom;
        }
        if let Request::Made(pages) = region.map.request_run(page, window, Urgency::Bulk) {
            self.requested_pages += pages.count();
            self.shared
                .pager
                .want(region, Wanted { pages, fault: None });
        }
        Fetched::All
    }

    fn failed(
        &self,
        region: &PagedRegion,
        page: PageIndex,
        source: InstallFailure,
    ) -> PrefetchError {
        let fault = fault(region, page);
        PrefetchError::Resolve(ResolveError::Install { fault, source })
    }
}

/// The fault in an error message: no thread has touched the page, but an access to it would fail in
/// this way.
fn fault(region: &PagedRegion, page: PageIndex) -> Fault {
    Fault {
        region: region.id,
        page,
        gpa: region.gpa_of(page),
        access: pagetide_memory::Access::Read,
        vcpu: None,
        delivery: Delivery::Uffd,
    }
}
