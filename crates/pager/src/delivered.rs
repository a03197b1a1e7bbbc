//! Content that sources have delivered, for the threads that serve the pager's descriptor
//! ([`InstalledBy::Serving`](crate::InstalledBy)).
//!
//! Until its content is installed a request stays in flight, so that the limits of its region bound what waits here. (What a
//! suspend or the end of prefetch takes out of flight waits beside it, for one turn of a thread that serves.)

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use pagetide_memory::{PageIndex, Urgency};

use crate::fault::RegionId;
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

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.load(Ordering::Acquire) == 0
    }

    /// Adds content that is lent, as a copy. Returns the request if there is no memory for one.
    pub(crate) fn push(&self, request: Request, content: Content<'_>) -> Result<(), Request> {
        let content = match content {
            Content::Bytes(bytes) => {
                let mut buffer = self.spare();
                buffer.clear();
                if buffer.try_reserve_exact(bytes.len()).is_err() {
                    return Err(request);
                }
                buffer.extend_from_slice(bytes);
                Owned::Bytes(buffer)
            }
            Content::Zero => Owned::Zero,
            Content::Poisoned => Owned::Poisoned,
        };
        self.add(request, content);
        Ok(())
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

    /// The delivery that has a page of a region.
    pub(crate) fn take_with(&self, region: RegionId, page: PageIndex) -> Option<Delivery> {
        if self.is_empty() {
            return None;
        }
        let has = |delivery: &Delivery| {
            delivery.request.region() == region && delivery.request.pages().contains(page)
        };
        let mut queues = self.lock();
        let Queues { urgent, bulk, .. } = &mut *queues;
        let taken = [urgent, bulk].into_iter().find_map(|queue| {
            let index = queue.iter().position(has)?;
            queue.remove(index)
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

#[cfg(test)]
mod tests {
    use std::sync::Weak;
    use std::time::Instant;

    use pagetide_memory::{GuestAddress, PageRange};

    use super::*;
    use crate::Pager;
    use crate::source::RequestId;

    fn request(region: usize, page: u64, urgency: Urgency) -> Request {
        let none: Weak<Pager> = Weak::new();
        Request {
            answers: none,
            region: RegionId(region),
            id: RequestId(page),
            pages: PageRange::new(PageIndex(page), 2),
            urgency,
            deadline: Instant::now(),
            gpa: GuestAddress(0),
            page_shift: 12,
            replaced: 0,
            is_answered: true,
        }
    }

    fn page_of(delivery: Option<Delivery>) -> Option<u64> {
        Some(delivery?.request.pages().first().0)
    }

    #[test]
    fn urgent_deliveries_come_first_and_bulk_ones_only_if_permitted() {
        let it = Deliveries::default();
        for (page, urgency) in [(0, Urgency::Bulk), (2, Urgency::Urgent), (4, Urgency::Bulk)] {
            it.push(request(1, page, urgency), Content::Zero).unwrap();
        }
        assert_eq!(page_of(it.take(Urgency::Urgent)), Some(2));
        assert_eq!(page_of(it.take(Urgency::Urgent)), None);
        assert!(!it.is_empty());
        assert_eq!(page_of(it.take(Urgency::Bulk)), Some(0));
        assert_eq!(page_of(it.take(Urgency::Bulk)), Some(4));
        assert!(it.is_empty());
    }

    #[test]
    fn a_delivery_is_found_by_its_region_and_page() {
        let it = Deliveries::default();
        for (region, page) in [(1, 0), (2, 0), (1, 4)] {
            let pushed = it.push(request(region, page, Urgency::Bulk), Content::Zero);
            pushed.unwrap();
        }
        let take = |page| page_of(it.take_with(RegionId(1), PageIndex(page)));
        assert_eq!(
            [take(2), take(5), take(5), take(1)],
            [None, Some(4), None, Some(0)]
        );
        assert!(it.take_with(RegionId(2), PageIndex(0)).is_some());
        assert!(it.is_empty());
    }

    /// A source's thread needs no new memory for each answer, and no content is lost on the way.
    #[test]
    fn buffers_go_round() {
        let it = Deliveries::default();
        let buffer = vec![7; 8192];
        let address = buffer.as_ptr();
        let next = it.push_buffer(request(1, 0, Urgency::Bulk), buffer);
        assert!(next.is_empty());
        let delivery = it.take(Urgency::Bulk).unwrap();
        assert_eq!(delivery.content(), Content::Bytes(&[7; 8192]));
        it.recycle(delivery);
        let lent = Content::Bytes(&[8; 100]);
        it.push(request(1, 2, Urgency::Bulk), lent).unwrap();
        let delivery = it.take(Urgency::Bulk).unwrap();
        assert_eq!(delivery.content(), lent);
        it.recycle(delivery);
        let next = it.push_buffer(request(1, 4, Urgency::Bulk), Vec::new());
        assert_eq!(next.as_ptr(), address);
    }
}
