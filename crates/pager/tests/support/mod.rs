//! Common code of the pager's tests: regions, content, and waits that fail instead of hanging.
#![allow(
    dead_code,
    unreachable_pub,
    unused_imports,
    reason = "each test binary uses a part of this"
)]
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test helper that fails is a test that fails"
)]

pub mod hugepages;
pub mod manual;
pub mod poison;
pub mod sources;
pub mod view;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use pagetide_memory::{
    Access, Backing, GuestAddress, GuestRange, PageIndex, PageRange, PageState, Region, RegionError,
};
use pagetide_pager::{
    AddError, Contents, LocalSource, Mode, Pager, PatternSource, RegionConfig, RegionId,
    Resolution, ResolveError, Resolver,
};
use pagetide_test_support::Sleeper;
use pagetide_uapi::userfaultfd::{Features, OpenError, UserRange, Userfaultfd, Wake};
use rustix::mm::Advice;

pub use hugepages::HugePages;
pub use manual::ManualSource;
pub use pagetide_test_support::{PATIENCE, equals, eventually};
pub use poison::{assert_lost, can_poison, expect_poison, handle_sigbus};
pub use sources::LocalFn;

/// The gpa of regions made by [`region`].
pub const GPA: GuestAddress = GuestAddress(4 << 30);
pub const PAGE: u64 = 4096;

/// All supported combinations of mode and backing.
pub const WAYS: [(Mode, Backing); 6] = [
    (Mode::Minor, Backing::Shmem),
    (Mode::Minor, Backing::Thp),
    (Mode::Minor, Backing::Hugetlb2M),
    (Mode::Missing, Backing::Shmem),
    (Mode::Missing, Backing::Anonymous),
    (Mode::Missing, Backing::Hugetlb2M),
];

/// The same without huge pages.
pub const SMALL_WAYS: [(Mode, Backing); 3] = [
    (Mode::Minor, Backing::Shmem),
    (Mode::Missing, Backing::Shmem),
    (Mode::Missing, Backing::Anonymous),
];

/// Whether userfaultfd is usable here; prints the reason if not.
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

/// Whether this kernel has Unix sockets (CONFIG_UNIX); prints the reason if not.
pub fn has_unix_sockets() -> bool {
    match std::os::unix::net::UnixDatagram::unbound() {
        Ok(_) => true,
        Err(error) if error.kind() == std::io::ErrorKind::Unsupported => {
            println!("SKIP: no Unix sockets: {error}");
            false
        }
        Err(error) => panic!("{error}"),
    }
}

/// A region of `pages` pages of its backing at [`GPA`]; where that is impossible, prints the reason and
/// returns `None`.
pub fn region(pages: u64, backing: Backing) -> Option<Arc<Region>> {
    region_at(GPA, pages, backing)
}

