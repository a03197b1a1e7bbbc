//! A page that other code than the pager has put into memory: its content is not the source's, and the
//! pager accepts it only if the owner trusts it.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::sync::Arc;

use pagetide_memory::{
    Access, AccessError, Backing, HostAddress, PageIndex, PageRange, PageState, Region,
};
use pagetide_pager::{
    AddError, Content, InstallFailure, Mode, Notice, Prefetch, PrefetchConfig, PrefetchError,
    PushError, ReaderConfig, Readers, RegionConfig, Resolution, ResolveError,
};
use pagetide_uapi::userfaultfd::{Features, UserRange, Userfaultfd, Wake};
use support::*;

/// Writes content to a region's file without the pager, as another process that has mapped the file
/// can.
fn write_file(region: &Region, page: u64, content: &[u8]) {
    let file = region.file().unwrap();
    rustix::io::pwrite(file, content, page * PAGE).unwrap();
}

fn is_unexpected(failure: &InstallFailure, at: u64) -> bool {
    matches!(failure, InstallFailure::Unexpected { page } if page.0 == at)
}

#[test]
fn a_region_with_content_is_refused_unless_it_is_trusted() {
    for (mode, backing) in WAYS {
        let _pool = pool_for(4, backing);
        let Some(region) = region(4, backing) else {
            continue;
        };
        region.write_guest(PageIndex(2), 0, &[3]).unwrap();
        let refused = Paged::try_with(&region, mode, pattern(), |config| config);
        let Err(AddError::NotEmpty { page }) = refused.map(drop) else {
            panic!("{mode:?} {backing}: not refused")
        };
        let first = match backing {
            // The huge page is in the file as a whole.
            Backing::Thp => page.min(PageIndex(2)),
            _ => PageIndex(2),
        };
        assert_eq!(page, first, "{mode:?} {backing}");
        if backing == Backing::Thp {
            continue;
        }
        assert_eq!(region.paging(), None, "{backing}: nothing has changed");
        let set = RegionConfig::trust_existing_pages;
        let paged = Paged::with(&region, mode, pattern(), set);
        assert_eq!(paged.read_exit(2), Resolution::Exists, "{mode:?} {backing}");
        assert_eq!(first_byte(&region, 2), 3);
        assert_eq!(paged.read_exit(1), installed(1, 1));
        check_page(&region, 1);
    }
}

#[test]
fn the_service_mapping_of_a_missing_region_is_closed() {
    let Some(region) = region(4, Backing::Shmem) else {
        return;
    };
    let paged = Paged::new(&region, Mode::Missing, pattern());
    let mut seen = [0; 8];
    let read = region.read_service(PageIndex(1), 0, &mut seen);
    assert_eq!(read, Err(AccessError::ServiceClosed));
    assert_eq!(paged.read_exit(1), installed(1, 1));
    check_page(&region, 1);
    paged.pager.remove(paged.id).unwrap();
    region.read_service(PageIndex(1), 0, &mut seen).unwrap();
}

/// A child's access to an absent page would create a page of zeroes for all processes.
#[test]
fn a_child_does_not_inherit_paged_memory() {
    for (mode, backing) in SMALL_WAYS {
        let Some(region) = region(4, backing) else {
            return;
        };
        let paged = Paged::new(&region, mode, pattern());
        let gpa = region.gpa_of_page(PageIndex(1)).unwrap();
        let mappings = [
            region.gpa_to_hva(gpa).map(HostAddress::as_u64),
            region.service().map(|range| range.start().as_u64() + PAGE),
        ];
        for address in mappings.into_iter().flatten() {
            assert_eq!(touch_in_child(address), libc::SIGSEGV, "{mode:?} {backing}");
        }
        assert_eq!(paged.read_exit(1), installed(1, 1), "{mode:?} {backing}");
        check_page(&region, 1);
    }
}

