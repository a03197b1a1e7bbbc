//! A range of guest memory, the file behind it and its two mappings.

mod content;
mod error;
mod failure;
mod paging;
mod room;
mod service;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use pagetide_uapi::host::{available_bytes, check_page_size};
use pagetide_uapi::memory_failure::KEEP_UE_MAPPED;
use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::mm::Advice;

use crate::address::{GuestAddress, HostAddress};
use crate::backing::Backing;
use crate::convert::{to_u64, to_usize};
use crate::guard::{CopyFailure, copy_in, copy_out, fill_zeroes};
use crate::mapping::{FilePart, Mapping};
use crate::page::{PageIndex, PageRange, PageSize};
use crate::policy::FailurePolicy;
use crate::range::{GuestRange, HostRange, RangeError};

use paging::Paging;
use room::check_room;
use service::ServiceGate;

pub use error::{AccessError, ContentError, FaultInError, RegionError};
pub use failure::Lost;
pub use paging::ServiceAccess;

/// The access for which [`Region::fault_in`] makes pages present.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultInAccess {
    /// Reads (`MADV_POPULATE_READ`).
    Read,
    /// Writes: breaks copy-on-write and replaces the zero page (`MADV_POPULATE_WRITE`).
    Write,
}

/// A range of guest memory: its file (unless anonymous) and its mappings in this process.
///
/// - The **guest mapping** is registered with KVM and userfaultfd. An access through it may block until
///   a pager resolves the fault.
/// - The **service mapping** is a second mapping of the same file. An access through it never faults
///   into a userfaultfd: a pager writes content there first, and then makes the content visible in the
///   guest mapping.
///
/// Both are congruent to the gpa modulo the largest page that the backing may have, so that KVM can use
/// huge pages where the memory has them. Dropping a region unmaps both; remove its memslots and
/// userfaultfd registrations first.
///
/// If the process has the SIGBUS handler of `pagetide-kvm`, reads and writes survive uncorrected memory
/// errors and fail with [`AccessError::Poisoned`].
#[derive(Debug)]
pub struct Region {
    range: GuestRange,
    backing: Backing,
    policy: FailurePolicy,
    file: Option<OwnedFd>,
    guest: Mapping,
    service: Option<Mapping>,
    gate: ServiceGate,
    paging: Mutex<Paging>,
    /// A reference to a word of the service mapping exists. Set under the lock of `paging`, and never
    /// cleared.
    has_word_references: AtomicBool,
}

impl Region {
    /// Creates `bytes` bytes of guest memory at `gpa`, both multiples of the backing's page size.
    /// Allocates no pages, but reserves huge pages.
    pub fn new(gpa: GuestAddress, bytes: u64, backing: Backing) -> Result<Self, RegionError> {
        Self::with_policy(gpa, bytes, backing, FailurePolicy::KernelDefault)
    }

    /// As [`Self::new`], with `policy` for memory that has uncorrected errors. Fails with
    /// [`RegionError::NoKeepPolicy`] if the kernel does not support it; [`FailurePolicy::best_for`]
    /// returns a policy that it supports.
    pub fn with_policy(
        gpa: GuestAddress,
        bytes: u64,
        backing: Backing,
        policy: FailurePolicy,
    ) -> Result<Self, RegionError> {
        let page_size = backing.page_size();
        let range = GuestRange::aligned(gpa, bytes, page_size).map_err(|source| match source {
            RangeError::Empty { .. } => RegionError::Empty,
            RangeError::Unaligned { .. } => RegionError::NotPageMultiple {
                gpa,
                bytes,
                backing,
                page_size,
            },
            RangeError::Wraps { .. } => RegionError::Wraps { gpa, bytes },
        })?;
        check_page_size()?;
        check_room(bytes, backing)?;

        let mapped = to_usize(bytes);
        // A 4 KiB region may still consist of huge pages (THP); hugetlb needs its own size.
        let alignment = page_size.max(PageSize::Size2M);
        let no_mapping = |errno| map_error(errno, bytes, backing);
        let from_start = |file: &OwnedFd| {
            let file = file.as_fd();
            Mapping::new(Some(FilePart { file, offset: 0 }), mapped, alignment, gpa.0)
        };
        let (file, service) = if backing.has_file() {
            let file = make_file(bytes, backing, policy)?;
            let service = from_start(&file);
            (Some(file), Some(service.map_err(no_mapping)?))
        } else if policy == FailurePolicy::Keep {
            return Err(RegionError::NoKeepPolicy { backing });
        } else {
            (None, None)
        };
        let guest = match &file {
            Some(file) => from_start(file),
            None => Mapping::new(None, mapped, alignment, gpa.0),
        }
        .map_err(no_mapping)?;

        let region = Self {
            range,
            backing,
            policy,
            file,
            guest,
            service,
            gate: ServiceGate::new(),
            paging: Mutex::default(),
            has_word_references: AtomicBool::new(false),
        };
        region.advise_page_size()?;
        Ok(region)
    }

