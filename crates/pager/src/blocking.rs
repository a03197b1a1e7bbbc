//! Adapts sources that block, by a pool of threads.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};

use pagetide_memory::{HostRange, Urgency};

use crate::error::{ServeError, message_of};
use crate::fault::RegionId;
use crate::source::{Content, Filled, ReadAt, Request, RequestId, Room, Source, SourceError};

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

/// The number of threads of a [`Pool`].
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
    _threads: Vec<JoinHandle<()>>,
}

struct Shared {
    source: Box<dyn BlockingSource>,
    queues: Mutex<Queues>,
    more: Condvar,
}

#[derive(Default)]
struct Queues {
    urgent: VecDeque<Request>,
    bulk: VecDeque<Request>,
    is_over: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queues> {
        // No code panics under the lock.
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next request for a thread; `None` after the pool was dropped.
    fn take(&self, least: Urgency) -> Option<Request> {
        let mut queues = self.lock();
        loop {
            if queues.is_over {
                return None;
            }
            if let Some(request) = queues.urgent.pop_front() {
                return Some(request);
            }
            if least == Urgency::Bulk
                && let Some(request) = queues.bulk.pop_front()
            {
                return Some(request);
            }
            queues = self
                .more
                .wait(queues)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn work(&self, least: Urgency) {
        let mut buffer = Vec::new();
        while let Some(request) = self.take(least) {
            let Ok(bytes) = usize::try_from(request.bytes()) else {
                continue;
            };
            if buffer.len() < bytes && buffer.try_reserve_exact(bytes - buffer.len()).is_err() {
                // Dropping the request fails it.
                continue;
            }
            buffer.resize(bytes, 0);
            let at = ReadAt {
                region: request.region(),
                offset_bytes: request.offset_bytes(),
                gpa: request.gpa(),
                urgency: request.urgency(),
            };
            // A panic of the source is caught and reported as a failure.
            let read = catch_unwind(AssertUnwindSafe(|| self.source.read(at, &mut buffer)));
            match read {
                Ok(Ok(Filled::Bytes)) => {
                    buffer = request.complete_buffer(std::mem::take(&mut buffer));
                }
                Ok(Ok(Filled::Zero)) => request.complete(Content::Zero),
                Ok(Ok(Filled::Poisoned)) => request.complete(Content::Poisoned),
                Ok(Err(error)) => request.fail(error),
                Err(panic) => request.fail(SourceError::Panicked {
                    message: message_of(&*panic),
                }),
            }
        }
    }
}

impl Pool {
    /// Starts the threads.
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
            queues: Mutex::default(),
            more: Condvar::new(),
        });
        let mut pool = Self {
            shared,
            _threads: Vec::new(),
        };
        let urgent = (0..config.urgent_threads).map(|index| (index, Urgency::Urgent));
        let any = (0..config.shared_threads).map(|index| (index, Urgency::Bulk));
        for (index, least) in urgent.chain(any) {
            let class = match least {
                Urgency::Urgent => "urgent",
                Urgency::Bulk => "shared",
            };
            let name = format!("pt-{class}-{index}");
            let its = Arc::clone(&pool.shared);
            let thread = Builder::new()
                .name(name.clone())
                .spawn(move || its.work(least))
                .map_err(|source| ServeError::Thread { name, source })?;
            pool._threads.push(thread);
        }
        Ok(Arc::new(pool))
    }
}

impl Source for Pool {
    fn submit(&self, request: Request) {
        let mut queues = self.shared.lock();
        match request.urgency() {
            Urgency::Urgent => queues.urgent.push_back(request),
            Urgency::Bulk => queues.bulk.push_back(request),
        }
        drop(queues);
        // All threads, because a single notification might wake a thread that does not serve this
        // class.
        self.shared.more.notify_all();
    }

    fn fill_now(&self, at: ReadAt, room: &mut Room<'_>) -> Option<Filled> {
        self.shared.source.fill_now(at, room)
    }

    fn mapped_now(&self, at: ReadAt, bytes: u64) -> Option<HostRange> {
        self.shared.source.mapped_now(at, bytes)
    }

    fn cancel(&self, region: RegionId, id: RequestId) {
        let mut queues = self.shared.lock();
        let is_other = |request: &Request| request.region() != region || request.id() != id;
        let mut cancelled = Vec::new();
        let Queues { urgent, bulk, .. } = &mut *queues;
        for queue in [urgent, bulk] {
            if let Some(index) = queue.iter().position(|request| !is_other(request)) {
                cancelled.extend(queue.remove(index));
            }
        }
        // Dropping a request answers it, which must not happen under the lock.
        drop(queues);
        drop(cancelled);
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let mut queues = self.shared.lock();
        queues.is_over = true;
        let waiting: Vec<_> = queues.urgent.drain(..).collect();
        let bulk: Vec<_> = queues.bulk.drain(..).collect();
        drop(queues);
        self.shared.more.notify_all();
        drop((waiting, bulk));
    }
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").finish_non_exhaustive()
    }
}
