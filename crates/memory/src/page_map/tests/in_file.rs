//! Maps in a file, which a process that dies leaves to its successor.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::pwrite;

use super::super::cell::{INSTALLING, WAITERS, WAKE_WANTED};
use super::super::*;
use crate::MapFile;

fn file(bytes: u64) -> Arc<OwnedFd> {
    let file = memfd_create("map", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&file, bytes).unwrap();
    Arc::new(file)
}

fn sealed(bytes: u64) -> Arc<OwnedFd> {
    let file = file(bytes);
    fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
    file
}

/// A map as a process that begins finds it.
fn in_file(file: &Arc<OwnedFd>, offset: u64, pages: u64) -> Result<PageMap, PageMapError> {
    PageMap::in_file(&MapFile::open(Arc::clone(file))?, offset, pages)
}

#[test]
fn settled_pages_outlive_the_map_and_pending_ones_are_absent() {
    let file = sealed(8192);
    let map = in_file(&file, 4096, 8).unwrap();
    assert_eq!(map.counts().absent, 8);
    let run = |first, count| PageRange::new(PageIndex(first), count);
    let Claim::Won(claim) = map.claim_run(PageIndex(0), run(0, 2)) else {
        panic!("nobody else is here");
    };
    let _ = claim.finish(Settled::Present);
    let _ = map.remove(PageIndex(2));
    let _ = map.poison(PageIndex(3));
    let _ = map.pend_run(PageIndex(4), run(4, 1));
    let _ = map.want_wake(PageIndex(4));
    let Claim::Won(installing) = map.claim_run(PageIndex(5), run(5, 1)) else {
        panic!("nobody else is here");
    };
    // The process dies while it installs.
    std::mem::forget(installing);
    drop(map);
    let map = in_file(&file, 4096, 8).unwrap();
    let states: Vec<_> = (0..8)
        .map(|page| map.state(PageIndex(page)).unwrap())
        .collect();
    use PageState::*;
    assert_eq!(
        states,
        [
            Present, Present, Removed, Poisoned, Absent, Absent, Absent, Absent
        ]
    );
    assert!(!map.is_wake_wanted(PageIndex(4)));
}

/// Kind: memory for what a client has only claimed.
#[test]
fn a_map_of_which_nothing_is_known_takes_no_memory() {
    let file = sealed(4096 + (1 << 20));
    let blocks = || rustix::fs::fstat(&file).unwrap().st_blocks;
    let map = in_file(&file, 4096, 1 << 20).unwrap();
    assert_eq!(blocks(), 0);
    // One page in the middle, and the last one.
    let pages = [500_000, (1 << 20) - 1].map(PageIndex);
    for page in pages {
        let _ = map.remove(page);
    }
    drop(map);
    assert_eq!(blocks(), 2 * 8);
    let map = in_file(&file, 4096, 1 << 20).unwrap();
    assert_eq!(
        pages.map(|page| map.state(page)),
        [Some(PageState::Removed); 2]
    );
    assert_eq!(blocks(), 2 * 8);
    // A map that ends before the data, one that begins behind it, and one with a part of it.
    in_file(&file, 0, 4096).unwrap();
    in_file(&file, 4096 + 600_000, 4096).unwrap();
    let part = in_file(&file, 4096 + 499_999, 4096).unwrap();
    assert_eq!(part.state(PageIndex(1)), Some(PageState::Removed));
    assert_eq!(blocks(), 2 * 8);
}

