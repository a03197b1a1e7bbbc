//! Guest memory of the crate vm-memory.

use std::os::fd::AsFd;

use pagetide_memory::{GuestAddress, HostAddress, HostRange, RangeError};
use pagetide_uapi::userfaultfd::Mode;
use vm_memory::{Address, GuestMemoryBackend, GuestMemoryRegion, MemoryRegionAddress};

use crate::adopt::{AddMemoryError, MappedMemory, add_mapped_memory};
use crate::config::{Contents, RegionConfig};
use crate::fault::RegionId;
use crate::memory::Memfd;
use crate::pager::Pager;

/// Begins to page all of a VMM's guest memory, with any bitmap: see [`add_mapped_memory`].
///
/// # Safety
///
/// As for [`RegionConfig::mapped`]: the memory stays mapped until its regions were removed from the
/// pager, or the pager was dropped.
///
/// # Errors
/// [`AddMemoryError`]; regions that were added before stay.
pub unsafe fn add_guest_memory(
    pager: &Pager,
    memory: &impl GuestMemoryBackend,
    mode: Mode,
    contents: impl FnMut(GuestAddress, u64) -> Contents,
    set: impl FnMut(RegionConfig) -> RegionConfig,
) -> Result<Vec<RegionId>, AddMemoryError> {
    let parts: Result<Vec<_>, _> = memory.iter().map(part).collect();
    // SAFETY: by this function's requirement.
    unsafe { add_mapped_memory(pager, parts?, mode, contents, set) }
}

fn part(region: &impl GuestMemoryRegion) -> Result<MappedMemory, AddMemoryError> {
    let gpa = GuestAddress(region.start_addr().raw_value());
    let range = host_range(region).map_err(|source| AddMemoryError::Range { gpa, source })?;
    let file = region.file_offset().map(|file| {
        let duplicate = rustix::io::fcntl_dupfd_cloexec(file.file().as_fd(), 3);
        let duplicate = duplicate.map_err(|errno| AddMemoryError::Prepare { gpa, errno });
        Ok::<_, AddMemoryError>(Memfd {
            file: duplicate?,
            offset_bytes: file.start(),
        })
    });
    Ok(MappedMemory {
        gpa,
        range,
        file: file.transpose()?,
    })
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

    use std::sync::Arc;

    use pagetide_uapi::userfaultfd::{Features, RegisterError, Userfaultfd};
    use vm_memory::GuestMemoryMmap;
    use vm_memory::bitmap::AtomicBitmap;

    use super::*;
    use crate::{AddError, PatternSource};

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

    fn add(
        pager: &Pager,
        memory: &impl GuestMemoryBackend,
    ) -> Result<Vec<RegionId>, AddMemoryError> {
        // SAFETY: the tests drop the pager first, and do not rely on the content of missing pages.
        unsafe { add_guest_memory(pager, memory, Mode::Missing, sevens, |config| config) }
    }

    fn first_byte(memory: &GuestMemoryMmap, gpa: u64) -> u8 {
        memory.read_obj(vm_memory::GuestAddress(gpa)).unwrap()
    }

    /// Kind: an interface that those for whom it is there cannot call. Firecracker's and Cloud Hypervisor's memory has a bitmap.
    #[test]
    fn guest_memory_with_a_dirty_bitmap_is_served() {
        if let Err(error) = Userfaultfd::available() {
            println!("SKIP: {error}");
            return;
        }
        let ranges = [(vm_memory::GuestAddress(0), 0x4000)];
        let memory = GuestMemoryMmap::<AtomicBitmap>::from_ranges(&ranges).unwrap();
        let pager = Pager::new().unwrap();
        add(&pager, &memory).unwrap();
        let mut resolver = pager.resolver(Some(0)).unwrap();
        let access = pagetide_memory::Access::Read;
        let _ = resolver.resolve_exit(GuestAddress(PAGE), access).unwrap();
        let read: u8 = memory.read_obj(vm_memory::GuestAddress(PAGE)).unwrap();
        assert_eq!(read, 7);
    }

    /// Whether a child inherits the page at this guest address.
    fn is_inherited(memory: &GuestMemoryMmap, gpa: u64) -> bool {
        let host = memory
            .get_host_address(vm_memory::GuestAddress(gpa))
            .unwrap();
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut is_of_it = false;
        for line in smaps.lines() {
            let range = line
                .split(' ')
                .next()
                .and_then(|range| range.split_once('-'));
            let address = |text: &str| usize::from_str_radix(text, 16).ok();
            if let Some((start, end)) = range.and_then(|(a, b)| address(a).zip(address(b))) {
                is_of_it = (start..end).contains(&host.addr());
            }
            if let Some(flags) = line.strip_prefix("VmFlags:").filter(|_| is_of_it) {
                return !flags.split_whitespace().any(|flag| flag == "dc");
            }
        }
        panic!("gpa {gpa:#x} is not mapped");
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
        let error = add(&pager, &*other).unwrap_err();
        let AddMemoryError::Add { gpa, source } = &error else {
            panic!("{error}")
        };
        assert_eq!(*gpa, GuestAddress(AT + PAGE));
        assert!(matches!(source, AddError::Overlap { .. }), "{source}");
        // A child inherits what is not paged, as before.
        assert_eq!(
            [0, AT + PAGE, 2 * AT].map(|gpa| is_inherited(&other, gpa)),
            [false, true, true]
        );
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
