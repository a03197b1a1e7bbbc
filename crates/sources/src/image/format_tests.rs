use proptest::prelude::*;

use super::super::index::{Encoding, Entry, Index, StoredChunk};
use super::*;
use crate::open::Location;

/// An index of `map`, whose stored chunks have these lengths in the file.
fn index(map: &[Entry], lengths: &[u32]) -> Index {
    let mut index = Index::default();
    let mut offset = HEADER_BYTES.into();
    for &bytes in lengths {
        index.store(StoredChunk {
            offset,
            bytes,
            encoding: Encoding::Zstd,
            checksum: [7; 32],
        });
        offset += u64::from(bytes);
    }
    for &entry in map {
        index.push(entry);
    }
    index
}

fn base() -> BaseReference {
    BaseReference {
        digest: Digest::of(b"base"),
        place: BasePlace::Beside("base.img".into()),
    }
}

/// The header of an image with this index, correct in all parts.
fn header(memory_bytes: u64, index: &Index, base: Option<BaseReference>) -> Header {
    let end = index
        .stored
        .last()
        .map_or(u64::from(HEADER_BYTES), StoredChunk::end);
    let mut header = Header {
        memory_bytes,
        chunk_bytes: 4096,
        stored_chunks: u32::try_from(index.stored().len()).expect("few"),
        index_offset: end,
        digest: Digest([0; 32]),
        base,
    };
    header.digest = header.digest_with(&index.encode());
    header
}

/// The most usual image: all kinds of chunks, and a short one at the end.
fn usual() -> (Header, Index) {
    let map = [
        Entry::Zero,
        Entry::Stored(0),
        Entry::Base,
        Entry::Stored(1),
        Entry::Stored(0),
        Entry::Stored(2),
    ];
    let index = index(&map, &[100, 4095, 9]);
    (header(5 * 4096 + 10, &index, Some(base())), index)
}

/// Reads header and index as [`super::super::layers`] does.
fn read(header: &[u8], index: &[u8], file_bytes: u64) -> Result<(Header, Index), FormatError> {
    let header = Header::decode(header, file_bytes)?;
    let index = Index::decode(index, &header)?;
    Ok((header, index))
}

fn file_bytes(header: &Header) -> u64 {
    header.index_offset + header.index_bytes()
}

#[test]
fn what_is_written_is_read() {
    let (header, index) = usual();
    let bytes = header.encode();
    assert_eq!(bytes.len(), 4096);
    let result = read(&bytes, &index.encode(), file_bytes(&header));
    assert_eq!(result, Ok((header, index)));
    let empty = Index::default();
    let header = self::header(0, &empty, None);
    assert_eq!(read(&header.encode(), &[], 4096), Ok((header, empty)));
}

#[test]
fn every_byte_of_header_and_index_is_covered() {
    let (header, index) = usual();
    let (bytes, index) = (header.encode(), index.encode());
    let all = file_bytes(&header);
    for at in 0..bytes.len() {
        let mut changed = bytes.clone();
        changed[at] ^= 1 << (at % 8);
        assert_eq!(
            read(&changed, &index, all),
            Err(FormatError::HeaderDamaged),
            "byte {at} of the header"
        );
    }
    for at in 0..index.len() {
        let mut changed = index.clone();
        changed[at] ^= 1 << (at % 8);
        assert_eq!(
            read(&bytes, &changed, all),
            Err(FormatError::IndexDamaged),
            "byte {at} of the index"
        );
    }
}

#[test]
fn another_length_is_refused() {
    let (header, _) = usual();
    let wanted = file_bytes(&header);
    let bytes = header.encode();
    for file in [4096, wanted - 1, wanted + 1, u64::MAX] {
        let refused = Err(FormatError::Length {
            bytes: file,
            wanted,
        });
        assert_eq!(Header::decode(&bytes, file), refused);
    }
    for length in [16, 17, 4095] {
        let refused = Err(FormatError::Length {
            bytes: length as u64,
            wanted: 4096,
        });
        assert_eq!(Header::decode(&bytes[..length], length as u64), refused);
    }
    let refused = Err(FormatError::NotAnImage);
    assert_eq!(Header::decode(&bytes[..15], 15), refused);
    assert_eq!(Header::decode(&[0; 4096], 4096), refused);
}

