use proptest::prelude::*;

use super::stream::*;
use super::*;
use crate::file::FileBlob;

fn blob(bytes: &[u8]) -> (tempfile::TempDir, Arc<dyn Blob>) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("file");
    std::fs::write(&path, bytes).unwrap();
    (directory, Arc::new(FileBlob::open(&path).unwrap()))
}

fn name(text: &str) -> Vec<u8> {
    let length = u8::try_from(text.len()).unwrap();
    [&[length][..], text.as_bytes()].concat()
}

fn capabilities(names: &[&str]) -> Vec<u8> {
    let count = u32::try_from(names.len()).unwrap();
    let mut bytes = [&[SUBSECTION][..], &name("configuration/capabilities")].concat();
    bytes.extend([1_u32, count].map(u32::to_be_bytes).concat());
    bytes.extend(names.iter().flat_map(|text| name(text)));
    bytes
}

fn head(parts: &[Vec<u8>], section: &str, all: u64) -> Vec<u8> {
    let mut bytes = [MAGIC, VERSION].map(u32::to_be_bytes).concat();
    bytes.push(CONFIGURATION);
    bytes.extend(2_u32.to_be_bytes());
    bytes.extend(b"pc");
    bytes.extend(parts.concat());
    bytes.push(SECTION);
    bytes.extend(1_u32.to_be_bytes());
    bytes.extend(name(section));
    bytes.extend([0_u32, 4].map(u32::to_be_bytes).concat());
    bytes.extend((all | MEM_SIZE).to_be_bytes());
    bytes
}

/// A RAM block of three pages, of which the first and the last are in the file.
fn block(bytes: &mut Vec<u8>, text: &str) {
    bytes.extend(name(text));
    bytes.extend((3_u64 << 12).to_be_bytes());
    bytes.extend(1_u32.to_be_bytes());
    bytes.extend(4096_u64.to_be_bytes());
    let bitmap = bytes.len() as u64 + 16;
    let pages = (bitmap + 8).next_multiple_of(1 << 14);
    bytes.extend([bitmap, pages].map(u64::to_be_bytes).concat());
    bytes.extend(5_u64.to_le_bytes());
    bytes.resize(usize::try_from(pages).unwrap(), 0);
    for fill in [7, 8, 9] {
        bytes.extend([fill; 4096]);
    }
}

/// The end of memory's section, in two parts with a command between them.
fn end() -> Vec<u8> {
    let footer = [&[FOOTER][..], &1_u32.to_be_bytes()].concat();
    let flags = |flags: &[u64]| flags.iter().flat_map(|flag| flag.to_be_bytes()).collect();
    let part = |kind| [&[kind][..], &1_u32.to_be_bytes()].concat();
    let parts: [Vec<u8>; 8] = [
        flags(&[END_OF_PART]),
        footer.clone(),
        part(SECTION_PART),
        flags(&[FLUSH, END_OF_PART]),
        footer.clone(),
        vec![COMMAND, 0, 11, 0, 1, 77],
        [part(SECTION_END), flags(&[END_OF_PART])].concat(),
        footer,
    ];
    parts.concat()
}

fn file(names: &[&str]) -> Vec<u8> {
    let all = (3 * names.len() as u64) << 12;
    let mut bytes = head(&[capabilities(&["mapped-ram"])], "ram", all);
    names.iter().for_each(|text| block(&mut bytes, text));
    bytes.extend(end());
    bytes
}

fn refused(bytes: &[u8], wanted: Option<&str>) -> MappedRamError {
    let (_directory, blob) = blob(bytes);
    MappedRam::open(blob, wanted).unwrap_err()
}

#[test]
fn a_page_whose_bit_is_clear_is_zero_whatever_is_there() {
    let (_directory, blob) = blob(&file(&["a", "b"]));
    let memory = MappedRam::open(blob, Some("b")).unwrap();
    assert_eq!(memory.bytes(), 3 << 12);
    assert_eq!(memory.block(), "b (12288 bytes)");
    assert_eq!(memory.others(), ["a (12288 bytes)"]);
    let mut all = vec![1; 3 << 12];
    memory.read(0, &mut all, Urgency::Urgent).unwrap();
    let wanted = [[7_u8; 4096], [0; 4096], [9; 4096]].concat();
    assert!(all == wanted);
    let mut part = vec![1; 4096];
    let filled = memory.read(4096, &mut part, Urgency::Urgent).unwrap();
    assert_eq!(filled, Filled::Zero);
    memory.read(2048, &mut part, Urgency::Urgent).unwrap();
    assert!(part == [[7_u8; 2048], [0; 2048]].concat());
    assert!(memory.read(8192, &mut all, Urgency::Urgent).is_err());
}

#[test]
fn a_block_is_chosen_by_its_length_or_its_name() {
    let two = file(&["a", "b"]);
    let error = refused(&two, None).to_string();
    assert!(
        error.contains("a (12288 bytes), b (12288 bytes)"),
        "{error}"
    );
    let error = refused(&two, Some("c")).to_string();
    assert!(error.contains("no RAM block c"), "{error}");
    let (_directory, blob) = blob(&file(&["a"]));
    let memory = MappedRam::open(blob, None).unwrap();
    assert_eq!(memory.block(), "a (12288 bytes)");
}

