//! Memory of this process that a VMM has mapped itself: prepared for paging, registered, and added.

use std::sync::Arc;

use pagetide_memory::{GuestAddress, HostRange, PageSize};
use pagetide_uapi::host::mapping_page_bytes;
use pagetide_uapi::userfaultfd::{Features, Mode, OpenError, RegisterError, Userfaultfd};
use rustix::io::Errno;
use rustix::mm::Advice;
use thiserror::Error;

use crate::config::{Contents, RegionConfig};
use crate::error::AddError;
use crate::fault::RegionId;
use crate::memory::Memfd;
use crate::pager::Pager;

/// Why guest memory could not be added.
#[derive(Debug, Error)]
pub enum AddMemoryError {
    /// A part of the guest memory does not consist of whole pages.
    #[error("the guest memory at gpa {gpa} does not consist of whole pages")]
    Range {
        /// Its first byte.
        gpa: GuestAddress,
        /// The reason.
        #[source]
        source: pagetide_memory::RangeError,
    },
    /// The size of its pages is unknown.
    #[error("determining the page size of the guest memory at gpa {gpa}")]
    PageSize {
        /// Its first byte.
        gpa: GuestAddress,
        /// The reason.
        #[source]
        source: std::io::Error,
    },
    /// Its pages have a size that the pager does not know, or nothing is mapped there.
    #[error(
        "the guest memory at gpa {gpa} has pages of {page_bytes} bytes, and not of 4K, 2M or 1G"
    )]
    OtherPages {
        /// Its first byte.
        gpa: GuestAddress,
        /// The size of its pages; 0 if nothing is mapped there.
        page_bytes: u64,
    },
    /// A userfaultfd could not be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The kernel refused to register the memory.
    #[error(transparent)]
    Register(#[from] RegisterError),
    /// The memory could not be prepared.
    #[error("preparing the guest memory at gpa {gpa}")]
    Prepare {
        /// Its first byte.
        gpa: GuestAddress,
        /// The kernel's error.
        #[source]
        errno: Errno,
    },
    /// The pager refused the region.
    #[error("adding the guest memory at gpa {gpa}")]
    Add {
        /// Its first byte.
        gpa: GuestAddress,
        /// The reason.
        #[source]
        source: AddError,
    },
}

/// Guest memory that a VMM has mapped.
#[derive(Debug)]
pub struct MappedMemory {
    /// The gpa of its first byte.
    pub gpa: GuestAddress,
    /// Its addresses in this process.
    pub range: HostRange,
    /// Its file, if it is a shared mapping of one.
    pub file: Option<Memfd>,
}

/// Begins to page guest memory that a VMM has mapped, whatever crate manages it: opens a userfaultfd, registers
/// each part with it and adds the part to the pager. `configure` receives the gpa and the length in bytes of a
/// part, and returns its content; `set` may change the part's other options. Returns the regions in order.
///
/// MINOR mode needs memory with a file; memory without a file needs MISSING mode. Existing content of anonymous
/// memory is discarded. While memory is paged, a child of this process does not inherit it (afterwards it does, also if it
/// did not before); and a file's mapping has no transparent huge pages, also afterwards, or if it was refused.
///
/// # Safety
///
/// As for [`RegionConfig::mapped`]: the memory stays mapped until its regions were removed from the pager, or
/// the pager was dropped.
///
/// # Errors
/// [`AddMemoryError`]; parts that were added before stay. Memory that another userfaultfd serves is
/// refused, and retains its content. Other memory that is refused loses its content if it has no file.
pub unsafe fn add_mapped_memory(
    pager: &Pager,
    memory: impl IntoIterator<Item = MappedMemory>,
    mode: Mode,
    mut contents: impl FnMut(GuestAddress, u64) -> Contents,
    mut set: impl FnMut(RegionConfig) -> RegionConfig,
) -> Result<Vec<RegionId>, AddMemoryError> {
    let available = Userfaultfd::available()?;
    let mut uffds = Vec::new();
    let mut added = Vec::new();
    for MappedMemory { gpa, range, file } in memory {
        let page_size = page_size(gpa, range)?;
        let uffd = uffd_for(&mut uffds, mode, page_size, available)?;
        let has_file = file.is_some();
        let prepare = |errno| AddMemoryError::Prepare { gpa, errno };
        let contents = contents(gpa, range.bytes() as u64);
        // SAFETY: by this function's requirement.
        let config = unsafe { RegionConfig::mapped(&uffd, range, page_size, mode, contents) };
        let mut config = config.gpa(gpa).inherited_again();
        if let Some(file) = file {
            config = config.memfd(file);
        }
        // Before the content is discarded: memory that another userfaultfd serves is refused here.
        // SAFETY: the memory stays mapped by this function's requirement; the region drops the
        // userfaultfd.
        unsafe { uffd.register(range.into(), mode) }?;
        // SAFETY: no code relies on the content of missing pages, by this function's requirement.
        let dropped = unsafe { drop_content(range, has_file) }.map_err(prepare);
        let id = dropped.and_then(|()| {
            let id = pager.add(set(config));
            id.map_err(|source| AddMemoryError::Add { gpa, source })
        });
        let id = id.inspect_err(|_| {
            // The earlier regions keep the userfaultfd open, but no thread would serve this range.
            let _ = uffd.unregister(range.into());
            // SAFETY: the memory is mapped by this function's requirement; the advice changes no content.
            let _ = unsafe { advise(range, Advice::LinuxDoFork) };
        });
        added.push(id?);
    }
    Ok(added)
}

