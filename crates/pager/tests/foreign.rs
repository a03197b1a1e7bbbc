//! The memory of another process: served over its userfaultfd, and handed from pager to pager.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

#[path = "support/child.rs"]
mod child_process;
mod support;

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use child_process::{Mapped, Other, above, be_child, pager_and_child, two_readers};
use pagetide_memory::{
    GuestAddress, HostAddress, HostRange, ImportError, MemoryFileError, PageIndex, PageMap,
    PageRange, PageSize, PageState,
};
use pagetide_pager::{
    AddError, AttachError, Content, DiscardError, ExportError, Exported, InstallFailure, Memfd,
    Mode, Notice, Pager, PushError, RegionConfig, RegionId, Serving, kept_open,
};
use pagetide_test_support::in_a_process_of_its_own;
use pagetide_uapi::userfaultfd::{
    AdoptError, Features, InstallError, UserRange, Userfaultfd, Wake,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use support::view::View;
use support::*;

const AT: GuestAddress = GuestAddress(1 << 40);

/// Not a test: the program of the other process.
#[test]
fn child() {
    be_child();
}

fn file_of(mapped: &Mapped, offset_bytes: u64) -> Option<Memfd> {
    let file = mapped.file.as_ref()?.try_clone().unwrap();
    Some(Memfd { file, offset_bytes })
}

fn config(uffd: &Arc<Userfaultfd>, mapped: &Mapped, gpa: GuestAddress) -> RegionConfig {
    let mode = mapped.file.as_ref().map_or(Mode::Missing, |_| Mode::Minor);
    let size = PageSize::Size4K;
    let config = RegionConfig::foreign(uffd, mapped.range(), size, mode, pattern()).gpa(gpa);
    match file_of(mapped, 0) {
        Some(file) => config.memfd(file),
        None => config,
    }
}

fn states(pager: &Pager, id: RegionId, pages: u64) -> Vec<PageState> {
    (0..pages)
        .map(|page| pager.page_state(id, PageIndex(page)).unwrap())
        .collect()
}

fn notices(pager: &Pager) -> mpsc::Receiver<Notice> {
    let (sender, receiver) = mpsc::channel();
    pager.on_notice(move |notice| {
        let _ = sender.send(notice.clone());
    });
    receiver
}

#[test]
fn memory_of_another_process_is_served_by_readers() {
    let Some((pager, _readers, other, uffd)) = pager_and_child(&[]) else {
        return;
    };
    // Four regions over one userfaultfd.
    let mut all = Vec::new();
    for (index, mode) in [Mode::Missing, Mode::Minor, Mode::Missing, Mode::Minor]
        .into_iter()
        .enumerate()
    {
        let mapped = other.map(32, mode);
        let gpa = above(AT, 100 * index as u64);
        let id = pager
            .add(config(&uffd, &mapped, gpa).fault_around(4))
            .unwrap();
        all.push((mapped, gpa, id));
    }
    for (mapped, gpa, _) in &all {
        other.check_later(mapped.start, mapped.pages, *gpa);
    }
    for (_, gpa, id) in &all {
        assert_eq!(other.tell("join"), "right", "{gpa}");
        // A thread is woken before its page becomes Present.
        eventually("all present", || pager.counts(*id).unwrap().present == 32);
    }
    assert_no_trouble(&pager);
}

#[test]
fn memory_of_another_process_is_served_from_an_event_loop() {
    if !Other::can_start() {
        return;
    }
    let pager = Pager::new().unwrap();
    let (other, uffd) = Other::start(&[]);
    let mapped = other.map(32, Mode::Missing);
    pager.add(config(&uffd, &mapped, AT)).unwrap();
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut serving = Serving::new(&pager, 4);
            while !is_over.load(Ordering::Acquire) {
                let timeout = Timespec {
                    tv_sec: 0,
                    tv_nsec: 10_000_000,
                };
                let mut ready = [PollFd::new(&serving, PollFlags::IN)];
                if poll(&mut ready, Some(&timeout)).unwrap() > 0 {
                    serving.process_ready().unwrap();
                }
            }
        });
        let checked = std::panic::catch_unwind(|| other.check(mapped.start, 32, AT));
        is_over.store(true, Ordering::Release);
        assert_eq!(checked.unwrap(), "right");
    });
}

