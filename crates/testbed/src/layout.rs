//! Addresses in guest-physical memory.
//!
//! ```text
//! 0x0000_1000  workload.s           4 pages
//! 0x0000_5000  GDT, IDT             1 page each
//! 0x0000_7000  control page
//! 0x0000_8000  another payload      8 pages
//! 0x0001_0000  page tables          1 PML4, then PDPTs, then page directories
//!              per vCPU: parameter page, stack page, table
//! 0x1_0000_0000 (4 GiB) data        one region, in per-vCPU ranges or shared
//! ```
//!
//! Everything below the data is one memory slot (0), present from the start; the data is slot 1.

use std::ops::Range;

use pagetide_vmm::page_tables;

/// The slot of low memory.
pub const LOW_SLOT: u32 = 0;
/// The slot of the data region.
pub const DATA_SLOT: u32 = 1;
/// The gpa of the data region.
pub const DATA_GPA: u64 = 1 << 32;

pub(crate) const PAGE: u64 = 4096;
const LARGE_PAGE: u64 = 2 << 20;
#[cfg(target_arch = "x86_64")]
pub(crate) const CODE: u64 = 0x1000;
#[cfg(target_arch = "x86_64")]
pub(crate) const GDT: u64 = 0x5000;
#[cfg(target_arch = "x86_64")]
pub(crate) const IDT: u64 = 0x6000;
/// The page that all vCPUs read and the host writes.
pub(crate) const CONTROL: u64 = 0x7000;
/// The code of the walkers or cyclers.
pub(crate) const PAYLOAD: u64 = 0x8000;
/// The page tables, whose first page is the root (CR3).
pub(crate) const TABLES: u64 = 0x1_0000;

/// The limit of low memory, well below the local APIC and KVM's own memory below 4 GiB.
const LOW_LIMIT: u64 = GIB;
const GIB: u64 = 1 << 30;

/// Addresses that depend on a machine's size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    data_bytes: u64,
    vcpus: u64,
    table_bytes: u64,
    first_vcpu: u64,
}

impl Layout {
    /// The layout for these vCPUs, each with a table of `entries` entries of 4 bytes; None if low memory
    /// would be too large.
    pub(crate) fn new(vcpus: u32, data_bytes: u64, entries: u64) -> Option<Self> {
        let table_bytes = entries.checked_mul(4)?.checked_next_multiple_of(PAGE)?;
        let first_vcpu = TABLES.checked_add(page_tables::bytes(&gigabytes(data_bytes)?)?)?;
        let layout = Self {
            data_bytes,
            vcpus: vcpus.into(),
            table_bytes,
            first_vcpu,
        };
        let per_vcpu = table_bytes.checked_add(2 * PAGE)?;
        let end = first_vcpu.checked_add(per_vcpu.checked_mul(layout.vcpus)?)?;
        (end.checked_next_multiple_of(LARGE_PAGE)? <= LOW_LIMIT).then_some(layout)
    }

    /// The page tables at [`TABLES`], as 64-bit entries.
    pub(crate) fn tables(&self) -> Vec<u64> {
        let gigabytes = gigabytes(self.data_bytes);
        let tables = gigabytes.and_then(|gigabytes| page_tables::build(TABLES, &gigabytes));
        // Without room for them there is no layout.
        tables.unwrap_or_default()
    }

    /// The size of low memory, a multiple of 2 MiB.
    pub(crate) fn low_bytes(&self) -> u64 {
        self.params(self.vcpus).next_multiple_of(LARGE_PAGE)
    }

    pub(crate) fn data_bytes(&self) -> u64 {
        self.data_bytes
    }

    pub(crate) fn tables_bytes(&self) -> u64 {
        self.first_vcpu - TABLES
    }

    /// A vCPU's parameter page.
    pub(crate) fn params(&self, vcpu: u64) -> u64 {
        self.first_vcpu + vcpu * (2 * PAGE + self.table_bytes)
    }

    /// The end of a vCPU's stack, which grows down.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn stack_end(&self, vcpu: u64) -> u64 {
        self.params(vcpu) + 2 * PAGE
    }

    /// A vCPU's table; in a walk of a machine the latency log, one u32 a touch, in TSC cycles.
    pub(crate) fn table(&self, vcpu: u64) -> u64 {
        self.params(vcpu) + 2 * PAGE
    }

    pub(crate) fn table_bytes(&self) -> u64 {
        self.table_bytes
    }
}

/// The gigabytes that the page tables map: low memory's and the data region's.
fn gigabytes(data_bytes: u64) -> Option<[Range<u64>; 2]> {
    let end = DATA_GPA.checked_add(data_bytes)?;
    Some([0..1, DATA_GPA / GIB..end.div_ceil(GIB)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn areas_do_not_overlap() {
        let layout = Layout::new(8, 8 * (64 << 20), 16384).expect("fits");
        assert_eq!(TABLES + layout.tables_bytes(), layout.params(0));
        for vcpu in 0..8 {
            assert_eq!(layout.table(vcpu), layout.params(vcpu) + 2 * PAGE);
            assert_eq!(
                layout.params(vcpu + 1),
                layout.table(vcpu) + layout.table_bytes()
            );
        }
        assert!(layout.params(8) <= layout.low_bytes());
        assert_eq!(layout.low_bytes() % LARGE_PAGE, 0);
    }

    #[test]
    fn sizes_that_are_too_large_do_not_wrap() {
        assert_eq!(Layout::new(1, 4096, u64::MAX), None);
        assert_eq!(Layout::new(1, u64::MAX, 1), None);
        assert_eq!(Layout::new(u32::MAX, 4096, 1 << 20), None);
        assert_eq!(Layout::new(1, 4096, LOW_LIMIT / 4), None);
    }
}
