//! The end of a region: nothing that was missing reads as zeroes afterwards.

use std::sync::Arc;

use pagetide_memory::{PageIndex, PageMapImage, PageRange, PageState, Settled};
use pagetide_uapi::userfaultfd::{UserRange, Userfaultfd};

use crate::counters::Counters;
use crate::error::{ExportError, RegionChangeError};
use crate::fault::RegionId;
use crate::install::{MAX_TRIES, Mark, mark_poisoned, wake};
use crate::pager::Pager;
use crate::region::{PagedRegion, Served};

/// A region on its way to another pager, in this process or in another.
#[derive(Debug)]
pub struct Exported {
    /// Which pages are there, were given up or are lost. All others are missing.
    pub image: PageMapImage,
    /// The userfaultfd that serves the region, for [`crate::RegionConfig::foreign`]. To hand it to
    /// another process, send its descriptor.
    pub uffd: Arc<Userfaultfd>,
    /// Where the region's pages are now in the other process, which may have moved or unmapped some.
    pub parts: Vec<ExportedPart>,
}

/// Pages that lie one behind the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExportedPart {
    /// The address of the first page in the other process.
    pub start: u64,
    /// The pages.
    pub pages: PageRange,
}

impl Pager {
    /// Ends the paging of a region. Whoever waits for one of its pages goes on: an exit with an error,
    /// a thread in the userfaultfd with SIGBUS, since pages that are missing still are poisoned first.
    /// So stop the VM first, unless all pages are there.
    ///
    /// The region's memory stays mapped until the last thread that works on it is done.
    ///
    /// # Errors
    /// [`RegionChangeError::NoSuchRegion`].
    pub fn remove(&self, id: RegionId) -> Result<(), RegionChangeError> {
        let _edit = self.lock_edit();
        let table = self.table();
        let region = table
            .region(id)
            .ok_or(RegionChangeError::NoSuchRegion { region: id })?;
        self.set_table(table.without(id));
        self.close_region(region);
        Ok(())
    }

    /// Ends the paging of a foreign region here, for a successor to go on. Nothing is poisoned; whoever
    /// waits for a page faults again, and the successor reads those faults. From the first export on
    /// this pager reads nothing from that userfaultfd. So regions that share one go together: export
    /// all of them before the successor serves the first.
    ///
    /// # Errors
    /// [`ExportError`]; the region goes on then.
    pub fn export(&self, id: RegionId) -> Result<Exported, ExportError> {
        let _edit = self.lock_edit();
        let table = self.table();
        let no_region = ExportError::NoSuchRegion { region: id };
        let region = table
            .region(id)
            .filter(|region| !region.is_closed())
            .ok_or(no_region)?;
        if region.target.local().is_some() {
            return Err(ExportError::IsLocal { region: id });
        }
        let [served] = &*region.served else {
            return Err(ExportError::NoSuchRegion { region: id });
        };
        region.close();
        // Messages that were read are applied, for which the region must be in the table, and no
        // thread that was told of messages before takes what the successor needs to know.
        served.channel.set_handed_over(true);
        self.cancel_all(region);
        self.set_table(table.without(id));
        let uffd = Arc::clone(&served.channel.uffd);
        let spans = served.channel.spans_of(id);
        self.leave_channels(region);
        // Installations that had begun are finished: after this no page changes any more.
        self.withdraw(region, region.all_pages());
        self.settle_installing(region);
        region.map.notify_all();
        let image = region.map.image();
        let mut parts = Vec::with_capacity(spans.len());
        for span in spans {
            let range = UserRange {
                start: span.start,
                bytes: span.bytes(),
            };
            // It fails if nothing is mapped there any more.
            let _ = uffd.wake(range);
            parts.push(ExportedPart {
                start: span.start,
                pages: span.pages,
            });
        }
        Ok(Exported { image, uffd, parts })
    }

