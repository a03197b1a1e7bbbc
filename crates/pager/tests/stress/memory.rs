//! Memory that is paged: a region of this process, or memory that was mapped and registered as by
//! another process.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use pagetide_memory::{Backing, GuestAddress, HostAddress, HostRange, PageRange, PageSize, Region};
use pagetide_pager::{Memfd, Mode, Pager, RegionId};
use pagetide_uapi::userfaultfd::{Features, InstallError, UserRange, Userfaultfd};
use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, ftruncate, memfd_create};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

/// What the userfaultfd of such memory reports beside missing pages.
#[derive(Clone, Copy, Debug)]
pub struct Reports {
    /// Pages that are discarded.
    pub removals: bool,
    /// Children.
    pub forks: bool,
    /// Writes to protected pages.
    pub writes: bool,
}

impl Reports {
    const NOTHING: Self = Self {
        removals: false,
        forks: false,
        writes: false,
    };

    fn features(self, has_file: bool) -> Features {
        let protection = match has_file {
            true => Features::WRITE_PROTECT | Features::WRITE_PROTECT_FILES,
            false => Features::WRITE_PROTECT,
        };
        let parts = [
            (self.removals, Features::EVENT_REMOVE),
            (self.forks, Features::EVENT_FORK),
            (self.writes, protection),
        ];
        let wanted = parts.into_iter().filter(|(is_wanted, _)| *is_wanted);
        wanted.fold(Features::POISON, |all, (_, feature)| all | feature)
    }
}

/// Memory as mapped by a process that hands over its userfaultfd.
pub struct Own {
    start: *mut u8,
    bytes: usize,
    pub file: Option<OwnedFd>,
    pub uffd: Option<Arc<Userfaultfd>>,
    /// The same memory in a further address space, as of a vhost-user back end.
    pub other: Option<Box<Self>>,
    loads: AtomicU64,
}

// SAFETY: the mapping is used by atomic operations and by the kernel, from any thread.
unsafe impl Send for Own {}
// SAFETY: as above.
unsafe impl Sync for Own {}

impl Own {
    pub fn new(bytes: u64, mode: Mode, reports: Reports, is_shared: bool) -> Self {
        let bytes = usize::try_from(bytes).unwrap();
        let file = (mode == Mode::Minor).then(|| {
            let file = memfd_create("stress", MemfdFlags::CLOEXEC).unwrap();
            ftruncate(&file, bytes as u64).unwrap();
            file
        });
        let share =
            |file: &OwnedFd| Self::map(bytes, Some(file.try_clone().unwrap()), Reports::NOTHING);
        let other = file.as_ref().filter(|_| is_shared).map(share);
        let mut own = Self::map(bytes, file, reports);
        own.other = other.map(Box::new);
        own
    }

    fn map(bytes: usize, file: Option<OwnedFd>, reports: Reports) -> Self {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let null = std::ptr::null_mut();
        let start = match &file {
            // SAFETY: null without MAP_FIXED replaces nothing.
            None => unsafe { mmap_anonymous(null, bytes, access, MapFlags::PRIVATE) },
            // SAFETY: as above.
            Some(file) => unsafe { mmap(null, bytes, access, MapFlags::SHARED, file, 0) },
        };
        let start = start.unwrap();
        // SAFETY: the range was just mapped and belongs to this function.
        unsafe { madvise(start, bytes, Advice::LinuxNoHugepage) }.unwrap();
        let features = reports.features(file.is_some());
        let (mode, features) = match file {
            None => (Mode::Missing, features),
            Some(_) => {
                let shmem = Features::MISSING_SHMEM | Features::MINOR_SHMEM;
                (Mode::Minor, features | shmem)
            }
        };
        let uffd = Userfaultfd::open(features).unwrap();
        let range = UserRange {
            start: start.addr() as u64,
            bytes: bytes as u64,
        };
        let registered = match reports.writes {
            // SAFETY: it stays mapped until the userfaultfd is closed (Drop), and no code relies on its
            // zeroes.
            true => unsafe { uffd.register_with_protection(range, mode) },
            // SAFETY: as above.
            false => unsafe { uffd.register(range, mode) },
        };
        registered.unwrap();
        Self {
            start: start.cast(),
            bytes,
            file,
            uffd: Some(Arc::new(uffd)),
            other: None,
            loads: AtomicU64::new(0),
        }
    }