/// What a predecessor has put there already is the page's content, and the guest may have written to it since.
#[test]
fn a_page_that_somebody_died_installing_is_marked_until_it_is_settled() {
    let file = sealed(4096);
    let map = || in_file(&file, 0, 3).unwrap();
    let (begun, other) = (PageIndex(1), PageIndex(2));
    let first = map();
    for page in [begun, other] {
        let _ = first.pend_run(page, PageRange::single(page));
    }
    std::mem::forget(first.claim_arrived(PageRange::single(begun)).unwrap());
    drop(first);

    // Nobody comes to install it in the second process either.
    let second = map();
    assert_eq!(second.state(begun), Some(PageState::Absent));
    let marks = |map: &PageMap| [0, 1, 2].map(|page| map.was_begun(PageIndex(page)));
    assert_eq!(marks(&second), [false, true, false]);
    let all = PageRange::new(PageIndex(0), 3);
    let each: [&dyn Fn(&PageMap); 4] = [
        &|map| drop(map.claim_run(begun, all)),
        &|map| assert!(matches!(map.pend_run(begun, all), Pend::Made(_))),
        &|map| drop(map.claim_arrived(all)),
        &|map| map.unpend(all),
    ];
    for (step, change) in each.iter().enumerate() {
        change(&second);
        assert_eq!(marks(&second), [false, true, false], "step {step}");
    }
    drop(second);

    let third = map();
    assert_eq!(marks(&third), [false, true, false]);
    let _ = third.claim_arrived(all).unwrap().finish(Settled::Present);
    assert_eq!(marks(&third), [false; 3]);
    drop(third);
    let fourth = map();
    assert_eq!(marks(&fourth), [false; 3]);
    assert_eq!(fourth.counts().present, 3);
}

/// Former versions told pages that were requested urgently from others.
#[test]
fn what_former_versions_have_requested_is_absent() {
    let file = sealed(4096);
    pwrite(&file, &[5, 6, 0x16, 0x0e, 0x46], 0).unwrap();
    let map = in_file(&file, 0, 5).unwrap();
    assert_eq!(map.counts().absent, 5);
    let begun = [0, 1, 2, 3, 4].map(|page| map.was_begun(PageIndex(page)));
    assert_eq!(begun, [false, false, false, true, true]);
}

#[test]
fn flags_of_settled_pages_are_dropped() {
    let file = sealed(4096);
    pwrite(&file, &[1 | WAITERS, 2 | WAKE_WANTED, 1 | INSTALLING], 0).unwrap();
    let map = in_file(&file, 0, 3).unwrap();
    let states: Vec<_> = (0..3)
        .map(|page| map.state(PageIndex(page)).unwrap())
        .collect();
    assert_eq!(
        states,
        [PageState::Present, PageState::Zero, PageState::Absent]
    );
}

#[test]
fn files_that_hold_no_map_are_refused() {
    use PageMapError as E;
    let map = |file: &Arc<OwnedFd>, offset, pages| in_file(file, offset, pages).unwrap_err();
    assert!(matches!(map(&file(4096), 0, 1), E::NotSealed));
    assert!(matches!(map(&sealed(0), 0, 1), E::Map { .. }));
    let file = sealed(8192);
    assert!(matches!(map(&file, 4096, 4097), E::OutsideFile { .. }));
    assert!(matches!(map(&file, u64::MAX, 2), E::OutsideFile { .. }));
    assert!(matches!(map(&file, 0, 0), E::OutsideFile { .. }));
    pwrite(&file, &[7], 3).unwrap();
    assert!(matches!(
        map(&file, 0, 8),
        E::BadState {
            page: PageIndex(3),
            byte: 7
        }
    ));
    pwrite(&file, &[0x41], 3).unwrap();
    assert!(matches!(map(&file, 0, 8), E::BadState { byte: 0x41, .. }));
}

/// The kernel allows a process some 65 000 mappings.
#[test]
fn the_maps_of_a_file_are_one_mapping() {
    const MAPS: u64 = 70_000;
    let file = MapFile::open(sealed(MAPS)).unwrap();
    let maps: Vec<_> = (0..MAPS)
        .map(|at| PageMap::in_file(&file, at, 1).unwrap())
        .collect();
    let _ = maps[3].poison(PageIndex(0));
    let poisoned = maps.iter().filter(|map| map.counts().poisoned == 1);
    assert_eq!(poisoned.count(), 1);
    // Its bytes stay as long as a map uses them.
    drop(file);
    assert_eq!(maps[3].state(PageIndex(0)), Some(PageState::Poisoned));
}
