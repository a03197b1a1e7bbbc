//! The missing pages of a region that somebody has asked for, and the requests that bring them.
//!
//! One place, under one lock ([`PagedRegion::missing`](crate::region::PagedRegion::missing)): which pages are wanted,
//! by whom, whether they were requested, which threads sleep on them, and how often a request has failed. An entry has
//! the number of the job that brings its pages, and what becomes of a job is decided here:
//!
//! - A job that is answered is over. What the memory did not take of it has failed.
//! - **Urgent.** Each page for which a thread waits is requested again, alone; its neighbours are withdrawn. Where all
//!   attempts have failed, the region is stalled until its owner acts.
//! - **Bulk.** No thread waits, so that a failure stalls nothing. A run is halved down to the pages that fail, behind
//!   all other runs; a page that fails as often as the policy allows is set aside: it has an entry without a job.
//!   Prefetch leaves it out. A thread that touches it requests it, with all attempts. After many failures in a row, no
//!   page is to blame: the [breaker](crate::requests) opens, and when it closes, prefetch tries all of them again.
//! - An entry that a claim puts back may have a job that has ended meanwhile. Then it gets another, or is withdrawn.
//!
//! Local content has no jobs: a page whose fault could not be resolved has an entry with its sleeping threads.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use pagetide_memory::{
    ClaimGuard, Entry, MissingPages, PageIndex, PageMap, PageRange, PageState, PutBack, Touch,
    Urgency, Wish,
};

use crate::requests::{Job, JobId, Requests, Submission, later};
use crate::source::{RequestId, Source};

/// The entries that a claim has taken out of the book.
pub(crate) type Entries = Vec<Entry<JobId>>;

/// Why a request has brought no content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Miss {
    /// The source failed, or did not answer in time.
    Failed,
    /// The content of one of several pages is lost. The source reports this for the whole request, so
    /// the pages are requested again in smaller requests.
    PoisonedAmongOthers,
    /// The source has answered, and the memory did not take the content.
    NotInstalled {
        /// There may be no memory.
        is_lack: bool,
    },
    /// The same, because the process changes its address space: not a failure.
    Busy,
}

/// The actions after a failure.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct AfterMiss {
    /// The pages were delivered otherwise: it was no failure.
    pub(crate) is_moot: bool,
    /// The region has stalled because of it.
    pub(crate) stalled: bool,
    /// Pages that prefetch leaves out from now on.
    pub(crate) set_aside: Vec<PageRange>,
    /// The breaker has just opened.
    pub(crate) opened: bool,
}

/// The missing pages of a region, their requests, and the source to which these are made.
pub(crate) struct Missing {
    pages: MissingPages<JobId>,
    pub(crate) requests: Requests,
    /// `None`: the content is local.
    pub(crate) source: Option<Arc<dyn Source>>,
    /// A thread is submitting; other threads leave their requests to it.
    pub(crate) is_submitting: bool,
    /// How often the source was replaced: the answers of a former one are dropped.
    pub(crate) replaced: u64,
    /// Whether content that prefetch asked for could not be installed.
    has_not_installed: bool,
    /// How often pages were taken back that had been set aside.
    reconsidered: u64,
    /// Pages that are not missing, and could not be mapped for a thread that sleeps on them.
    settled: BTreeSet<PageIndex>,
}

impl Missing {
    pub(crate) fn new(requests: Requests, source: Option<Arc<dyn Source>>) -> Self {
        Self {
            pages: MissingPages::default(),
            requests,
            source,
            is_submitting: false,
            replaced: 0,
            has_not_installed: false,
            reconsidered: 0,
            settled: BTreeSet::new(),
        }
    }

