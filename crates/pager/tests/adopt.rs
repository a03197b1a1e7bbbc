//! Guest memory that a VMM has mapped itself, and hands to the pager.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;

use pagetide_memory::{Access, Backing, GuestAddress, HostAddress, HostRange};
use pagetide_pager::{
    Contents, MappedMemory, Memfd, Mode, Pager, PatternSource, Resolution, add_mapped_memory,
};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
use support::view::{View, memfd};
use support::*;

fn contents(_: GuestAddress, _: u64) -> Contents {
    Contents::Local(Arc::new(PatternSource::new(fill)))
}

/// The flags of the mapping at an address, as in `VmFlags` of smaps.
fn flags_at(range: HostRange) -> Vec<String> {
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let covers = |line: &str| {
        let (start, end) = line.split_whitespace().next()?.split_once('-')?;
        let number = |text| u64::from_str_radix(text, 16).ok();
        (number(start)?..number(end)?)
            .contains(&range.start().as_u64())
            .then_some(())
    };
    let mut lines = smaps.lines().skip_while(|line| covers(line).is_none());
    let flags = lines.find_map(|line| line.strip_prefix("VmFlags:"));
    flags
        .unwrap()
        .split_whitespace()
        .map(str::to_owned)
        .collect()
}

#[test]
fn memory_is_as_before_when_paging_has_ended() {
    if !has_userfaultfd() {
        return;
    }
    let pages = 16;
    let file = memfd(pages * PAGE);
    for is_shared in [false, true] {
        let view = match is_shared {
            false => View::private(pages * PAGE),
            true => View::new(&file, pages * PAGE),
        };
        let before = flags_at(view.range());
        let memory = MappedMemory {
            gpa: GPA,
            range: view.range(),
            file: is_shared.then(|| Memfd {
                file: file.as_fd().try_clone_to_owned().unwrap(),
                offset_bytes: 0,
            }),
        };
        let pager = Pager::new().unwrap();
        let mode = if is_shared {
            Mode::Minor
        } else {
            Mode::Missing
        };
        let around = |config: pagetide_pager::RegionConfig| config.fault_around(4);
        // SAFETY: the memory stays for the life of the process, and nobody relies on its content.
        let ids = unsafe { add_mapped_memory(&pager, [memory], mode, contents, around) }.unwrap();
        assert!(flags_at(view.range()).iter().any(|flag| flag == "dc"));
        let mut resolver = pager.resolver(Some(0)).unwrap();
        let at = |page| GuestAddress(GPA.0 + page * PAGE);
        let first = resolver.resolve_exit(at(0), Access::Read).unwrap();
        assert_eq!(first, installed(0, 4), "the options are the caller's");
        for page in 4..pages {
            let _ = resolver.resolve_exit(at(page), Access::Read).unwrap();
        }
        drop(resolver);
        pager.remove(ids[0]).unwrap();
        assert_eq!(flags_at(view.range()), before, "shared: {is_shared}");
        for page in 0..pages {
            assert_eq!(view.read(page), !at(page).0);
        }
    }
}

#[test]
fn memory_of_huge_pages_is_served() {
    const HUGE: usize = 2 << 20;
    let _pool = pool_for(2, Backing::Hugetlb2M);
    if !has_userfaultfd() {
        return;
    }
    let access = ProtFlags::READ | ProtFlags::WRITE;
    let flags = MapFlags::PRIVATE | MapFlags::HUGETLB;
    // SAFETY: a new mapping at an address that the kernel chooses.
    let start = unsafe { mmap_anonymous(std::ptr::null_mut(), 2 * HUGE, access, flags) };
    let Ok(start) = start else {
        println!("SKIP: 2 pages of 2M are needed");
        return;
    };
    let start = start.expose_provenance();
    let memory = MappedMemory {
        gpa: GPA,
        range: HostRange::new(HostAddress(start), 2 * HUGE).unwrap(),
        file: None,
    };
    let pager = Pager::new().unwrap();
    // SAFETY: the memory stays for the life of the process, and nobody relies on its content.
    let added =
        unsafe { add_mapped_memory(&pager, [memory], Mode::Missing, contents, |config| config) };
    added.unwrap();
    let mut resolver = pager.resolver(Some(0)).unwrap();
    let second = GuestAddress(GPA.0 + HUGE as u64);
    let resolved = resolver.resolve_exit(second, Access::Read).unwrap();
    assert!(
        matches!(resolved, Resolution::Installed { .. }),
        "{resolved:?}"
    );
    let word = std::ptr::with_exposed_provenance::<u64>(start + HUGE);
    // SAFETY: mapped for the life of the process, and installed.
    assert_eq!(unsafe { word.read_volatile() }, !second.0);
}

/// The memory of this process's page tables, in KiB.
fn page_tables_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmPTE:"));
    let kib = line.unwrap().trim().strip_suffix(" kB").unwrap();
    kib.parse().unwrap()
}

