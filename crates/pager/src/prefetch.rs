//! Prefetch: fetches pages before first touch.

mod fetch;
mod in_order;
mod place;

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, Builder, JoinHandle};
use std::time::Instant;

use pagetide_memory::{PageRange, Urgency};

use crate::activity::{Locality, Seen};
use crate::counters::Counters;
use crate::error::{PrefetchError, ServeError, WAIT_SLICE, message_of};
use crate::fault::RegionId;
use crate::notice::Notice;
use crate::pace::Pace;
use crate::pager::Pager;
use crate::region::PagedRegion;
use crate::walk::Step;
use fetch::Fetched;
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
    /// has left out pages that could not be fetched or installed
    /// ([`SourceStatus::set_aside_pages`](crate::SourceStatus::set_aside_pages)), or a region ended that
    /// lacked pages.
    pub is_complete: bool,
}

/// A thread that fetches the missing pages of all regions that the pager had when the thread was
/// started, and ends when no page is missing.
///
/// A page that a source fails to deliver, or whose content cannot be installed, as often as the
/// [`RetryPolicy`](crate::RetryPolicy) allows is left out, for the first thread that touches it. The prefetch goes on
/// with the rest, ends, and is not complete. The next one tries the page again.
///
/// It works upwards, from the position of the latest faults if they are near each other (faults at random
/// places say nothing about the next one). It installs local content itself, in
/// batches that it claims like a fault. From sources it requests batches within the region's bulk
/// limit; the thread that delivers an answer installs it, or another ([`InstalledBy`](crate::InstalledBy)), and a fault on a page that is already
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
        for region in every.iter().filter(|region| region.has_source()) {
            region.missing().begin_prefetch(&region.map);
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
    /// Pages that were set aside, or whose region had been closed, when they were due.
    left_out: Vec<(&'s PagedRegion, PageRange)>,
}

impl Ahead<'_> {
    /// Adds what was counted since the last call to the pager's counts, which others may watch.
    fn report(&mut self) {
        let since = self.counters.since(&self.reported);
        self.shared.pager.count(&since);
        self.reported = self.counters;
    }

    /// Whether no page is missing that was left out, or was missing when its region ended: the end of a
    /// region poisons such pages one after another.
    fn has_everything(&self) -> bool {
        let is_there = |(region, pages): &(&PagedRegion, PageRange)| {
            let map = &region.map;
            map.next_unsettled(*pages).is_none()
                && !(region.is_closed() && map.counts().poisoned > 0)
        };
        self.left_out.iter().all(is_there)
    }

    /// Fetches pages until none is missing but those that were set aside (true), or it is stopped (false).
    fn walk(&mut self) -> Result<bool, PrefetchError> {
        let Shared { pager, regions, .. } = self.shared;
        let mut places: Vec<Place> = regions.iter().map(|region| Place::new(region)).collect();
        // The current region. The others follow in turn when it has no work.
        let mut current = 0;
        let mut pace = Pace::new(Instant::now());
        let (mut seen, mut locality) = (Seen::default(), Locality::default());
        // After a failure in a run, the next runs have one page, then two, and so on: a page whose
        // content is lost affects its neighbours for few calls, and is identified.
        let mut most = u64::MAX;
        loop {
            if self.shared.stopping.load(Ordering::Acquire) || pager.is_stopped() {
                return Ok(false);
            }
            let done = self.counters.pages + self.requested_pages;
            if let Some(pause) = pace.pause(Instant::now(), pager.activity.served(), done) {
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
                // It is looked at again at the end.
                if region.is_closed() {
                    continue;
                }
                let step = place.step(region);
                match step {
                    Step::Absent(page) => {
                        most = most.min(region.pages_in(self.batch_bytes).max(1));
                        let begun = Instant::now();
                        let fetched = self.fetch(region, page, most)?;
                        pace.batch_took(begun.elapsed());
                        self.report();
                        match fetched {
                            Fetched::All => most = most.saturating_mul(2),
                            Fetched::Part => most = 1,
                            Fetched::NoRoom | Fetched::Held => {
                                waits_for_source = true;
                                continue;
                            }
                        }
                        (current, goes_on) = (slot, true);
                        break;
                    }
                    Step::Pending(page) => {
                        place.pending = Some(page);
                        waits_for_source |= region.has_source();
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
                    let left_out = walked
                        .filter(|(region, place)| place.walk.has_left_out() || region.is_closed());
                    let all = left_out.map(|(region, _)| (&**region, region.all_pages()));
                    self.left_out.extend(all);
                    return Ok(true);
                }
            }
            if !goes_on {
                pager.tick();
                pager.install_delivered(Urgency::Bulk);
            }
        }
    }
}
