//! The memory that the workload itself needs: code, tables, parameters, stacks and logs.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use pagetide_memory::{Backing, FaultInAccess, GuestAddress, PageIndex, Region};

use crate::error::MachineError;
use crate::guest::Field;
use crate::layout::{Layout, PAGE, TABLES};

/// Slot 0. The host reads and writes it through the service mapping, also while vCPUs run.
#[derive(Debug)]
pub(crate) struct LowMemory {
    region: Arc<Region>,
    layout: Layout,
}

impl LowMemory {
    /// Allocates all of it, makes it present and writes the page tables.
    pub(crate) fn new(layout: Layout) -> Result<Self, MachineError> {
        let region = Region::new(GuestAddress(0), layout.low_bytes(), Backing::Shmem)
            .map_err(MachineError::LowMemory)?;
        region
            .fault_in(region.all_pages(), FaultInAccess::Write)
            .map_err(MachineError::PopulateLowMemory)?;
        let low = Self {
            region: Arc::new(region),
            layout,
        };
        low.write_words(TABLES, &low.layout.tables())?;
        Ok(low)
    }

    pub(crate) fn region(&self) -> &Arc<Region> {
        &self.region
    }

    pub(crate) fn layout(&self) -> &Layout {
        &self.layout
    }

    pub(crate) fn write(&self, gpa: u64, bytes: &[u8]) -> Result<(), MachineError> {
        self.region
            .write_service(PageIndex(gpa / PAGE), gpa % PAGE, bytes)
            .map_err(|source| MachineError::AccessLowMemory {
                gpa: GuestAddress(gpa),
                source,
            })
    }

    pub(crate) fn write_words(&self, gpa: u64, words: &[u64]) -> Result<(), MachineError> {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.write(gpa, &bytes)
    }

    pub(crate) fn read(&self, gpa: u64, bytes: &mut [u8]) -> Result<(), MachineError> {
        self.region
            .read_service(PageIndex(gpa / PAGE), gpa % PAGE, bytes)
            .map_err(|source| MachineError::AccessLowMemory {
                gpa: GuestAddress(gpa),
                source,
            })
    }

    pub(crate) fn set_field(
        &self,
        vcpu: u32,
        field: Field,
        value: u64,
    ) -> Result<(), MachineError> {
        let gpa = self.layout.params(vcpu.into()) + field.offset() as u64;
        self.write(gpa, &value.to_le_bytes())
    }

    pub(crate) fn field(&self, vcpu: u32, field: Field) -> Result<u64, MachineError> {
        self.word(self.layout.params(vcpu.into()) + field.offset() as u64)
    }

    pub(crate) fn word(&self, gpa: u64) -> Result<u64, MachineError> {
        let mut bytes = [0; 8];
        self.read(gpa, &mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// Where a vCPU's guest has a field, for one that is looked at often by [`Self::word_at`].
    pub(crate) fn place_of(&self, vcpu: u32, field: Field) -> (PageIndex, u64) {
        let gpa = self.layout.params(vcpu.into()) + field.offset() as u64;
        (PageIndex(gpa / PAGE), gpa % PAGE)
    }

    /// None if there is no such place.
    #[inline]
    pub(crate) fn word_at(&self, (page, offset): (PageIndex, u64)) -> Option<&AtomicU64> {
        self.region.service_word(page, offset)
    }

    /// The first `touches` entries of a vCPU's log, in TSC cycles.
    pub(crate) fn log(&self, vcpu: u32, touches: u64) -> Result<Vec<u32>, MachineError> {
        let touches = touches.min(self.layout.log_bytes() / 4);
        let mut bytes = vec![0; usize::try_from(touches * 4).unwrap_or(0)];
        self.read(self.layout.log(vcpu.into()), &mut bytes)?;
        Ok(bytes
            .as_chunks::<4>()
            .0
            .iter()
            .copied()
            .map(u32::from_le_bytes)
            .collect())
    }
}