fn page_size(gpa: GuestAddress, range: HostRange) -> Result<PageSize, AddMemoryError> {
    let found = mapping_page_bytes(range.start().as_u64());
    let found = found.map_err(|source| AddMemoryError::PageSize { gpa, source })?;
    let page_bytes = found.unwrap_or(0);
    let sizes = [PageSize::Size4K, PageSize::Size2M, PageSize::Size1G];
    let mut sizes = sizes.into_iter();
    let known = sizes.find(|size| size.bytes() == page_bytes);
    known.ok_or(AddMemoryError::OtherPages { gpa, page_bytes })
}

/// The userfaultfd for memory with pages of this size: one for all parts.
fn uffd_for(
    uffds: &mut Vec<(bool, Arc<Userfaultfd>)>,
    mode: Mode,
    page_size: PageSize,
    available: Features,
) -> Result<Arc<Userfaultfd>, OpenError> {
    let is_huge = page_size != PageSize::Size4K;
    if let Some((_, uffd)) = uffds.iter().find(|(huge, _)| *huge == is_huge) {
        return Ok(Arc::clone(uffd));
    }
    let (missing, minor) = match is_huge {
        false => (Features::MISSING_SHMEM, Features::MINOR_SHMEM),
        true => (Features::MISSING_HUGETLBFS, Features::MINOR_HUGETLBFS),
    };
    let mut wanted = match mode {
        Mode::Minor => missing | minor,
        Mode::Missing => missing,
    };
    if available.contains(Features::POISON) {
        wanted = wanted | Features::POISON;
    }
    let uffd = Arc::new(Userfaultfd::open(wanted)?);
    uffds.push((is_huge, Arc::clone(&uffd)));
    Ok(uffd)
}

/// Makes every page of a range missing. A forked child would create pages of zeroes in a file, and read zeroes
/// elsewhere. Huge pages in a file's mapping would make the neighbours of an installed page present; the kernel
/// makes none of anonymous memory that is registered.
///
/// # Safety
///
/// The range is this process's own, and no code relies on the content of its pages. (Content in a file
/// stays in the file.)
unsafe fn drop_content(range: HostRange, has_file: bool) -> Result<(), Errno> {
    let no_huge = has_file.then_some(Advice::LinuxNoHugepage);
    let always = [Advice::LinuxDontFork, Advice::LinuxDontNeed];
    for advice in no_huge.into_iter().chain(always) {
        // SAFETY: by this function's requirement.
        match unsafe { advise(range, advice) } {
            // A kernel without transparent huge pages, or memory of hugetlbfs.
            Err(Errno::INVAL) if advice == Advice::LinuxNoHugepage => {}
            result => result?,
        }
    }
    Ok(())
}

/// # Safety
///
/// The range is mapped, and no code relies on content that the advice discards.
unsafe fn advise(range: HostRange, advice: Advice) -> Result<(), Errno> {
    let start = std::ptr::with_exposed_provenance_mut(range.start().0);
    // SAFETY: by this function's requirement.
    unsafe { rustix::mm::madvise(start, range.bytes(), advice) }
}
