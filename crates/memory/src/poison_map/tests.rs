use std::fs;
use std::path::PathBuf;

use proptest::prelude::*;

use super::*;
use crate::range::RangeError;

const PAGE: u64 = 4096;

fn range(page: u64, pages: u64) -> GuestRange {
    GuestRange::new(GuestAddress(page * PAGE), pages * PAGE).unwrap()
}

fn map(ranges: &[(u64, u64)]) -> PoisonMap {
    let mut map = PoisonMap::new();
    for &(page, pages) in ranges {
        map.insert(range(page, pages)).unwrap();
    }
    map
}

#[test]
fn adjacent_ranges_are_merged() {
    let mut map = map(&[(1, 1), (5, 2)]);
    assert_eq!(map.len(), 2);
    assert_eq!(map.insert(range(2, 3)), Ok(3 * PAGE));
    assert_eq!(map.iter().collect::<Vec<_>>(), [range(1, 6)]);
    assert_eq!(map.insert(range(3, 1)), Ok(0));
    assert_eq!(map.insert(range(0, 512)), Ok(506 * PAGE));
    assert_eq!(map.bytes(), 2 << 20);
}

#[test]
fn huge_pages_with_lost_bytes_are_listed_once() {
    let map = map(&[(0, 1), (3, 1), (511, 2), (2048, 1)]);
    let pages = |first, count, page_size| {
        let pages = map.pages_in(range(first, count), page_size);
        pages.map(|page| page.0).collect::<Vec<_>>()
    };
    assert_eq!(pages(0, 4096, PageSize::Size2M), [0, 1, 4]);
    assert_eq!(pages(2, 4, PageSize::Size4K), [1]);
    // Kind: an absolute number in place of a relative one. Memory need not begin at a multiple of its page size.
    assert_eq!(pages(256, 4096, PageSize::Size2M), [0, 3]);
    assert_eq!(pages(1, 4096, PageSize::Size2M), [0, 3]);
}

#[test]
fn a_full_map_accepts_only_ranges_adjacent_to_its_own() {
    let mut map = PoisonMap::new();
    for index in 0..PoisonMap::MAX_RANGES as u64 {
        map.insert(range(2 * index, 1)).unwrap();
    }
    let far = range(4 * PoisonMap::MAX_RANGES as u64, 1);
    assert_eq!(map.insert(far), Err(PoisonMapFull { range: far }));
    assert_eq!(map.insert(range(1, 1)), Ok(PAGE));
    assert_eq!(map.insert(far), Ok(PAGE));
    assert_eq!(PoisonMap::decode(&map.encode()), Ok(map));
}

proptest! {
    #[test]
    fn the_map_contains_what_was_inserted(
        ranges in prop::collection::vec((0u64..64, 1u64..8), 0..24),
        asked in (0u64..64, 1u64..16),
    ) {
        let map = map(&ranges);
        let lost = |page: u64| ranges.iter().any(|&(first, count)| (first..first + count).contains(&page));
        for page in 0..80 {
            prop_assert_eq!(map.contains(GuestAddress(page * PAGE + 7)), lost(page));
        }
        prop_assert_eq!(map.bytes(), (0..80).filter(|&page| lost(page)).count() as u64 * PAGE);
        let (first, count) = asked;
        let expected = (first..first + count).filter(|&page| lost(page)).count() as u64 * PAGE;
        prop_assert_eq!(map.bytes_in(range(first, count)), expected);
        let ends: Vec<_> = map.iter().map(|range| (range.start().0, range.end().0)).collect();
        prop_assert!(ends.windows(2).all(|pair| pair[0].1 < pair[1].0));
        prop_assert_eq!(PoisonMap::decode(&map.encode()), Ok(map));
    }

    #[test]
    fn any_damage_is_detected(at in 0usize..52, flip in 1u8..) {
        let mut bytes = map(&[(1, 1), (9, 3)]).encode();
        prop_assert_eq!(bytes.len(), 52);
        bytes[at] ^= flip;
        prop_assert!(PoisonMap::decode(&bytes).is_err());
    }

    #[test]
    fn random_bytes_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        prop_assert!(PoisonMap::decode(&bytes).is_err());
    }
}

/// Bytes with a valid checksum, as an attacker would make them.
fn forged(version: u32, count: u32, ranges: &[(u64, u64)]) -> Vec<u8> {
    let mut bytes = b"PTPOISON".to_vec();
    bytes.extend(version.to_le_bytes());
    bytes.extend(count.to_le_bytes());
    for (start, length) in ranges {
        bytes.extend(start.to_le_bytes());
        bytes.extend(length.to_le_bytes());
    }
    let crc = !bytes.iter().fold(!0u32, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| {
            (crc >> 1) ^ if crc & 1 == 1 { 0xedb8_8320 } else { 0 }
        })
    });
    bytes.extend(crc.to_le_bytes());
    bytes
}