#[test]
fn killing_a_process_ends_only_its_own_regions() {
    if !Other::can_start() {
        return;
    }
    let pager = Pager::new().unwrap();
    let notices = notices(&pager);
    let _readers = two_readers(&pager);
    let (killed, its) = Other::start(&[]);
    let (other, uffd) = Other::start(&[]);
    let gone = killed.map(16, Mode::Missing);
    let gone_id = pager.add(config(&its, &gone, AT)).unwrap();
    let mapped = other.map(16, Mode::Missing);
    pager.add(config(&uffd, &mapped, above(AT, 100))).unwrap();
    assert_eq!(killed.check(gone.start, 4, AT), "right");
    assert_eq!(other.check(mapped.start, 4, above(AT, 100)), "right");
    killed.kill();
    let page = PageRange::single(PageIndex(9));
    let content = content(above(AT, 9), PAGE);
    // The kernel reports it at the next installation.
    assert_eq!(
        pager.push(gone_id, page, Content::Bytes(&content)).unwrap(),
        0
    );
    match notices.recv_timeout(PATIENCE).unwrap() {
        Notice::ProcessGone { region } => assert_eq!(region, gone_id),
        other => panic!("{other}"),
    }
    let error = pager
        .push(gone_id, page, Content::Bytes(&content))
        .unwrap_err();
    assert!(matches!(error, PushError::NoSuchRegion { .. }), "{error}");
    assert_eq!(other.check(mapped.start, 16, above(AT, 100)), "right");
    pager.remove(gone_id).unwrap();
    assert_no_trouble(&pager);
}

/// Nobody can read its missing pages.
#[test]
fn the_end_of_a_region_whose_process_has_gone_costs_nothing_for_what_is_missing() {
    if !Other::can_start() {
        return;
    }
    // 64 GiB, for which the page map has 16 MiB.
    const PAGES: u64 = 16 << 20;
    let pager = Pager::new().unwrap();
    let (killed, its) = Other::start(&[]);
    let gone = killed.map(PAGES, Mode::Minor);
    let id = pager.add(config(&its, &gone, AT)).unwrap();
    killed.kill();
    // The peak is the resident memory of this moment.
    if let Err(error) = std::fs::write("/proc/self/clear_refs", "5") {
        println!("SKIP: /proc/self/clear_refs: {error}");
        return;
    }
    let before = peak_bytes();
    pager.remove(id).unwrap();
    // The kernel counts in parts, so that the peak may seem to fall.
    let grown = peak_bytes().saturating_sub(before);
    assert!(grown < 8 << 20, "{grown} bytes");
}

/// The most memory that this process has had resident.
fn peak_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.unwrap().trim().strip_suffix(" kB").unwrap();
    kib.parse::<u64>().unwrap() << 10
}

/// A mapping of a child's memory in this process: of a VMM and its back end, in either role.
fn view_of(mapped: &Mapped) -> View {
    let file = mapped.file.as_ref().unwrap();
    View::new(file, mapped.pages * PAGE)
}