#[test]
fn a_header_with_a_checksum_and_impossible_values_is_refused() {
    let (header, _) = usual();
    let all = file_bytes(&header);
    let refused = |at: usize, value: &[u8]| {
        let mut bytes = header.encode();
        bytes[at..at + value.len()].copy_from_slice(value);
        seal(&mut bytes);
        Header::decode(&bytes, all).expect_err("it is refused")
    };
    let number = |at, value: u64| refused(at, &value.to_le_bytes());
    let small = |at, value: u32| refused(at, &value.to_le_bytes());
    assert_eq!(small(AT_VERSION, 2), FormatError::Version { found: 2 });
    for bytes in [0, 1, 2048, 4097, 12288, 8 << 20, u32::MAX] {
        assert_eq!(
            small(AT_CHUNK_BYTES, bytes),
            FormatError::ChunkBytes { bytes }
        );
    }
    for bytes in [u64::MAX, MOST_MEMORY_BYTES + 1, MOST_MEMORY_BYTES] {
        assert_eq!(
            number(AT_MEMORY_BYTES, bytes),
            FormatError::MemoryBytes { bytes }
        );
    }
    let misplaced = [
        number(AT_MEMORY_BYTES, 1 << 40),
        number(AT_MEMORY_BYTES, 0),
        number(AT_INDEX_OFFSET, 0),
        number(AT_INDEX_OFFSET, 4095),
        number(AT_INDEX_OFFSET, u64::MAX),
        number(AT_INDEX_BYTES, u64::MAX),
        number(AT_INDEX_BYTES, 0),
        small(AT_STORED_CHUNKS, u32::MAX),
        small(AT_STORED_CHUNKS, 7),
        small(AT_STORED_CHUNKS, 2),
    ];
    for error in misplaced {
        assert!(matches!(error, FormatError::Index { .. }), "{error}");
    }
    let error = number(AT_INDEX_OFFSET, 4096);
    assert!(matches!(error, FormatError::Length { .. }), "{error}");
    for offset in [
        AT_STORED_CHUNKS + 4,
        AT_DIGEST - 1,
        AT_BASE + 8,
        AT_CHECKSUM - 1,
    ] {
        assert_eq!(refused(offset, &[1]), FormatError::Reserved { offset });
    }
    let malformed = [
        small(AT_BASE_KIND, 0),
        small(AT_BASE_KIND, 4),
        // "base.img" is no absolute path, and no URL.
        small(AT_BASE_KIND, 2),
        small(AT_BASE_KIND, 3),
        small(AT_BASE_BYTES, 0),
        small(AT_BASE_BYTES, u32::MAX),
        small(AT_BASE_BYTES, 5000),
        refused(AT_BASE, b"a/b"),
        refused(AT_BASE, b"/"),
        refused(AT_BASE, b"\0"),
    ];
    for error in malformed {
        assert_eq!(error, FormatError::BasePlace);
    }
}

#[test]
fn an_index_with_a_digest_and_impossible_values_is_refused() {
    use Entry::{Base, Stored, Zero};
    let refused = |map: &[Entry], change: &dyn Fn(&mut Index), base: Option<BaseReference>| {
        let mut index = index(map, &[100, 4095, 9]);
        let mut header = header(map.len() as u64 * 4096, &index, base);
        change(&mut index);
        let bytes = index.encode();
        header.digest = header.digest_with(&bytes);
        read(&header.encode(), &bytes, file_bytes(&header)).expect_err("it is refused")
    };
    let nothing = |_: &mut Index| {};
    let maps: [&[Entry]; 5] = [
        &[Stored(0), Base, Stored(1), Stored(2)],
        &[Stored(0), Stored(1), Stored(3), Stored(2)],
        &[Stored(1), Stored(0), Stored(2)],
        &[Stored(0), Stored(1), Stored(2), Stored(RESERVED)],
        &[Stored(0), Stored(1), Stored(2), Stored(0xffff_fffd)],
    ];
    for map in maps {
        let error = refused(map, &nothing, None);
        assert!(
            matches!(error, FormatError::Entry { .. }),
            "{map:?}: {error}"
        );
    }
    let error = refused(&[Stored(0), Stored(1), Zero, Zero], &nothing, None);
    assert_eq!(error, FormatError::Unnamed { unnamed: 1 });

    let map = [Stored(0), Stored(1), Stored(2)];
    let changes: [&dyn Fn(&mut Index); 9] = [
        // Overlapping the one before, a gap, outside the data, in the header, beyond all.
        &|index| index.stored[1].offset -= 1,
        &|index| index.stored[1].offset += 1,
        &|index| index.stored[2].bytes += 1,
        &|index| index.stored[0].offset = 0,
        &|index| index.stored[0].offset = u64::MAX,
        &|index| index.stored[0].bytes = u32::MAX,
        &|index| index.stored[1].bytes = 4096,
        &|index| index.stored[1].bytes = 0,
        &|index| index.stored[0].encoding = Encoding::Raw,
    ];
    for (number, change) in changes.into_iter().enumerate() {
        let error = refused(&map, change, None);
        assert!(
            matches!(error, FormatError::Stored { .. }),
            "{number}: {error}"
        );
    }
    // A byte of data that belongs to no chunk.
    let error = refused(&map, &|index| index.stored[2].bytes -= 1, None);
    assert!(matches!(error, FormatError::Index { .. }), "{error}");
}

#[test]
fn a_short_chunk_shares_nothing() {
    let index = index(&[Entry::Stored(0), Entry::Stored(0)], &[100]);
    let header = header(4096 + 10, &index, None);
    let error = read(&header.encode(), &index.encode(), file_bytes(&header));
    assert_eq!(error, Err(FormatError::Entry { chunk: 1, entry: 0 }));
}

