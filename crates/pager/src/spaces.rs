//! Further address spaces that share a region's memory: of vhost-user back ends, beside the VMM.
//!
//! A region has one page map and one content, in one file. Its own address space is the one that it was added
//! with; content is installed there, which puts it into the file. A thread of another address space that faults
//! on a missing page waits like any other; once the page is settled, its own address space maps what the file
//! has. So whoever wakes threads wakes them in every address space.
//!
//! Events of such an address space change its own addresses only: a back end that drops or moves its mapping
//! discards nothing of the VM's.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use pagetide_memory::{HostRange, PageIndex, PageRange, PageState};
use pagetide_uapi::userfaultfd::{InstallError, Mode, UserRange, Userfaultfd, Wake};

use crate::channel::{Channel, Role, Span};
use crate::close::{Closing, ExportedPart, ExportedSpace, STEP_PAGES, steps};
use crate::error::AttachError;
use crate::fault::RegionId;
use crate::kept_open::{keep_open, leave_to};
use crate::mark::poison_in;
use crate::memory::{Place, map_again};
use crate::pager::Pager;
use crate::region::PagedRegion;
use crate::space::{AddressSpace, AddressSpaceId};
use crate::table::Table;

impl Pager {
    /// Attaches a further address space: another process has mapped, at these addresses, the same parts of the same
    /// files as regions of the pager, each as long as the region, shared, and registered with `uffd` in the region's
    /// mode (MINOR also for MISSING). Its threads get the regions' content, and see what the VM writes.
    ///
    /// No region may have been added with the userfaultfd. The regions' own process decides about discards; events
    /// of this one change its own addresses. When the process has gone, its address space is detached.
    ///
    /// # Errors
    /// [`AttachError`]; nothing has changed then.
    pub fn attach(
        &self,
        uffd: &Arc<Userfaultfd>,
        parts: &[(RegionId, HostRange)],
    ) -> Result<AddressSpaceId, AttachError> {
        let _edit = self.lock_edit();
        let table = self.table();
        let mut used = table.channels().iter();
        if used.any(|channel| Arc::ptr_eq(&channel.uffd, uffd)) {
            return Err(AttachError::InUse);
        }
        let mut checked = Vec::with_capacity(parts.len());
        let mut seen = BTreeSet::new();
        for &(id, range) in parts {
            let region = check(&table, id, uffd, range)?;
            let spaces = region.spaces.all();
            let mut uffds = spaces.iter().map(|space| &space.channel.uffd);
            if !seen.insert(id) || uffds.any(|other| Arc::ptr_eq(other, uffd)) {
                return Err(AttachError::Twice { region: id });
            }
            checked.push((region, range));
        }
        if checked.is_empty() {
            return Err(AttachError::NoRegions);
        }
        let channel = self.others.of_space(uffd).unwrap_or_else(|| {
            let token = self.poller.next_token();
            let channel = Channel::with_role(Arc::clone(uffd), token, Role::Space);
            let channel = Arc::new(channel);
            leave_to(&channel);
            channel
        });
        // Another region's address space may have been handed over.
        channel.set_handed_over(false);
        let id = AddressSpaceId(self.next_space.fetch_add(1, Ordering::Relaxed));
        let mut added: Vec<(&Arc<PagedRegion>, Arc<AddressSpace>)> = Vec::new();
        let polled = checked
            .iter()
            .try_for_each(|&(region, range)| {
                let channel = Arc::clone(&channel);
                let span = Span {
                    start: range.start().as_u64(),
                    region: region.id,
                    pages: region.all_pages(),
                    shift: region.page_shift(),
                };
                let overlap = |start| AttachError::HostOverlap { start };
                channel.add(span, || {}).map_err(overlap)?;
                let space = Arc::new(AddressSpace { id, channel, range });
                region.spaces.add(Arc::clone(&space));
                added.push((region, space));
                Ok(())
            })
            .and_then(|()| {
                self.others.add(&channel);
                self.poller.add(&channel).map_err(AttachError::Poll)
            });
        if let Err(error) = polled {
            for (region, space) in added {
                self.forget_space(region, &space);
            }
            return Err(error);
        }
        for (region, space) in added {
            // Lost memory reads as lost there, too. (A page that is lost meanwhile finds the address space.) Where
            // this fails, the fault of a thread marks the page.
            let mut looks = 0;
            let mut few = |holes| {
                looks += holes;
                looks < STEP_PAGES
            };
            let mut turn = Closing::for_a_turn(&mut few);
            let _ = self.poison_where(region, &space, &mut turn, |state| {
                state == PageState::Poisoned
            });
            // A fault that was read before may have found no region.
            let _ = uffd.wake(space.range.into());
        }
        Ok(id)
    }

