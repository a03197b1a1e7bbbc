//! Images: what is written is read, in one layer and in several.

use std::fs;
use std::num::NonZeroUsize;
use std::os::unix::fs::MetadataExt;

use crate::common::{
    Place, Random, assert_content, assert_same, chunks_of, memory, on, read, read_now,
};
use pagetide_memory::Urgency;
use pagetide_pager::Filled;
use pagetide_sources::image::{
    BasePlace, CreateError, CreateOptions, ExtractError, ExtractOptions, FormatError, Holes,
    ImageInfo, TargetError, VerifyOptions, extract, verify,
};
use pagetide_sources::{
    Bases, BlobError, GuestImage, ImageError, Location, OpenError, OpenOptions, open,
};

fn sound(place: &Place, name: &str) {
    let found = verify(&place.open(name), &VerifyOptions::default(), &mut |_, _| {});
    assert!(found.is_sound(), "{name}: {found:?}");
}

/// Extracts the image and compares.
fn assert_extracted(place: &Place, name: &str, wanted: &[u8]) {
    let raw = place.path("extracted");
    let image = place.open(name);
    extract(
        &image,
        &raw.clone().into(),
        &ExtractOptions::default(),
        &mut |_, _| {},
    )
    .expect("it is written");
    assert_same(&fs::read(&raw).expect("it is there"), wanted, name);
    fs::remove_file(raw).expect("it is there");
}

#[test]
fn every_chunk_size_and_length_comes_back() {
    let place = Place::new();
    for shift in 12_u8..=22 {
        let chunk_bytes = 1_u32 << shift;
        for rest in [[0, 4095], [1, 0], [4095, 1]][usize::from(shift % 3)] {
            let content = memory(shift.into(), 300, rest);
            place.write("raw", &content);
            let name = format!("image-{shift}-{rest}");
            let created = place.create("raw", &name, &chunks_of(chunk_bytes));
            let info = &created.info;
            assert_eq!(info.chunk_bytes, chunk_bytes);
            assert_eq!(info.memory_bytes, content.len() as u64);
            let image = fs::metadata(place.path(&name)).expect("it is there");
            assert_eq!(info.file_bytes, image.len());
            assert_content(&place.open(&name), &content, &name);
            assert_extracted(&place, &name, &content);
            sound(&place, &name);
        }
    }
}

#[test]
fn short_memory_comes_back() {
    let place = Place::new();
    for bytes in [1, 100, 4095, 4096, 4097, 65_535, 65_536, 65_537] {
        let mut random = Random(bytes);
        let content = random.bytes(usize::try_from(bytes).expect("it fits"));
        place.write("raw", &content);
        let name = format!("image-{bytes}");
        place.create("raw", &name, &CreateOptions::default());
        let image = place.open(&name);
        assert_content(&image, &content, &name);
        assert_extracted(&place, &name, &content);
        let error = read(&image, bytes, 1).expect_err("it ends there");
        assert!(matches!(error, ImageError::NoSuchPage { .. }), "{error}");
        let error = read(&image, u64::MAX, 1).expect_err("it ends long before");
        assert!(matches!(error, ImageError::NoSuchPage { .. }), "{error}");
        assert_eq!(read_now(&image, bytes, 1), None);
    }
}

#[test]
fn zeroes_are_not_stored_and_equal_chunks_once() {
    let place = Place::new();
    let chunk = Random(1).bytes(64 << 10);
    let zero = vec![0; 64 << 10];
    let text = b"guest memory ".repeat(5042)[..64 << 10].to_vec();
    let content = [&zero, &chunk, &text, &zero, &chunk, &chunk, &text].map(Vec::as_slice);
    place.write("raw", &content.concat());
    let info = place.create("raw", "image", &CreateOptions::default()).info;
    assert_eq!(info.chunks, 7);
    assert_eq!(info.zero_chunks, 2);
    assert_eq!(info.stored_chunks, 2);
    assert_eq!(info.duplicate_chunks, 3);
    assert!(
        (65_536..66_000).contains(&info.stored_bytes),
        "what does not shrink is stored as it is: {info:?}"
    );
    let image = place.open("image");
    assert_content(&image, &content.concat(), "image");
    let mut page = [7; 4096];
    for urgency in [Urgency::Bulk, Urgency::Urgent] {
        let filled = image.read_now(4096, &mut page, urgency);
        assert_eq!(filled, Some(Filled::Zero));
        let filled = image.read(4096, &mut page, urgency).expect("readable");
        assert_eq!(filled, Filled::Zero);
    }
    assert_eq!(image.read_now(65_536, &mut page, Urgency::Bulk), None);
    // From the page cache, which now and then needs waiting while the kernel writes it to the disk.
    let mut tries = (0..500).map(|_| {
        std::thread::sleep(std::time::Duration::from_millis(10));
        image.read_now(65_536, &mut page, Urgency::Urgent)
    });
    assert_eq!(tries.find_map(|filled| filled), Some(Filled::Bytes));
    assert_eq!(page, chunk[..4096]);
    // The same chunk, from the cache of chunks.
    let filled = image.read_now(65_536 + 8192, &mut page, Urgency::Urgent);
    assert_eq!(filled, Some(Filled::Bytes));
    assert_eq!(page, chunk[8192..][..4096]);

    let all_zero = place.write_sparse("zeroes", (1 << 30) + 5, &[]);
    let info = place
        .create("zeroes", "nothing", &CreateOptions::default())
        .info;
    assert_eq!(info.zero_chunks, info.chunks);
    assert!(info.file_bytes < 100_000);
    let raw = place.path("extracted");
    let image = place.open("nothing");
    extract(
        &image,
        &raw.clone().into(),
        &ExtractOptions::default(),
        &mut |_, _| {},
    )
    .expect("it is written");
    let extracted = fs::metadata(raw).expect("it is there");
    assert_eq!(
        extracted.len(),
        fs::metadata(all_zero).expect("it is there").len()
    );
    assert!(extracted.blocks() < 64, "it has holes: {extracted:?}");
}

