//! One memory in several address spaces: a VMM and its vhost-user back ends, each with a userfaultfd of its own.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::thread;

use pagetide_memory::{PageIndex, PageRange, PageSize, PageState};
use pagetide_pager::{
    AddressSpaceId, AttachError, Content, Contents, Memfd, Mode, Pager, Prefetch, PrefetchConfig,
    ReaderConfig, Readers, RegionConfig, RegionId,
};
use pagetide_uapi::userfaultfd::{Features, Userfaultfd};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::mm::Advice;
use support::view::{View, memfd};
use support::*;

const PAGES: u64 = 16;
const MODES: [Mode; 2] = [Mode::Minor, Mode::Missing];

/// The first word of a page's content.
fn word_of(page: u64) -> u64 {
    !(GPA.0 + page * PAGE)
}

/// A VM's memory, mapped by its VMM and by a back end.
struct Shared {
    pager: Arc<Pager>,
    id: RegionId,
    vmm: View,
    back_end: View,
    uffd: Arc<Userfaultfd>,
    space: AddressSpaceId,
    mode: Mode,
    file: OwnedFd,
    readers: Readers,
}

impl Shared {
    fn new(mode: Mode, contents: Contents) -> Option<Self> {
        Self::with(mode, contents, Features::NONE)
    }

    /// With `events` of the back end.
    fn with(mode: Mode, contents: Contents, events: Features) -> Option<Self> {
        if !has_userfaultfd() {
            return None;
        }
        let file = memfd(PAGES * PAGE);
        let (vmm, back_end) = (
            View::new(&file, PAGES * PAGE),
            View::new(&file, PAGES * PAGE),
        );
        let pager = Pager::new().unwrap();
        let id = pager
            .add(config(&vmm, &vmm.register(mode), mode, contents, &file))
            .unwrap();
        let uffd = back_end.register_with(mode, events);
        let space = pager.attach(&uffd, &[(id, back_end.range())]).unwrap();
        let readers = Readers::spawn(&pager, ReaderConfig::new(1)).unwrap();
        Some(Self {
            pager,
            id,
            vmm,
            back_end,
            uffd,
            space,
            mode,
            file,
            readers,
        })
    }

    fn state(&self, page: u64) -> PageState {
        self.pager.page_state(self.id, PageIndex(page)).unwrap()
    }
}

fn config(
    view: &View,
    uffd: &Arc<Userfaultfd>,
    mode: Mode,
    contents: Contents,
    file: &OwnedFd,
) -> RegionConfig {
    let memfd = Memfd {
        file: file.as_fd().try_clone_to_owned().unwrap(),
        offset_bytes: 0,
    };
    let size = PageSize::Size4K;
    let config = RegionConfig::foreign(uffd, view.range(), size, mode, contents);
    config.gpa(GPA).memfd(memfd)
}

#[test]
fn each_sees_the_content_and_what_the_other_writes() {
    for mode in MODES {
        let Some(it) = Shared::new(mode, pattern()) else {
            return;
        };
        // A packet in a buffer that the guest has not touched: the rest of the page has its content.
        it.back_end.write(5, 0xdead_beef);
        assert_eq!(it.vmm.read(5), 0xdead_beef, "{mode:?}");
        assert_eq!(it.vmm.read_second(5), word_of(5) - 8, "{mode:?}");
        // A buffer that the guest has filled.
        it.vmm.write(2, 0x5555);
        assert_eq!(it.back_end.read(2), 0x5555, "{mode:?}");
        assert_eq!(it.back_end.read_second(2), word_of(2) - 8, "{mode:?}");
        // One that nobody has touched.
        assert_eq!(it.back_end.read(7), word_of(7), "{mode:?}");
        assert_eq!(it.state(7), PageState::Present);
        let prefetch = Prefetch::spawn(&it.pager, PrefetchConfig::default()).unwrap();
        let end = within_patience("a prefetch", || prefetch.finish().unwrap());
        assert!(end.is_complete, "{mode:?}");
        for page in 0..PAGES {
            let expected = match page {
                2 => 0x5555,
                5 => 0xdead_beef,
                page => word_of(page),
            };
            assert_eq!(it.back_end.read(page), expected, "{mode:?} {page}");
            assert_eq!(it.vmm.read(page), expected, "{mode:?} {page}");
        }
        assert_no_trouble(&it.pager);
    }
}

