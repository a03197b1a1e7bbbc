//! The page cache, which makes a second run look better than a first one.

use std::fs::File;
use std::io;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use pagetide_sources::Location;
use rustix::fs::{Advice, fadvise, fstatfs};
use rustix::io::{Errno, ReadWriteFlags, preadv2};

use super::TryArguments;

/// The type of the file system whose files are nowhere but in the page cache (statfs(2)).
const TMPFS: i64 = 0x0102_1994;
/// How long a file may take to leave the page cache.
const LONGEST_DROP: Duration = Duration::from_secs(2);

/// The page cache's part of an image that is a file.
pub(super) struct Cache<'a> {
    pub(super) path: Option<&'a Path>,
    is_kept: bool,
}

impl<'a> Cache<'a> {
    pub(super) fn of(arguments: &'a TryArguments) -> Self {
        let path = match &arguments.image {
            Location::Path(path) => Some(path.as_path()),
            Location::Url(_) => None,
        };
        Self {
            path,
            is_kept: arguments.warm,
        }
    }

    /// Takes the file out of the page cache, if that is wanted and possible. Returns whether it is out. A store's
    /// objects are in no page cache.
    pub(super) fn leave(&self) -> bool {
        let Some(path) = self.path else {
            return !self.is_kept;
        };
        if self.is_kept {
            return false;
        }
        let Ok(file) = File::open(path) else {
            return false;
        };
        if fstatfs(&file).is_ok_and(|system| system.f_type == TMPFS) {
            return false;
        }
        let begun = Instant::now();
        // Threads of a server that has ended may have it mapped for a moment.
        while begun.elapsed() < LONGEST_DROP {
            // What was not written yet stays.
            let _ = file.sync_data();
            let _ = fadvise(&file, 0, None, Advice::DontNeed);
            if is_out(&file) {
                return true;
            }
            thread::sleep(Duration::from_millis(1));
        }
        false
    }
}

/// Whether the first page of a file is not in the page cache.
fn is_out(file: &File) -> bool {
    let mut page = [0; 4096];
    let mut parts = [io::IoSliceMut::new(&mut page)];
    // Another error says that the file system does not tell.
    preadv2(file, &mut parts, 0, ReadWriteFlags::NOWAIT) == Err(Errno::AGAIN)
}
