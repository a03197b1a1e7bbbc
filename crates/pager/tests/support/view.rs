//! Mappings of one memory file, as of a VMM and of other processes that share its memory.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use pagetide_memory::{HostAddress, HostRange};
use pagetide_pager::Mode;
use pagetide_uapi::userfaultfd::{Features, UserRange, Userfaultfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous};

use super::{PAGE, within_patience};

/// An empty memfd.
pub fn memfd(bytes: u64) -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = memfd_create("view", flags).unwrap();
    ftruncate(&file, bytes).unwrap();
    file
}

fn word_at(address: usize) -> u64 {
    // SAFETY: all mappings of this module stay for the life of the process.
    unsafe { std::ptr::with_exposed_provenance::<u64>(address).read_volatile() }
}

fn populate_at(address: usize) -> rustix::io::Result<()> {
    let at = std::ptr::with_exposed_provenance_mut(address);
    // SAFETY: changes no content.
    unsafe {
        madvise(
            at,
            usize::try_from(PAGE).unwrap(),
            Advice::LinuxPopulateRead,
        )
    }
}

// SAFETY: an address and a length; all access is volatile and by one word.
unsafe impl Send for View {}
// SAFETY: as above.
unsafe impl Sync for View {}

/// A shared mapping of a file. It stays for the life of the test program: a thread may sleep in it.
pub struct View {
    start: *mut u8,
    bytes: usize,
}

impl View {
    pub fn new(file: &OwnedFd, bytes: u64) -> Self {
        let view = Self::aligned(file, bytes, PAGE);
        view.advise(Advice::LinuxNoHugepage);
        view
    }

    /// As a VMM maps guest memory for huge pages.
    pub fn of_huge_pages(file: &OwnedFd, bytes: u64) -> Self {
        let view = Self::aligned(file, bytes, 2 << 20);
        view.advise(Advice::LinuxHugepage);
        view
    }

    fn aligned(file: &OwnedFd, bytes: u64, alignment: u64) -> Self {
        let (bytes, alignment) = (usize::try_from(bytes), usize::try_from(alignment));
        let (bytes, alignment) = (bytes.unwrap(), alignment.unwrap());
        let hint = std::ptr::null_mut();
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new reservation at an address that the kernel chooses.
        let room = unsafe { mmap_anonymous(hint, bytes + alignment, ProtFlags::empty(), flags) };
        let room = room.unwrap().cast::<u8>();
        let start = room.wrapping_add(room.addr().next_multiple_of(alignment) - room.addr());
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: replaces a part of the reservation.
        let mapped = unsafe { mmap(start.cast(), bytes, access, flags, file, 0) };
        let start = mapped.unwrap().cast();
        Self { start, bytes }
    }

    /// Private memory without a file.
    pub fn private(bytes: u64) -> Self {
        let bytes = usize::try_from(bytes).unwrap();
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // Little of it is touched: it may be larger than the machine's memory.
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let start = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, access, flags) };
        let start = start.unwrap().cast();
        Self { start, bytes }
    }

    fn advise(&self, advice: Advice) {
        // SAFETY: the advice changes no content. A kernel without huge pages refuses it.
        let _ = unsafe { madvise(self.start.cast(), self.bytes, advice) };
    }

    pub fn range(&self) -> HostRange {
        HostRange::new(HostAddress(self.start.expose_provenance()), self.bytes).unwrap()
    }

    /// Registers it with a new userfaultfd.
    pub fn register(&self, mode: Mode) -> Arc<Userfaultfd> {
        self.register_with(mode, Features::NONE)
    }

    /// The same, with `events`.
    pub fn register_with(&self, mode: Mode, events: Features) -> Arc<Userfaultfd> {
        let wanted = Features::MISSING_SHMEM | Features::MINOR_SHMEM | Features::POISON;
        let uffd = Userfaultfd::open(wanted | events).unwrap();
        // SAFETY: the mapping is never removed, and no code relies on its zeroes.
        unsafe { uffd.register(UserRange::from(self.range()), mode) }.unwrap();
        Arc::new(uffd)
    }

    /// The same for a VMM that tracks writes; `None`, with the reason printed, where the kernel cannot.
    pub fn register_protected(&self, mode: Mode, events: Features) -> Option<Arc<Userfaultfd>> {
        let protection = Features::WRITE_PROTECT | Features::WRITE_PROTECT_FILES;
        let wanted = Features::MISSING_SHMEM | Features::MINOR_SHMEM | Features::POISON;
        let uffd = match Userfaultfd::open(wanted | protection | events) {
            Ok(uffd) => uffd,
            Err(error) => {
                println!("SKIP: {error}");
                return None;
            }
        };
        // SAFETY: as above.
        unsafe { uffd.register_with_protection(UserRange::from(self.range()), mode) }.unwrap();
        Some(Arc::new(uffd))
    }

    fn at(&self, page: u64) -> usize {
        let offset = usize::try_from(page * PAGE).unwrap();
        self.start.wrapping_add(offset).expose_provenance()
    }

    /// Reads the first word of a page, on a thread of its own, which may fault.
    pub fn read(&self, page: u64) -> u64 {
        let at = self.at(page);
        within_patience("a read", move || word_at(at))
    }

    /// The second word of a page.
    pub fn read_second(&self, page: u64) -> u64 {
        let at = self.at(page) + 8;
        within_patience("a read", move || word_at(at))
    }

    /// The first word of a page, read on this thread.
    pub fn read_here(&self, page: u64) -> u64 {
        word_at(self.at(page))
    }

    /// Writes the first word of a page on this thread.
    pub fn write_here(&self, page: u64, value: u64) {
        let at = std::ptr::with_exposed_provenance_mut::<u64>(self.at(page));
        // SAFETY: all mappings of this module stay for the life of the process.
        unsafe { at.write_volatile(value) };
    }

    /// Has the kernel read a page as an access would, which may fault.
    pub fn populate(&self, page: u64) -> rustix::io::Result<()> {
        let at = self.at(page);
        within_patience("a read by the kernel", move || populate_at(at))
    }

    /// The same on this thread. If the test fails, it is an error, and no signal that hides the cause.
    pub fn populate_here(&self, page: u64) -> rustix::io::Result<()> {
        populate_at(self.at(page))
    }

    /// Whether an access to a page fails as one to lost memory does.
    pub fn is_lost(&self, page: u64) -> bool {
        match self.populate(page) {
            Ok(()) => false,
            Err(rustix::io::Errno::HWPOISON) => true,
            Err(errno) => panic!("{errno}"),
        }
    }

    /// Gives `count` pages up by madvise, on a thread of its own: with events, it waits until they were read.
    pub fn drop_pages(&self, first: u64, count: u64, advice: Advice) {
        let (at, bytes) = (self.at(first), usize::try_from(count * PAGE).unwrap());
        within_patience("madvise", move || {
            let at = std::ptr::with_exposed_provenance_mut(at);
            // SAFETY: the test's own memory, whose content it drops on purpose.
            unsafe { madvise(at, bytes, advice) }.unwrap();
        });
    }

    /// Writes the first word of a page in the same way.
    pub fn write(&self, page: u64, value: u64) {
        let at = self.at(page);
        within_patience("a write", move || {
            // SAFETY: as above.
            unsafe { std::ptr::with_exposed_provenance_mut::<u64>(at).write_volatile(value) };
        });
    }

    /// Asks the kernel to make a huge page of what is there.
    pub fn collapse(&self) -> std::io::Result<()> {
        // SAFETY: changes no content.
        match unsafe { libc::madvise(self.start.cast(), self.bytes, libc::MADV_COLLAPSE) } {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        }
    }
}
