//! Installing claimed pages: content into the memory that faults.
//!
//! Every installation passes [`Installer::install`]: local content that a fault claimed, answers of a
//! source, and pushed pages.

use pagetide_memory::{PageIndex, PageRange, Settled};
use pagetide_uapi::userfaultfd::{InstallError, Wake};

use crate::again::Again;
use crate::channel::InstallLock;
use crate::claim::{Claim, Sleeping};
use crate::counters::Counters;
use crate::error::InstallFailure;
use crate::log_limit::log_limited;
use crate::mark::{Mark, mark_poisoned};
use crate::memory::{Body, Place};
use crate::pager::Pager;
use crate::region::{PagedRegion, Served};

/// The content that one call copies ahead of any access.
const AHEAD_BYTES: u64 = 64 << 10;

/// The result of an installation.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Installed {
    /// The faulting page is installed, with the others of this piece; without a faulting page, all
    /// pages are installed.
    Piece(PageRange),
    /// The faulting page had content already, which the region trusts.
    Exists,
    /// The faulting page has an uncorrected error and is now poisoned.
    Poisoned,
    /// A page is not mapped any more, or its process has exited. That page and the pages after it were
    /// given back; the faulting page may be among them.
    Unmapped {
        /// The page that is not mapped.
        page: PageIndex,
        /// The process has exited.
        is_gone: bool,
    },
    /// The region is being closed. All pages were given back.
    Closed,
    /// The process discards memory: its events must be read first. All pages were given back.
    EventsFirst,
}

/// The parameters of installations in one region.
pub(crate) struct Installer<'a> {
    pub(crate) region: &'a PagedRegion,
    pub(crate) served: &'a Served,
    pub(crate) lock: &'a InstallLock<'a>,
    pub(crate) counters: &'a mut Counters,
    /// Whether the installing call also wakes threads that sleep in the userfaultfd. If not, because probably none
    /// sleeps, a wake-up that is left to the installer is a call of its own.
    pub(crate) wake: Wake,
    /// The pages were installed ahead of any access: they are mapped in stage 2 before they become
    /// Present, so that a Present page causes no stage-2 fault.
    pub(crate) ahead: Option<&'a Pager>,
}

impl<'a> Installer<'a> {
    /// Installs `content` in the pages of `claim`, and settles them. In the common case this takes one
    /// ioctl, and one atomic operation per page.
    ///
    /// With a `wanted` page, errors of its neighbours do not fail the call: these pages are given back.
    #[inline]
    pub(crate) fn install(
        &mut self,
        claim: Claim<'_>,
        content: Body<'_>,
        wanted: Option<PageIndex>,
    ) -> Result<Installed, InstallFailure> {
        let pages = claim.pages();
        if self.region.is_closed_to_installers() {
            self.give_back(claim);
            return Ok(Installed::Closed);
        }
        let Some(place) = self.region.place(self.served, self.lock, pages) else {
            self.give_back(claim);
            let page = pages.first();
            return Ok(Installed::Unmapped {
                page,
                is_gone: false,
            });
        };
        if content == Body::Poisoned {
            return self.install_poison(claim, &place, wanted);
        }
        if place.pages == pages && wanted.is_none() && self.populates_ahead().is_some() {
            return self.install_ahead(claim, content);
        }
        if place.pages == pages {
            if let Err(failure) = self.region.memory.put(&place, content, self.wake) {
                return self.install_rest(claim, content, wanted, failure);
            }
            match self.ahead {
                Some(_) => self.settle_ahead(claim, content),
                None => self.settle(claim, content),
            }
            return Ok(Installed::Piece(pages));
        }
        // The pages are not contiguous: `install_rest` looks up the first place again.
        let from_start = InstallError::Again { installed_bytes: 0 };
        self.install_rest(claim, content, wanted, from_start.into())
    }

