//! Poison maps (`pagetide_memory::PoisonMap`).

use pagetide_memory::PoisonMap;

use crate::memory::bounded;

/// The input is everything before the map's checksum.
pub(crate) fn run(input: &[u8]) -> bool {
    let _ = PoisonMap::decode(input);
    let mut bytes = input.to_vec();
    bytes.extend(crc32fast::hash(input).to_le_bytes());
    // A range of 16 bytes is an entry of a tree.
    let limit = 16 * bytes.len() + 1024;
    let Ok(map) = bounded(limit, || PoisonMap::decode(&bytes)) else {
        return false;
    };
    assert_eq!(map.encode(), bytes, "there is one form");
    assert!(map.len() <= PoisonMap::MAX_RANGES);
    let mut end = None;
    for range in map.iter() {
        let start = range.start().0;
        assert!(range.bytes() > 0 && range.bytes().is_multiple_of(4096));
        assert!(start.is_multiple_of(4096) && end.is_none_or(|end| start > end));
        end = Some(range.end().0);
    }
    true
}

pub(crate) fn seeds() -> Vec<Vec<u8>> {
    let seed = |ranges: &[(u64, u64)]| {
        let mut bytes = b"PTPOISON\x01\0\0\0".to_vec();
        let count = u32::try_from(ranges.len()).unwrap_or(0);
        bytes.extend(count.to_le_bytes());
        for (start, length) in ranges {
            bytes.extend(start.to_le_bytes());
            bytes.extend(length.to_le_bytes());
        }
        bytes
    };
    vec![
        seed(&[]),
        seed(&[(0, 4096)]),
        seed(&[(4096, 8192), (1 << 30, 2 << 20), (1 << 40, 4096)]),
    ]
}