    /// Detaches an address space. Its missing pages are poisoned there, and its registration ends, so that its
    /// process needs no pager any more.
    ///
    /// A page that the process drops from its mapping (MADV_DONTNEED) at the same time or later loses its mark, and
    /// reads as what the file has: zeroes, if it is missing there. The kernel reports no end of such a call, so the
    /// pager cannot mark the page after it.
    ///
    /// # Errors
    /// [`AttachError::NoSuchSpace`]; [`AttachError::NotPoisoned`] if its userfaultfd has to stay open until its
    /// process has gone.
    pub fn detach(&self, id: AddressSpaceId) -> Result<(), AttachError> {
        let _edit = self.lock_edit();
        let (mut was_there, mut is_safe) = (false, true);
        for region in self.table().iter() {
            for space in region.spaces.take(id) {
                is_safe &= self.close_space(region, &space, &mut Closing::new(&mut |_| true));
                was_there = true;
            }
        }
        match (was_there, is_safe) {
            (false, _) => Err(AttachError::NoSuchSpace),
            (true, false) => Err(AttachError::NotPoisoned),
            (true, true) => Ok(()),
        }
    }

    /// Forgets the address spaces whose processes have gone, and returns the others.
    pub fn spaces(&self) -> BTreeSet<AddressSpaceId> {
        let _edit = self.lock_edit();
        for channel in self.others.of_role(Role::Space) {
            if channel.is_gone() {
                self.space_gone(&channel);
            }
        }
        let table = self.table();
        let spaces = table.iter().flat_map(|region| region.spaces.all());
        spaces.map(|space| space.id).collect()
    }

    /// Marks the pages whose states are such in an address space, and reads the events that the kernel waits for.
    /// Returns whether none of them reads as zeroes.
    fn poison_where(
        &self,
        region: &PagedRegion,
        space: &AddressSpace,
        closing: &mut Closing<'_>,
        is_it: impl Fn(PageState) -> bool,
    ) -> bool {
        let mut parts = region.runs(is_it).flat_map(steps);
        parts.all(|part| {
            let is_marked = poison_in(region, space, part, &mut closing.again, |_| {
                self.read_events(&space.channel);
                true
            });
            closing.goes_on() && is_marked
        })
    }

    /// Ends the paging of an address space. Returns whether none of its pages reads as zeroes in place of content
    /// once its userfaultfd is closed; if not, the userfaultfd stays open until its process has gone.
    pub(crate) fn close_space(
        &self,
        region: &PagedRegion,
        space: &AddressSpace,
        closing: &mut Closing<'_>,
    ) -> bool {
        // Lost pages, too: it may not have been possible to mark some of them before.
        let reads_zeroes = |state: PageState| !state.is_settled() || state == PageState::Poisoned;
        let is_safe =
            space.channel.is_gone() || self.poison_where(region, space, closing, reads_zeroes);
        for range in space.parts(region.id, region.all_pages()) {
            let _ = space.channel.uffd.wake(range);
            if is_safe {
                // Fails if the process has gone, or has unmapped a part, which then faults no more.
                let _ = space.channel.uffd.unregister(range);
            }
        }
        if !is_safe {
            // While the userfaultfd is open, a thread that touches a missing page sleeps and reads no zeroes.
            keep_open(&space.channel);
        }
        self.read_events(&space.channel);
        self.forget_space(region, space);
        is_safe
    }

