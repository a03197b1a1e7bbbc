use proptest::prelude::*;

use super::*;
use crate::page_map::{Claim, Settled};

/// `content` with its valid checksum appended.
fn sealed(mut content: Vec<u8>) -> Vec<u8> {
    let checksum = crc32fast::hash(&content);
    content.extend_from_slice(&checksum.to_le_bytes());
    content
}

/// An image with `pages` pages in its header and these bytes as runs.
fn forged(pages: u64, runs: &[u8]) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    bytes.extend_from_slice(&pages.to_le_bytes());
    bytes.extend_from_slice(runs);
    sealed(bytes)
}

/// A map with a page in each state, the last two unsettled.
fn map_of_all_states() -> PageMap {
    let map = PageMap::new(8).unwrap();
    for (page, settled) in [
        (0, Settled::Present),
        (1, Settled::Present),
        (2, Settled::Zero),
        (4, Settled::Poisoned),
    ] {
        let page = PageIndex(page);
        match map.claim_run(page, PageRange::single(page)) {
            Claim::Won(guard) => {
                let _ = guard.finish(settled);
            }
            other => panic!("{other:?}"),
        }
    }
    let _ = map.remove(PageIndex(3));
    let asked = PageRange::new(PageIndex(6), 1);
    let _ = map.pend_run(PageIndex(6), asked);
    let _ = map.want_wake(PageIndex(6));
    map
}

fn states(map: &PageMap) -> Vec<PageState> {
    let pages = PageRange::new(PageIndex(0), map.pages());
    pages.iter().map(|page| map.state(page).unwrap()).collect()
}

#[test]
fn a_successor_takes_over_exactly_the_settled_pages() {
    let map = map_of_all_states();
    let owned = map.claim_arrived(PageRange::single(PageIndex(7))).unwrap();
    let image = map.image();
    drop(owned);
    let bytes = image.encode();
    // Two Present, Zero, Removed, Poisoned, three Absent.
    let runs = [0b10_001, 0b1_010, 0b1_011, 0b1_100, 0b11_000];
    assert_eq!(bytes, forged(8, &runs));
    let image = PageMapImage::decode(&bytes).unwrap();
    let successor = PageMap::new(8).unwrap();
    successor.import(&image).unwrap();
    let expected = [
        PageState::Present,
        PageState::Present,
        PageState::Zero,
        PageState::Removed,
        PageState::Poisoned,
        PageState::Absent,
        PageState::Absent,
        PageState::Absent,
    ];
    assert_eq!(states(&successor), expected);
    for (page, state) in expected.into_iter().enumerate() {
        assert_eq!(image.state(PageIndex(to_u64(page))), Some(state));
    }
    assert_eq!(image.state(PageIndex(8)), None);
    assert!(!successor.is_wake_wanted(PageIndex(6)));
}

#[test]
fn only_a_fresh_map_of_the_same_size_takes_over_an_image() {
    let image = map_of_all_states().image();
    for pages in [0, 7, 9] {
        let map = PageMap::new(pages).unwrap();
        let refused = map.import(&image);
        let expected = ImportError::OtherSize {
            image: 8,
            map: pages,
        };
        assert_eq!(refused, Err(expected));
    }
    let page = PageIndex(5);
    let map = PageMap::new(8).unwrap();
    let _ = map.pend_run(page, PageRange::single(page));
    let before = states(&map);
    let state = PageState::Pending;
    assert_eq!(map.import(&image), Err(ImportError::InUse { page, state }));
    assert_eq!(states(&map), before);
}

#[test]
fn each_invalid_image_has_its_error() {
    let decode = |bytes: &[u8]| PageMapImage::decode(bytes).unwrap_err();
    assert_eq!(decode(b""), ImportError::TooShort { bytes: 0 });
    assert_eq!(decode(b"PTPOISON and more"), ImportError::NotAnImage);
    let bytes = map_of_all_states().image().encode();
    let mut other = bytes.clone();
    other[8] = 2;
    assert_eq!(decode(&other), ImportError::UnknownVersion { version: 2 });
    let mut damaged = bytes;
    damaged[21] ^= 1;
    assert!(matches!(
        decode(&damaged),
        ImportError::WrongChecksum { .. }
    ));
}

