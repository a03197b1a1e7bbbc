//! What the pager's tests share.
#![allow(
    dead_code,
    unreachable_pub,
    reason = "each test binary uses a part of this"
)]
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test helper that fails is a test that fails"
)]

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use pagetide_memory::{Backing, GuestAddress, PageIndex, PageState, Region, RegionError, Removal};
use pagetide_pager::{
    FaultExit, Fetch, Fetched, Mode, PageSource, Pager, PatternSource, RegionId, SourceError,
};
use pagetide_uapi::generated as abi;
use pagetide_uapi::userfaultfd::{OpenError, Userfaultfd};

pub const GPA: GuestAddress = GuestAddress(4 << 30);
pub const PAGE: u64 = 4096;

/// How long anything may take before a test calls it a hang.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Whether userfaultfd can be used here; says why not.
pub fn has_userfaultfd() -> bool {
    match Userfaultfd::available() {
        Ok(_) => true,
        Err(error @ (OpenError::NotSupported | OpenError::NoPermission { .. })) => {
            println!("SKIP: {error}");
            false
        }
        Err(error) => panic!("{error}"),
    }
}

/// A region of that many pages of its backing, or `None` after saying why there is none.
pub fn region(pages: u64, backing: Backing) -> Option<Arc<Region>> {
    if !has_userfaultfd() {
        return None;
    }
    match Region::new(GPA, pages * backing.page_size().bytes(), backing) {
        Ok(region) => Some(Arc::new(region)),
        Err(
            error @ (RegionError::HugepagesNotReserved { .. }
            | RegionError::NoHugepagePool { .. }
            | RegionError::NoTransparentHugepages),
        ) => {
            println!("SKIP: {backing}: {error}");
            None
        }
        Err(error) => panic!("{backing}: {error}"),
    }
}

/// The content that every page should have: its words are their own addresses, inverted.
pub fn fill(gpa: GuestAddress, bytes: &mut [u8]) {
    for (offset, word) in bytes.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        *word = (!(gpa.0 + 8 * offset as u64)).to_le_bytes();
    }
}

pub fn pattern() -> PatternSource<fn(GuestAddress, &mut [u8])> {
    PatternSource::new(fill)
}

/// Puts the pattern into the page cache.
pub fn fill_page_cache(region: &Region) {
    let mut piece = [0; 4096];
    for offset in (0..region.bytes()).step_by(4096) {
        fill(GuestAddress(region.gpa().0 + offset), &mut piece);
        region.write_service(PageIndex(0), offset, &piece).unwrap();
    }
}

/// Reads a page as the guest would, which may fault, and compares it with the pattern: all of a
/// small page, a piece out of every 64 of a huge one.
pub fn check_page(region: &Region, page: u64) {
    let bytes = region.page_size().bytes();
    let (mut seen, mut expected) = ([0; 4096], [0; 4096]);
    for offset in (0..bytes).step_by(4096) {
        region
            .read_guest(PageIndex(page), offset, &mut seen)
            .unwrap();
        fill(
            GuestAddress(region.gpa().0 + page * bytes + offset),
            &mut expected,
        );
        assert!(
            seen == expected,
            "page {page} at {offset}: {:x?}",
            &seen[..16]
        );
    }
}

/// The exit that a touch of a page would be.
pub fn exit(region: &Region, page: u64, access: u32) -> FaultExit {
    let bytes = region.page_size().bytes();
    let flags = u64::from(access | abi::KVM_MEMORY_EXIT_FLAG_ABSENT);
    FaultExit::decode(flags, region.gpa().0 + page * bytes, bytes, false)
}

pub fn read_exit(region: &Region, page: u64) -> FaultExit {
    exit(region, page, abi::KVM_MEMORY_EXIT_FLAG_READ)
}

pub fn write_exit(region: &Region, page: u64) -> FaultExit {
    exit(region, page, abi::KVM_MEMORY_EXIT_FLAG_WRITE)
}

/// The pager's only region.
pub fn only(pager: &Pager) -> RegionId {
    pager.locate(GPA).unwrap().0
}