    /// A thread waits for `page`, whose content has to be requested with the absent pages around it. Returns whether a
    /// request was made for it. The error is the page's state, in which nothing has to be requested.
    pub(crate) fn request(
        &mut self,
        map: &PageMap,
        page: PageIndex,
        window: PageRange,
        wish: Wish,
    ) -> Result<bool, PageState> {
        let (pages, before) = match self.pages.touch(map, page, window, wish) {
            Touch::New(run) => (run, None),
            Touch::Known(Entry { job: Some(job), .. }) if job.urgency == Urgency::Urgent => {
                return Ok(false);
            }
            // Prefetch's request may take long: the page is requested again.
            Touch::Known(entry) => (PageRange::single(page), entry.job),
            Touch::Lost(state) => return Err(state),
            Touch::Outside => return Err(PageState::Removed),
        };
        let job = self.requests.want(pages, Urgency::Urgent);
        self.pages.set_job(pages, before, Some(job));
        Ok(true)
    }

    /// Prefetch asks for `page` and the absent pages of `window` around it. Returns those that are requested. A page on
    /// which a thread sleeps, whose fault could not be resolved, is requested for that thread.
    pub(crate) fn request_ahead(
        &mut self,
        map: &PageMap,
        page: PageIndex,
        window: PageRange,
    ) -> Option<PageRange> {
        let Some(pages) = self.pages.plan(map, page, window) else {
            let entry = self.pages.entry(page)?;
            let is_unresolved = entry.job.is_none() && entry.wish == Wish::Asleep;
            let pages = is_unresolved.then_some(PageRange::single(page))?;
            self.request_urgently(page);
            return Some(pages);
        };
        let job = self.requests.want(pages, Urgency::Bulk);
        self.pages.set_job(pages, None, Some(job));
        Some(pages)
    }

    /// The fault of a thread that sleeps could not be resolved. It sleeps on until the page is delivered otherwise, or
    /// the region is resumed. The error is the page's state, in which nobody would wake the thread.
    pub(crate) fn leave_asleep(
        &mut self,
        map: &PageMap,
        page: PageIndex,
        wish: Wish,
    ) -> Result<(), PageState> {
        match self.pages.touch(map, page, PageRange::single(page), wish) {
            Touch::New(_) => Ok(()),
            Touch::Known(entry) => {
                // Prefetch has requested it since.
                if entry.job.is_some() {
                    self.request_urgently(page);
                }
                Ok(())
            }
            Touch::Lost(state) => Err(state),
            Touch::Outside => Err(PageState::Removed),
        }
    }

    /// The same for a page that is there, and could not be mapped.
    pub(crate) fn leave_at_settled(&mut self, page: PageIndex) {
        self.settled.insert(page);
    }

    /// Takes the entries of pages out: of a claim's, or of settled pages.
    #[must_use = "a thread may sleep on the pages"]
    pub(crate) fn take(&mut self, pages: PageRange) -> Entries {
        self.pages.take(pages)
    }

    /// Ends a claim without a result. Returns the pages on which threads sleep that are to be woken.
    #[must_use = "a thread may sleep on the pages"]
    pub(crate) fn put_back(
        &mut self,
        map: &PageMap,
        guard: ClaimGuard<'_>,
        entries: Entries,
    ) -> Vec<PageIndex> {
        let pages = guard.pages();
        let PutBack { wake, raised } = self.pages.put_back(guard, entries);
        self.renew(map, pages);
        raised
            .into_iter()
            .for_each(|page| self.request_urgently(page));
        wake
    }

    /// The same for a caller that unwinds, and can wake nobody.
    pub(crate) fn keep(&mut self, map: &PageMap, guard: ClaimGuard<'_>, entries: Entries) {
        let pages = guard.pages();
        let raised = self.pages.keep(guard, entries);
        self.renew(map, pages);
        raised
            .into_iter()
            .for_each(|page| self.request_urgently(page));
    }

    /// The first thread waits for a page of the book: a bulk request, or none, is not enough.
    fn request_urgently(&mut self, page: PageIndex) {
        let job = self.pages.entry(page).map(|entry| entry.job);
        let Some(before) = job.filter(|_| self.source.is_some()) else {
            return;
        };
        if before.is_none_or(|job| job.urgency == Urgency::Bulk) {
            let single = PageRange::single(page);
            let job = self.requests.want(single, Urgency::Urgent);
            self.pages.set_job(single, before, Some(job));
        }
    }

