//! The jobs of one urgency that wait, and the limit of those in flight.

use std::collections::VecDeque;
use std::time::Instant;

use pagetide_memory::{PageRange, Urgency};

/// The number of a job, which an entry in the book of missing pages has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct JobId {
    pub(super) number: u64,
    pub(crate) urgency: Urgency,
}

/// Pages to be had from a source by one request, which is repeated when it fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Job {
    pub(crate) id: JobId,
    pub(crate) pages: PageRange,
    /// The number of failures.
    pub(crate) failures: u32,
    /// The end of its pause after a failure.
    pub(crate) not_before: Option<Instant>,
}

/// One class of jobs.
#[derive(Debug, Default)]
pub(super) struct Class {
    pub(super) waiting: VecDeque<Job>,
    pub(super) waiting_pages: u64,
    pub(super) in_flight_pages: u64,
}

impl Class {
    pub(super) fn push_back(&mut self, job: Job) {
        self.waiting_pages += job.pages.count();
        self.waiting.push_back(job);
    }

    /// The first job that may be submitted now and fits `limit_pages`.
    pub(super) fn take(&mut self, now: Instant, limit_pages: u64) -> Option<Job> {
        let ready = |job: &Job| job.not_before.is_none_or(|at| at <= now);
        let index = self.waiting.iter().position(ready)?;
        let pages = self.waiting.get(index)?.pages.count();
        let fits = self.in_flight_pages.saturating_add(pages) <= limit_pages;
        if !fits && self.in_flight_pages > 0 {
            return None;
        }
        let job = self.waiting.remove(index)?;
        self.waiting_pages -= pages;
        self.in_flight_pages += pages;
        Some(job)
    }

    /// Takes all jobs out that wait.
    pub(super) fn take_waiting(&mut self) -> VecDeque<Job> {
        self.waiting_pages = 0;
        std::mem::take(&mut self.waiting)
    }

    /// Whether a job could be submitted if the limit permitted it.
    pub(super) fn is_ready(&self, now: Instant) -> bool {
        let ready = |job: &Job| job.not_before.is_none_or(|at| at <= now);
        self.waiting.iter().any(ready)
    }
}
