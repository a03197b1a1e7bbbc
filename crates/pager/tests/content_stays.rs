//! Content that somebody else has put where the source's content is to go: the VMM itself, a vhost-user back
//! end, a predecessor that was killed. It stays, whether it is the page's content or an error.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use pagetide_memory::{GuestAddress, HostRange, MapFile, PageIndex, PageSize, PageState};
use pagetide_pager::{
    AddError, Memfd, Mode, Pager, Prefetch, PrefetchConfig, PrefetchEnd, ReaderConfig, Readers,
    RegionConfig, RegionId,
};
use pagetide_uapi::userfaultfd::Userfaultfd;
use rustix::fs::{SealFlags, fcntl_add_seals};
use support::view::{View, memfd};
use support::*;

const PAGES: u64 = 8;
const MODES: [Mode; 2] = [Mode::Minor, Mode::Missing];

/// The first word of the source's page.
fn of_source(page: u64) -> u64 {
    !(GPA.0 + page * PAGE)
}

fn shared(file: &OwnedFd) -> Memfd {
    Memfd {
        file: file.as_fd().try_clone_to_owned().unwrap(),
        offset_bytes: 0,
    }
}

fn config(
    uffd: &Arc<Userfaultfd>,
    range: HostRange,
    mode: Mode,
    gpa: GuestAddress,
) -> RegionConfig {
    RegionConfig::foreign(uffd, range, PageSize::Size4K, mode, pattern()).gpa(gpa)
}

/// A VMM's memory, of which a pager serves the faults.
struct Vmm {
    file: OwnedFd,
    vmm: View,
    uffd: Arc<Userfaultfd>,
    mode: Mode,
}

impl Vmm {
    /// `before` happens before the VMM registers its memory.
    fn new(mode: Mode, before: impl FnOnce(&View)) -> Option<Self> {
        if !has_userfaultfd() {
            return None;
        }
        let file = memfd(PAGES * PAGE);
        let vmm = View::new(&file, PAGES * PAGE);
        before(&vmm);
        let uffd = vmm.register(mode);
        Some(Self {
            file,
            vmm,
            uffd,
            mode,
        })
    }

    fn config(&self) -> RegionConfig {
        config(&self.uffd, self.vmm.range(), self.mode, GPA).memfd(shared(&self.file))
    }

    fn serve(&self, config: RegionConfig) -> (Arc<Pager>, RegionId, Readers) {
        let pager = Pager::new().unwrap();
        let id = pager.add(config).unwrap();
        let readers = Readers::spawn(&pager, ReaderConfig::new(1)).unwrap();
        (pager, id, readers)
    }
}

fn prefetch(pager: &Arc<Pager>) -> PrefetchEnd {
    let prefetch = Prefetch::spawn(pager, PrefetchConfig::default()).unwrap();
    within_patience("a prefetch", || prefetch.finish().unwrap())
}

#[test]
fn what_a_vmm_has_loaded_itself_stays_if_it_is_trusted() {
    for mode in MODES {
        let Some(it) = Vmm::new(mode, |vmm| vmm.write(3, 0x1234)) else {
            return;
        };
        let (pager, id, _readers) = it.serve(it.config().trust_existing_pages());
        assert!(prefetch(&pager).is_complete, "{mode:?}");
        assert_eq!(
            pager.page_state(id, PageIndex(3)),
            Some(PageState::Present),
            "{mode:?}"
        );
        assert_eq!(it.vmm.read(3), 0x1234, "{mode:?}");
        assert_eq!(it.vmm.read(4), of_source(4), "{mode:?}");
    }
}

#[test]
fn what_a_vmm_has_loaded_itself_is_refused_if_it_is_not_trusted() {
    for mode in MODES {
        let Some(it) = Vmm::new(mode, |vmm| vmm.write(3, 0x1234)) else {
            return;
        };
        let refused = Pager::new().unwrap().add(it.config()).unwrap_err();
        assert!(
            matches!(refused, AddError::NotEmpty { page: PageIndex(3) }),
            "{mode:?}: {refused}"
        );
        assert_eq!(it.vmm.read(3), 0x1234, "{mode:?}");
    }
}

/// As a vhost-user back end without a userfaultfd of its own, which receives a packet in a buffer that the guest
/// has not touched.
#[test]
fn what_another_process_writes_meanwhile_stays() {
    for mode in MODES {
        let Some(it) = Vmm::new(mode, |_| ()) else {
            return;
        };
        let back_end = View::new(&it.file, PAGES * PAGE);
        let (pager, _, _readers) = it.serve(it.config().trust_existing_pages());
        back_end.write(5, 0xdead_beef);
        assert_eq!(it.vmm.read(5), 0xdead_beef, "{mode:?}");
        back_end.write(6, 0xbeef);
        assert!(prefetch(&pager).is_complete, "{mode:?}");
        assert_eq!(it.vmm.read(6), 0xbeef, "{mode:?}");
    }
}

#[test]
fn what_another_process_writes_meanwhile_is_an_error_if_it_is_not_trusted() {
    let Some(it) = Vmm::new(Mode::Minor, |_| ()) else {
        return;
    };
    let back_end = View::new(&it.file, PAGES * PAGE);
    let (pager, id, _readers) = it.serve(it.config());
    back_end.write(5, 0xdead_beef);
    let prefetch = Prefetch::spawn(&pager, PrefetchConfig::default()).unwrap();
    within_patience("a prefetch", || prefetch.finish().unwrap_err());
    assert_eq!(pager.page_state(id, PageIndex(5)), Some(PageState::Absent));
    assert_eq!(back_end.read(5), 0xdead_beef);
}

