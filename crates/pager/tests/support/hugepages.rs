//! Huge pages for the duration of a test.

use std::fs::{self, File, OpenOptions};

use rustix::fs::{FlockOperation, flock};

const POOL: &str = "/proc/sys/vm/nr_hugepages";

/// Adds 2 MiB pages to the host's pool until this value is dropped. If the host lacks memory or this
/// process permission, there are fewer, and regions that need them cannot be created.
///
/// One test at a time holds such pages, across all processes.
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