/// The signal that ends a forked child that reads at `address`; 0 if the read succeeds.
fn touch_in_child(address: u64) -> i32 {
    let at = std::ptr::with_exposed_provenance::<u8>(usize::try_from(address).unwrap());
    // SAFETY: the child of a process with threads may only make async-signal-safe calls: it resets a
    // signal, reads a byte and exits.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        // SAFETY: signal is async-signal-safe, and no handler is installed.
        unsafe { libc::signal(libc::SIGSEGV, libc::SIG_DFL) };
        // SAFETY: the address is mapped, or the read ends the child by a signal, which this function
        // reports.
        unsafe { at.read_volatile() };
        // SAFETY: _exit is async-signal-safe.
        unsafe { libc::_exit(0) };
    }
    let mut status = 0;
    // SAFETY: waitpid requires room for the status.
    let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(waited, child);
    if libc::WIFSIGNALED(status) {
        libc::WTERMSIG(status)
    } else {
        0
    }
}

#[test]
fn an_exit_does_not_accept_a_foreign_page() {
    for around in [1, 4] {
        let Some(region) = region(4, Backing::Shmem) else {
            return;
        };
        let set = |config: RegionConfig| config.fault_around(around);
        let paged = Paged::with(&region, Mode::Missing, pattern(), set);
        write_file(&region, 1, &[0; 4096]);
        for _ in 0..2 {
            let error = paged.exit(1, Access::Read).unwrap_err();
            let ResolveError::Install { source, .. } = &error else {
                panic!("{error:?}")
            };
            assert!(is_unexpected(source, 1), "{source}");
            assert_eq!(paged.state(1), PageState::Absent);
        }
        // Its neighbours are installed with their content.
        for page in [2, 0, 3] {
            let resolution = paged.read_exit(page);
            assert!(
                matches!(
                    resolution,
                    Resolution::Installed { .. } | Resolution::AlreadyPresent
                ),
                "{resolution:?}"
            );
            check_page(&region, page);
        }
        assert_eq!(paged.state(1), PageState::Absent);
    }
}

#[test]
fn a_minor_region_does_not_accept_a_foreign_mapping() {
    let Some(region) = region(4, Backing::Shmem) else {
        return;
    };
    let paged = Paged::new(&region, Mode::Minor, pattern());
    write_file(&region, 1, &[0xee; 4096]);
    let uffd = Userfaultfd::open(Features::NONE).unwrap();
    let page = PageRange::single(PageIndex(1));
    let range = UserRange::from(region.guest_range(page).unwrap());
    uffd.continue_pages(range, Wake::DontWake).unwrap();
    let error = paged.exit(1, Access::Read).unwrap_err();
    let ResolveError::Install { source, .. } = &error else {
        panic!("{error:?}")
    };
    assert!(is_unexpected(source, 1), "{source}");
    assert_eq!(first_byte(&region, 1), 0xee, "it stays as it is");
}

#[test]
fn a_trusted_page_is_accepted_with_its_neighbours() {
    let Some(region) = region(16, Backing::Anonymous) else {
        return;
    };
    let set = |config: RegionConfig| config.fault_around(16).trust_existing_pages();
    let paged = Paged::with(&region, Mode::Missing, pattern(), set);
    let uffd = Userfaultfd::open(Features::NONE).unwrap();
    let taken = region.guest_range(PageRange::single(PageIndex(4))).unwrap();
    let copied = uffd.copy_pages(taken.start().as_u64(), &[0x33; 4096], Wake::DontWake);
    copied.unwrap();
    // The kernel stops half way, and the rest of the content reaches its own pages.
    assert_eq!(paged.read_exit(7), installed(5, 11));
    for page in (0..4).chain(5..16) {
        check_page(&region, page);
    }
    assert_eq!(first_byte(&region, 4), 0x33, "what was there stays");
    assert_eq!(paged.state(4), PageState::Present);
}

