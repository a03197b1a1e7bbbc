//! How prefetch fetches a run of pages, by the origin of their content.

use pagetide_memory::{Claim as Claimed, PageIndex, PageRange, PageState, Urgency};
use pagetide_uapi::userfaultfd::{InstallError, Wake};

use super::Ahead;
use crate::arrival::{Purpose, arrive};
use crate::claim::Claim;
use crate::config::Holes;
use crate::content::{content_of, fill_buffer, fill_buffer_now, mapped_now};
use crate::counters::Counters;
use crate::error::{InstallFailure, PrefetchError, ResolveError};
use crate::fault::{Delivery, Fault};
use crate::install::{Installed, Installer};
use crate::memory::Body;
use crate::region::{PagedRegion, Served, Supply};
use crate::source::{Filled, LocalSource, Source};

/// The longest batch that prefetch's thread reads in place of its source's threads: it sees to nothing else meanwhile.
const MOST_READ_HERE: u64 = 4 << 20;

/// The result of fetching a run of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fetched {
    /// All pages are installed or requested, by this thread or another.
    All,
    /// Some pages failed, or the run was not contiguous.
    Part,
    /// Nothing was requested, because the region's bulk limit is reached.
    NoRoom,
    /// Nothing was done, because the region's source is stalled, or answers nothing.
    Held,
}

