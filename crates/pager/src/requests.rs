//! The requests of one region: which are made to its source, and in which order.
//!
//! A pure state machine. It performs no I/O, takes no lock and reads no clock: each operation receives
//! the time and returns the actions. [`crate::missing`] has it beside the pages that are asked for, and decides what
//! a failure means for them; [`crate::dispatch`] performs the actions.
//!
//! Two rules always hold, and a test of this file fails if one of them is broken:
//!
//! - **Urgent passes bulk.** A bulk request is submitted only if no urgent request waits for
//!   submission, except for those that pause after a failure.
//! - **Bytes in flight are bounded**, each class by its own limit. A single request may be larger than
//!   its limit; then it is the only one of its class in flight.

mod breaker;
mod class;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use pagetide_memory::{PageRange, Urgency};

use crate::config::{InFlightLimits, RetryPolicy};
use crate::source::RequestId;
use breaker::Breaker;
use class::Class;
pub(crate) use class::{Job, JobId};

/// A request to submit now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Submission {
    pub(crate) id: RequestId,
    pub(crate) job: JobId,
    pub(crate) pages: PageRange,
    pub(crate) deadline: Instant,
}

#[derive(Clone, Copy, Debug)]
struct InFlight {
    job: Job,
    deadline: Instant,
    /// Its content has come, and waits for the thread that installs it: it is not late.
    is_here: bool,
}

/// The requests of one region.
#[derive(Debug)]
pub(crate) struct Requests {
    next_id: u64,
    next_job: u64,
    limits: InFlightLimits,
    page_bytes: u64,
    policy: RetryPolicy,
    urgent: Class,
    bulk: Class,
    /// In the order of their submission, and thus of their deadlines.
    in_flight: BTreeMap<RequestId, InFlight>,
    /// The jobs whose content has come and is being installed.
    answered: Vec<JobId>,
    is_stalled: bool,
    /// The owner has asked for the stall.
    is_suspended: bool,
    pub(crate) breaker: Breaker,
}

impl Requests {
    pub(crate) fn new(limits: InFlightLimits, policy: RetryPolicy, page_bytes: u64) -> Self {
        Self {
            next_id: 0,
            next_job: 0,
            limits,
            page_bytes,
            policy,
            urgent: Class::default(),
            bulk: Class::default(),
            in_flight: BTreeMap::new(),
            answered: Vec::new(),
            is_stalled: false,
            is_suspended: false,
            breaker: Breaker::default(),
        }
    }

    fn class(&mut self, urgency: Urgency) -> &mut Class {
        match urgency {
            Urgency::Urgent => &mut self.urgent,
            Urgency::Bulk => &mut self.bulk,
        }
    }

    pub(crate) fn policy(&self) -> &RetryPolicy {
        &self.policy
    }

    /// Adds a job.
    pub(crate) fn want(&mut self, pages: PageRange, urgency: Urgency) -> JobId {
        self.want_later(pages, urgency, 0, None)
    }

    /// Adds a job that takes the place of one that has failed.
    pub(crate) fn want_later(
        &mut self,
        pages: PageRange,
        urgency: Urgency,
        failures: u32,
        not_before: Option<Instant>,
    ) -> JobId {
        let id = JobId {
            number: self.next_job,
            urgency,
        };
        self.next_job += 1;
        self.again(Job {
            id,
            pages,
            failures,
            not_before,
        });
        id
    }

    /// Adds a job that was in flight.
    pub(crate) fn again(&mut self, job: Job) {
        self.class(job.id.urgency).push_back(job);
    }

    /// Whether a bulk request of `pages` pages would be submitted soon. Prefetch requests no more than
    /// that, so that its requests do not age in a queue.
    pub(crate) fn has_bulk_room(&self, pages: u64) -> bool {
        let asked = self.bulk.in_flight_pages + self.bulk.waiting_pages;
        !self.is_stalled && (asked == 0 || asked.saturating_add(pages) <= self.bulk_limit())
    }

    /// Whether bulk requests have no room for another reason than their number.
    pub(crate) fn is_bulk_held(&self) -> bool {
        self.is_stalled || self.breaker.is_open()
    }