/// Whichever has come first: the page is requested once, and installed once.
#[test]
fn threads_of_both_wait_for_one_request() {
    for mode in MODES {
        for back_end_first in [false, true] {
            let source = ManualSource::new();
            let Some(it) = Shared::new(mode, source.contents()) else {
                return;
            };
            let it = Arc::new(it);
            let read = |is_back_end: bool| {
                let its = Arc::clone(&it);
                spawn_asleep("a read", move || match is_back_end {
                    true => its.back_end.read_here(3),
                    false => its.vmm.read_here(3),
                })
            };
            let first = read(back_end_first);
            let request = source.next();
            let second = read(!back_end_first);
            // The second fault has been read when a later one of the same userfaultfd has been.
            let marker = Arc::clone(&it);
            let later = spawn_asleep("a later read", move || match back_end_first {
                true => marker.vmm.read_here(9),
                false => marker.back_end.read_here(9),
            });
            let other = source.next();
            assert!(first.is_undisturbed() && second.is_undisturbed());
            sources::complete(request);
            assert_eq!(first.join(), word_of(3), "{mode:?}");
            assert_eq!(second.join(), word_of(3), "{mode:?}");
            sources::complete(other);
            assert_eq!(later.join(), word_of(9), "{mode:?}");
            assert_eq!(source.waiting(), 0);
        }
    }
}

#[test]
fn a_pushed_page_wakes_both() {
    let source = ManualSource::new();
    let Some(it) = Shared::new(Mode::Minor, source.contents()) else {
        return;
    };
    let it = Arc::new(it);
    let views: [fn(&Shared) -> &View; 2] = [|it| &it.vmm, |it| &it.back_end];
    let readers = views.map(|view| {
        let its = Arc::clone(&it);
        spawn_asleep("a read", move || view(&its).read_here(4))
    });
    let _request = source.next();
    let bytes = content(pagetide_memory::GuestAddress(GPA.0 + 4 * PAGE), PAGE);
    let page = PageRange::single(PageIndex(4));
    let pushed = it.pager.push(it.id, page, Content::Bytes(&bytes)).unwrap();
    assert_eq!(pushed, 1);
    for reader in readers {
        assert_eq!(reader.join(), word_of(4));
    }
}

#[test]
fn a_page_that_the_vmm_discards_is_zero_for_both() {
    for mode in MODES {
        let Some(it) = Shared::new(mode, pattern()) else {
            return;
        };
        it.back_end.write(1, 1);
        let pages = PageRange::new(PageIndex(1), 2);
        assert_eq!(it.pager.discard(it.id, pages).unwrap(), 2);
        assert_eq!(it.back_end.read(1), 0, "{mode:?}");
        assert_eq!(it.vmm.read(1), 0);
        assert_eq!(it.vmm.read(2), 0);
        it.vmm.write(2, 7);
        assert_eq!(it.back_end.read(2), 7, "{mode:?}");
    }
}

/// A back end gives up its own mapping only: the VM's content stays.
#[test]
fn what_a_back_end_drops_is_not_discarded() {
    for mode in MODES {
        let Some(it) = Shared::with(mode, pattern(), Features::EVENT_REMOVE) else {
            return;
        };
        it.vmm.write(3, 0x77);
        assert_eq!(it.back_end.read(3), 0x77);
        it.back_end.drop_pages(3, 2, Advice::LinuxDontNeed);
        assert_eq!(it.state(3), PageState::Present);
        assert_eq!(it.state(4), PageState::Absent);
        assert_eq!(it.back_end.read(3), 0x77, "{mode:?}");
        assert_eq!(it.back_end.read(4), word_of(4), "{mode:?}");
    }
}

#[test]
fn a_page_that_is_lost_is_lost_for_both() {
    if !can_poison() {
        return;
    }
    for mode in MODES {
        let Some(it) = Shared::new(mode, pattern()) else {
            return;
        };
        assert_eq!(it.back_end.read(1), word_of(1));
        it.pager.record_poison(gpas(2, 1));
        for view in [&it.vmm, &it.back_end] {
            assert!(view.is_lost(2), "{mode:?}");
            assert!(!view.is_lost(3), "{mode:?}");
        }
        // An address space that comes later, too.
        let third = View::new(&it.file, PAGES * PAGE);
        let uffd = third.register(it.mode);
        it.pager.attach(&uffd, &[(it.id, third.range())]).unwrap();
        assert!(third.is_lost(2), "{mode:?}");
        assert_eq!(third.read(1), word_of(1), "{mode:?}");
    }
}