    /// Advises the kernel whether to use huge pages in both mappings.
    fn advise_page_size(&self) -> Result<(), RegionError> {
        let advice = match self.backing {
            Backing::Thp => Advice::LinuxHugepage,
            Backing::Shmem | Backing::Anonymous => Advice::LinuxNoHugepage,
            Backing::Hugetlb2M | Backing::Hugetlb1G => return Ok(()),
        };
        for mapping in self.mappings() {
            match mapping.advise_all(advice) {
                Ok(()) => {}
                // A kernel without THP refuses the advice, and then needs none.
                Err(Errno::INVAL) if advice == Advice::LinuxNoHugepage => {}
                Err(Errno::INVAL) => return Err(RegionError::NoTransparentHugepages),
                Err(errno) => return Err(RegionError::Advise { errno }),
            }
        }
        Ok(())
    }

    /// The guest physical range.
    pub fn range(&self) -> GuestRange {
        self.range
    }

    /// The gpa of its first byte.
    pub fn gpa(&self) -> GuestAddress {
        self.range.start()
    }

    /// Its size in bytes.
    pub fn bytes(&self) -> u64 {
        self.range.bytes()
    }

    /// The kind of its memory.
    pub fn backing(&self) -> Backing {
        self.backing
    }

    /// How much of it an uncorrected error costs.
    pub fn failure_policy(&self) -> FailurePolicy {
        self.policy
    }

    /// The install granularity, see [`Backing::page_size`].
    pub fn page_size(&self) -> PageSize {
        self.backing.page_size()
    }

    /// The number of pages of [`Region::page_size`].
    pub fn pages(&self) -> u64 {
        self.range.bytes() >> self.page_size().shift()
    }

    /// All of its pages.
    pub fn all_pages(&self) -> PageRange {
        PageRange::new(PageIndex(0), self.pages())
    }

