//! Page tables for guests without firmware: an identity mapping of some gigabytes by 2 MiB pages.
//!
//! Accessed and dirty bits are set from the start, so that the processor's page walks only read the
//! tables. A walk that wrote them would add a cost to the first touch of every 2 MiB, which has nothing to
//! do with the memory under test.

use std::ops::Range;

const PAGE: u64 = 4096;
const GIB: u64 = 1 << 30;
const ENTRIES: u64 = 512;
/// Identity mapping ends at 2^47, where addresses stop being canonical.
const MOST_GIGABYTES: u64 = 1 << (47 - 30);

const PRESENT: u64 = 1 << 0;
const WRITABLE: u64 = 1 << 1;
const ACCESSED: u64 = 1 << 5;
const DIRTY: u64 = 1 << 6;
const LARGE: u64 = 1 << 7;

/// The size in bytes of the tables for these gigabytes (ascending, by number): one PML4, then pointer
/// tables, then page directories. None if one PML4 cannot map them.
#[must_use]
pub fn bytes(gigabytes: &[Range<u64>]) -> Option<u64> {
    let end = gigabytes.last().map_or(0, |last| last.end);
    let directories: u64 = gigabytes.iter().map(|range| range.end - range.start).sum();
    (end <= MOST_GIGABYTES).then(|| (1 + end.div_ceil(ENTRIES) + directories) * PAGE)
}

/// The tables for memory at `at`, as 64-bit entries. None as for [`bytes`].
#[must_use]
pub fn build(at: u64, gigabytes: &[Range<u64>]) -> Option<Vec<u64>> {
    let mut tables = vec![0; usize::try_from(bytes(gigabytes)? / 8).ok()?];
    let mut set = |table: u64, index: u64, entry: u64| {
        let place = usize::try_from(table * ENTRIES + index).ok();
        if let Some(slot) = place.and_then(|place| tables.get_mut(place)) {
            *slot = entry;
        }
    };
    let table_entry = |table: u64| (at + table * PAGE) | PRESENT | WRITABLE | ACCESSED;
    let end = gigabytes.last().map_or(0, |last| last.end);
    let pointer_tables = end.div_ceil(ENTRIES);
    for pointer_table in 0..pointer_tables {
        set(0, pointer_table, table_entry(1 + pointer_table));
    }
    let gigabytes = gigabytes.iter().cloned().flatten();
    for (directory, gigabyte) in (1 + pointer_tables..).zip(gigabytes) {
        let (table, index) = (1 + gigabyte / ENTRIES, gigabyte % ENTRIES);
        set(table, index, table_entry(directory));
        for index in 0..ENTRIES {
            let address = gigabyte * GIB + index * (GIB / ENTRIES);
            let flags = PRESENT | WRITABLE | ACCESSED | DIRTY | LARGE;
            set(directory, index, address | flags);
        }
    }
    Some(tables)
}

#[cfg(test)]
mod tests {
    use super::*;

    const AT: u64 = 0x1_0000;

    /// Walks the tables as the processor does.
    fn translate(tables: &[u64], address: u64) -> Option<u64> {
        let entry = |table: u64, index: u64| {
            let position = (table - AT) / 8 + index;
            let entry = tables[usize::try_from(position).expect("a test's tables are small")];
            (entry & PRESENT != 0).then_some(entry)
        };
        let frame = |entry: u64| entry & 0x000f_ffff_ffff_f000;
        let pointer_table = frame(entry(AT, (address >> 39) & 511)?);
        let directory = frame(entry(pointer_table, (address >> 30) & 511)?);
        let page = entry(directory, (address >> 21) & 511)?;
        assert_eq!(page & (LARGE | ACCESSED | DIRTY), LARGE | ACCESSED | DIRTY);
        Some((frame(page) & !(0x1f_ffff)) | (address & 0x1f_ffff))
    }

    #[test]
    fn mapped_addresses_are_identical_and_others_absent() {
        for ranges in [[0..3, 3..4], [0..1, 4..5], [0..1, 4..704]] {
            let tables = build(AT, &ranges).expect("fits");
            assert_eq!(tables.len() as u64 * 8, bytes(&ranges).expect("fits"));
            for range in &ranges {
                let (start, end) = (range.start * GIB, range.end * GIB);
                for address in [start, start + 0x1234, start + (end - start) / 2, end - 8] {
                    assert_eq!(translate(&tables, address), Some(address), "{address:#x}");
                }
            }
            assert_eq!(translate(&tables, ranges[1].end * GIB), None);
        }
        let tables = build(AT, &[0..1, 4..5]).expect("fits");
        assert_eq!(translate(&tables, 4 * GIB - 8), None);
    }

    #[test]
    fn addresses_that_are_not_canonical_are_refused() {
        assert!(bytes(&[0..1, 4..MOST_GIGABYTES]).is_some());
        assert_eq!(bytes(&[0..1, 4..MOST_GIGABYTES + 1]), None);
        assert_eq!(build(AT, &[0..1, 4..MOST_GIGABYTES + 1]), None);
    }
}
