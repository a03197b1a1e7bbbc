//! Content that sources have delivered, for the threads that serve the pager's descriptor
//! ([`InstalledBy::Serving`](crate::InstalledBy)).
//!
//! Until its content is installed a request stays in flight, so that the limits of its region bound what waits here.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use pagetide_memory::Urgency;

use crate::source::{Content, Request, Room};

/// Buffers that are kept for the answers to come.
const SPARE_BUFFERS: usize = 4;

/// Content that belongs to nobody else.
enum Owned {
    Bytes(Vec<u8>),
    Zero,
    Poisoned,
}

/// The content of a request's pages.
pub(crate) struct Delivery {
    pub(crate) request: Request,
    content: Owned,
}

impl Delivery {
    pub(crate) fn content(&self) -> Content<'_> {
        match &self.content {
            Owned::Bytes(bytes) => Content::Bytes(bytes),
            Owned::Zero => Content::Zero,
            Owned::Poisoned => Content::Poisoned,
        }
    }
}

/// What was delivered and is not installed yet.
#[derive(Default)]
pub(crate) struct Deliveries {
    queues: Mutex<Queues>,
    /// The deliveries of both queues: a thread that serves takes no lock for none.
    waiting: AtomicUsize,
}

#[derive(Default)]
struct Queues {
    urgent: VecDeque<Delivery>,
    bulk: VecDeque<Delivery>,
    spare: Vec<Vec<u8>>,
}

impl Deliveries {
    fn lock(&self) -> MutexGuard<'_, Queues> {
        // No code panics under the lock.
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.load(Ordering::Acquire) == 0
    }

    /// Adds content that is lent, as a copy.
    pub(crate) fn push(&self, request: Request, content: Content<'_>) {
        let content = match content {
            Content::Bytes(bytes) => {
                let mut buffer = self.spare();
                buffer.clear();
                buffer.extend_from_slice(bytes);
                Owned::Bytes(buffer)
            }
            Content::Zero => Owned::Zero,
            Content::Poisoned => Owned::Poisoned,
        };
        self.add(request, content);
    }

    /// Adds a buffer with all the content. Returns another for the next answer.
    pub(crate) fn push_buffer(&self, request: Request, buffer: Vec<u8>) -> Vec<u8> {
        self.add(request, Owned::Bytes(buffer));
        self.spare()
    }

    fn add(&self, request: Request, content: Owned) {
        let urgency = request.urgency();
        let delivery = Delivery { request, content };
        let mut queues = self.lock();
        match urgency {
            Urgency::Urgent => queues.urgent.push_back(delivery),
            Urgency::Bulk => queues.bulk.push_back(delivery),
        }
        self.waiting.fetch_add(1, Ordering::Release);
    }

    /// The next delivery: an urgent one, or, if there is none and `least` permits, one of prefetch.
    pub(crate) fn take(&self, least: Urgency) -> Option<Delivery> {
        if self.is_empty() {
            return None;
        }
        let mut queues = self.lock();
        let urgent = queues.urgent.pop_front();
        let taken = urgent.or_else(|| match least {
            Urgency::Urgent => None,
            Urgency::Bulk => queues.bulk.pop_front(),
        })?;
        self.waiting.fetch_sub(1, Ordering::Release);
        Some(taken)
    }

    fn spare(&self) -> Vec<u8> {
        self.lock().spare.pop().unwrap_or_default()
    }

    /// Keeps the buffer of content that was installed.
    pub(crate) fn recycle(&self, delivery: Delivery) {
        let Owned::Bytes(mut buffer) = delivery.content else {
            return;
        };
        Room::trim(&mut buffer);
        let mut queues = self.lock();
        if queues.spare.len() < SPARE_BUFFERS && buffer.capacity() > 0 {
            queues.spare.push(buffer);
        }
    }
}

impl std::fmt::Debug for Deliveries {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Deliveries")
            .field("waiting", &self.waiting)
            .finish_non_exhaustive()
    }
}
