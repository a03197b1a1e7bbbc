use super::*;

const KERNEL: u64 = 16 << 20;

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

/// A bzImage with a 64-bit entry.
fn bzimage() -> Vec<u8> {
    let mut image = vec![0; 8192];
    image[0x1f1] = 1; // setup sectors
    image[0x202..0x206].copy_from_slice(b"HdrS");
    image[0x206..0x208].copy_from_slice(&[0x0f, 0x02]);
    image[0x211] = 1; // loaded high
    image[0x214..0x218].copy_from_slice(&0x10_0000_u32.to_le_bytes());
    image[0x236] = 1; // xloadflags
    image
}

fn file(content: &[u8]) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), content).unwrap();
    file
}

fn load(kernel: &Path, initrd: Option<&Path>, memory_bytes: u64) -> Result<Image, LinuxError> {
    let config = LinuxConfig {
        initrd: initrd.map(Path::to_owned),
        memory_bytes,
        ..LinuxConfig::new(kernel)
    };
    Image::load(&config, config.layout()?)
}

fn problem(kernel: &Path, initrd: Option<&Path>, memory_bytes: u64) -> LoadProblem {
    match load(kernel, initrd, memory_bytes).err() {
        Some(LinuxError::Load(LoadError { problem, .. })) => problem,
        other => panic!("{other:?}"),
    }
}

fn kernel_problem(content: &[u8]) -> LoadProblem {
    problem(file(content).path(), None, 32 << 20)
}

fn bytes_at<const N: usize>(image: &Image, gpa: u64) -> [u8; N] {
    let mut bytes = [0; N];
    image
        .scratch
        .read_slice(&mut bytes, GuestAddress(gpa))
        .unwrap();
    bytes
}

fn u32_at(image: &Image, gpa: u64) -> u32 {
    u32::from_le_bytes(bytes_at(image, gpa))
}

#[test]
fn a_vmlinux_is_loaded_where_it_belongs() {
    let kernel = file(&elf(KERNEL, b"code", 4096));
    let image = load(kernel.path(), None, 32 << 20).unwrap();
    assert_eq!(image.entry, KERNEL);
    assert_eq!(bytes_at(&image, KERNEL), *b"code");
    // Everything that was loaded is copied.
    let mut copied = Vec::new();
    let copy = image.copy(|gpa, bytes| {
        assert!(gpa + bytes.len() as u64 <= KERNEL + 4096);
        if !is_zero(bytes) {
            copied.extend_from_slice(bytes);
        }
        Ok(())
    });
    copy.unwrap();
    for part in [&b"code"[..], b"HdrS", b"_MP_", b"console=ttyS0"] {
        assert!(
            copied.windows(part.len()).any(|window| window == part),
            "{part:?}"
        );
    }
}

#[test]
fn a_kernel_larger_than_memory_is_refused_with_its_size() {
    let found = kernel_problem(&elf(KERNEL, b"code", 64 << 20));
    assert!(
        matches!(found, LoadProblem::DoesNotFit { end, .. } if end == 80 << 20),
        "{found:?}"
    );
    let found = kernel_problem(&elf(KERNEL, b"code", u64::MAX));
    assert!(matches!(found, LoadProblem::Damaged(_)), "{found:?}");
}

#[test]
fn files_that_are_no_kernels_are_refused() {
    let mut other_machine = elf(KERNEL, b"code", 4096);
    other_machine[18] = 0xb7;
    for content in [&b""[..], b"#!/bin/sh\n", &[0; 8192], &other_machine] {
        let found = kernel_problem(content);
        assert!(matches!(found, LoadProblem::NotAKernel), "{found:?}");
    }
    let cut = elf(KERNEL, b"code", 4096);
    for content in [&cut[..cut.len() - 2], &elf(0x1000, b"code", 4096)] {
        let found = kernel_problem(content);
        assert!(matches!(found, LoadProblem::Damaged(_)), "{found:?}");
    }
}

#[test]
fn a_bzimage_without_a_64_bit_entry_is_refused() {
    let mut old = bzimage();
    old[0x236] = 0;
    let found = kernel_problem(&old);
    assert!(matches!(found, LoadProblem::No64BitEntry), "{found:?}");
    let image = load(file(&bzimage()).path(), None, 32 << 20).unwrap();
    assert_eq!(image.entry, 0x10_0200);
}

#[test]
fn a_segment_over_the_boot_parameters_is_refused() {
    // A second segment, of four bytes at 64 KiB.
    let mut content = elf(KERNEL, b"code", 4096);
    content[56] = 2;
    let header: Vec<u8> = content[64..120].to_vec();
    content.splice(120..120, header);
    for (segment, gpa) in [(64, KERNEL), (120, 64 << 10)] {
        content[segment + 8..segment + 16].copy_from_slice(&u64::to_le_bytes(64 + 2 * 56));
        content[segment + 24..segment + 32].copy_from_slice(&u64::to_le_bytes(gpa));
    }
    let found = kernel_problem(&content);
    assert!(matches!(found, LoadProblem::TooLow), "{found:?}");
}

