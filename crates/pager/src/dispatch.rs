//! The submission of requests to sources, and the handling of their answers.
//!
//! [`crate::requests`] decides, and this module acts. While it holds the lock of a region's requests,
//! it calls no source and installs nothing.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use pagetide_memory::{PageIndex, PageRange, PageState, Urgency};

use crate::arrival::{Purpose, arrive, wake_left};
use crate::counters::Counters;
use crate::error::{InstallFailure, message_of};
use crate::fault::RegionId;
use crate::install::{Body, wake};
use crate::notice::Notice;
use crate::pager::Pager;
use crate::region::{PagedRegion, Requesting};
use crate::requests::{Job, Miss, RequestId, Submission, Wanted};
use crate::source::{Content, Request, Source, SourceError};

impl Pager {
    /// Requests pages from the region's source that were made Requested.
    pub(crate) fn want(&self, region: &PagedRegion, wanted: Wanted) {
        let Some(requesting) = region.requesting() else {
            return;
        };
        requesting.lock().requests.want(wanted);
        self.submit(region, requesting);
    }

    /// Submits all requests that may be submitted now. One thread at a time does so for a region, so
    /// that requests reach the source in their order; other threads leave their requests to it.
    pub(crate) fn submit(&self, region: &PagedRegion, requesting: &Requesting) {
        let mut state = requesting.lock();
        if state.is_submitting || region.is_closed() {
            return;
        }
        state.is_submitting = true;
        let now = loop {
            let now = Instant::now();
            let Some(submission) = state.requests.next_submission(now) else {
                break now;
            };
            if region.map.next_unsettled(submission.pages).is_none() {
                // The pages were delivered otherwise while the request waited.
                state.requests.finish(submission.id);
                continue;
            }
            let (source, replaced) = (Arc::clone(&state.source), state.replaced);
            drop(state);
            let request = self.request(region, &submission, replaced);
            let panicked = catch_unwind(AssertUnwindSafe(|| source.submit(request))).err();
            if let Some(panic) = panicked {
                let message = message_of(&*panic);
                let miss = SourceError::Panicked { message };
                self.missed(region, requesting, submission.id, Miss::Failed, miss);
            }
            state = requesting.lock();
        };
        state.is_submitting = false;
        let deadline = state.requests.next_deadline(now);
        drop(state);
        if let Some(deadline) = deadline {
            self.wake_at(deadline);
        }
    }

    fn request(&self, region: &PagedRegion, submission: &Submission, replaced: u64) -> Request {
        Request {
            pager: self.weak(),
            region: region.id,
            id: submission.id,
            pages: submission.pages,
            urgency: submission.urgency,
            deadline: submission.deadline,
            gpa: region.gpa,
            page_shift: region.page_shift(),
            replaced,
            is_answered: false,
        }
    }

    /// Handles a source's answer, on the thread that delivers it.
    pub(crate) fn answer(&self, request: &Request, answer: Result<Content<'_>, SourceError>) {
        let table = self.table();
        let Some(region) = table
            .region(request.region)
            .filter(|region| !region.is_closed())
        else {
            return;
        };
        let Some(requesting) = region.requesting() else {
            return;
        };
        let wanted_bytes = request.bytes();
        let content = match answer {
            Ok(Content::Bytes(bytes)) if bytes.len() as u64 != wanted_bytes => {
                Err(SourceError::WrongSize {
                    given: bytes.len() as u64,
                    wanted: wanted_bytes,
                })
            }
            other => other,
        };
        match content {
            Ok(Content::Poisoned) if request.pages.count() > 1 => {
                let error = SourceError::Dropped;
                requesting.lock().requests.answered();
                self.missed(
                    region,
                    requesting,
                    request.id,
                    Miss::PoisonedAmongOthers,
                    error,
                );
            }
            Ok(content) => {
                let mut state = requesting.lock();
                state.requests.answered();
                let finished = state.requests.finish(request.id);
                let is_former = request.replaced != state.replaced;
                drop(state);
                match finished {
                    Some(job) => self.arrived(region, requesting, job, content),
                    None => self.arrived_late(region, request, content, is_former),
                }
            }
            Err(error) => self.missed(region, requesting, request.id, Miss::Failed, error),
        }
        requesting.notify();
        self.submit(region, requesting);
    }

