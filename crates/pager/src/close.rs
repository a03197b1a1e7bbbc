//! The end of a region: missing pages do not read as zeroes afterwards.

use std::sync::Arc;

use pagetide_memory::{PageMapImage, PageRange, PageState, Settled};
use pagetide_uapi::userfaultfd::{UserRange, Userfaultfd};

use crate::again::Again;
use crate::claim::Claim;
use crate::counters::Counters;
use crate::error::{ExportError, RegionChangeError};
use crate::fault::RegionId;
use crate::install::wake;
use crate::kept_open::{close_gone, keep_open};
use crate::log_limit::log_limited;
use crate::mark::{Mark, mark_poisoned};
use crate::pager::Pager;
use crate::region::{PagedRegion, Served};

/// A region that is handed to another pager, in this process or another.
#[derive(Debug)]
pub struct Exported {
    /// The settled pages. All others are missing.
    pub image: PageMapImage,
    /// The userfaultfd that serves the region, for [`crate::RegionConfig::foreign`]. To hand it to
    /// another process, send its descriptor.
    pub uffd: Arc<Userfaultfd>,
    /// The current addresses of the region's pages in the other process, which may have moved or
    /// unmapped some.
    pub parts: Vec<ExportedPart>,
    /// The further address spaces that were attached ([`Pager::attach`]).
    pub spaces: Vec<ExportedSpace>,
}

/// An attached address space that is handed to another pager.
#[derive(Debug)]
pub struct ExportedSpace {
    /// The userfaultfd that serves it, for [`Pager::attach`].
    pub uffd: Arc<Userfaultfd>,
    /// The current addresses of the region's pages in it.
    pub parts: Vec<ExportedPart>,
}

/// Pages that are contiguous in the other process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExportedPart {
    /// The address of the first page in the other process.
    pub start: u64,
    /// The pages.
    pub pages: PageRange,
}

impl Pager {
    /// Ends the paging of a region. Threads that wait for one of its pages resume: an exit with an
    /// error, a thread in the userfaultfd with SIGBUS, because missing pages are poisoned first. Stop
    /// the VM before this call unless all pages are present. The memory of a foreign region is then
    /// unregistered, so that its process can discard memory although nobody reads its events; it stays
    /// registered if a missing page could not be poisoned: a thread that touches such a page sleeps, and local memory
    /// cannot be paged again ([`crate::kept_open`]; before Linux 6.6, each missing page is such a page).
    ///
    /// The region's memory stays mapped until the last thread that works on it has finished.
    ///
    /// # Errors
    /// [`RegionChangeError::NoSuchRegion`].
    pub fn remove(&self, id: RegionId) -> Result<(), RegionChangeError> {
        self.remove_paced(id, &mut |_| true)
    }

    /// The same in steps. Each page at which a foreign process has mapped nothing costs two system calls, and a process may
    /// have had any number of them paged: `go_on` is told after each step how many it has met, 65 536 at most, and no lock but
    /// that of changes to regions is held meanwhile. It may wait. If it returns false, the rest is not looked at, and the
    /// userfaultfd stays open, as above.
    ///
    /// # Errors
    /// As for [`Self::remove`].
    pub fn remove_paced(
        &self,
        id: RegionId,
        go_on: &mut dyn FnMut(u64) -> bool,
    ) -> Result<(), RegionChangeError> {
        self.remove_as(id, &mut Closing::new(go_on))
    }

    /// Ends the paging of a region whose memory its owner unmaps next. Memory of this process
    /// ([`RegionConfig::mapped`](crate::RegionConfig::mapped)) becomes inaccessible as a whole and for good, and no missing page
    /// of it is poisoned (those of further spaces are): that takes a page table entry for each. A thread that accesses the memory nevertheless, or sleeps there,
    /// gets SIGSEGV, or EFAULT from a system call or KVM.
    ///
    /// The same as [`Self::remove`] for other memory, and where the kernel refuses. A [`Region`](pagetide_memory::Region) needs
    /// no such call: if every other `Arc` of it was dropped before, `remove` and the end of the pager do this by themselves.
    ///
    /// # Safety
    ///
    /// No code accesses the region's memory any more but to unmap it after this call has returned, or to map something else
    /// there then. It was not moved (mremap).
    ///
    /// # Errors
    /// As for [`Self::remove`].
    pub unsafe fn remove_with_memory(&self, id: RegionId) -> Result<(), RegionChangeError> {
        let mut go_on = |_| true;
        let mut closing = Closing::new(&mut go_on);
        closing.is_unmapped_next = true;
        self.remove_as(id, &mut closing)
    }