pub fn state(pager: &Pager, page: u64) -> PageState {
    pager
        .page_map(only(pager))
        .unwrap()
        .state(PageIndex(page))
        .unwrap()
}

/// The guest gives a page up. A reader wakes the guest before it tells the page map, so for a moment
/// the page may still be its.
pub fn give_up(pager: &Pager, page: u64) {
    let map = pager.page_map(only(pager)).unwrap();
    eventually("removal", || {
        matches!(map.remove(PageIndex(page)), Removal::Done(_))
    });
}

/// Whether the guest mapping has a page table entry for a 4 KiB page, by `/proc/self/pagemap`. Does
/// not fault.
pub fn is_mapped(region: &Region, page: u64) -> bool {
    let hva = region
        .gpa_to_hva(region.gpa_of_page(PageIndex(page)).unwrap())
        .unwrap();
    let mut entry = [0; 8];
    let pagemap = File::open("/proc/self/pagemap").unwrap();
    pagemap
        .read_exact_at(&mut entry, hva.as_u64() / PAGE * 8)
        .unwrap();
    u64::from_le_bytes(entry) >> 63 == 1
}

pub fn pager(region: &Arc<Region>, mode: Mode, source: impl PageSource + 'static) -> Arc<Pager> {
    Pager::builder(mode, source)
        .region(Arc::clone(region))
        .build()
        .unwrap()
}

/// Runs `work` on another thread and waits for its end, but not for ever.
pub fn within_patience<T: Send + 'static>(
    what: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> T {
    let (send, receive) = mpsc::channel();
    let thread = thread::spawn(move || send.send(work()));
    match receive.recv_timeout(PATIENCE) {
        Ok(result) => {
            let _ = thread.join();
            result
        }
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("{what}: hangs"),
        Err(mpsc::RecvTimeoutError::Disconnected) => match thread.join() {
            Err(panic) => std::panic::resume_unwind(panic),
            Ok(_) => panic!("{what}: no result"),
        },
    }
}

/// Starts `work` on another thread, and returns when that thread has fallen asleep in it: in the
/// userfaultfd, or waiting for the owner of a page.
pub fn spawn_asleep<T: Send + 'static>(
    what: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> JoinHandle<T> {
    let (send, receive) = mpsc::channel();
    let thread = thread::spawn(move || {
        send.send(rustix::thread::gettid()).unwrap();
        work()
    });
    let tid = receive.recv().unwrap().as_raw_nonzero();
    let is_asleep = || {
        let stat = std::fs::read_to_string(format!("/proc/self/task/{tid}/stat")).unwrap();
        let state = stat.rsplit(')').next().unwrap().trim_start();
        state.starts_with(['S', 'D'])
    };
    // Several looks in a row: a thread may doze for a moment on its way.
    let looks = [(); 5];
    eventually(what, || {
        looks.iter().all(|()| {
            thread::sleep(Duration::from_millis(2));
            is_asleep()
        })
    });
    thread
}

/// Waits until `condition` holds.
pub fn eventually(what: &str, condition: impl Fn() -> bool) {
    let begun = std::time::Instant::now();
    while !condition() {
        assert!(begun.elapsed() < PATIENCE, "{what}: never");
        thread::sleep(Duration::from_millis(1));
    }
}

/// A source made of a function, for misbehaviour of all kinds.
pub struct SourceFn<F>(pub F);

impl<F> PageSource for SourceFn<F>
where
    F: Fn(&mut Fetch<'_>) -> Result<Fetched, SourceError> + Send + Sync,
{
    fn fetch(&self, fetch: &mut Fetch<'_>) -> Result<Fetched, SourceError> {
        (self.0)(fetch)
    }
}

/// Pushes the pattern for all pages asked for.
pub fn push_pattern(fetch: &mut Fetch<'_>) -> Result<Fetched, SourceError> {
    pattern().fetch(fetch)
}

pub fn unavailable(reason: &'static str) -> SourceError {
    SourceError::Unavailable(reason.into())
}
