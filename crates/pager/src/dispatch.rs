//! The submission of requests to sources, and the handling of their answers.
//!
//! [`crate::missing`] decides, and this module acts. While it holds the lock of a region's missing pages,
//! it calls no source and installs nothing.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use pagetide_memory::{PageIndex, PageRange, PageState, Urgency};

use crate::arrival::{Purpose, arrive};
use crate::config::InstalledBy;
use crate::counters::Counters;
use crate::delivered::Delivery;
use crate::error::{InstallFailure, message_of};
use crate::fault::RegionId;
use crate::install::wake;
use crate::log_limit::log_limited;
use crate::memory::Body;
use crate::missing::Miss;
use crate::notice::Notice;
use crate::pager::Pager;
use crate::region::PagedRegion;
use crate::requests::{Job, Submission};
use crate::source::{Answers, Content, Request, RequestId, Source, SourceError};

impl Answers for Pager {
    fn fail(&self, request: &Request, error: SourceError) {
        self.answer(request, Err(error));
    }

    fn complete(&self, request: Request, content: Content<'_>) {
        if !self.is_handed_over(&request, content) {
            return self.answer(&request, Ok(content));
        }
        let urgency = request.urgency;
        self.note_here(&request);
        match self.delivered.push(request, content) {
            Ok(()) => self.report_delivered(urgency),
            Err(request) => self.answer(&request, Ok(content)),
        }
    }

    fn complete_buffer(&self, request: Request, buffer: Vec<u8>) -> Vec<u8> {
        let content = Content::Bytes(&buffer);
        if !self.is_handed_over(&request, content) {
            self.answer(&request, Ok(content));
            return buffer;
        }
        let urgency = request.urgency;
        self.note_here(&request);
        let spare = self.delivered.push_buffer(request, buffer);
        self.report_delivered(urgency);
        spare
    }

    fn complete_here(&self, request: Request, content: Content<'_>) {
        self.answer(&request, Ok(content));
    }
}

impl Pager {
    /// Whether a thread that serves the pager's descriptor installs content. It gets nothing that is refused anyway.
    fn is_handed_over(&self, request: &Request, content: Content<'_>) -> bool {
        let is_whole =
            !matches!(content, Content::Bytes(bytes) if bytes.len() as u64 != request.bytes());
        let table = self.table();
        let region = table.region(request.region);
        is_whole && region.is_some_and(|region| region.installed_by == InstalledBy::Serving)
    }

    /// Content that waits to be installed is not late. Noted before another thread can take it: its request may end at
    /// once.
    fn note_here(&self, request: &Request) {
        if let Some(region) = self.table().region(request.region) {
            region.missing().requests.note_here(request.id);
        }
    }

    fn report_delivered(&self, urgency: Urgency) {
        self.poller.report_deferred();
        if urgency == Urgency::Bulk {
            // Prefetch's thread installs it, if it waits.
            self.changes.notify();
        }
    }

    /// Installs the next content that was handed over, of bulk requests if there is nothing more urgent and `least`
    /// permits it. False if there is none.
    pub(crate) fn install_delivered(&self, least: Urgency) -> bool {
        self.install_taken(self.delivered.take(least))
    }

    /// Installs the content of a page that was handed over. False if there is none.
    pub(crate) fn install_delivered_at(&self, region: &PagedRegion, page: PageIndex) -> bool {
        region.installed_by == InstalledBy::Serving
            && self.install_taken(self.delivered.take_with(region.id, page))
    }

    fn install_taken(&self, taken: Option<Delivery>) -> bool {
        let Some(delivery) = taken else {
            return false;
        };
        self.count(&Counters {
            handed_over: 1,
            ..Counters::default()
        });
        self.answer(&delivery.request, Ok(delivery.content()));
        self.delivered.recycle(delivery);
        true
    }

