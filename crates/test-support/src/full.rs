//! Memory files for which the kernel has no memory.

use std::os::fd::OwnedFd;

use rustix::fs::{Mode, OFlags, fstat, ftruncate, openat};
use rustix::io::pwrite;

use crate::huge::memory_file_system;

/// An empty memory file in a file system of its own, which another file fills: a page that is put into it is ENOMEM.
#[derive(Debug)]
pub struct FullMemoryFile {
    /// The file.
    pub memory: OwnedFd,
    filler: OwnedFd,
}

impl FullMemoryFile {
    /// A file of `bytes` bytes. `None`, with the reason printed, if this process may not mount a file system.
    ///
    /// # Panics
    ///
    /// If the files cannot be created.
    pub fn new(bytes: u64) -> Option<Self> {
        let place = match memory_file_system(&[("size", &bytes.to_string())]) {
            Ok(place) => place,
            Err(error) => {
                println!("SKIP: a tmpfs: {error}");
                return None;
            }
        };
        let create = |name| {
            let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC;
            openat(&place, name, flags, Mode::RUSR | Mode::WUSR).unwrap()
        };
        let full = Self {
            memory: create("memory"),
            filler: create("filler"),
        };
        ftruncate(&full.memory, bytes).unwrap();
        full.take_room();
        Some(full)
    }

    /// Takes the room that is left.
    ///
    /// # Panics
    ///
    /// If the other file's length is unknown.
    pub fn take_room(&self) {
        let end = || u64::try_from(fstat(&self.filler).unwrap().st_size).unwrap();
        while pwrite(&self.filler, &[1; 4096], end()).is_ok_and(|bytes| bytes > 0) {}
    }

    /// Makes room for all of the file.
    ///
    /// # Panics
    ///
    /// If the other file cannot be truncated.
    pub fn make_room(&self) {
        ftruncate(&self.filler, 0).unwrap();
    }
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;

    use super::*;

    #[test]
    fn there_is_room_when_it_is_made() {
        let Some(full) = FullMemoryFile::new(4 << 12) else {
            return;
        };
        let write = || pwrite(&full.memory, &[1], 0);
        assert_eq!(write(), Err(Errno::NOSPC));
        full.make_room();
        assert_eq!(write(), Ok(1));
        full.take_room();
        assert_eq!(pwrite(&full.memory, &[1], 1 << 12), Err(Errno::NOSPC));
    }
}
