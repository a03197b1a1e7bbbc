//! The end of a region: missing pages do not read as zeroes afterwards.

use std::sync::Arc;

use pagetide_memory::{PageMapImage, PageRange, PageState, Settled};
use pagetide_uapi::userfaultfd::{UserRange, Userfaultfd};

use crate::again::Again;
use crate::claim::Claim;
use crate::counters::Counters;
use crate::error::{ExportError, RegionChangeError, WAIT_SLICE};
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
        let _edit = self.lock_edit();
        let table = self.table();
        let region = table
            .region(id)
            .ok_or(RegionChangeError::NoSuchRegion { region: id })?;
        self.set_table(table.without(id));
        self.close_region(region, &mut Closing::new(go_on));
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
        self.settle_installing(region);
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
        self.settle_installing(region);
        // First, so that their missing pages are marked once.
        for space in region.spaces.all() {
            self.close_space(region, &space, closing);
        }
        if ends_with_its_memory(region) {
            region.map.notify_all();
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
            // A thread of the process may still wait for an event to be read.
            self.read_events(&served.channel);
        }
    }

    fn leave_channels(&self, region: &PagedRegion) {
        for served in &region.served {
            if !served.channel.remove(region.id, &region.home_of(served)) {
                self.poller.remove(&served.channel);
            }
        }
    }

    /// Waits for installations in progress, which take a few system calls.
    fn settle_installing(&self, region: &PagedRegion) {
        let mut rest = region.all_pages();
        // An installation that begins behind the place of this walk sees that the region is closed.
        while let Some(page) = region.map.next_installing(rest) {
            while region.map.state(page) == Some(PageState::Installing) {
                region.map.wait_for_owner(page, WAIT_SLICE);
            }
            rest = PageRange::new(page, rest.end().0 - page.0);
        }
    }

    /// Poisons every missing page. Repeated, in case an installation that began before has given its pages back since.
    pub(crate) fn poison_all_missing(&self, region: &PagedRegion, closing: &mut Closing<'_>) {
        while region.map.next_unsettled(region.all_pages()).is_some() {
            self.settle_installing(region);
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
}

impl<'a> Closing<'a> {
    pub(crate) fn new(go_on: &'a mut dyn FnMut(u64) -> bool) -> Self {
        Self {
            again: Again::in_all(),
            go_on,
            has_given_up: false,
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
fn ends_with_its_memory(region: &PagedRegion) -> bool {
    match region.memory.local() {
        // Nobody else has it, so that it is unmapped next.
        Some(local) => Arc::strong_count(local) == 1 && local.close_guest().is_ok(),
        None => region.served.iter().all(|served| served.channel.is_gone()),
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
mod tests {
    use pagetide_memory::{
        Backing, FaultInAccess, FaultInError, GuestAddress, PageIndex, PageMap, PoisonMap, Region,
        ServiceAccess,
    };
    use pagetide_test_support::Sleeper;
    use pagetide_uapi::userfaultfd::{Features, Mode, OpenError};

    use super::*;
    use crate::PatternSource;
    use crate::arrival::{Purpose, arrive};
    use crate::channel::{Channel, Span};
    use crate::config::{InFlightLimits, RetryPolicy};
    use crate::memory::Body;
    use crate::memory::Local;
    use crate::missing::Missing;
    use crate::region::{Parts, Supply};
    use crate::requests::Requests;

    const PAGES: PageRange = PageRange::new(PageIndex(0), 4);
    const LOST: PageRange = PageRange::single(PageIndex(1));

    /// A region on a kernel that can mark pages as lost, or on one that cannot.
    fn region(pager: &Pager, can_poison: bool) -> Option<PagedRegion> {
        let features = match can_poison {
            true => Features::POISON,
            false => Features::NONE,
        };
        let uffd = match Userfaultfd::open(features) {
            Ok(uffd) => Arc::new(uffd),
            Err(
                error @ (OpenError::NotSupported
                | OpenError::NoPermission { .. }
                | OpenError::MissingFeatures { .. }),
            ) => {
                println!("SKIP: {error}");
                return None;
            }
            Err(error) => panic!("{error}"),
        };
        let bytes = PAGES.count() << 12;
        let memory = Region::new(GuestAddress(0), bytes, Backing::Anonymous).unwrap();
        memory.begin_paging(ServiceAccess::Closed).unwrap();
        let range = UserRange::from(memory.guest());
        // SAFETY: no code relies on the memory's zeroes, and it stays mapped until the region closes.
        unsafe { uffd.register(range, Mode::Missing) }.unwrap();
        let channel = Arc::new(Channel::new(uffd, pager.poller.next_token()));
        let span = Span {
            start: range.start,
            region: RegionId(0),
            pages: PAGES,
            shift: 12,
        };
        channel.add(span, || {}).unwrap();
        let limits = InFlightLimits::default();
        let requests = Requests::new(limits, RetryPolicy::default(), 4096);
        let parts = Parts {
            id: RegionId(0),
            map: PageMap::new(PAGES.count()).unwrap(),
            supply: Supply::Local(Arc::new(PatternSource::new(|_, _: &mut [u8]| {}))),
            served: vec![Served {
                pages: PAGES,
                channel,
            }],
            fault_around_pages: 1,
            no_progress_limit: 5,
            can_poison,
            trusts_existing: false,
            installed_by: crate::InstalledBy::default(),
            mapper: None,
            observer: None,
            lost: PoisonMap::new(),
            memory: Box::new(Local {
                region: Arc::new(memory),
                mode: Mode::Missing,
            }),
        };
        let region = PagedRegion::new(parts, Missing::new(requests, None));
        region.count_registered();
        Some(region)
    }

    fn settle(pager: &Pager, region: &PagedRegion, pages: PageRange, body: Body<'_>) {
        let mut counters = Counters::default();
        arrive(pager, region, &mut counters, pages, body, Purpose::Waiters).unwrap();
    }

    /// Closes a region without missing pages. Returns whether its userfaultfd is open afterwards.
    fn is_open_after_close(pager: &Pager, region: PagedRegion) -> bool {
        let _its_owner = region.memory.local().cloned();
        settle(pager, &region, PAGES, Body::Zero);
        let uffd = Arc::downgrade(&region.served[0].channel.uffd);
        pager.close_region(&region, &mut Closing::new(&mut |_| true));
        drop(region);
        uffd.upgrade().is_some()
    }

    /// Closing the userfaultfd would let the lost page read as zeroes.
    #[test]
    fn the_userfaultfd_of_a_lost_page_stays_open_where_the_kernel_cannot_mark_it() {
        for (can_poison, is_lost) in [(false, false), (false, true), (true, false), (true, true)] {
            let pager = Pager::new().unwrap();
            let Some(region) = region(&pager, can_poison) else {
                return;
            };
            if is_lost {
                settle(&pager, &region, LOST, Body::Poisoned);
                assert_eq!(
                    region.map.state(LOST.first()),
                    Some(PageState::Poisoned),
                    "{can_poison}"
                );
            }
            let is_open = is_open_after_close(&pager, region);
            let wanted = is_lost && !can_poison;
            assert_eq!(is_open, wanted, "lost {is_lost}, can poison {can_poison}");
        }
    }

    /// Its memory is unmapped next, so that a mark for each missing page would be for nothing.
    #[test]
    fn memory_that_nobody_else_has_ends_without_a_mark_for_each_page() {
        let pager = Pager::new().unwrap();
        for has_owner in [true, false] {
            let Some(region) = region(&pager, true) else {
                return;
            };
            let owner = region.memory.local().filter(|_| has_owner).cloned();
            let start = region.memory.shape().range.start().as_u64();
            let uffd = Arc::downgrade(&region.served[0].channel.uffd);
            pager.close_region(&region, &mut Closing::new(&mut |_| true));
            let counts = region.map.counts();
            let expected = if has_owner { (0, 4) } else { (4, 0) };
            assert_eq!((counts.absent, counts.poisoned), expected);
            // Until it is unmapped, nobody reads zeroes there.
            assert_eq!(is_readable(start), has_owner);
            drop(region);
            assert!(uffd.upgrade().is_none());
            if let Some(memory) = owner {
                let touched = memory.fault_in(PAGES, FaultInAccess::Read);
                assert!(
                    matches!(touched, Err(FaultInError::Poisoned { .. })),
                    "{touched:?}"
                );
            }
        }
    }

    /// Whether this process's mapping at an address may be read.
    fn is_readable(address: u64) -> bool {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let number = |text: &str| u64::from_str_radix(text, 16).unwrap();
        maps.lines().any(|line| {
            let (range, rest) = line.split_once(' ').unwrap();
            let (start, end) = range.split_once('-').unwrap();
            (number(start)..number(end)).contains(&address) && rest.starts_with('r')
        })
    }

    /// Kind: a wait that takes the processor from whom it waits for.
    #[test]
    fn an_installation_in_progress_is_waited_for_asleep() {
        let pager = Pager::new().unwrap();
        let Some(region) = region(&pager, true) else {
            return;
        };
        let region = Arc::new(region);
        let installing = region.map.claim_arrived(LOST).unwrap();
        let its = Arc::clone(&region);
        let waiting = Sleeper::spawn("the end of a region", move || {
            pager.settle_installing(&its);
        });
        drop(installing);
        waiting.join();
    }

    /// As after a process that kept discarding memory has stopped.
    #[test]
    fn a_lost_page_that_could_not_be_marked_is_marked_when_its_region_closes() {
        let pager = Pager::new().unwrap();
        let Some(region) = region(&pager, true) else {
            return;
        };
        let memory = Arc::clone(region.memory.local().unwrap());
        let _ = region.poison(LOST.first());
        region.note_unmarked();
        assert!(!is_open_after_close(&pager, region));
        let touched = memory.fault_in(LOST, FaultInAccess::Read);
        assert_eq!(touched, Err(FaultInError::Poisoned { pages: LOST }));
    }
}