#[test]
fn the_same_memory_makes_the_same_image() {
    let place = Place::new();
    place.write("raw", &memory(3, 2000, 17));
    let threads = |threads| CreateOptions {
        threads: NonZeroUsize::new(threads).expect("it is not zero"),
        ..CreateOptions::default()
    };
    let digest = place.create("raw", "one", &threads(1)).info.digest;
    let file = fs::read(place.path("one")).expect("it is there");
    for number in [2, 7] {
        let name = format!("image-{number}");
        assert_eq!(
            place.create("raw", &name, &threads(number)).info.digest,
            digest
        );
        assert!(fs::read(place.path(&name)).expect("it is there") == file);
    }
    let location = Location::Path(place.path("one"));
    let image = open(&location, &OpenOptions::default()).expect("its magic is recognised");
    assert_eq!(image.digest(), digest);
}

#[test]
fn layers_have_the_newest_content() {
    let place = Place::new();
    let mut content = memory(5, 900, 0);
    place.write("raw", &content);
    place.create("raw", "base", &chunks_of(256 << 10));
    let mut random = Random(6);
    let mut below = "base".to_owned();
    // Three diffs, each with other chunks than the layer below, the memory growing and shrinking.
    for (level, chunk_bytes, pages) in [(1, 4096, 900), (2, 64 << 10, 1000), (3, 8192, 777)] {
        content.resize(pages * 4096 + level, 0);
        for _ in 0..40 {
            let at = usize::try_from(random.below(content.len() as u64 - 9000)).expect("fits");
            let change = match random.below(3) {
                0 => vec![0; 9000],
                1 => random.bytes(9000),
                _ => b"word".repeat(2250),
            };
            content[at..at + 9000].copy_from_slice(&change);
        }
        let raw = format!("raw-{level}");
        place.write(&raw, &content);
        let name = format!("diff-{level}");
        let options = CreateOptions {
            base: Some(Location::Path(place.path(&below))),
            ..chunks_of(chunk_bytes)
        };
        let info = place.create(&raw, &name, &options).info;
        assert!(info.base_chunks > 0 && info.stored_chunks > 0, "{info:?}");
        let image = place.open(&name);
        assert_eq!(image.layers(), level + 1);
        assert_content(&image, &content, &name);
        assert_extracted(&place, &name, &content);
        sound(&place, &name);
        below = name;
    }
}

