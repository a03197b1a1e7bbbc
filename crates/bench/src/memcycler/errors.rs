//! Where errors are made, and whether they can be made here at all.

use std::fs;

use pagetide_memory::{GuestAddress, PageSize};

use crate::prepare::PrepareError;

const PAGE: u64 = PageSize::Size4K.bytes();
const PIECE: u64 = PageSize::Size2M.bytes();
/// CAP_SYS_ADMIN in a mask of capabilities.
const SYS_ADMIN: u64 = 1 << 21;

/// The 4 KiB pages that get an error, by their gpas: one in each of `errors` of the `pieces` of 2 MiB
/// from `start` on, which are evenly apart; `seed` selects the page within each.
pub(super) fn places(
    start: GuestAddress,
    pieces: u64,
    errors: u64,
    seed: u64,
) -> Vec<GuestAddress> {
    let place = |error: u64| {
        let piece = error * pieces / errors.max(1);
        // Any page but always another one; the multiplier is that of Knuth's generator.
        let mixed = (seed ^ error).wrapping_mul(6_364_136_223_846_793_005) >> 33;
        let page = mixed % (PIECE / PAGE);
        GuestAddress(start.0 + piece * PIECE + page * PAGE)
    };
    (0..errors).map(place).collect()
}

/// Whether errors can be simulated here.
pub(super) fn check() -> Result<(), PrepareError> {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    if !may_simulate(&status) {
        return Err(PrepareError::NoSimulation {
            what: "this process lacks CAP_SYS_ADMIN; run it as root",
        });
    }
    match corrupted_bytes() {
        Some(_) => Ok(()),
        None => Err(PrepareError::NoSimulation {
            what: "this kernel lacks CONFIG_MEMORY_FAILURE",
        }),
    }
}

fn may_simulate(status: &str) -> bool {
    let mut lines = status.lines();
    let mask = lines.find_map(|line| line.strip_prefix("CapEff:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .is_some_and(|mask| mask & SYS_ADMIN != 0)
}

/// Bytes of memory that the kernel counts as corrupted; `None` if it does not count them.
pub(super) fn corrupted_bytes() -> Option<u64> {
    corrupted(&fs::read_to_string("/proc/meminfo").ok()?)
}

fn corrupted(meminfo: &str) -> Option<u64> {
    let mut lines = meminfo.lines();
    let kib = lines.find_map(|line| line.strip_prefix("HardwareCorrupted:"))?;
    let kib: u64 = kib.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_error_has_a_piece_of_its_own() {
        let start = GuestAddress(1 << 32);
        for (pieces, errors) in [(32, 8), (32, 32), (7, 3), (1, 1), (5, 0)] {
            let places = places(start, pieces, errors, 9);
            let mut hit: Vec<_> = places.iter().map(|gpa| (gpa.0 - start.0) / PIECE).collect();
            assert!(hit.iter().all(|piece| *piece < pieces), "{hit:?}");
            assert!(places.iter().all(|gpa| gpa.0.is_multiple_of(PAGE)));
            hit.dedup();
            assert_eq!(hit.len() as u64, errors);
        }
        assert_ne!(places(start, 8, 8, 1), places(start, 8, 8, 2));
    }

    #[test]
    fn what_the_kernel_says_is_read() {
        assert!(may_simulate("Name:\tx\nCapEff:\t000001ffffffffff\n"));
        assert!(!may_simulate("CapEff:\t0000000000000400\n") && !may_simulate(""));
        let meminfo = "MemFree: 1 kB\nHardwareCorrupted:    12 kB\n";
        assert_eq!(corrupted(meminfo), Some(12 << 10));
        assert_eq!(corrupted("MemFree: 1 kB\n"), None);
        assert_eq!(corrupted("HardwareCorrupted: x kB\n"), None);
    }
}
