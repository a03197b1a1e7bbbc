//! The memory of a VM, and what every page of it must contain.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU8, Ordering};

use pagetide_uapi::userfaultfd::{Features, Mode, UserRange, Userfaultfd};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous};

use crate::place::{PAGE, image_word};
use crate::vmm::Kind;

const HUGE: usize = 2 << 20;

/// The image's content.
const IMAGE: u8 = 0;
/// A thread is discarding it: the image's content or zeroes.
const DISCARDING: u8 = 1;
/// Zeroes.
const ZERO: u8 = 2;

/// A VM's memory. It stays mapped until the process ends.
pub struct Memory {
    pub uffd: Userfaultfd,
    /// The memfd of [`Kind::Minor`].
    pub file: Option<OwnedFd>,
    kind: Kind,
    start: usize,
    pages: usize,
    /// The state of each unit that is discarded as a whole.
    states: Vec<AtomicU8>,
}

/// A page with content that it must not have.
pub struct Wrong {
    pub page: usize,
    pub index: usize,
    pub found: u64,
    pub wanted: &'static str,
}

impl std::fmt::Display for Wrong {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            page,
            index,
            found,
            wanted,
        } = self;
        write!(
            f,
            "word {index} of page {page} has {found:#x}, and should have {wanted}"
        )
    }
}

impl Memory {
    /// `None` if the machine does not have such memory.
    pub fn new(kind: Kind, pages: usize) -> Option<Self> {
        let bytes = pages * PAGE;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let null = std::ptr::null_mut();
        let mut features = Features::EVENT_REMOVE.bits();
        let mut file = None;
        let start = match kind {
            Kind::Minor => {
                features |= Features::MINOR_SHMEM.bits() | Features::MISSING_SHMEM.bits();
                let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
                let memfd = memfd_create("guest", flags).unwrap();
                ftruncate(&memfd, bytes as u64).unwrap();
                fcntl_add_seals(&memfd, SealFlags::SHRINK).unwrap();
                // SAFETY: mmap without MAP_FIXED replaces no other mapping.
                let start = unsafe { mmap(null, bytes, access, MapFlags::SHARED, &memfd, 0) };
                file = Some(memfd);
                start.ok()? as usize
            }
            Kind::Huge => {
                let flags = MapFlags::PRIVATE | MapFlags::HUGETLB | MapFlags::HUGE_2MB;
                // SAFETY: as above.
                unsafe { mmap_anonymous(null, bytes, access, flags) }.ok()? as usize
            }
            Kind::Small | Kind::Transparent | Kind::Native => {
                // SAFETY: as above.
                let start =
                    unsafe { mmap_anonymous(null, bytes + HUGE, access, MapFlags::PRIVATE) };
                (start.ok()? as usize).next_multiple_of(HUGE)
            }
        };
        let advice = match kind {
            Kind::Transparent => Advice::LinuxHugepage,
            _ => Advice::LinuxNoHugepage,
        };
        if kind != Kind::Huge {
            let at = std::ptr::with_exposed_provenance_mut(start);
            // SAFETY: the memory is new, and nobody relies on how it is mapped.
            let advised = unsafe { madvise(at, bytes, advice) };
            // A kernel without transparent huge pages refuses both.
            if let (Err(error), Kind::Transparent) = (advised, kind) {
                eprintln!("no transparent huge pages: {error}");
            }
        }
        let uffd = Userfaultfd::open(Features::from_bits(features)).unwrap();
        let range = UserRange {
            start: start as u64,
            bytes: bytes as u64,
        };
        let mode = match kind {
            Kind::Minor => Mode::Minor,
            _ => Mode::Missing,
        };
        // SAFETY: the memory is new, belongs to this value, and stays mapped; no code relies on zeroes.
        unsafe { uffd.register(range, mode) }.unwrap();
        let units = bytes / kind.page_bytes();
        Some(Self {
            uffd,
            file,
            kind,
            start,
            pages,
            states: (0..units).map(|_| AtomicU8::new(IMAGE)).collect(),
        })
    }

    pub fn address(&self) -> u64 {
        self.start as u64
    }

