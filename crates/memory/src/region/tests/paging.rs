//! Regions whose pages are installed one by one, with a real userfaultfd.

use std::thread;
use std::time::Duration;

use pagetide_uapi::userfaultfd::{EventBuffer, Features, Mode, UserRange, Userfaultfd, Wake};

use super::*;

const MADV_COLLAPSE: libc::c_int = 25;
const PAGES_2M: u64 = 512;

fn user_range(range: HostRange) -> UserRange {
    UserRange {
        start: range.start().as_u64(),
        bytes: to_u64(range.bytes()),
    }
}

fn userfaultfd(region: &Region, mode: Mode) -> Userfaultfd {
    let wanted = match mode {
        Mode::Missing => Features::MISSING_SHMEM,
        Mode::Minor => Features::MINOR_SHMEM,
    };
    let uffd = Userfaultfd::open(wanted).unwrap();
    // SAFETY: the region is mapped for longer than the userfaultfd is used, and the test does not rely
    // on its zeroes.
    unsafe { uffd.register(user_range(region.guest()), mode) }.unwrap();
    uffd
}

/// `madvise(MADV_COLLAPSE)` on a whole mapping, as another privileged process could do.
fn collapse(range: HostRange) -> Result<(), std::io::Error> {
    let start = std::ptr::with_exposed_provenance_mut(range.start().0);
    // SAFETY: collapsing changes how memory is mapped, not its content.
    match unsafe { libc::madvise(start, range.bytes(), MADV_COLLAPSE) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// Touches `page`, and resolves the fault with `content` if there is a fault. Returns the byte read,
/// and whether there was a fault.
fn touch(region: &Region, uffd: &Userfaultfd, page: PageIndex, content: u8) -> (u8, bool) {
    let mut events = EventBuffer::new(4);
    let mut faulted = false;
    let read = thread::scope(|scope| {
        let toucher = scope.spawn(|| {
            let mut byte = [0];
            region.read_guest(page, 0, &mut byte).unwrap();
            byte[0]
        });
        while !toucher.is_finished() {
            if uffd.read_events(&mut events).unwrap().count() > 0 {
                faulted = true;
                region.write_service(page, 0, &[content]).unwrap();
                let range = user_range(region.guest_range(PageRange::single(page)).unwrap());
                uffd.continue_pages(range, Wake::Wake).unwrap();
            }
            thread::yield_now();
        }
        toucher.join().unwrap()
    });
    (read, faulted)
}

#[test]
fn an_absent_page_of_a_partly_filled_huge_page_faults_after_collapse() {
    let Some(region) = region(PAGES_2M << 12, Backing::Thp) else {
        return;
    };
    // One page has its content, in a huge page of the page cache.
    region.write_service(PageIndex(0), 0, &[1]).unwrap();
    if let Err(error) = collapse(region.service().unwrap()) {
        println!("SKIP: this kernel creates no huge page of shmem: {error}");
        return;
    }
    region.begin_paging(ServiceAccess::ReadWrite).unwrap();
    let uffd = userfaultfd(&region, Mode::Minor);
    assert_eq!(touch(&region, &uffd, PageIndex(0), 1), (1, true));
    let collapsed = collapse(region.guest());
    let read = touch(&region, &uffd, PageIndex(7), 8);
    assert_eq!(read, (8, true), "collapse: {collapsed:?}");
    // After the end of paging, huge pages are permitted again.
    drop(uffd);
    region.end_paging();
    // The kernel may require a retry.
    assert!((0..100).any(|_| collapse(region.guest()).is_ok()));
}

/// Forks a child that reads a byte at `address`. Returns whether the read succeeded.
fn child_reads(address: HostAddress) -> bool {
    let pointer = std::ptr::with_exposed_provenance::<u8>(address.0);
    // SAFETY: the child makes one memory access and one system call, both of which are allowed in
    // a child of a process with several threads.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        // SAFETY: the byte is in a mapping, or not mapped: then the child ends by a signal, which this
        // function reports.
        unsafe { pointer.read_volatile() };
        // SAFETY: ends the child without running other code.
        unsafe { libc::_exit(0) };
    }
    let mut status = 0;
    // SAFETY: writes to `status`.
    let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(waited, child);
    libc::WIFEXITED(status)
}

#[test]
fn a_forked_child_creates_no_page() {
    let region = Region::new(GPA, 4 << 12, Backing::Shmem).unwrap();
    // It does where nothing is being paged.
    assert!(child_reads(region.service().unwrap().start()));
    assert_eq!(region.has_content().unwrap(), Some(PageIndex(0)));
    region.punch(pages(0, 1)).unwrap();

    region.begin_paging(ServiceAccess::ReadWrite).unwrap();
    let _uffd = userfaultfd(&region, Mode::Missing);
    for mapping in [region.guest(), region.service().unwrap()] {
        assert!(!child_reads(mapping.start()));
        assert_eq!(region.has_content().unwrap(), None);
    }
    region.end_paging();
    assert!(child_reads(region.service().unwrap().start()));
}

#[test]
fn a_closed_service_mapping_creates_no_page() {
    let region = Region::new(GPA, 4 << 12, Backing::Shmem).unwrap();
    let page = PageIndex(2);
    let mut byte = [0];
    region.begin_paging(ServiceAccess::Closed).unwrap();
    assert_eq!(region.paging(), Some(ServiceAccess::Closed));
    let uffd = userfaultfd(&region, Mode::Missing);
    let closed = Err(AccessError::ServiceClosed);
    assert_eq!(region.read_service(page, 0, &mut byte), closed);
    assert_eq!(region.write_service(page, 0, &byte), closed);
    assert_eq!(region.zero_service(region.all_pages()), closed);
    assert!(region.service_word(page, 0).is_none());
    assert_eq!(region.has_content().unwrap(), None);

    // The userfaultfd installs content, and punching removes it.
    let to = region.guest_range(PageRange::single(page)).unwrap();
    uffd.copy_pages(to.start().as_u64(), &[5; 4096], Wake::DontWake)
        .unwrap();
    region.read_guest(page, 9, &mut byte).unwrap();
    assert_eq!(byte, [5]);
    assert_eq!(region.has_content().unwrap(), Some(page));
    region.punch(PageRange::single(page)).unwrap();
    assert_eq!(region.has_content().unwrap(), None);

    drop(uffd);
    region.end_paging();
    assert_eq!(region.read_service(page, 0, &mut byte), Ok(()));
    assert_eq!(region.has_content().unwrap(), Some(page));
}

#[test]
fn paging_begins_once_and_ends_once() {
    for backing in Backing::ALL {
        let Some(region) = region(2 * backing.page_size().bytes(), backing) else {
            continue;
        };
        region.end_paging();
        for access in [ServiceAccess::ReadWrite, ServiceAccess::Closed] {
            region.begin_paging(access).unwrap();
            for again in [ServiceAccess::ReadWrite, ServiceAccess::Closed] {
                assert!(matches!(
                    region.begin_paging(again),
                    Err(RegionError::AlreadyPaged)
                ));
            }
            assert_eq!(region.paging(), Some(access));
            region.end_paging();
            assert_eq!(region.paging(), None);
        }
        region.write_guest(PageIndex(1), 0, &[1]).unwrap();
    }
}

#[test]
fn a_service_mapping_with_referenced_words_is_not_closed() {
    let region = Region::new(GPA, 2 << 12, Backing::Shmem).unwrap();
    let word = region.service_word(PageIndex(0), 0).unwrap();
    assert!(matches!(
        region.begin_paging(ServiceAccess::Closed),
        Err(RegionError::ServiceInUse)
    ));
    assert_eq!(word.load(Ordering::Relaxed), 0);
    region.begin_paging(ServiceAccess::ReadWrite).unwrap();
}

#[test]
fn closing_waits_for_copies_in_progress() {
    // A copy that met the closed mapping would end this process.
    let region = Region::new(GPA, 64 << 12, Backing::Shmem).unwrap();
    let stop = AtomicBool::new(false);
    let stopped = || stop.load(Ordering::Relaxed);
    thread::scope(|scope| {
        for thread in 0..2 {
            let region = &region;
            scope.spawn(move || {
                let mut bytes = vec![0; 32 << 12];
                while !stopped() {
                    match region.read_service(PageIndex(thread), 0, &mut bytes) {
                        Ok(()) | Err(AccessError::ServiceClosed) => {}
                        Err(error) => panic!("{error}"),
                    }
                    // A thread that never sleeps keeps the lock from the other for all of its time slice; in
                    // a software CPU also if it yields.
                    thread::sleep(Duration::from_micros(50));
                }
            });
        }
        for _ in 0..1000 {
            region.begin_paging(ServiceAccess::Closed).unwrap();
            thread::yield_now();
            region.end_paging();
        }
        stop.store(true, Ordering::Relaxed);
    });
}

#[test]
fn content_and_holes_are_found() {
    for backing in Backing::ALL {
        let Some(region) = region(4 * backing.page_size().bytes(), backing) else {
            continue;
        };
        let found = || (region.has_content().unwrap(), region.first_hole().unwrap());
        assert_eq!(found(), (None, Some(PageIndex(0))), "{backing}");
        region.write_guest(PageIndex(2), 0, &[1]).unwrap();
        let expected = (Some(PageIndex(2)), Some(PageIndex(0)));
        assert_eq!(found(), expected, "{backing}");
        for page in [0, 1, 3] {
            region.write_guest(PageIndex(page), 0, &[1]).unwrap();
        }
        assert_eq!(found(), (Some(PageIndex(0)), None), "{backing}");
        region.punch(pages(0, 3)).unwrap();
        let expected = (Some(PageIndex(3)), Some(PageIndex(0)));
        assert_eq!(found(), expected, "{backing}");
    }
}

#[test]
fn content_written_directly_to_the_file_is_found() {
    let region = Region::new(GPA, 4 << 12, Backing::Shmem).unwrap();
    rustix::io::pwrite(region.file().unwrap(), b"x", 3 << 12).unwrap();
    assert_eq!(region.has_content().unwrap(), Some(PageIndex(3)));
}

#[test]
fn zeroed_pages_are_content_and_punched_pages_are_not() {
    for backing in [Backing::Shmem, Backing::Thp, Backing::Hugetlb2M] {
        let Some(region) = region(4 * backing.page_size().bytes(), backing) else {
            continue;
        };
        region.write_service(PageIndex(2), 0, &[1; 9]).unwrap();
        region.zero_service(pages(1, 2)).unwrap();
        let mut seen = [1; 9];
        region.read_service(PageIndex(2), 0, &mut seen).unwrap();
        assert_eq!(seen, [0; 9]);
        assert_eq!(region.has_content().unwrap(), Some(PageIndex(1)));
        region.punch(pages(1, 2)).unwrap();
        assert_eq!(region.has_content().unwrap(), None, "{backing}");
        let beyond = pages(3, 2);
        let refused = region.zero_service(beyond);
        assert_eq!(refused, Err(AccessError::NoSuchPages { pages: beyond }));
    }
}