    /// Its file; `None` for anonymous memory.
    pub fn file(&self) -> Option<BorrowedFd<'_>> {
        self.file.as_ref().map(AsFd::as_fd)
    }

    /// The mapping that is registered with KVM and userfaultfd.
    pub fn guest(&self) -> HostRange {
        self.guest.range()
    }

    /// The mapping whose accesses never fault into a userfaultfd; `None` for anonymous memory.
    pub fn service(&self) -> Option<HostRange> {
        self.service.as_ref().map(Mapping::range)
    }

    /// The address of `gpa` in the guest mapping.
    pub fn gpa_to_hva(&self, gpa: GuestAddress) -> Option<HostAddress> {
        let offset = self.offset_of_gpa(gpa)?;
        self.guest().start().checked_add(to_usize(offset))
    }

    /// The gpa at `hva` of the guest mapping.
    pub fn hva_to_gpa(&self, hva: HostAddress) -> Option<GuestAddress> {
        let guest = self.guest();
        if !guest.contains(hva) {
            return None;
        }
        self.gpa().checked_add(to_u64(hva.0 - guest.start().0))
    }

    fn offset_of_gpa(&self, gpa: GuestAddress) -> Option<u64> {
        gpa.offset_from(self.gpa())
            .filter(|&offset| offset < self.bytes())
    }

    /// The page that contains `gpa`.
    #[inline]
    pub fn page_of_gpa(&self, gpa: GuestAddress) -> Option<PageIndex> {
        Some(PageIndex(
            self.offset_of_gpa(gpa)? >> self.page_size().shift(),
        ))
    }

    /// The page that contains `hva` of the guest mapping.
    #[inline]
    pub fn page_of_hva(&self, hva: HostAddress) -> Option<PageIndex> {
        let guest = self.guest();
        if !guest.contains(hva) {
            return None;
        }
        Some(PageIndex(
            to_u64(hva.0 - guest.start().0) >> self.page_size().shift(),
        ))
    }

    /// The gpa of a page's first byte; `None` if the region has no such page.
    pub fn gpa_of_page(&self, page: PageIndex) -> Option<GuestAddress> {
        if page.0 >= self.pages() {
            return None;
        }
        self.gpa().checked_add(page.0 << self.page_size().shift())
    }

    /// The addresses of `pages` in the guest mapping; `None` if `pages` is empty or leaves the region.
    #[inline]
    pub fn guest_range(&self, pages: PageRange) -> Option<HostRange> {
        let (offset, bytes) = self.span(pages)?;
        let start = HostAddress(self.guest().start().0 + to_usize(offset));
        Some(HostRange::trusted(start, to_usize(bytes)))
    }

    /// Offset and length in bytes of `pages`; `None` if `pages` is empty or leaves the region.
    #[inline]
    fn span(&self, pages: PageRange) -> Option<(u64, u64)> {
        if pages.is_empty() || pages.end().0 > self.pages() {
            return None;
        }
        let shift = self.page_size().shift();
        Some((pages.first().0 << shift, pages.count() << shift))
    }

    /// Writes `bytes` at `offset` bytes into `page` through the service mapping. May extend into the
    /// following pages.
    pub fn write_service(
        &self,
        page: PageIndex,
        offset: u64,
        bytes: &[u8],
    ) -> Result<(), AccessError> {
        self.with_service(page, offset, bytes.len(), |at| {
            // SAFETY: copy_in requires bytes.len() mapped, writable bytes at the pointer, as
            // with_service gives.
            unsafe { copy_in(at, bytes) }
        })
    }

    /// Reads into `bytes` from `offset` bytes into `page` through the service mapping. May extend into
    /// the following pages. A page that was never written reads as zeroes and then is in the page
    /// cache.
    pub fn read_service(
        &self,
        page: PageIndex,
        offset: u64,
        bytes: &mut [u8],
    ) -> Result<(), AccessError> {
        self.with_service(page, offset, bytes.len(), |at| {
            // SAFETY: copy_out requires bytes.len() mapped, readable bytes at the pointer, as
            // with_service gives.
            unsafe { copy_out(at, bytes) }
        })
    }

    /// Writes zeroes to `pages` through the service mapping. Unlike after [`Region::punch`], the pages
    /// are then in the page cache.
    pub fn zero_service(&self, pages: PageRange) -> Result<(), AccessError> {
        let (_, bytes) = self.span(pages).ok_or(AccessError::NoSuchPages { pages })?;
        let len = to_usize(bytes);
        self.with_service(pages.first(), 0, len, |at| {
            // SAFETY: fill_zeroes requires len mapped, writable bytes at the pointer, as with_service
            // gives.
            unsafe { fill_zeroes(at, len) }
        })
    }

    /// Calls `copy` with a pointer to `len` bytes of the service mapping, which remain mapped, readable
    /// and writable for the length of the call.
    fn with_service(
        &self,
        page: PageIndex,
        offset: u64,
        len: usize,
        copy: impl FnOnce(*mut u8) -> Result<(), CopyFailure>,
    ) -> Result<(), AccessError> {
        let service = self.service.as_ref().ok_or(AccessError::NoServiceMapping)?;
        let at = self.check_access(page, offset, len)?;
        let _passage = self.gate.pass(page).ok_or(AccessError::ServiceClosed)?;
        copy(service.as_ptr().wrapping_add(at)).map_err(|failure| self.copy_error(failure))
    }

    /// The 8 bytes at `offset` bytes into `page`, a multiple of 8, in the service mapping, for words
    /// that are read often. `None` if the region has no such word or no service mapping, or if the
    /// mapping is closed ([`ServiceAccess::Closed`]).
    #[inline]
    pub fn service_word(&self, page: PageIndex, offset: u64) -> Option<&AtomicU64> {
        let service = self.service.as_ref()?;
        let at = self.check_access(page, offset, size_of::<u64>()).ok()?;
        let word = service.as_ptr().wrapping_add(at).cast::<u64>();
        if !word.is_aligned() {
            return None;
        }
        // A mapping with references to its words is never closed.
        if !self.has_word_references.load(Ordering::Relaxed) {
            let _paging = self.lock_paging();
            let _passage = self.gate.pass(page)?;
            self.has_word_references.store(true, Ordering::Relaxed);
        }
        // SAFETY: from_ptr requires an aligned pointer that stays valid, and no non-atomic access by
        // this process: it was just checked to be aligned and within the region. The mapping covers the
        // region for as long as self lives, and is not closed any more (begin_paging checks
        // has_word_references); all other access is by guarded copies.
        Some(unsafe { AtomicU64::from_ptr(word) })
    }

    /// Reads through the guest mapping, as the guest would. Absent pages fault: with a userfaultfd
    /// registered, the call blocks until a pager resolves the fault.
    pub fn read_guest(
        &self,
        page: PageIndex,
        offset: u64,
        bytes: &mut [u8],
    ) -> Result<(), AccessError> {
        let at = self.check_access(page, offset, bytes.len())?;
        // SAFETY: copy_out requires bytes.len() mapped, readable bytes at the pointer: check_access
        // found the span within the region, which the guest mapping covers.
        unsafe { copy_out(self.guest.as_ptr().wrapping_add(at), bytes) }
            .map_err(|failure| self.copy_error(failure))
    }

    /// Writes through the guest mapping, as the guest would. Blocks as [`Region::read_guest`] does.
    pub fn write_guest(
        &self,
        page: PageIndex,
        offset: u64,
        bytes: &[u8],
    ) -> Result<(), AccessError> {
        let at = self.check_access(page, offset, bytes.len())?;
        // SAFETY: copy_in requires bytes.len() mapped, writable bytes at the pointer: as in
        // read_guest.
        unsafe { copy_in(self.guest.as_ptr().wrapping_add(at), bytes) }
            .map_err(|failure| self.copy_error(failure))
    }

    /// Checks that an access lies within the region, and returns its offset in the region.
    #[inline]
    fn check_access(&self, page: PageIndex, offset: u64, len: usize) -> Result<usize, AccessError> {
        let outside = AccessError::Outside { page, offset, len };
        let start = page
            .0
            .checked_mul(self.page_size().bytes())
            .and_then(|start| start.checked_add(offset))
            .ok_or(outside)?;
        match start.checked_add(to_u64(len)) {
            Some(end) if end <= self.bytes() => Ok(to_usize(start)),
            _ => Err(outside),
        }
    }

    /// Returns the content of `pages` to the host, page table entries included: a hole in the file, or
    /// `MADV_DONTNEED` for anonymous memory. Later reads return zeroes unless a pager installs other
    /// content.
    pub fn punch(&self, pages: PageRange) -> Result<(), AccessError> {
        let (offset, bytes) = self.span(pages).ok_or(AccessError::NoSuchPages { pages })?;
        match &self.file {
            Some(file) => {
                let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                fallocate(file, flags, offset, bytes)
            }
            None => self
                .guest
                .advise(to_usize(offset), to_usize(bytes), Advice::LinuxDontNeed),
        }
        .map_err(|errno| AccessError::Punch { pages, errno })
    }

    /// Removes the guest mapping's page table entries of `pages`. The content stays in the page cache,
    /// so the next access is a MINOR fault. Refused for anonymous memory, which would lose its content.
    pub fn zap_guest(&self, pages: PageRange) -> Result<(), AccessError> {
        if self.file.is_none() {
            return Err(AccessError::NoServiceMapping);
        }
        let (offset, bytes) = self.span(pages).ok_or(AccessError::NoSuchPages { pages })?;
        self.guest
            .advise(to_usize(offset), to_usize(bytes), Advice::LinuxDontNeed)
            .map_err(|errno| AccessError::Zap { pages, errno })
    }

    /// Makes `pages` present in the guest mapping for `access`, as an access by this process would.
    ///
    /// With a userfaultfd registered and a page absent, the call sleeps until a pager resolves the
    /// fault or ends the registration. The kernel ignores every signal but a fatal one during this
    /// sleep, so do not call this for pages that may be absent in userfaultfd MISSING mode.
    pub fn fault_in(&self, pages: PageRange, access: FaultInAccess) -> Result<(), FaultInError> {
        let (offset, bytes) = self
            .span(pages)
            .ok_or(FaultInError::NoSuchPages { pages })?;
        let advice = match access {
            FaultInAccess::Read => Advice::LinuxPopulateRead,
            FaultInAccess::Write => Advice::LinuxPopulateWrite,
        };
        loop {
            match self.guest.advise(to_usize(offset), to_usize(bytes), advice) {
                Ok(()) => return Ok(()),
                // The kernel was moving a page and requires another call.
                Err(Errno::AGAIN) => {}
                // The caller handles the signal.
                Err(Errno::INTR) => return Err(FaultInError::Interrupted { pages }),
                Err(Errno::HWPOISON) => return Err(FaultInError::Poisoned { pages }),
                Err(Errno::NOMEM) => return Err(FaultInError::OutOfMemory { pages }),
                Err(errno) => return Err(FaultInError::FaultIn { pages, errno }),
            }
        }
    }
}

