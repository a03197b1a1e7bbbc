//! Guest memory that a VMM has mapped itself, and hands to the pager.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::os::fd::AsFd;
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