/// A page that could not be installed any more is missing, and not discarded.
#[test]
fn a_back_end_that_outlives_its_vmm_reads_no_zeroes() {
    if !can_poison() {
        return;
    }
    let Some((pager, _readers, vmm, uffd)) = pager_and_child(&[]) else {
        return;
    };
    let mapped = vmm.map(16, Mode::Minor);
    let id = pager.add(config(&uffd, &mapped, AT)).unwrap();
    let back_end = view_of(&mapped);
    let its = back_end.register(Mode::Minor);
    pager.attach(&its, &[(id, back_end.range())]).unwrap();
    assert_eq!(vmm.check(mapped.start, 4, AT), "right");
    let content_of_9 = content(above(AT, 9), PAGE);
    vmm.kill();
    let page = PageRange::single(PageIndex(9));
    let pushed = pager.push(id, page, Content::Bytes(&content_of_9));
    assert_eq!(pushed.unwrap(), 0);
    pager.remove(id).unwrap();
    assert_eq!(back_end.read(3), !above(AT, 3).0);
    for page in 4..16 {
        assert_eq!(back_end.populate(page), Err(Errno::HWPOISON), "{page}");
    }
}

/// Its userfaultfd reports nothing when it has gone.
#[test]
fn a_back_end_that_has_gone_is_forgotten() {
    let Some((pager, _readers, back_end, its)) = pager_and_child(&[]) else {
        return;
    };
    let mapped = back_end.map(16, Mode::Minor);
    let vmm = view_of(&mapped);
    let (size, mode) = (PageSize::Size4K, Mode::Minor);
    let config = RegionConfig::foreign(&vmm.register(mode), vmm.range(), size, mode, pattern());
    let config = config.gpa(AT).memfd(file_of(&mapped, 0).unwrap());
    let id = pager.add(config).unwrap();
    let space = pager.attach(&its, &[(id, mapped.range())]).unwrap();
    assert_eq!(back_end.check(mapped.start, 4, AT), "right");
    assert_eq!(pager.spaces(), [space].into());
    back_end.kill();
    assert_eq!(pager.spaces(), [].into());
    let error = pager.detach(space).unwrap_err();
    assert!(matches!(error, AttachError::NoSuchSpace), "{error}");
    // The VMM goes on.
    assert_eq!(vmm.read(9), !above(AT, 9).0);
    assert_no_trouble(&pager);
}

#[test]
fn unmapping_without_events_affects_no_other_region() {
    let Some((pager, _readers, other, uffd)) = pager_and_child(&[]) else {
        return;
    };
    let mapped = other.map(16, Mode::Missing);
    let id = pager.add(config(&uffd, &mapped, AT)).unwrap();
    other.tell(format!("munmap {} 4", mapped.start + 4 * PAGE));
    let page = PageRange::single(PageIndex(5));
    let bytes = content(above(AT, 5), PAGE);
    assert_eq!(pager.push(id, page, Content::Bytes(&bytes)).unwrap(), 0);
    assert_eq!(pager.page_state(id, PageIndex(5)), Some(PageState::Removed));
    assert_eq!(other.check(mapped.start, 4, AT), "right");
    assert_eq!(
        other.check(mapped.start + 8 * PAGE, 8, above(AT, 8)),
        "right"
    );
    assert_no_trouble(&pager);
}

