//! What a guest's memory holds when the guest starts: the kernel, its initrd, and the data that the
//! 64-bit boot protocol asks for (Documentation/arch/x86/boot.rst and zero-page.rst of Linux).
//!
//! All of it is put into a scratch mapping first, in the form of memory that the crates `linux-loader` and
//! `vm-memory` know, and is copied from there. So guest memory is written in one way only, and may have
//! any backing.

use std::fs::File;
use std::io::{self, Read, Seek};
use std::ops::Range;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use linux_loader::loader::bootparam::{boot_e820_entry, boot_params, setup_header};
use linux_loader::loader::{self, BzImage, Elf, KernelLoader};
use pagetide_memory::PageSize;
use vm_memory::{ByteValued, Bytes, GuestAddress, GuestMemoryError, GuestMemoryMmap};

use crate::page_tables;

use super::config::LinuxConfig;
use super::error::LinuxError;
use super::layout::{
    BOOT_PARAMS, COMMAND_LINE, GDT, MAPPED_GIGABYTES, MP_TABLE, RamLayout, TABLES, UPPER_START,
};
use super::{mp_table, vcpu};

/// The 64-bit entry point of a bzImage lies so many bytes after its start.
const BZIMAGE_ENTRY: u64 = 0x200;
/// Boot protocol 2.12, the first with 64-bit entry points.
const PROTOCOL_2_12: u16 = 0x20c;
/// A bit of `xloadflags`: there is a 64-bit entry point.
const XLF_KERNEL_64: u16 = 1;
/// The boot protocol's limit of an initrd, unless a bzImage has another one.
const LAST_ADDRESS: u32 = 0x7fff_ffff;
const CHUNK: u64 = 64 << 10;

const BOOT_FLAG: u16 = 0xaa55;
const HEADER_MAGIC: u32 = 0x5372_6448; // "HdrS"
/// A boot loader without a number.
const LOADER_UNDEFINED: u8 = 0xff;
const KERNEL_ALIGNMENT: u32 = 2 << 20;

/// A kernel or an initrd cannot be loaded.
#[derive(Debug, thiserror::Error)]
#[error("{file} {}", path.display())]
pub struct LoadError {
    /// `kernel` or `initrd`.
    pub file: &'static str,
    /// Its path.
    pub path: PathBuf,
    /// The reason.
    #[source]
    pub problem: LoadProblem,
}

