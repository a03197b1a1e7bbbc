//! Adapts sources that block, by a pool of threads.

mod queues;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::Builder;

use pagetide_memory::HostRange;

use crate::error::{ServeError, message_of};
use crate::fault::RegionId;
use crate::log_limit::log_limited;
use crate::source::{Content, Filled, ReadAt, Request, RequestId, Room, Source, SourceError};
use queues::{Call, Kind, Queues};

/// A source whose reads block: a file, a network.
pub trait BlockingSource: Send + Sync {
    /// Fills `buffer`, whole pages of the region, with the content from `offset_bytes` on.
    ///
    /// # Errors
    /// The engine retries by the region's [`crate::RetryPolicy`].
    fn read(&self, at: ReadAt, buffer: &mut [u8]) -> Result<Filled, SourceError>;

    /// Fills the room if that needs no waiting, see [`Source::fill_now`].
    fn fill_now(&self, at: ReadAt, room: &mut Room<'_>) -> Option<Filled> {
        let _ = (at, room);
        None
    }

    /// The addresses of `bytes` bytes of content, see [`Source::mapped_now`].
    fn mapped_now(&self, at: ReadAt, bytes: u64) -> Option<HostRange> {
        let _ = (at, bytes);
        None
    }
}

/// The most threads of a [`Pool`]. One of each kind is there from the beginning, and others are started when a request
/// finds no thread that is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolConfig {
    /// Threads that serve any request, urgent ones first.
    pub shared_threads: usize,
    /// Threads that serve only urgent requests, so that no urgent request waits for a bulk read.
    pub urgent_threads: usize,
}

impl Default for PoolConfig {
    fn default() -> Self {
        Self {
            shared_threads: 4,
            urgent_threads: 4,
        }
    }
}

/// A pool of threads that adapts a [`BlockingSource`] to a [`Source`].
///
/// Dropping it fails the waiting requests. Its threads end by themselves after their current reads, so
/// a read that hangs does not block the drop.
pub struct Pool {
    shared: Arc<Shared>,
}

struct Shared {
    source: Box<dyn BlockingSource>,
    state: Mutex<State>,
    /// Threads that serve urgent requests only sleep here.
    urgent: Condvar,
    /// All others sleep here.
    any: Condvar,
}

struct State {
    queues: Queues<Request>,
    is_over: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // No code panics under the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where threads of this kind sleep.
    fn place(&self, kind: Kind) -> &Condvar {
        match kind {
            Kind::Urgent => &self.urgent,
            Kind::Shared => &self.any,
        }
    }

    /// The next request for a thread, which begins; `None` after the pool was dropped.
    fn first(&self, kind: Kind) -> Option<(Request, Option<Call>)> {
        let mut state = self.lock();
        state.queues.leave(kind);
        self.take(state, kind)
    }

    /// The next request for a thread that has served one.
    fn next(&self, kind: Kind) -> Option<(Request, Option<Call>)> {
        self.take(self.lock(), kind)
    }

    fn take(
        &self,
        mut state: MutexGuard<'_, State>,
        kind: Kind,
    ) -> Option<(Request, Option<Call>)> {
        loop {
            if state.is_over {
                return None;
            }
            if let Some(taken) = state.queues.pop(kind) {
                return Some(taken);
            }
            state.queues.sleep(kind);
            let woken = self.place(kind).wait(state);
            state = woken.unwrap_or_else(PoisonError::into_inner);
            state.queues.leave(kind);
        }
    }

    fn work(self: &Arc<Self>, kind: Kind) {
        let mut buffer = Vec::new();
        let mut taken = self.first(kind);
        while let Some((request, call)) = taken {
            self.call(call);
            self.serve(request, &mut buffer);
            taken = self.next(kind);
        }
    }

