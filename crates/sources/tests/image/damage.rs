//! Damaged images: refused when they are opened, or named when they are read. Never other content.

use std::fs;

use crate::common::{Place, Random, assert_same, memory, on, read, read_now};
use pagetide_sources::image::{CreateOptions, MOST_NAMED, VerifyOptions, verify};
use pagetide_sources::{
    GuestImage, ImageError, Location, OpenError, OpenOptions, PagetideImage, open,
};

/// What the image gives, chunk by chunk, is right or an error; how many errors there are.
fn errors_in(image: &dyn GuestImage, wanted: &[u8], what: &str) -> usize {
    let mut errors = 0;
    for (number, wanted) in (0..).zip(wanted.chunks(64 << 10)) {
        let offset = number * (64 << 10);
        if let Some(given) = read_now(image, offset, wanted.len()) {
            assert_same(&given, wanted, what);
        }
        match read(image, offset, wanted.len()) {
            Ok(given) => assert_same(&given, wanted, what),
            Err(ImageError::Damaged { offset, .. }) => {
                assert!(offset >= 4096, "{what}");
                errors += 1;
            }
            Err(error) => unreachable!("{what}: {error}"),
        }
    }
    errors
}

fn verified(place: &Place, name: &str) -> u64 {
    let found = verify(&place.open(name), &VerifyOptions::default(), &mut |_, _| {});
    found.damaged_chunks
}

#[test]
fn no_flipped_bit_changes_content() {
    let place = Place::new();
    let content = memory(50, 150, 100);
    place.write("raw", &content);
    let info = place.create("raw", "image", &CreateOptions::default()).info;
    let file = fs::read(place.path("image")).expect("it is there");
    let data = 4096..4096 + usize::try_from(info.stored_bytes).expect("it fits");
    let location = Location::Path(place.path("image"));
    let mut random = Random(51);
    let everywhere = (0..file.len()).step_by(997);
    let at_random = (0..150).map(|_| usize::try_from(random.below(file.len() as u64)).unwrap());
    // All of the first and the last bytes: the magic, and the index.
    let edges = (0..200).chain(data.end - 10..file.len());
    for at in edges.chain(everywhere).chain(at_random) {
        let mut damaged = file.clone();
        damaged[at] ^= 1 << (at % 8);
        place.write("image", &damaged);
        let what = format!("byte {at} flipped");
        match open(&location, &OpenOptions::default()) {
            Err(OpenError::Format { source, .. }) => {
                assert!(
                    !data.contains(&at) && source.is_damage(),
                    "{what}: {source}"
                );
            }
            Err(error) => unreachable!("{what}: {error}"),
            Ok(image) => {
                assert!(data.contains(&at), "{what} is not noticed");
                assert!(errors_in(&*image, &content, &what) > 0, "{what}");
                assert_eq!(verified(&place, "image"), 1, "{what}");
            }
        }
    }
}

#[test]
fn no_truncated_image_opens() {
    let place = Place::new();
    place.write("raw", &memory(52, 100, 0));
    let info = place.create("raw", "image", &CreateOptions::default()).info;
    let file = fs::read(place.path("image")).expect("it is there");
    let data_end = 4096 + usize::try_from(info.stored_bytes).expect("it fits");
    let near = |at: usize| [at - 1, at, at + 1];
    let lengths = [
        16,
        17,
        100,
        4095,
        4096,
        4097,
        file.len() - 1,
        file.len() / 2,
    ];
    let lengths = lengths.into_iter().chain(near(data_end));
    let longer = [file.clone(), vec![0; 4096]].concat();
    let cut = lengths
        .map(|length| &file[..length])
        .chain([longer.as_slice()]);
    for content in cut {
        place.write("image", content);
        let length = content.len();
        let error = open(
            &Location::Path(place.path("image")),
            &OpenOptions::default(),
        );
        match error.expect_err("it is refused") {
            OpenError::Format { source, .. } if source.is_damage() => {}
            error => unreachable!("{length} bytes: {error}"),
        }
    }
    // Below the magic's length nothing tells an image from raw memory.
    for length in [0, 1, 15] {
        place.write("image", &file[..length]);
        let location = Location::Path(place.path("image"));
        assert!(PagetideImage::open(&location, &OpenOptions::default()).is_err());
    }
}

#[test]
fn a_file_that_is_cut_after_it_was_opened_gives_errors() {
    let place = Place::new();
    let content = Random(53).bytes(1 << 20);
    let raw = place.write("raw", &content);
    place.create("raw", "image", &CreateOptions::default());
    let image = place.open("image");
    let file = fs::File::options()
        .write(true)
        .open(place.path("image"))
        .expect("it is there");
    file.set_len(4096 + 100_000).expect("it is cut");
    assert_same(
        &read(&image, 0, 65_536).expect("it is there"),
        &content[..65_536],
        "the first",
    );
    for chunk in 1..16 {
        let error = read(&image, chunk * 65_536, 4096).expect_err("it is gone");
        assert!(matches!(error, ImageError::Blob(_)), "{error}");
        assert_eq!(read_now(&image, chunk * 65_536, 4096), None);
    }
    let found = verify(&image, &VerifyOptions::default(), &mut |_, _| {});
    assert_eq!(found.damaged_chunks, 15);
    drop(raw);
}

#[test]
fn every_damaged_chunk_of_every_layer_is_counted() {
    let place = Place::new();
    let mut content = Random(54).bytes(40 << 16);
    place.write("raw", &content);
    place.create("raw", "base", &CreateOptions::default());
    content[..3 << 16].copy_from_slice(&Random(55).bytes(3 << 16));
    place.write("raw", &content);
    place.create("raw", "diff", &on(&place.path("base")));
    assert_eq!(verified(&place, "diff"), 0);
    let damage = |name: &str, chunks: &[usize]| {
        let mut file = fs::read(place.path(name)).expect("it is there");
        for chunk in chunks {
            file[4096 + (chunk << 16) + 777] ^= 0x80;
        }
        place.write(name, &file);
    };
    damage("base", &(5..35).collect::<Vec<_>>());
    damage("diff", &[1]);
    let found = verify(
        &place.open("diff"),
        &VerifyOptions::default(),
        &mut |_, _| {},
    );
    assert_eq!(
        (found.layers, found.chunks, found.damaged_chunks),
        (2, 43, 31)
    );
    assert_eq!(found.damage.len(), MOST_NAMED);
    let named = found.damage.iter().map(|error| match error {
        ImageError::Damaged {
            name,
            chunk,
            offset,
        } => {
            assert_eq!(*offset, 4096 + (chunk << 16));
            (name.rsplit('/').next().unwrap_or_default(), *chunk)
        }
        error => unreachable!("{error}"),
    });
    let wanted = [("diff", 1)]
        .into_iter()
        .chain((5..24).map(|chunk| ("base", chunk)));
    assert!(named.eq(wanted));
    let image = place.open("diff");
    let error = read(&image, 70_000, 10).expect_err("it is damaged");
    assert_eq!(
        error.to_string(),
        format!(
            "{}: chunk 1, at offset 69632 of the file, differs from its checksum: the image is damaged",
            place.path("diff").display()
        )
    );
}
