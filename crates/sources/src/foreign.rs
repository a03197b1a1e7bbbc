//! Files that are no guest memory, by their first bytes, and lengths that no guest memory has.
//!
//! A raw memory file has no format: any other file would be served as memory, without a word. Guest memory begins with
//! what a guest has at physical address 0, which is none of these.

use thiserror::Error;

/// The page of the smallest size.
const PAGE_BYTES: u64 = 4096;

/// Why a file or an object is no raw guest memory.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum NotMemory {
    /// There is nothing in it.
    #[error("it is empty: no guest memory was written, or all of it was lost")]
    Empty,
    /// It ends inside a page.
    #[error(
        "it has {bytes} bytes, which is no whole number of pages of 4096: a part of it is missing"
    )]
    PartOfPage {
        /// Its length.
        bytes: u64,
    },
    /// It is a file of another kind.
    #[error("it is {what}: {remedy}")]
    Foreign {
        /// What it is.
        what: &'static str,
        /// What to do.
        remedy: &'static str,
    },
}

/// A kind of file.
struct Kind {
    /// Its first bytes.
    first: &'static [u8],
    what: &'static str,
    remedy: &'static str,
}

const UNPACK: &str = "unpack it first";
const NEEDS_MEMORY: &str = "name the file with the guest's memory";
const NEEDS_SERVER: &str = "look at what the server has at this URL, and what it asks for";

/// The kinds that are known.
const KINDS: [Kind; 18] = [
    Kind {
        first: b"QEVM",
        what: "a migration stream or a mapped-ram file of QEMU",
        remedy: "it has headers between parts of memory; make an image of a mapped-ram file (pagetide image create --from qemu-mapped-ram)",
    },
    Kind {
        first: b"QFI\xfb",
        what: "a disk image of QEMU (qcow2)",
        remedy: NEEDS_MEMORY,
    },
    Kind {
        first: b"\x7fELF",
        what: "an ELF file, such as a core dump or a kernel",
        remedy: NEEDS_MEMORY,
    },
    Kind {
        first: b"EMiL",
        what: "a memory dump of LiME or AVML",
        remedy: "dumps have headers between parts of memory, and cannot be served",
    },
    Kind {
        first: b"AVML",
        what: "a memory dump of AVML",
        remedy: "dumps have headers between parts of memory, and cannot be served",
    },
    Kind {
        first: b"KDUMP   ",
        what: "a dump of a kernel",
        remedy: NEEDS_MEMORY,
    },
    Kind {
        first: b"PTWORKST",
        what: "a working set of Pagetide",
        remedy: "name the image that it belongs to",
    },
    Kind {
        first: b"{\"",
        what: "JSON, such as the configuration or the state of a VM of Cloud Hypervisor",
        remedy: NEEDS_MEMORY,
    },
    Kind {
        first: b"{\n",
        what: "JSON, such as the configuration or the state of a VM of Cloud Hypervisor",
        remedy: NEEDS_MEMORY,
    },
    Kind {
        first: b"<!DOCTYPE",
        what: "a web page",
        remedy: NEEDS_SERVER,
    },
    Kind {
        first: b"<html",
        what: "a web page",
        remedy: NEEDS_SERVER,
    },
    Kind {
        first: b"<?xml",
        what: "XML, such as the error of a store",
        remedy: NEEDS_SERVER,
    },
    Kind {
        first: b"\x28\xb5\x2f\xfd",
        what: "compressed by zstd",
        remedy: UNPACK,
    },
    Kind {
        first: b"\x1f\x8b\x08",
        what: "compressed by gzip",
        remedy: UNPACK,
    },
    Kind {
        first: b"\x04\x22\x4d\x18",
        what: "compressed by lz4",
        remedy: UNPACK,
    },
    Kind {
        first: b"\xfd7zXZ\0",
        what: "compressed by xz",
        remedy: UNPACK,
    },
    Kind {
        first: b"BZh9",
        what: "compressed by bzip2",
        remedy: UNPACK,
    },
    Kind {
        first: b"PK\x03\x04",
        what: "a zip file",
        remedy: UNPACK,
    },
];

/// What Firecracker's state files have among their first bytes: the upper bytes of their magic number, in the order of
/// memory, for x86_64 and for arm64. Where the number is depends on the version's encoding.
const FIRECRACKER: [[u8; 6]; 2] = [
    [0x64, 0x86, 0x84, 0x19, 0x10, 0x07],
    [0xaa, 0xaa, 0x84, 0x19, 0x10, 0x07],
];

/// How many first bytes of a state file have the magic number.
const FIRECRACKER_WITHIN: usize = 32;

/// Checks that a file of `bytes` bytes, which begins with `head`, can be guest memory.
///
/// # Errors
/// [`NotMemory::Empty`], [`NotMemory::Foreign`].
pub(crate) fn check_kind(bytes: u64, head: &[u8]) -> Result<(), NotMemory> {
    if bytes == 0 {
        return Err(NotMemory::Empty);
    }
    if is_state_of_firecracker(head) {
        return Err(NotMemory::Foreign {
            what: "a state file of Firecracker (snapshot_path)",
            remedy: "name the memory file (mem_file_path)",
        });
    }
    match KINDS.iter().find(|kind| head.starts_with(kind.first)) {
        Some(&Kind { what, remedy, .. }) => Err(NotMemory::Foreign { what, remedy }),
        None => Ok(()),
    }
}

/// Checks that guest memory has whole pages.
///
/// # Errors
/// [`NotMemory::PartOfPage`].
pub(crate) fn check_whole_pages(bytes: u64) -> Result<(), NotMemory> {
    match bytes.is_multiple_of(PAGE_BYTES) {
        true => Ok(()),
        false => Err(NotMemory::PartOfPage { bytes }),
    }
}

/// Whether these are the first bytes of a state file of Firecracker.
pub(crate) fn is_state_of_firecracker(head: &[u8]) -> bool {
    let first = &head[..head.len().min(FIRECRACKER_WITHIN)];
    FIRECRACKER
        .iter()
        .any(|magic| first.windows(magic.len()).any(|part| part == magic))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_other_kinds_are_named() {
        for kind in &KINDS {
            let head = [kind.first, &[0; 100]].concat();
            let error = check_kind(8192, &head).unwrap_err();
            assert!(error.to_string().contains(kind.what), "{error}");
        }
        // Fixed-length and variable encodings put the number at different places.
        for at in [0, 1, 9] {
            for number in [0x0710_1984_8664_0000_u64, 0x0710_1984_aaaa_0000] {
                let head = [&vec![1; at][..], &number.to_le_bytes(), &[9; 50]].concat();
                let error = check_kind(8192, &head).unwrap_err();
                assert!(error.to_string().contains("mem_file_path"), "{error}");
            }
        }
        assert_eq!(check_kind(0, &[]), Err(NotMemory::Empty));
    }

    #[test]
    fn memory_is_taken() {
        // A zero page, an interrupt table of real mode, text, and a first word of each kind without its last byte.
        for head in [[0; 64], [0x53; 64], [b'g'; 64]] {
            assert_eq!(check_kind(4096, &head), Ok(()));
        }
        for kind in &KINDS {
            let (_, before) = kind.first.split_last().unwrap();
            let head = [before, &[0xee; 100]].concat();
            assert_eq!(check_kind(4096, &head), Ok(()), "{}", kind.what);
        }
        assert_eq!(check_whole_pages(8192), Ok(()));
        assert_eq!(check_whole_pages(0), Ok(()));
        let cut = NotMemory::PartOfPage { bytes: 8191 };
        assert_eq!(check_whole_pages(8191), Err(cut));
    }
}