    /// Protects pages against writing, unless the kernel cannot now.
    pub fn protect(&self, pages: PageRange) {
        let range = UserRange {
            start: self.start.addr() as u64 + (pages.first().0 << 12),
            bytes: pages.count() << 12,
        };
        match self.uffd.as_ref().unwrap().protect(range) {
            Ok(()) | Err(InstallError::Again { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }

    /// Gives a pager the further address space.
    pub fn attach(&self, pager: &Pager, id: RegionId) {
        if let Some(other) = &self.other {
            let uffd = other.uffd.as_ref().unwrap();
            pager.attach(uffd, &[(id, other.range())]).unwrap();
        }
    }

    /// The mapping for the next load: one and the other in turn.
    fn next(&self) -> &Self {
        let turn = self.loads.fetch_add(1, Ordering::Relaxed);
        let other = self.other.as_deref().filter(|_| turn % 2 == 1);
        other.unwrap_or(self)
    }

    pub fn range(&self) -> HostRange {
        HostRange::new(HostAddress(self.start.addr()), self.bytes).unwrap()
    }

    pub fn memfd(&self) -> Option<Memfd> {
        let file = self.file.as_ref()?.try_clone().unwrap();
        Some(Memfd {
            file,
            offset_bytes: 0,
        })
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        // Before unmapping, which would otherwise wait for an UNMAP or REMOVE event to be read.
        self.uffd = None;
        // SAFETY: no thread uses the mapping any more.
        unsafe { munmap(self.start.cast(), self.bytes) }.unwrap();
    }
}

pub enum Memory {
    Local(Arc<Region>),
    Own(Own),
}

impl Memory {
    pub fn page_size(&self) -> PageSize {
        match self {
            Self::Local(region) => region.page_size(),
            Self::Own(_) => PageSize::Size4K,
        }
    }

    fn range(&self) -> HostRange {
        match self {
            Self::Local(region) => region.guest(),
            Self::Own(own) => own.range(),
        }
    }

    fn pointer(&self, page: u64) -> *mut u8 {
        let offset = usize::try_from(page << self.page_size().shift()).unwrap();
        assert!(offset < self.range().bytes());
        match self {
            Self::Local(_) => {
                std::ptr::with_exposed_provenance_mut(self.range().start().0 + offset)
            }
            Self::Own(own) => own.start.wrapping_add(offset),
        }
    }

    fn word(&self, page: u64, word: u64) -> &AtomicU64 {
        self.word_at(self.pointer(page), word)
    }

    fn word_at(&self, page: *mut u8, word: u64) -> &AtomicU64 {
        assert!(word < self.page_size().bytes() / 8);
        let at = page.cast::<u64>();
        let at = at.wrapping_add(usize::try_from(word).unwrap());
        // SAFETY: aligned, within memory that is mapped for as long as self lives, and accessed by
        // atomic operations only (and by the kernel).
        unsafe { AtomicU64::from_ptr(at) }
    }

    /// Reads it, as a guest would, or a back end.
    pub fn load(&self, page: u64, word: u64) -> u64 {
        let word = match self {
            Self::Local(_) => self.word(page, word),
            Self::Own(own) => {
                let offset = usize::try_from(page << 12).unwrap();
                assert!(offset < own.bytes);
                self.word_at(own.next().start.wrapping_add(offset), word)
            }
        };
        word.load(Ordering::Relaxed)
    }

    /// The address of a word in the region's own mapping, for a child.
    pub fn address(&self, page: u64, word: u64) -> *const u64 {
        self.word(page, word).as_ptr()
    }

    pub fn store(&self, page: u64, word: u64, value: u64) {
        self.word(page, word).store(value, Ordering::Relaxed);
    }

    /// Discards pages without informing a pager: by madvise.
    pub fn advise_away(&self, pages: PageRange) {
        let bytes = usize::try_from(pages.count() << self.page_size().shift()).unwrap();
        let has_file = match self {
            Self::Local(region) => region.backing().has_file(),
            Self::Own(own) => own.file.is_some(),
        };
        let advice = if has_file {
            Advice::LinuxRemove
        } else {
            Advice::LinuxDontNeed
        };
        let at = self.pointer(pages.first().0);
        // SAFETY: madvise drops the content of a range of this process, which is accessed by atomic
        // operations only.
        unsafe { madvise(at.cast(), bytes, advice) }.unwrap();
    }

    /// The same by a hole in the file, if there is one.
    pub fn punch(&self, pages: PageRange) {
        match self {
            Self::Local(region) => region.punch(pages).unwrap(),
            Self::Own(own) => match &own.file {
                None => self.advise_away(pages),
                Some(file) => {
                    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                    fallocate(file, flags, pages.first().0 << 12, pages.count() << 12).unwrap();
                }
            },
        }
    }
}

/// Writes the content of a whole region into its page cache.
pub fn fill_page_cache(region: &Region) {
    let bytes = usize::try_from(region.page_size().bytes()).unwrap();
    let mut content = vec![0; bytes];
    for page in region.all_pages().iter() {
        crate::source::fill(region.gpa_of_page(page).unwrap().0, &mut content);
        region.write_service(page, 0, &content).unwrap();
    }
}

pub fn local(gpa: u64, pages: u64, backing: Backing) -> Option<Arc<Region>> {
    let bytes = pages * backing.page_size().bytes();
    // Another life may have taken the huge pages at this moment.
    let region = Region::new(GuestAddress(gpa), bytes, backing).ok()?;
    Some(Arc::new(region))
}
