//! The requests of one region: which are made to its source, in which order, and the reaction to
//! failures of the source.
//!
//! A pure state machine. It performs no I/O, takes no lock and reads no clock: each operation receives
//! the time and returns the actions. [`crate::dispatch`] performs them.
//!
//! Two rules always hold, and a test of this file fails if one of them is broken:
//!
//! - **Urgent passes bulk.** A bulk request is submitted only if no urgent request waits for
//!   submission, except for those that pause after a failure.
//! - **Bytes in flight are bounded**, each class by its own limit. A single request may be larger than
//!   its limit; then it is the only one of its class in flight.
//!
//! No thread waits for a bulk request, so its failure stalls nothing: it is halved down to the pages that
//! fail, and a page that fails as often as the policy allows is set aside. The same holds for content that the
//! memory does not take. A source that answers nothing may be unreachable, and memory that takes nothing may be
//! all that the host has, and then the pages are not to blame: after [`FAILURES_IN_A_ROW`], bulk requests are
//! held. One at a time is made, each after the longest pause, until the source answers, or the memory takes
//! content. What has failed meanwhile is set aside until then.

mod class;
mod hold;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use pagetide_memory::{PageIndex, PageRange, Urgency};

use crate::config::{InFlightLimits, RetryPolicy};
use crate::set_aside::SetAside;
use class::Class;
pub(crate) use class::Job;
use hold::{Cause, Hold, InARow};

/// The number of a request; unique in a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub(crate) u64);

/// Pages to be requested from a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Wanted {
    pub(crate) pages: PageRange,
    /// The page that a thread waits for; `None` for bulk requests.
    pub(crate) fault: Option<PageIndex>,
}

impl Wanted {
    pub(crate) fn urgency(&self) -> Urgency {
        if self.fault.is_some() {
            Urgency::Urgent
        } else {
            Urgency::Bulk
        }
    }
}

/// A request to submit now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Submission {
    pub(crate) id: RequestId,
    pub(crate) pages: PageRange,
    pub(crate) urgency: Urgency,
    pub(crate) deadline: Instant,
}

/// The actions after a failure.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct AfterFailure {
    /// Neighbours whose request is withdrawn: Absent again.
    pub(crate) withdraw: [Option<PageRange>; 2],
    /// The region has just stalled.
    pub(crate) stalled: bool,
    /// Pages that no bulk request asks for any more: Absent again, unless a thread waits for them.
    pub(crate) set_aside: Vec<PageRange>,
    /// Bulk requests were held just now.
    pub(crate) held: bool,
}

/// Why a request was not answered with content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Miss {
    /// The source failed, or did not answer in time.
    Failed,
    /// The content of one of several pages is lost. The source reports this for the whole request, so
    /// the pages are requested again in smaller requests.
    PoisonedAmongOthers,
    /// The source has answered a bulk request, and the memory did not take the content.
    NotInstalled {
        /// There may be no memory.
        is_lack: bool,
    },
}

/// So many failures of bulk requests in a row, without an answer of the source in between, mean that the source
/// may be unreachable. So many answers in a row that could not be installed mean that there is no memory.
const FAILURES_IN_A_ROW: u32 = 64;

#[derive(Clone, Copy, Debug)]
struct InFlight {
    job: Job,
    deadline: Instant,
}

/// The requests of one region.
#[derive(Debug)]
pub(crate) struct Requests {
    next_id: u64,
    limits: InFlightLimits,
    page_bytes: u64,
    policy: RetryPolicy,
    urgent: Class,
    bulk: Class,
    /// In the order of their submission, and thus of their deadlines.
    in_flight: BTreeMap<RequestId, InFlight>,
    is_stalled: bool,
    /// The owner has asked for the stall.
    is_suspended: bool,
    set_aside: SetAside,
    /// The failures of bulk requests since the source's last answer.
    silent: InARow,
    /// Content of bulk requests that could not be installed, since some could.
    not_installed: InARow,
    hold: Option<Hold>,
    /// Whether content that prefetch asked for could not be installed.
    has_not_installed: bool,
    /// How often all bulk requests were dropped.
    bulk_epoch: u64,
}

impl Requests {
    pub(crate) fn new(limits: InFlightLimits, policy: RetryPolicy, page_bytes: u64) -> Self {
        Self {
            next_id: 0,
            limits,
            page_bytes,
            policy,
            urgent: Class::default(),
            bulk: Class::default(),
            in_flight: BTreeMap::new(),
            is_stalled: false,
            is_suspended: false,
            set_aside: SetAside::default(),
            silent: InARow::default(),
            not_installed: InARow::default(),
            hold: None,
            has_not_installed: false,
            bulk_epoch: 0,
        }
    }

