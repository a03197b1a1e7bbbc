//! Prefetch: pages that nobody has asked for yet.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, Builder, JoinHandle};

use pagetide_kvm::Access;
use pagetide_memory::{Claim, PageIndex, PageRange};

use crate::counters::Counters;
use crate::error::{Failure, ReaderError, ResolveError, StartError, message_of};
use crate::fault::{Delivery, Fault, RegionId};
use crate::pace::Pace;
use crate::pager::Pager;
use crate::pulse::Seen;
use crate::resolver::{WAIT_SLICE, Worker};
use crate::site::Site;
use crate::walk::{Step, Walk};

/// How pages are brought in ahead of faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefetchConfig {
    /// Bytes claimed, fetched and installed at a time, at least a page. A fault on any of these pages
    /// waits for all of them: more bytes save calls, fewer save faults time.
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

/// How a prefetch ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefetchEnd {
    /// What was counted.
    pub counters: Counters,
    /// Whether every page was settled: present, given up by the guest, or poisoned.
    pub is_complete: bool,
}

/// How far a pager has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Pages that are present, the zero page included, each of its region's size.
    pub present: u64,
    /// Pages that are lost: they will never be present.
    pub poisoned: u64,
    /// All pages.
    pub total: u64,
}

/// A thread that brings in whatever is absent, and ends when nothing is.
///
/// It works upwards from where the last faults were, in batches of pages that it claims as a fault
/// does: no page is brought in twice, and a fault on a page of a batch waits for its owner. Pages that
/// the guest gave up are left alone. It gives way to faults (see the rule in the
/// [crate's documentation](crate#back-pressure)). Dropping it stops it; [`Pager::stop`] does as well.
///
/// Faults must be served meanwhile: whoever sleeps on a page that prefetch installs is woken by a
/// reader.
#[derive(Debug)]
pub struct Prefetch {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    pager: Arc<Pager>,
    stopping: AtomicBool,
    /// Set by the thread as it ends.
    ended: Mutex<Option<PrefetchEnd>>,
}

impl Prefetch {
    /// Starts to bring pages in.
    ///
    /// When a page cannot be had, that is recorded ([`Pager::failure`]), the pager is stopped and its
    /// callback called, as when a reader fails. Lost content is no failure: those pages are poisoned.
    ///
    /// # Errors
    /// [`StartError::Thread`] if there is no thread to be had.
    pub fn spawn(pager: &Arc<Pager>, config: PrefetchConfig) -> Result<Self, StartError> {
        let shared = Arc::new(Shared {
            pager: Arc::clone(pager),
            stopping: AtomicBool::new(false),
            ended: Mutex::new(None),
        });
        let its = Arc::clone(&shared);
        let thread = Builder::new()
            .name("pt-prefetch".to_owned())
            .spawn(move || run(&its, config))
            .map_err(|source| StartError::Thread {
                activity: "prefetch",
                source,
            })?;
        Ok(Self {
            shared,
            thread: Some(thread),
        })
    }

    /// Whether it has ended, by itself or not.
    pub fn is_finished(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits until it ends: when every page is settled, or the pager was stopped. What it counted is
    /// also added to [`Pager::counted`]. An error is the pager's first failure.
    pub fn finish(mut self) -> Result<PrefetchEnd, Failure> {
        self.end()
    }

    /// Ends it after the batch at hand. Results as those of [`Self::finish`].
    pub fn stop(mut self) -> Result<PrefetchEnd, Failure> {
        self.shared.stopping.store(true, Ordering::Release);
        self.end()
    }

    fn end(&mut self) -> Result<PrefetchEnd, Failure> {
        if let Some(thread) = self.thread.take() {
            // A panic was caught in the thread and recorded.
            let _ = thread.join();
        }
        let ended = self.shared.ended.lock();
        let ended = ended.unwrap_or_else(PoisonError::into_inner);
        match (self.shared.pager.failure(), *ended) {
            (Some(failure), _) => Err(failure.clone()),
            (None, ended) => Ok(ended.unwrap_or(PrefetchEnd {
                counters: Counters::default(),
                is_complete: false,
            })),
        }
    }
}

impl Drop for Prefetch {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::Release);
        // The failure is the pager's too.
        let _ = self.end();
    }
}