#[test]
fn what_has_no_places_for_its_pages_is_named() {
    assert!(matches!(refused(&[0; 64], None), MappedRamError::NotQemu));
    let plain = head(&[], "ram", 4096);
    assert!(matches!(refused(&plain, None), MappedRamError::NotMapped));
    let both = capabilities(&["mapped-ram", "x-ignore-shared"]);
    let shared = head(&[both], "ram", 4096);
    assert!(matches!(
        refused(&shared, None),
        MappedRamError::IgnoresShared
    ));
    let mapped = || capabilities(&["mapped-ram"]);
    let other = [&[SUBSECTION][..], &name("configuration/new"), &[0; 4]].concat();
    let unknown = refused(&head(&[mapped(), other], "ram", 4096), None);
    assert!(
        unknown.to_string().contains("configuration/new"),
        "{unknown}"
    );
    let first = refused(&head(&[mapped()], "dirty-bitmap", 4096), None);
    assert!(first.to_string().contains("dirty-bitmap"), "{first}");
    let version = [MAGIC, 2].map(u32::to_be_bytes).concat();
    assert!(matches!(
        refused(&version, None),
        MappedRamError::Version { version: 2 }
    ));
}

/// Kind: what is missing reads as zeroes, and nobody says so.
#[test]
fn a_file_that_ends_early_has_no_memory() {
    let whole = file(&["a", "b"]);
    let (_directory, blob_of_whole) = blob(&whole);
    assert!(MappedRam::open(blob_of_whole, Some("a")).is_ok());
    for end in 0..whole.len() {
        // Each byte of what is no page, and some of the pages.
        if (500..50_000).contains(&end) && !end.is_multiple_of(1111) {
            continue;
        }
        let error = refused(&whole[..end], Some("a"));
        let is_named = matches!(
            error,
            MappedRamError::NotQemu | MappedRamError::Damaged { .. } | MappedRamError::NotEnded
        );
        assert!(is_named, "{end}: {error}");
    }
    let head = whole.len() - end().len();
    assert!(matches!(
        refused(&whole[..head], Some("a")),
        MappedRamError::NotEnded
    ));
    // QEMU that was killed leaves holes.
    let mut holes = whole.clone();
    holes[head..].fill(0);
    assert!(matches!(
        refused(&holes, Some("a")),
        MappedRamError::NotEnded
    ));
}

#[test]
fn places_that_make_no_sense_are_refused() {
    let whole = file(&["a"]);
    let at = whole
        .windows(2)
        .position(|bytes| bytes == b"\x01a")
        .unwrap()
        + 2;
    // Behind the name: the block's bytes, a version, a page's bytes, the bitmap's place, the pages' place.
    for (place, number) in [
        (at, 0),
        (at, 4097),
        (at, !4095),
        (at + 12, 0),
        (at + 12, 1 << 20),
        (at + 20, 0),
        (at + 20, u64::MAX),
        (at + 28, 0),
        (at + 28, u64::MAX),
    ] {
        let mut bytes = whole.clone();
        bytes[place..place + 8].copy_from_slice(&number.to_be_bytes());
        let error = refused(&bytes, None);
        assert!(
            matches!(error, MappedRamError::Damaged { .. }),
            "{place}: {error}"
        );
    }
    let twice = refused(&file(&["a", "a"]), None).to_string();
    assert!(twice.contains("there twice"), "{twice}");
    let parts = vec![capabilities(&["mapped-ram"]); 2];
    let twice = refused(&head(&parts, "ram", 4096), None).to_string();
    assert!(twice.contains("there twice"), "{twice}");
}

#[test]
fn a_file_that_is_written_to_is_no_memory_any_more() {
    let (directory, blob) = blob(&file(&["a"]));
    let memory = MappedRam::open(blob, None).unwrap();
    let path = directory.path().join("file");
    let file = std::fs::File::options().write(true).open(path).unwrap();
    file.set_len(1).unwrap();
    for offset in [0, 4096] {
        let read = memory.read(offset, &mut [0; 4096], Urgency::Urgent);
        assert!(read.is_err(), "{offset}");
    }
}

proptest! {
    #[test]
    fn no_bytes_make_it_panic(
        changes in prop::collection::vec((0_usize..300, any::<u8>()), 0..4),
        end in 0_usize..60_000,
    ) {
        let mut bytes = file(&["a", "b"]);
        for (at, byte) in changes {
            bytes[at] = byte;
        }
        bytes.truncate(end);
        let (_directory, blob) = blob(&bytes);
        if let Ok(memory) = MappedRam::open(blob, Some("a")) {
            for page in 0..3 {
                let _ = memory.read(page << 12, &mut [0; 4096], Urgency::Urgent);
            }
        }
    }
}