/// Kind: work for what a process has only claimed. A page that is not mapped costs two system calls, and a gigabyte of them a
/// quarter of a second.
#[test]
fn the_end_of_memory_that_was_never_mapped_is_paced_and_may_be_cut_short() {
    if !Other::can_start() || !can_poison() {
        return;
    }
    let this = "the_end_of_memory_that_was_never_mapped_is_paced_and_may_be_cut_short";
    in_a_process_of_its_own(this, || {
        const STEP: u64 = 1 << 16;
        let pager = Pager::new().unwrap();
        // A region of which the last 16 pages are mapped ends. Returns the holes of each step, and whether the first of these
        // pages is marked after the last one.
        let ends = |before: u64, most_steps: usize| {
            let (other, uffd) = Other::start(&[]);
            let mapped = other.map(16, Mode::Missing);
            let claimed = Mapped {
                start: mapped.start - before * PAGE,
                pages: before + 16,
                file: None,
            };
            let id = pager.add(config(&uffd, &claimed, AT)).unwrap();
            let page = UserRange {
                start: mapped.start,
                bytes: PAGE,
            };
            let (mut steps, mut is_marked) = (Vec::new(), false);
            let mut go_on = |holes| {
                steps.push(holes);
                if steps.len() == most_steps || holes < STEP {
                    let marked = uffd.poison_pages(page, Wake::DontWake);
                    is_marked = marked == Err(InstallError::Exists { installed_bytes: 0 });
                }
                steps.len() < most_steps
            };
            pager.remove_paced(id, &mut go_on).unwrap();
            (other, steps, is_marked)
        };
        // All of it, in steps.
        let (_other, steps, is_marked) = ends(STEP + 1000, usize::MAX);
        assert_eq!((steps, is_marked), (vec![STEP, 1000], true));
        assert_eq!(kept_open(), 0);
        // What is there was not looked at: its userfaultfd stays open, so that nobody reads zeroes.
        let (_other, steps, is_marked) = ends(4 << 20, 2);
        assert_eq!((steps, is_marked), (vec![STEP; 2], false));
        assert_eq!(kept_open(), 1);
    });
}

#[test]
fn incompatible_memory_is_refused_by_name() {
    let Some((pager, _readers, other, uffd)) = pager_and_child(&[]) else {
        return;
    };
    let mapped = other.map(16, Mode::Missing);
    let file = other.map(16, Mode::Minor);
    pager.add(config(&uffd, &mapped, AT)).unwrap();

    let refused = |config: RegionConfig| pager.add(config).unwrap_err();
    let part = |start: u64, bytes: usize| {
        HostRange::new(HostAddress(usize::try_from(start).unwrap()), bytes).unwrap()
    };
    let foreign = |range, size| RegionConfig::foreign(&uffd, range, size, Mode::Missing, pattern());
    // A part of a served range, at other gpas.
    let inner = foreign(part(mapped.start + 4 * PAGE, 8192), PageSize::Size4K);
    let error = refused(inner.gpa(above(AT, 100)));
    assert!(matches!(error, AddError::HostOverlap { .. }), "{error}");
    // Other memory, at gpas in use.
    let error = refused(config(&uffd, &file, above(AT, 15)));
    assert!(matches!(error, AddError::Overlap { .. }), "{error}");
    // Pages of another size.
    let error = refused(foreign(mapped.range(), PageSize::Size2M).gpa(above(AT, 100)));
    assert!(matches!(error, AddError::BadRange { .. }), "{error}");
    // A file that is too short.
    let short = config(&uffd, &file, above(AT, 100)).memfd(file_of(&file, PAGE).unwrap());
    let error = refused(short);
    assert!(
        matches!(error, AddError::File(MemoryFileError::OutsideFile { .. })),
        "{error}"
    );
    // Not a memory file.
    let null = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
    let no_file = Memfd {
        file: null,
        offset_bytes: 0,
    };
    let error = refused(config(&uffd, &file, above(AT, 100)).memfd(no_file));
    assert!(
        matches!(error, AddError::File(MemoryFileError::NotMemory)),
        "{error}"
    );
    let no_file = RegionConfig::foreign(
        &uffd,
        file.range(),
        PageSize::Size4K,
        Mode::Minor,
        pattern(),
    );
    let error = refused(no_file.gpa(above(AT, 100)));
    assert!(matches!(error, AddError::MinorWithoutFile), "{error}");

    assert_eq!(pager.region_ids().len(), 1);
    pager.add(config(&uffd, &file, above(AT, 100))).unwrap();
    assert_eq!(other.check(mapped.start, 16, AT), "right");
    assert_eq!(other.check(file.start, 16, above(AT, 100)), "right");
}