#[test]
fn an_unknown_encoding_is_refused() {
    let index = index(&[Entry::Stored(0)], &[100]);
    let mut header = header(4096, &index, None);
    let mut bytes = index.encode();
    bytes[4 + 12] = 2;
    header.digest = header.digest_with(&bytes);
    let error = read(&header.encode(), &bytes, file_bytes(&header));
    assert!(matches!(
        error,
        Err(FormatError::Stored { encoding: 2, .. })
    ));
}

#[test]
fn a_digest_depends_on_everything_but_the_bases_place() {
    let (header, index) = usual();
    let digest = |change: &dyn Fn(&mut Header)| {
        let mut header = header.clone();
        change(&mut header);
        header.digest_with(&index.encode())
    };
    assert_eq!(digest(&|_| {}), header.digest);
    assert_ne!(digest(&|header| header.memory_bytes += 1), header.digest);
    assert_ne!(digest(&|header| header.chunk_bytes *= 2), header.digest);
    assert_ne!(digest(&|header| header.base = None), header.digest);
    let moved = digest(&|header| {
        if let Some(base) = &mut header.base {
            base.place = BasePlace::Path("/elsewhere".into());
        }
    });
    assert_eq!(moved, header.digest);
}

#[test]
fn a_base_is_beside_its_image() {
    let beside = BasePlace::Beside("base.img".into());
    let cases = [
        ("/a/b/image", "/a/b/base.img"),
        ("image", "base.img"),
        ("../image", "../base.img"),
        ("s3://bucket/a/image", "s3://bucket/a/base.img"),
        ("s3://bucket/image?x/y", "s3://bucket/image?x/base.img"),
        ("https://host/a/image?v=1/2", "https://host/a/base.img"),
        ("https://host", "https://host/base.img"),
    ];
    for (image, base) in cases {
        let image: Location = image.parse().expect("a location");
        assert_eq!(beside.resolve(&image).to_string(), base);
        for other in ["/x/base", "gs://bucket/base"] {
            let place = match other.parse().expect("a location") {
                Location::Path(path) => BasePlace::Path(path),
                Location::Url(url) => BasePlace::Url(url),
            };
            assert_eq!(place.resolve(&image).to_string(), other);
        }
    }
}

/// Header and index with checksums that fit, whatever they say.
fn resealed(mut header: Vec<u8>, index: &[u8]) -> Vec<u8> {
    if let Ok(decoded) = sealed_header(&mut header) {
        header[AT_DIGEST..AT_DIGEST + 32].copy_from_slice(&decoded.digest_with(index).0);
    }
    seal(&mut header);
    header
}

/// What the header would be with a checksum, for a file as long as it says.
fn sealed_header(header: &mut [u8]) -> Result<Header, FormatError> {
    seal(header);
    let end = u64_at(header, AT_INDEX_OFFSET).saturating_add(u64_at(header, AT_INDEX_BYTES));
    Header::decode(header, end)
}

proptest! {
    #[test]
    fn arbitrary_bytes_are_refused_without_a_panic(
        bytes in prop::collection::vec(any::<u8>(), 0..5000),
        file_bytes in any::<u64>(),
        has_magic in any::<bool>(),
        is_sealed in any::<bool>(),
    ) {
        let mut bytes = bytes;
        if has_magic && bytes.len() >= MAGIC.len() {
            bytes[..MAGIC.len()].copy_from_slice(&MAGIC);
        }
        if is_sealed && bytes.len() >= HEADER_LEN {
            seal(&mut bytes[..HEADER_LEN]);
        }
        prop_assert!(Header::decode(&bytes, file_bytes).is_err());
    }

    /// What is accepted after a change is an image in itself: it is read and written as it is.
    #[test]
    fn changed_bytes_with_checksums_are_refused_or_consistent(
        header_changes in prop::collection::vec((16..AT_BASE + 16, any::<u8>()), 0..3),
        index_changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
    ) {
        let (header, index) = usual();
        let (mut header, mut index) = (header.encode(), index.encode());
        for (at, value) in header_changes {
            header[at] = value;
        }
        for (at, value) in index_changes {
            let at = at.index(index.len());
            index[at] = value;
        }
        let header = resealed(header, &index);
        let end = u64_at(&header, AT_INDEX_OFFSET).saturating_add(u64_at(&header, AT_INDEX_BYTES));
        if let Ok((decoded, read)) = read(&header, &index, end) {
            prop_assert_eq!(decoded.encode(), header);
            prop_assert_eq!(read.encode(), index);
            for chunk in 0..decoded.entries() {
                let entry = read.entry(usize::try_from(chunk).expect("few"));
                if let Entry::Stored(number) = entry {
                    let stored = &read.stored()[usize::try_from(number).expect("few")];
                    prop_assert!(stored.offset >= 4096 && stored.end() <= decoded.index_offset);
                    prop_assert!(stored.bytes <= decoded.bytes_of(chunk));
                }
            }
        }
    }
}
