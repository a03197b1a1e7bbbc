//! Files that QEMU has migrated to with the capability mapped-ram (`pagetide_sources::MappedRam`).
//!
//! The input is the file. A page is as long as the smallest: one fits.

use std::sync::Arc;

use pagetide_memory::Urgency;
use pagetide_pager::Filled;
use pagetide_sources::{FileBlob, GuestImage, MappedRam};
use tempfile::TempDir;

use crate::memory::bounded;

const PAGE: usize = 4096;

/// What the parser may hold: the names of RAM blocks, and a bitmap no longer than the file.
const MOST_HELD: usize = 1 << 20;

/// Guest memory that one input checks.
const MOST_CHECKED: u64 = 8 * PAGE as u64;

thread_local! {
    static DIRECTORY: TempDir = tempfile::tempdir().expect("a directory");
}

pub(crate) fn run(input: &[u8]) -> bool {
    let file = DIRECTORY.with(|directory| directory.path().join("file"));
    std::fs::write(&file, input).expect("a file");
    let blob = FileBlob::open(&file).expect("the file");
    let opened = bounded(MOST_HELD, || MappedRam::open(Arc::new(blob), None));
    let Ok(memory) = opened else {
        return false;
    };
    assert!(memory.bytes() > 0 && memory.bytes().is_multiple_of(PAGE as u64));
    for offset in (0..memory.bytes().min(MOST_CHECKED)).step_by(PAGE) {
        let whole = read(&memory, offset, PAGE);
        let halves = [0, PAGE / 2].map(|half| read(&memory, offset + half as u64, PAGE / 2));
        assert_eq!(whole, halves.concat(), "in two reads");
        let is_there =
            whole.iter().all(|byte| *byte == 0) || input.windows(PAGE).any(|page| page == whole);
        assert!(is_there, "a page is zero, or one of the file");
    }
    let beyond = memory.read(memory.bytes(), &mut [0; PAGE], Urgency::Urgent);
    assert!(beyond.is_err(), "there is nothing behind the end");
    true
}

fn read(memory: &MappedRam, offset: u64, bytes: usize) -> Vec<u8> {
    let mut content = vec![1; bytes];
    let filled = memory.read(offset, &mut content, Urgency::Urgent);
    match filled.expect("memory that was opened is whole") {
        Filled::Zero => vec![0; bytes],
        _ => content,
    }
}

fn name(text: &str) -> Vec<u8> {
    let length = u8::try_from(text.len()).unwrap_or(u8::MAX);
    [&[length][..], text.as_bytes()].concat()
}

/// A file with these parts of the configuration, one RAM block of a page, and these bits of its bitmap.
fn file(configuration: &[u8], bits: u64) -> Vec<u8> {
    let number = 3_u32.to_be_bytes();
    let mut file = b"QEVM\0\0\0\x03\x07\0\0\0\x02pc".to_vec();
    file.extend(configuration);
    file.extend([&[1][..], &number, &name("ram"), &[0; 4], &[0, 0, 0, 4]].concat());
    file.extend((PAGE as u64 | 4).to_be_bytes());
    file.extend(name("pc.ram"));
    file.extend((PAGE as u64).to_be_bytes());
    file.extend(1_u32.to_be_bytes());
    file.extend((PAGE as u64).to_be_bytes());
    let bitmap = file.len() as u64 + 16;
    file.extend([bitmap, bitmap + 8].map(u64::to_be_bytes).concat());
    file.extend(bits.to_le_bytes());
    file.extend((0..=250).cycle().take(PAGE));
    let end = [&[0, 0, 0, 0, 0, 0, 0, 0x10, 0x7e][..], &number].concat();
    file.extend(
        [
            &end,
            &[2][..],
            &number,
            &end,
            &[8, 0, 11, 0, 0, 3],
            &number,
            &end,
        ]
        .concat(),
    );
    file
}

pub(crate) fn seeds() -> Vec<Vec<u8>> {
    let subsection =
        |text: &str, fields: &[u8]| [&[5][..], &name(text), &1_u32.to_be_bytes(), fields].concat();
    let names = |names: &[&str]| {
        let count = u32::try_from(names.len()).unwrap_or(0).to_be_bytes();
        let names = names.iter().flat_map(|text| name(text));
        count.into_iter().chain(names).collect::<Vec<u8>>()
    };
    let capabilities = |list: &[&str]| subsection("configuration/capabilities", &names(list));
    let bits = subsection("configuration/target-page-bits", &[0, 0, 0, 12]);
    let uuid = subsection("configuration/uuid", &[7; 16]);
    let plain = capabilities(&["mapped-ram"]);
    let all = [bits, capabilities(&["mapped-ram", "other"]), uuid].concat();
    vec![file(&plain, 1), file(&plain, 0), file(&all, u64::MAX)]
}