    fn serve(&self, request: Request, buffer: &mut Vec<u8>) {
        let Ok(bytes) = usize::try_from(request.bytes()) else {
            return;
        };
        if buffer.len() < bytes && buffer.try_reserve_exact(bytes - buffer.len()).is_err() {
            // Dropping the request fails it.
            return;
        }
        buffer.resize(bytes, 0);
        let at = ReadAt {
            region: request.region(),
            offset_bytes: request.offset_bytes(),
            gpa: request.gpa(),
            urgency: request.urgency(),
        };
        // A panic of the source is caught and reported as a failure.
        let read = catch_unwind(AssertUnwindSafe(|| self.source.read(at, buffer)));
        match read {
            Ok(Ok(Filled::Bytes)) => {
                *buffer = request.complete_buffer(std::mem::take(buffer));
            }
            Ok(Ok(Filled::Zero)) => request.complete(Content::Zero),
            Ok(Ok(Filled::Poisoned)) => request.complete(Content::Poisoned),
            Ok(Err(error)) => request.fail(error),
            Err(panic) => request.fail(SourceError::Panicked {
                message: message_of(&*panic),
            }),
        }
    }

    /// Has a thread look for a request. Not under the lock.
    fn call(self: &Arc<Self>, call: Option<Call>) {
        match call {
            None => {}
            Some(Call::Wake(kind)) => self.place(kind).notify_one(),
            Some(Call::Start(kind)) => {
                if let Err(error) = self.start(kind) {
                    // The first thread of a pool is there: the request waits for it.
                    log_limited!(
                        warn,
                        error = &error as &dyn std::error::Error,
                        "no further thread to read with"
                    );
                }
            }
        }
    }

    /// Starts a thread that was counted.
    fn start(self: &Arc<Self>, kind: Kind) -> Result<(), ServeError> {
        let name = match kind {
            Kind::Urgent => "pt-urgent",
            Kind::Shared => "pt-shared",
        };
        let its = Arc::clone(self);
        let thread = Builder::new().name(name.into());
        let started = thread.spawn(move || its.work(kind));
        started.map(drop).map_err(|source| {
            self.lock().queues.not_started(kind);
            ServeError::Thread {
                name: name.into(),
                source,
            }
        })
    }
}

impl Pool {
    /// Starts the first thread of each kind.
    ///
    /// # Errors
    /// [`ServeError::NoReaders`] without a thread for bulk requests, [`ServeError::Thread`].
    pub fn new(
        source: impl BlockingSource + 'static,
        config: PoolConfig,
    ) -> Result<Arc<Self>, ServeError> {
        if config.shared_threads == 0 {
            return Err(ServeError::NoReaders);
        }
        let shared = Arc::new(Shared {
            source: Box::new(source),
            state: Mutex::new(State {
                queues: Queues::new(config),
                is_over: false,
            }),
            urgent: Condvar::new(),
            any: Condvar::new(),
        });
        // Dropping it ends the thread that was started, if the other one cannot be.
        let pool = Self { shared };
        for kind in [Kind::Urgent, Kind::Shared] {
            let may_be = pool.shared.lock().queues.start(kind);
            if may_be {
                pool.shared.start(kind)?;
            }
        }
        Ok(Arc::new(pool))
    }
}

impl Source for Pool {
    fn submit(&self, request: Request) {
        let urgency = request.urgency();
        let call = self.shared.lock().queues.push(request, urgency);
        self.shared.call(call);
    }

    fn fill_now(&self, at: ReadAt, room: &mut Room<'_>) -> Option<Filled> {
        self.shared.source.fill_now(at, room)
    }

    fn mapped_now(&self, at: ReadAt, bytes: u64) -> Option<HostRange> {
        self.shared.source.mapped_now(at, bytes)
    }

    fn cancel(&self, region: RegionId, id: RequestId) {
        let is_it = |request: &Request| request.region() == region && request.id() == id;
        let cancelled = self.shared.lock().queues.remove(is_it);
        // Dropping a request answers it, which must not happen under the lock.
        drop(cancelled);
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.is_over = true;
        let waiting = state.queues.clear();
        drop(state);
        self.shared.urgent.notify_all();
        self.shared.any.notify_all();
        drop(waiting);
    }
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").finish_non_exhaustive()
    }
}