/// The same at `gpa`.
pub fn region_at(gpa: GuestAddress, pages: u64, backing: Backing) -> Option<Arc<Region>> {
    if !has_userfaultfd() {
        return None;
    }
    match Region::new(gpa, pages * backing.page_size().bytes(), backing) {
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

/// Huge pages for a region of `pages` pages, if its backing needs some.
pub fn pool_for(pages: u64, backing: Backing) -> Option<HugePages> {
    (backing == Backing::Hugetlb2M).then(|| HugePages::reserve(pages))
}

/// The expected content of every page: each word is its own address, inverted.
pub fn fill(gpa: GuestAddress, bytes: &mut [u8]) {
    for (offset, word) in bytes.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        *word = (!(gpa.0 + 8 * offset as u64)).to_le_bytes();
    }
}

/// The content of whole pages.
pub fn content(gpa: GuestAddress, bytes: u64) -> Vec<u8> {
    let mut content = vec![0; usize::try_from(bytes).unwrap()];
    fill(gpa, &mut content);
    content
}

/// A local source of that content.
pub fn pattern() -> Contents {
    let fill: fn(GuestAddress, &mut [u8]) = fill;
    local(PatternSource::new(fill))
}

pub fn local(source: impl LocalSource + 'static) -> Contents {
    Contents::Local(Arc::new(source))
}

/// Writes the pattern to the page cache.
pub fn fill_page_cache(region: &Region) {
    let mut piece = [0; 4096];
    for offset in (0..region.bytes()).step_by(4096) {
        fill(GuestAddress(region.gpa().0 + offset), &mut piece);
        region.write_service(PageIndex(0), offset, &piece).unwrap();
    }
}

/// Reads a page as the guest would, which may fault, and compares it with the pattern.
pub fn check_page(region: &Region, page: u64) {
    let bytes = region.page_size().bytes();
    let (mut seen, mut expected) = ([0; 4096], [0; 4096]);
    for offset in (0..bytes).step_by(4096) {
        let read = region.read_guest(PageIndex(page), offset, &mut seen);
        read.unwrap();
        let gpa = GuestAddress(region.gpa().0 + page * bytes + offset);
        fill(gpa, &mut expected);
        let start = &seen[..16];
        assert!(seen == expected, "page {page} at {offset}: {start:x?}");
    }
}

/// Reads a page as the guest would, which may fault, and checks that it is all zeroes.
pub fn check_zeroes(region: &Region, page: u64) {
    let mut seen = [1; 4096];
    for offset in (0..region.page_size().bytes()).step_by(4096) {
        let read = region.read_guest(PageIndex(page), offset, &mut seen);
        read.unwrap();
        assert!(seen == [0; 4096], "page {page}: {:x?}", &seen[..16]);
    }
}

/// The first byte of a page, read as the guest would.
pub fn first_byte(region: &Region, page: u64) -> u8 {
    let mut seen = [0];
    region.read_guest(PageIndex(page), 0, &mut seen).unwrap();
    seen[0]
}

/// Whether the guest mapping has a page table entry for a page, by `/proc/self/pagemap`. Does not
/// fault.
pub fn is_mapped(region: &Region, page: u64) -> bool {
    let gpa = region.gpa_of_page(PageIndex(page)).unwrap();
    let hva = region.gpa_to_hva(gpa).unwrap();
    let mut entry = [0; 8];
    let pagemap = File::open("/proc/self/pagemap").unwrap();
    let at = hva.as_u64() / PAGE * 8;
    pagemap.read_exact_at(&mut entry, at).unwrap();
    u64::from_le_bytes(entry) >> 63 == 1
}

/// Discards pages without informing the pager: by madvise, as a guest's memory manager does. With events
/// the kernel makes the discarding thread wait until the event was read.
pub fn advise_away(region: &Region, first: u64, count: u64) {
    let pages = PageRange::new(PageIndex(first), count);
    let range = region.guest_range(pages).unwrap();
    let advice = if region.backing().has_file() {
        Advice::LinuxRemove
    } else {
        Advice::LinuxDontNeed
    };
    let at = std::ptr::with_exposed_provenance_mut(range.start().0);
    // SAFETY: the range is the region's, and the test discards its content on purpose.
    unsafe { rustix::mm::madvise(at, range.bytes(), advice) }.unwrap();
}

/// Maps pages of the page cache without the pager, with another userfaultfd.
pub fn map_without_pager(region: &Region, pages: PageRange) {
    let uffd = Userfaultfd::open(Features::NONE).unwrap();
    let range = UserRange::from(region.guest_range(pages).unwrap());
    uffd.continue_pages(range, Wake::DontWake).unwrap();
}

/// Fails if a notice needed action.
pub fn assert_no_trouble(pager: &Pager) {
    assert_eq!(pager.trouble().map(|notice| notice.to_string()), None);
}

/// The gpas of 4 KiB pages from [`GPA`] on.
pub fn gpas(first: u64, count: u64) -> GuestRange {
    GuestRange::new(GuestAddress(GPA.0 + first * PAGE), count * PAGE).unwrap()
}

/// A pager with one region.
pub struct Paged {
    pub pager: Arc<Pager>,
    pub region: Arc<Region>,
    pub id: RegionId,
}

impl Paged {
    pub fn new(region: &Arc<Region>, mode: Mode, contents: Contents) -> Self {
        Self::with(region, mode, contents, |config| config)
    }

    /// The same, with settings.
    pub fn with(
        region: &Arc<Region>,
        mode: Mode,
        contents: Contents,
        set: impl FnOnce(RegionConfig) -> RegionConfig,
    ) -> Self {
        Self::try_with(region, mode, contents, set).unwrap()
    }

    pub fn try_with(
        region: &Arc<Region>,
        mode: Mode,
        contents: Contents,
        set: impl FnOnce(RegionConfig) -> RegionConfig,
    ) -> Result<Self, AddError> {
        let pager = Pager::new().unwrap();
        let config = RegionConfig::local(Arc::clone(region), mode, contents);
        let id = pager.add(set(config))?;
        let region = Arc::clone(region);
        Ok(Self { pager, region, id })
    }

    pub fn resolver(&self) -> Resolver {
        self.pager.resolver(Some(0)).unwrap()
    }

    pub fn state(&self, page: u64) -> PageState {
        self.pager.page_state(self.id, PageIndex(page)).unwrap()
    }

    /// An exit on a page, resolved by a new resolver.
    pub fn exit(&self, page: u64, access: Access) -> Result<Resolution, ResolveError> {
        exit(&mut self.resolver(), &self.region, page, access)
    }

    /// A read exit; fails the test if it is not resolved.
    pub fn read_exit(&self, page: u64) -> Resolution {
        self.exit(page, Access::Read).unwrap()
    }
}

/// Resolves the exit of an access to a page.
pub fn exit(
    resolver: &mut Resolver,
    region: &Region,
    page: u64,
    access: Access,
) -> Result<Resolution, ResolveError> {
    let bytes = region.page_size().bytes();
    resolver.resolve_exit(GuestAddress(region.gpa().0 + page * bytes), access)
}

/// The resolution for an installation of `count` pages.
pub fn installed(first: u64, count: u64) -> Resolution {
    let pages = PageRange::new(PageIndex(first), count);
    Resolution::Installed { pages }
}

/// Runs `work` on another thread, and fails if it takes longer than [`PATIENCE`].
pub fn within_patience<T: Send + 'static>(
    what: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> T {
    // When a test fails, dropping its pager sends SIGBUS to sleeping threads, which must not hide the
    // cause.
    handle_sigbus();
    pagetide_test_support::within_patience(what, work)
}

/// A thread that ends by itself.
pub trait Ends {
    type Value;

    /// What it gives; fails if it takes longer than [`PATIENCE`].
    fn ended(self, what: &str) -> Self::Value;
}

impl<T: Send + 'static> Ends for JoinHandle<T> {
    type Value = T;

    fn ended(self, what: &str) -> T {
        match within_patience(what, move || self.join()) {
            Ok(value) => value,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
}

impl<T: Send + 'static> Ends for Sleeper<T> {
    type Value = T;

    fn ended(self, _: &str) -> T {
        self.join()
    }
}

/// The result of a thread that ends by itself.
pub fn join<E: Ends>(what: &str, thread: E) -> E::Value {
    thread.ended(what)
}

/// Starts `work` on another thread, and returns when that thread has fallen asleep in it: in the
/// userfaultfd, or waiting for a page.
pub fn spawn_asleep<T: Send + 'static>(
    what: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> Sleeper<T> {
    handle_sigbus();
    Sleeper::spawn(what, work)
}
