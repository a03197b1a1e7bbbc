//! Parsers that only a fuzzer calls from outside.

use crate::handshake::VmRegion;
use crate::state::Description;

/// The regions of a VM's description at the keeper, and the description as a server writes it; `None` if
/// a server that finds it leaves the VM alone.
pub fn description(text: &[u8]) -> Option<(Vec<VmRegion>, Vec<u8>)> {
    let description: Description = serde_json::from_slice(text).ok()?;
    let regions = description.vm_regions()?;
    Some((regions, serde_json::to_vec(&description).ok()?))
}