    /// Handles a source's answer on this thread.
    pub(crate) fn answer(&self, request: &Request, answer: Result<Content<'_>, SourceError>) {
        let table = self.table();
        let Some(region) = table
            .region(request.region)
            .filter(|region| !region.is_closed())
        else {
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
                self.missed(region, request.id, Miss::PoisonedAmongOthers, error);
            }
            Ok(content) => {
                let mut missing = region.missing();
                let job = missing.requests.answer(request.id);
                let is_former = request.replaced != missing.replaced;
                drop(missing);
                match job {
                    Some(job) => self.arrived(region, job, content),
                    None => self.arrived_late(region, request, content, is_former),
                }
            }
            Err(error) => self.missed(region, request.id, Miss::Failed, error),
        }
        self.changes.notify();
        self.submit(region);
    }

    /// Submits all requests of a region that may be submitted now. One thread at a time does so for a region, so
    /// that requests reach the source in their order; other threads leave their requests to it.
    pub(crate) fn submit(&self, region: &PagedRegion) {
        let mut missing = region.missing();
        if missing.is_submitting || region.is_closed() {
            return;
        }
        missing.is_submitting = true;
        let now = loop {
            let now = Instant::now();
            let Some(submission) = missing.next_submission(now) else {
                break now;
            };
            let Some(source) = missing.source.clone() else {
                break now;
            };
            let request = self.request(region, &submission, missing.replaced);
            drop(missing);
            let panicked = catch_unwind(AssertUnwindSafe(|| source.submit(request))).err();
            // Not under the lock: if it was replaced, this may be its end, which answers its requests.
            drop(source);
            if let Some(panic) = panicked {
                let message = message_of(&*panic);
                let error = SourceError::Panicked { message };
                self.missed(region, submission.id, Miss::Failed, error);
            }
            missing = region.missing();
        };
        missing.is_submitting = false;
        let deadline = missing.requests.next_deadline(now);
        drop(missing);
        if let Some(deadline) = deadline {
            self.wake_at(deadline);
        }
    }

    fn request(&self, region: &PagedRegion, submission: &Submission, replaced: u64) -> Request {
        Request {
            answers: self.weak(),
            region: region.id,
            id: submission.id,
            pages: submission.pages,
            urgency: submission.job.urgency,
            deadline: submission.deadline,
            gpa: region.gpa,
            page_shift: region.page_shift(),
            replaced,
            is_answered: false,
        }
    }

    fn arrived(&self, region: &PagedRegion, job: Job, content: Content<'_>) {
        let mut counters = Counters {
            answers: 1,
            ..Counters::default()
        };
        let urgency = job.id.urgency;
        let installed = self.install_arrived(region, &mut counters, job.pages, content, urgency);
        self.count(&counters);
        let failure = installed.err();
        let miss = failure.as_ref().map(miss_of);
        let has_installed = counters.pages > 0;
        let mut missing = region.missing();
        let after = missing.answered(&region.map, job, has_installed, miss, Instant::now());
        drop(missing);
        let Some(failure) = failure.filter(|_| miss != Some(Miss::Busy)) else {
            return;
        };
        if urgency == Urgency::Urgent {
            if after.stalled {
                self.notify(Notice::NotInstalled {
                    region: region.id,
                    source: Arc::new(failure),
                });
            }
            return;
        }
        self.report_set_aside(region, &after.set_aside, &failure);
        if after.opened {
            log_limited!(
                warn,
                region = region.id.0,
                error = &failure as &dyn std::error::Error,
                "the memory takes no content: prefetch waits for it"
            );
        }
        if region.missing().is_first_not_installed() {
            self.notify(Notice::NotPrefetched {
                region: region.id,
                source: Arc::new(failure),
            });
        }
    }

    /// Installs content that has come after its request was cancelled where it is still asked for: a source that
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
        let is_asked = |page: &PageIndex| region.map.state(*page) == Some(PageState::Pending);
        let still_asked = request.pages.iter().filter(is_asked);
        for page in still_asked.take_while(|_| !is_former) {
            let single = PageRange::single(page);
            let before = PageRange::new(request.pages.first(), page.0 - request.pages.first().0);
            let part = part_of(content, region.bytes_of(before), region.bytes_of(single));
            let urgency = Urgency::Urgent;
            // The request that waits for the page reports a failure, if it fails as well.
            match self.install_arrived(region, &mut counters, single, part, urgency) {
                Ok(()) => region.missing().close_breaker(&region.map),
                Err(error) => tracing::debug!(region = region.id.0, %error, "a late answer"),
            }
        }
        self.count(&counters);
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
    fn missed(&self, region: &PagedRegion, id: RequestId, miss: Miss, error: SourceError) {
        let mut missing = region.missing();
        let missed = missing.missed(&region.map, id, miss, Instant::now());
        drop(missing);
        let Some((job, after)) = missed.filter(|(_, after)| !after.is_moot) else {
            return;
        };
        if miss == Miss::Failed {
            match job.id.urgency {
                Urgency::Urgent => {
                    log_limited!(warn, region = region.id.0, %error, "a request failed");
                }
                // The last failure of a page is logged below.
                Urgency::Bulk => tracing::debug!(region = region.id.0, %error, "a request failed"),
            }
            self.count(&Counters {
                failed_requests: 1,
                ..Counters::default()
            });
        }
        self.report_set_aside(region, &after.set_aside, &error);
        if after.opened {
            log_limited!(warn, region = region.id.0,
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

    /// Reports pages that prefetch leaves out from now on.
    fn report_set_aside(
        &self,
        region: &PagedRegion,
        runs: &[PageRange],
        error: &(dyn std::error::Error + 'static),
    ) {
        let pages = runs.iter().map(|run| run.count()).sum();
        if pages == 0 {
            return;
        }
        self.count(&Counters {
            set_aside: pages,
            ..Counters::default()
        });
        log_limited!(
            warn,
            region = region.id.0,
            gpa = runs.first().map(|pages| region.gpa_of(pages.first()).0),
            pages,
            error,
            "prefetch leaves out what it cannot fetch"
        );
    }

    /// Wakes threads that were left asleep, so that they fault again.
    pub(crate) fn wake_asleep(&self, region: &PagedRegion) {
        let resumed = region.missing().take_resumable(&region.map);
        self.wake_runs(region, &resumed);
    }

    /// Wakes the threads that sleep on runs of pages.
    pub(crate) fn wake_runs(&self, region: &PagedRegion, runs: &[PageRange]) {
        let mut counters = Counters::default();
        for &pages in runs {
            self.wake_run(region, pages, &mut counters);
        }
        self.count(&counters);
    }

    fn wake_run(&self, region: &PagedRegion, pages: PageRange, counters: &mut Counters) {
        let mut rest = pages;
        while let Some(served) = region.served(rest.first()).filter(|_| !rest.is_empty()) {
            let part = rest.intersection(served.pages);
            wake(
                region,
                served,
                &served.channel.lock_installs(),
                counters,
                part,
            );
            (_, rest) = rest.split_at(part.count());
        }
    }

    /// Performs the actions that are due: cancels requests past their deadline, which then count as
    /// failed, submits requests again whose pause is over, and reports messages that stayed unread. Called by threads that serve the pager's
    /// descriptor, and by vCPUs' threads that wait.
    pub fn tick(&self) {
        let now = Instant::now();
        if !self.is_due(now) {
            return;
        }
        self.report_unread();
        for region in self.table().iter().filter(|region| region.has_source()) {
            loop {
                let missing = region.missing();
                let expired = missing.requests.next_expired(now);
                let Some((id, source)) = expired.zip(missing.source.clone()) else {
                    break;
                };
                drop(missing);
                self.missed(region, id, Miss::Failed, SourceError::Late);
                cancel(&*source, region.id, id);
            }
            self.changes.notify();
            self.submit(region);
        }
    }

    /// Withdraws prefetch's requests that no thread waits for.
    pub(crate) fn withdraw_bulk(&self, region: &PagedRegion) {
        let mut missing = region.missing();
        let cancelled = missing.drop_bulk(&region.map);
        let source = missing.source.clone();
        drop(missing);
        cancel_each(source.as_ref(), region.id, cancelled);
    }

    /// Cancels all requests of a region for good. Returns the pages on which threads sleep, which are to be woken.
    #[must_use = "a thread may sleep on the pages"]
    pub(crate) fn cancel_all(&self, region: &PagedRegion) -> Vec<PageRange> {
        let mut missing = region.missing();
        let (cancelled, asleep) = missing.clear(&region.map);
        let source = missing.source.clone();
        drop(missing);
        cancel_each(source.as_ref(), region.id, cancelled);
        self.changes.notify();
        asleep
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

/// What content that could not be installed means for its request.
fn miss_of(failure: &InstallFailure) -> Miss {
    match failure {
        InstallFailure::Busy { .. } => Miss::Busy,
        InstallFailure::Unexpected { .. } => Miss::NotInstalled { is_lack: false },
        // It may be due to a lack of memory: the kernel's errors do not say.
        InstallFailure::Kernel(_) | InstallFailure::Write(_) => {
            Miss::NotInstalled { is_lack: true }
        }
    }
}

/// Cancels requests at their source.
pub(crate) fn cancel_each(
    source: Option<&Arc<dyn Source>>,
    region: RegionId,
    requests: Vec<RequestId>,
) {
    for (id, source) in requests.into_iter().zip(source.into_iter().cycle()) {
        cancel(&**source, region, id);
    }
}

/// Cancels a request at its source; a panic of the source is caught.
fn cancel(source: &dyn Source, region: RegionId, id: RequestId) {
    if catch_unwind(AssertUnwindSafe(|| source.cancel(region, id))).is_err() {
        log_limited!(
            error,
            region = region.0,
            "a source panicked while a request was cancelled"
        );
    }
}

#[cfg(test)]
#[path = "dispatch_tests.rs"]
mod tests;
