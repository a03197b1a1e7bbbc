//! A client that restores a guest as a VMM does, and touches its memory as the guest would.

use std::fs::File;
use std::io::{self, IoSlice, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use pagetide_uapi::userfaultfd::{Features, Mode, UserRange, Userfaultfd};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

pub(super) const PAGE: u64 = 4096;
const PAGE_BYTES: usize = 4096;

/// Guest memory in this process.
#[derive(Debug)]
pub(super) struct Memory {
    start: *mut u8,
    bytes: usize,
}

// SAFETY: an address and a length; each access is a volatile read of one word.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

/// What each touch has cost, and what it has read.
#[derive(Debug, Default)]
pub(super) struct Touches {
    pub(super) took: Vec<Duration>,
    pub(super) words: Vec<u64>,
    /// From the beginning of the restore.
    pub(super) first_after: Duration,
    pub(super) last_after: Duration,
}

impl Memory {
    /// Memory without content.
    pub(super) fn new(bytes: u64) -> io::Result<Self> {
        let bytes = length(bytes)?;
        let (access, flags) = (
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::PRIVATE | MapFlags::NORESERVE,
        );
        // SAFETY: mmap without MAP_FIXED replaces no memory in use.
        let start = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, access, flags) }?;
        Ok(Self {
            start: start.cast(),
            bytes,
        })
    }

    /// A private mapping of a file, as Firecracker's File backend has it.
    pub(super) fn map(file: &File, bytes: u64) -> io::Result<Self> {
        let bytes = length(bytes)?;
        let (access, flags) = (
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::PRIVATE | MapFlags::NORESERVE,
        );
        // SAFETY: as above.
        let start = unsafe { mmap(std::ptr::null_mut(), bytes, access, flags, file, 0) }?;
        Ok(Self {
            start: start.cast(),
            bytes,
        })
    }

    /// How many of its bytes are there now. None is touched for that.
    pub(super) fn present_bytes(&self) -> io::Result<u64> {
        let mut pages = vec![0; self.bytes / PAGE_BYTES];
        // SAFETY: mincore requires a mapped range that begins with a page, and as many bytes as the range has pages:
        // it reads page tables and touches no memory.
        let status = unsafe { libc::mincore(self.start.cast(), self.bytes, pages.as_mut_ptr()) };
        if status != 0 {
            return Err(io::Error::last_os_error());
        }
        let present = pages.iter().filter(|&&page| page & 1 != 0).count();
        Ok(present as u64 * PAGE)
    }

    /// All of it, to be filled by one thread.
    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: from_raw_parts_mut requires initialised memory that nothing else refers to: a mapping of this
        // value's own, and self is borrowed.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.bytes) }
    }

    /// Sends it to a server as Firecracker does. The userfaultfd serves this process's user mode, and needs no
    /// privilege.
    pub(super) fn connect(&self, socket: &Path) -> io::Result<UnixStream> {
        let uffd = Userfaultfd::open_for_user_mode(Features::NONE).map_err(io::Error::other)?;
        let range = UserRange {
            start: self.start.expose_provenance() as u64,
            bytes: self.bytes as u64,
        };
        // SAFETY: register requires that the range is mapped for as long as the userfaultfd is open, and that no code
        // relies on its zeroes: whoever drops self has ended the server before, and only `touch` reads the memory.
        unsafe { uffd.register(range, Mode::Missing) }.map_err(io::Error::other)?;
        let message = format!(
            r#"[{{"base_host_virt_addr":{},"size":{},"offset":0,"page_size":{PAGE},"page_size_kib":{PAGE}}}]"#,
            range.start, range.bytes
        );
        let stream = UnixStream::connect(socket)?;
        send(&stream, message.as_bytes(), uffd.as_fd())?;
        Ok(stream)
    }

    /// Reads the first word of each page, in this order. `begun` is when the restore began.
    pub(super) fn touch(&self, pages: &[u64], begun: Instant) -> Touches {
        let mut touches = Touches::default();
        touches.took.reserve_exact(pages.len());
        touches.words.reserve_exact(pages.len());
        for &page in pages {
            let before = Instant::now();
            touches.words.push(self.word(page));
            touches.took.push(before.elapsed());
            if touches.took.len() == 1 {
                touches.first_after = begun.elapsed();
            }
        }
        touches.last_after = begun.elapsed();
        touches
    }

    /// The first word of a page, which may wait for its content.
    fn word(&self, page: u64) -> u64 {
        let offset = usize::try_from(page * PAGE).unwrap_or(usize::MAX);
        assert!(offset < self.bytes, "a page of this memory");
        let at = self.start.wrapping_add(offset).cast::<u64>();
        // SAFETY: read_volatile requires an aligned address of mapped memory: the beginning of a page of the mapping.
        unsafe { at.read_volatile() }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: munmap requires that nobody uses the mapping any more: self is borrowed by whoever does. Fails only
        // for an invalid range.
        let _ = unsafe { munmap(self.start.cast(), self.bytes) };
    }
}

fn length(bytes: u64) -> io::Result<usize> {
    usize::try_from(bytes).map_err(io::Error::other)
}

/// Sends a message with a descriptor.
fn send(stream: &UnixStream, bytes: &[u8], descriptor: BorrowedFd<'_>) -> io::Result<()> {
    let descriptors = [descriptor];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
    let parts = [IoSlice::new(bytes)];
    let sent = sendmsg(stream, &parts, &mut ancillary, SendFlags::empty())?;
    let mut stream = stream;
    stream.write_all(bytes.get(sent..).unwrap_or_default())
}
