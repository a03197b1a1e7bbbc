//! As many regions as a VMM may have: each is found, none overlaps another, and each fault gets its content.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::sync::Arc;
use std::time::Instant;

use pagetide_memory::{GuestAddress, HostAddress, HostRange, PageIndex, PageSize};
use pagetide_pager::{AddError, Mode, Pager, ReaderConfig, Readers, RegionConfig, RegionId};
use pagetide_uapi::userfaultfd::{Features, UserRange, Userfaultfd};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
use support::*;

/// Of this process, registered with a userfaultfd with events; mapped until the process ends.
struct Memory {
    uffd: Arc<Userfaultfd>,
    start: usize,
}

impl Memory {
    fn new(pages: u64) -> Self {
        let uffd = Arc::new(Userfaultfd::open(Features::EVENT_REMOVE).unwrap());
        let bytes = pages * PAGE;
        let (access, flags) = (
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::PRIVATE | MapFlags::NORESERVE,
        );
        let length = usize::try_from(bytes).unwrap();
        // SAFETY: mmap without MAP_FIXED replaces no other mapping.
        let start = unsafe { mmap_anonymous(std::ptr::null_mut(), length, access, flags) };
        let start = start.unwrap() as usize;
        let range = UserRange {
            start: start as u64,
            bytes,
        };
        // SAFETY: the memory is new, stays mapped, and no code relies on its zeroes.
        unsafe { uffd.register(range, Mode::Missing) }.unwrap();
        Self { uffd, start }
    }

    /// A region of one page: at this page of the memory, and at this gpa.
    fn config(&self, page: u64, gpa: GuestAddress) -> RegionConfig {
        let page_bytes = usize::try_from(PAGE).unwrap();
        let start = self.start + usize::try_from(page).unwrap() * page_bytes;
        let range = HostRange::new(HostAddress(start), page_bytes).unwrap();
        let size = PageSize::Size4K;
        RegionConfig::foreign(&self.uffd, range, size, Mode::Missing, pattern()).gpa(gpa)
    }

    fn read(&self, page: u64) -> u64 {
        let at = self.start + usize::try_from(page * PAGE).unwrap();
        let at = std::ptr::with_exposed_provenance::<u64>(at);
        // SAFETY: the page lies in the mapping, which stays until the process ends.
        unsafe { at.read_volatile() }
    }
}

fn gpa(page: u64) -> GuestAddress {
    GuestAddress(GPA.0 + page * PAGE)
}

fn first_word(page: u64) -> u64 {
    u64::from_ne_bytes(content(gpa(page), 8)[..8].try_into().unwrap())
}

#[test]
fn regions_in_any_order_are_found_served_and_removed() {
    const REGIONS: u64 = 2048;
    if !has_userfaultfd() {
        return;
    }
    let memory = Memory::new(REGIONS);
    let pager = Pager::new().unwrap();
    let mut ids: Vec<(u64, RegionId)> = Vec::new();
    // Every second one upwards, the others in leaps.
    let leaps = (0..REGIONS / 2).map(|index| index * 389 % (REGIONS / 2) * 2 + 1);
    for page in (0..REGIONS).step_by(2).chain(leaps) {
        ids.push((page, pager.add(memory.config(page, gpa(page))).unwrap()));
    }
    for &(page, id) in &ids {
        assert_eq!(pager.locate(gpa(page)), Some((id, PageIndex(0))));
        assert_eq!(pager.counts(id).unwrap().absent, 1);
    }
    assert_eq!(pager.locate(gpa(REGIONS)), None);
    assert_eq!(pager.locate(GuestAddress(GPA.0 - 1)), None);
    ids.sort_unstable();
    let in_order: Vec<_> = ids.iter().map(|&(_, id)| id).collect();
    assert_eq!(pager.region_ids(), in_order);

    // Neither the gpas nor the addresses may be another region's.
    for page in [0, 1, REGIONS / 2, REGIONS - 1] {
        let taken = pager.add(memory.config(page, gpa(REGIONS)));
        assert!(matches!(taken, Err(AddError::HostOverlap { .. })), "{page}");
        let taken = pager.add(memory.config(page, gpa(page)));
        assert!(matches!(taken, Err(AddError::Overlap { .. })), "{page}");
    }
    assert_eq!(pager.region_ids(), in_order);

    let readers = Readers::spawn(&pager, ReaderConfig::new(1)).unwrap();
    let memory = Arc::new(memory);
    let touching = Arc::clone(&memory);
    within_patience("all pages but one", move || {
        let pages = (0..REGIONS).rev().filter(|&page| page != 1);
        pages.for_each(|page| assert_eq!(touching.read(page), first_word(page)));
    });
    // A thread may go on before its page is marked.
    eventually("the last", || pager.progress().present == REGIONS - 1);
    for &(page, id) in ids.iter().filter(|(page, _)| page % 3 == 0) {
        pager.remove(id).unwrap();
        assert_eq!(pager.locate(gpa(page)), None);
    }
    ids.retain(|(page, _)| page % 3 != 0);
    for &(page, id) in &ids {
        assert_eq!(pager.locate(gpa(page)), Some((id, PageIndex(0))));
    }
    // Their places may be used again.
    let again = pager.add(memory.config(3, gpa(3))).unwrap();
    assert_eq!(pager.locate(gpa(3)), Some((again, PageIndex(0))));
    // Others of the same userfaultfd are served as before.
    let left = within_patience("the page", move || memory.read(1));
    assert_eq!(left, first_word(1));
    readers.stop();
}

/// `cargo test --release -p pagetide-pager --test many_regions -- --ignored --nocapture`
#[test]
#[ignore = "a measurement"]
fn time_of_32768_regions() {
    const REGIONS: u64 = 32_768;
    let memory = Memory::new(REGIONS);
    let pager = Pager::new().unwrap();
    let begun = Instant::now();
    let ids: Vec<_> = (0..REGIONS)
        .map(|page| pager.add(memory.config(page, gpa(page))).unwrap())
        .collect();
    println!("\n{REGIONS} regions were added in {:?}", begun.elapsed());
    let begun = Instant::now();
    let ahead = pagetide_pager::Prefetch::spawn(&pager, pagetide_pager::PrefetchConfig::default());
    assert!(ahead.unwrap().finish().unwrap().is_complete);
    println!("prefetched in {:?}", begun.elapsed());
    let begun = Instant::now();
    for id in ids {
        pager.remove(id).unwrap();
    }
    println!("removed in {:?}", begun.elapsed());
}