    /// Hands the address spaces of a region over to a successor.
    pub(crate) fn export_spaces(&self, region: &PagedRegion) -> Vec<ExportedSpace> {
        let spaces = region.spaces.all().into_iter().map(|space| {
            // No thread consumes a message that the successor needs.
            space.channel.set_handed_over(true);
            let spans = space.channel.spans_of(region.id, &space.home());
            self.forget_space(region, &space);
            let parts = spans.into_iter().map(|span| ExportedPart {
                start: span.start,
                pages: span.pages,
            });
            let exported = ExportedSpace {
                uffd: Arc::clone(&space.channel.uffd),
                parts: parts.collect(),
            };
            for part in &exported.parts {
                // Fails if the range is not mapped any more.
                let _ = exported.uffd.wake(UserRange {
                    start: part.start,
                    bytes: region.bytes_of(part.pages),
                });
            }
            exported
        });
        spaces.collect()
    }

    fn forget_space(&self, region: &PagedRegion, space: &AddressSpace) {
        let _ = region.spaces.take(space.id);
        if !space.channel.remove(region.id, &space.home()) {
            self.poller.remove(&space.channel);
            self.others.remove(&space.channel);
        }
    }

    /// Forgets the address spaces of a process that has gone.
    fn space_gone(&self, channel: &Channel) {
        for region in self.table().iter() {
            region.spaces.take_of(channel);
        }
        self.poller.remove(channel);
        self.others.remove(channel);
    }
}

/// The region that is to have a further address space, if the memory there can be its memory.
fn check<'t>(
    table: &'t Table,
    id: RegionId,
    uffd: &Userfaultfd,
    range: HostRange,
) -> Result<&'t Arc<PagedRegion>, AttachError> {
    let found = table.region(id).filter(|region| !region.is_closed());
    let region = found.ok_or(AttachError::NoSuchRegion { region: id })?;
    if !region.memory.is_shared() {
        return Err(AttachError::NotShared { region: id });
    }
    let (bytes, wanted) = (range.bytes() as u64, region.bytes_of(region.all_pages()));
    if bytes != wanted {
        let region = id;
        return Err(AttachError::OtherSize {
            region,
            bytes,
            wanted,
        });
    }
    // If this wake-up fails, other ioctls would fail as well.
    let woken = uffd.wake(range.into());
    woken.map_err(|source| AttachError::NotReady { source })?;
    Ok(region)
}

/// The end of an attempt to resolve a fault of a further address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InSpace {
    /// The thread was woken, or has gone.
    Done,
    /// The page is missing: it is to be resolved in the region.
    Missing,
    /// The process changes its address space: the fault comes again.
    Later,
    /// The kernel refuses to map the page there, and always will: the memory is not the region's.
    Refused(InstallError),
}

/// Maps a settled page where a thread of a further address space waits for it, and wakes the thread.
pub(crate) fn map_in_space(
    pager: &Pager,
    region: &PagedRegion,
    channel: &Channel,
    address: u64,
    page: PageIndex,
) -> InSpace {
    let bytes = 1_u64 << region.page_shift();
    let place = Place {
        uffd: &channel.uffd,
        range: UserRange {
            start: address & !(bytes - 1),
            bytes,
        },
        pages: PageRange::single(page),
    };
    let state = region.map.state(page).unwrap_or(PageState::Removed);
    let mapped = match (state, region.mode) {
        (PageState::Absent | PageState::Pending | PageState::Installing, _) => {
            return InSpace::Missing;
        }
        (PageState::Poisoned, _) => place.uffd.poison_pages(place.range, Wake::Wake),
        (PageState::Removed, _) => region.memory.zero(&place, Wake::Wake),
        (PageState::Present | PageState::Zero, Mode::Minor) => map_again(&place, Wake::Wake),
        // What the file has does not fault here.
        (PageState::Present | PageState::Zero, Mode::Missing) => {
            Err(InstallError::Exists { installed_bytes: 0 })
        }
    };
    match mapped {
        Ok(()) => InSpace::Done,
        Err(InstallError::Again { .. }) => {
            pager.read_events(channel);
            InSpace::Later
        }
        Err(InstallError::NoContent) => {
            // Other code than the pager has discarded it.
            let _ = region.remove(page);
            InSpace::Later
        }
        Err(InstallError::Gone) => {
            pager.space_gone(channel);
            InSpace::Done
        }
        Err(InstallError::Exists { .. } | InstallError::NoMapping) => {
            let _ = channel.uffd.wake(place.range);
            InSpace::Done
        }
        Err(error) => InSpace::Refused(error),
    }
}
