//! Addresses in the guest's physical memory.
//!
//! The first megabyte is that of a PC: Linux looks for its MP table there, and puts its processors'
//! start-up code there. What the VMM writes there is read during the boot only.

use std::ops::Range;

use pagetide_memory::{GuestAddress, GuestRange, RangeError};

/// The boot processor's descriptor table.
pub(super) const GDT: u64 = 0x500;
/// `struct boot_params`, the "zero page" of the boot protocol.
pub(super) const BOOT_PARAMS: u64 = 0x7000;
/// The page tables at the kernel's entry.
pub(super) const TABLES: u64 = 0x9000;
/// The gigabytes that these tables map: low memory and the interrupt controllers. The boot protocol asks for
/// the kernel, its parameters and its command line; Linux makes its own tables at once.
pub(super) const MAPPED_GIGABYTES: [Range<u64>; 2] = [0..3, 3..4];
/// The kernel's command line.
pub(super) const COMMAND_LINE: u64 = 0x2_0000;
/// The end of the memory in the first megabyte that Linux may use.
const LOWER_END: u64 = 0x9_f000;
/// The MP table, in the last 64 KiB below 1 MiB, where Linux looks for it.
pub(super) const MP_TABLE: u64 = 0xf_0000;
/// 1 MiB: kernels lie above.
pub(super) const UPPER_START: u64 = 0x10_0000;

/// Memory ends here, and continues at [`HIGH_START`]; the interrupt controllers are between them.
const LOW_LIMIT: u64 = 3 << 30;
const HIGH_START: u64 = 4 << 30;

/// The address of the processors' local interrupt controllers.
pub(super) const LOCAL_APIC: u32 = 0xfee0_0000;
/// The address of the devices' interrupt controller.
pub(super) const IO_APIC: u32 = 0xfec0_0000;

// Kinds of memory in the map for the kernel.
const E820_RAM: u32 = 1;
const E820_RESERVED: u32 = 2;

/// The guest's physical addresses that are memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RamLayout {
    bytes: u64,
}

impl RamLayout {
    /// `bytes` bytes of memory in all, at least 1 MiB.
    pub(super) fn new(bytes: u64) -> Self {
        Self { bytes }
    }

    /// Bytes of memory in all.
    pub(super) fn bytes(self) -> u64 {
        self.bytes
    }

    /// The bytes of memory below a gpa; None if there is no memory at the gpa.
    pub(super) fn offset_of(self, GuestAddress(gpa): GuestAddress) -> Option<u64> {
        let offset = match gpa.checked_sub(HIGH_START) {
            None => Some(gpa).filter(|gpa| *gpa < self.low_end()),
            Some(high) => self.low_end().checked_add(high),
        };
        offset.filter(|offset| *offset < self.bytes)
    }

    /// The end of the memory below the interrupt controllers, which holds everything that is loaded.
    pub(super) fn low_end(self) -> u64 {
        self.bytes.min(LOW_LIMIT)
    }

    /// The end of all memory; None past 2^64.
    pub(super) fn end(self) -> Option<u64> {
        match self.bytes - self.low_end() {
            0 => Some(self.low_end()),
            high => HIGH_START.checked_add(high),
        }
    }

    /// One or two ranges, ascending.
    pub(super) fn ranges(self) -> Result<Vec<GuestRange>, RangeError> {
        let high = self.bytes - self.low_end();
        let mut ranges = vec![GuestRange::new(GuestAddress(0), self.low_end())?];
        if high > 0 {
            ranges.push(GuestRange::new(GuestAddress(HIGH_START), high)?);
        }
        Ok(ranges)
    }

    /// The memory map for the kernel, as firmware would give it: ranges and their kinds.
    pub(super) fn e820(self) -> Vec<(Range<u64>, u32)> {
        let mut map = vec![
            (0..LOWER_END, E820_RAM),
            (LOWER_END..UPPER_START, E820_RESERVED),
            (UPPER_START..self.low_end(), E820_RAM),
        ];
        if let Some(end) = self.end().filter(|end| *end > HIGH_START) {
            map.push((HIGH_START..end, E820_RAM));
        }
        map
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_memory_lies_over_the_interrupt_controllers() {
        for (bytes, end) in [
            (64 << 20, 64 << 20),
            (3 << 30, 3 << 30),
            ((3 << 30) + 4096, (4 << 30) + 4096),
            (8 << 30, 9 << 30),
        ] {
            let layout = RamLayout::new(bytes);
            assert_eq!(layout.end(), Some(end));
            let ranges = layout.ranges().unwrap();
            assert_eq!(ranges.iter().map(|range| range.bytes()).sum::<u64>(), bytes);
            let mut below = 0;
            for range in &ranges {
                assert_eq!(layout.offset_of(range.start()), Some(below));
                below += range.bytes();
                assert_eq!(layout.offset_of(range.end()), None);
            }
            for address in [LOCAL_APIC, IO_APIC] {
                let address = GuestAddress(address.into());
                assert!(!ranges.iter().any(|range| range.contains(address)));
            }
        }
        assert_eq!(RamLayout::new(u64::MAX).end(), None);
    }

    #[test]
    fn the_tables_end_before_the_command_line() {
        let bytes = crate::page_tables::bytes(&MAPPED_GIGABYTES).unwrap();
        assert!(TABLES + bytes <= COMMAND_LINE);
    }

    #[test]
    fn the_kernels_map_is_all_memory_but_the_firmwares() {
        let layout = RamLayout::new(4 << 30);
        let map = layout.e820();
        for pair in map.windows(2) {
            assert!(pair[0].0.end <= pair[1].0.start, "{map:?}");
        }
        let usable = map.iter().filter(|(_, kind)| *kind == E820_RAM);
        let usable: u64 = usable.map(|(range, _)| range.end - range.start).sum();
        assert_eq!(usable, (4 << 30) - (UPPER_START - LOWER_END));
        let reserved = map.iter().find(|(_, kind)| *kind == E820_RESERVED);
        assert!(reserved.unwrap().0.contains(&MP_TABLE));
        assert_eq!(RamLayout::new(1 << 30).e820().len(), 3);
    }
}
