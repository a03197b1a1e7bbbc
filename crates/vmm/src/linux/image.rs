//! The kernel's file: an ELF vmlinux or a bzImage, as the crate `linux-loader` reads them.
//!
//! The loader writes to a scratch mapping in the form of memory that it knows; what it wrote is
//! copied to the guest's region. So guest memory is touched in one way only, and it may be of any
//! backing.

use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use linux_loader::loader::bootparam::setup_header;
use linux_loader::loader::{self, BzImage, Elf, KernelLoader};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::layout::{RamLayout, UPPER_START};
use super::memory::{Ram, RamError};

/// The 64-bit entry point of a bzImage lies so many bytes after its start.
const BZIMAGE_ENTRY: u64 = 0x200;
/// Boot protocol 2.12: the first that knows of 64-bit entry points.
const PROTOCOL_2_12: u16 = 0x20c;
/// A bit of `xloadflags`: there is a 64-bit entry point.
const XLF_KERNEL_64: u16 = 1;
const CHUNK: usize = 64 << 10;

/// Why a kernel was not loaded.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// The file cannot be read.
    #[error("kernel {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system says.
        #[source]
        source: io::Error,
    },
    /// The file is something else.
    #[error(
        "{} is no kernel for this: wanted is an x86-64 vmlinux (ELF) or a bzImage",
        path.display()
    )]
    NotAKernel {
        /// The file.
        path: PathBuf,
    },
    /// Part of the kernel belongs where the bootloader's data are.
    #[error("{} has a segment below 1 MiB, where the boot parameters are", path.display())]
    TooLow {
        /// The file.
        path: PathBuf,
    },
    /// The bzImage has no 64-bit entry point.
    #[error("{} has no 64-bit entry point (boot protocol 2.12, XLF_KERNEL_64)", path.display())]
    No64BitEntry {
        /// The file.
        path: PathBuf,
    },
    /// The file looks like a kernel, and cannot be loaded.
    #[error("{} is damaged", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What the loader says.
        #[source]
        source: loader::Error,
    },
    /// The kernel needs more memory than there is.
    #[error(
        "{} needs the first {end} bytes of memory, and there are {memory_bytes}", path.display()
    )]
    DoesNotFit {
        /// The file.
        path: PathBuf,
        /// Where the kernel ends.
        end: u64,
        /// Where the guest's memory ends, or its first part.
        memory_bytes: u64,
    },
    /// No address space for reading it.
    #[error("no address space to load {}", path.display())]
    Scratch {
        /// The file.
        path: PathBuf,
        /// What the mapping said.
        #[source]
        source: vm_memory::mmap::FromRangesError,
    },
}

/// A kernel that was read, and is still to be copied.
pub(super) struct Kernel {
    scratch: GuestMemoryMmap<()>,
    /// Where the file's part of it ends.
    loaded_end: u64,
    /// The gpa at which it is entered.
    pub(super) entry: u64,
    /// The end of what it uses before it looks at the memory map.
    pub(super) end: u64,
    /// A bzImage's own header.
    pub(super) header: Option<setup_header>,
}