fn make_file(bytes: u64, backing: Backing, policy: FailurePolicy) -> Result<OwnedFd, RegionError> {
    let kind = match backing {
        Backing::Hugetlb2M => MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB,
        Backing::Hugetlb1G => MemfdFlags::HUGETLB | MemfdFlags::HUGE_1GB,
        Backing::Shmem | Backing::Thp | Backing::Anonymous => MemfdFlags::empty(),
    };
    let keep = match policy {
        FailurePolicy::Keep => KEEP_UE_MAPPED,
        FailurePolicy::KernelDefault => MemfdFlags::empty(),
    };
    let file = memfd_create("pagetide-region", MemfdFlags::CLOEXEC | kind | keep).map_err(
        |errno| match (policy, errno) {
            (FailurePolicy::Keep, Errno::INVAL) => RegionError::NoKeepPolicy { backing },
            _ => RegionError::CreateFile { backing, errno },
        },
    )?;
    ftruncate(&file, bytes).map_err(|errno| RegionError::SizeFile { bytes, errno })?;
    Ok(file)
}

fn map_error(errno: Errno, bytes: u64, backing: Backing) -> RegionError {
    if errno != Errno::NOMEM {
        return RegionError::Map { bytes, errno };
    }
    // Another user took the huge pages, or the memory, between the check and the mapping.
    match check_room(bytes, backing) {
        Err(error) => error,
        Ok(()) => RegionError::DoesNotFit {
            bytes,
            backing,
            available_bytes: available_bytes().unwrap_or(0),
        },
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests;
