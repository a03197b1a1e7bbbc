//! The guest's page tables: identity, 2 MiB pages, for low memory and the data region.
//!
//! Accessed and dirty bits are set from the start, so that the processor's page walks only read
//! the tables: a walk that wrote them would cost the first touch of every 2 MiB something that
//! has nothing to do with the memory under test.

use crate::layout::{DATA_GPA, LOW_LIMIT, PAGE, TABLES};

const GIB: u64 = 1 << 30;
/// What one PML4 entry covers.
const HALF_TIB: u64 = 512 * GIB;
const ENTRIES: u64 = 512;

const PRESENT: u64 = 1 << 0;
const WRITABLE: u64 = 1 << 1;
const ACCESSED: u64 = 1 << 5;
const DIRTY: u64 = 1 << 6;
const LARGE: u64 = 1 << 7;

/// What is mapped: low memory's gigabyte and the gigabytes of the data region.
fn gigabytes(data_bytes: u64) -> impl Iterator<Item = u64> {
    let first = DATA_GPA / GIB;
    (0..LOW_LIMIT / GIB).chain(first..first + data_bytes.div_ceil(GIB))
}

/// How many bytes the tables for a data region take; None if one PML4 cannot hold them (identity
/// mapping ends at 2^47, where addresses stop being canonical).
pub(crate) fn bytes(data_bytes: u64) -> Option<u64> {
    let end = DATA_GPA
        .checked_add(data_bytes)
        .filter(|end| *end <= 1 << 47)?;
    let directories = LOW_LIMIT / GIB + data_bytes.div_ceil(GIB);
    Some((1 + end.div_ceil(HALF_TIB) + directories) * PAGE)
}

/// The tables as they lie in memory at [`TABLES`], as 64-bit entries.
pub(crate) fn build(data_bytes: u64) -> Option<Vec<u64>> {
    let mut tables = vec![0; usize::try_from(bytes(data_bytes)? / 8).ok()?];
    let mut set = |table: u64, index: u64, entry: u64| {
        if let Some(slot) = usize::try_from(table * ENTRIES + index)
            .ok()
            .and_then(|position| tables.get_mut(position))
        {
            *slot = entry;
        }
    };
    let table_entry = |table: u64| (TABLES + table * PAGE) | PRESENT | WRITABLE | ACCESSED;
    let pointer_tables = (DATA_GPA + data_bytes).div_ceil(HALF_TIB);
    for pointer_table in 0..pointer_tables {
        set(0, pointer_table, table_entry(1 + pointer_table));
    }
    for (directory, gigabyte) in (1 + pointer_tables..).zip(gigabytes(data_bytes)) {
        set(
            1 + gigabyte / ENTRIES,
            gigabyte % ENTRIES,
            table_entry(directory),
        );
        for index in 0..ENTRIES {
            let address = gigabyte * GIB + index * (GIB / ENTRIES);
            set(
                directory,
                index,
                address | PRESENT | WRITABLE | ACCESSED | DIRTY | LARGE,
            );
        }
    }
    Some(tables)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Walks the tables as the processor would.
    fn translate(tables: &[u64], address: u64) -> Option<u64> {
        let entry = |table: u64, index: u64| {
            let position = (table - TABLES) / 8 + index;
            let entry = tables[usize::try_from(position).expect("a test's tables are small")];
            (entry & PRESENT != 0).then_some(entry)
        };
        let frame = |entry: u64| entry & 0x000f_ffff_ffff_f000;
        let pointer_table = frame(entry(TABLES, (address >> 39) & 511)?);
        let directory = frame(entry(pointer_table, (address >> 30) & 511)?);
        let page = entry(directory, (address >> 21) & 511)?;
        assert_eq!(page & (LARGE | ACCESSED | DIRTY), LARGE | ACCESSED | DIRTY);
        Some((frame(page) & !(0x1f_ffff)) | (address & 0x1f_ffff))
    }

    #[test]
    fn mapped_addresses_are_identical_and_others_absent() {
        for data_bytes in [4096, GIB, GIB + 4096, 700 * GIB] {
            let tables = build(data_bytes).expect("fits");
            assert_eq!(tables.len() as u64 * 8, bytes(data_bytes).expect("fits"));
            let last = DATA_GPA + data_bytes - 1;
            for address in [
                0,
                0x1234,
                LOW_LIMIT - 1,
                DATA_GPA,
                DATA_GPA + data_bytes / 2,
                last,
            ] {
                assert_eq!(translate(&tables, address), Some(address), "{address:#x}");
            }
            for address in [LOW_LIMIT, DATA_GPA - 1, last.next_multiple_of(GIB)] {
                assert_eq!(translate(&tables, address), None, "{address:#x}");
            }
        }
    }

    #[test]
    fn what_is_not_canonical_does_not_fit() {
        assert!(bytes((1 << 47) - DATA_GPA).is_some());
        assert_eq!(bytes((1 << 47) - DATA_GPA + 1), None);
        assert_eq!(bytes(u64::MAX), None);
    }
}
