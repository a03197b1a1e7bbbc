//! What a diff says is believed as far as its file system tells it, and an image as far as whoever opens it permits.

use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;

use crate::common::{Place, Random, assert_content, memory, on, read};
use pagetide_sources::image::{
    CreateError, CreateOptions, ExtractOptions, FormatError, Holes, create, extract, merge,
};
use pagetide_sources::{Location, OpenError, OpenOptions, PagetideImage, StateFile, open};
use pagetide_test_support::in_a_process_of_its_own;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::process::{Resource, getrlimit, setrlimit};

const PAGE: u64 = 4096;
const EXABYTE: u64 = 1 << 60;

fn with_base(place: &Place, pages: usize) -> Vec<u8> {
    let content = memory(50, pages, 0);
    place.write("raw", &content);
    place.create("raw", "base", &CreateOptions::default());
    content
}

/// A copy by a tool that does not know holes makes zeroes of them; a full snapshot never had any.
#[test]
fn a_diff_without_any_hole_is_refused_unless_that_is_asked_for() {
    let place = Place::new();
    let mut content = with_base(&place, 100);
    content[5] ^= 1;
    place.write("dense", &content);
    let usual = on(&place.path("base"));
    let error = place
        .try_create("dense", "image", &usual)
        .expect_err("no hole");
    assert!(matches!(error, CreateError::NoHoles { .. }), "{error}");
    assert!(error.is_refusal());
    for holes in [Holes::Zero, Holes::Base] {
        let asked = CreateOptions {
            holes: Some(holes),
            may_replace: true,
            ..usual.clone()
        };
        let created = place
            .try_create("dense", "image", &asked)
            .expect("asked for");
        assert_eq!(created.hole_bytes, 0);
        assert_content(&place.open("image"), &content, "dense");
    }
}

#[test]
fn what_came_from_holes_is_said() {
    let place = Place::new();
    let mut content = with_base(&place, 100);
    let page = Random(7).bytes(4096);
    content[3 * 4096..4 * 4096].copy_from_slice(&page);
    place.write_sparse("diff", 100 * PAGE, &[(3 * PAGE, &page)]);
    let created = place
        .try_create("diff", "image", &on(&place.path("base")))
        .expect("a diff");
    assert_eq!(
        (created.hole_bytes, created.holes),
        (99 * PAGE, Holes::Base)
    );
    assert_content(&place.open("image"), &content, "diff");
    let alone = place
        .try_create("diff", "alone", &CreateOptions::default())
        .expect("sparse memory");
    assert_eq!((alone.hole_bytes, alone.holes), (99 * PAGE, Holes::Zero));
    // Nothing was written: all of it is as in the base.
    place.write_sparse("nothing", 100 * PAGE, &[]);
    let created = place
        .try_create("nothing", "same", &on(&place.path("base")))
        .expect("an empty diff");
    assert_eq!(created.hole_bytes, 100 * PAGE);
}

#[test]
fn a_diff_above_the_base_of_another_vm_is_refused() {
    let place = Place::new();
    with_base(&place, 100);
    for pages in [99, 101] {
        place.write_sparse("diff", pages * PAGE, &[(0, &[1; 4096])]);
        let usual = on(&place.path("base"));
        let error = place
            .try_create("diff", "image", &usual)
            .expect_err("length");
        let CreateError::OtherLength {
            bytes, base_bytes, ..
        } = &error
        else {
            panic!("{error}");
        };
        assert_eq!((*bytes, *base_bytes), (pages * PAGE, 100 * PAGE));
        assert!(error.is_refusal());
        let resized = CreateOptions {
            any_length: true,
            may_replace: true,
            ..usual
        };
        place
            .try_create("diff", "image", &resized)
            .expect("asked for");
    }
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).expect("it is there").mode() & 0o777
}