    /// Ends everything that goes on in a region, and poisons what is missing.
    pub(crate) fn close_region(&self, region: &PagedRegion) {
        region.close();
        self.cancel_all(region);
        self.settle_installing(region);
        // Again, if an installation that began before it saw the end has given its pages back since.
        while region.map.next_unsettled(region.all_pages()).is_some() {
            self.settle_installing(region);
            self.poison_missing(region);
        }
        region.map.notify_all();
        if region.target.local().is_none() {
            // A local region's sleepers are woken as it is unregistered. Here their messages may be unread,
            // and nobody reads them for this region any more.
            self.wake_all(region);
        }
        let all_marked = self.all_marked(region);
        self.leave_channels(region);
        if !all_marked {
            // This kernel cannot mark pages as lost, or would not. As long as the userfaultfds are open and the memory
            // registered, whoever touches such a page sleeps, and does not read zeroes: so they stay
            // open until the process ends.
            tracing::error!(
                region = region.id.0,
                "lost pages cannot be poisoned: their userfaultfds stay open"
            );
            for served in &region.served {
                std::mem::forget(Arc::clone(&served.channel));
            }
            return;
        }
        if let Some(local) = region.target.local() {
            for (served, range) in local_ranges(region) {
                // It fails if the memory is not mapped any more, and then nothing is registered.
                let _ = served.channel.uffd.unregister(range);
            }
            local.end_paging();
        }
    }

    /// What a failed [`Pager::add`] has begun. Nobody has used the region: its pages may read as they
    /// did before.
    pub(crate) fn undo(&self, region: &PagedRegion) {
        region.close();
        self.leave_channels(region);
        if let Some(local) = region.target.local() {
            for (served, range) in local_ranges(region) {
                let _ = served.channel.uffd.unregister(range);
            }
            local.end_paging();
        }
    }

    /// Has everybody who sleeps in a region fault again.
    pub(crate) fn wake_all(&self, region: &PagedRegion) {
        let mut counters = Counters::default();
        for served in &region.served {
            wake(
                region,
                served,
                &served.channel.order(),
                &mut counters,
                served.pages,
            );
        }
        self.count(&counters);
    }

    fn leave_channels(&self, region: &PagedRegion) {
        for served in &region.served {
            if !served.channel.remove(region.id) {
                self.poller.remove(&served.channel);
            }
        }
    }

    /// Waits for installations that have begun. They take as long as a few system calls.
    fn settle_installing(&self, region: &PagedRegion) {
        while region.map.counts().installing > 0 {
            std::thread::yield_now();
        }
    }

    /// Poisons every page that is missing: in the page map, and where it would be mapped.
    pub(crate) fn poison_missing(&self, region: &PagedRegion) {
        let mut rest = region.all_pages();
        while let Some((page, _)) = region.map.next_unsettled(rest) {
            let behind = PageRange::new(page, rest.end().0 - page.0);
            let Some(claim) = region.map.claim_arrived(behind) else {
                break;
            };
            let pages = claim.pages();
            let _ = claim.finish(Settled::Poisoned);
            self.evict(region, pages);
            let _ = self.poison_everywhere(region, pages);
            let done = pages.end().0 - rest.first().0;
            (_, rest) = rest.split_at(done);
            if rest.is_empty() {
                break;
            }
        }
    }

    /// Takes away what something else than the pager has mapped in pages that are missing: it is not
    /// their content, and a mark is only put where nothing is mapped.
    fn evict(&self, region: &PagedRegion, pages: PageRange) {
        let Some(local) = region.target.local().filter(|_| !region.may_exist()) else {
            return;
        };
        if let Err(error) = self.unmap(region, local, pages) {
            tracing::error!(%error, %pages, "dropping the mappings of missing pages");
        }
    }

    /// Marks pages as poisoned, and wakes whoever sleeps there. Returns whether all could be marked.
    pub(crate) fn poison_everywhere(&self, region: &PagedRegion, pages: PageRange) -> bool {
        let mut rest = pages;
        let mut all_marked = true;
        while let Some(served) = region.served(rest.first()).filter(|_| !rest.is_empty()) {
            let part = rest.intersection(served.pages);
            all_marked &= self.mark(region, served, part);
            (_, rest) = rest.split_at(part.count());
        }
        all_marked
    }

