//! What the kernel is told in `struct boot_params`: Documentation/arch/x86/boot.rst and
//! zero-page.rst of Linux.

use linux_loader::loader::bootparam::{boot_e820_entry, boot_params, setup_header};
use vm_memory::ByteValued;

use super::layout::{COMMAND_LINE, E820, RamLayout};

const BOOT_FLAG: u16 = 0xaa55;
const HEADER_MAGIC: u32 = 0x5372_6448; // "HdrS"
/// A boot loader that has no number.
const LOADER_UNDEFINED: u8 = 0xff;
const KERNEL_ALIGNMENT: u32 = 2 << 20;
const E820_RAM: u32 = 1;
const E820_RESERVED: u32 = 2;

/// What differs from boot to boot.
#[derive(Clone, Copy, Debug)]
pub(super) struct Boot {
    pub(super) layout: RamLayout,
    /// Of a bzImage; a vmlinux has none.
    pub(super) header: Option<setup_header>,
    /// Bytes of the command line, without its NUL.
    pub(super) command_line_bytes: u32,
    /// Where the initrd is, and how long.
    pub(super) initrd: Option<(u32, u32)>,
}

/// The structure, as it lies in memory.
pub(super) fn build(boot: &Boot) -> Vec<u8> {
    let mut params = boot_params {
        hdr: boot.header.unwrap_or(setup_header {
            boot_flag: BOOT_FLAG,
            header: HEADER_MAGIC,
            kernel_alignment: KERNEL_ALIGNMENT,
            ..setup_header::default()
        }),
        ..boot_params::default()
    };
    params.hdr.type_of_loader = LOADER_UNDEFINED;
    params.hdr.cmd_line_ptr = u32::try_from(COMMAND_LINE).unwrap_or(u32::MAX);
    params.hdr.cmdline_size = boot.command_line_bytes;
    if let Some((gpa, bytes)) = boot.initrd {
        params.hdr.ramdisk_image = gpa;
        params.hdr.ramdisk_size = bytes;
    }
    let map = boot.layout.e820();
    params.e820_entries = u8::try_from(map.len()).unwrap_or(u8::MAX);
    for (entry, range) in params.e820_table.iter_mut().zip(map) {
        *entry = e820_entry(range);
    }
    params.as_slice().to_vec()
}

fn e820_entry(range: E820) -> boot_e820_entry {
    boot_e820_entry {
        addr: range.start,
        size: range.bytes,
        r#type: if range.usable {
            E820_RAM
        } else {
            E820_RESERVED
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn u32_at(bytes: &[u8], offset: usize) -> u32 {
        u32::from_le_bytes(bytes[offset..offset + 4].try_into().unwrap())
    }

    // Offsets as the kernel's documentation gives them.
    #[test]
    fn fields_are_where_the_kernel_reads_them() {
        let bytes = build(&Boot {
            layout: RamLayout::new(4 << 30),
            header: None,
            command_line_bytes: 17,
            initrd: Some((0x1234_5000, 0x678)),
        });
        assert_eq!(bytes.len(), 4096);
        assert_eq!(bytes[0x1fe..0x200], [0x55, 0xaa]);
        assert_eq!(&bytes[0x202..0x206], b"HdrS");
        assert_eq!(bytes[0x210], LOADER_UNDEFINED);
        assert_eq!(u32_at(&bytes, 0x218), 0x1234_5000);
        assert_eq!(u32_at(&bytes, 0x21c), 0x678);
        assert_eq!(u32_at(&bytes, 0x228), 0x2_0000);
        assert_eq!(u32_at(&bytes, 0x238), 17);
        assert_eq!(bytes[0x1e8], 4);
        // The second range: reserved, up to 1 MiB.
        let start = u32_at(&bytes, 0x2d0 + 20);
        assert_eq!(start + u32_at(&bytes, 0x2d0 + 28), 0x10_0000);
        assert_eq!(u32_at(&bytes, 0x2d0 + 36), E820_RESERVED);
    }

    #[test]
    fn a_bzimages_own_header_is_kept() {
        let header = setup_header {
            version: 0x20f,
            init_size: 77,
            ..setup_header::default()
        };
        let bytes = build(&Boot {
            layout: RamLayout::new(1 << 30),
            header: Some(header),
            command_line_bytes: 0,
            initrd: None,
        });
        assert_eq!(bytes[0x206..0x208], [0x0f, 0x02]);
        assert_eq!(u32_at(&bytes, 0x260), 77);
        assert_eq!(u32_at(&bytes, 0x218), 0);
    }
}