/// Guest memory has keys and passwords: nobody reads them from an image who could not read them before.
#[test]
fn an_image_and_extracted_memory_are_as_private_as_what_they_were_made_of() {
    let place = Place::new();
    let set = |name: &str, mode: u32| {
        let mode = fs::Permissions::from_mode(mode);
        fs::set_permissions(place.path(name), mode).expect("it is ours");
    };
    place.write("raw", &memory(1, 20, 0));
    set("raw", 0o600);
    place.create("raw", "base", &CreateOptions::default());
    assert_eq!(mode(&place.path("base")), 0o600);
    // A diff that all may read, above a base that they may not.
    place.write_sparse("diff", 20 * PAGE, &[(0, &[1; 4096])]);
    set("diff", 0o640);
    place.create("diff", "top", &on(&place.path("base")));
    assert_eq!(mode(&place.path("top")), 0o600);
    set("top", 0o640);
    let out = place.path("out");
    extract(
        &place.open("top"),
        &out.clone().into(),
        &ExtractOptions::default(),
        &mut |_, _| {},
    )
    .expect("written");
    assert_eq!(mode(&out), 0o600);
    set("base", 0o640);
    fs::remove_file(&out).expect("it is there");
    extract(
        &place.open("top"),
        &out.clone().into(),
        &ExtractOptions::default(),
        &mut |_, _| {},
    )
    .expect("written");
    assert_eq!(mode(&out), 0o640);
}

/// Zero pages inside of stored chunks, too.
#[test]
fn extracted_memory_takes_no_more_room_than_the_memory_it_was_made_of() {
    let place = Place::new();
    let page = Random(3).bytes(4096);
    let parts: Vec<(u64, &[u8])> = (0..64).map(|index| (index * 4 * PAGE, &page[..])).collect();
    let raw = place.write_sparse("raw", 256 * PAGE, &parts);
    place.create("raw", "image", &CreateOptions::default());
    let out = place.path("out");
    let image = place.open("image");
    let written = extract(
        &image,
        &out.clone().into(),
        &ExtractOptions::default(),
        &mut |_, _| {},
    );
    assert_eq!(written.expect("it is written"), 64 * PAGE);
    assert!(fs::read(&out).expect("it is there") == fs::read(&raw).expect("it is there"));
    let blocks = |path: &Path| fs::metadata(path).expect("it is there").blocks();
    // Where the holes are takes some room, too.
    assert!(blocks(&out) < 2 * blocks(&raw), "{} blocks", blocks(&out));
}

/// A sparse file costs its author nothing, and whoever reads its index that many bytes of memory.
#[test]
fn indexes_are_read_up_to_a_bound_for_all_layers() {
    let place = Place::new();
    let mut content = with_base(&place, 300);
    content[5] ^= 1;
    place.write("raw-2", &content);
    place.create("raw-2", "top", &on(&place.path("base")));
    let location = Location::Path(place.path("top"));
    let index = |name: &str| {
        let info = pagetide_sources::image::ImageInfo::read(
            &Location::Path(place.path(name)),
            &OpenOptions::default(),
        );
        let info = info.expect("it is there");
        info.file_bytes - 4096 - info.stored_bytes
    };
    let both = index("top") + index("base");
    let opened = |index_bytes| {
        let options = OpenOptions {
            index_bytes,
            ..OpenOptions::default()
        };
        PagetideImage::open(&location, &options)
    };
    opened(both).expect("they are within the bound");
    let OpenError::Base { source, .. } = opened(both - 1).expect_err("the base is too much") else {
        panic!("another error");
    };
    let OpenError::LongIndex { bytes, most, .. } = *source else {
        panic!("{source}");
    };
    assert_eq!((bytes, most), (index("base"), both - 1));
    let error = opened(index("top") - 1).expect_err("the image alone is too much");
    assert!(error.is_refusal(), "{error}");
}

/// From now on this process, which is one of its own, gets no more than 4 GiB of memory.
fn bound_memory() {
    let mut limits = getrlimit(Resource::As);
    limits.current = Some(4 << 30);
    setrlimit(Resource::As, limits).expect("a limit of the address space");
}