/// Content that arrives for such a page is not installed, and the owner receives a notice.
#[test]
fn an_arrival_does_not_accept_a_foreign_page() {
    let Some(region) = region(4, Backing::Shmem) else {
        return;
    };
    let source = ManualSource::new();
    let paged = Paged::new(&region, Mode::Missing, source.contents());
    write_file(&region, 1, &[0; 4096]);
    let mut resolver = paged.resolver();
    let its = Arc::clone(&region);
    let waiting = spawn_asleep("an exit", move || {
        exit(&mut resolver, &its, 1, Access::Read)
    });
    sources::complete(source.next());
    let notice = paged.pager.trouble().unwrap();
    let Notice::NotInstalled { region: id, source } = &notice else {
        panic!("{notice}")
    };
    assert_eq!(*id, paged.id);
    assert!(is_unexpected(source, 1), "{source}");
    assert!(paged.pager.source_status(paged.id).unwrap().is_stalled);
    assert!(!waiting.is_finished());
    paged.pager.stop();
    let error = join("the exit", waiting).unwrap_err();
    assert!(matches!(error, ResolveError::Stopped { .. }), "{error}");
}

#[test]
fn a_push_does_not_accept_a_foreign_page() {
    let Some(region) = region(4, Backing::Shmem) else {
        return;
    };
    let paged = Paged::new(&region, Mode::Missing, ManualSource::new().contents());
    write_file(&region, 1, &[0; 4096]);
    let bytes = content(GPA, 4 * PAGE);
    let pushed = paged
        .pager
        .push(paged.id, region.all_pages(), Content::Bytes(&bytes));
    let Err(PushError::Install(failure)) = &pushed else {
        panic!("{pushed:?}")
    };
    assert!(is_unexpected(failure, 1), "{failure}");
    assert_eq!(paged.state(0), PageState::Present);
    assert_eq!(paged.state(1), PageState::Absent);
    check_page(&region, 0);
}

#[test]
fn prefetch_does_not_accept_a_foreign_page() {
    let Some(region) = region(64, Backing::Shmem) else {
        return;
    };
    let paged = Paged::new(&region, Mode::Missing, pattern());
    write_file(&region, 21, &[0; 4096]);
    let prefetch = Prefetch::spawn(&paged.pager, PrefetchConfig::default()).unwrap();
    let error = within_patience("prefetch", || prefetch.finish().unwrap_err());
    assert!(matches!(*error, PrefetchError::Resolve(_)), "{error}");
    assert_eq!(paged.state(21), PageState::Absent);
}

#[test]
fn a_reader_does_not_accept_a_foreign_page() {
    let Some(region) = region(4, Backing::Anonymous) else {
        return;
    };
    if !can_poison() {
        return;
    }
    let paged = Paged::new(&region, Mode::Missing, pattern());
    let its = Arc::clone(&region);
    let toucher = spawn_asleep("a touch", move || expect_poison(&its, 1));
    let uffd = Userfaultfd::open(Features::NONE).unwrap();
    let page = PageRange::single(PageIndex(1));
    let range = UserRange::from(region.guest_range(page).unwrap());
    uffd.zero_pages(range, Wake::DontWake).unwrap();
    let readers = Readers::spawn(&paged.pager, ReaderConfig::new(1)).unwrap();
    eventually("the notice", || paged.pager.trouble().is_some());
    let notice = paged.pager.trouble().unwrap();
    let Notice::Unresolved(error) = &notice else {
        panic!("{notice}")
    };
    let ResolveError::Install { source, .. } = &**error else {
        panic!("{error}")
    };
    assert!(is_unexpected(source, 1), "{source}");
    assert_eq!(paged.state(1), PageState::Pending);
    readers.stop();
    // A thread that sleeps there never reads it.
    assert!(!toucher.is_finished());
    paged.pager.remove(paged.id).unwrap();
    join("the touch", toucher);
}