#[test]
fn a_range_with_another_registration_is_dropped_and_others_continue() {
    let Some((pager, _readers, other, uffd)) = pager_and_child(&[]) else {
        return;
    };
    let mapped = other.map(16, Mode::Missing);
    let id = pager.add(config(&uffd, &mapped, AT)).unwrap();
    let size = PageSize::Size4K;
    let nowhere = HostRange::new(HostAddress(0x1000), 0x4000).unwrap();
    let config = RegionConfig::foreign(&uffd, nowhere, size, Mode::Missing, pattern());
    let lost = pager.add(config.gpa(above(AT, 100))).unwrap();
    let page = PageRange::single(PageIndex(1));
    let bytes = content(above(AT, 101), PAGE);
    assert_eq!(pager.push(lost, page, Content::Bytes(&bytes)).unwrap(), 0);
    // Anonymous memory has no page cache, but takes content all the same.
    let second = other.map(16, Mode::Missing);
    let file = other.map(16, Mode::Minor);
    let minor = RegionConfig::foreign(&uffd, second.range(), size, Mode::Minor, pattern());
    let minor = minor.gpa(above(AT, 200)).memfd(file_of(&file, 0).unwrap());
    let wrong = pager.add(minor).unwrap();
    let bytes = content(above(AT, 201), PAGE);
    assert_eq!(pager.push(wrong, page, Content::Bytes(&bytes)).unwrap(), 1);
    let at = second.start + PAGE;
    assert_eq!(other.check(at, 1, above(AT, 201)), "right");
    assert_eq!(other.check(mapped.start, 16, AT), "right");
    eventually("all present", || pager.counts(id).unwrap().present == 16);
}

#[test]
fn a_file_that_is_truncated_fails_its_own_region_only() {
    if !Other::can_start() {
        return;
    }
    let pager = Pager::new().unwrap();
    let _readers = two_readers(&pager);
    let (other, uffd) = Other::start(&[]);
    let file = other.map(16, Mode::Minor);
    let mapped = other.map(16, Mode::Minor);
    let cut = pager.add(config(&uffd, &file, AT)).unwrap();
    pager.add(config(&uffd, &mapped, above(AT, 100))).unwrap();
    assert_eq!(other.check(file.start, 4, AT), "right");
    other.tell(format!("truncate {} 8", file.start));
    let bytes = content(above(AT, 12), PAGE);
    let page = PageRange::single(PageIndex(12));
    let error = pager.push(cut, page, Content::Bytes(&bytes)).unwrap_err();
    assert!(
        matches!(
            error,
            PushError::Install(InstallFailure::Kernel(InstallError::NoContent))
        ),
        "{error:?}"
    );
    assert_eq!(other.check(file.start, 8, AT), "right");
    assert_eq!(other.check(mapped.start, 16, above(AT, 100)), "right");
}

/// Kind: what cannot be done counts as a failure where nothing has to be done. Nobody reads zeroes beyond the end of a file: the
/// userfaultfd need not stay open.
#[test]
fn a_userfaultfd_of_a_truncated_file_is_closed() {
    let name = "a_userfaultfd_of_a_truncated_file_is_closed";
    in_a_process_of_its_own(name, || {
        if !Other::can_start() || !can_poison() {
            return;
        }
        let pager = Pager::new().unwrap();
        let readers = two_readers(&pager);
        let (other, uffd) = Other::start(&[]);
        let file = other.map(16, Mode::Minor);
        let cut = pager.add(config(&uffd, &file, AT)).unwrap();
        assert_eq!(other.check(file.start, 4, AT), "right");
        other.tell(format!("truncate {} 8", file.start));
        drop(readers);
        pager.remove(cut).unwrap();
        assert_eq!(kept_open(), 0);
    });
}

