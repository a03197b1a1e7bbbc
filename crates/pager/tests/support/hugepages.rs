//! Huge pages for the length of a test.

use std::fs::{self, File, OpenOptions};

use rustix::fs::{FlockOperation, flock};

const POOL: &str = "/proc/sys/vm/nr_hugepages";

/// So many more 2 MiB pages in the host's pool, until this is dropped. If the host has no room or
/// this process no right, there are fewer, and regions that need them are not to be had.
///
/// One test at a time has some, in whatever process.
pub struct HugePages {
    before: Option<u64>,
    _lock: Option<File>,
}

impl HugePages {
    pub fn reserve(pages: u64) -> Self {
        let path = std::env::temp_dir().join("pagetide-hugepages.lock");
        let lock = OpenOptions::new().create(true).append(true).open(path).ok();
        if let Some(lock) = &lock {
            flock(lock, FlockOperation::LockExclusive).unwrap();
        }
        let before = fs::read_to_string(POOL).ok();
        let before = before.and_then(|text| text.trim().parse::<u64>().ok());
        if let Some(before) = before {
            let _ = fs::write(POOL, (before + pages).to_string());
        }
        Self {
            before,
            _lock: lock,
        }
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            let _ = fs::write(POOL, before.to_string());
        }
    }
}