    /// The pages that bulk requests may have in flight.
    fn bulk_limit(&self) -> u64 {
        match self.breaker.is_open() {
            // One at a time.
            true => 0,
            false => self.limits.bulk_bytes / self.page_bytes,
        }
    }

    /// The next request to submit, if any.
    pub(crate) fn next_submission(&mut self, now: Instant) -> Option<Submission> {
        if self.is_stalled {
            return None;
        }
        let urgent_limit = self.limits.urgent_bytes / self.page_bytes;
        let bulk_limit = self.bulk_limit();
        let is_held = self.breaker.until().is_some_and(|until| now < until);
        let job = match self.urgent.take(now, urgent_limit) {
            Some(job) => job,
            // Urgent requests wait for the limit: bulk requests must not occupy the source meanwhile.
            None if self.urgent.is_ready(now) || is_held => return None,
            None => self.bulk.take(now, bulk_limit)?,
        };
        let id = RequestId(self.next_id);
        self.next_id += 1;
        let deadline = later(now, self.policy.deadline);
        let is_here = false;
        let request = InFlight {
            job,
            deadline,
            is_here,
        };
        self.in_flight.insert(id, request);
        Some(Submission {
            id,
            job: job.id,
            pages: job.pages,
            deadline,
        })
    }

    /// Ends a request. `None` if it is not in flight: it was cancelled, or answered before.
    pub(crate) fn finish(&mut self, id: RequestId) -> Option<Job> {
        let job = self.in_flight.remove(&id)?.job;
        self.class(job.id.urgency).in_flight_pages -= job.pages.count();
        Some(job)
    }

    /// The content of a request has come, and is installed later.
    pub(crate) fn note_here(&mut self, id: RequestId) {
        if let Some(request) = self.in_flight.get_mut(&id) {
            request.is_here = true;
        }
    }

    /// The first request in flight whose content has not come.
    fn first_awaited(&self) -> Option<(RequestId, &InFlight)> {
        let mut requests = self.in_flight.iter();
        let awaited = requests.find(|(_, request)| !request.is_here);
        awaited.map(|(&id, request)| (id, request))
    }

    /// Ends a request whose content has come. Its job ends when [`Self::end`] is called.
    pub(crate) fn answer(&mut self, id: RequestId) -> Option<Job> {
        let job = self.finish(id)?;
        self.answered.push(job.id);
        Some(job)
    }

    /// Ends a job whose content was installed, or could not be. False if it was dropped meanwhile.
    pub(crate) fn end(&mut self, job: JobId) -> bool {
        let before = self.answered.len();
        self.answered.retain(|&other| other != job);
        self.answered.len() < before
    }

    /// Whether a job waits, is in flight, or is answered and has not ended.
    pub(crate) fn is_alive(&self, job: JobId) -> bool {
        let class = match job.urgency {
            Urgency::Urgent => &self.urgent,
            Urgency::Bulk => &self.bulk,
        };
        let flying = self.in_flight.values().map(|request| &request.job);
        let mut ids = class.waiting.iter().chain(flying).map(|job| job.id);
        self.answered.contains(&job) || ids.any(|id| id == job)
    }

    /// Gives bulk requests all of their attempts again.
    pub(crate) fn start_bulk_afresh(&mut self) {
        let flying = self.in_flight.values_mut().map(|request| &mut request.job);
        let flying = flying.filter(|job| job.id.urgency == Urgency::Bulk);
        for job in self.bulk.waiting.iter_mut().chain(flying) {
            (job.failures, job.not_before) = (0, None);
        }
    }

    /// The next request in flight whose deadline has passed.
    pub(crate) fn next_expired(&self, now: Instant) -> Option<RequestId> {
        let (id, first) = self.first_awaited()?;
        (first.deadline <= now).then_some(id)
    }

    /// The time of the next action without further input: a deadline, or the end of a pause. What could be
    /// submitted at `now`, and was not, waits for an answer and not for a time.
    pub(crate) fn next_deadline(&self, now: Instant) -> Option<Instant> {
        let pauses = |class: &Class| {
            let pauses = class.waiting.iter().filter_map(|job| job.not_before);
            pauses.filter(|at| *at > now).min()
        };
        let bulk = match self.breaker.until() {
            Some(_) if self.bulk.waiting.is_empty() || self.bulk.in_flight_pages > 0 => None,
            Some(until) if until > now => Some(until),
            _ => pauses(&self.bulk),
        };
        let waits = [pauses(&self.urgent), bulk].into_iter().flatten();
        let waits = (!self.is_stalled).then_some(waits).into_iter().flatten();
        let first = self.first_awaited();
        waits
            .chain(first.map(|(_, request)| request.deadline))
            .min()
    }

