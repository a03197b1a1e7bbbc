//! The payload's own memory: code, page tables, parameter pages, stacks and tables.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use pagetide_memory::{Backing, FaultInAccess, GuestAddress, PageIndex, Region};

use crate::error::MachineError;
use crate::layout::{CONTROL, Layout, PAGE, TABLES};
use crate::payload::{Control, Word};

/// Slot 0. The host accesses it through the service mapping, also while vCPUs run.
#[derive(Debug)]
pub(crate) struct LowMemory {
    pub(crate) region: Arc<Region>,
    pub(crate) layout: Layout,
}

impl LowMemory {
    /// Allocates the memory, makes it present, and writes the page tables.
    pub(crate) fn new(layout: Layout) -> Result<Self, MachineError> {
        let region = Region::new(GuestAddress(0), layout.low_bytes(), Backing::Shmem)
            .map_err(MachineError::LowMemory)?;
        region
            .fault_in(region.all_pages(), FaultInAccess::Write)
            .map_err(MachineError::Populate)?;
        let low = Self {
            region: Arc::new(region),
            layout,
        };
        low.write_words(TABLES, &low.layout.tables())?;
        Ok(low)
    }

    pub(crate) fn write(&self, gpa: u64, bytes: &[u8]) -> Result<(), MachineError> {
        let written = self
            .region
            .write_service(PageIndex(gpa / PAGE), gpa % PAGE, bytes);
        written.map_err(MachineError::access(gpa))
    }

    pub(crate) fn write_words(&self, gpa: u64, words: &[u64]) -> Result<(), MachineError> {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.write(gpa, &bytes)
    }

    pub(crate) fn read(&self, gpa: u64, bytes: &mut [u8]) -> Result<(), MachineError> {
        let read = self
            .region
            .read_service(PageIndex(gpa / PAGE), gpa % PAGE, bytes);
        read.map_err(MachineError::access(gpa))
    }

    /// The gpa of a word of a vCPU's parameter page.
    pub(crate) fn gpa(&self, vcpu: u32, word: Word) -> u64 {
        self.layout.params(vcpu.into()) + word.offset()
    }

    pub(crate) fn set(&self, vcpu: u32, words: &[(Word, u64)]) -> Result<(), MachineError> {
        words
            .iter()
            .try_for_each(|(word, value)| self.write_words(self.gpa(vcpu, *word), &[*value]))
    }

    pub(crate) fn set_control(&self, word: Control, value: u64) -> Result<(), MachineError> {
        self.write_words(CONTROL + word.offset(), &[value])
    }

    pub(crate) fn word(&self, vcpu: u32, word: Word) -> Result<u64, MachineError> {
        let mut bytes = [0; 8];
        self.read(self.gpa(vcpu, word), &mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// As [`Self::word`], for hot paths.
    #[inline]
    pub(crate) fn atomic(&self, vcpu: u32, word: Word) -> Option<&AtomicU64> {
        let gpa = self.gpa(vcpu, word);
        self.region.service_word(PageIndex(gpa / PAGE), gpa % PAGE)
    }

    /// The first `touches` entries of a vCPU's latency log, in TSC cycles.
    pub(crate) fn log(&self, vcpu: u32, touches: u64) -> Result<Vec<u32>, MachineError> {
        let touches = touches.min(self.layout.table_bytes() / 4);
        let mut bytes = vec![0; usize::try_from(touches * 4).unwrap_or(0)];
        self.read(self.layout.table(vcpu.into()), &mut bytes)?;
        let entries = bytes.as_chunks::<4>().0.iter().copied();
        Ok(entries.map(u32::from_le_bytes).collect())
    }
}
