//! Guest memory that a VMM has in the form of the crate vm-memory.

use std::os::fd::AsFd;
use std::sync::Arc;

use pagetide_memory::{GuestAddress, HostAddress, HostRange, PageSize, RangeError};
use pagetide_uapi::userfaultfd::{Features, Mode, OpenError, RegisterError, Userfaultfd};
use rustix::io::Errno;
use rustix::mm::Advice;
use thiserror::Error;
use vm_memory::{
    Address, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, MemoryRegionAddress,
};

use crate::config::{Contents, RegionConfig};
use crate::error::AddError;
use crate::fault::RegionId;
use crate::pager::Pager;
use crate::target::Memfd;

/// Why guest memory is not paged.
#[derive(Debug, Error)]
pub enum AddMemoryError {
    /// A region of guest memory is not whole pages.
    #[error("the guest memory at gpa {gpa} is not whole pages")]
    Range {
        /// Its first byte.
        gpa: GuestAddress,
        /// What is wrong.
        #[source]
        source: RangeError,
    },
    /// No userfaultfd.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The kernel would not serve the memory.
    #[error(transparent)]
    Register(#[from] RegisterError),
    /// The memory could not be prepared.
    #[error("preparing the guest memory at gpa {gpa}")]
    Prepare {
        /// Its first byte.
        gpa: GuestAddress,
        /// What the kernel said.
        #[source]
        errno: Errno,
    },
    /// The pager refuses.
    #[error("the guest memory at gpa {gpa}")]
    Add {
        /// Its first byte.
        gpa: GuestAddress,
        /// Why.
        #[source]
        source: AddError,
    },
}

/// Begins to page all of a VMM's guest memory, 4 KiB pages: opens a userfaultfd for it, registers each
/// region and adds it to the pager; `contents` is asked for each region, by its gpa and length in bytes.
/// Returns the regions in the order of their gpas.
///
/// Memory with a file behind it can be paged in MINOR mode; without one it is MISSING mode. Content
/// that anonymous memory has already is dropped.
///
/// # Safety
///
/// As [`RegionConfig::mapped`]: the memory stays mapped until its regions were removed from the pager,
/// or the pager was dropped.
///
/// # Errors
/// [`AddMemoryError`]; regions that were added before stay.
pub unsafe fn add_guest_memory(
    pager: &Pager,
    memory: &GuestMemoryMmap,
    mode: Mode,
    mut contents: impl FnMut(GuestAddress, u64) -> Contents,
) -> Result<Vec<RegionId>, AddMemoryError> {
    let wanted = match mode {
        Mode::Minor => Features::MISSING_SHMEM | Features::MINOR_SHMEM,
        Mode::Missing => Features::MISSING_SHMEM,
    };
    let available = Userfaultfd::available()?;
    let poison = if available.contains(Features::POISON) {
        Features::POISON
    } else {
        Features::NONE
    };
    let uffd = Arc::new(Userfaultfd::open(wanted | poison)?);
    let mut added = Vec::new();
    for region in memory.iter() {
        let gpa = GuestAddress(region.start_addr().raw_value());
        let range = host_range(region).map_err(|source| AddMemoryError::Range { gpa, source })?;
        let prepare = |errno| AddMemoryError::Prepare { gpa, errno };
        // Huge pages in the guest mapping would make neighbours of an installed page present; a forked
        // child would fill missing pages with zeroes.
        for advice in [
            Advice::LinuxNoHugepage,
            Advice::LinuxDontFork,
            Advice::LinuxDontNeed,
        ] {
            let start = std::ptr::with_exposed_provenance_mut(range.start().0);
            // SAFETY: the caller promises that the memory is this process's and that nobody takes it for
            // granted what its missing pages hold. What a file has stays in the file.
            let advised = unsafe { rustix::mm::madvise(start, range.bytes(), advice) };
            match advised {
                // A kernel without transparent huge pages.
                Err(Errno::INVAL) if advice == Advice::LinuxNoHugepage => {}
                result => result.map_err(prepare)?,
            }
        }
        let contents = contents(gpa, range.bytes() as u64);
        // SAFETY: as the caller promises.
        let mut config =
            unsafe { RegionConfig::mapped(&uffd, range, PageSize::Size4K, mode, contents) }
                .gpa(gpa);
        if let Some(file) = region.file_offset() {
            let duplicate = rustix::io::fcntl_dupfd_cloexec(file.file().as_fd(), 3);
            config = config.memfd(Memfd {
                file: duplicate.map_err(prepare)?,
                offset_bytes: file.start(),
            });
        }
        // SAFETY: the caller promises that the memory stays mapped; the region drops the userfaultfd.
        unsafe { uffd.register(range.into(), mode) }?;
        let id = pager.add(config).map_err(|source| {
            // The regions before keep the userfaultfd open, which nobody would serve here.
            let _ = uffd.unregister(range.into());
            AddMemoryError::Add { gpa, source }
        });
        added.push(id?);
    }
    Ok(added)
}

fn host_range(region: &impl GuestMemoryRegion) -> Result<HostRange, RangeError> {
    let address = region.get_host_address(MemoryRegionAddress(0));
    let start = address.map_or(0, <*mut u8>::expose_provenance);
    HostRange::new(
        HostAddress(start),
        usize::try_from(region.len()).unwrap_or(usize::MAX),
    )
}