impl Kernel {
    /// Reads a kernel for a guest with memory like that.
    pub(super) fn read(path: &Path, layout: RamLayout) -> Result<Self, KernelError> {
        let path = || path.to_owned();
        let failed = |source| KernelError::Read {
            path: path(),
            source,
        };
        let damaged = |source| KernelError::Damaged {
            path: path(),
            source,
        };
        let mut file = open(&path()).map_err(failed)?;
        let kind = Kind::of(&mut file).map_err(failed)?;
        let kind = kind.ok_or_else(|| KernelError::NotAKernel { path: path() })?;
        // As much as a guest can have, so that a kernel which is too large for this one is told
        // from a damaged one. Only what is written takes memory.
        let most = RamLayout::new(u64::MAX).low_end();
        let size = usize::try_from(most).unwrap_or(usize::MAX);
        let scratch =
            GuestMemoryMmap::from_ranges(&[(GuestAddress(0), size)]).map_err(|source| {
                KernelError::Scratch {
                    path: path(),
                    source,
                }
            })?;
        let lowest = Some(GuestAddress(UPPER_START));
        let kernel = match kind {
            Kind::Elf => {
                let loaded = Elf::load(&scratch, None, &mut file, lowest).map_err(damaged)?;
                Self {
                    scratch,
                    loaded_end: loaded.kernel_end,
                    entry: loaded.kernel_load.0,
                    end: loaded.kernel_end,
                    header: None,
                }
            }
            Kind::BzImage => {
                let loaded = BzImage::load(&scratch, None, &mut file, lowest).map_err(damaged)?;
                let header = loaded.setup_header.unwrap_or_default();
                if header.version < PROTOCOL_2_12 || header.xloadflags & XLF_KERNEL_64 == 0 {
                    return Err(KernelError::No64BitEntry { path: path() });
                }
                let unpacked = header.pref_address.saturating_add(header.init_size.into());
                Self {
                    scratch,
                    loaded_end: loaded.kernel_end,
                    entry: loaded.kernel_load.0.saturating_add(BZIMAGE_ENTRY),
                    end: loaded.kernel_end.max(unpacked),
                    header: Some(header),
                }
            }
        };
        let mut low = vec![0; usize::try_from(UPPER_START).unwrap_or(0)];
        let read = kernel.scratch.read_slice(&mut low, GuestAddress(0));
        if read.is_err() || low.iter().any(|byte| *byte != 0) {
            return Err(KernelError::TooLow { path: path() });
        }
        if kernel.end > layout.low_end() || kernel.entry >= kernel.end {
            return Err(KernelError::DoesNotFit {
                path: path(),
                end: kernel.end.max(kernel.entry),
                memory_bytes: layout.low_end(),
            });
        }
        Ok(kernel)
    }

    /// Copies what was loaded. Memory that stays zero is not touched.
    pub(super) fn copy_to(&self, ram: &Ram) -> Result<(), RamError> {
        let mut chunk = vec![0; CHUNK];
        let mut gpa = UPPER_START;
        while gpa < self.loaded_end {
            let left = usize::try_from(self.loaded_end - gpa).unwrap_or(usize::MAX);
            let part = &mut chunk[..left.min(CHUNK)];
            // The scratch mapping covers all that a kernel can be loaded to, and this was.
            if self.scratch.read_slice(part, GuestAddress(gpa)).is_err() {
                return Err(RamError::Outside { gpa });
            }
            if part.iter().any(|byte| *byte != 0) {
                ram.write(gpa, part)?;
            }
            gpa += CHUNK as u64;
        }
        Ok(())
    }
}

/// Opens a file, and nothing that somebody else would have to write to first.
pub(super) fn open(path: &Path) -> io::Result<File> {
    if std::fs::metadata(path)?.file_type().is_fifo() {
        let what = "it is a FIFO, and has to be read twice";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
    }
    File::open(path)
}

/// What kind of file it is, by its first bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Elf,
    BzImage,
}

impl Kind {
    fn of(file: &mut File) -> io::Result<Option<Self>> {
        let mut start = Vec::new();
        file.take(0x206).read_to_end(&mut start)?;
        file.rewind()?;
        Ok(Self::of_bytes(&start))
    }

