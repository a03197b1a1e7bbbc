//! Adapts sources that block, by a pool of threads.

mod queues;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::Builder;

use pagetide_memory::HostRange;

use crate::error::{ServeError, message_of};
use crate::fault::RegionId;
use crate::log_limit::log_limited;
use crate::source::{
    Content, Filled, Helper, ReadAt, Request, RequestId, Room, Source, SourceError,
};
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

/// The most threads of a [`Pool`]. One of each kind is there while the pool is attended, and others are started when a
/// request finds no thread that is free.
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
/// Its first threads are there while it is attended ([`Pool::attend`]; one that [`Pool::new`] makes is always). Further
/// threads are started when a request finds none that is free, by the thread that submits it, whose CPU affinity and scheduling
/// policy they have.
///
/// Dropping it fails the waiting requests. Its threads end by themselves after their current reads, so
/// a read that hangs does not block the drop.
pub struct Pool {
    shared: Arc<Shared>,
}

/// What keeps the threads of a [`Pool`] there: a source that reads by them.
pub struct Attendance(Arc<Pool>);

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
    /// Without them, threads that find no request end.
    attendances: usize,
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

    /// The next request for a thread, which begins. `None` has the thread end: the pool was dropped, or nothing waits and
    /// nobody attends the pool.
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
                state.queues.end(kind);
                return None;
            }
            if let Some(taken) = state.queues.pop(kind) {
                return Some(taken);
            }
            if state.attendances == 0 {
                state.queues.end(kind);
                return None;
            }
            state.queues.sleep(kind);
            let woken = self.place(kind).wait(state);
            state = woken.unwrap_or_else(PoisonError::into_inner);
            state.queues.leave(kind);
        }
    }

    /// Has all threads see that they may end.
    fn wake_all(&self) {
        self.urgent.notify_all();
        self.any.notify_all();
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
                    // The request waits for a thread that there is.
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
            let call = self.lock().queues.not_started(kind);
            // No thread is started for a start that failed.
            self.call(call);
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
        let pool = Self::at_rest(source, config)?;
        // Not given back: it ends with the pool.
        pool.begin()?;
        Ok(pool)
    }

    /// A pool that has no threads until it is attended.
    ///
    /// # Errors
    /// [`ServeError::NoReaders`].
    pub fn at_rest(
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
                attendances: 0,
                is_over: false,
            }),
            urgent: Condvar::new(),
            any: Condvar::new(),
        });
        Ok(Arc::new(Self { shared }))
    }

    /// Has the threads there until what it returns is dropped. A thread in a read that hangs is one of them, however often
    /// the pool was attended.
    ///
    /// # Errors
    /// [`ServeError::Thread`], if there is no thread of a kind and none can be started.
    pub fn attend(self: &Arc<Self>) -> Result<Arc<Attendance>, ServeError> {
        // Given back if a thread cannot be started.
        let attendance = Arc::new(Attendance(Arc::clone(self)));
        self.begin()?;
        Ok(attendance)
    }

    fn begin(&self) -> Result<(), ServeError> {
        self.shared.lock().attendances += 1;
        for kind in [Kind::Urgent, Kind::Shared] {
            let is_first = self.shared.lock().queues.start_first(kind);
            if is_first {
                self.shared.start(kind)?;
            }
        }
        Ok(())
    }
}

impl Source for Attendance {
    fn submit(&self, request: Request) {
        self.0.submit(request);
    }

    fn fill_now(&self, at: ReadAt, room: &mut Room<'_>) -> Option<Filled> {
        self.0.fill_now(at, room)
    }

    fn mapped_now(&self, at: ReadAt, bytes: u64) -> Option<HostRange> {
        self.0.mapped_now(at, bytes)
    }

    fn help(&self, helper: &mut Helper<'_>) {
        self.0.help(helper);
    }

    fn cancel(&self, region: RegionId, id: RequestId) {
        self.0.cancel(region, id);
    }
}

impl Drop for Attendance {
    fn drop(&mut self) {
        let Pool { shared } = &*self.0;
        let mut state = shared.lock();
        state.attendances -= 1;
        let is_last = state.attendances == 0;
        drop(state);
        if is_last {
            shared.wake_all();
        }
    }
}

impl std::fmt::Debug for Attendance {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Attendance").finish_non_exhaustive()
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
        self.shared.wake_all();
        drop(waiting);
    }
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").finish_non_exhaustive()
    }
}
