//! Parsers that only a fuzzer calls from outside.

use crate::control::channel;
use crate::control::message::Request;
use crate::handshake::VmRegion;
use crate::state::Description;

/// The regions of a VM's description at the keeper, and the description as a server writes it; `None` if
/// a server that finds it leaves the VM alone.
pub fn description(text: &[u8]) -> Option<(Vec<VmRegion>, Vec<u8>)> {
    let description: Description = serde_json::from_slice(text).ok()?;
    let regions = description.vm_regions()?;
    Some((regions, serde_json::to_vec(&description).ok()?))
}

/// A request at the control socket; `None` if it is refused.
pub fn request(line: &[u8]) -> Option<Request> {
    channel::parse(line).ok()
}
