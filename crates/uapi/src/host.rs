//! The memory that this host can still provide, and the size of its pages. A check before guest memory
//! is created gives a clear error; without it, the kernel's OOM killer or a later SIGBUS would report the
//! shortage.

use std::fs;
use std::path::PathBuf;

/// The hugetlb pool of one page size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HugepagePool {
    /// The size of this pool's pages, in bytes.
    pub page_bytes: u64,
    /// Pages in the pool.
    pub total: u64,
    /// Pages that are neither in use nor reserved by a mapping.
    pub free: u64,
    /// The file that sets the number of pages in the pool.
    pub setting: PathBuf,
}

impl HugepagePool {
    /// Reads the state of the pool with pages of `page_bytes` bytes. `None` if the kernel has no such
    /// pool (it was built without hugetlbfs, or the CPU lacks that page size).
    pub fn read(page_bytes: u64) -> Option<Self> {
        let kib = page_bytes >> 10;
        let pool = PathBuf::from(format!("/sys/kernel/mm/hugepages/hugepages-{kib}kB"));
        let count = |file: &str| -> Option<u64> {
            fs::read_to_string(pool.join(file))
                .ok()?
                .trim()
                .parse()
                .ok()
        };
        let (total, free, promised) = (
            count("nr_hugepages")?,
            count("free_hugepages")?,
            count("resv_hugepages")?,
        );
        let setting = pool.join("nr_hugepages");
        Some(Self {
            page_bytes,
            total,
            free: free.saturating_sub(promised),
            setting,
        })
    }
}

/// The kernel's pages are not 4 KiB each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "this kernel's pages are {bytes} bytes each; Pagetide needs {PAGE_BYTES} (on arm64: CONFIG_ARM64_4K_PAGES)"
)]
pub struct PageSizeError {
    /// The size of this kernel's pages.
    pub bytes: usize,
}

/// The smallest page of guest memory.
const PAGE_BYTES: usize = 4096;

/// Checks that this kernel's pages are 4 KiB each. arm64 kernels with pages of 16 or 64 KiB exist.
///
/// # Errors
/// [`PageSizeError`] has the size of this kernel's pages.
pub fn check_page_size() -> Result<(), PageSizeError> {
    checked_page_size(rustix::param::page_size())
}

fn checked_page_size(bytes: usize) -> Result<(), PageSizeError> {
    match bytes {
        PAGE_BYTES => Ok(()),
        _ => Err(PageSizeError { bytes }),
    }
}

/// Bytes of ordinary memory that the host can provide without evicting other programs: `MemAvailable`
/// plus `SwapFree` of `/proc/meminfo`. `None` if the file has no such figures.
pub fn available_bytes() -> Option<u64> {
    parse_meminfo(&fs::read_to_string("/proc/meminfo").ok()?)
}

fn parse_meminfo(text: &str) -> Option<u64> {
    let kib = |name: &str| -> Option<u64> {
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        line.trim().strip_suffix("kB")?.trim().parse().ok()
    };
    kib("MemAvailable")?
        .checked_add(kib("SwapFree").unwrap_or(0))?
        .checked_mul(1 << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_is_read_in_bytes() {
        let text = "MemTotal:  100 kB\nMemAvailable:     40 kB\nSwapFree:   2 kB\n";
        assert_eq!(parse_meminfo(text), Some(42 << 10));
        assert_eq!(parse_meminfo("MemAvailable: 1 kB\n"), Some(1 << 10));
        assert_eq!(parse_meminfo("MemAvailable: x kB\n"), None);
        assert_eq!(parse_meminfo(""), None);
    }

    #[test]
    fn pages_of_another_size_are_refused() {
        assert_eq!(check_page_size(), Ok(()));
        let error = checked_page_size(1 << 16).unwrap_err();
        assert_eq!(error, PageSizeError { bytes: 65536 });
        assert!(
            error
                .to_string()
                .contains("65536 bytes each; Pagetide needs 4096"),
            "{error}"
        );
    }

    #[test]
    fn this_host_says_how_much_it_has() {
        assert!(available_bytes().unwrap() > 0);
        assert_eq!(HugepagePool::read(12345), None);
    }
}