#[test]
fn holes_of_a_diff_are_as_in_the_base() {
    let place = Place::new();
    // The base ends inside a page, and inside a chunk.
    let mut content = memory(9, 635, 77);
    // The base ends with content.
    let end = content.len();
    content[end - 70_000..].copy_from_slice(&Random(2).bytes(70_000));
    place.write("raw", &content);
    let base = place.path("base");
    place.create("raw", "base", &CreateOptions::default());

    let mut random = Random(10);
    let longer = 2_771_440;
    let mut merged = content.clone();
    merged.resize(2_771_440, 0);
    let mut alone = vec![0; merged.len()];
    let mut parts = Vec::new();
    for page in [0, 1, 17, 100, 101, 333, 650, 651] {
        let page_content = match page {
            100 => vec![0; 4096],
            _ => random.bytes(4096),
        };
        merged[page * 4096..][..4096].copy_from_slice(&page_content);
        alone[page * 4096..][..4096].copy_from_slice(&page_content);
        parts.push((page as u64 * 4096, page_content));
    }
    let parts: Vec<(u64, &[u8])> = parts
        .iter()
        .map(|(at, part)| (*at, part.as_slice()))
        .collect();
    place.write_sparse("dirty", longer, &parts);

    let info = place.create("dirty", "diff", &on(&base)).info;
    assert!(info.base_chunks > 10, "{info:?}");
    assert_content(&place.open("diff"), &merged, "holes of the base");
    assert_extracted(&place, "diff", &merged);

    let zero = CreateOptions {
        holes: Some(Holes::Zero),
        ..on(&base)
    };
    place.create("dirty", "zeroes", &zero);
    assert_content(&place.open("zeroes"), &alone, "holes are zeroes");
    place.create("dirty", "alone", &CreateOptions::default());
    assert_content(&place.open("alone"), &alone, "no base");

    // A diff without any change, and a second one above.
    place.write_sparse("nothing", end as u64, &[]);
    let info = place.create("nothing", "same", &on(&base)).info;
    assert_eq!(info.stored_chunks, 0);
    assert_content(&place.open("same"), &content, "nothing has changed");
    place.create("dirty", "again", &on(&place.path("same")));
    assert_content(&place.open("again"), &merged, "a diff of a diff");
}

#[test]
fn a_base_is_found_after_a_move_and_compared() {
    let place = Place::new();
    let content = memory(20, 300, 0);
    place.write("raw", &content);
    let base = place.path("base");
    let digest = place
        .create("raw", "base", &CreateOptions::default())
        .info
        .digest;
    let mut changed = content.clone();
    changed[5] ^= 1;
    place.write("raw-2", &changed);
    let info = place.create("raw-2", "diff", &on(&base)).info;
    let named = info.base.expect("it has a base");
    assert_eq!(named.digest, digest);
    assert_eq!(named.place, BasePlace::Beside("base".into()));

    let elsewhere = tempfile::tempdir().expect("a directory");
    for name in ["base", "diff"] {
        fs::copy(place.path(name), elsewhere.path().join(name)).expect("a copy");
    }
    fs::rename(&base, place.path("away")).expect("it is moved");
    let moved = crate::common::open(&elsewhere.path().join("diff"));
    assert_content(&moved, &changed, "both were moved");

    let location = Location::Path(place.path("diff"));
    let opened = || open(&location, &OpenOptions::default()).expect_err("its base is gone");
    let error = opened();
    assert!(matches!(error, OpenError::Base { .. }), "{error}");
    // Its description needs no base.
    let info = ImageInfo::read(&location, &OpenOptions::default()).expect("it is there");
    assert_eq!(info.base.expect("it has a base").digest, digest);

    place.create("raw-2", "base", &CreateOptions::default());
    let error = opened();
    let OpenError::BaseChanged { wanted, found, .. } = error else {
        panic!("{error}");
    };
    assert_eq!(wanted, digest);
    assert_ne!(found, digest);
}

#[test]
fn a_base_elsewhere_is_named_by_its_absolute_path() {
    let place = Place::new();
    let content = memory(21, 100, 0);
    place.write("raw", &content);
    fs::create_dir(place.path("bases")).expect("a directory");
    place.create("raw", "bases/base", &CreateOptions::default());
    let info = place
        .create("raw", "diff", &on(&place.path("bases/base")))
        .info;
    let wanted = place
        .path("bases/base")
        .canonicalize()
        .expect("it is there");
    assert_eq!(
        info.base.expect("it has a base").place,
        BasePlace::Path(wanted)
    );
    // Whoever opens it decides whether it may name files elsewhere.
    let location = Location::Path(place.path("diff"));
    let error = open(&location, &OpenOptions::default()).expect_err("elsewhere");
    assert!(matches!(error, OpenError::BaseElsewhere { .. }), "{error}");
    assert!(error.is_refusal());
    let anywhere = OpenOptions {
        bases: Bases::Anywhere,
        ..OpenOptions::default()
    };
    let image = open(&location, &anywhere).expect("it may");
    assert_content(&*image, &content, "diff");
}

