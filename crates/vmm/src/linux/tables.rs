//! The page tables with which the kernel is entered: the first 4 GiB, identity, 2 MiB pages. The
//! boot protocol asks for the kernel, its parameters and its command line; Linux makes tables of
//! its own at once.

use super::layout::TABLES;

const PAGE: u64 = 4096;
const ENTRIES: u64 = 512;
/// The same, as a length.
const TABLE_WORDS: usize = 512;
const DIRECTORIES: u64 = 4;
const LARGE_PAGE: u64 = 2 << 20;

const PRESENT: u64 = 1 << 0;
const WRITABLE: u64 = 1 << 1;
const LARGE: u64 = 1 << 7;

/// The tables as they lie in memory at [`TABLES`], as 64-bit entries: the top one, its only
/// pointer table, the directories.
pub(super) fn build() -> Vec<u64> {
    let table = |number: u64| (TABLES + number * PAGE) | PRESENT | WRITABLE;
    let of = |used: Vec<u64>| {
        let mut entries = used;
        entries.resize(TABLE_WORDS, 0);
        entries
    };
    let mut tables = of(vec![table(1)]);
    tables.extend(of((2..2 + DIRECTORIES).map(table).collect()));
    tables.extend(
        (0..DIRECTORIES * ENTRIES).map(|page| (page * LARGE_PAGE) | PRESENT | WRITABLE | LARGE),
    );
    tables
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linux::layout::COMMAND_LINE;

    /// Walks the tables as the processor would.
    fn translate(tables: &[u64], address: u64) -> Option<u64> {
        let entry = |table: u64, shift: u32| {
            let index = (table - TABLES) / 8 + ((address >> shift) & 511);
            let entry = tables[usize::try_from(index).unwrap()];
            (entry & PRESENT != 0).then_some(entry & 0x000f_ffff_ffff_f000)
        };
        let directory = entry(entry(TABLES, 39)?, 30)?;
        let page = entry(directory, 21)?;
        Some(page | (address & (LARGE_PAGE - 1)))
    }

    #[test]
    fn four_gibibytes_are_mapped_to_themselves() {
        let tables = build();
        assert!(TABLES + 8 * tables.len() as u64 <= COMMAND_LINE);
        for address in [0, 0x7000, 0x100_0000, (3 << 30) - 1, (4 << 30) - 8] {
            assert_eq!(translate(&tables, address), Some(address), "{address:#x}");
        }
        for address in [4 << 30, 1 << 39, 1 << 46] {
            assert_eq!(translate(&tables, address), None, "{address:#x}");
        }
    }
}
