use std::fs::File;
use std::os::unix::fs::FileExt;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use super::*;

const PAGE: u64 = 4096;

fn memfd(bytes: u64) -> OwnedFd {
    let file = memfd_create("memory-file-test", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, bytes).unwrap();
    file
}

fn part(file: &OwnedFd, offset: u64, bytes: u64) -> MemoryFile {
    MemoryFile::new(file.try_clone().unwrap(), offset, bytes, PageSize::Size4K).unwrap()
}

fn put(file: &OwnedFd, page: u64) {
    let other = File::from(file.try_clone().unwrap());
    other.write_all_at(b"text", page * PAGE + 100).unwrap();
}

#[test]
fn a_file_that_differs_from_its_description_is_refused() {
    let refused = |file: &OwnedFd, offset, bytes, page_size| {
        MemoryFile::new(file.try_clone().unwrap(), offset, bytes, page_size).unwrap_err()
    };
    let file = memfd(4 * PAGE);
    for (offset, bytes) in [(0, 0), (0, 1), (1, PAGE), (u64::MAX, PAGE)] {
        let error = refused(&file, offset, bytes, PageSize::Size4K);
        assert!(
            matches!(error, MemoryFileError::NotPageMultiple { .. }),
            "{error}"
        );
    }
    for (offset, bytes) in [
        (0, 5 * PAGE),
        (4 * PAGE, PAGE),
        (0u64.wrapping_sub(PAGE), PAGE),
    ] {
        let expected = MemoryFileError::OutsideFile {
            offset,
            bytes,
            file_bytes: 4 * PAGE,
        };
        assert_eq!(refused(&file, offset, bytes, PageSize::Size4K), expected);
    }
    let expected = MemoryFileError::OtherPages {
        page_size: PageSize::Size2M,
        file_bytes: PAGE,
    };
    assert_eq!(refused(&file, 0, PAGE, PageSize::Size2M), expected);

    for path in ["/proc/self/status", "/dev/null", "/dev/zero", "/"] {
        let file = OwnedFd::from(File::open(path).unwrap());
        let error = refused(&file, 0, PAGE, PageSize::Size4K);
        assert_eq!(error, MemoryFileError::NotMemory, "{path}");
    }
}

#[test]
fn parts_overlap_if_they_share_a_page_of_one_file() {
    let (file, other) = (memfd(8 * PAGE), memfd(8 * PAGE));
    let middle = part(&file, 2 * PAGE, 4 * PAGE);
    for (offset, bytes, expected) in [
        (0, 2 * PAGE, false),
        (0, 3 * PAGE, true),
        (3 * PAGE, PAGE, true),
        (0, 8 * PAGE, true),
        (5 * PAGE, 3 * PAGE, true),
        (6 * PAGE, 2 * PAGE, false),
    ] {
        let one = part(&file, offset, bytes);
        assert_eq!(one.overlaps(&middle), expected, "{offset} {bytes}");
        assert_eq!(middle.overlaps(&one), expected, "{offset} {bytes}");
        assert!(!part(&other, offset, bytes).overlaps(&middle));
    }
}

#[test]
fn a_hole_is_punched_within_the_part_only() {
    let file = memfd(4 * PAGE);
    let part = part(&file, PAGE, 2 * PAGE);
    for page in 0..4 {
        put(&file, page);
    }
    let blocks = || fstat(&file).unwrap().st_blocks;
    assert_eq!(blocks(), 32, "four pages of 8 blocks");
    for (offset, bytes) in [(2 * PAGE, PAGE), (PAGE, 2 * PAGE), (u64::MAX, PAGE)] {
        let expected = Err(MemoryFileAccessError::Outside {
            offset,
            bytes,
            part_bytes: 2 * PAGE,
        });
        assert_eq!(part.punch(offset, bytes), expected);
    }
    part.punch(PAGE, PAGE).unwrap();
    assert_eq!(blocks(), 24);
    assert_eq!(part.content_from(0), Ok(Some(0..PAGE)));
}

#[test]
fn looking_for_content_leaves_the_file_position_unchanged() {
    let file = memfd(8 * PAGE);
    let part = part(&file, 2 * PAGE, 4 * PAGE);
    let at = |position| seek(&file, SeekFrom::Start(position)).unwrap();
    let position = || seek(&file, SeekFrom::Current(0)).unwrap();
    let from = |offset| {
        let before = position();
        let found = part.content_from(offset);
        assert_eq!(position(), before, "other owners share the position");
        found
    };
    at(4711);
    assert_eq!(from(0), Ok(None));
    // Before the part, and after it.
    put(&file, 1);
    assert_eq!(from(0), Ok(None));
    put(&file, 6);
    assert_eq!(from(0), Ok(None));
    at(0);
    put(&file, 5);
    assert_eq!(from(0), Ok(Some(3 * PAGE..4 * PAGE)), "not beyond the part");
    put(&file, 2);
    assert_eq!(from(0), Ok(Some(0..PAGE)));
    assert_eq!(from(100), Ok(Some(100..PAGE)));
    assert_eq!(from(PAGE), Ok(Some(3 * PAGE..4 * PAGE)));
    assert_eq!(from(4 * PAGE), Ok(None));
    part.punch(0, PAGE).unwrap();
    at(8 * PAGE);
    assert_eq!(from(0), Ok(Some(3 * PAGE..4 * PAGE)));
    // The file's owner has truncated it since.
    ftruncate(&file, PAGE).unwrap();
    assert_eq!(from(0), Ok(None));
}

#[test]
fn reserved_pages_are_found_in_a_whole_file() {
    let file = memfd(8 * PAGE);
    let (whole, middle) = (part(&file, 0, 8 * PAGE), part(&file, 2 * PAGE, 4 * PAGE));
    assert_eq!(whole.content_from(0), Ok(None));
    fallocate(&file, FallocateFlags::empty(), 4 * PAGE, PAGE).unwrap();
    assert_eq!(whole.content_from(0), Ok(Some(0..8 * PAGE)));
    // In a part of a file, the reserved pages may lie outside of the part.
    assert_eq!(middle.content_from(0), Ok(None));
    whole.punch(4 * PAGE, PAGE).unwrap();
    assert_eq!(whole.content_from(0), Ok(None));
}