/// The page maps of two regions would differ in what is there.
#[test]
fn two_regions_over_one_file_are_refused() {
    for mode in MODES {
        let Some(it) = Vmm::new(mode, |_| ()) else {
            return;
        };
        let back_end = View::new(&it.file, PAGES * PAGE);
        let second = back_end.register(mode);
        let (pager, id, _readers) = it.serve(it.config());
        let elsewhere = GuestAddress(GPA.0 + PAGES * PAGE);
        let same = config(&second, back_end.range(), mode, elsewhere).memfd(shared(&it.file));
        let refused = pager.add(same).unwrap_err();
        assert!(
            matches!(refused, AddError::SameFile { other } if other == id),
            "{mode:?}: {refused}"
        );
        pager.remove(id).unwrap();
        let same = config(&second, back_end.range(), mode, elsewhere).memfd(shared(&it.file));
        pager.add(same).unwrap();
    }
}

/// A server that is killed between the call that installs a page and the page map's store leaves a page that
/// the guest uses, and that is Installing in the kept map.
#[test]
fn what_a_killed_predecessor_had_installed_stays() {
    /// The byte of an Absent page that is claimed.
    const INSTALLING: u8 = 0b1000;
    for mode in MODES {
        for is_trusted in [false, true] {
            let Some(it) = Vmm::new(mode, |_| ()) else {
                return;
            };
            let kept = memfd(8192);
            fcntl_add_seals(&kept, SealFlags::SHRINK).unwrap();
            let kept = MapFile::open(Arc::new(kept)).unwrap();
            let config = || {
                // SAFETY: the former pager is forgotten, and reads no more messages.
                let config = unsafe { it.config().kept_in(Arc::clone(&kept), 4096) };
                match is_trusted {
                    true => config.trust_existing_pages(),
                    false => config,
                }
            };
            let (first, id, readers) = it.serve(config());
            assert_eq!(it.vmm.read(4), of_source(4));
            it.vmm.write(4, 0x7777);
            readers.stop();
            assert_eq!(first.page_state(id, PageIndex(4)), Some(PageState::Present));
            // As after SIGKILL: nothing of the process is cleaned up. It had not yet installed page 5.
            for page in [4, 5] {
                let byte = [INSTALLING];
                assert_eq!(rustix::io::pwrite(&*kept, &byte, 4096 + page).unwrap(), 1);
            }
            std::mem::forget(first);

            let case = format!("{mode:?}, trusted: {is_trusted}");
            let (second, id, _readers) = it.serve(config());
            second.recover();
            assert!(prefetch(&second).is_complete, "{case}");
            assert_eq!(it.vmm.read(4), 0x7777, "{case}");
            assert_eq!(it.vmm.read(5), of_source(5), "{case}");
            assert_eq!(second.counts(id).unwrap().present, PAGES, "{case}");
        }
    }
}

/// A huge page of the file has content in one of its small pages, and reads as zeroes in the others: nobody may
/// map it as a whole.
#[test]
fn a_file_of_huge_pages_has_no_zeroes_in_place_of_content() {
    const HUGE: u64 = 2 << 20;
    if !has_userfaultfd() {
        return;
    }
    let Some(file) = pagetide_test_support::huge_memory_file(HUGE) else {
        return;
    };
    let vmm = View::of_huge_pages(&file, HUGE);
    let uffd = vmm.register(Mode::Minor);
    let pager = Pager::new().unwrap();
    let memory = config(&uffd, vmm.range(), Mode::Minor, GPA).memfd(shared(&file));
    let id = pager.add(memory).unwrap();
    let _readers = Readers::spawn(&pager, ReaderConfig::new(1)).unwrap();
    assert_eq!(vmm.read(0), of_source(0));
    let file_bytes = || 512 * rustix::fs::fstat(&file).unwrap().st_blocks;
    assert_eq!(file_bytes(), 4096, "one page of content");
    // khugepaged does the same by itself.
    println!("MADV_COLLAPSE: {:?}", vmm.collapse());
    assert_eq!(
        pager.page_state(id, PageIndex(100)),
        Some(PageState::Absent)
    );
    assert_eq!(vmm.read(100), of_source(100));
}

/// Settings for another kind of memory would change nothing.
#[test]
fn settings_of_another_kind_of_memory_are_refused() {
    let Some(region) = region(4, pagetide_memory::Backing::Shmem) else {
        return;
    };
    let Some(it) = Vmm::new(Mode::Minor, |_| ()) else {
        return;
    };
    let local = || RegionConfig::local(Arc::clone(&region), Mode::Minor, pattern());
    let kept = memfd(8192);
    fcntl_add_seals(&kept, SealFlags::SHRINK).unwrap();
    let kept = MapFile::open(Arc::new(kept)).unwrap();
    for (config, named) in [
        (local().gpa(GPA), "a gpa"),
        (local().memfd(shared(&it.file)), "a memfd"),
        (local().filled_by_source(), "fills the file"),
        // SAFETY: refused, and never used.
        (unsafe { local().kept_in(kept, 4096) }, "successor"),
        (it.config().userfaultfds(Default::default()), "layout"),
    ] {
        let refused = Pager::new().unwrap().add(config).unwrap_err();
        assert!(matches!(refused, AddError::Misplaced { .. }), "{refused}");
        assert!(refused.to_string().contains(named), "{refused}");
    }
}