    /// Entries whose job has ended while a claim had them get another, or are withdrawn.
    fn renew(&mut self, map: &PageMap, pages: PageRange) {
        let is_dead = |job: JobId| !self.requests.is_alive(job);
        let orphans = self.pages.within(pages);
        let orphans = orphans.filter(|entry| entry.job.is_some_and(is_dead));
        for entry in orphans.copied().collect::<Vec<_>>() {
            self.replace_job(map, &entry, 0, None);
        }
    }

    /// An entry's job has ended: what a thread waits for gets another, and the rest is withdrawn.
    fn replace_job(
        &mut self,
        map: &PageMap,
        entry: &Entry<JobId>,
        failures: u32,
        not_before: Option<Instant>,
    ) {
        if !entry.wish.is_waiting() {
            // No thread sleeps on it.
            drop(self.pages.withdraw(map, entry.pages));
            return;
        }
        let requests = &mut self.requests;
        let job = requests.want_later(entry.pages, Urgency::Urgent, failures, not_before);
        self.pages.set_job(entry.pages, entry.job, Some(job));
    }

    /// The next request to submit, if any. Jobs whose pages were delivered otherwise end here.
    pub(crate) fn next_submission(&mut self, now: Instant) -> Option<Submission> {
        loop {
            let submission = self.requests.next_submission(now)?;
            let mut within = self.pages.within(submission.pages);
            if within.any(|entry| entry.job == Some(submission.job)) {
                return Some(submission);
            }
            self.requests.finish(submission.id);
        }
    }

    /// The entries of a job.
    fn left(&self, job: JobId, pages: PageRange) -> Entries {
        let within = self.pages.within(pages);
        let of_job = within.filter(|entry| entry.job == Some(job));
        of_job.copied().collect()
    }

    /// Content has come and was installed, as far as `miss` does not say otherwise.
    pub(crate) fn answered(
        &mut self,
        map: &PageMap,
        job: Job,
        has_installed: bool,
        miss: Option<Miss>,
        now: Instant,
    ) -> AfterMiss {
        if has_installed || miss.is_none() {
            self.close_breaker(map);
        }
        if !self.requests.end(job.id) {
            return AfterMiss::default();
        }
        // Another claim may have had a page when the content came, and has put it back.
        self.after(map, job, miss.unwrap_or(Miss::Busy), now)
    }

    /// The source answers, and the memory takes content. What was set aside while one of both did not is not to blame:
    /// it is tried again.
    pub(crate) fn close_breaker(&mut self, map: &PageMap) {
        let was_open = self.requests.breaker.is_open();
        self.requests.breaker.close();
        if was_open {
            self.reconsider(map);
        }
    }

    /// A request was not answered with content. `None` if it is not in flight.
    pub(crate) fn missed(
        &mut self,
        map: &PageMap,
        id: RequestId,
        miss: Miss,
        now: Instant,
    ) -> Option<(Job, AfterMiss)> {
        let job = self.requests.finish(id)?;
        if miss == Miss::PoisonedAmongOthers {
            self.close_breaker(map);
        }
        Some((job, self.after(map, job, miss, now)))
    }

    fn after(&mut self, map: &PageMap, job: Job, miss: Miss, now: Instant) -> AfterMiss {
        let left = self.left(job.id, job.pages);
        if left.is_empty() {
            return AfterMiss {
                is_moot: true,
                ..AfterMiss::default()
            };
        }
        match job.id.urgency {
            Urgency::Urgent => self.after_urgent(map, job, &left, miss, now),
            Urgency::Bulk => self.after_bulk(job, &left, miss, now),
        }
    }

