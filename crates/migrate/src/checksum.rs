//! The checksum of page content in its place.

use pagetide_memory::GuestAddress;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use crate::ids::VmId;
use crate::message::PageRecord;

/// The checksum of a record's bytes, which belong to this VM, to the address of the record's first page, and to what the
/// record says of them but for its checksum: their round, what they are, and how many pages. It finds a record that was
/// changed, or that came to another place, by accident. It authenticates nothing.
pub fn page_checksum(vm: VmId, gpa: GuestAddress, record: &PageRecord, bytes: &[u8]) -> u64 {
    xxh3_64_with_seed(bytes, page_checksum_seed(vm, gpa, record))
}

/// What the checksum has of a record but for its bytes.
pub(crate) fn page_checksum_seed(vm: VmId, gpa: GuestAddress, record: &PageRecord) -> u64 {
    // A record has at most 256 pages.
    let pages = u16::try_from(record.run.count()).unwrap_or(u16::MAX);
    let mut place = [0; 28];
    place[..16].copy_from_slice(&vm.0);
    place[16..24].copy_from_slice(&gpa.0.to_le_bytes());
    place[24] = record.round.0;
    place[25] = record.content.number();
    place[26..].copy_from_slice(&pages.to_le_bytes());
    xxh3_64(&place)
}

#[cfg(test)]
mod tests {
    use pagetide_memory::{PageIndex, PageRange};

    use super::*;
    use crate::frame::Decoder;
    use crate::message::{Content, Message};
    use crate::rounds::Round;

    /// `None` for pages that no VM has.
    fn checksum_of(record: &PageRecord, bytes: &[u8]) -> Option<u64> {
        let gpa = GuestAddress(record.run.first().0.checked_mul(4096)?);
        Some(page_checksum(VmId([1; 16]), gpa, record, bytes))
    }

    #[test]
    fn vm_address_head_and_every_byte_count() {
        let bytes = vec![7; 4096];
        let right = PageRecord {
            run: PageRange::single(PageIndex(1)),
            round: Round(1),
            content: Content::Bytes,
            checksum: 0,
        };
        let of = |vm: u8, gpa, record: PageRecord, bytes: &[u8]| {
            page_checksum(VmId([vm; 16]), GuestAddress(gpa), &record, bytes)
        };
        let checksum = of(1, 0x1000, right, &bytes);
        assert_eq!(of(1, 0x1000, right, &bytes), checksum);
        let with = |change: fn(&mut PageRecord)| {
            let mut other = right;
            change(&mut other);
            of(1, 0x1000, other, &bytes)
        };
        for wrong in [
            of(2, 0x1000, right, &bytes),
            of(1, 0x2000, right, &bytes),
            with(|record| record.round = Round(2)),
            with(|record| record.content = Content::Zstd),
            with(|record| record.run = PageRange::new(PageIndex(1), 2)),
        ] {
            assert_ne!(wrong, checksum);
        }
        for at in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[at] ^= 0x10;
            assert_ne!(of(1, 0x1000, right, &changed), checksum, "byte {at}");
        }
        // A record without bytes, as a zero page's, is bound to its place too.
        assert_ne!(of(1, 0x1000, right, &[]), of(1, 0x2000, right, &[]));
    }

    /// As a bit that changes on a connection without TLS. It is no frame, no message, or the checksum is wrong.
    #[test]
    fn no_bit_of_a_record_changes_unnoticed() {
        for (content, bytes) in [
            (Content::Bytes, vec![7; 8192]),
            (Content::Zstd, vec![7; 60]),
            (Content::Zero, vec![]),
            (Content::Discarded, vec![]),
            (Content::Poisoned, vec![]),
        ] {
            let mut sent = PageRecord {
                run: PageRange::new(PageIndex(2), 2),
                round: Round(3),
                content,
                checksum: 0,
            };
            sent.checksum = checksum_of(&sent, &bytes).unwrap();
            let mut frame = crate::MAGIC.to_vec();
            Message::Pages(sent).encode(&bytes, &mut frame).unwrap();
            for bit in 64..8 * frame.len() {
                let mut changed = frame.clone();
                changed[bit / 8] ^= 1 << (bit % 8);
                let mut decoder = Decoder::default();
                decoder.push(&changed);
                let Ok(Some(found)) = decoder.next_frame() else {
                    continue;
                };
                let Ok(received) = Message::of(&found) else {
                    continue;
                };
                let Message::Pages(record) = received.message else {
                    panic!("bit {bit} makes it another message");
                };
                let is_intact = checksum_of(&record, received.content) == Some(record.checksum);
                // The flag *optional* says nothing of a message that is known.
                let is_same = (record, received.content) == (sent, &bytes[..]);
                assert!(!is_intact || is_same, "{content:?}, bit {bit}: {record:?}");
            }
        }
    }
}