impl Ahead<'_> {
    /// Fetches `page` and the absent pages after it, at most `most` pages, unless another thread has
    /// claimed or requested it.
    pub(super) fn fetch(
        &mut self,
        region: &PagedRegion,
        page: PageIndex,
        most: u64,
    ) -> Result<Fetched, PrefetchError> {
        let Some(served) = region.served(page) else {
            return Ok(Fetched::All);
        };
        let window = PageRange::new(page, most).intersection(served.pages);
        match &region.supply {
            Supply::PageCache(holes) => {
                let all = self.install(region, served, page, window, *holes)?;
                Ok(if all { Fetched::All } else { Fetched::Part })
            }
            Supply::Local(source) => {
                let all = self.fill(region, page, window, &**source)?;
                Ok(if all { Fetched::All } else { Fetched::Part })
            }
            Supply::Source => {
                let missing = region.missing();
                let requests = &missing.requests;
                if requests.breaker.is_open() && !requests.has_bulk_room(window.count()) {
                    return Ok(Fetched::Held);
                }
                let source = missing.source.clone();
                drop(missing);
                let Some(source) = source else {
                    return Ok(self.request(region, page, window));
                };
                let now = self.fill_now(region, &*source, window, Urgency::Bulk);
                if now == Some(true) {
                    return Ok(Fetched::All);
                }
                let requested = self.request(region, page, window);
                let reads_itself = requested == Fetched::NoRoom
                    && now.is_none()
                    && region.bytes_of(window) <= MOST_READ_HERE;
                if reads_itself
                    && self.fill_now(region, &*source, window, Urgency::Urgent) == Some(true)
                {
                    return Ok(Fetched::All);
                }
                Ok(requested)
            }
        }
    }

    fn install(
        &mut self,
        region: &PagedRegion,
        served: &Served,
        page: PageIndex,
        window: PageRange,
        holes: Holes,
    ) -> Result<bool, PrefetchError> {
        let pager = &*self.shared.pager;
        let lock = served.channel.lock_installs();
        let Claimed::Won(guard) = region.map.claim_run(page, window) else {
            self.counters.lost_claims += 1;
            return Ok(true);
        };
        let claim = Claim::new(region, guard);
        let claimed = claim.pages();
        let settled = |counters: &Counters| counters.pages + counters.exists + counters.poisoned;
        let before = settled(&self.counters);
        let mut installer = Installer {
            region,
            served,
            lock: &lock,
            counters: &mut self.counters,
            // Wake before populating: population may wait for a slot update, which may wait for a
            // thread that sleeps here.
            wake: Wake::Wake,
            ahead: Some(pager),
        };
        let installed = installer.install(claim, Body::PageCache, Some(page));
        drop(lock);
        if let (Ok(Installed::Piece(pages)), true) = (&installed, served.channel.has_events) {
            pager.populate(region, *pages, &mut self.counters);
        }
        match installed {
            Ok(Installed::EventsFirst) => pager.read_events(&served.channel),
            Ok(Installed::Unmapped { page, is_gone }) => pager.unmapped(region, page, is_gone),
            Ok(_) => {}
            Err(InstallFailure::Busy { .. }) => {}
            Err(InstallFailure::Kernel(InstallError::NoContent)) if holes == Holes::AreZero => {
                let hole = PageRange::single(page);
                arrive(
                    pager,
                    region,
                    &mut self.counters,
                    hole,
                    Body::Zero,
                    Purpose::Ahead,
                )
                .map_err(|source| self.failed(region, page, source))?;
            }
            Err(source) => return Err(self.failed(region, page, source)),
        }
        Ok(settled(&self.counters) - before == claimed.count())
    }

    fn fill(
        &mut self,
        region: &PagedRegion,
        page: PageIndex,
        window: PageRange,
        source: &dyn LocalSource,
    ) -> Result<bool, PrefetchError> {
        let pages = missing_run(region, window);
        let count = pages.count();
        if pages.is_empty() {
            return Ok(true);
        }
        let content = match fill_buffer(region, source, pages, &mut self.buffer) {
            Ok(Filled::Bytes) => content_of(region, pages, &self.buffer),
            Ok(Filled::Zero) => Body::Zero,
            Ok(Filled::Poisoned) if count == 1 => Body::Poisoned,
            // Page by page, because it is unknown which of them failed.
            Ok(Filled::Poisoned) | Err(_) if count > 1 => {
                return self
                    .fill(region, page, PageRange::single(page), source)
                    .map(|_| false);
            }
            Ok(Filled::Poisoned) => return Ok(false),
            Err(source) => {
                let fault = fault(region, page);
                return Err(PrefetchError::Resolve(ResolveError::Content {
                    fault,
                    source,
                }));
            }
        };
        let pager = &self.shared.pager;
        let arrived = arrive(
            pager,
            region,
            &mut self.counters,
            pages,
            content,
            Purpose::Ahead,
        );
        match arrived {
            // It comes back to it.
            Err(InstallFailure::Busy { .. }) => Ok(false),
            Err(source) => Err(self.failed(region, page, source)),
            Ok(_) => Ok(true),
        }
    }

    /// Installs a batch if the source has its content without waiting. `None`: it has not. False: the content could not be
    /// installed. It then has to be requested, and is treated like what the source fails to deliver.
    fn fill_now(
        &mut self,
        region: &PagedRegion,
        source: &dyn Source,
        window: PageRange,
        urgency: Urgency,
    ) -> Option<bool> {
        let pages = missing_run(region, window);
        if pages.is_empty() {
            return Some(true);
        }
        let content = match mapped_now(region, source, pages, urgency) {
            Some(content) => content,
            None => {
                let buffer = &mut self.buffer;
                match fill_buffer_now(region, source, pages, urgency, buffer) {
                    Some(Filled::Bytes) => content_of(region, pages, buffer),
                    Some(Filled::Zero) => Body::Zero,
                    Some(Filled::Poisoned) | None => return None,
                }
            }
        };
        let pager = &self.shared.pager;
        let counters = &mut self.counters;
        let before = counters.pages;
        let arrived = arrive(pager, region, counters, pages, content, Purpose::Ahead);
        if counters.pages > before {
            region.missing().close_breaker(&region.map);
        }
        Some(arrived.is_ok())
    }

    /// Requests a batch if the bulk limit permits it.
    fn request(&mut self, region: &PagedRegion, page: PageIndex, window: PageRange) -> Fetched {
        let mut missing = region.missing();
        if !missing.requests.has_bulk_room(window.count()) {
            return match missing.requests.is_bulk_held() {
                true => Fetched::Held,
                false => Fetched::NoRoom,
            };
        }
        let requested = missing.request_ahead(&region.map, page, window);
        drop(missing);
        if let Some(pages) = requested {
            self.requested_pages += pages.count();
            self.shared.pager.submit(region);
        }
        Fetched::All
    }

    fn failed(
        &self,
        region: &PagedRegion,
        page: PageIndex,
        source: InstallFailure,
    ) -> PrefetchError {
        let fault = fault(region, page);
        PrefetchError::Resolve(ResolveError::Install { fault, source })
    }
}

/// The first of `window`, if it is Absent or Pending, and the Absent pages after it.
fn missing_run(region: &PagedRegion, window: PageRange) -> PageRange {
    let first = window.first();
    let is_missing = |&page: &PageIndex| match region.map.state(page) {
        Some(PageState::Absent) => true,
        // An earlier fault could not be resolved.
        Some(PageState::Pending) => page == first,
        _ => false,
    };
    let count = window.iter().take_while(is_missing).count() as u64;
    PageRange::new(first, count)
}

/// The fault in an error message: no thread has touched the page, but an access to it would fail in
/// this way.
fn fault(region: &PagedRegion, page: PageIndex) -> Fault {
    Fault {
        region: region.id,
        page,
        gpa: region.gpa_of(page),
        access: pagetide_memory::Access::Read,
        vcpu: None,
        delivery: Delivery::Uffd,
    }
}
