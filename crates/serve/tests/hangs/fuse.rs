//! A file system of this process with one file, of which a close never ends: the few messages of FUSE that this takes.
#![allow(dead_code, reason = "each test binary uses a part of this")]

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

// Of linux/fuse.h.
const LOOKUP: u32 = 1;
const FORGET: u32 = 2;
const GETATTR: u32 = 3;
const OPEN: u32 = 14;
const READ: u32 = 15;
const WRITE: u32 = 16;
const FLUSH: u32 = 25;
const INIT: u32 = 26;
const BATCH_FORGET: u32 = 42;

/// Of `fuse_init_out`: what is written is written back later, and by the last close at the latest.
const WRITEBACK_CACHE: u32 = 1 << 16;

/// The node of the file; that of the root is 1.
const FILE: u64 = 2;

/// Which close never ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hangs {
    /// Each close of a descriptor.
    EachClose,
    /// That of the file's last descriptor, if the file was written to by a mapping.
    LastClose,
}

/// Another opened file of the same.
pub(crate) fn opened_again(file: &File) -> File {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    File::options().read(true).write(true).open(path).unwrap()
}

/// The mount. While it is there, whoever closes the file sleeps.
pub(crate) struct Fuse {
    /// The opened file, until it was given away.
    file: Option<File>,
    /// The page of the file that was written to. To unmap it writes back, too.
    mapped: Option<usize>,
    closes: Arc<AtomicUsize>,
    end: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Fuse {
    /// Mounts it; prints the reason if that is not possible here.
    pub(crate) fn mount(hangs: Hangs) -> Option<Self> {
        let device = match File::options().read(true).write(true).open("/dev/fuse") {
            Ok(device) => device,
            Err(error) => {
                println!("SKIP: /dev/fuse: {error}");
                return None;
            }
        };
        let place = tempfile::tempdir().unwrap();
        let options = format!(
            "fd={},rootmode=40000,user_id=0,group_id=0\0",
            device.as_raw_fd()
        );
        let options = std::ffi::CStr::from_bytes_with_nul(options.as_bytes()).unwrap();
        let flags = MountFlags::NOSUID | MountFlags::NODEV;
        if let Err(errno) = mount("test", place.path(), "fuse", flags, Some(options)) {
            println!("SKIP: a FUSE file system cannot be mounted: {errno}");
            return None;
        }
        let closes: Arc<AtomicUsize> = Arc::default();
        let end = Arc::new(eventfd(0, EventfdFlags::CLOEXEC).unwrap());
        let (counted, ending) = (Arc::clone(&closes), Arc::clone(&end));
        let thread = thread::spawn(move || serve(&device, hangs, &ending, &counted));
        let path = place.path().join("file");
        let file = File::options().read(true).write(true).open(path).unwrap();
        // It lives as long as its file.
        unmount(place.path(), UnmountFlags::DETACH).unwrap();
        Some(Self {
            file: Some(file),
            mapped: None,
            closes,
            end,
            thread: Some(thread),
        })
    }

    pub(crate) fn file(&self) -> &File {
        self.file.as_ref().unwrap()
    }

    /// Has `send` send the file, closes it here, and writes to it by a mapping of its own: the last close is the receiver's,
    /// and waits until that is written back.
    pub(crate) fn give_away(&mut self, send: impl FnOnce(&File)) {
        let file = self.file.take().unwrap();
        let (unused, bytes) = (std::ptr::null_mut(), 4096);
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let other = opened_again(&file);
        // SAFETY: mmap requires that the memory at a fixed address is unused: the kernel chooses it.
        let mapped = unsafe { mmap(unused, bytes, protection, MapFlags::SHARED, &other, 0) };
        let mapped = mapped.unwrap();
        send(&file);
        // Nothing was written yet: this waits for nothing.
        drop((file, other));
        // SAFETY: the page is mapped for writing, and only here.
        unsafe { mapped.cast::<u8>().write_volatile(1) };
        self.mapped = Some(mapped.expose_provenance());
    }

    /// How many have begun to close it, and sleep.
    pub(crate) fn closes(&self) -> usize {
        self.closes.load(Ordering::Acquire)
    }

    /// Ends the file system: whoever sleeps wakes up.
    pub(crate) fn end(&mut self) {
        rustix::io::write(&*self.end, &1_u64.to_ne_bytes()).unwrap();
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
        if let Some(address) = self.mapped.take() {
            let mapped = std::ptr::with_exposed_provenance_mut(address);
            // SAFETY: munmap requires that nothing uses the memory any more: give_away() has written it, and nobody else knows it.
            unsafe { munmap(mapped, 4096).unwrap() };
        }
    }
}

impl Drop for Fuse {
    fn drop(&mut self) {
        // Before the file is closed.
        self.end();
    }
}

fn serve(device: &File, hangs: Hangs, end: &OwnedFd, closes: &AtomicUsize) {
    let mut request = vec![0; 1 << 20];
    loop {
        let mut polled = [
            PollFd::new(device, PollFlags::IN),
            PollFd::new(end, PollFlags::IN),
        ];
        let _ = poll(&mut polled, None);
        if !polled[1].revents().is_empty() {
            return;
        }
        let Ok(bytes) = rustix::io::read(device, &mut request[..]) else {
            return;
        };
        let word = |at: usize| u32::from_ne_bytes(request[at..at + 4].try_into().unwrap());
        assert!(bytes >= 40);
        let (opcode, unique) = (word(4), &request[8..16]);
        let answer = match opcode {
            FORGET | BATCH_FORGET => continue,
            FLUSH if hangs == Hangs::EachClose => {
                closes.fetch_add(1, Ordering::AcqRel);
                continue;
            }
            WRITE => {
                closes.fetch_add(1, Ordering::AcqRel);
                continue;
            }
            INIT => Ok(init(hangs)),
            READ => Ok(vec![0; 4096]),
            LOOKUP => Ok([numbers(&[FILE, 0, 0, 0, 0]), attributes(FILE)].concat()),
            GETATTR => {
                let node = u64::from_ne_bytes(request[16..24].try_into().unwrap());
                Ok([numbers(&[0, 0]), attributes(node)].concat())
            }
            OPEN => Ok(numbers(&[1, 0])),
            _ => Err(libc::ENOSYS),
        };
        let (error, body) = match answer {
            Ok(body) => (0, body),
            Err(errno) => (-errno, Vec::new()),
        };
        let length = u32::try_from(16 + body.len()).unwrap();
        let head = [length.to_ne_bytes(), error.to_ne_bytes()].concat();
        let text = [&head[..], unique, &body[..]].concat();
        // Fails if whoever asked was killed meanwhile.
        let _ = rustix::io::write(device, &text);
    }
}

fn numbers(numbers: &[u64]) -> Vec<u8> {
    numbers.iter().flat_map(|n| n.to_ne_bytes()).collect()
}

/// `fuse_init_out`: version 7.31, and nothing that is optional but what is asked for.
fn init(hangs: Hangs) -> Vec<u8> {
    let flags = match hangs {
        Hangs::EachClose => 0,
        Hangs::LastClose => WRITEBACK_CACHE,
    };
    let mut text = Vec::new();
    for word in [7_u32, 31, 0, flags, 0, 1 << 16, 1] {
        text.extend(word.to_ne_bytes());
    }
    text.resize(64, 0);
    text
}

/// `fuse_attr`: the file has one page.
fn attributes(node: u64) -> Vec<u8> {
    let (mode, bytes) = match node {
        FILE => (0o100_644, 4096),
        _ => (0o040_755, 0),
    };
    let mut text = numbers(&[node, bytes, 0, 0, 0, 0]);
    for word in [0_u32, 0, 0, mode, 1, 0, 0, 0, 4096, 0] {
        text.extend(word.to_ne_bytes());
    }
    text
}
