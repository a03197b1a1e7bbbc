//! Working sets of pages that are present, of VMs that no server has served.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::fs::File;
use std::path::Path;

use pagetide_memory::PageIndex;
use pagetide_serve::{CaptureError, Options, Present, WorkingSet, WorkingSetMode, present_pages};
use pagetide_sources::{Location, OpenOptions};
use rustix::fs::{Advice, fadvise};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use support::*;

const PAGES: usize = 64;

/// A private mapping of a part of a file, as a VMM without a server has it.
struct Mapped {
    start: *mut u8,
    bytes: usize,
}

impl Mapped {
    fn new(path: &Path, first_page: usize, pages: usize) -> Self {
        let (bytes, offset) = (pages * PAGE, (first_page * PAGE) as u64);
        let (none, prot) = (std::ptr::null_mut(), ProtFlags::READ | ProtFlags::WRITE);
        let file = File::open(path).unwrap();
        // SAFETY: mmap without MAP_FIXED replaces no other mapping.
        let start = unsafe { mmap(none, bytes, prot, MapFlags::PRIVATE, &file, offset) }.unwrap();
        Self {
            start: start.cast(),
            bytes,
        }
    }

    /// Writes to a page: the kernel maps this page only.
    fn write(&self, page: usize) {
        let at = self.start.wrapping_add(page * PAGE);
        // SAFETY: write_volatile requires a mapped byte: the page is one of the mapping's.
        unsafe { at.write_volatile(1) };
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: munmap requires that nothing uses the mapping any more: this value is its only user.
        unsafe { munmap(self.start.cast(), self.bytes) }.unwrap();
    }
}

fn own() -> Present {
    Present::InProcess(std::process::id().cast_signed())
}

fn numbers(pages: &[PageIndex]) -> Vec<u64> {
    pages.iter().map(|page| page.0).collect()
}

/// A server fetches the pages that a process has used, and the guest takes no fault on them.
#[test]
fn the_pages_of_a_process_are_replayed() {
    if !has_userfaultfd() {
        return;
    }
    let place = Place::new(PAGES);
    // Two regions of the file, as around the gap below 4 GiB.
    let (low, high) = (
        Mapped::new(&place.image(), 0, 32),
        Mapped::new(&place.image(), 40, 24),
    );
    [5, 6, 31].iter().for_each(|&page| low.write(page));
    [0, 23].iter().for_each(|&page| high.write(page));
    let pages = present_pages(&place.image(), own()).unwrap();
    assert_eq!(numbers(&pages), [5, 6, 31, 40, 63]);
    let location = Location::Path(place.image());
    let image = pagetide_sources::open(&location, &OpenOptions::default()).unwrap();
    let path = WorkingSet::default_path(&place.image());
    assert_eq!(path, place.working_set());
    let set = WorkingSet::of_present(&*image, pages);
    set.merge_into(&path, false).unwrap();
    let running = Running::start(Options {
        working_set: WorkingSetMode::Replay,
        ..place.options()
    });
    let guest = Guest::new(PAGES);
    let stream = guest.connect(&place.socket());
    eventually("the replay", || equals(guest.resident(), &5));
    for page in [63, 40, 31, 6, 5] {
        guest.check(page, &content(page));
    }
    guest.check(7, &content(7));
    drop(stream);
    assert_eq!(running.ended(1).faults, 1, "that of page 7 only");
}

#[test]
fn pages_in_the_page_cache_are_found() {
    // The page cache of a file on tmpfs is the file.
    let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    std::fs::write(file.path(), vec![1; 1024 * PAGE]).unwrap();
    assert_eq!(
        present_pages(file.path(), Present::InPageCache)
            .unwrap()
            .len(),
        1024
    );
    file.as_file().sync_all().unwrap();
    fadvise(file.as_file(), 0, None, Advice::DontNeed).unwrap();
    if !present_pages(file.path(), Present::InPageCache)
        .unwrap()
        .is_empty()
    {
        println!("SKIP: files of this directory stay in the page cache");
        return;
    }
    // Without reading ahead.
    fadvise(file.as_file(), 0, None, Advice::Random).unwrap();
    let mut page = [0; PAGE];
    for number in [7_u64, 700] {
        std::os::unix::fs::FileExt::read_exact_at(file.as_file(), &mut page, number * PAGE as u64)
            .unwrap();
    }
    let found = present_pages(file.path(), Present::InPageCache).unwrap();
    assert_eq!(numbers(&found), [7, 700]);
}

#[test]
fn sets_are_merged_and_those_of_other_images_stay() {
    let place = Place::new(PAGES);
    let location = Location::Path(place.image());
    let image = pagetide_sources::open(&location, &OpenOptions::default()).unwrap();
    let of =
        |pages: &[u64]| WorkingSet::of_present(&*image, pages.iter().map(|&page| PageIndex(page)));
    let path = place.working_set();
    // The image ends before the last one.
    of(&[3, 1, PAGES as u64]).merge_into(&path, false).unwrap();
    let merged = of(&[2, 3]).merge_into(&path, false).unwrap();
    let pages: Vec<_> = merged.touches.iter().map(|touch| touch.page).collect();
    assert_eq!((numbers(&pages), merged.recordings), (vec![1, 2, 3], 2));
    assert_eq!(WorkingSet::load(&path).unwrap(), Some(merged));
    let other = WorkingSet {
        image_bytes: 8 * PAGE as u64,
        ..of(&[4])
    };
    let refused = other.clone().merge_into(&path, false);
    assert!(
        matches!(refused, Err(CaptureError::OtherImage { .. })),
        "{refused:?}"
    );
    assert_eq!(WorkingSet::load(&path).unwrap().unwrap().touches.len(), 3);
    other.clone().merge_into(&path, true).unwrap();
    assert_eq!(WorkingSet::load(&path).unwrap(), Some(other.clone()));
    // Nor is another kind of file.
    std::fs::write(&path, "notes").unwrap();
    let refused = of(&[1]).merge_into(&path, false);
    assert!(
        matches!(refused, Err(CaptureError::WorkingSet(_))),
        "{refused:?}"
    );
    assert_eq!(std::fs::read(&path).unwrap(), b"notes");
}

#[test]
fn processes_without_the_file_are_refused() {
    let place = Place::new(1);
    let refused = present_pages(&place.image(), own());
    assert!(
        matches!(refused, Err(CaptureError::NotMapped { .. })),
        "{refused:?}"
    );
    let nobody = present_pages(&place.image(), Present::InProcess(i32::MAX));
    assert!(
        matches!(nobody, Err(CaptureError::Process { .. })),
        "{nobody:?}"
    );
    let nothing = present_pages(&place.directory.path().join("none"), own());
    assert!(
        matches!(nothing, Err(CaptureError::Open { .. })),
        "{nothing:?}"
    );
}