    fn arrived(
        &self,
        region: &PagedRegion,
        requesting: &Requesting,
        job: Job,
        content: Content<'_>,
    ) {
        let wanted = job.wanted;
        let mut counters = Counters {
            answers: 1,
            ..Counters::default()
        };
        let result = self.install_arrived(
            region,
            &mut counters,
            wanted.pages,
            content,
            wanted.urgency(),
        );
        self.count(&counters);
        if wanted.urgency() == Urgency::Bulk && counters.pages > 0 {
            requesting.lock().requests.installed();
        }
        let Err(failure) = result else {
            return;
        };
        match wanted.urgency() {
            // No failure: threads that wait ask again, and so does prefetch.
            _ if matches!(failure, InstallFailure::Busy { .. }) => {
                self.withdraw(region, wanted.pages);
            }
            Urgency::Urgent => {
                // Waiting threads retry, and then wait until the owner acts. (The request itself cannot be
                // repeated as it is: one of its pages may have become urgent.)
                requesting.lock().requests.stall();
                self.withdraw(region, wanted.pages);
                self.notify(Notice::NotInstalled {
                    region: region.id,
                    source: Arc::new(failure),
                });
            }
            Urgency::Bulk => {
                let now = Instant::now();
                let mut state = requesting.lock();
                let after = state.requests.not_installed(job, is_lack(&failure), now);
                drop(state);
                for pages in after.withdraw.into_iter().flatten() {
                    region.map.withdraw(pages);
                }
                self.set_aside(region, &after.set_aside, &failure);
                if after.held {
                    tracing::warn!(
                        region = region.id.0,
                        error = &failure as &dyn std::error::Error,
                        "the memory takes no content: prefetch waits for it"
                    );
                }
                self.not_prefetched(region, requesting, failure);
                self.withdraw_orphans(region, requesting, wanted.pages);
            }
        }
    }

    /// Installs content that has come after its request was cancelled where it is still requested: a source that
    /// is slower than the deadline would otherwise deliver nothing. The answers of a former source are dropped.
    fn arrived_late(
        &self,
        region: &PagedRegion,
        request: &Request,
        content: Content<'_>,
        is_former: bool,
    ) {
        let mut counters = Counters {
            late_answers: 1,
            ..Counters::default()
        };
        let is_asked =
            |page: &PageIndex| matches!(region.map.state(*page), Some(PageState::Requested(_)));
        let still_asked = request.pages.iter().filter(is_asked);
        for page in still_asked.take_while(|_| !is_former) {
            let single = PageRange::single(page);
            let before = PageRange::new(request.pages.first(), page.0 - request.pages.first().0);
            let part = part_of(content, region.bytes_of(before), region.bytes_of(single));
            let installed =
                self.install_arrived(region, &mut counters, single, part, Urgency::Urgent);
            // The request that waits for the page reports a failure, if it fails as well.
            if let Err(error) = installed {
                tracing::debug!(region = region.id.0, %error, "a late answer");
                if let Some(requesting) = region.requesting() {
                    self.withdraw_orphans(region, requesting, single);
                }
            }
        }
        self.count(&counters);
    }

    /// Withdraws pages that are Requested and have no request: threads that wait for them, and prefetch, ask
    /// again. An answer that comes while another claim has its pages is dropped, and ends its request. If that
    /// claim then gives pages back, they are Requested again.
    pub(crate) fn withdraw_orphans(
        &self,
        region: &PagedRegion,
        requesting: &Requesting,
        pages: PageRange,
    ) {
        let state = requesting.lock();
        let is_orphan = |page: &PageIndex| match region.map.state(*page) {
            Some(PageState::Requested(urgency)) => !state.requests.has(*page, urgency),
            _ => false,
        };
        let orphans: Vec<_> = pages.iter().filter(is_orphan).collect();
        drop(state);
        if orphans.is_empty() {
            return;
        }
        for page in orphans {
            self.withdraw(region, PageRange::single(page));
        }
        requesting.notify();
    }