#[test]
fn only_a_userfaultfd_is_adopted() {
    for path in ["/dev/null", "/proc/self/status", "/"] {
        let file = OwnedFd::from(std::fs::File::open(path).unwrap());
        let error = Userfaultfd::adopt(file, Features::NONE).unwrap_err();
        assert!(
            matches!(error, AdoptError::NotUserfaultfd { .. }),
            "{error}"
        );
    }
    if !has_unix_sockets() {
        return;
    }
    let socket = std::os::unix::net::UnixDatagram::unbound().unwrap();
    let error = Userfaultfd::adopt(OwnedFd::from(socket), Features::NONE).unwrap_err();
    assert!(
        matches!(error, AdoptError::NotUserfaultfd { .. }),
        "{error}"
    );
}

#[test]
fn a_userfaultfd_that_cannot_be_read_is_refused() {
    let Some((pager, _readers, other, uffd)) = pager_and_child(&[]) else {
        return;
    };
    let mapped = other.map(16, Mode::Missing);
    pager.add(config(&uffd, &mapped, AT)).unwrap();
    // Without the handshake, which its owner has omitted.
    let flags = rustix::mm::UserfaultfdFlags::CLOEXEC;
    // SAFETY: nothing is ever registered with it.
    let raw = unsafe { rustix::mm::userfaultfd(flags) }.unwrap();
    let raw = Arc::new(Userfaultfd::adopt(raw, Features::NONE).unwrap());
    let error = pager
        .add(config(&raw, &mapped, above(AT, 100)))
        .unwrap_err();
    assert!(matches!(error, AddError::NotReady { .. }), "{error}");
    assert_eq!(pager.region_ids().len(), 1);
    assert_eq!(other.check(mapped.start, 16, AT), "right");
    assert_no_trouble(&pager);
}

/// A region with a page in each state, and two sleeping threads in its process.
fn half_way(pager: &Arc<Pager>, other: &Other, uffd: &Arc<Userfaultfd>) -> (Mapped, RegionId) {
    let mapped = other.map(16, Mode::Missing);
    let id = pager.add(config(uffd, &mapped, AT)).unwrap();
    let single = |page| PageRange::single(PageIndex(page));
    let present = PageRange::new(PageIndex(0), 4);
    let pushed = pager
        .push(id, present, Content::Bytes(&content(AT, 4 * PAGE)))
        .unwrap();
    assert_eq!(pushed, 4);
    pager.push(id, single(4), Content::Zero).unwrap();
    pager.push(id, single(5), Content::Poisoned).unwrap();
    other.tell(format!("munmap {} 1", mapped.start + 6 * PAGE));
    assert_eq!(pager.push(id, single(6), Content::Zero).unwrap(), 0);
    // No thread serves the pager: they sleep.
    other.check_later(mapped.start + 8 * PAGE, 1, above(AT, 8));
    other.check_later(mapped.start + 12 * PAGE, 4, above(AT, 12));
    (mapped, id)
}

fn expect_half_way(exported: &Exported, mapped: &Mapped) {
    let state = |page| exported.image.state(PageIndex(page)).unwrap();
    let states: Vec<_> = (0..8).map(state).collect();
    use PageState::{Absent, Poisoned, Present, Removed, Zero};
    assert_eq!(
        states,
        [
            Present, Present, Present, Present, Zero, Poisoned, Removed, Absent
        ]
    );
    assert_eq!(exported.parts.len(), 1);
    assert_eq!(exported.parts[0].start, mapped.start);
    assert_eq!(exported.parts[0].pages, PageRange::new(PageIndex(0), 16));
}

/// Checks that the memory has its content, and that the sleeping threads have woken.
fn expect_whole(other: &Other, mapped: &Mapped) {
    assert_eq!(other.tell("join"), "right");
    assert_eq!(other.tell("join"), "right");
    assert_eq!(other.check(mapped.start, 4, AT), "right");
    assert_eq!(
        other.tell(format!("zero {} 1", mapped.start + 4 * PAGE)),
        "right"
    );
    let poisoned = other.tell(format!("populate {} 1", mapped.start + 5 * PAGE));
    assert_eq!(poisoned, format!("{:?}", Err::<(), _>(Errno::HWPOISON)));
    assert_eq!(
        other.check(mapped.start + 7 * PAGE, 9, above(AT, 7)),
        "right"
    );
}