#[test]
fn fifos_and_directories_are_no_kernels() {
    let directory = tempfile::tempdir().unwrap();
    let fifo = directory.path().join("fifo");
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, mode).unwrap();
    for path in [fifo.as_path(), directory.path()] {
        let found = problem(path, None, 1 << 30);
        assert!(matches!(found, LoadProblem::Read(_)), "{found:?}");
    }
}

// Offsets as in the kernel's documentation.
#[test]
fn the_boot_parameters_are_where_the_kernel_reads_them() {
    let kernel = file(&elf(KERNEL, b"code", 4096));
    let initrd = file(&[7; 5000]);
    let image = load(kernel.path(), Some(initrd.path()), 4 << 30).unwrap();
    let at = |offset| BOOT_PARAMS + offset;
    assert_eq!(bytes_at(&image, at(0x1fe)), [0x55, 0xaa]);
    assert_eq!(bytes_at(&image, at(0x202)), *b"HdrS");
    assert_eq!(bytes_at(&image, at(0x210)), [LOADER_UNDEFINED]);
    let place = u32_at(&image, at(0x218));
    assert_eq!((place, u32_at(&image, at(0x21c))), (0x7fff_e000, 5000));
    assert_eq!(bytes_at(&image, place.into()), [7; 5000]);
    assert_eq!(u32_at(&image, at(0x228)), 0x2_0000);
    let length = crate::linux::DEFAULT_CMDLINE.len();
    assert_eq!(u32_at(&image, at(0x238)) as usize, length);
    assert_eq!(bytes_at(&image, at(0x1e8)), [4]);
    // The second range of memory: reserved (2), up to 1 MiB.
    let start = u32_at(&image, at(0x2d0 + 20));
    assert_eq!(start + u32_at(&image, at(0x2d0 + 28)), 0x10_0000);
    assert_eq!(u32_at(&image, at(0x2d0 + 36)), 2);
}

#[test]
fn a_bzimages_own_header_is_kept_and_limits_the_initrd() {
    let mut content = bzimage();
    content[0x22c..0x230].copy_from_slice(&0x37ff_ffff_u32.to_le_bytes());
    let (kernel, initrd) = (file(&content), file(&[7; 4096]));
    let image = load(kernel.path(), Some(initrd.path()), 8 << 30).unwrap();
    assert_eq!(bytes_at(&image, BOOT_PARAMS + 0x206), [0x0f, 0x02]);
    assert_eq!(u32_at(&image, BOOT_PARAMS + 0x218), 0x37ff_f000);
}

#[test]
fn an_initrd_lies_at_the_end_of_memory_and_never_over_the_kernel() {
    let kernel = file(&elf(KERNEL, b"code", (4 << 20) + 1));
    let room = (64 << 20) - ((20 << 20) + 4096);
    let sized = |bytes| {
        let initrd = tempfile::NamedTempFile::new().unwrap();
        initrd.as_file().set_len(bytes).unwrap();
        initrd
    };
    let image = load(kernel.path(), Some(sized(room).path()), 64 << 20).unwrap();
    assert_eq!(u32_at(&image, BOOT_PARAMS + 0x218), (20 << 20) + 4096);
    for bytes in [room + 1, 64 << 20, 5 << 30, u64::from(u32::MAX) + 1] {
        let found = problem(kernel.path(), Some(sized(bytes).path()), 64 << 20);
        assert!(
            matches!(found, LoadProblem::NoRoom { room_bytes, .. } if room_bytes == room),
            "{found:?}"
        );
    }
}

#[test]
fn an_initrd_without_content_is_refused() {
    let kernel = file(&elf(KERNEL, b"code", 4096));
    let (empty, directory) = (file(b""), tempfile::tempdir().unwrap());
    for path in [empty.path(), directory.path()] {
        let found = problem(kernel.path(), Some(path), 64 << 20);
        assert!(matches!(found, LoadProblem::NotAFile), "{found:?}");
    }
}

/// Files of sysfs have the size of a page, whatever they hold.
#[test]
fn an_initrd_shorter_than_its_size_is_refused() {
    let kernel = file(&elf(KERNEL, b"code", 4096));
    let short = Path::new("/sys/kernel/uevent_seqnum");
    if !short.exists() {
        println!("SKIP: no {}", short.display());
        return;
    }
    let found = problem(kernel.path(), Some(short), 64 << 20);
    assert!(matches!(found, LoadProblem::Copy(_)), "{found:?}");
}