    fn class(&mut self, urgency: Urgency) -> &mut Class {
        match urgency {
            Urgency::Urgent => &mut self.urgent,
            Urgency::Bulk => &mut self.bulk,
        }
    }

    /// Adds pages that were made Requested, or whose request was made urgent.
    pub(crate) fn want(&mut self, wanted: Wanted) {
        let job = Job {
            wanted,
            failures: 0,
            not_before: None,
            bulk_epoch: self.bulk_epoch,
        };
        self.class(wanted.urgency()).push_back(job);
    }

    /// Whether a bulk request of `pages` pages would be submitted soon. Prefetch requests no more than
    /// that, so that its requests do not age in a queue.
    pub(crate) fn has_bulk_room(&self, pages: u64) -> bool {
        let asked = self.bulk.in_flight_pages + self.bulk.waiting_pages;
        let limit = match self.hold {
            Some(_) => 0,
            None => self.limits.bulk_bytes / self.page_bytes,
        };
        !self.is_stalled && (asked == 0 || asked.saturating_add(pages) <= limit)
    }

    /// The next request to submit, if any.
    pub(crate) fn next_submission(&mut self, now: Instant) -> Option<Submission> {
        if self.is_stalled {
            return None;
        }
        let urgent_limit = self.limits.urgent_bytes / self.page_bytes;
        let bulk_limit = match self.hold {
            // One at a time.
            Some(_) => 0,
            None => self.limits.bulk_bytes / self.page_bytes,
        };
        let is_held = self.hold.is_some_and(|hold| now < hold.until);
        let job = match self.urgent.take(now, urgent_limit) {
            Some(job) => job,
            // Urgent requests wait for the limit: bulk requests must not occupy the source meanwhile.
            None if self.urgent.is_ready(now) || is_held => return None,
            None => self.bulk.take(now, bulk_limit)?,
        };
        let id = RequestId(self.next_id);
        self.next_id += 1;
        let deadline = later(now, self.policy.deadline);
        self.in_flight.insert(id, InFlight { job, deadline });
        Some(Submission {
            id,
            pages: job.wanted.pages,
            urgency: job.wanted.urgency(),
            deadline,
        })
    }

    /// Ends a request that was answered with content, zeroes or poison. `None` if it is not in flight:
    /// it was cancelled, or answered before.
    pub(crate) fn finish(&mut self, id: RequestId) -> Option<Job> {
        self.take_in_flight(id)
    }

    /// Asks again for the pages of a finished bulk request, whose content could not be installed. If all bulk
    /// requests were dropped meanwhile, this one's pages are withdrawn as well.
    pub(crate) fn not_installed(&mut self, job: Job, is_lack: bool, now: Instant) -> AfterFailure {
        if job.bulk_epoch == self.bulk_epoch {
            return self.miss_bulk(job, Miss::NotInstalled { is_lack }, now);
        }
        AfterFailure {
            withdraw: [Some(job.wanted.pages), None],
            ..AfterFailure::default()
        }
    }

    /// Records that the memory has taken content of prefetch.
    pub(crate) fn installed(&mut self) {
        self.not_installed.end();
        self.end_hold_for(Cause::NoMemory);
    }

    /// Whether a request of this urgency for the page waits or is in flight.
    pub(crate) fn has(&self, page: PageIndex, urgency: Urgency) -> bool {
        let waiting = match urgency {
            Urgency::Urgent => &self.urgent.waiting,
            Urgency::Bulk => &self.bulk.waiting,
        };
        let in_flight = self.in_flight.values().map(|request| &request.job);
        waiting
            .iter()
            .chain(in_flight)
            .any(|job| job.wanted.urgency() == urgency && job.wanted.pages.contains(page))
    }

    /// Whether content that prefetch asked for could not be installed for the first time.
    pub(crate) fn is_first_not_installed(&mut self) -> bool {
        !std::mem::replace(&mut self.has_not_installed, true)
    }

    /// The pages of a request in flight.
    pub(crate) fn wanted_by(&self, id: RequestId) -> Option<Wanted> {
        Some(self.in_flight.get(&id)?.job.wanted)
    }

    /// Records that the source has answered: it is reachable.
    pub(crate) fn answered(&mut self) {
        self.silent.end();
        self.end_hold_for(Cause::Silence);
    }

