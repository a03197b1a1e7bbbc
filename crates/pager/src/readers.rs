//! The threads that serve userfaultfds.

use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};

use pagetide_uapi::userfaultfd::{Event, EventBuffer};
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;

use crate::counters::Counters;
use crate::error::{Failure, ReaderError, SpawnError, message_of};
use crate::pager::Pager;
use crate::resolver::Worker;

/// What epoll reports for the descriptor that ends the threads; userfaultfds are reported by index.
const STOP: u64 = u64::MAX;

/// How many descriptors one wait reports at most.
const READY_AT_ONCE: usize = 64;

/// How a pager's userfaultfds are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReaderConfig {
    /// How many threads, at least one. Each serves all userfaultfds.
    pub threads: usize,
    /// How many messages a thread takes with one read at most. A thread resolves what it took one
    /// by one, so many messages at a time save reads but keep other readers from helping.
    pub messages_per_read: usize,
}

impl ReaderConfig {
    /// Settings for `threads` readers: all that is there for a single one, less for many.
    pub fn new(threads: usize) -> Self {
        Self {
            threads,
            messages_per_read: (64 / threads.max(1)).max(4),
        }
    }
}

/// Running reader threads. Dropping them stops them.
#[derive(Debug)]
pub struct Readers {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    pager: Arc<Pager>,
    stopping: AtomicBool,
    /// Readable from when the threads are to end.
    stop: OwnedFd,
    /// The sum over the threads that have ended.
    counted: Mutex<Counters>,
}

impl Shared {
    fn lock_counted(&self) -> MutexGuard<'_, Counters> {
        self.counted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Readers {
    /// Starts reader threads for all of the pager's userfaultfds.
    ///
    /// When one of them fails, that is recorded ([`Pager::failure`]), the pager is stopped and its
    /// callback called; the other threads go on serving until they are stopped.
    pub fn spawn(pager: &Arc<Pager>, config: ReaderConfig) -> Result<Self, SpawnError> {
        if config.threads == 0 {
            return Err(SpawnError::NoReaders);
        }
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(SpawnError::Descriptor)?;
        let pager = Arc::clone(pager);
        let shared = Arc::new(Shared {
            pager,
            stopping: AtomicBool::new(false),
            counted: Mutex::default(),
            stop,
        });
        // Should a later thread not start, dropping this stops those that did.
        let mut readers = Self {
            shared,
            threads: Vec::with_capacity(config.threads),
        };
        for index in 0..config.threads {
            let reader = Reader::new(&readers.shared, config).map_err(SpawnError::Descriptor)?;
            let thread = Builder::new()
                .name(format!("pt-reader-{index}"))
                .spawn(move || reader.run())
                .map_err(|source| SpawnError::Thread { index, source })?;
            readers.threads.push(thread);
        }
        Ok(readers)
    }

    /// Ends the threads, after the faults that they are resolving. Returns what they counted, which
    /// is also added to [`Pager::counted`]. An error is the pager's first failure.
    pub fn stop(mut self) -> Result<Counters, Failure> {
        self.end();
        match self.shared.pager.failure() {
            Some(failure) => Err(failure.clone()),
            None => Ok(*self.shared.lock_counted()),
        }
    }

    fn end(&mut self) {
        self.shared.stopping.store(true, Ordering::Release);
        // Readable for good: nobody reads it.
        if let Err(errno) = rustix::io::write(&self.shared.stop, &1_u64.to_ne_bytes()) {
            tracing::error!(%errno, "the readers' eventfd");
        }
        for thread in self.threads.drain(..) {
            // A panic was caught in the thread and recorded.
            let _ = thread.join();
        }
    }
}

impl Drop for Readers {
    fn drop(&mut self) {
        self.end();
    }
}

/// One thread's descriptors and buffers.
struct Reader {
    shared: Arc<Shared>,
    epoll: OwnedFd,
    buffer: EventBuffer,
}

impl Reader {
    fn new(shared: &Arc<Shared>, config: ReaderConfig) -> Result<Self, Errno> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        epoll::add(
            &epoll,
            &shared.stop,
            EventData::new_u64(STOP),
            EventFlags::IN,
        )?;
        for (index, uffd) in shared.pager.uffds().iter().enumerate() {
            // Exclusive: a fault wakes one reader, not all of them for the same message.
            let flags = EventFlags::IN | EventFlags::EXCLUSIVE;
            epoll::add(&epoll, uffd, EventData::new_u64(index as u64), flags)?;
        }
        let buffer = EventBuffer::new(config.messages_per_read);
        Ok(Self {
            shared: Arc::clone(shared),
            epoll,
            buffer,
        })
    }

