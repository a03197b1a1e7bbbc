//! Images that the writer does not write: forged, with checksums that fit.

use std::path::Path;

use super::format::{HEADER_BYTES, Header};
use super::index::{Encoding, Entry, Index, StoredChunk};
use super::*;
use crate::{Digest, GuestImage, ImageError, Location, OpenError, OpenOptions, open};
use pagetide_memory::Urgency;

/// Writes an image of one chunk of 64K, stored as these bytes.
fn forge(path: &Path, stored: &[u8], base: Option<BaseReference>) -> Digest {
    let mut index = Index::default();
    index.push(Entry::Stored(0));
    index.store(StoredChunk {
        offset: HEADER_BYTES.into(),
        bytes: u32::try_from(stored.len()).expect("it is short"),
        encoding: Encoding::Zstd,
        checksum: *blake3::hash(stored).as_bytes(),
    });
    let mut header = Header {
        memory_bytes: 64 << 10,
        chunk_bytes: 64 << 10,
        stored_chunks: 1,
        index_offset: u64::from(HEADER_BYTES) + stored.len() as u64,
        digest: Digest([0; 32]),
        base,
    };
    let index = index.encode();
    header.digest = header.digest_with(&index);
    let file = [header.encode(), stored.to_vec(), index].concat();
    std::fs::write(path, file).expect("it is written");
    header.digest
}

fn opened(path: &Path) -> Result<PagetideImage, OpenError> {
    PagetideImage::open(&Location::Path(path.into()), &OpenOptions::default())
}

#[test]
fn content_of_another_length_is_undecodable() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("image");
    let compress = |bytes: usize| zstd::bulk::compress(&vec![1; bytes], 1).expect("it compresses");
    let short = compress((64 << 10) - 1);
    // A frame of 64 MiB in a few kilobytes, and two frames that are together as long as the chunk.
    let bomb = compress(64 << 20);
    let cut = &compress(64 << 10)[..12];
    for stored in [&short, &bomb, cut, b"no frame", &compress(0)] {
        forge(&path, stored, None);
        let image = opened(&path).expect("the header is sound");
        for bytes in [4096, 64 << 10] {
            let mut buffer = vec![0; bytes];
            for _ in 0..2 {
                let error = image
                    .read(0, &mut buffer, Urgency::Urgent)
                    .expect_err("refused");
                let ImageError::Undecodable { chunk, offset, .. } = error else {
                    unreachable!("{error}");
                };
                assert_eq!((chunk, offset), (0, 4096));
                assert_eq!(image.read_now(0, &mut buffer, Urgency::Urgent), None);
            }
        }
        let found = verify(&image, &VerifyOptions::default(), &mut |_, _| {});
        assert_eq!(found.damaged_chunks, 1);
    }
    let halves = [compress(32 << 10), compress(32 << 10)].concat();
    forge(&path, &halves, None);
    let mut buffer = vec![0; 64 << 10];
    let image = opened(&path).expect("the header is sound");
    image
        .read(0, &mut buffer, Urgency::Bulk)
        .expect("two frames are as good as one");
    assert_eq!(buffer, vec![1; 64 << 10]);
}

fn beside(name: &str, digest: Digest) -> Option<BaseReference> {
    let place = BasePlace::Beside(name.into());
    Some(BaseReference { digest, place })
}

#[test]
fn an_image_is_not_its_own_base() {
    let directory = tempfile::tempdir().expect("a directory");
    let within = |name: &str| directory.path().join(name);
    let anything = Digest([7; 32]);
    forge(&within("self"), b"?", beside("self", anything));
    let digest = forge(&within("lower"), b"?", beside("upper", anything));
    forge(&within("upper"), b"?", beside("lower", digest));
    std::os::unix::fs::symlink("linked", within("link")).expect("a link");
    forge(&within("linked"), b"?", beside("link", anything));
    for name in ["self", "upper", "linked"] {
        let error = open(&Location::Path(within(name)), &OpenOptions::default());
        let error = error.expect_err("it is refused");
        assert!(matches!(error, OpenError::Cycle { .. }), "{name}: {error}");
    }
}

#[test]
fn sixteen_layers_are_the_most() {
    let directory = tempfile::tempdir().expect("a directory");
    let within = |name: usize| directory.path().join(name.to_string());
    let mut digest = forge(&within(1), b"?", None);
    for number in 2..=MOST_LAYERS + 1 {
        let base = beside(&(number - 1).to_string(), digest);
        digest = forge(&within(number), b"?", base);
    }
    assert_eq!(opened(&within(16)).expect("it opens").layers(), 16);
    let error = opened(&within(17)).expect_err("it is refused");
    assert!(matches!(error, OpenError::TooManyLayers { .. }), "{error}");

    let raw = directory.path().join("raw");
    std::fs::write(&raw, [1; 4096]).expect("it is written");
    let options = CreateOptions {
        base: Some(Location::Path(within(16))),
        ..CreateOptions::default()
    };
    let image = directory.path().join("image");
    let error =
        create(&raw, &image.clone().into(), &options, &mut |_, _| {}).expect_err("it is refused");
    assert!(
        matches!(error, CreateError::TooManyLayers { .. }),
        "{error}"
    );
    assert!(!image.exists());
}

#[test]
fn a_chain_of_errors_says_where_and_why() {
    let directory = tempfile::tempdir().expect("a directory");
    let image = directory.path().join("image");
    forge(&image, b"?", beside("base", Digest([7; 32])));
    let error = opened(&image).expect_err("there is no base");
    let OpenError::Base { source, .. } = &error else {
        unreachable!("{error}");
    };
    assert!(matches!(
        **source,
        OpenError::Blob(crate::BlobError::NotFound { .. })
    ));
    let path = directory.path().canonicalize().expect("it is there");
    let path = path.display();
    assert_eq!(
        error.to_string(),
        format!("cannot open {path}/base, the base of {}", image.display())
    );
    std::fs::write(directory.path().join("base"), [0; 5000]).expect("it is written");
    let error = opened(&image).expect_err("the base is raw");
    let OpenError::Base { source, .. } = &error else {
        unreachable!("{error}");
    };
    assert!(matches!(
        **source,
        OpenError::Format {
            source: FormatError::NotAnImage,
            ..
        }
    ));
}