    fn after_urgent(
        &mut self,
        map: &PageMap,
        job: Job,
        left: &[Entry<JobId>],
        miss: Miss,
        now: Instant,
    ) -> AfterMiss {
        let mut after = AfterMiss::default();
        let failures = job.failures + u32::from(miss == Miss::Failed);
        let is_last = failures >= self.requests.policy().attempts && !self.requests.is_stalled();
        let is_refused = matches!(miss, Miss::NotInstalled { .. });
        if (is_last || is_refused) && left.iter().any(|entry| entry.wish.is_waiting()) {
            self.requests.stall();
            after.stalled = true;
        }
        let pause = match miss {
            _ if self.requests.is_stalled() => None,
            Miss::Failed => Some(failures),
            Miss::Busy => Some(1),
            Miss::PoisonedAmongOthers | Miss::NotInstalled { .. } => None,
        };
        let pause = pause.map(|failures| self.requests.policy().backoff(failures));
        let not_before = pause.map(|pause| later(now, pause));
        // A stalled region starts afresh when it is resumed.
        let failures = if self.requests.is_stalled() {
            0
        } else {
            failures
        };
        for entry in left {
            self.replace_job(map, entry, failures, not_before);
        }
        after
    }

    fn after_bulk(
        &mut self,
        mut job: Job,
        left: &[Entry<JobId>],
        miss: Miss,
        now: Instant,
    ) -> AfterMiss {
        let mut after = AfterMiss::default();
        let attempts = self.requests.policy().attempts;
        let longest = later(now, self.requests.policy().longest_backoff);
        let is_stalled = self.requests.is_stalled();
        let has_failed = matches!(miss, Miss::Failed | Miss::NotInstalled { .. }) && !is_stalled;
        let is_outage = has_failed && miss != (Miss::NotInstalled { is_lack: false });
        if is_outage && self.requests.breaker.is_open() {
            self.requests.breaker.fail(now, longest);
            self.requests.again(job);
            if self.requests.breaker.probes() >= attempts {
                // No answer may ever come: whoever waits for prefetch must not wait for ever.
                for job in self.requests.take_waiting_bulk() {
                    let left = self.left(job.id, job.pages);
                    self.set_aside(&left, &mut after);
                }
            }
            return after;
        }
        let pause = self.requests.policy().backoff(job.failures + 1);
        let is_slowed = has_failed || miss == Miss::Busy;
        job.not_before = is_slowed.then(|| later(now, pause));
        let (Some(first), Some(last)) = (left.first(), left.last()) else {
            return after;
        };
        let (from, end) = (first.pages.first(), last.pages.end());
        let span = PageRange::new(from, end.0 - from.0);
        if miss == Miss::Busy {
            self.requests.again(job);
        } else if span.count() > 1 {
            // Which page has failed is unknown. Halves use up no attempt of the others.
            let (head, tail) = span.split_at(span.count() / 2);
            for half in [head, tail] {
                if self.left(job.id, half).is_empty() {
                    continue;
                }
                let requests = &mut self.requests;
                let other = requests.want_later(half, Urgency::Bulk, job.failures, job.not_before);
                self.pages.set_job(half, Some(job.id), Some(other));
            }
        } else {
            job.pages = span;
            job.failures += u32::from(has_failed);
            if job.failures < attempts {
                self.requests.again(job);
            } else {
                self.set_aside(left, &mut after);
            }
        }
        if is_outage && self.requests.breaker.fail(now, longest) {
            after.opened = true;
            self.requests.start_bulk_afresh();
        }
        after
    }

    fn set_aside(&mut self, left: &[Entry<JobId>], after: &mut AfterMiss) {
        for entry in left {
            self.pages.set_job(entry.pages, entry.job, None);
            after.set_aside.push(entry.pages);
        }
    }

    /// The runs that prefetch leaves out.
    pub(crate) fn set_aside_runs(&self) -> impl Iterator<Item = PageRange> {
        let set_aside = self.pages.iter().filter(|entry| is_set_aside(entry));
        set_aside.map(|entry| entry.pages)
    }

    /// What prefetch makes of a page that is Pending.
    pub(crate) fn outlook(&self, page: PageIndex) -> Outlook {
        match self.pages.entry(page) {
            Some(entry) if is_set_aside(entry) || entry.wish == Wish::AsleepForGood => {
                Outlook::LeftOut(entry.pages.end())
            }
            Some(Entry { job: None, .. }) => Outlook::Missing,
            Some(entry) => Outlook::Coming(entry.pages.end()),
            // A claim has its entry.
            None => Outlook::Coming(PageIndex(page.0 + 1)),
        }
    }