    /// Installs pages that no thread waits for, and maps them in stage 2. The kernel makes each page visible when
    /// it has copied it. The pages are therefore copied from the last to the first, a few in each call: a guest
    /// that reads upwards, faster than the kernel copies, waits for the first page, and does not fault in stage 2
    /// on each page that is there and not populated.
    fn install_ahead(
        &mut self,
        mut claim: Claim<'_>,
        content: Body<'_>,
    ) -> Result<Installed, InstallFailure> {
        let pages = claim.pages();
        let first = pages.first();
        let most = match content {
            Body::Bytes(_) | Body::Mapped(_) => self.region.pages_in(AHEAD_BYTES).max(1),
            _ => u64::MAX,
        };
        let skipped = |page: PageIndex| {
            self.region
                .bytes_of(PageRange::new(first, page.0 - first.0))
        };
        let part =
            |pages: PageRange| content.part(skipped(pages.first()), self.region.bytes_of(pages));
        // The pages from here on are installed.
        let mut from = pages.end();
        while from > first {
            let count = most.min(from.0 - first.0);
            let piece = PageRange::new(PageIndex(from.0 - count), count);
            let place = self.region.place(self.served, self.lock, piece);
            let failure =
                match place.map(|place| self.region.memory.put(&place, part(piece), self.wake)) {
                    Some(Ok(())) => {
                        from = piece.first();
                        continue;
                    }
                    Some(Err(failure)) => failure,
                    None => InstallError::NoMapping.into(),
                };
            let (before, rest) = claim.split_at(piece.first().0 - first.0);
            let (piece, behind) = rest.split_at(count);
            self.settle_ahead(behind, content);
            let body = part(piece.pages());
            match self.install_rest(piece, body, None, failure) {
                Ok(Installed::Piece(_)) => {}
                other => {
                    self.give_back(before);
                    return other;
                }
            }
            claim = before;
            from = claim.pages().end();
        }
        self.settle_ahead(claim, content);
        Ok(Installed::Piece(pages))
    }

    /// Populates and settles installed pages.
    fn settle_ahead(&mut self, claim: Claim<'_>, content: Body<'_>) {
        if claim.pages().is_empty() {
            return;
        }
        // Only when the claim is complete: population may wait for a slot update, which may wait for a thread
        // that sleeps on another page of the claim.
        if let Some(pager) = self.populates_ahead() {
            pager.populate(self.region, claim.pages(), self.counters);
        }
        self.settle(claim, content);
    }

    /// Settles the pages of a claim that one call has installed.
    #[inline]
    fn settle(&mut self, claim: Claim<'_>, body: Body<'_>) {
        let pages = claim.pages();
        self.counters.installs += 1;
        self.counters.pages += pages.count();
        if body == Body::Zero {
            self.counters.zero_pages += pages.count();
        }
        if self.ahead.is_some() {
            self.counters.ahead_pages += pages.count();
        }
        let zero = body == Body::Zero && self.region.memory.may_share_zero_page();
        let settled = if zero {
            Settled::Zero
        } else {
            Settled::Present
        };
        self.finish(claim, settled);
    }

