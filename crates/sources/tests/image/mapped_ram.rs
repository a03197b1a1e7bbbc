//! Images of what QEMU 10.0 of Debian 13 has written, with the capability mapped-ram. `qemu-system-x86_64 -S -nodefaults
//! -vga none -device loader,file=CONTENT,addr=0x100000,force-raw=on` had, as machines, `-M pc -m 4M` and `-M q35 -m 6M` with
//! its memory in a memory-backend-ram m0.

use std::fs::Permissions;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use pagetide_memory::Urgency;
use pagetide_pager::Filled;
use pagetide_sources::image::{CreateError, CreateOptions, create_from_mapped_ram};
use pagetide_sources::{GuestImage, Location, OpenError};

use super::common::open;

const PC: &[u8] = include_bytes!("fixtures/qemu-10.0-pc.zst");
const Q35: &[u8] = include_bytes!("fixtures/qemu-10.0-q35-backend.zst");

const PAGE: usize = 4096;

/// Where the loader has put its file.
const LOADED: usize = 1 << 20;

/// Page `page` of the loaded file: each fifth is zero.
fn loaded(page: usize) -> Vec<u8> {
    let word = match page % 5 {
        4 => 0,
        _ => (page * 2_654_435_761 + 12_345) & 0xffff_ffff,
    };
    u32::try_from(word)
        .expect("it is masked")
        .to_le_bytes()
        .repeat(PAGE / 4)
}

/// The file as QEMU wrote it.
fn unpacked(directory: &Path, packed: &[u8]) -> Location {
    let path = directory.join("vm.qemu");
    let mut file = fs_err::File::create(&path).expect("a file");
    let content = zstd::decode_all(packed).expect("it is packed");
    file.write_all(&content).expect("it is written");
    let some = Permissions::from_mode(0o640);
    fs_err::set_permissions(&path, some).expect("it is mine");
    Location::Path(path)
}

#[test]
fn a_file_of_qemu_becomes_an_image() {
    for (packed, block, bytes) in [(PC, "pc.ram", 4 << 20), (Q35, "m0", 6 << 20)] {
        let directory = tempfile::tempdir().unwrap();
        let file = unpacked(directory.path(), packed);
        for named in [None, Some(block)] {
            let new = directory.path().join("vm.img");
            let options = CreateOptions {
                may_replace: true,
                ..CreateOptions::default()
            };
            let created = create_from_mapped_ram(
                &file,
                named,
                &new.clone().into(),
                &options,
                &mut |_| {},
                &mut |_, _| {},
            );
            assert_eq!(created.unwrap().info.memory_bytes, bytes, "{block}");
            // Whoever may read the file may read the image.
            let mode = fs_err::metadata(&new).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o640, "{block}");
            let image = open(&new);
            for page in 0..300 {
                let mut content = vec![1; PAGE];
                let offset = (LOADED + page * PAGE) as u64;
                let filled = image.read(offset, &mut content, Urgency::Urgent).unwrap();
                if filled == Filled::Zero {
                    content.fill(0);
                }
                assert!(content == loaded(page), "{block}, page {page}");
            }
        }
    }
}

#[test]
fn only_the_guests_memory_is_taken_unless_another_block_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let file = unpacked(directory.path(), PC);
    let new = directory.path().join("vm.img");
    let create = |block| {
        let options = CreateOptions::default();
        create_from_mapped_ram(
            &file,
            block,
            &new.clone().into(),
            &options,
            &mut |_| {},
            &mut |_, _| {},
        )
    };
    let error = create(Some("m0")).unwrap_err();
    let CreateError::OpenRaw(error @ OpenError::MappedRam { .. }) = &error else {
        panic!("{error}");
    };
    let text = with_causes(error);
    for block in ["pc.ram (4194304 bytes)", "pc.bios (65536 bytes)"] {
        assert!(text.contains(block), "{text}");
    }
    assert!(!new.exists());
    assert_eq!(create(Some("pc.bios")).unwrap().info.memory_bytes, 65_536);
}

fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text += &format!(": {error}");
        cause = error.source();
    }
    text
}
