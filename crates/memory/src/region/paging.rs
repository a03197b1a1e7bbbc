//! Restrictions on a region's mappings while its pages are installed one by one.

use std::sync::atomic::Ordering;
use std::sync::{MutexGuard, PoisonError};

use rustix::io::Errno;
use rustix::mm::{Advice, MprotectFlags};

use super::{Region, RegionError};
use crate::backing::Backing;
use crate::mapping::Mapping;

/// The use of the service mapping while a region is paged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServiceAccess {
    /// A pager writes content there (userfaultfd MINOR).
    ReadWrite,
    /// None: `PROT_NONE`. In userfaultfd MISSING mode a page exists once it is in the page cache, and
    /// one stray read through the service mapping would create a page of zeroes.
    Closed,
}

/// The state of a region between [`Region::begin_paging`] and [`Region::end_paging`].
#[derive(Debug, Default)]
pub(super) struct Paging {
    access: Option<ServiceAccess>,
    /// See [`Region::assume_registered`].
    is_assumed_registered: bool,
}

impl Region {
    /// Restricts the mappings so that only a pager makes pages present. Until [`Region::end_paging`]:
    ///
    /// - The guest mapping has no huge pages (`MADV_NOHUGEPAGE`; not for hugetlb). Of a huge page in
    ///   the page cache, perhaps only some 4 KiB parts have their content. If the kernel mapped the
    ///   whole huge page, as `MADV_COLLAPSE` and khugepaged do, the other parts would read as zeroes
    ///   without a fault.
    /// - A child of this process does not inherit the mappings (`MADV_DONTFORK`): its access to an
    ///   absent page would create a page of zeroes, visible to all processes. This does not affect
    ///   children that were forked before.
    /// - With [`ServiceAccess::Closed`] the service mapping is inaccessible, and accesses through it
    ///   fail with [`AccessError::ServiceClosed`](super::AccessError::ServiceClosed). Refused once
    ///   [`Region::service_word`] has returned a reference.
    ///
    /// Call [`Region::has_content`] after this, and then register with the userfaultfd.
    pub fn begin_paging(&self, service: ServiceAccess) -> Result<(), RegionError> {
        let mut paging = self.lock_paging();
        if paging.access.is_some() {
            return Err(RegionError::AlreadyPaged);
        }
        if service == ServiceAccess::Closed && self.has_word_references.load(Ordering::Relaxed) {
            return Err(RegionError::ServiceInUse);
        }
        if let Err(errno) = self.guard_mappings(service) {
            self.release_mappings();
            return Err(RegionError::BeginPaging { errno });
        }
        paging.access = Some(service);
        Ok(())
    }

    /// Restores the mappings to their state before [`Region::begin_paging`]. At that time every page is
    /// present, or the memory is not used any more. Does nothing for a region that is not paged.
    pub fn end_paging(&self) {
        let mut paging = self.lock_paging();
        if paging.access.take().is_some() {
            self.release_mappings();
        }
    }

    /// Makes the guest mapping inaccessible for good, for an owner that is about to unmap it: whoever uses it meanwhile
    /// must not find zeroes where content is missing. Costs one call, however much is missing.
    ///
    /// # Errors
    /// The kernel's; then nothing has changed.
    pub fn close_guest(&self) -> Result<(), RegionError> {
        let closed = self.guest.protect(MprotectFlags::empty());
        closed.map_err(|errno| RegionError::BeginPaging { errno })
    }

    /// The use of the service mapping; `None` while the region is not paged.
    pub fn paging(&self) -> Option<ServiceAccess> {
        self.lock_paging().access
    }

    /// States that the program has registered the whole region with a userfaultfd of its own. A memory slot may then
    /// have exits (`SlotFlags::absent_mapping_fault` of pagetide-kvm), as if a pager had the region. Nothing checks the
    /// statement. Where it is wrong, KVM's own accesses, which do not exit, fill absent pages with zeroes, for good.
    pub fn assume_registered(&self) {
        self.lock_paging().is_assumed_registered = true;
    }

    /// Whether a pager has the region, from [`Region::begin_paging`] on, or the program has called
    /// [`Region::assume_registered`].
    pub fn is_registered(&self) -> bool {
        let paging = self.lock_paging();
        paging.access.is_some() || paging.is_assumed_registered
    }

    pub(super) fn lock_paging(&self) -> MutexGuard<'_, Paging> {
        // After a panic the value still describes what was done to the mappings.
        self.paging.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn mappings(&self) -> impl Iterator<Item = &Mapping> {
        [Some(&self.guest), self.service.as_ref()]
            .into_iter()
            .flatten()
    }

    fn guard_mappings(&self, service: ServiceAccess) -> Result<(), Errno> {
        if !self.backing.is_hugetlb() {
            match self.guest.advise_all(Advice::LinuxNoHugepage) {
                // A kernel without THP refuses the advice, and then needs none.
                Ok(()) | Err(Errno::INVAL) => {}
                Err(errno) => return Err(errno),
            }
        }
        for mapping in self.mappings() {
            mapping.advise_all(Advice::LinuxDontFork)?;
        }
        if let (Some(mapping), ServiceAccess::Closed) = (&self.service, service) {
            self.gate.close();
            mapping.protect(MprotectFlags::empty())?;
        }
        Ok(())
    }

    /// Undoes whatever part of [`Self::guard_mappings`] was done. If the kernel refuses a change, the
    /// mapping keeps the restriction, which is safe.
    fn release_mappings(&self) {
        if self.backing == Backing::Thp {
            let _ = self.guest.advise_all(Advice::LinuxHugepage);
        }
        for mapping in self.mappings() {
            let _ = mapping.advise_all(Advice::LinuxDoFork);
        }
        if let Some(mapping) = &self.service
            && mapping
                .protect(MprotectFlags::READ | MprotectFlags::WRITE)
                .is_ok()
        {
            self.gate.open();
        }
    }
}