    /// Whether prefetch leaves out some of these pages.
    pub(crate) fn leaves_out(&self, pages: PageRange) -> bool {
        let mut entries = self.pages.within(pages);
        entries.any(|entry| entry.job.is_none())
    }

    /// Whether a page that is Pending is not requested: if its content is available now, it is used.
    pub(crate) fn has_no_job(&self, page: PageIndex) -> bool {
        let entry = self.pages.entry(page);
        entry.is_some_and(|entry| entry.job.is_none())
    }

    /// Takes back what was set aside: it is Absent.
    pub(crate) fn reconsider(&mut self, map: &PageMap) {
        for pages in self.set_aside_runs().collect::<Vec<_>>() {
            drop(self.pages.withdraw(map, pages));
            self.reconsidered += 1;
        }
    }

    /// Starts afresh, as when prefetch begins anew.
    pub(crate) fn begin_prefetch(&mut self, map: &PageMap) {
        // An open breaker of an earlier prefetch would give the first failure of this one all its weight.
        self.requests.breaker.close();
        self.has_not_installed = false;
        self.reconsider(map);
    }

    /// A number that changes when pages are taken back that had been set aside.
    pub(crate) fn reconsidered(&self) -> u64 {
        self.reconsidered
    }

    /// Resumes the requests.
    pub(crate) fn restart(&mut self, map: &PageMap) {
        self.close_breaker(map);
        self.requests.resume();
    }

    /// Whether content that prefetch asked for could not be installed for the first time.
    pub(crate) fn is_first_not_installed(&mut self) -> bool {
        !std::mem::replace(&mut self.has_not_installed, true)
    }

    /// Withdraws what only prefetch has asked for. Returns the requests that are to be cancelled.
    pub(crate) fn drop_bulk(&mut self, map: &PageMap) -> Vec<RequestId> {
        let ids = self.requests.drop_bulk();
        let all = PageRange::new(PageIndex(0), map.pages());
        self.renew(map, all);
        ids
    }

    /// Takes the entries out of which threads may be woken, to fault again: those without a job. Returns their pages.
    #[must_use = "a thread may sleep on the pages"]
    pub(crate) fn take_resumable(&mut self, map: &PageMap) -> Vec<PageRange> {
        let resumed = self.pages.iter().filter(|entry| {
            entry.job.is_none() && matches!(entry.wish, Wish::Touched | Wish::Asleep)
        });
        let mut resumed: Vec<_> = resumed.map(|entry| entry.pages).collect();
        for &pages in &resumed {
            // They are woken.
            drop(self.pages.withdraw(map, pages));
        }
        let settled = std::mem::take(&mut self.settled);
        resumed.extend(settled.into_iter().map(PageRange::single));
        resumed
    }

    /// Empties the book. Returns the requests that are to be cancelled, and the pages on which threads sleep, which are
    /// to be woken.
    #[must_use = "a thread may sleep on the pages"]
    pub(crate) fn clear(&mut self, map: &PageMap) -> (Vec<RequestId>, Vec<PageRange>) {
        let all = PageRange::new(PageIndex(0), map.pages());
        let entries = self.pages.withdraw(map, all).into_iter();
        let asleep = entries.filter(|entry| entry.wish.is_asleep());
        let asleep = asleep.map(|entry| entry.pages).collect();
        (self.requests.clear(), asleep)
    }
}

/// What prefetch makes of a page that is Pending.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outlook {
    /// It is requested, or being installed, as are the pages up to this one.
    Coming(PageIndex),
    /// Nothing brings it, because a fault could not be resolved: it is tried again.
    Missing,
    /// Nothing brings it, nor the pages up to this one: they were set aside, or other code has mapped something there.
    LeftOut(PageIndex),
}

fn is_set_aside(entry: &Entry<JobId>) -> bool {
    entry.job.is_none() && !entry.wish.is_waiting()
}

impl std::fmt::Debug for Missing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Missing")
            .field("pages", &self.pages)
            .field("requests", &self.requests)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
#[path = "missing_tests.rs"]
mod tests;