    /// Whom to ask for the stage-2 tables of pages that are installed ahead of any access, where a mapper fills these.
    /// Not under the install lock of a channel with events, because a process that discards memory
    /// waits for that lock: there, the caller populates after it has released the lock.
    fn populates_ahead(&self) -> Option<&'a Pager> {
        let may = self.region.mapper().is_some() && !self.served.channel.has_events;
        self.ahead.filter(|_| may)
    }

    #[inline]
    fn finish(&mut self, claim: Claim<'_>, settled: Settled) {
        let pages = claim.pages();
        let Sleeping { before, since } = claim.finish(settled);
        if since || before && self.wake == Wake::DontWake {
            wake(self.region, self.served, self.lock, self.counters, pages);
        } else if before {
            // The call that has installed woke the threads of one address space.
            self.region
                .spaces
                .wake(self.region.id, self.counters, pages);
        }
    }

    /// Gives pages back in their previous states. Sleeping threads that were left to this claim fault
    /// again, unless the pages are in the book of missing pages: then whoever delivers them wakes the threads.
    pub(crate) fn give_back(&mut self, claim: Claim<'_>) {
        for pages in claim.give_back() {
            wake(self.region, self.served, self.lock, self.counters, pages);
        }
    }

    /// Continues after a call that ended early with `failure`.
    #[cold]
    fn install_rest(
        &mut self,
        mut claim: Claim<'_>,
        mut body: Body<'_>,
        wanted: Option<PageIndex>,
        mut failure: InstallFailure,
    ) -> Result<Installed, InstallFailure> {
        let first = claim.pages().first();
        let (mut result, mut unexpected) = (None, None);
        let mut again = Again::with_patience();
        // The number of pages of the last call, and the maximum for the next one.
        let mut tried = claim.pages().count();
        let mut most = u64::MAX;
        loop {
            let installed_bytes = match failure {
                InstallFailure::Kernel(
                    InstallError::Exists { installed_bytes }
                    | InstallError::Again { installed_bytes },
                ) => installed_bytes,
                _ => 0,
            };
            if installed_bytes > 0 {
                again.progress();
                let (head, rest) = claim.split_at(self.region.pages_in(installed_bytes));
                self.note(&mut result, wanted, head.pages());
                body = body.part(installed_bytes, self.region.bytes_of(rest.pages()));
                let whole = body;
                self.settle(head, whole);
                claim = rest;
            }
            match failure {
                InstallFailure::Kernel(InstallError::Exists { .. }) => {
                    let page = claim.pages().first();
                    let single = PageRange::single(page);
                    self.counters.exists += 1;
                    let is_trusted = self.region.may_exist_at(page);
                    if is_trusted && let Err(error) = self.take(single, body) {
                        // Look again if what was there has gone.
                        failure = match error {
                            InstallError::NoContent => InstallError::Again { installed_bytes: 0 },
                            error => error,
                        }
                        .into();
                        continue;
                    }
                    let (there, rest) = claim.split_at(1);
                    if is_trusted {
                        self.finish(there, Settled::Present);
                        // The call that found the page woke no thread.
                        self.wake_if_asleep(single);
                        if wanted == Some(page) {
                            result = Some(Installed::Exists);
                        }
                    } else {
                        self.give_back(there);
                        let is_wanted = match self.ahead {
                            // Whoever has brought it tries again without this page.
                            Some(_) => true,
                            None => wanted == Some(page),
                        };
                        if is_wanted {
                            self.give_back(rest);
                            return Err(InstallFailure::Unexpected { page });
                        }
                        // That of a neighbour keeps no page that a thread waits for from its content.
                        unexpected = unexpected.or(Some(page));
                    }
                    body = body.part(
                        self.region.bytes_of(single),
                        self.region.bytes_of(rest.pages()),
                    );
                    claim = rest;
                }
                InstallFailure::Kernel(InstallError::Again { .. }) => {
                    self.counters.again += 1;
                    if self.served.channel.has_events && installed_bytes == 0 && again.tries() > 0 {
                        self.give_back(claim);
                        return Ok(result.unwrap_or(Installed::EventsFirst));
                    }
                    // After progress, the next call may well succeed.
                    if installed_bytes == 0
                        && let Err(busy) = again.pause()
                    {
                        self.give_back(claim);
                        return result.ok_or(busy);
                    }
                }
                // The kernel installs within one mapping only: it returns the same error for a run in
                // two mappings as for one in none.
                InstallFailure::Kernel(InstallError::NoMapping) if tried > 1 => most = tried / 2,
                InstallFailure::Kernel(error @ (InstallError::NoMapping | InstallError::Gone)) => {
                    let page = claim.pages().first();
                    self.give_back(claim);
                    let is_gone = error == InstallError::Gone;
                    return Ok(result.unwrap_or(Installed::Unmapped { page, is_gone }));
                }
                InstallFailure::Kernel(InstallError::Poisoned)
                    if wanted.is_none_or(|page| page == claim.pages().first()) =>
                {
                    let (lost, rest) = claim.split_at(1);
                    if !rest.pages().is_empty() && wanted.is_some() {
                        self.give_back(rest);
                        self.poison(lost);
                        return Ok(Installed::Poisoned);
                    }
                    body = body.part(
                        self.region.bytes_of(lost.pages()),
                        self.region.bytes_of(rest.pages()),
                    );
                    self.poison(lost);
                    if wanted.is_some() {
                        return Ok(Installed::Poisoned);
                    }
                    claim = rest;
                }
                source => {
                    if let Some(result) = result.filter(|_| wanted.is_some()) {
                        // The error concerns a later neighbour, whose own fault will meet it.
                        self.give_back(claim);
                        return Ok(result);
                    }
                    let at = claim.pages().first();
                    match wanted {
                        // The error concerns an earlier neighbour: continue with the wanted page.
                        Some(page) if page > at => {
                            let skip = PageRange::new(at, page.0 - at.0);
                            let (before, rest) = claim.split_at(skip.count());
                            self.give_back(before);
                            body = body.part(
                                self.region.bytes_of(skip),
                                self.region.bytes_of(rest.pages()),
                            );
                            claim = rest;
                            result = None;
                        }
                        _ => {
                            self.give_back(claim);
                            return Err(source);
                        }
                    }
                }
            }
            if claim.pages().is_empty() {
                break;
            }
            let (piece, _) = claim.pages().split_at(most.min(claim.pages().count()));
            most = u64::MAX;
            let Some(place) = self.region.place(self.served, self.lock, piece) else {
                let page = piece.first();
                self.give_back(claim);
                return Ok(result.unwrap_or(Installed::Unmapped {
                    page,
                    is_gone: false,
                }));
            };
            let part = body.part(0, place.range.bytes);
            tried = place.pages.count();
            match self.region.memory.put(&place, part, self.wake) {
                Ok(()) if place.pages == claim.pages() => {
                    self.note(&mut result, wanted, place.pages);
                    self.settle(claim, part);
                    break;
                }
                // As if the kernel had ended the call at the end of the place.
                Ok(()) => {
                    failure = InstallError::Again {
                        installed_bytes: place.range.bytes,
                    }
                    .into();
                }
                Err(next) => failure = next,
            }
        }
        if wanted.is_none() {
            return match unexpected {
                Some(page) => Err(InstallFailure::Unexpected { page }),
                None => Ok(Installed::Piece(PageRange::single(first))),
            };
        }
        // The wanted page was in the claim, and each page of the claim was processed.
        let page = wanted.unwrap_or(first);
        result.ok_or(InstallFailure::Unexpected { page })
    }

    /// Maps what a page has already.
    fn take(&self, page: PageRange, body: Body<'_>) -> Result<(), InstallError> {
        // The page cache's content is there because it is mapped.
        if body == Body::PageCache {
            return Ok(());
        }
        let place = self.region.place(self.served, self.lock, page);
        let place = place.ok_or(InstallError::NoMapping)?;
        self.region.memory.take(&place, self.wake)
    }

    fn note(&self, result: &mut Option<Installed>, wanted: Option<PageIndex>, pages: PageRange) {
        if wanted.is_some_and(|page| pages.contains(page)) {
            *result = Some(Installed::Piece(pages));
        }
    }

    fn wake_if_asleep(&mut self, pages: PageRange) {
        if self.wake == Wake::Wake {
            wake(self.region, self.served, self.lock, self.counters, pages);
        }
    }

    fn install_poison(
        &mut self,
        claim: Claim<'_>,
        place: &Place<'_>,
        wanted: Option<PageIndex>,
    ) -> Result<Installed, InstallFailure> {
        let (head, rest) = claim.split_at(place.pages.count());
        self.give_back(rest);
        self.poison(head);
        Ok(match wanted {
            Some(_) => Installed::Poisoned,
            None => Installed::Piece(place.pages),
        })
    }

    /// Settles pages as poisoned, and then marks them in the memory that faults: a thread that the mark
    /// wakes finds the page map up to date. Pages are marked even if no thread sleeps: after the
    /// userfaultfd is closed, they must not read as zeroes.
    fn poison(&mut self, claim: Claim<'_>) {
        let pages = claim.pages();
        self.counters.poisoned += pages.count();
        self.finish(claim, Settled::Poisoned);
        let mut again = Again::with_patience();
        let mark = mark_poisoned(self.region, self.served, self.lock, pages, &mut again);
        if mark != Mark::Made {
            self.region.note_unmarked();
            // Sleeping threads fault again, which retries to mark the page.
            wake(self.region, self.served, self.lock, self.counters, pages);
        }
    }
}

/// Wakes the threads that sleep on pages, in every address space.
pub(crate) fn wake(
    region: &PagedRegion,
    served: &Served,
    lock: &InstallLock<'_>,
    counters: &mut Counters,
    pages: PageRange,
) {
    let mut rest = pages;
    while let Some(place) = region.place(served, lock, rest) {
        counters.wakes += 1;
        // Fails only for an invalid range, which these are not.
        if let Err(error) = place.uffd.wake(place.range) {
            log_limited!(error, %error, range = %place.range, "UFFDIO_WAKE");
        }
        (_, rest) = rest.split_at(place.pages.count());
        if rest.is_empty() {
            break;
        }
    }
    region.spaces.wake(region.id, counters, pages);
}