/// Why a kernel or an initrd cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadProblem {
    /// The file cannot be read.
    #[error(transparent)]
    Read(io::Error),
    /// The file is something else.
    #[error("neither an x86-64 vmlinux (ELF) nor a bzImage")]
    NotAKernel,
    /// A segment of the kernel lies where the boot parameters are.
    #[error("a segment lies below 1 MiB, where the boot parameters are")]
    TooLow,
    /// The bzImage has no 64-bit entry point.
    #[error("no 64-bit entry point (boot protocol 2.12, XLF_KERNEL_64)")]
    No64BitEntry,
    /// The file looks like a kernel, and cannot be loaded.
    #[error("damaged")]
    Damaged(#[source] loader::Error),
    /// The kernel needs more memory than there is.
    #[error("it needs the first {end} bytes of memory, and there are {memory_bytes}")]
    DoesNotFit {
        /// Where the kernel ends.
        end: u64,
        /// Where the guest's memory, or its first part, ends.
        memory_bytes: u64,
    },
    /// The initrd is a directory, a pipe, or empty.
    #[error("not a regular file with content")]
    NotAFile,
    /// Kernel and initrd together need more memory than there is.
    #[error("its {bytes} bytes do not fit: {room_bytes} are left beside the kernel")]
    NoRoom {
        /// The initrd's size.
        bytes: u64,
        /// The room for it.
        room_bytes: u64,
    },
    /// The file cannot be copied to the scratch mapping.
    #[error("it cannot be read into memory")]
    Copy(#[source] GuestMemoryError),
}

/// A guest's initial memory.
pub(super) struct Image {
    scratch: GuestMemoryMmap<()>,
    /// What was put there.
    loaded: Vec<Range<u64>>,
    /// The gpa at which the kernel is entered.
    pub(super) entry: u64,
}

impl Image {
    /// Loads everything that the configuration names. The guest has this memory.
    pub(super) fn load(config: &LinuxConfig, layout: RamLayout) -> Result<Self, LinuxError> {
        let command_line = config.command_line()?;
        // As much as any guest can have, so that a kernel that is too large for this guest is told from a
        // damaged one. Only what is written takes memory.
        let most = RamLayout::new(u64::MAX).low_end();
        let size = usize::try_from(most).unwrap_or(usize::MAX);
        let mut image = Self {
            scratch: GuestMemoryMmap::from_ranges(&[(GuestAddress(0), size)])?,
            loaded: Vec::new(),
            entry: 0,
        };
        let failed = |file, path: &Path| {
            let path = path.to_owned();
            move |problem| LoadError {
                file,
                path,
                problem,
            }
        };
        let kernel = image
            .load_kernel(&config.kernel, layout)
            .map_err(failed("kernel", &config.kernel))?;
        image.entry = kernel.entry;
        let mut params = parameters(kernel.header, layout);
        params.hdr.cmdline_size = u32::try_from(command_line.as_bytes().len()).unwrap_or(0);
        if let Some(path) = &config.initrd {
            let place = image
                .load_initrd(path, &kernel, layout)
                .map_err(failed("initrd", path))?;
            (params.hdr.ramdisk_image, params.hdr.ramdisk_size) = place;
        }
        let words = |words: &[u64]| words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let tables = page_tables::build(TABLES, &MAPPED_GIGABYTES).unwrap_or_default();
        // The configuration was checked.
        let processors = u8::try_from(config.vcpus).unwrap_or(mp_table::MAX_PROCESSORS);
        let data: [(u64, Vec<u8>); 5] = [
            (GDT, words(&vcpu::descriptors())),
            (TABLES, words(&tables)),
            (BOOT_PARAMS, params.as_slice().to_vec()),
            (COMMAND_LINE, command_line.into_bytes_with_nul()),
            (MP_TABLE, mp_table::build(processors)),
        ];
        for (gpa, bytes) in data {
            image.scratch.write_slice(&bytes, GuestAddress(gpa))?;
            image.loaded.push(gpa..gpa + bytes.len() as u64);
        }
        Ok(image)
    }

    fn load_kernel(&mut self, path: &Path, layout: RamLayout) -> Result<Kernel, LoadProblem> {
        let mut file = open(path).map_err(LoadProblem::Read)?;
        let mut start = Vec::new();
        let read = (&file).take(0x206).read_to_end(&mut start);
        read.and_then(|_| file.rewind())
            .map_err(LoadProblem::Read)?;
        // 64 bits, little endian, an executable (not position-independent) for x86-64.
        let is_elf = start.starts_with(b"\x7fELF\x02\x01")
            && start.get(16..20) == Some(&[0x02, 0x00, 0x3e, 0x00]);
        let lowest = Some(GuestAddress(UPPER_START));
        let loaded = if is_elf {
            Elf::load(&self.scratch, None, &mut file, lowest)
        } else if start.get(0x202..0x206) == Some(b"HdrS") {
            BzImage::load(&self.scratch, None, &mut file, lowest)
        } else {
            return Err(LoadProblem::NotAKernel);
        };
        let loaded = loaded.map_err(LoadProblem::Damaged)?;
        let mut kernel = Kernel {
            entry: loaded.kernel_load.0,
            end: loaded.kernel_end,
            header: loaded.setup_header,
        };
        if let Some(header) = kernel.header {
            if header.version < PROTOCOL_2_12 || header.xloadflags & XLF_KERNEL_64 == 0 {
                return Err(LoadProblem::No64BitEntry);
            }
            let unpacked = header.pref_address.saturating_add(header.init_size.into());
            kernel.entry = kernel.entry.saturating_add(BZIMAGE_ENTRY);
            kernel.end = kernel.end.max(unpacked);
        }
        let mut low = vec![0; usize::try_from(UPPER_START).unwrap_or(0)];
        self.scratch
            .read_slice(&mut low, GuestAddress(0))
            .map_err(LoadProblem::Copy)?;
        if !is_zero(&low) {
            return Err(LoadProblem::TooLow);
        }
        let (end, memory_bytes) = (kernel.end.max(kernel.entry), layout.low_end());
        if end > memory_bytes || kernel.entry >= kernel.end {
            return Err(LoadProblem::DoesNotFit { end, memory_bytes });
        }
        self.loaded.push(UPPER_START..loaded.kernel_end);
        Ok(kernel)
    }

    /// Loads an initrd as high as possible, so that the kernel has room to grow. Returns its address and
    /// size.
    fn load_initrd(
        &mut self,
        path: &Path,
        kernel: &Kernel,
        layout: RamLayout,
    ) -> Result<(u32, u32), LoadProblem> {
        let mut file = open(path).map_err(LoadProblem::Read)?;
        let metadata = file.metadata().map_err(LoadProblem::Read)?;
        let bytes = metadata.len();
        if !metadata.is_file() || bytes == 0 {
            return Err(LoadProblem::NotAFile);
        }
        let last = kernel.header.map_or(0, |header| header.initrd_addr_max);
        let last = if last == 0 { LAST_ADDRESS } else { last };
        let end = layout.low_end().min(u64::from(last) + 1);
        let page = PageSize::Size4K.bytes();
        let start = kernel.end.next_multiple_of(page);
        let gpa = end.checked_sub(bytes).map(|gpa| gpa / page * page);
        let gpa = gpa.filter(|gpa| *gpa >= start);
        let place = gpa.and_then(|gpa| Some((gpa.try_into().ok()?, bytes.try_into().ok()?)));
        let room_bytes = end.saturating_sub(start);
        let (gpa, size): (u32, u32) = place.ok_or(LoadProblem::NoRoom { bytes, room_bytes })?;
        let at = GuestAddress(gpa.into());
        // Fails if the file has become shorter.
        self.scratch
            .read_exact_volatile_from(at, &mut file, size as usize)
            .map_err(LoadProblem::Copy)?;
        self.loaded.push(at.0..at.0 + bytes);
        Ok((gpa, size))
    }

    /// Passes everything that was loaded to `write`, in pieces, with their gpas.
    pub(super) fn copy(
        &self,
        mut write: impl FnMut(u64, &[u8]) -> Result<(), LinuxError>,
    ) -> Result<(), LinuxError> {
        let mut chunk = Vec::new();
        for range in &self.loaded {
            let mut gpa = range.start;
            while gpa < range.end {
                let bytes = CHUNK.min(range.end - gpa);
                chunk.resize(usize::try_from(bytes).unwrap_or(0), 0);
                self.scratch.read_slice(&mut chunk, GuestAddress(gpa))?;
                write(gpa, &chunk)?;
                gpa += bytes;
            }
        }
        Ok(())
    }
}

/// A kernel that was loaded.
struct Kernel {
    /// The gpa at which it is entered.
    entry: u64,
    /// The end of the memory that it uses before it reads the memory map.
    end: u64,
    /// The header of a bzImage; a vmlinux has none.
    header: Option<setup_header>,
}

/// The boot parameters, but for the command line's length and the initrd.
fn parameters(header: Option<setup_header>, layout: RamLayout) -> boot_params {
    let mut params = boot_params {
        hdr: header.unwrap_or(setup_header {
            boot_flag: BOOT_FLAG,
            header: HEADER_MAGIC,
            kernel_alignment: KERNEL_ALIGNMENT,
            ..setup_header::default()
        }),
        ..boot_params::default()
    };
    params.hdr.type_of_loader = LOADER_UNDEFINED;
    params.hdr.cmd_line_ptr = u32::try_from(COMMAND_LINE).unwrap_or(u32::MAX);
    let map = layout.e820();
    params.e820_entries = u8::try_from(map.len()).unwrap_or(u8::MAX);
    for (entry, (range, kind)) in params.e820_table.iter_mut().zip(map) {
        *entry = boot_e820_entry {
            addr: range.start,
            size: range.end - range.start,
            r#type: kind,
        };
    }
    params
}

/// Whether there is nothing to write: guest memory is zero at first.
pub(super) fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| *byte == 0)
}

/// Opens a file, but for a FIFO: it would wait for a writer, and cannot be read twice.
fn open(path: &Path) -> io::Result<File> {
    if std::fs::metadata(path)?.file_type().is_fifo() {
        let what = "it is a FIFO, and has to be read twice";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
    }
    File::open(path)
}

#[cfg(test)]
#[path = "image_tests.rs"]
mod tests;