#[test]
fn a_detached_address_space_reads_no_zeroes() {
    if !can_poison() {
        return;
    }
    for mode in MODES {
        let Some(it) = Shared::new(mode, pattern()) else {
            return;
        };
        assert_eq!(it.back_end.read(1), word_of(1));
        it.pager.detach(it.space).unwrap();
        assert!(it.back_end.is_lost(2), "{mode:?}: was missing");
        assert_eq!(it.back_end.read(1), word_of(1), "{mode:?}: was there");
        let again = it.pager.detach(it.space).unwrap_err();
        assert!(matches!(again, AttachError::NoSuchSpace), "{again}");
        // The VMM goes on.
        assert_eq!(it.vmm.read(2), word_of(2), "{mode:?}");
        assert_no_trouble(&it.pager);
    }
}

/// Until the event of its madvise was read, the kernel marks no page there. (The page that is dropped has content:
/// madvise would take the mark of a missing one away, if it came to the page after the mark.)
#[test]
fn an_address_space_that_is_inside_madvise_is_detached() {
    if !can_poison() {
        return;
    }
    let Some(it) = Shared::with(Mode::Minor, pattern(), Features::EVENT_REMOVE) else {
        return;
    };
    assert_eq!(it.back_end.read(1), word_of(1));
    it.readers.stop();
    thread::scope(|scope| {
        let dropping = scope.spawn(|| it.back_end.drop_pages(1, 1, Advice::LinuxDontNeed));
        eventually("its event", || {
            let mut ready = [PollFd::new(&it.uffd, PollFlags::IN)];
            poll(&mut ready, Some(&Timespec::default())).unwrap() > 0
        });
        it.pager.detach(it.space).unwrap();
        dropping.join().unwrap();
    });
    for page in (0..PAGES).filter(|&page| page != 1) {
        assert!(it.back_end.is_lost(page), "{page}");
    }
    assert_eq!(it.back_end.read(1), word_of(1));
}

/// The kernel poisons within one mapping at a time.
#[test]
fn an_address_space_of_several_mappings_reads_no_zeroes() {
    if !can_poison() {
        return;
    }
    for ends in [false, true] {
        let Some(it) = Shared::new(Mode::Minor, pattern()) else {
            return;
        };
        assert_eq!(it.back_end.read(1), word_of(1));
        // Splits the mapping, and changes nothing else.
        it.back_end.drop_pages(4, 3, Advice::LinuxDontDump);
        assert_eq!(it.pager.spaces(), [it.space].into());
        match ends {
            true => it.pager.remove(it.id).unwrap(),
            false => it.pager.detach(it.space).unwrap(),
        }
        assert_eq!(it.pager.spaces(), [].into());
        for page in (0..PAGES).filter(|&page| page != 1) {
            assert!(it.back_end.is_lost(page), "{page}, ends: {ends}");
        }
        assert_eq!(it.back_end.read(1), word_of(1));
    }
}

/// The kernel refuses to map the VM's pages there, each time: nothing is tried again.
#[test]
fn memory_that_is_not_the_vms_ends_in_a_notice() {
    let Some(it) = Shared::new(Mode::Minor, pattern()) else {
        return;
    };
    let other = View::private(PAGES * PAGE);
    let uffd = other.register(Mode::Missing);
    it.pager.attach(&uffd, &[(it.id, other.range())]).unwrap();
    assert_eq!(it.vmm.read(1), word_of(1));
    let sleeps = spawn_asleep("a read", move || other.read_here(1));
    eventually("a notice", || it.pager.trouble().is_some());
    // The only reader goes on, and has left the thread asleep.
    assert_eq!(it.vmm.read(2), word_of(2));
    assert!(sleeps.is_undisturbed());
}

