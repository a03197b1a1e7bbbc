//! What the owner of a region asks of its requests: to pause, to go on, with the same source or another, or to end.

use std::sync::Arc;

use pagetide_memory::PageRange;

use crate::close::Closing;
use crate::dispatch::cancel_each;
use crate::error::RegionChangeError;
use crate::fault::RegionId;
use crate::pager::Pager;
use crate::region::PagedRegion;
use crate::source::Source;

/// The state of a region's requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SourceStatus {
    /// The source has failed too often, or an answer could not be installed, or the owner has suspended the
    /// region: nothing is requested until [`Pager::resume`], [`Pager::replace_source`] or [`Pager::abandon`].
    pub is_stalled: bool,
    /// The owner has suspended it ([`Pager::suspend`]).
    pub is_suspended: bool,
    /// Bytes that were requested and not yet installed.
    pub in_flight_bytes: u64,
    /// Requests that wait to be submitted.
    pub waiting_requests: usize,
    /// Missing pages that prefetch leaves out, because the source failed to deliver them, or their content
    /// could not be installed, as often as the [`RetryPolicy`](crate::RetryPolicy) allows. A thread that
    /// touches one requests it.
    pub set_aside_pages: u64,
    /// The source answers nothing, or the memory takes nothing, and no thread waits for it: prefetch requests
    /// one batch at a time, until there is an answer, or until content is installed.
    pub is_held: bool,
}

impl Pager {
    fn region(&self, id: RegionId) -> Result<Arc<PagedRegion>, RegionChangeError> {
        let table = self.table();
        let region = table.region(id);
        let region = region.ok_or(RegionChangeError::NoSuchRegion { region: id })?;
        Ok(Arc::clone(region))
    }

    fn requesting_region(&self, id: RegionId) -> Result<Arc<PagedRegion>, RegionChangeError> {
        let region = self.region(id)?;
        match region.has_source() {
            true => Ok(region),
            false => Err(RegionChangeError::NoSource { region: id }),
        }
    }

    /// The state of a region's requests.
    ///
    /// # Errors
    /// The region does not exist, or has no source.
    pub fn source_status(&self, id: RegionId) -> Result<SourceStatus, RegionChangeError> {
        let region = self.requesting_region(id)?;
        let missing = region.missing();
        let requests = &missing.requests;
        Ok(SourceStatus {
            is_stalled: requests.is_stalled(),
            is_suspended: requests.is_suspended(),
            in_flight_bytes: requests.in_flight_bytes(),
            waiting_requests: requests.waiting(),
            set_aside_pages: missing.set_aside_runs().map(PageRange::count).sum(),
            is_held: requests.breaker.is_open(),
        })
    }

    /// Suspends the requests of a region, as when the link to its source is down and the owner makes another:
    /// nothing is requested until [`Self::resume`] or [`Self::replace_source`]. Requests in flight are cancelled, and
    /// made again then; that uses up none of their attempts. Threads wait meanwhile, and late answers are used.
    ///
    /// # Errors
    /// The region does not exist, or has no source.
    pub fn suspend(&self, id: RegionId) -> Result<(), RegionChangeError> {
        let region = self.requesting_region(id)?;
        let mut missing = region.missing();
        let recalled = missing.requests.suspend();
        let source = missing.source.clone();
        drop(missing);
        cancel_each(source.as_ref(), region.id, recalled);
        self.changes.notify();
        Ok(())
    }

    /// Resumes a region whose content could not be had or installed, whatever its content comes from: requests
    /// everything from a source again that threads wait for. Threads whose faults could not be resolved are
    /// woken, and fault again, unless other code than the pager has put content into their page.
    ///
    /// # Errors
    /// The region does not exist.
    pub fn resume(&self, id: RegionId) -> Result<(), RegionChangeError> {
        let region = self.region(id)?;
        region.missing().restart(&region.map);
        self.changes.notify();
        self.submit(&region);
        self.wake_asleep(&region);
        Ok(())
    }

    /// Replaces a region's source. Requests in flight at the previous source are cancelled and
    /// repeated; its answers are dropped. A stalled region resumes.
    ///
    /// # Errors
    /// The region does not exist, or has no source.
    pub fn replace_source(
        &self,
        id: RegionId,
        source: Arc<dyn Source>,
    ) -> Result<(), RegionChangeError> {
        let region = self.requesting_region(id)?;
        let mut missing = region.missing();
        let former = missing.source.replace(source);
        let recalled = missing.requests.recall();
        missing.restart(&region.map);
        missing.begin_prefetch(&region.map);
        missing.replaced += 1;
        drop(missing);
        cancel_each(former.as_ref(), region.id, recalled);
        self.changes.notify();
        self.submit(&region);
        self.wake_asleep(&region);
        Ok(())
    }

    /// Abandons a region's missing pages: they are poisoned, so that an access raises a machine check
    /// or SIGBUS and never reads zeroes. Present pages stay.
    ///
    /// # Errors
    /// The region does not exist.
    pub fn abandon(&self, id: RegionId) -> Result<(), RegionChangeError> {
        let region = self.region(id)?;
        let asleep = self.cancel_all(&region);
        self.poison_all_missing(&region, &mut Closing::new(&mut |_| true));
        // Their pages may have been settled by a thread that found no entry any more.
        self.wake_runs(&region, &asleep);
        Ok(())
    }
}
