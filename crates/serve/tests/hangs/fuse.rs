//! A file system of this process with one file, which never lets itself be closed: the few messages of FUSE that this
//! takes.
#![allow(dead_code, reason = "each test binary uses a part of this")]

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

// Of linux/fuse.h.
const LOOKUP: u32 = 1;
const FORGET: u32 = 2;
const GETATTR: u32 = 3;
const OPEN: u32 = 14;
const FLUSH: u32 = 25;
const INIT: u32 = 26;
const BATCH_FORGET: u32 = 42;

/// The node of the file; that of the root is 1.
const FILE: u64 = 2;

/// The mount. While it is there, whoever closes the file sleeps.
pub(crate) struct Fuse {
    /// An opened file, which this process must not close either.
    file: File,
    flushes: Arc<AtomicUsize>,
    end: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Fuse {
    /// Mounts it; prints the reason if that is not possible here.
    pub(crate) fn mount() -> Option<Self> {
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
        let flushes: Arc<AtomicUsize> = Arc::default();
        let end = Arc::new(eventfd(0, EventfdFlags::CLOEXEC).unwrap());
        let (counted, ending) = (Arc::clone(&flushes), Arc::clone(&end));
        let thread = thread::spawn(move || serve(&device, &ending, &counted));
        let file = File::open(place.path().join("file")).unwrap();
        // It lives as long as its file.
        unmount(place.path(), UnmountFlags::DETACH).unwrap();
        Some(Self {
            file,
            flushes,
            end,
            thread: Some(thread),
        })
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// How many have begun to close it.
    pub(crate) fn flushes(&self) -> usize {
        self.flushes.load(Ordering::Acquire)
    }

    /// Ends the file system: whoever sleeps wakes up.
    pub(crate) fn end(&mut self) {
        rustix::io::write(&*self.end, &1_u64.to_ne_bytes()).unwrap();
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

impl Drop for Fuse {
    fn drop(&mut self) {
        // Before the file is closed.
        self.end();
    }
}

fn serve(device: &File, end: &OwnedFd, flushes: &AtomicUsize) {
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
            FLUSH => {
                flushes.fetch_add(1, Ordering::AcqRel);
                continue;
            }
            INIT => Ok(init()),
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

/// `fuse_init_out`: version 7.31, and nothing that is optional.
fn init() -> Vec<u8> {
    let mut text = Vec::new();
    for word in [7_u32, 31, 0, 0, 0, 1 << 16, 1] {
        text.extend(word.to_ne_bytes());
    }
    text.resize(64, 0);
    text
}

/// `fuse_attr`.
fn attributes(node: u64) -> Vec<u8> {
    let mode = if node == FILE { 0o100_644 } else { 0o040_755 };
    let mut text = numbers(&[node, 0, 0, 0, 0, 0]);
    for word in [0_u32, 0, 0, mode, 1, 0, 0, 0, 4096, 0] {
        text.extend(word.to_ne_bytes());
    }
    text
}
