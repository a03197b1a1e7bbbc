//! Incremental population: second-stage tables that grow as pages arrive.
//!
//! A page that prefetch brought in is in the guest mapping, but KVM has not mapped it yet: the guest's
//! first touch is still a fault, if only one inside KVM. So what was just installed is handed on to
//! whoever can have it mapped, in batches, by a thread of its own.

use std::any::Any;
use std::error::Error;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
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
    /// since it arrived. Returns how many bytes it mapped. Called by one thread.
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

/// A thread that hands what arrives at a pager to a [`PopulateSink`]: runs that prefetch installed,
/// and faults' runs with neighbours that nobody asked for. A page that came alone, by a fault, is
/// mapped by the vCPU that waits for it.
///
/// It gives way to faults (see the rule in the [crate's documentation](crate#back-pressure)), and ends
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
    state: Mutex<PopulateEnd>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, PopulateEnd> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn counters(&self) -> PopulateCounters {
        let queue = self.pager.arrivals.counts();
        PopulateCounters {
            ranges: queue.ranges,
            merged: queue.merged,
            dropped: queue.dropped,
            dropped_bytes: queue.dropped_bytes,
            ..self.lock().counters
        }
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
        let shared = Arc::new(Shared {
            pager: Arc::clone(pager),
            is_running: AtomicBool::new(true),
            state: Mutex::new(PopulateEnd {
                counters: PopulateCounters::default(),
                failure: None,
            }),
        });
        let its = Arc::clone(&shared);
        let thread = Builder::new()
            .name("pt-populate".to_owned())
            .spawn(move || run(&its, &sink));
        match thread {
            Ok(thread) => Ok(Self {
                shared,
                thread: Some(thread),
            }),
            Err(source) => {
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

    /// Hands on what has arrived, and ends then.
    pub fn finish(mut self) -> PopulateEnd {
        self.shared.pager.arrivals.drain();
        self.end()
    }

    /// Ends after the batch at hand; what else has arrived is forgotten.
    pub fn stop(mut self) -> PopulateEnd {
        self.shared.pager.arrivals.close();
        self.end()
    }

    fn end(&mut self) -> PopulateEnd {
        if let Some(thread) = self.thread.take() {
            // The sink's panics were caught in the thread and recorded.
            let _ = thread.join();
        }
        let ended = PopulateEnd {
            counters: self.shared.counters(),
            failure: self.shared.lock().failure.take(),
        };
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

fn run(shared: &Shared, sink: &dyn PopulateSink) {
    let pager = &*shared.pager;
    let mut pace = Pace::new();
    let mut pages = 0;
    while pager.arrivals.wait() {
        if let Some(pause) = pace.pause(pager.pulse.served(), pages) {
            shared.lock().counters.yields += 1;
            // What arrives meanwhile makes larger batches.
            thread::sleep(pause);
        }
        // None: the queue was closed or emptied meanwhile.
        let Some(range) = pager.arrivals.take() else {
            continue;
        };
        match pace.batch(|| hand_over(sink, range)) {
            Ok(bytes) => {
                if let Some((region, _)) = pager.locate(range.start()) {
                    pages += pager.pages_in(region, bytes);
                }
                let counters = &mut shared.lock().counters;
                counters.calls += 1;
                counters.asked_bytes += range.bytes();
                counters.mapped_bytes += bytes;
            }
            Err(failure) => {
                pager.arrivals.close();
                tracing::warn!(
                    error = &failure as &dyn Error,
                    "population ends, paging goes on"
                );
                let mut state = shared.lock();
                state.counters.failures += 1;
                state.failure = Some(failure);
            }
        }
    }
    shared.is_running.store(false, Ordering::Release);
}

fn hand_over(sink: &dyn PopulateSink, range: GuestRange) -> Result<u64, PopulateFailure> {
    let populated: Result<_, Box<dyn Any + Send>> =
        catch_unwind(AssertUnwindSafe(|| sink.populate(range)));
    match populated {
        Ok(Ok(bytes)) => Ok(bytes),
        Ok(Err(source)) => Err(PopulateFailure::Sink { range, source }),
        Err(panic) => Err(PopulateFailure::Panicked {
            range,
            message: message_of(&*panic),
        }),
    }
}