    fn run(mut self) {
        let pager = Arc::clone(&self.shared.pager);
        let mut worker = Worker::new();
        // The worker holds counters and a buffer: whatever a panic leaves in them can be counted.
        let result = catch_unwind(AssertUnwindSafe(|| self.serve(&pager, &mut worker)));
        let failed = match result {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(error),
            Err(panic) => Some(ReaderError::Panicked {
                message: message_of(&*panic),
            }),
        };
        pager.count(&worker.counters);
        self.shared.lock_counted().add(&worker.counters);
        if let Some(error) = failed {
            pager.fail(error);
        }
    }

    /// Serves until told to stop. A userfaultfd is read until it has no more messages, and only
    /// then waited for; those with more messages take turns.
    fn serve(&mut self, pager: &Pager, worker: &mut Worker) -> Result<(), ReaderError> {
        let mut ready: Vec<usize> = Vec::with_capacity(READY_AT_ONCE);
        let mut events = Vec::with_capacity(READY_AT_ONCE);
        loop {
            let mut next = 0;
            while let Some(&index) = ready.get(next) {
                if self.shared.stopping.load(Ordering::Acquire) {
                    return Ok(());
                }
                if self.serve_one(pager, worker, index)? {
                    next += 1;
                } else {
                    ready.swap_remove(next);
                }
                if next == ready.len() {
                    next = 0;
                }
            }

            worker.counters.sleeps += 1;
            match epoll::wait(
                &self.epoll,
                rustix::buffer::spare_capacity(&mut events),
                None,
            ) {
                Ok(_) => {}
                Err(Errno::INTR) => continue,
                Err(errno) => return Err(ReaderError::Wait(errno)),
            }
            for event in events.drain(..) {
                match event.data.u64() {
                    STOP => return Ok(()),
                    index => ready.extend(usize::try_from(index)),
                }
            }
        }
    }

    /// Resolves what one read of a userfaultfd gives. Returns whether there may be more: a read
    /// that did not fill the buffer took all there was, and asking again would be a system call
    /// per fault for nothing. What comes later, epoll tells.
    fn serve_one(
        &mut self,
        pager: &Pager,
        worker: &mut Worker,
        index: usize,
    ) -> Result<bool, ReaderError> {
        let Some(uffd) = pager.uffds().get(index) else {
            return Ok(false);
        };
        worker.counters.reads += 1;
        let capacity = self.buffer.capacity();
        let events = uffd
            .read_events(&mut self.buffer)
            .map_err(ReaderError::Read)?;
        let messages = events.len();
        worker.counters.empty_reads += u64::from(messages == 0);
        for event in events {
            let Event::PageFault(message) = event else {
                return Err(ReaderError::UnexpectedEvent { event });
            };
            worker.counters.messages += 1;
            let Some(fault) = pager.fault_of_message(&message) else {
                let address = usize::try_from(message.address).unwrap_or(usize::MAX);
                let address = pagetide_memory::HostAddress(address);
                return Err(ReaderError::Outside { address });
            };
            pager
                .resolve(worker, &fault)
                .map_err(ReaderError::Resolve)?;
        }
        Ok(messages == capacity)
    }
}
