//! Messages of a userfaultfd (`pagetide_uapi::userfaultfd`), as a successor finds them in a file.

use std::cell::RefCell;
use std::os::fd::{AsFd, OwnedFd};

use pagetide_uapi::userfaultfd::{Event, EventBuffer, PageFault};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::{pread, pwrite};

/// The bytes of a message (`struct uffd_msg`).
const MESSAGE_BYTES: usize = 32;

thread_local! {
    static FILE: RefCell<Option<OwnedFd>> = const { RefCell::new(None) };
}

/// A memfd with the bytes at its start.
///
/// # Panics
/// The kernel refuses it.
pub(crate) fn with_file<T>(
    kept: &RefCell<Option<OwnedFd>>,
    bytes: &[u8],
    length: usize,
    work: impl FnOnce(&OwnedFd) -> T,
) -> T {
    let mut kept = kept.borrow_mut();
    let file = kept.get_or_insert_with(|| {
        let file = memfd_create("fuzz", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING);
        let file = file.expect("a memfd");
        ftruncate(&file, length as u64).expect("its length");
        fcntl_add_seals(&file, SealFlags::SHRINK).expect("its seal");
        file
    });
    let mut whole = vec![0; length];
    let count = bytes.len().min(length);
    whole[..count].copy_from_slice(&bytes[..count]);
    assert_eq!(pwrite(&*file, &whole, 0), Ok(length));
    work(file)
}

pub(crate) fn run(input: &[u8]) -> bool {
    FILE.with(|kept| {
        with_file(kept, input, EventBuffer::FILE_BYTES, |file| {
            check(input, file)
        })
    })
}

fn check(input: &[u8], file: &OwnedFd) -> bool {
    let input = input.get(..EventBuffer::FILE_BYTES).unwrap_or(input);
    // SAFETY: nothing else uses the file now.
    let mut buffer = unsafe { EventBuffer::in_file(file.as_fd(), 0) }.expect("a sealed file");
    // Up to the first without a type: nothing was written there.
    let mut wanted = Vec::new();
    for message in input.chunks(MESSAGE_BYTES) {
        let mut whole = [0; MESSAGE_BYTES];
        whole[..message.len()].copy_from_slice(message);
        if whole[0] == 0 {
            break;
        }
        wanted.push(decoded(&whole));
    }
    let found: Vec<Event> = buffer.unhandled().collect();
    assert_eq!(found, wanted);
    assert_eq!(buffer.unhandled().len(), found.len());
    buffer.clear();
    drop(buffer);
    let mut after = vec![0xff; EventBuffer::FILE_BYTES];
    assert_eq!(pread(file, &mut after[..], 0), Ok(after.len()));
    let cleared = found.len() * MESSAGE_BYTES;
    assert!(after[..cleared].iter().all(|&byte| byte == 0));
    let kept = input.get(cleared..).unwrap_or_default();
    assert_eq!(&after[cleared..cleared + kept.len()], kept);
    !found.is_empty()
}

/// A message by the layout of `linux/userfaultfd.h`.
fn decoded(message: &[u8; MESSAGE_BYTES]) -> Event {
    let mut rest = &message[8..];
    let mut word = || u64::from_le_bytes(crate::take(&mut rest));
    let [first, second, third] = [word(), word(), word()];
    let low = |word: u64| u32::try_from(word & u64::from(u32::MAX)).unwrap_or(0);
    match message[0] {
        0x12 => Event::PageFault(PageFault {
            address: second,
            write: first & 1 != 0,
            minor: first & 4 != 0,
            write_protected: first & 2 != 0,
            thread: low(third),
        }),
        0x13 => Event::Fork {
            descriptor: low(first),
        },
        0x14 => Event::Remap {
            from: first,
            to: second,
            bytes: third,
        },
        0x15 => Event::Remove {
            start: first,
            end: second,
        },
        0x16 => Event::Unmap {
            start: first,
            end: second,
        },
        other => Event::Unknown(other),
    }
}

pub(crate) fn seeds() -> Vec<Vec<u8>> {
    let message = |event: u8, words: [u64; 3]| {
        let mut bytes = vec![event, 0, 0, 0, 0, 0, 0, 0];
        bytes.extend(words.iter().flat_map(|word| word.to_le_bytes()));
        bytes
    };
    let all = [
        message(0x12, [1, 0x7000, 42]),
        message(0x12, [4, 0x7000, 0]),
        message(0x13, [9, 0, 0]),
        message(0x14, [0x1000, 0x2000, 0x3000]),
        message(0x15, [0x1000, 0x2000, 0]),
        message(0x16, [0x1000, 0x2000, 0]),
        message(0xff, [1, 2, 3]),
    ];
    let mut seeds = all.to_vec();
    seeds.push(all.concat());
    seeds
}
