//! Guest memory of the crate vm-memory.

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

/// Why guest memory could not be added.
#[derive(Debug, Error)]
pub enum AddMemoryError {
    /// A region of guest memory does not consist of whole pages.
    #[error("the guest memory at gpa {gpa} does not consist of whole pages")]
    Range {
        /// Its first byte.
        gpa: GuestAddress,
        /// The reason.
        #[source]
        source: RangeError,
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

/// Begins to page all of a VMM's guest memory, in 4 KiB pages: opens a userfaultfd for it, registers
/// each region and adds it to the pager; `contents` returns each region's content, by the region's gpa
/// and length in bytes. Returns the regions in the order of their gpas.
///
/// MINOR mode needs memory with a file; memory without a file needs MISSING mode. Existing content of
/// anonymous memory is discarded.
///
/// # Safety
///
/// As for [`RegionConfig::mapped`]: the memory stays mapped until its regions were removed from the
/// pager, or the pager was dropped.
///
/// # Errors
/// [`AddMemoryError`]; regions that were added before stay. Memory that another userfaultfd serves is
/// refused, and retains its content. Other memory that is refused loses its content if it has no file.
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
        let contents = contents(gpa, range.bytes() as u64);
        // SAFETY: by this function's requirement.
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
        // Before the content is discarded: memory that another userfaultfd serves is refused here.
        // SAFETY: the memory stays mapped by this function's requirement; the region drops the
        // userfaultfd.
        unsafe { uffd.register(range.into(), mode) }?;
        // SAFETY: no code relies on the content of missing pages, by this function's requirement.
        let dropped = unsafe { drop_content(range) }.map_err(prepare);
        let id = dropped.and_then(|()| {
            let id = pager.add(config);
            id.map_err(|source| AddMemoryError::Add { gpa, source })
        });
        let id = id.inspect_err(|_| {
            // The earlier regions keep the userfaultfd open, but no thread would serve this range.
            let _ = uffd.unregister(range.into());
        });
        added.push(id?);
    }
    Ok(added)
}

/// Makes every page of a range missing, and separately mapped: huge pages in the guest mapping would
/// make the neighbours of an installed page present, and a forked child would create pages of zeroes.
///
/// # Safety
///
/// The range is this process's own, and no code relies on the content of its pages. (Content in a file
/// stays in the file.)
unsafe fn drop_content(range: HostRange) -> Result<(), Errno> {
    for advice in [
        Advice::LinuxNoHugepage,
        Advice::LinuxDontFork,
        Advice::LinuxDontNeed,
    ] {
        let start = std::ptr::with_exposed_provenance_mut(range.start().0);
        // SAFETY: by this function's requirement.
        match unsafe { rustix::mm::madvise(start, range.bytes(), advice) } {
            // A kernel without transparent huge pages.
            Err(Errno::INVAL) if advice == Advice::LinuxNoHugepage => {}
            result => result?,
        }
    }
    Ok(())
}

