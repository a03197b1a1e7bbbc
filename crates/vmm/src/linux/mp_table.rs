//! The MP table, by which Linux finds its processors and the wiring of the interrupt controllers without ACPI:
//! Intel's MultiProcessor Specification, version 1.4, chapter 4.

use super::layout::{IO_APIC, LOCAL_APIC, MP_TABLE};

const SPECIFICATION_1_4: u8 = 4;
/// The versions that KVM's controllers report.
const LOCAL_APIC_VERSION: u8 = 0x14;
const IO_APIC_VERSION: u8 = 0x11;
const ISA_BUS: u8 = 0;
const ISA_LINES: u8 = 16;
const ALL_PROCESSORS: u8 = 0xff;

// Kinds of entries, and of interrupts.
const PROCESSOR: u8 = 0;
const BUS: u8 = 1;
const CONTROLLER: u8 = 2;
const INTERRUPT: u8 = 3;
const LOCAL_INTERRUPT: u8 = 4;
const VECTORED: u8 = 0;
const NMI: u8 = 1;
const EXTERNAL: u8 = 3;

/// The largest number of processors: APIC IDs have 8 bits, 255 means all, and the devices' controller needs
/// one, too.
pub(super) const MAX_PROCESSORS: u8 = 254;

const POINTER_BYTES: u32 = 16;
const HEADER_BYTES: u16 = 44;

/// The table for `processors` processors, for memory at [`MP_TABLE`]: the floating pointer, then the
/// configuration table.
pub(super) fn build(processors: u8) -> Vec<u8> {
    let io_apic = processors;
    let mut body = Vec::new();
    let mut entries: u16 = 0;
    let mut entry = |bytes: &[u8]| {
        body.extend_from_slice(bytes);
        entries += 1;
    };
    for id in 0..processors {
        // Enabled; the first one boots. Linux reads signature and feature flags from CPUID.
        let flags = if id == 0 { 0b11 } else { 0b01 };
        let mut bytes = [0; 20];
        bytes[..4].copy_from_slice(&[PROCESSOR, id, LOCAL_APIC_VERSION, flags]);
        entry(&bytes);
    }
    entry(&[BUS, ISA_BUS, b'I', b'S', b'A', b' ', b' ', b' ']);
    let [a, b, c, d] = IO_APIC.to_le_bytes();
    entry(&[CONTROLLER, io_apic, IO_APIC_VERSION, 1, a, b, c, d]);
    // KVM wires line n to pin n.
    for line in 0..ISA_LINES {
        entry(&[INTERRUPT, VECTORED, 0, 0, ISA_BUS, line, io_apic, line]);
    }
    for (kind, pin) in [(EXTERNAL, 0), (NMI, 1)] {
        let bytes = [LOCAL_INTERRUPT, kind, 0, 0, ISA_BUS, 0, ALL_PROCESSORS, pin];
        entry(&bytes);
    }

    let mut header = Vec::new();
    // At most 254 processors of 20 bytes: far below 64 KiB.
    let table_bytes = HEADER_BYTES.saturating_add(u16::try_from(body.len()).unwrap_or(u16::MAX));
    header.extend_from_slice(b"PCMP");
    header.extend_from_slice(&table_bytes.to_le_bytes());
    header.extend_from_slice(&[SPECIFICATION_1_4, 0]);
    header.extend_from_slice(b"PAGETIDE");
    header.extend_from_slice(b"VMM         ");
    header.extend_from_slice(&[0; 6]); // no table of the manufacturer's
    header.extend_from_slice(&entries.to_le_bytes());
    header.extend_from_slice(&LOCAL_APIC.to_le_bytes());
    header.extend_from_slice(&[0; 4]); // no extended table
    let sum = checksum(&[&header, &body]);
    header[7] = sum;

    let mut table = Vec::new();
    table.extend_from_slice(b"_MP_");
    let config = u32::try_from(MP_TABLE).unwrap_or(u32::MAX) + POINTER_BYTES;
    table.extend_from_slice(&config.to_le_bytes());
    // Length in units of 16 bytes, version, checksum, no default configuration.
    table.extend_from_slice(&[1, SPECIFICATION_1_4, 0, 0, 0, 0, 0, 0]);
    table[10] = checksum(&[&table]);
    table.extend(header);
    table.extend(body);
    table
}

/// The byte that makes the sum of all 0.
fn checksum(parts: &[&[u8]]) -> u8 {
    let bytes = parts.iter().flat_map(|part| part.iter());
    bytes.fold(0_u8, |sum, byte| sum.wrapping_sub(*byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum(bytes: &[u8]) -> u8 {
        bytes.iter().fold(0, |sum, byte| sum.wrapping_add(*byte))
    }

    #[test]
    fn checksums_and_lengths_are_right() {
        for processors in [1, 2, 64, MAX_PROCESSORS] {
            let table = build(processors);
            let (pointer, config) = table.split_at(16);
            assert_eq!(sum(pointer), 0);
            assert_eq!(&pointer[..4], b"_MP_");
            assert_eq!(sum(config), 0);
            let bytes = u16::from_le_bytes([config[4], config[5]]);
            assert_eq!(usize::from(bytes), config.len());
            assert!(MP_TABLE + table.len() as u64 <= 0x10_0000);
        }
    }

    #[test]
    fn all_entries_are_there_in_ascending_kinds() {
        let table = build(3);
        let config = &table[16..];
        let announced = u16::from_le_bytes([config[34], config[35]]);
        let (mut rest, mut kinds) = (&config[44..], Vec::new());
        while let Some(kind) = rest.first() {
            kinds.push(*kind);
            rest = &rest[if *kind == PROCESSOR { 20 } else { 8 }..];
        }
        assert_eq!(kinds.len(), usize::from(announced));
        assert!(kinds.is_sorted());
        assert_eq!(kinds.iter().filter(|kind| **kind == PROCESSOR).count(), 3);
        // One boot processor, and all of them enabled.
        let flags: Vec<_> = (0..3).map(|id| config[44 + 20 * id + 3]).collect();
        assert_eq!(flags, [3, 1, 1]);
    }
}