#[test]
fn a_second_pager_continues_where_the_first_ended() {
    if !Other::can_start() || !can_poison() {
        return;
    }
    let first = Pager::new().unwrap();
    let (other, uffd) = Other::start(&[]);
    let (mapped, id) = half_way(&first, &other, &uffd);
    let exported = first.export(id).unwrap();
    expect_half_way(&exported, &mapped);
    let error = first.export(id).unwrap_err();
    assert!(matches!(error, ExportError::NoSuchRegion { .. }), "{error}");
    let error = first
        .discard(id, PageRange::single(PageIndex(0)))
        .unwrap_err();
    assert!(
        matches!(error, DiscardError::NoSuchRegion { .. }),
        "{error}"
    );
    // The first one continues to serve its regions: none.
    let _readers = two_readers(&first);

    let second = Pager::new().unwrap();
    let small = PageMap::new(8).unwrap().image();
    let misfit = config(&exported.uffd, &mapped, AT).resume_from(small);
    let error = second.add(misfit).unwrap_err();
    let size = ImportError::OtherSize { image: 8, map: 16 };
    assert!(
        matches!(&error, AddError::Import(error) if *error == size),
        "{error}"
    );
    let config = config(&exported.uffd, &mapped, AT).resume_from(exported.image);
    let id = second.add(config).unwrap();
    assert_eq!(states(&second, id, 8)[5], PageState::Poisoned);
    let _readers = two_readers(&second);
    expect_whole(&other, &mapped);
    assert_no_trouble(&second);
}

#[test]
fn a_pager_in_another_process_continues_where_the_first_ended() {
    if !Other::can_start() || !can_poison() {
        return;
    }
    let first = Pager::new().unwrap();
    let (other, uffd) = Other::start(&[]);
    let (mapped, id) = half_way(&first, &other, &uffd);
    let exported = first.export(id).unwrap();
    expect_half_way(&exported, &mapped);
    let (successor, _its) = Other::start(&[]);
    let image: String = exported
        .image
        .encode()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    let order = format!("serve {} 16 {} {image}", mapped.start, AT.0);
    assert_eq!(successor.tell_with(order, &[exported.uffd.as_fd()]), "ok");
    drop((exported, uffd, first));
    expect_whole(&other, &mapped);
}

/// Two regions of one userfaultfd move together, back and forth, under a thread that touches both.
#[test]
fn regions_that_share_a_userfaultfd_move_together() {
    if !Other::can_start() {
        return;
    }
    let pagers = [Pager::new().unwrap(), Pager::new().unwrap()];
    let _readers = pagers.each_ref().map(two_readers);
    let (other, uffd) = Other::start(&[]);
    let mapped = [
        other.map(2000, Mode::Missing),
        other.map(2000, Mode::Missing),
    ];
    let gpas = [AT, above(AT, 10_000)];
    let mut ids: Vec<_> = (0..2)
        .map(|index| {
            pagers[0]
                .add(config(&uffd, &mapped[index], gpas[index]))
                .unwrap()
        })
        .collect();
    for index in 0..2 {
        other.check_later(mapped[index].start, 2000, gpas[index]);
    }
    for turn in 0..40 {
        let (from, to) = (&pagers[turn % 2], &pagers[(turn + 1) % 2]);
        let exported: Vec<_> = ids.iter().map(|&id| from.export(id).unwrap()).collect();
        let configs = exported.into_iter().enumerate().map(|(index, exported)| {
            config(&uffd, &mapped[index], gpas[index]).resume_from(exported.image)
        });
        ids = configs.map(|config| to.add(config).unwrap()).collect();
        // So that some faults occur in between.
        thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(other.tell("join"), "right");
    assert_eq!(other.tell("join"), "right");
}
