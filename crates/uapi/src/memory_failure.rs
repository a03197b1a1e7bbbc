//! The kernel's support for memory with uncorrected errors (UE).
//!
//! Source: the kernel's `Documentation/mm/hwpoison.rst`; for the flag, the series' own documentation of
//! `memfd_create`.

use rustix::fs::{MemfdFlags, memfd_create};

use crate::generated::MFD_MF_KEEP_UE_MAPPED;

/// `MFD_MF_KEEP_UE_MAPPED` of `memfd_create` as a rustix flag: an uncorrected error costs the 4 KiB
/// that contain it; the file's other memory is unaffected and stays mapped.
pub const KEEP_UE_MAPPED: MemfdFlags = MemfdFlags::from_bits_retain(MFD_MF_KEEP_UE_MAPPED);

/// Whether the running kernel supports [`MFD_MF_KEEP_UE_MAPPED`] for hugetlb memory with pages of
/// `hugetlb_page_bytes` bytes, or for shmem (`None`). Creates an empty file and drops it, which needs
/// no huge page.
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