    /// Reports that content of prefetch could not be installed, once for each prefetch.
    fn not_prefetched(
        &self,
        region: &PagedRegion,
        requesting: &Requesting,
        failure: InstallFailure,
    ) {
        if requesting.lock().requests.is_first_not_installed() {
            self.notify(Notice::NotPrefetched {
                region: region.id,
                source: Arc::new(failure),
            });
        }
    }

    /// Installs content that did not arrive on a fault's thread, and maps it in stage 2.
    pub(crate) fn install_arrived(
        &self,
        region: &PagedRegion,
        counters: &mut Counters,
        pages: PageRange,
        content: Content<'_>,
        urgency: Urgency,
    ) -> Result<(), InstallFailure> {
        let body = match content {
            Content::Bytes(bytes) => Body::Bytes(bytes),
            Content::Zero => Body::Zero,
            Content::Poisoned => Body::Poisoned,
        };
        let before = counters.pages;
        let purpose = match urgency {
            Urgency::Urgent => Purpose::Waiters,
            Urgency::Bulk => Purpose::Ahead,
        };
        let arrived = arrive(self, region, counters, pages, body, purpose);
        arrived?;
        // For a single page, the waiting vCPU's own access is cheaper.
        if urgency == Urgency::Urgent && pages.count() > 1 && counters.pages > before {
            self.populate(region, pages, counters);
        }
        Ok(())
    }

    /// Handles a request that was not answered with content.
    fn missed(
        &self,
        region: &PagedRegion,
        requesting: &Requesting,
        id: RequestId,
        miss: Miss,
        error: SourceError,
    ) {
        let mut state = requesting.lock();
        let Some(wanted) = state.requests.wanted_by(id) else {
            return;
        };
        if region.map.next_unsettled(wanted.pages).is_none() {
            // The pages were delivered otherwise, so the missing answer is not a failure.
            state.requests.finish(id);
            return;
        }
        let after = state.requests.miss(id, miss, Instant::now());
        drop(state);
        let Some(after) = after else {
            return;
        };
        if miss == Miss::Failed {
            match wanted.urgency() {
                Urgency::Urgent => tracing::warn!(region = region.id.0, %error, "a request failed"),
                // The last failure of a page is logged below.
                Urgency::Bulk => tracing::debug!(region = region.id.0, %error, "a request failed"),
            }
            self.count(&Counters {
                failed_requests: 1,
                ..Counters::default()
            });
        }
        for pages in after.withdraw.into_iter().flatten() {
            self.withdraw(region, pages);
        }
        self.set_aside(region, &after.set_aside, &error);
        if after.held {
            tracing::warn!(
                region = region.id.0,
                %error,
                "the source answers nothing: prefetch waits for it"
            );
        }
        if after.stalled {
            self.notify(Notice::Stalled {
                region: region.id,
                last: Arc::new(error),
            });
        }
    }