fn run(shared: &Shared, config: PrefetchConfig) {
    let pager = &*shared.pager;
    let mut worker = Worker::new();
    // As for readers: the worker holds counters and a buffer, which a panic leaves as good as any.
    let result = catch_unwind(AssertUnwindSafe(|| walk(shared, config, &mut worker)));
    pager.count(&worker.counters);
    let ended = PrefetchEnd {
        counters: worker.counters,
        is_complete: matches!(result, Ok(Ok(true))),
    };
    *shared.ended.lock().unwrap_or_else(PoisonError::into_inner) = Some(ended);
    match result {
        Ok(Ok(_)) => {}
        Ok(Err(error)) => {
            pager.fail(ReaderError::Prefetch(error));
        }
        Err(panic) => {
            pager.fail(ReaderError::PrefetchPanicked {
                message: message_of(&*panic),
            });
        }
    }
}

/// Brings pages in until there are none left (true) or it is stopped (false).
fn walk(
    shared: &Shared,
    config: PrefetchConfig,
    worker: &mut Worker,
) -> Result<bool, ResolveError> {
    let pager = &*shared.pager;
    let mut walk = Walk::new(pager.regions().map(|region| region.pages()).collect());
    let mut pace = Pace::new();
    let mut seen = Seen::default();
    // After trouble with a run, the pages of the next ones are tried one by one, then two by two: a
    // page that is lost costs its neighbours few calls, and is found.
    let mut most = u64::MAX;
    loop {
        if shared.stopping.load(Ordering::Acquire) || pager.is_stopped() {
            return Ok(false);
        }
        if let Some(pause) = pace.pause(pager.pulse.served(), worker.counters.pages) {
            worker.counters.yields += 1;
            thread::sleep(pause);
        }
        if let Some((region, page)) = pager.pulse.busiest(&mut seen) {
            walk.go_to(region, page);
        }
        let step = walk.step(|region, pages| pager.page_map(region)?.next_unsettled(pages));
        match step {
            Step::Absent(region, page) => {
                most = most.min(pager.pages_in(region, config.batch_bytes).max(1));
                let whole = pace.batch(|| worker.bring_in_ahead(pager, region, page, most))?;
                most = if whole { most.saturating_mul(2) } else { 1 };
            }
            Step::InFlight(region, page) => {
                if let Some(map) = pager.page_map(region) {
                    map.wait(page, WAIT_SLICE);
                }
            }
            Step::Done => return Ok(true),
        }
    }
}

impl Worker {
    /// Brings in `page` and the absent pages behind it, `most` in all, unless somebody else was
    /// faster. Returns whether all went well: false if only a part of them came.
    fn bring_in_ahead(
        &mut self,
        pager: &Pager,
        region: RegionId,
        page: PageIndex,
        most: u64,
    ) -> Result<bool, ResolveError> {
        let gpa = pager.gpa_of(region, page);
        let (site, span) = Site::of(pager, region, page).ok_or(ResolveError::Outside { gpa })?;
        let window = PageRange::new(page, most).intersection(span.pages);
        let Claim::Won(run) = site.paged.map.claim_run(page, window) else {
            self.counters.lost_claims += 1;
            return Ok(true);
        };
        let claimed = run.pages().count();
        let settled = |counters: &Counters| counters.pages + counters.exists;
        let before = settled(&self.counters);
        let fault = Fault {
            region,
            page,
            gpa,
            access: Access::Read,
            vcpu: None,
            delivery: Delivery::Prefetch,
        };
        self.bring_in(&site, &fault, run)?;
        Ok(settled(&self.counters) - before == claimed)
    }
}
