//! What a region's mappings may do while its pages come in one by one.

use std::sync::atomic::Ordering;
use std::sync::{MutexGuard, PoisonError};

use rustix::io::Errno;
use rustix::mm::{Advice, MprotectFlags};

use super::{Region, RegionError};
use crate::backing::Backing;
use crate::mapping::Mapping;

/// What the service mapping is for while a region is paged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServiceAccess {
    /// Content is written there (userfaultfd MINOR).
    ReadWrite,
    /// Nothing: `PROT_NONE`. In userfaultfd MISSING a page is there once it is in the page cache, and
    /// one stray read through the service mapping would make a page of zeroes.
    Closed,
}

/// Where a region is between [`Region::begin_paging`] and [`Region::end_paging`].
#[derive(Debug, Default)]
pub(super) struct Paging {
    access: Option<ServiceAccess>,
}

impl Region {
    /// Makes the mappings fit for pages that come in one by one, so that nothing but a pager makes
    /// them present. Until [`Region::end_paging`]:
    ///
    /// - The guest mapping has no huge pages (`MADV_NOHUGEPAGE`; hugetlb is not concerned). Of a
    ///   huge page in the page cache, only some pieces may have their content yet. If the kernel
    ///   mapped it whole, as `MADV_COLLAPSE` and khugepaged do, the others would read as zeroes
    ///   without a fault.
    /// - A child of this process does not inherit the mappings (`MADV_DONTFORK`): its touch of an
    ///   absent page would make a page of zeroes, for everybody. A child that was forked before is
    ///   not helped.
    /// - With [`ServiceAccess::Closed`] the service mapping is inaccessible, and reading and writing
    ///   there fail with [`AccessError::ServiceClosed`](super::AccessError::ServiceClosed). Refused
    ///   once [`Region::service_word`] has given a word away.
    ///
    /// Register with the userfaultfd after this, and ask [`Region::has_content`] in between.
    pub fn begin_paging(&self, service: ServiceAccess) -> Result<(), RegionError> {
        let mut paging = self.lock_paging();
        if paging.access.is_some() {
            return Err(RegionError::AlreadyPaged);
        }
        if service == ServiceAccess::Closed && self.words_are_out.load(Ordering::Relaxed) {
            return Err(RegionError::ServiceInUse);
        }
        if let Err(errno) = self.guard_mappings(service) {
            self.release_mappings();
            return Err(RegionError::BeginPaging { errno });
        }
        paging.access = Some(service);
        Ok(())
    }

    /// Makes the mappings again what they were before [`Region::begin_paging`]. Every page is there,
    /// or the memory is not used any more. Does nothing for a region that is not paged.
    pub fn end_paging(&self) {
        let mut paging = self.lock_paging();
        if paging.access.take().is_some() {
            self.release_mappings();
        }
    }

    /// What the service mapping is for; `None` while the region is not paged.
    pub fn paging(&self) -> Option<ServiceAccess> {
        self.lock_paging().access
    }

    pub(super) fn lock_paging(&self) -> MutexGuard<'_, Paging> {
        // What a thread that panicked has left is still what was done to the mappings.
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
                // A kernel without THP refuses the advice; then there is nothing to turn off.
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

    /// Takes back whatever of [`Self::guard_mappings`] was done. What the kernel refuses stays as it
    /// is, on the safe side.
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