#[test]
fn the_runs_of_an_image_are_checked() {
    // An image with a valid checksum may still have any content: pages, runs, the expected error.
    let bad = |index| ImportError::BadRun { index };
    let sum = |pages, found| ImportError::WrongSum { pages, found };
    let most = [0xf9, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01];
    let twice: Vec<u8> = [&most[..], &[0xfa], &most[1..]].concat();
    let table: [(u64, &[u8], ImportError); 14] = [
        (1, &[], sum(1, 0)),
        (u64::MAX, &[], sum(u64::MAX, 0)),
        (u64::MAX, &[0b1_001], sum(u64::MAX, 1)),
        (0, &[0b1_001], sum(0, 1)),
        (2, &[0b1_001], sum(2, 1)),
        (2, &[0b11_001], sum(2, 3)),
        // A run without pages.
        (1, &[0b1_001, 0b0_010], bad(1)),
        // The same state twice.
        (2, &[0b1_001, 0b1_001], bad(1)),
        // Requested, Installing and 7 are not states of an image.
        (1, &[0b1_101], bad(0)),
        (1, &[0b1_110], bad(0)),
        (1, &[0b1_111], bad(0)),
        // Truncated, and not in the shortest form.
        (1, &[0x89], bad(0)),
        (1, &[0x89, 0x00], bad(0)),
        (
            u64::MAX >> 3,
            &twice,
            sum(u64::MAX >> 3, 2 * (u64::MAX >> 3)),
        ),
    ];
    for (pages, runs, expected) in table {
        let refused = PageMapImage::decode(&forged(pages, runs));
        assert_eq!(refused, Err(expected), "{pages} {runs:x?}");
    }
    // More than 64 bits.
    let mut long = most;
    long[9] = 0x02;
    assert_eq!(PageMapImage::decode(&forged(u64::MAX, &long)), Err(bad(0)));
    // The longest possible run takes no memory by its length.
    let image = PageMapImage::decode(&forged(u64::MAX >> 3, &most)).unwrap();
    assert_eq!(image.runs.len(), 1);
    let first = image.state(PageIndex(0));
    assert_eq!(first, Some(PageState::Present));
}

/// Images of up to 200 pages, in runs of any length.
fn images() -> impl Strategy<Value = PageMapImage> {
    prop::collection::vec((1u64..40, ABSENT..=POISONED), 0..12).prop_map(|runs| {
        let mut image = PageMapImage {
            pages: 0,
            runs: Vec::new(),
        };
        for (count, state) in runs {
            image.push(count, state);
        }
        image
    })
}

proptest! {
    #[test]
    fn images_round_trip(image in images()) {
        let bytes = image.encode();
        prop_assert_eq!(&PageMapImage::decode(&bytes), &Ok(image.clone()));
        let map = PageMap::new(image.pages()).unwrap();
        map.import(&image).unwrap();
        prop_assert_eq!(map.image(), image);
    }

    #[test]
    fn any_damage_is_detected(image in images()) {
        let bytes = image.encode();
        for end in 0..bytes.len() {
            prop_assert!(PageMapImage::decode(&bytes[..end]).is_err(), "cut at {}", end);
        }
        for bit in 0..bytes.len() * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(PageMapImage::decode(&flipped).is_err(), "bit {}", bit);
        }
        let mut longer = bytes;
        longer.push(0);
        prop_assert!(PageMapImage::decode(&longer).is_err());
    }

    #[test]
    fn decoding_accepts_only_what_encoding_produces(pages in 0u64..64, runs in prop::collection::vec(any::<u8>(), 0..6)) {
        let bytes = forged(pages, &runs);
        if let Ok(image) = PageMapImage::decode(&bytes) {
            prop_assert_eq!(image.encode(), bytes);
        }
    }
}
