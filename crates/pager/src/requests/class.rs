//! The requests of one urgency that wait, and the limit of those in flight.

use std::collections::VecDeque;
use std::time::Instant;

use super::Wanted;

/// What was asked for, with its failures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Job {
    pub(crate) wanted: Wanted,
    /// The number of failures.
    pub(super) failures: u32,
    /// The end of its pause after a failure.
    pub(super) not_before: Option<Instant>,
    /// [`Requests::bulk_epoch`](super::Requests) when it was made.
    pub(super) bulk_epoch: u64,
}

/// One class of requests.
#[derive(Debug, Default)]
pub(super) struct Class {
    pub(super) waiting: VecDeque<Job>,
    pub(super) waiting_pages: u64,
    pub(super) in_flight_pages: u64,
}

impl Class {
    pub(super) fn push_back(&mut self, job: Job) {
        self.waiting_pages += job.wanted.pages.count();
        self.waiting.push_back(job);
    }

    /// Which page of a bulk request has failed is unknown. Halves use up no attempt of the others.
    pub(super) fn push_halves(&mut self, job: Job) {
        let pages = job.wanted.pages;
        let (head, tail) = pages.split_at(pages.count() / 2);
        for pages in [head, tail] {
            let wanted = Wanted { pages, fault: None };
            self.push_back(Job { wanted, ..job });
        }
    }

    /// The first job that may be submitted now and fits `limit_pages`.
    pub(super) fn take(&mut self, now: Instant, limit_pages: u64) -> Option<Job> {
        let ready = |job: &Job| job.not_before.is_none_or(|at| at <= now);
        let index = self.waiting.iter().position(ready)?;
        let pages = self.waiting.get(index)?.wanted.pages.count();
        let fits = self.in_flight_pages.saturating_add(pages) <= limit_pages;
        if !fits && self.in_flight_pages > 0 {
            return None;
        }
        let job = self.waiting.remove(index)?;
        self.waiting_pages -= pages;
        self.in_flight_pages += pages;
        Some(job)
    }

    /// Whether a job could be submitted if the limit permitted it.
    pub(super) fn is_ready(&self, now: Instant) -> bool {
        let ready = |job: &Job| job.not_before.is_none_or(|at| at <= now);
        self.waiting.iter().any(ready)
    }
}