    pub fn pages(&self) -> usize {
        self.pages
    }

    /// Units that are discarded as a whole.
    pub fn units(&self) -> usize {
        self.states.len()
    }

    /// Pages of 4 KiB in a unit.
    pub fn unit_pages(&self) -> usize {
        self.kind.page_bytes() / PAGE
    }

    fn word(&self, page: usize, index: usize) -> *mut u64 {
        assert!(page < self.pages && index < PAGE / 8);
        std::ptr::with_exposed_provenance_mut(self.start + page * PAGE + index * 8)
    }

    fn read(&self, page: usize, index: usize) -> u64 {
        // SAFETY: the word lies in this mapping, which stays; other threads and the kernel may write to it,
        // and no reference points into it.
        unsafe { self.word(page, index).read_volatile() }
    }

    /// Reads a page that nobody writes to.
    pub fn check(&self, page: usize) -> Result<(), Wrong> {
        let state = self.states.get(page / self.unit_pages()).unwrap();
        let before = state.load(Ordering::SeqCst);
        let words: Vec<u64> = (0..PAGE / 8).map(|index| self.read(page, index)).collect();
        let after = state.load(Ordering::SeqCst);
        for (index, &found) in words.iter().enumerate() {
            let image = image_word(page, index);
            let (is_right, wanted) = match (before, after) {
                // Whatever was discarded before never has the image's content again.
                (ZERO, _) => (found == 0, "0: it was discarded"),
                (_, IMAGE) => (found == image, "the image's content"),
                _ => (found == 0 || found == image, "the image's content or 0"),
            };
            if !is_right {
                return Err(Wrong {
                    page,
                    index,
                    found,
                    wanted,
                });
            }
        }
        Ok(())
    }

    /// Reads a page that only the caller writes to: `stamp` in every word.
    pub fn check_stamp(&self, page: usize, stamp: Stamp) -> Result<(), Wrong> {
        for index in 0..PAGE / 8 {
            let found = self.read(page, index);
            let (right, wanted) = match stamp {
                Stamp::Image => (image_word(page, index), "the image's content"),
                Stamp::Zero => (0, "0: it was discarded"),
                Stamp::Written(word) => (word, "what was written"),
            };
            if found != right {
                return Err(Wrong {
                    page,
                    index,
                    found,
                    wanted,
                });
            }
        }
        Ok(())
    }

    pub fn write(&self, page: usize, stamp: u64) {
        for index in 0..PAGE / 8 {
            // SAFETY: as in `read`; only the caller writes to this page.
            unsafe { self.word(page, index).write_volatile(stamp) };
        }
    }

    /// Gives up a unit that nobody writes to. False if another thread is at it.
    pub fn discard_shared(&self, unit: usize) -> bool {
        let state = self.states.get(unit).unwrap();
        let order = Ordering::SeqCst;
        if state
            .compare_exchange(IMAGE, DISCARDING, order, order)
            .is_err()
            && state.load(order) != ZERO
        {
            return false;
        }
        self.discard(unit);
        state.store(ZERO, order);
        true
    }

    /// Gives up a unit, as a balloon does; in a memfd, by a hole.
    pub fn discard(&self, unit: usize) {
        let bytes = self.kind.page_bytes();
        let at = std::ptr::with_exposed_provenance_mut(self.start + unit * bytes);
        let advice = match self.kind {
            Kind::Minor => Advice::LinuxRemove,
            _ => Advice::LinuxDontNeed,
        };
        // SAFETY: the unit lies in this mapping, and its users expect this.
        unsafe { madvise(at, bytes, advice) }.unwrap();
    }

    /// Firecracker's message: the memory, at the start of the image.
    pub fn message(&self) -> String {
        format!(
            r#"[{{"base_host_virt_addr":{},"size":{},"offset":0,"page_size":{}}}]"#,
            self.start,
            self.pages * PAGE,
            self.kind.page_bytes(),
        )
    }

    /// The memfd that the native protocol is told of.
    pub fn file(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
        self.file.as_ref().map(AsFd::as_fd)
    }
}

/// The content of a page that one thread has for itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stamp {
    Image,
    Zero,
    Written(u64),
}