    fn remove_as(&self, id: RegionId, closing: &mut Closing<'_>) -> Result<(), RegionChangeError> {
        let _edit = self.lock_edit();
        let table = self.table();
        let region = table
            .region(id)
            .ok_or(RegionChangeError::NoSuchRegion { region: id })?;
        self.set_table(table.without(id));
        self.close_region(region, closing);
        Ok(())
    }

    /// Ends the paging of a foreign region here, so that a successor can continue. Nothing is poisoned;
    /// threads that wait for a page fault again, and the successor reads these faults. From the first
    /// export on, this pager reads no message from that userfaultfd. Regions that share one must
    /// therefore be handed over together: export all of them before the successor serves the first.
    ///
    /// # Errors
    /// [`ExportError`]; the region continues then.
    pub fn export(&self, id: RegionId) -> Result<Exported, ExportError> {
        let _edit = self.lock_edit();
        let table = self.table();
        let no_region = ExportError::NoSuchRegion { region: id };
        let region = table
            .region(id)
            .filter(|region| !region.is_closed())
            .ok_or(no_region)?;
        if region.memory.local().is_some() {
            return Err(ExportError::IsLocal { region: id });
        }
        let [served] = &*region.served else {
            return Err(ExportError::NoSuchRegion { region: id });
        };
        region.close();
        // Messages that were read are applied, which needs the region in the table; and no thread
        // consumes a message that the successor needs.
        served.channel.set_handed_over(true);
        let spaces = self.export_spaces(region);
        // All threads are woken below.
        drop(self.cancel_all(region));
        self.set_table(table.without(id));
        let uffd = Arc::clone(&served.channel.uffd);
        let spans = served.channel.spans_of(id, &region.home_of(served));
        self.leave_channels(region);
        // Installations in progress are finished: after this no page changes any more.
        region.settle_installing();
        region.map.notify_all();
        let image = region.map.image();
        let mut parts = Vec::with_capacity(spans.len());
        for span in spans {
            let range = UserRange {
                start: span.start,
                bytes: span.bytes(),
            };
            // Fails if the range is not mapped any more.
            let _ = uffd.wake(range);
            parts.push(ExportedPart {
                start: span.start,
                pages: span.pages,
            });
        }
        Ok(Exported {
            image,
            uffd,
            parts,
            spaces,
        })
    }

    /// Ends all activity in a region, and poisons the missing pages.
    pub(crate) fn close_region(&self, region: &PagedRegion, closing: &mut Closing<'_>) {
        close_gone();
        region.close();
        // All threads are woken below.
        drop(self.cancel_all(region));
        region.settle_installing();
        // First, so that their missing pages are marked once.
        for space in region.spaces.all() {
            self.close_space(region, &space, closing);
        }
        if ends_with_its_memory(region, closing) {
            region.map.notify_all();
            if closing.is_unmapped_next && region.memory.local().is_none() {
                // The userfaultfd may serve other regions, and stay open; and the end of a registration for MINOR alone
                // wakes nobody.
                self.wake_all(region);
                self.end_registration(region);
            }
            self.leave_channels(region);
            // Which wakes the threads that sleep there.
            self.unregister_local(region);
            return region.memory.end();
        }
        self.poison_all_missing(region, closing);
        region.map.notify_all();
        if region.memory.local().is_none() {
            // Unregistering a local region wakes its sleeping threads. Here their messages may be
            // unread, and no thread will read them for this region.
            self.wake_all(region);
        }
        let all_marked = self.all_marked(region, closing);
        if all_marked && region.memory.local().is_none() {
            self.end_registration(region);
        }
        self.leave_channels(region);
        if !all_marked {
            // This kernel cannot mark some pages as lost, or refused to. While the userfaultfds are
            // open and the memory is registered, a thread that touches such a page sleeps and does not
            // read zeroes.
            log_limited!(
                error,
                region = region.id.0,
                "lost pages cannot be poisoned: their userfaultfds stay open"
            );
            for served in &region.served {
                keep_open(&served.channel);
            }
            return;
        }
        self.unregister_local(region);
        region.memory.end();
    }

