//! Checks whether the host has enough memory for a region.

use pagetide_uapi::host::{HugepagePool, available_bytes};

use super::RegionError;
use crate::backing::Backing;

/// Refuses a region that the host cannot hold, before any resource is created.
pub(super) fn check_room(bytes: u64, backing: Backing) -> Result<(), RegionError> {
    if backing.is_hugetlb() {
        let page_size = backing.page_size();
        let pool = HugepagePool::read(page_size.bytes())
            .ok_or(RegionError::NoHugepagePool { page_size })?;
        let wanted = bytes >> page_size.shift();
        if pool.free < wanted {
            return Err(RegionError::HugepagesNotReserved {
                page_size,
                wanted,
                free: pool.free,
                setting: pool.setting,
            });
        }
    } else if let Some(available_bytes) = available_bytes()
        && bytes > available_bytes
    {
        return Err(RegionError::DoesNotFit {
            bytes,
            backing,
            available_bytes,
        });
    }
    Ok(())
}
