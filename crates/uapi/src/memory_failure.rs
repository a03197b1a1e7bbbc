//! What the kernel has for memory with uncorrected errors (UE).
//!
//! Source: the kernel's `Documentation/mm/hwpoison.rst` and, for the flag, the series' own
//! documentation of `memfd_create`.

use rustix::fs::{MemfdFlags, memfd_create};

use crate::generated::MFD_MF_KEEP_UE_MAPPED;

/// `MFD_MF_KEEP_UE_MAPPED` of `memfd_create`, as rustix wants it: an uncorrected error takes the
/// 4 KiB that have it and no other memory of the file, and nothing is unmapped.
pub const KEEP_UE_MAPPED: MemfdFlags = MemfdFlags::from_bits_retain(MFD_MF_KEEP_UE_MAPPED);

/// Whether the running kernel takes [`MFD_MF_KEEP_UE_MAPPED`] for hugetlb memory with pages of that
/// many bytes, or for shmem. Makes an empty file and drops it; no huge page is needed for that.
pub fn has_keep_ue_mapped(hugetlb_page_bytes: Option<u64>) -> bool {
    let kind = match hugetlb_page_bytes {
        None => MemfdFlags::empty(),
        Some(bytes) if bytes == 2 << 20 => MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB,
        Some(bytes) if bytes == 1 << 30 => MemfdFlags::HUGETLB | MemfdFlags::HUGE_1GB,
        Some(_) => return false,
    };
    let flags = MemfdFlags::CLOEXEC | KEEP_UE_MAPPED | kind;
    memfd_create("pagetide-probe", flags).is_ok()
}