    /// Ends the registrations that the pager has made.
    fn unregister_local(&self, region: &PagedRegion) {
        for (served, range) in local_ranges(region) {
            // Fails if the memory is not mapped any more; then nothing is registered either.
            let _ = served.channel.uffd.unregister(range);
        }
    }

    /// Undoes a failed [`Pager::add`]. The region was never used, so its pages may read as before.
    pub(crate) fn undo(&self, region: &PagedRegion) {
        region.close();
        self.leave_channels(region);
        self.unregister_local(region);
        region.memory.end();
    }

    /// Wakes all threads that sleep in a region, so that they fault again.
    pub(crate) fn wake_all(&self, region: &PagedRegion) {
        let mut counters = Counters::default();
        for served in &region.served {
            wake(
                region,
                served,
                &served.channel.lock_installs(),
                &mut counters,
                served.pages,
            );
        }
        self.count(&counters);
    }

    /// Ends the registration of a foreign region without missing pages. Its process may keep a copy of the
    /// userfaultfd, which nobody reads any more: a discard would wait for ever, and so would an access to a
    /// page that was discarded.
    fn end_registration(&self, region: &PagedRegion) {
        for served in &region.served {
            for span in served.channel.spans_of(region.id, &region.home_of(served)) {
                let range = UserRange {
                    start: span.start,
                    bytes: span.bytes(),
                };
                // Fails if the process has gone, or has unmapped a part, which then faults no more.
                let _ = served.channel.uffd.unregister(range);
            }
            // Threads of the process may still wait for their events to be read.
            self.read_last_events(&served.channel);
        }
    }

    fn leave_channels(&self, region: &PagedRegion) {
        for served in &region.served {
            if !served.channel.remove(region.id, &region.home_of(served)) {
                self.poller.remove(&served.channel);
            }
        }
    }

    /// Poisons every missing page. Repeated, in case an installation that began before has given its pages back since.
    pub(crate) fn poison_all_missing(&self, region: &PagedRegion, closing: &mut Closing<'_>) {
        while region.map.next_unsettled(region.all_pages()).is_some() {
            region.settle_installing();
            if !self.poison_missing(region, closing) {
                return region.note_unmarked();
            }
        }
    }

    /// Poisons the pages that are missing and have no owner: in the page map, and in the memory that faults. False if some
    /// were left out.
    fn poison_missing(&self, region: &PagedRegion, closing: &mut Closing<'_>) -> bool {
        let mut rest = region.all_pages();
        while let Some((page, _)) = region.map.next_unsettled(rest) {
            let behind = PageRange::new(page, (rest.end().0 - page.0).min(STEP_PAGES));
            let mut done = behind;
            if let Some(guard) = region.map.claim_arrived(behind) {
                let claim = Claim::new(region, guard);
                done = claim.pages();
                // Marking the pages wakes whoever sleeps there.
                let _ = claim.finish(Settled::Poisoned);
                self.evict(region, done);
                let _ = self.poison_in_time(region, done, &mut closing.again);
            }
            if !closing.goes_on() {
                return false;
            }
            (_, rest) = rest.split_at(done.end().0 - rest.first().0);
            if rest.is_empty() {
                break;
            }
        }
        true
    }

    /// Removes mappings of missing pages that were not made by the pager: they do not have the pages'
    /// content, and UFFDIO_POISON marks only unmapped pages.
    fn evict(&self, region: &PagedRegion, pages: PageRange) {
        let Some(local) = region.memory.local().filter(|_| !region.may_exist()) else {
            return;
        };
        if let Err(error) = self.unmap(region, local, pages) {
            log_limited!(error, %error, %pages, "dropping the mappings of missing pages");
        }
    }

    /// Marks pages as poisoned, and wakes the threads that sleep there, within the time of `again`. Returns whether all pages
    /// could be marked.
    pub(crate) fn poison_in_time(
        &self,
        region: &PagedRegion,
        pages: PageRange,
        again: &mut Again,
    ) -> bool {
        let mut rest = pages;
        let mut all_marked = true;
        while let Some(served) = region.served(rest.first()).filter(|_| !rest.is_empty()) {
            let part = rest.intersection(served.pages);
            all_marked &= self.mark(region, served, part, again);
            (_, rest) = rest.split_at(part.count());
        }
        all_marked
    }

