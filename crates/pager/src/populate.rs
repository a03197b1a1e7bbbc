//! Incremental population: second-stage tables that grow as pages arrive.
//!
//! A page that prefetch brought in is in the guest mapping, but KVM has not mapped it yet: the guest's
//! first touch is still a fault, if only one inside KVM. So what was just installed is handed on to
//! whoever can have it mapped, in batches: by prefetch itself before it says that the pages are there,
//! and, for neighbours of faulting pages, by a thread of its own, so that no fault waits for it.

use std::any::Any;
use std::error::Error;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::thread::{self, Builder, JoinHandle};

use pagetide_memory::GuestRange;
use thiserror::Error;

use crate::counters::PopulateCounters;
use crate::error::{StartError, message_of};
use crate::pace::Pace;
use crate::pager::Pager;

/// Has guest memory mapped in the second-stage tables.
pub trait PopulateSink: Send + Sync {
    /// Maps what is present of `range`, and brings nothing in: a page may have been given up again
    /// since it arrived. Returns how many bytes it mapped.
    ///
    /// Called by the populator's thread and by prefetch's, maybe at the same time. Prefetch waits for
    /// it, with a claim on these pages, so it must not wait for a fault to be resolved outside of the
    /// kernel: nobody who sleeps in a userfaultfd sleeps on these pages, but exits on them wait.
    fn populate(&self, range: GuestRange) -> Result<u64, Box<dyn Error + Send + Sync>>;
}

/// How installed ranges are handed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PopulateConfig {
    /// Ranges that touch are handed on together up to so many bytes.
    pub batch_bytes: u64,
    /// How many ranges may wait; more are dropped and counted.
    pub queued_ranges: usize,
}

impl Default for PopulateConfig {
    /// What one page table maps, and room for 2 GiB of such batches.
    fn default() -> Self {
        Self {
            batch_bytes: 2 << 20,
            queued_ranges: 1024,
        }
    }
}

/// Why population ended before it was told to. Paging goes on: all that is lost is time.
#[derive(Debug, Error)]
pub enum PopulateFailure {
    /// The sink said no.
    #[error("{range} could not be populated")]
    Sink {
        /// The batch.
        range: GuestRange,
        /// What the sink said.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// The sink panicked.
    #[error("populating {range} panicked: {message}")]
    Panicked {
        /// The batch.
        range: GuestRange,
        /// What it said.
        message: String,
    },
}

/// How a population ended.
#[derive(Debug)]
pub struct PopulateEnd {
    /// What was counted.
    pub counters: PopulateCounters,
    /// What ended it early, if anything did.
    pub failure: Option<PopulateFailure>,
}

/// Has a [`PopulateSink`] map what arrives at a pager.
///
/// Runs that prefetch installs are handed over by prefetch, before they are present: once a page is,
/// the guest takes no fault on it. Neighbours that came with a faulting page are handed over by a
/// thread of the populator's. A page that came alone, by a fault, is mapped by the vCPU that waits
/// for it.
///
/// The thread gives way to faults (see the rule in the [crate's documentation](crate#back-pressure)), and ends
/// with the pager: [`Pager::stop`] ends it as well. Dropping it stops it.
#[derive(Debug)]
pub struct IncrementalPopulator {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    pager: Arc<Pager>,
    is_running: AtomicBool,
    hand_over: Arc<HandOver>,
}

impl Shared {
    fn counters(&self) -> PopulateCounters {
        let queue = self.pager.arrivals.counts();
        PopulateCounters {
            ranges: queue.ranges,
            merged: queue.merged,
            dropped: queue.dropped,
            dropped_bytes: queue.dropped_bytes,
            ..self.hand_over.lock().counters
        }
    }
}

/// The sink, and what has become of what it was given. The populator's thread and prefetch share it.
pub(crate) struct HandOver {
    sink: Box<dyn PopulateSink>,
    /// Held for reading while the sink is called. Prefetch may have taken the hand-over just before the
    /// populator ended, and a failure then must not end the next one.
    is_over: RwLock<bool>,
    state: Mutex<PopulateEnd>,
}

impl fmt::Debug for HandOver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HandOver")
            .field("state", &self.state)
            .finish_non_exhaustive()
    }
}

impl HandOver {
    fn new(sink: impl PopulateSink + 'static) -> Self {
        Self {
            sink: Box::new(sink),
            is_over: RwLock::new(false),
            state: Mutex::new(PopulateEnd {
                counters: PopulateCounters::default(),
                failure: None,
            }),
        }
    }