    /// Withdraws the bulk requests for pages that cannot be fetched.
    fn set_aside(
        &self,
        region: &PagedRegion,
        runs: &[PageRange],
        error: &(dyn std::error::Error + 'static),
    ) {
        // A thread may have begun to wait for some of them: its own request decides about those.
        let withdrawn = runs.iter().map(|&pages| region.map.withdraw(pages)).sum();
        if withdrawn == 0 {
            return;
        }
        self.count(&Counters {
            set_aside: withdrawn,
            ..Counters::default()
        });
        tracing::warn!(
            region = region.id.0,
            gpa = runs.first().map(|pages| region.gpa_of(pages.first()).0),
            pages = withdrawn,
            error,
            "prefetch leaves out what it cannot fetch"
        );
    }

    /// Withdraws the requests for pages; threads that wait for them retry.
    pub(crate) fn withdraw(&self, region: &PagedRegion, pages: PageRange) {
        if !region.map.withdraw_all(pages).is_wanted() {
            return;
        }
        let mut counters = Counters::default();
        let mut rest = pages;
        while let Some(served) = region.served(rest.first()).filter(|_| !rest.is_empty()) {
            let part = rest.intersection(served.pages);
            let lock = served.channel.lock_installs();
            wake_left(region, served, &lock, &mut counters, part);
            drop(lock);
            (_, rest) = rest.split_at(part.count());
        }
        self.count(&counters);
    }

    /// Wakes threads that were left asleep, so that they fault again.
    pub(crate) fn wake_asleep(&self, region: &PagedRegion) {
        let asleep = std::mem::take(&mut region.asleep().until_resumed);
        let mut counters = Counters::default();
        for page in asleep.into_iter().map(PageRange::single) {
            let Some(served) = region.served(page.first()) else {
                continue;
            };
            let lock = served.channel.lock_installs();
            // The wake-up is issued now, and not left to an installer any more.
            if let Some(claim) = region.map.claim_arrived(page) {
                let _ = claim.abandon();
            }
            wake(region, served, &lock, &mut counters, page);
            drop(lock);
            if let Some(requesting) = region.requesting() {
                self.withdraw_orphans(region, requesting, page);
            }
        }
        self.count(&counters);
    }

    /// Performs the actions that are due: cancels requests past their deadline, which then count as
    /// failed, and submits requests again whose pause is over. Called by threads that serve the pager's
    /// descriptor, and by vCPUs' threads that wait.
    pub fn tick(&self) {
        let now = Instant::now();
        if !self.is_due(now) {
            return;
        }
        for region in self.table().iter() {
            let Some(requesting) = region.requesting() else {
                continue;
            };
            loop {
                let state = requesting.lock();
                let Some(id) = state.requests.next_expired(now) else {
                    break;
                };
                let source = Arc::clone(&state.source);
                drop(state);
                self.missed(region, requesting, id, Miss::Failed, SourceError::Late);
                cancel(&*source, region.id, id);
            }
            requesting.notify();
            self.submit(region, requesting);
        }
    }

    /// Withdraws prefetch's requests that no thread waits for.
    pub(crate) fn withdraw_bulk(&self, region: &PagedRegion) {
        let Some(requesting) = region.requesting() else {
            return;
        };
        let mut state = requesting.lock();
        let source = Arc::clone(&state.source);
        let (cancelled, pages) = state.requests.drop_bulk();
        drop(state);
        for id in cancelled {
            cancel(&*source, region.id, id);
        }
        for pages in pages {
            region.map.withdraw(pages);
        }
    }

    /// Cancels all requests of a region for good.
    pub(crate) fn cancel_all(&self, region: &PagedRegion) {
        if let Some(requesting) = region.requesting() {
            cancel_requests(region, requesting);
            requesting.notify();
        }
    }
}

/// The content of a part of the pages.
fn part_of(content: Content<'_>, skip: u64, bytes: u64) -> Content<'_> {
    match content {
        Content::Bytes(all) => {
            let range = usize::try_from(skip).ok().zip(usize::try_from(bytes).ok());
            let part = range.and_then(|(skip, bytes)| all.get(skip..)?.get(..bytes));
            // For a missing part the slice is empty, and is refused.
            Content::Bytes(part.unwrap_or_default())
        }
        other => other,
    }
}

/// Whether a failure may be due to a lack of memory: the kernel's errors do not say.
fn is_lack(failure: &InstallFailure) -> bool {
    match failure {
        InstallFailure::Kernel(_) | InstallFailure::Write(_) => true,
        InstallFailure::Unexpected { .. } | InstallFailure::Busy { .. } => false,
    }
}

pub(crate) fn cancel_requests(region: &PagedRegion, requesting: &Requesting) {
    let mut state = requesting.lock();
    let source = Arc::clone(&state.source);
    let cancelled = state.requests.clear();
    drop(state);
    for id in cancelled {
        cancel(&*source, region.id, id);
    }
}

/// Cancels a request at its source; a panic of the source is caught.
pub(crate) fn cancel(source: &dyn Source, region: RegionId, id: RequestId) {
    if catch_unwind(AssertUnwindSafe(|| source.cancel(region, id))).is_err() {
        tracing::error!(
            region = region.0,
            "a source panicked while a request was cancelled"
        );
    }
}

#[cfg(test)]
#[path = "dispatch_tests.rs"]
mod tests;