    fn mark(&self, region: &PagedRegion, served: &Served, pages: PageRange) -> bool {
        for _ in 0..MAX_TRIES {
            let order = served.channel.order();
            let mark = mark_poisoned(region, served, &order, pages);
            drop(order);
            match mark {
                Mark::Made => return true,
                Mark::EventsFirst => self.read_events(&served.channel),
                Mark::Failed => return false,
            }
        }
        false
    }

    /// Whether every lost page is marked: those that could not be marked before are now, if they can.
    fn all_marked(&self, region: &PagedRegion) -> bool {
        if !region.has_unmarked() {
            return true;
        }
        let is_poisoned = |&page: &PageIndex| region.map.state(page) == Some(PageState::Poisoned);
        let mut all_marked = true;
        // Each one, also behind one that cannot be marked: whoever touches it gets SIGBUS then.
        for page in region.all_pages().iter().filter(is_poisoned) {
            all_marked &= self.poison_everywhere(region, PageRange::single(page));
        }
        all_marked
    }
}

/// Which channel serves which addresses that the pager has registered.
fn local_ranges(region: &PagedRegion) -> impl Iterator<Item = (&Served, UserRange)> {
    let start = region.target.range().start().as_u64();
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
        Backing, FaultInAccess, FaultInError, GuestAddress, PageMap, PoisonMap, Region,
        ServiceAccess,
    };
    use pagetide_uapi::userfaultfd::{Features, Mode, OpenError};

    use super::*;
    use crate::PatternSource;
    use crate::arrival::{For, arrive};
    use crate::channel::{Channel, Span};
    use crate::install::Body;
    use crate::region::{Parts, Supply};
    use crate::target::Target;

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
        // SAFETY: nobody relies on the memory's zeroes, and it stays mapped until the region closes.
        unsafe { uffd.register(range, Mode::Missing) }.unwrap();
        let channel = Arc::new(Channel::new(uffd, pager.poller.next_token()));
        let span = Span {
            start: range.start,
            region: RegionId(0),
            pages: PAGES,
            shift: 12,
        };
        channel.add(span, || {}).unwrap();
        let region = PagedRegion::new(Parts {
            id: RegionId(0),
            map: PageMap::new(PAGES.count()).unwrap(),
            mode: Mode::Missing,
            supply: Supply::Local(Arc::new(PatternSource::new(|_, _: &mut [u8]| {}))),
            served: vec![Served {
                pages: PAGES,
                channel,
            }],
            fault_around_pages: 1,
            no_progress_limit: 5,
            can_poison,
            trusts_existing: false,
            sink: None,
            lost: PoisonMap::new(),
            target: Target::Local(Arc::new(memory)),
        });
        region.count_registered();
        Some(region)
    }

    fn settle(pager: &Pager, region: &PagedRegion, pages: PageRange, body: Body<'_>) {
        let mut counters = Counters::default();
        arrive(pager, region, &mut counters, pages, body, For::Waiters).unwrap();
    }

    /// Closes a region of whose pages none is missing. Whether its userfaultfd is open afterwards.
    fn is_open_after_close(pager: &Pager, region: PagedRegion) -> bool {
        settle(pager, &region, PAGES, Body::Zero);
        let uffd = Arc::downgrade(&region.served[0].channel.uffd);
        pager.close_region(&region);
        drop(region);
        uffd.upgrade().is_some()
    }

    /// Closing it would let the lost page read as zeroes.
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

    /// As after a process that discarded all the time has stopped doing so.
    #[test]
    fn a_lost_page_that_could_not_be_marked_is_marked_as_its_region_closes() {
        let pager = Pager::new().unwrap();
        let Some(region) = region(&pager, true) else {
            return;
        };
        let memory = Arc::clone(region.target.local().unwrap());
        let _ = region.map.poison(LOST.first());
        region.note_unmarked();
        assert!(!is_open_after_close(&pager, region));
        let touched = memory.fault_in(LOST, FaultInAccess::Read);
        assert_eq!(touched, Err(FaultInError::Poisoned { pages: LOST }));
    }
}