    fn take_in_flight(&mut self, id: RequestId) -> Option<Job> {
        let job = self.in_flight.remove(&id)?.job;
        self.class(job.wanted.urgency()).in_flight_pages -= job.wanted.pages.count();
        Some(job)
    }

    /// Ends a request that was not answered with content. `None` if it is not in flight.
    pub(crate) fn miss(&mut self, id: RequestId, miss: Miss, now: Instant) -> Option<AfterFailure> {
        let job = self.take_in_flight(id)?;
        Some(match job.wanted.fault {
            Some(page) => self.miss_urgent(job, page, miss, now),
            None => self.miss_bulk(job, miss, now),
        })
    }

    fn miss_urgent(&mut self, job: Job, page: PageIndex, miss: Miss, now: Instant) -> AfterFailure {
        let mut after = AfterFailure::default();
        let failures = match miss {
            Miss::Failed => job.failures + 1,
            Miss::PoisonedAmongOthers | Miss::NotInstalled { .. } => job.failures,
        };
        if failures >= self.policy.attempts && !self.is_stalled {
            self.is_stalled = true;
            after.stalled = true;
        }
        // A stalled region starts afresh when it is resumed.
        let failures = if self.is_stalled { 0 } else { failures };
        let pages = job.wanted.pages;
        if pages.count() > 1 {
            // Only one page is urgent: a neighbour's failure must not affect this fault.
            let (before, rest) = pages.split_at(page.0.saturating_sub(pages.first().0));
            let (_, behind) = rest.split_at(1);
            after.withdraw = [before, behind].map(|some| (!some.is_empty()).then_some(some));
        }
        self.urgent.push_back(Job {
            wanted: Wanted {
                pages: PageRange::single(page),
                fault: Some(page),
            },
            failures,
            not_before: (failures > 0).then(|| later(now, self.policy.backoff(failures))),
            bulk_epoch: self.bulk_epoch,
        });
        after
    }

    fn miss_bulk(&mut self, mut job: Job, miss: Miss, now: Instant) -> AfterFailure {
        let mut after = AfterFailure::default();
        let pages = job.wanted.pages;
        let has_failed = miss != Miss::PoisonedAmongOthers && !self.is_stalled;
        let cause = Cause::of(miss).filter(|_| has_failed);
        if let Some(cause) = cause
            && let Some(hold) = &mut self.hold
        {
            // Otherwise it was in flight before.
            if hold.until <= now {
                hold.until = later(now, self.policy.longest_backoff);
                hold.failures = hold.failures.saturating_add(1);
            }
            if hold.cause == cause || pages.count() == 1 {
                self.bulk.push_back(job);
            } else {
                self.bulk.push_halves(job);
            }
            if hold.failures >= self.policy.attempts {
                // No answer may ever come: whoever waits for prefetch must not wait for ever.
                let given_up = std::mem::take(&mut self.bulk.waiting);
                self.bulk.waiting_pages = 0;
                after.set_aside = given_up.iter().map(|job| job.wanted.pages).collect();
                for &pages in &after.set_aside {
                    self.set_aside.insert(pages);
                    self.set_aside.doubt(pages);
                }
            }
            return after;
        }
        job.not_before = has_failed.then(|| later(now, self.policy.backoff(job.failures + 1)));
        if pages.count() > 1 {
            self.bulk.push_halves(job);
        } else {
            job.failures += u32::from(has_failed);
            if job.failures < self.policy.attempts {
                self.bulk.push_back(job);
            } else {
                self.set_aside.insert(pages);
                after.set_aside.push(pages);
            }
        }
        let Some(cause) = cause else {
            return after;
        };
        let in_a_row = match cause {
            Cause::Silence => &mut self.silent,
            Cause::NoMemory => &mut self.not_installed,
        };
        in_a_row.failures += 1;
        in_a_row.set_aside.extend(&after.set_aside);
        if in_a_row.failures >= FAILURES_IN_A_ROW {
            for pages in in_a_row.set_aside.drain(..) {
                self.set_aside.doubt(pages);
            }
            after.held = true;
            self.hold = Some(Hold {
                cause,
                until: later(now, self.policy.longest_backoff),
                failures: 0,
            });
            self.start_bulk_afresh();
        }
        after
    }

    fn end_hold_for(&mut self, cause: Cause) {
        if self.hold.is_none_or(|hold| hold.cause == cause) {
            self.hold = None;
            self.set_aside.reconsider();
        }
    }

