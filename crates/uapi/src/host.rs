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

/// The size of the pages of this process's mapping at `address`, in bytes. `None` if nothing is mapped there.
///
/// # Errors
/// `/proc` is not mounted, or cannot be read.
pub fn mapping_page_bytes(address: u64) -> std::io::Result<Option<u64>> {
    let maps = fs::read_to_string("/proc/self/maps")?;
    let Some(mapping) = maps.lines().find(|line| covers(line, address)) else {
        return Ok(None);
    };
    // Only memory of hugetlbfs has larger pages: MAP_HUGETLB maps a file of this name, and a memfd has one with a
    // path of any name. The file below tells for certain, but counts the pages of each mapping first.
    if !mapping.contains("/") {
        return Ok(Some(PAGE_BYTES as u64));
    }
    let smaps = fs::read_to_string("/proc/self/smaps")?;
    Ok(page_bytes_in(&smaps, address))
}

/// Whether a line begins with a range of addresses that has this one.
fn covers(line: &str, address: u64) -> bool {
    let range = line.split_whitespace().next().unwrap_or_default();
    let parse = |text: &str| u64::from_str_radix(text, 16).ok();
    let bounds = range.split_once('-');
    let bounds = bounds.and_then(|(start, end)| Some(parse(start)?..parse(end)?));
    bounds.is_some_and(|bounds| bounds.contains(&address))
}

/// The page size of the mapping at `address` in a text like that of `/proc/self/smaps`.
fn page_bytes_in(smaps: &str, address: u64) -> Option<u64> {
    let lines = smaps.lines().skip_while(|line| !covers(line, address));
    let mut fields = lines.filter_map(|line| line.strip_prefix("KernelPageSize:"));
    let kib: u64 = fields
        .next()?
        .trim()
        .strip_suffix("kB")?
        .trim()
        .parse()
        .ok()?;
    kib.checked_mul(1 << 10)
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
    fn the_page_size_of_a_mapping_is_that_of_its_own_lines() {
        let text = "1000-2000 rw-p 00000000 00:00 0\nSize: 4 kB\nKernelPageSize:        4 kB\n\
                    200000-600000 rw-p 00000000 00:0f 7  /anon_hugepage (deleted)\n\
                    KernelPageSize:     2048 kB\n";
        assert_eq!(page_bytes_in(text, 0x1000), Some(4096));
        assert_eq!(page_bytes_in(text, 0x2000), None);
        assert_eq!(page_bytes_in(text, 0x20_0000), Some(2 << 20));
        assert_eq!(page_bytes_in(text, 0x5f_ffff), Some(2 << 20));
        assert_eq!(page_bytes_in(text, 0x60_0000), None);
        assert_eq!(page_bytes_in("", 0), None);
    }

    #[test]
    fn this_process_has_small_pages() {
        let here = 0_u64;
        let address = (&raw const here).addr() as u64;
        assert_eq!(mapping_page_bytes(address).unwrap(), Some(4096));
        assert_eq!(mapping_page_bytes(0).unwrap(), None);
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
