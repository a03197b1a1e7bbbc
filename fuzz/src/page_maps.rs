//! Page maps: the bytes that a server leaves in a file, and the image that one server sends another
//! (`pagetide_memory`).

use std::cell::RefCell;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use pagetide_memory::{MapFile, PageIndex, PageMap, PageMapError, PageMapImage, PageState};
use rustix::io::pread;

use crate::events::with_file;
use crate::memory::bounded;

/// The most pages of a map in a file here.
const PAGES: usize = 256;

thread_local! {
    static FILE: RefCell<Option<OwnedFd>> = const { RefCell::new(None) };
}

/// One byte for each page.
pub(crate) fn file(input: &[u8]) -> bool {
    let input = input.get(..PAGES).unwrap_or(input);
    FILE.with(|kept| with_file(kept, input, PAGES, |file| check(input, file)))
}

/// The state that a byte is read as: that of its predecessor's page, or Absent if nobody had settled it;
/// `None` if no server writes such a byte.
fn wanted(byte: u8) -> Option<PageState> {
    // Threads that wait for a page, and the server that installs it, have gone.
    let (state, is_installing, unknown) = (byte & 7, byte & 8 != 0, byte & 0xc0);
    Some(match (state, is_installing, unknown) {
        (_, true, _) | (0 | 5 | 6, ..) => PageState::Absent,
        (_, _, 1..) | (7, ..) => return None,
        (1, ..) => PageState::Present,
        (2, ..) => PageState::Zero,
        (3, ..) => PageState::Removed,
        _ => PageState::Poisoned,
    })
}

fn check(input: &[u8], file: &OwnedFd) -> bool {
    let states: Option<Vec<PageState>> = input.iter().copied().map(wanted).collect();
    let pages = input.len() as u64;
    let open = || {
        let file = file.as_fd().try_clone_to_owned();
        MapFile::open(Arc::new(file.expect("a descriptor")))
    };
    let mapped = open().expect("a sealed file");
    let map = match (PageMap::in_file(&mapped, 0, pages), states) {
        (Ok(map), Some(wanted)) => {
            let state = |page| map.state(PageIndex(page));
            let found: Option<Vec<_>> = (0..pages).map(state).collect();
            assert_eq!(found, Some(wanted));
            map
        }
        (Err(PageMapError::BadState { page, byte }), None) => {
            let at = usize::try_from(page.0).unwrap_or(usize::MAX);
            assert_eq!(input.get(at), Some(&byte));
            assert_eq!(
                input.iter().position(|&byte| wanted(byte).is_none()),
                Some(at)
            );
            return false;
        }
        (Err(PageMapError::OutsideFile { .. }), _) if input.is_empty() => return false,
        (found, wanted) => panic!("{found:?}, and not {wanted:?}"),
    };
    // A second successor finds the same.
    let sent = map.image();
    drop(map);
    let mut after = vec![0; input.len()];
    assert_eq!(pread(file, &mut after[..], 0), Ok(input.len()));
    for (&before, &after) in input.iter().zip(&after) {
        let is_missing = wanted(before) == Some(PageState::Absent);
        // Somebody died while it was installed.
        let is_begun = is_missing && before & 0x48 != 0;
        assert!(
            after <= 4 && !is_begun || after == 0x40 && is_begun,
            "{before} {after}"
        );
    }
    let mapped = open().expect("a sealed file");
    let again = PageMap::in_file(&mapped, 0, pages).expect("what was accepted");
    assert_eq!(again.image(), sent);
    // So does a server that gets it as an image.
    let received = PageMapImage::decode(&sent.encode());
    assert_eq!(received.as_ref(), Ok(&sent));
    let other = PageMap::new(pages).expect("a small map");
    assert_eq!(other.import(&sent), Ok(()));
    assert_eq!(other.image(), sent);
    true
}

pub(crate) fn file_seeds() -> Vec<Vec<u8>> {
    vec![
        vec![0; 16],
        vec![1, 2, 3, 4, 0, 1, 1, 1],
        vec![5, 6, 8, 0x0d, 0x15, 0x21, 0x36, 0x31],
    ]
}

/// The input is everything before the image's checksum.
pub(crate) fn image(input: &[u8]) -> bool {
    let _ = PageMapImage::decode(input);
    let mut bytes = input.to_vec();
    bytes.extend(crc32fast::hash(input).to_le_bytes());
    // The documented bound, doubled while a vector grows.
    let limit = 32 * bytes.len() + 256;
    let Ok(image) = bounded(limit, || PageMapImage::decode(&bytes)) else {
        return false;
    };
    assert_eq!(image.encode(), bytes, "there is one form");
    if image.pages() <= 4096 {
        let map = PageMap::new(image.pages()).expect("a small map");
        assert_eq!(map.import(&image), Ok(()));
        assert_eq!(map.image(), image);
    }
    assert_eq!(image.state(PageIndex(image.pages())), None);
    true
}

pub(crate) fn image_seeds() -> Vec<Vec<u8>> {
    let seed = |runs: &[(u64, u8)]| {
        let mut bytes = b"PTPAGMAP\x01\0\0\0".to_vec();
        bytes.extend(runs.iter().map(|run| run.0).sum::<u64>().to_le_bytes());
        for (count, state) in runs {
            let mut number = count << 3 | u64::from(*state);
            while number >= 0x80 {
                bytes.push(number.to_le_bytes()[0] | 0x80);
                number >>= 7;
            }
            bytes.push(number.to_le_bytes()[0]);
        }
        bytes
    };
    vec![
        seed(&[(8, 0)]),
        seed(&[(1, 1), (2, 2), (300, 3), (1, 4), (9, 0)]),
        seed(&[(1 << 40, 1), (7, 0)]),
    ]
}