fn host_range(region: &impl GuestMemoryRegion) -> Result<HostRange, RangeError> {
    let address = region.get_host_address(MemoryRegionAddress(0));
    let start = address.map_or(0, <*mut u8>::expose_provenance);
    HostRange::new(
        HostAddress(start),
        usize::try_from(region.len()).unwrap_or(usize::MAX),
    )
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use vm_memory::Bytes;

    use super::*;
    use crate::PatternSource;

    const PAGE: u64 = 4096;

    fn memory(ranges: &[(u64, usize)]) -> GuestMemoryMmap {
        let ranges: Vec<_> = ranges
            .iter()
            .map(|&(start, bytes)| (vm_memory::GuestAddress(start), bytes))
            .collect();
        GuestMemoryMmap::from_ranges(&ranges).unwrap()
    }

    fn sevens(_: GuestAddress, _: u64) -> Contents {
        let fill = |_, buffer: &mut [u8]| buffer.fill(7);
        Contents::Local(Arc::new(PatternSource::new(fill)))
    }

    fn add(pager: &Pager, memory: &GuestMemoryMmap) -> Result<Vec<RegionId>, AddMemoryError> {
        // SAFETY: the tests drop the pager first, and do not rely on the content of missing pages.
        unsafe { add_guest_memory(pager, memory, Mode::Missing, sevens) }
    }

    fn first_byte(memory: &GuestMemoryMmap, gpa: u64) -> u8 {
        memory.read_obj(vm_memory::GuestAddress(gpa)).unwrap()
    }

    /// The previous region keeps their userfaultfd open, so a thread that touches the memory would
    /// sleep forever.
    #[test]
    fn guest_memory_that_cannot_be_added_is_unregistered() {
        if let Err(error) = Userfaultfd::available() {
            println!("SKIP: {error}");
            return;
        }
        const AT: u64 = 0x10_0000;
        let there = memory(&[(AT, 0x4000)]);
        let other = Arc::new(memory(&[
            (0, 0x4000),
            (AT + PAGE, 0x4000),
            (2 * AT, 0x4000),
        ]));
        let pager = Pager::new().unwrap();
        add(&pager, &there).unwrap();
        let error = add(&pager, &other).unwrap_err();
        let AddMemoryError::Add { gpa, source } = &error else {
            panic!("{error}")
        };
        assert_eq!(*gpa, GuestAddress(AT + PAGE));
        assert!(matches!(source, AddError::Overlap { .. }), "{source}");
        // The first region stays.
        assert_eq!(pager.region_ids().len(), 2);
        let first = pager.locate(GuestAddress(0)).unwrap().0;

        // Another userfaultfd can serve the region that failed, and the one after it.
        let uffd = Userfaultfd::open(Features::NONE).unwrap();
        for region in other.iter().skip(1) {
            let range = host_range(region).unwrap().into();
            // SAFETY: no code relies on the memory's zeroes, and it stays mapped for longer.
            unsafe { uffd.register(range, Mode::Missing) }.unwrap();
            uffd.unregister(range).unwrap();
        }
        drop(uffd);
        let (send, receive) = mpsc::channel();
        let its = Arc::clone(&other);
        let reading =
            thread::spawn(move || send.send([AT + PAGE, 2 * AT].map(|gpa| first_byte(&its, gpa))));
        let seen = receive.recv_timeout(pagetide_test_support::PATIENCE);
        assert_eq!(seen.expect("a read of memory hangs"), [0, 0]);
        reading.join().unwrap().unwrap();
        // The first region is served.
        let mut resolver = pager.resolver(Some(0)).unwrap();
        let access = pagetide_memory::Access::Read;
        let _ = resolver.resolve_exit(GuestAddress(PAGE), access).unwrap();
        assert_eq!(first_byte(&other, PAGE), 7);
        drop(resolver);
        pager.remove(first).unwrap();
    }

    /// Otherwise its present pages would read as zeroes.
    #[test]
    fn guest_memory_that_is_already_paged_is_refused_and_loses_nothing() {
        if let Err(error) = Userfaultfd::available() {
            println!("SKIP: {error}");
            return;
        }
        let there = memory(&[(0, 0x4000)]);
        let pager = Pager::new().unwrap();
        add(&pager, &there).unwrap();
        let mut resolver = pager.resolver(Some(0)).unwrap();
        let access = pagetide_memory::Access::Read;
        for page in 0..2 {
            let gpa = GuestAddress(page * PAGE);
            let _ = resolver.resolve_exit(gpa, access).unwrap();
        }
        there
            .write_obj(9_u8, vm_memory::GuestAddress(PAGE))
            .unwrap();
        for pager in [&pager, &Pager::new().unwrap()] {
            let error = add(pager, &there).unwrap_err();
            assert!(
                matches!(error, AddMemoryError::Register(RegisterError::Busy { .. })),
                "{error}"
            );
        }
        // If the pages were missing, this would sleep: no thread serves the pager.
        let there = Arc::new(there);
        let (send, receive) = mpsc::channel();
        let its = Arc::clone(&there);
        thread::spawn(move || send.send([0, PAGE].map(|gpa| first_byte(&its, gpa))));
        let seen = receive.recv_timeout(pagetide_test_support::PATIENCE);
        assert_eq!(seen.expect("a read of memory hangs"), [7, 9]);
        assert_eq!(pager.progress().present, 2);
    }
}