    fn of_bytes(start: &[u8]) -> Option<Self> {
        // 64 bits, little endian, an executable (not position-independent) for x86-64.
        let is_elf = start.starts_with(b"\x7fELF\x02\x01")
            && start.get(16..20) == Some(&[0x02, 0x00, 0x3e, 0x00]);
        let is_bzimage = start.get(0x202..0x206) == Some(b"HdrS");
        if is_elf {
            Some(Self::Elf)
        } else {
            is_bzimage.then_some(Self::BzImage)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A vmlinux with one segment of `content` at `gpa` that takes `memory_bytes`.
    fn elf(gpa: u64, content: &[u8], memory_bytes: u64) -> Vec<u8> {
        let mut file = Vec::new();
        file.extend_from_slice(b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0");
        file.extend_from_slice(&[0x02, 0, 0x3e, 0, 1, 0, 0, 0]);
        for word in [gpa, 64, 0] {
            file.extend_from_slice(&u64::to_le_bytes(word));
        }
        file.extend_from_slice(&[0, 0, 0, 0, 64, 0, 56, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
        file.extend_from_slice(&[1, 0, 0, 0, 5, 0, 0, 0]);
        let bytes = content.len() as u64;
        for word in [64 + 56, gpa, gpa, bytes, memory_bytes, 0x1000] {
            file.extend_from_slice(&u64::to_le_bytes(word));
        }
        file.extend_from_slice(content);
        file
    }

    fn read(content: &[u8], memory_bytes: u64) -> Result<Kernel, KernelError> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), content).unwrap();
        Kernel::read(file.path(), RamLayout::new(memory_bytes))
    }

    #[test]
    fn a_vmlinux_is_found_in_memory() {
        let kernel = read(&elf(16 << 20, b"code", 4096), 32 << 20).unwrap();
        assert_eq!((kernel.entry, kernel.end), (16 << 20, (16 << 20) + 4096));
        let mut found = [0; 4];
        let at = GuestAddress(16 << 20);
        kernel.scratch.read_slice(&mut found, at).unwrap();
        assert_eq!(&found, b"code");
    }

    #[test]
    fn a_kernel_larger_than_memory_is_told_so() {
        let error = read(&elf(16 << 20, b"code", 64 << 20), 32 << 20).err();
        assert!(
            matches!(error, Some(KernelError::DoesNotFit { end, .. }) if end == 80 << 20),
            "{error:?}"
        );
        let error = read(&elf(16 << 20, b"code", u64::MAX), 32 << 20).err();
        assert!(
            matches!(error, Some(KernelError::Damaged { .. })),
            "{error:?}"
        );
    }

    #[test]
    fn files_that_are_no_kernels_are_refused() {
        let mut other_machine = elf(16 << 20, b"code", 4096);
        other_machine[18] = 0xb7;
        for content in [&b""[..], b"#!/bin/sh\n", &[0; 8192], &other_machine] {
            let error = read(content, 32 << 20).err();
            assert!(
                matches!(error, Some(KernelError::NotAKernel { .. })),
                "{error:?}"
            );
        }
        let cut = elf(16 << 20, b"code", 4096);
        let error = read(&cut[..cut.len() - 2], 32 << 20).err();
        assert!(
            matches!(error, Some(KernelError::Damaged { .. })),
            "{error:?}"
        );
        let low = elf(0x1000, b"code", 4096);
        assert!(matches!(
            read(&low, 32 << 20).err(),
            Some(KernelError::Damaged { .. })
        ));
    }

    #[test]
    fn a_bzimage_without_a_64_bit_entry_is_refused() {
        let mut image = vec![0; 8192];
        image[0x1f1] = 1; // setup sectors
        image[0x202..0x206].copy_from_slice(b"HdrS");
        image[0x206..0x208].copy_from_slice(&[0x0f, 0x02]);
        image[0x211] = 1; // loaded high
        image[0x214..0x218].copy_from_slice(&0x10_0000_u32.to_le_bytes());
        let error = read(&image, 32 << 20).err();
        assert!(
            matches!(error, Some(KernelError::No64BitEntry { .. })),
            "{error:?}"
        );
        image[0x236] = 1; // xloadflags
        let kernel = read(&image, 32 << 20).unwrap();
        assert_eq!(kernel.entry, 0x10_0200);
        assert_eq!(kernel.end, 0x10_0000 + 8192 - 1024);
    }

    #[test]
    fn nothing_is_loaded_over_the_boot_parameters() {
        // A second segment, of four bytes at 64 KiB.
        let mut file = elf(16 << 20, b"code", 4096);
        file[56] = 2;
        let header: Vec<u8> = file[64..120].to_vec();
        file.splice(120..120, header);
        for (segment, gpa) in [(64, 16_u64 << 20), (120, 64 << 10)] {
            file[segment + 8..segment + 16].copy_from_slice(&u64::to_le_bytes(64 + 2 * 56));
            file[segment + 24..segment + 32].copy_from_slice(&u64::to_le_bytes(gpa));
        }
        let error = read(&file, 32 << 20).err();
        assert!(
            matches!(error, Some(KernelError::TooLow { .. })),
            "{error:?}"
        );
    }

    #[test]
    fn a_fifo_is_not_waited_for() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("fifo");
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mkfifoat(rustix::fs::CWD, &path, mode).unwrap();
        let error = Kernel::read(&path, RamLayout::new(1 << 30)).err();
        assert!(matches!(error, Some(KernelError::Read { .. })), "{error:?}");
    }

    #[test]
    fn a_directory_is_no_kernel() {
        let path = std::env::temp_dir();
        let error = Kernel::read(&path, RamLayout::new(1 << 30)).err();
        assert!(matches!(error, Some(KernelError::Read { .. })), "{error:?}");
    }
}