#[test]
fn what_makes_no_sense_is_refused_and_leaves_nothing() {
    let place = Place::new();
    place.write("raw", &memory(30, 100, 0));
    place.create("raw", "image", &CreateOptions::default());
    let before = fs::read(place.path("image")).expect("it is there");
    let names = place.names();
    let refused = |raw: &str, image: &str, options: &CreateOptions| {
        let error = place.try_create(raw, image, options).expect_err("refused");
        assert!(error.is_refusal(), "{error}");
        assert_eq!(place.names(), names);
        assert!(fs::read(place.path("image")).expect("it is there") == before);
        error
    };
    let usual = CreateOptions::default();
    let force = CreateOptions {
        may_replace: true,
        ..usual.clone()
    };
    let error = refused("raw", "image", &usual);
    assert!(
        matches!(error, CreateError::Target(TargetError::Exists { .. })),
        "{error}"
    );
    let error = refused("raw", "raw", &force);
    assert!(matches!(error, CreateError::SameFile { .. }), "{error}");
    let error = refused("none", "new", &usual);
    assert!(matches!(error, CreateError::OpenRaw(_)), "{error}");
    let error = refused("", "new", &usual);
    assert!(matches!(error, CreateError::OpenRaw(_)), "{error}");
    let error = refused("image", "new", &usual);
    assert!(matches!(error, CreateError::IsImage { .. }), "{error}");
    let error = refused("raw", "none/new", &usual);
    assert!(
        matches!(error, CreateError::Target(TargetError::Directory { .. })),
        "{error}"
    );
    for bytes in [0, 2048, 5000, 8 << 20] {
        let error = refused("raw", "new", &chunks_of(bytes));
        assert!(
            matches!(error, CreateError::Format(FormatError::ChunkBytes { .. })),
            "{error}"
        );
    }
    let error = refused("raw", "new", &on(&place.path("raw")));
    let CreateError::Base(OpenError::Format { source, .. }) = &error else {
        panic!("{error}");
    };
    assert_eq!(*source, FormatError::NotAnImage);
    let error = refused("raw", "new", &on(&place.path("none")));
    assert!(
        matches!(error, CreateError::Base(OpenError::Blob(_))),
        "{error}"
    );
    let own = CreateOptions {
        may_replace: true,
        ..on(&place.path("image"))
    };
    let error = refused("raw", "image", &own);
    assert!(matches!(error, CreateError::SameFile { .. }), "{error}");

    let image = place.open("image");
    let replace = ExtractOptions {
        may_replace: true,
        ..ExtractOptions::default()
    };
    let error = extract(
        &image,
        &place.path("image").into(),
        &replace,
        &mut |_, _| {},
    );
    assert!(
        matches!(error, Err(ExtractError::SameFile { .. })),
        "{error:?}"
    );
    let keep = ExtractOptions::default();
    let error = extract(&image, &place.path("raw").into(), &keep, &mut |_, _| {});
    assert!(
        matches!(error, Err(ExtractError::Target(TargetError::Exists { .. }))),
        "{error:?}"
    );

    place.create("raw", "image", &force);
    assert!(fs::read(place.path("image")).expect("it is there") == before);
    extract(&image, &place.path("raw").into(), &replace, &mut |_, _| {})
        .expect("it may be replaced");
    assert_eq!(place.names(), names);
}

#[test]
fn memory_that_changes_meanwhile_is_no_image() {
    let place = Place::new();
    let raw = place.path("raw");
    // Before any of it is read, and when a part is.
    for wait in [0, 1] {
        place.write("raw", &memory(31, 2000, 0));
        let mut calls = 0;
        let cut = &mut |_, _| {
            if calls == wait {
                let file = fs::File::options().write(true).open(&raw);
                let file = file.expect("it is there");
                // The rest is a hole.
                file.set_len(4096).expect("it is cut");
                file.set_len(2000 * 4096).expect("it is extended");
            }
            calls += 1;
        };
        let usual = CreateOptions::default();
        let error = pagetide_sources::image::create(&raw, &place.path("image").into(), &usual, cut);
        let error = error.expect_err("the memory has changed");
        let CreateError::Raw(source) = &error else {
            panic!("{error}");
        };
        assert!(matches!(source, BlobError::Changed { .. }), "{source}");
        assert!(!error.is_refusal());
        assert_eq!(place.names(), ["raw"]);
    }
}

#[test]
fn threads_share_an_image() {
    let place = Place::new();
    let content = memory(40, 1500, 0);
    place.write("raw", &content);
    place.create("raw", "image", &CreateOptions::default());
    let options = OpenOptions {
        // Room for a few chunks only, so that they are evicted all the time.
        cache_bytes: 1 << 20,
        ..OpenOptions::default()
    };
    let location = Location::Path(place.path("image"));
    let image = open(&location, &options).expect("it opens");
    std::thread::scope(|scope| {
        for seed in 0..4 {
            let (image, content) = (&image, &content);
            scope.spawn(move || {
                let mut random = Random(seed);
                for _ in 0..2000 {
                    let page = usize::try_from(random.below(1500)).expect("few");
                    let wanted = &content[page * 4096..][..4096];
                    let offset = page as u64 * 4096;
                    let given = read_now(&**image, offset, 4096)
                        .unwrap_or_else(|| read(&**image, offset, 4096).expect("readable"));
                    assert_same(&given, wanted, "a page");
                }
            });
        }
    });
}
