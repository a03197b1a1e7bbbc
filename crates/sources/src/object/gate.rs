//! How many requests are in flight: urgent ones never wait for bulk ones.

use std::sync::Arc;

use pagetide_memory::Urgency;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Places for requests. Bulk requests use only the shared ones, urgent requests use both kinds: an
/// urgent request that has to wait waits for urgent ones.
#[derive(Debug)]
pub(super) struct Gate {
    shared: Arc<Semaphore>,
    reserved: Arc<Semaphore>,
}

/// A place for one request, which is free again when this is dropped.
pub(super) type Place = Option<OwnedSemaphorePermit>;

impl Gate {
    /// For `total` requests, of which `bulk` may be bulk.
    pub(super) fn new(total: usize, bulk: usize) -> Self {
        Self {
            shared: Arc::new(Semaphore::new(bulk)),
            reserved: Arc::new(Semaphore::new(total - bulk)),
        }
    }

    /// Waits for a place.
    pub(super) async fn enter(&self, urgency: Urgency) -> Place {
        if let Some(place) = self.enter_now(urgency) {
            return Some(place);
        }
        let shared = Arc::clone(&self.shared).acquire_owned();
        // A semaphore that is never closed always has a place in the end.
        match urgency {
            Urgency::Bulk => shared.await.ok(),
            Urgency::Urgent => tokio::select! {
                place = Arc::clone(&self.reserved).acquire_owned() => place.ok(),
                place = shared => place.ok(),
            },
        }
    }

    /// A place if there is one now.
    pub(super) fn enter_now(&self, urgency: Urgency) -> Place {
        let reserved = match urgency {
            Urgency::Bulk => None,
            Urgency::Urgent => Arc::clone(&self.reserved).try_acquire_owned().ok(),
        };
        reserved.or_else(|| Arc::clone(&self.shared).try_acquire_owned().ok())
    }
}