    fn mark(
        &self,
        region: &PagedRegion,
        served: &Served,
        pages: PageRange,
        again: &mut Again,
    ) -> bool {
        loop {
            let lock = served.channel.lock_installs();
            let mark = mark_poisoned(region, served, &lock, pages, again);
            drop(lock);
            match mark {
                Mark::Made => {
                    again.progress();
                    return true;
                }
                Mark::EventsFirst => self.read_events(&served.channel),
                Mark::Failed => break,
            }
            if again.pause().is_err() {
                break;
            }
        }
        region.note_unmarked();
        false
    }

    /// Retries to mark lost pages that could not be marked. Returns whether every lost page is now
    /// marked.
    fn all_marked(&self, region: &PagedRegion, closing: &mut Closing<'_>) -> bool {
        if !region.has_unmarked() || !region.can_poison || closing.has_given_up {
            return !region.has_unmarked();
        }
        let mut all_marked = true;
        // Every page, also after a failure: an access to a marked page raises SIGBUS.
        for run in region.runs(|state| state == PageState::Poisoned) {
            for step in steps(run) {
                all_marked &= self.poison_in_time(region, step, &mut closing.again);
                if !closing.goes_on() {
                    return false;
                }
            }
        }
        all_marked
    }
}

/// The most pages of one step: no more holes are met in it.
pub(crate) const STEP_PAGES: u64 = 1 << 16;

/// The parts of a run, one for each step.
pub(crate) fn steps(mut run: PageRange) -> impl Iterator<Item = PageRange> {
    std::iter::from_fn(move || {
        let step;
        (step, run) = run.split_at(STEP_PAGES);
        (!step.is_empty()).then_some(step)
    })
}

/// What the end of a region may take.
pub(crate) struct Closing<'a> {
    pub(crate) again: Again,
    /// Told after each step how many pages were not mapped, if any.
    go_on: &'a mut dyn FnMut(u64) -> bool,
    has_given_up: bool,
    /// The owner of the memory has promised that nobody accesses it any more.
    is_unmapped_next: bool,
}

impl<'a> Closing<'a> {
    pub(crate) fn new(go_on: &'a mut dyn FnMut(u64) -> bool) -> Self {
        Self {
            again: Again::in_all(),
            go_on,
            has_given_up: false,
            is_unmapped_next: false,
        }
    }

    /// For a thread that can come back later.
    pub(crate) fn for_a_turn(go_on: &'a mut dyn FnMut(u64) -> bool) -> Self {
        Self {
            again: Again::for_a_turn(),
            ..Self::new(go_on)
        }
    }

    /// Asked after each step.
    pub(crate) fn goes_on(&mut self) -> bool {
        let holes = self.again.take_holes();
        self.has_given_up |= holes > 0 && !(self.go_on)(holes);
        !self.has_given_up
    }
}

impl Drop for Pager {
    fn drop(&mut self) {
        let table = self.table();
        for region in table.iter() {
            self.close_region(region, &mut Closing::new(&mut |_| true));
        }
    }
}

/// Whether nobody can read a missing page any more, so that none needs a mark: that would cost a page table entry for each.
fn ends_with_its_memory(region: &PagedRegion, closing: &Closing<'_>) -> bool {
    match region.memory.local() {
        // Nobody else has it, so that it is unmapped next.
        Some(local) => Arc::strong_count(local) == 1 && local.close_guest().is_ok(),
        None if region.served.iter().all(|served| served.channel.is_gone()) => true,
        None => closing.is_unmapped_next && region.memory.close(),
    }
}

/// The addresses that the pager has registered, with their channels.
fn local_ranges(region: &PagedRegion) -> impl Iterator<Item = (&Served, UserRange)> {
    let start = region.memory.shape().range.start().as_u64();
    region.registered().iter().map(move |served| {
        let skip = served.pages.first().0 << region.page_shift();
        let range = UserRange {
            start: start + skip,
            bytes: region.bytes_of(served.pages),
        };
        (served, range)
    })
}

#[cfg(test)]
#[path = "close_tests.rs"]
mod tests;