/// Kind: what costs in proportion to a VM's memory, at an end that could cost nothing. A mark for each missing page is a page table
/// entry: 8 MiB of them here.
#[test]
fn memory_that_is_unmapped_next_ends_without_a_mark_for_each_page() {
    if !has_userfaultfd() {
        return;
    }
    let pages = 1 << 20;
    let view = View::private(pages * PAGE);
    let memory = MappedMemory {
        gpa: GPA,
        range: view.range(),
        file: None,
    };
    let pager = Pager::new().unwrap();
    // SAFETY: the memory stays for the life of the process, and nobody relies on its content.
    let ids =
        unsafe { add_mapped_memory(&pager, [memory], Mode::Missing, contents, |config| config) };
    let id = ids.unwrap()[0];
    let mut resolver = pager.resolver(Some(0)).unwrap();
    let _ = resolver.resolve_exit(GPA, Access::Read).unwrap();
    drop(resolver);
    let before = page_tables_kib();
    // SAFETY: nobody accesses the memory any more.
    unsafe { pager.remove_with_memory(id) }.unwrap();
    let grown = page_tables_kib().saturating_sub(before);
    // The other tests of this program run meanwhile.
    assert!(grown < 2048, "{grown} KiB of page tables");
    assert!(pager.region_ids().is_empty());
}

/// Has the kernel read the first byte of a page; a signal would end the test.
fn read_by_kernel(file: &impl AsFd, address: u64) -> std::io::Result<()> {
    let raw = file.as_fd().as_raw_fd();
    let at = std::ptr::with_exposed_provenance(usize::try_from(address).unwrap());
    // SAFETY: pwrite reads one byte, by the kernel, which reports memory that is not there.
    match unsafe { libc::pwrite(raw, at, 1, 0) } {
        1 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// Kind: an end that fails open. Whoever still uses the memory, or sleeps there, finds neither zeroes nor a thread to wake it.
#[test]
fn memory_that_is_unmapped_next_is_inaccessible_until_then() {
    if !has_userfaultfd() {
        return;
    }
    for mode in [Mode::Missing, Mode::Minor] {
        // The second shares the first one's userfaultfd, which stays open.
        let memory = [GPA, GuestAddress(0)].map(|gpa| {
            let file = memfd(16 * PAGE);
            let view = View::new(&file, 16 * PAGE);
            let offset_bytes = 0;
            let file = Some(Memfd { file, offset_bytes });
            let range = view.range();
            MappedMemory { gpa, range, file }
        });
        let range = memory[0].range;
        let none = |_, _| ManualSource::new().contents();
        let pager = Pager::new().unwrap();
        // SAFETY: the memory stays for the life of the process, and nobody relies on its content.
        let ids = unsafe { add_mapped_memory(&pager, memory, mode, none, |config| config) };
        let id = ids.unwrap()[0];
        let target = Arc::new(memfd(PAGE));
        let its = Arc::clone(&target);
        let at = range.start().as_u64();
        let asleep = spawn_asleep("a read by the kernel", move || {
            read_by_kernel(&*its, at + 3 * PAGE)
        });
        // SAFETY: whoever accesses the memory is told so by the kernel.
        unsafe { pager.remove_with_memory(id) }.unwrap();
        let efault = Some(libc::EFAULT);
        let woken = join("the thread that slept", asleep).unwrap_err();
        assert_eq!(woken.raw_os_error(), efault, "{mode:?}");
        let later = read_by_kernel(&*target, at + 4 * PAGE).unwrap_err();
        assert_eq!(later.raw_os_error(), efault, "{mode:?}");
        assert!(!flags_at(range).iter().any(|flag| flag == "rd"));
        assert_eq!(pager.region_ids().len(), 1);
    }
}

/// Another process's memory, and memory that somebody else has as well, stays accessible: its missing pages are lost.
#[test]
fn memory_that_does_not_end_with_its_region_is_marked() {
    if !can_poison() {
        return;
    }
    let Some(region) = region(4, Backing::Anonymous) else {
        return;
    };
    let paged = Paged::new(&region, Mode::Missing, pattern());
    let _ = paged.read_exit(2);
    // SAFETY: nobody accesses the memory but by checked reads.
    unsafe { paged.pager.remove_with_memory(paged.id) }.unwrap();
    assert_lost(&region, 1);
    check_page(&region, 2);
    let view = View::private(4 * PAGE);
    let uffd = view.register(Mode::Missing);
    let foreign = pagetide_pager::RegionConfig::foreign(
        &uffd,
        view.range(),
        pagetide_memory::PageSize::Size4K,
        Mode::Missing,
        pattern(),
    );
    let id = paged.pager.add(foreign).unwrap();
    // SAFETY: as above.
    unsafe { paged.pager.remove_with_memory(id) }.unwrap();
    assert!(view.is_lost(1));
}