/// A sparse file, which costs its author nothing.
#[test]
fn an_exabyte_in_place_of_memory_or_state_takes_no_memory_by_its_length() {
    let this = "trust::an_exabyte_in_place_of_memory_or_state_takes_no_memory_by_its_length";
    in_a_process_of_its_own(this, || {
        bound_memory();
        let file = memfd_create("exabyte", MemfdFlags::CLOEXEC).expect("a file");
        let file = fs::File::from(file);
        ftruncate(&file, EXABYTE).expect("it is sparse");
        file.write_all_at(&[7; 4096], EXABYTE - PAGE)
            .expect("it is written");
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let location = Location::Path((&path).into());
        let image = open(&location, &OpenOptions::default()).expect("raw memory");
        assert!(image.hole_bytes() > EXABYTE / 2);
        assert_eq!(read(&*image, 0, 4096).expect("a hole"), [0; 4096]);
        let last = read(&*image, EXABYTE - PAGE, 4096);
        assert_eq!(last.expect("the last page"), [7; 4096]);
        assert!(image.mapped(EXABYTE - PAGE, PAGE).is_none());
        let error = PagetideImage::open(&location, &OpenOptions::default());
        let OpenError::Format { source, .. } = error.expect_err("no magic") else {
            panic!("another error");
        };
        assert_eq!(source, FormatError::NotAnImage);
        let state = StateFile::at(path.as_ref()).expect("a file");
        assert_eq!(state.memory_bytes, None);
        let place = Place::new();
        let new = place.path("new").into();
        let error = create(
            path.as_ref(),
            &new,
            &CreateOptions::default(),
            &mut |_, _| {},
        );
        let error = error.expect_err("it is too long");
        let is_named = matches!(error, CreateError::Format(FormatError::MemoryBytes { .. }));
        assert!(is_named, "{error}");
        assert!(place.names().is_empty());
    });
}

/// A chain of layers grows with each pause of a VM, and an image has at most sixteen.
#[test]
fn layers_are_merged_and_put_above_another_base() {
    let place = Place::new();
    let mut content = with_base(&place, 300);
    let mut top = "base".to_owned();
    for level in 1_u64..4 {
        let page = Random(level).bytes(4096);
        let at = level * 7;
        let begin = usize::try_from(at * PAGE).expect("small");
        content[begin..begin + 4096].copy_from_slice(&page);
        place.write_sparse("diff", 300 * PAGE, &[(at * PAGE, &page)]);
        let name = format!("layer-{level}");
        place.create("diff", &name, &on(&place.path(&top)));
        top = name;
    }
    let image = place.open(&top);
    assert_eq!(image.layers(), 4);
    let merged = |name: &str, options: &CreateOptions| {
        merge(&image, &place.path(name).into(), options, &mut |_, _| {})
    };
    let alone = merged("alone", &CreateOptions::default()).expect("one layer");
    assert!(alone.info.base.is_none());
    assert_content(&place.open("alone"), &content, "alone");
    // The first three layers of four, as one above the base.
    let squashed = merged("squashed", &on(&place.path("base"))).expect("two layers");
    assert_eq!(place.open("squashed").layers(), 2);
    assert!(squashed.info.stored_chunks <= 3, "{:?}", squashed.info);
    assert_content(&place.open("squashed"), &content, "squashed");
    // Above a base that it was not made with.
    place.write("raw", &memory(51, 300, 0));
    place.create("raw", "other", &CreateOptions::default());
    merged("rebased", &on(&place.path("other"))).expect("another base");
    assert_content(&place.open("rebased"), &content, "rebased");
    let replace = CreateOptions {
        may_replace: true,
        ..CreateOptions::default()
    };
    for read in ["base", "layer-2", "layer-3"] {
        let error = merged(read, &replace).expect_err("it is read");
        assert!(matches!(error, CreateError::SameFile { .. }), "{error}");
    }
}
