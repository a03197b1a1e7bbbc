//! A request for blocks, for which all readers of the blocks wait.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use pagetide_memory::Urgency;
use tokio::sync::watch;

use super::Shared;
use super::counters::Counting;
use super::failure::{Failure, Report};
use super::memory::Block;

/// A request for adjacent blocks. All readers of the blocks wait for it; it goes on without them.
#[derive(Debug)]
pub(super) struct Flight {
    pub(super) first: u64,
    pub(super) urgency: Urgency,
    /// Whether it has left the queue.
    pub(super) started: AtomicBool,
    outcome: watch::Sender<Option<Result<Vec<Block>, Failure>>>,
}

impl Flight {
    pub(super) fn new(first: u64, urgency: Urgency) -> Self {
        Self {
            first,
            urgency,
            started: AtomicBool::new(false),
            outcome: watch::Sender::new(None),
        }
    }

    /// Waits for the block at `index`.
    pub(super) async fn block(&self, index: u64) -> Result<Block, Failure> {
        let mut outcome = self.outcome.subscribe();
        // The sender is this flight's, so it is there.
        let outcome = outcome
            .wait_for(Option::is_some)
            .await
            .map_err(|_| ended())?;
        let blocks = outcome.as_ref().ok_or_else(ended)?;
        let blocks = blocks.as_ref().map_err(Failure::clone)?;
        let at = usize::try_from(index.saturating_sub(self.first)).unwrap_or(usize::MAX);
        blocks.get(at).map(Arc::clone).ok_or_else(missing_part)
    }
}

/// A flight's end.
pub(super) struct Landing {
    pub(super) shared: Arc<Shared>,
    pub(super) flight: Arc<Flight>,
    pub(super) blocks: u64,
}

impl Landing {
    pub(super) fn settle(&self, fetched: Result<Vec<Block>, Failure>) {
        let Self {
            shared,
            flight,
            blocks: number,
        } = self;
        let indices = flight.first..flight.first.saturating_add(*number);
        let mut blocks = shared.lock();
        if let Ok(fetched) = &fetched {
            for (index, block) in indices.clone().zip(fetched) {
                blocks.memory.insert(index, Arc::clone(block));
            }
        }
        for index in indices.clone() {
            let flying = blocks.flights.get(&index);
            if flying.is_some_and(|flying| Arc::ptr_eq(flying, flight)) {
                blocks.flights.remove(&index);
            }
        }
        drop(blocks);
        let kept = fetched
            .as_ref()
            .ok()
            .filter(|_| shared.disk.is_some())
            .cloned();
        flight.outcome.send_replace(Some(fetched));
        if let Some(disk) = &shared.disk {
            for (index, block) in indices.zip(kept.into_iter().flatten()) {
                if !disk.offer(index, block) {
                    Counting::add(&shared.remote.counting.disk_skipped, 1);
                }
            }
        }
    }
}

impl Drop for Landing {
    fn drop(&mut self) {
        if self.flight.outcome.borrow().is_none() {
            self.settle(Err(ended()));
        }
    }
}

pub(super) fn ended() -> Failure {
    Failure::Transient(Report::new("the request was ended"))
}

pub(super) fn missing_part() -> Failure {
    Failure::Permanent(Report::new(
        "an answer has fewer blocks than were requested",
    ))
}