    fn end_hold(&mut self) {
        self.hold = None;
        self.silent.end();
        self.not_installed.end();
        self.set_aside.reconsider();
    }

    /// Gives bulk requests all of their attempts again.
    fn start_bulk_afresh(&mut self) {
        let flying = self.in_flight.values_mut().map(|request| &mut request.job);
        let flying = flying.filter(|job| job.wanted.fault.is_none());
        for job in self.bulk.waiting.iter_mut().chain(flying) {
            (job.failures, job.not_before) = (0, None);
        }
    }

    /// The pages that bulk work leaves out.
    pub(crate) fn set_aside(&self) -> &SetAside {
        &self.set_aside
    }

    /// Asks for all pages again that were set aside, as when prefetch begins anew.
    pub(crate) fn forget_set_aside(&mut self) {
        // A hold of an earlier prefetch would give the first failure of this one all its weight.
        self.end_hold();
        self.set_aside.clear();
        self.has_not_installed = false;
    }

    /// Whether bulk requests are held, because the source answers nothing, or the memory takes nothing.
    pub(crate) fn is_held(&self) -> bool {
        self.hold.is_some()
    }

    /// The next request in flight whose deadline has passed.
    pub(crate) fn next_expired(&self, now: Instant) -> Option<RequestId> {
        let (&id, first) = self.in_flight.first_key_value()?;
        (first.deadline <= now).then_some(id)
    }

    /// The time of the next action without further input: a deadline, or the end of a pause. What could be
    /// submitted at `now`, and was not, waits for an answer and not for a time.
    pub(crate) fn next_deadline(&self, now: Instant) -> Option<Instant> {
        let pauses = |class: &Class| {
            let pauses = class.waiting.iter().filter_map(|job| job.not_before);
            pauses.filter(|at| *at > now).min()
        };
        let bulk = match self.hold {
            Some(_) if self.bulk.waiting.is_empty() || self.bulk.in_flight_pages > 0 => None,
            Some(hold) if hold.until > now => Some(hold.until),
            _ => pauses(&self.bulk),
        };
        let waits = [pauses(&self.urgent), bulk].into_iter().flatten();
        let waits = (!self.is_stalled).then_some(waits).into_iter().flatten();
        let first = self.in_flight.values().next();
        waits.chain(first.map(|request| request.deadline)).min()
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
        self.end_hold();
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
            if let Some(job) = self.take_in_flight(id) {
                let fresh = Job {
                    failures: 0,
                    not_before: None,
                    ..job
                };
                self.class(job.wanted.urgency()).push_back(fresh);
            }
        }
        ids
    }

    /// Drops all bulk requests. Returns those in flight, which are to be cancelled, and the pages of
    /// all of them, which are to be withdrawn.
    pub(crate) fn drop_bulk(&mut self) -> (Vec<RequestId>, Vec<PageRange>) {
        let is_bulk = |job: &Job| job.wanted.urgency() == Urgency::Bulk;
        let flying = self.in_flight.iter().filter(|(_, at)| is_bulk(&at.job));
        let ids: Vec<_> = flying.map(|(&id, _)| id).collect();
        let mut pages: Vec<_> = self
            .bulk
            .waiting
            .drain(..)
            .map(|job| job.wanted.pages)
            .collect();
        self.bulk.waiting_pages = 0;
        let taken = ids.iter().filter_map(|&id| self.in_flight.remove(&id));
        pages.extend(taken.map(|request| request.job.wanted.pages));
        self.bulk.in_flight_pages = 0;
        self.bulk_epoch += 1;
        (ids, pages)
    }

    /// Drops all requests. Returns those in flight, which are to be cancelled.
    pub(crate) fn clear(&mut self) -> Vec<RequestId> {
        let ids = std::mem::take(&mut self.in_flight).into_keys().collect();
        self.urgent = Class::default();
        self.bulk = Class::default();
        self.bulk_epoch += 1;
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
fn later(now: Instant, after: Duration) -> Instant {
    const FAR: Duration = Duration::from_secs(365 * 86_400);
    now.checked_add(after).unwrap_or(now + FAR)
}

impl RetryPolicy {
    /// The pause after a request has failed `failures` times (at least once): doubled each time, up to
    /// the longest pause.
    fn backoff(&self, failures: u32) -> Duration {
        let doublings = failures.saturating_sub(1).min(31);
        self.first_backoff
            .saturating_mul(1 << doublings)
            .min(self.longest_backoff)
    }
}

#[cfg(test)]
#[path = "requests_tests.rs"]
mod tests;
