//! KVM as the sink of incremental population.

use std::error::Error;
use std::sync::Arc;

use pagetide_kvm::{PopulateError, PopulateFlags, Vm};
use pagetide_memory::GuestRange;

use crate::populate::PopulateSink;

/// Maps what has arrived in the stage-2 tables that all vCPUs share (KVM_POPULATE_MEMORY, gated by
/// KVM_CAP_POPULATE_MEMORY: without it, the first batch fails and population ends).
impl PopulateSink for Arc<Vm> {
    fn populate(&self, range: GuestRange) -> Result<u64, Box<dyn Error + Send + Sync>> {
        // Not for writing: mappings are writable anyhow if the host's are, and with that flag the zero
        // page would count as absent.
        let flags = PopulateFlags {
            write: false,
            present_only: true,
        };
        match Vm::populate(self, range, flags) {
            Ok(populated) => Ok(populated.mapped_bytes),
            // The memory is not, or no longer, the guest's: there is nothing to save it from.
            Err(PopulateError::NoSlot { unfinished, .. }) => Ok(unfinished.done.mapped_bytes),
            Err(error) => Err(error.into()),
        }
    }
}