    fn lock(&self) -> MutexGuard<'_, PopulateEnd> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives a range to the sink and counts what comes of it: how many bytes it mapped. If it fails,
    /// population has ended.
    pub(crate) fn populate(&self, pager: &Pager, range: GuestRange) -> u64 {
        let is_over = self.is_over.read().unwrap_or_else(PoisonError::into_inner);
        if *is_over {
            return 0;
        }
        let mapped: Result<_, Box<dyn Any + Send>> =
            catch_unwind(AssertUnwindSafe(|| self.sink.populate(range)));
        let failure = match mapped {
            Ok(Ok(bytes)) => {
                let counters = &mut self.lock().counters;
                counters.calls += 1;
                counters.asked_bytes += range.bytes();
                counters.mapped_bytes += bytes;
                return bytes;
            }
            Ok(Err(source)) => PopulateFailure::Sink { range, source },
            Err(panic) => PopulateFailure::Panicked {
                range,
                message: message_of(&*panic),
            },
        };
        pager.arrivals.close();
        let mut state = self.lock();
        // The first one ended it; another can only have been under way at the same time.
        if state.failure.is_none() {
            tracing::warn!(
                error = &failure as &dyn Error,
                "population ends, paging goes on"
            );
            state.counters.failures += 1;
            state.failure = Some(failure);
        }
        0
    }

    /// Waits for calls that are going on; there will be no others.
    fn end(&self) {
        *self.is_over.write().unwrap_or_else(PoisonError::into_inner) = true;
    }
}

impl IncrementalPopulator {
    /// Starts handing on what arrives from now on.
    ///
    /// A sink that fails ends the population ([`Self::stop`] tells), not the paging.
    ///
    /// # Errors
    /// [`StartError::AlreadyPopulating`] if this pager has a populator, be it one that has ended and
    /// was not dropped; else [`StartError::Thread`].
    pub fn spawn(
        pager: &Arc<Pager>,
        sink: impl PopulateSink + 'static,
        config: PopulateConfig,
    ) -> Result<Self, StartError> {
        let opened = pager
            .arrivals
            .open(config.queued_ranges.max(1), config.batch_bytes);
        if !opened {
            return Err(StartError::AlreadyPopulating);
        }
        let hand_over = Arc::new(HandOver::new(sink));
        pager.set_hand_over(Some(Arc::clone(&hand_over)));
        let shared = Arc::new(Shared {
            pager: Arc::clone(pager),
            is_running: AtomicBool::new(true),
            hand_over,
        });
        let its = Arc::clone(&shared);
        let thread = Builder::new()
            .name("pt-populate".to_owned())
            .spawn(move || run(&its));
        match thread {
            Ok(thread) => Ok(Self {
                shared,
                thread: Some(thread),
            }),
            Err(source) => {
                pager.set_hand_over(None);
                pager.arrivals.release();
                let activity = "population";
                Err(StartError::Thread { activity, source })
            }
        }
    }

    /// What was counted so far.
    pub fn counters(&self) -> PopulateCounters {
        self.shared.counters()
    }

    /// Whether it still hands on what arrives: it was not stopped and its sink has not failed.
    pub fn is_running(&self) -> bool {
        self.shared.is_running.load(Ordering::Acquire)
    }

    /// Hands on what has arrived, and ends then. Nobody is in the sink any more when it returns.
    pub fn finish(mut self) -> PopulateEnd {
        self.shared.pager.arrivals.drain();
        self.end()
    }

    /// Ends after the batches at hand; what else has arrived is forgotten. Nobody is in the sink any more when
    /// it returns.
    pub fn stop(mut self) -> PopulateEnd {
        self.shared.pager.arrivals.close();
        self.end()
    }

    fn end(&mut self) -> PopulateEnd {
        if let Some(thread) = self.thread.take() {
            // The sink's panics were caught in the thread and recorded.
            let _ = thread.join();
        }
        self.shared.hand_over.end();
        let ended = PopulateEnd {
            counters: self.shared.counters(),
            failure: self.shared.hand_over.lock().failure.take(),
        };
        self.shared.pager.set_hand_over(None);
        self.shared.pager.arrivals.release();
        ended
    }
}

impl Drop for IncrementalPopulator {
    fn drop(&mut self) {
        if self.thread.is_some() {
            self.shared.pager.arrivals.close();
            self.end();
        }
    }
}

fn run(shared: &Shared) {
    let pager = &*shared.pager;
    let mut pace = Pace::new();
    let mut pages = 0;
    while pager.arrivals.wait() {
        if let Some(pause) = pace.pause(pager.pulse.served(), pages) {
            shared.hand_over.lock().counters.yields += 1;
            // What arrives meanwhile makes larger batches.
            thread::sleep(pause);
        }
        // None: the queue was closed or emptied meanwhile.
        let Some(range) = pager.arrivals.take() else {
            continue;
        };
        let bytes = pace.batch(|| shared.hand_over.populate(pager, range));
        if let Some((region, _)) = pager.locate(range.start()) {
            pages += pager.pages_in(region, bytes);
        }
    }
    shared.is_running.store(false, Ordering::Release);
}