    pub(crate) fn is_stalled(&self) -> bool {
        self.is_stalled
    }

    /// Submits nothing more until [`Self::resume`].
    pub(crate) fn stall(&mut self) {
        self.is_stalled = true;
    }

    /// Resumes after a stall. Waiting requests are submitted at once, and all requests have all of
    /// their attempts again, including those in flight, which were made before as well and may be lost.
    pub(crate) fn resume(&mut self) {
        self.is_stalled = false;
        self.is_suspended = false;
        for request in self.in_flight.values_mut() {
            request.job.failures = 0;
        }
        for job in &mut self.urgent.waiting {
            (job.failures, job.not_before) = (0, None);
        }
        self.start_bulk_afresh();
    }

    /// Submits nothing more until [`Self::resume`], and returns every request in flight to the queue. That uses up
    /// no attempt. Returns their numbers.
    pub(crate) fn suspend(&mut self) -> Vec<RequestId> {
        self.is_suspended = true;
        self.is_stalled = true;
        self.recall()
    }

    pub(crate) fn is_suspended(&self) -> bool {
        self.is_suspended
    }

    /// Returns every request in flight to the queue, to be submitted again, as when the source is
    /// replaced. Returns their numbers.
    pub(crate) fn recall(&mut self) -> Vec<RequestId> {
        let ids: Vec<_> = self.in_flight.keys().copied().collect();
        for &id in &ids {
            if let Some(job) = self.finish(id) {
                self.again(Job {
                    failures: 0,
                    not_before: None,
                    ..job
                });
            }
        }
        ids
    }

    /// Takes all bulk jobs out that wait.
    pub(crate) fn take_waiting_bulk(&mut self) -> impl Iterator<Item = Job> + use<> {
        self.bulk.take_waiting().into_iter()
    }

    /// Drops all bulk jobs. Returns the requests in flight, which are to be cancelled.
    pub(crate) fn drop_bulk(&mut self) -> Vec<RequestId> {
        let is_bulk = |request: &InFlight| request.job.id.urgency == Urgency::Bulk;
        let flying = self
            .in_flight
            .iter()
            .filter(|(_, request)| is_bulk(request));
        let ids: Vec<_> = flying.map(|(&id, _)| id).collect();
        self.in_flight.retain(|_, request| !is_bulk(request));
        self.answered.retain(|job| job.urgency != Urgency::Bulk);
        self.bulk = Class::default();
        ids
    }

    /// Drops all jobs. Returns the requests in flight, which are to be cancelled.
    pub(crate) fn clear(&mut self) -> Vec<RequestId> {
        let ids = std::mem::take(&mut self.in_flight).into_keys().collect();
        self.urgent = Class::default();
        self.bulk = Class::default();
        self.answered.clear();
        ids
    }

    /// The number of bytes in flight.
    pub(crate) fn in_flight_bytes(&self) -> u64 {
        (self.urgent.in_flight_pages + self.bulk.in_flight_pages) * self.page_bytes
    }

    /// The number of requests that wait for submission.
    pub(crate) fn waiting(&self) -> usize {
        self.urgent.waiting.len() + self.bulk.waiting.len()
    }
}

/// `after` from now on, capped at a time in the far future.
pub(crate) fn later(now: Instant, after: Duration) -> Instant {
    const FAR: Duration = Duration::from_secs(365 * 86_400);
    now.checked_add(after).unwrap_or(now + FAR)
}

impl RetryPolicy {
    /// The pause after a request has failed `failures` times (at least once): doubled each time, up to
    /// the longest pause.
    pub(crate) fn backoff(&self, failures: u32) -> Duration {
        let doublings = failures.saturating_sub(1).min(31);
        self.first_backoff
            .saturating_mul(1 << doublings)
            .min(self.longest_backoff)
    }
}

#[cfg(test)]
#[path = "requests_tests.rs"]
pub(crate) mod tests;
