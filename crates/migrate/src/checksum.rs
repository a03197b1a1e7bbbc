//! The checksum of page content in its place.

use pagetide_memory::GuestAddress;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use crate::ids::VmId;
use crate::rounds::Round;

/// The checksum of content that belongs to this VM, address and round. It finds content that was changed, or that came to
/// another place, by accident. It authenticates nothing.
pub fn page_checksum(vm: VmId, gpa: GuestAddress, round: Round, content: &[u8]) -> u64 {
    let mut place = [0; 25];
    place[..16].copy_from_slice(&vm.0);
    place[16..24].copy_from_slice(&gpa.0.to_le_bytes());
    place[24] = round.0;
    xxh3_64_with_seed(content, xxh3_64(&place))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vm_address_round_and_every_byte_count() {
        let content = vec![7; 4096];
        let of = |vm: u8, gpa, round, content: &[u8]| {
            page_checksum(VmId([vm; 16]), GuestAddress(gpa), Round(round), content)
        };
        let right = of(1, 0x1000, 1, &content);
        assert_eq!(of(1, 0x1000, 1, &content), right);
        for wrong in [
            of(2, 0x1000, 1, &content),
            of(1, 0x2000, 1, &content),
            of(1, 0x1000, 2, &content),
        ] {
            assert_ne!(wrong, right);
        }
        for at in 0..content.len() {
            let mut changed = content.clone();
            changed[at] ^= 0x10;
            assert_ne!(of(1, 0x1000, 1, &changed), right, "byte {at}");
        }
        // An empty content, as a zero page's, is bound to its place too.
        assert_ne!(of(1, 0x1000, 1, &[]), of(1, 0x2000, 1, &[]));
    }
}