#[test]
fn each_invalid_map_has_its_error() {
    use ParsePoisonError as E;
    let decode = |bytes: &[u8]| PoisonMap::decode(bytes).unwrap_err();
    assert_eq!(decode(b""), E::NotAPoisonMap);
    assert_eq!(decode(b"PTPOISOM rest"), E::NotAPoisonMap);
    let wanted = 20;
    assert_eq!(decode(b"PTPOISON"), E::WrongLength { bytes: 8, wanted });
    assert_eq!(decode(&forged(2, 0, &[])), E::UnknownVersion { version: 2 });
    assert_eq!(
        decode(&forged(1, u32::MAX, &[])),
        E::TooManyRanges { count: u32::MAX }
    );
    let good = (PAGE, PAGE);
    let (bytes, wanted) = (20, 36);
    assert_eq!(decode(&forged(1, 1, &[])), E::WrongLength { bytes, wanted });
    let (bytes, wanted) = (52, 36);
    assert_eq!(
        decode(&forged(1, 1, &[good; 2])),
        E::WrongLength { bytes, wanted }
    );
    let bad = |start, length| decode(&forged(1, 2, &[good, (start, length)]));
    for (start, length, source) in [
        (0x4000, 0, RangeError::Empty { start: 0x4000 }),
        (
            0x4001,
            PAGE,
            RangeError::Unaligned {
                start: 0x4001,
                bytes: PAGE,
                page_size: PageSize::Size4K,
            },
        ),
        (
            0u64.wrapping_sub(PAGE),
            PAGE,
            RangeError::Wraps {
                start: 0u64.wrapping_sub(PAGE),
                bytes: PAGE,
            },
        ),
    ] {
        assert_eq!(bad(start, length), E::BadRange { index: 1, source });
    }
    for page in [0, 1, 2] {
        let range = range(page, 1);
        let error = bad(page * PAGE, PAGE);
        assert_eq!(error, E::OutOfOrder { index: 1, range }, "page {page}");
    }
    let mut damaged = forged(1, 1, &[good]);
    damaged[20] ^= 1;
    assert!(matches!(decode(&damaged), E::WrongChecksum { .. }));
}

/// A folder for this test only.
fn folder(name: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("pagetide-{}-{name}", std::process::id()));
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir(&folder).unwrap();
    folder
}

#[test]
fn a_map_round_trips_through_a_file() {
    let folder = folder("saved");
    let path = folder.join("map");
    for ranges in [&[(1, 1), (9, 3)][..], &[], &[(7, 1)]] {
        let map = map(ranges);
        map.save(&path).unwrap();
        assert_eq!(PoisonMap::load(&path).unwrap(), map);
    }
    let left: Vec<_> = fs::read_dir(&folder).unwrap().collect();
    assert_eq!(left.len(), 1, "{left:?}");
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn an_invalid_file_is_refused_and_left_unchanged() {
    let folder = folder("refused");
    let path = folder.join("map");
    let error = PoisonMap::load(&path).unwrap_err();
    assert!(matches!(error, LoadError::Read { .. }), "{error}");
    let error = PoisonMap::load(&folder).unwrap_err();
    assert!(matches!(error, LoadError::NotAFile { .. }), "{error}");

    let mut bytes = map(&[(1, 1)]).encode();
    bytes[16] ^= 0x10;
    fs::write(&path, &bytes).unwrap();
    let error = PoisonMap::load(&path).unwrap_err();
    assert!(matches!(error, LoadError::Parse { .. }), "{error}");
    assert!(error.to_string().contains("map"));
    assert!(std::error::Error::source(&error).is_some());
    assert_eq!(fs::read(&path).unwrap(), bytes);

    fs::write(&path, vec![0; PoisonMap::MAX_ENCODED_BYTES + 1]).unwrap();
    let error = PoisonMap::load(&path).unwrap_err();
    assert!(matches!(error, LoadError::TooLong { .. }), "{error}");

    let pipe = folder.join("pipe");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &pipe,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
        0,
    )
    .unwrap();
    let error = PoisonMap::load(&pipe).unwrap_err();
    assert!(matches!(error, LoadError::NotAFile { .. }), "{error}");
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_map_that_cannot_be_saved_changes_nothing() {
    let folder = folder("unsaved");
    let path = folder.join("map");
    fs::create_dir(&path).unwrap();
    fs::write(path.join("something"), "in it").unwrap();
    let error = map(&[(1, 1)]).save(&path).unwrap_err();
    assert!(error.to_string().contains("saving the poison map"));
    assert!(path.join("something").exists());
    // No temporary file remains.
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);
    map(&[]).save(&PathBuf::from("/")).unwrap_err();
    fs::remove_dir_all(folder).unwrap();
}