#[test]
fn when_paging_ends_missing_pages_are_lost_for_both() {
    if !can_poison() {
        return;
    }
    let Some(it) = Shared::new(Mode::Minor, pattern()) else {
        return;
    };
    assert_eq!(it.back_end.read(1), word_of(1));
    it.pager.remove(it.id).unwrap();
    for view in [&it.vmm, &it.back_end] {
        assert!(view.is_lost(2));
        assert_eq!(view.read(1), word_of(1));
    }
}

#[test]
fn a_successor_gets_all_address_spaces() {
    for mode in MODES {
        let Some(it) = Shared::new(mode, pattern()) else {
            return;
        };
        it.back_end.write(1, 0x11);
        let exported = it.pager.export(it.id).unwrap();
        let [space] = &exported.spaces[..] else {
            panic!("one address space was attached")
        };
        let start = it.back_end.range().start().as_u64();
        assert_eq!(space.parts.len(), 1);
        assert_eq!(space.parts[0].start, start);
        let successor = Pager::new().unwrap();
        let config = config(&it.vmm, &exported.uffd, mode, pattern(), &it.file);
        let id = successor.add(config.resume_from(exported.image)).unwrap();
        let attached = successor.attach(&space.uffd, &[(id, it.back_end.range())]);
        attached.unwrap();
        let _readers = Readers::spawn(&successor, ReaderConfig::new(1)).unwrap();
        assert_eq!(it.vmm.read(1), 0x11, "{mode:?}");
        assert_eq!(it.back_end.read(2), word_of(2), "{mode:?}");
        assert_eq!(it.vmm.read(3), word_of(3), "{mode:?}");
        assert_no_trouble(&successor);
    }
}

#[test]
fn what_cannot_be_attached_is_refused() {
    let Some(it) = Shared::new(Mode::Minor, pattern()) else {
        return;
    };
    let other = View::new(&it.file, PAGES * PAGE);
    let uffd = other.register(Mode::Minor);
    let attach =
        |id, uffd: &Arc<Userfaultfd>, range| it.pager.attach(uffd, &[(id, range)]).unwrap_err();
    // Attached already.
    let error = attach(it.id, &it.uffd, it.back_end.range());
    assert!(matches!(error, AttachError::Twice { .. }), "{error}");
    // A part of it.
    let short = View::new(&it.file, 4 * PAGE);
    let error = attach(it.id, &uffd, short.range());
    assert!(matches!(error, AttachError::OtherSize { .. }), "{error}");
    // Memory that cannot be shared.
    let private = View::private(PAGES * PAGE);
    let its = private.register(Mode::Missing);
    let size = PageSize::Size4K;
    let config = RegionConfig::foreign(&its, private.range(), size, Mode::Missing, pattern());
    let at = pagetide_memory::GuestAddress(GPA.0 + PAGES * PAGE);
    let id = it.pager.add(config.gpa(at)).unwrap();
    let error = attach(id, &uffd, other.range());
    assert!(matches!(error, AttachError::NotShared { .. }), "{error}");
    // All or nothing: what was right is not attached, and not poisoned either.
    let twice = [(it.id, other.range()), (it.id, other.range())];
    let error = it.pager.attach(&uffd, &twice).unwrap_err();
    assert!(matches!(error, AttachError::Twice { .. }), "{error}");
    let error = it.pager.attach(&uffd, &[]).unwrap_err();
    assert!(matches!(error, AttachError::NoRegions), "{error}");
    // A userfaultfd of a region, and the other way round.
    let error = attach(it.id, &its, other.range());
    assert!(matches!(error, AttachError::InUse), "{error}");
    let config = RegionConfig::foreign(&it.uffd, private.range(), size, Mode::Missing, pattern());
    let at = pagetide_memory::GuestAddress(GPA.0 + 2 * PAGES * PAGE);
    let error = it.pager.add(config.gpa(at)).unwrap_err();
    assert!(error.to_string().contains("attached"), "{error}");
    it.pager.remove(id).unwrap();
    let error = attach(id, &uffd, other.range());
    assert!(matches!(error, AttachError::NoSuchRegion { .. }), "{error}");
    // None of this has changed anything.
    assert_eq!(it.back_end.read(1), word_of(1));
    assert_eq!(it.vmm.read(2), word_of(2));
    it.pager.attach(&uffd, &[(it.id, other.range())]).unwrap();
    assert_eq!(other.read(3), word_of(3));
}
