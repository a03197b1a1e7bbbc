use std::fs::File;
use std::os::unix::fs::FileExt;

use std::os::fd::AsRawFd;

use rustix::fs::{MemfdFlags, fstat, ftruncate, memfd_create};

use super::*;

const PAGE: u64 = 4096;

fn memfd(bytes: u64) -> OwnedFd {
    let file = memfd_create("file-view-test", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, bytes).unwrap();
    file
}

fn view(file: &OwnedFd, offset: u64, bytes: u64) -> FileView {
    FileView::map(file.try_clone().unwrap(), offset, bytes, PageSize::Size4K).unwrap()
}

#[test]
fn a_view_writes_to_its_part_of_the_file() {
    let file = memfd(4 * PAGE);
    let view = view(&file, PAGE, 2 * PAGE);
    assert_eq!(view.bytes(), 2 * PAGE);
    view.write(PAGE - 3, b"across").unwrap();
    let other = File::from(file.try_clone().unwrap());
    let mut seen = [0; 6];
    other.read_exact_at(&mut seen, 2 * PAGE - 3).unwrap();
    assert_eq!(&seen, b"across");
    other.write_all_at(b"peer", PAGE).unwrap();
    view.read(0, &mut seen).unwrap();
    assert_eq!(&seen, b"peer\0\0");
}

#[test]
fn accesses_outside_the_view_are_refused() {
    let view = view(&memfd(4 * PAGE), PAGE, 2 * PAGE);
    for (offset, len) in [
        (2 * PAGE, 1),
        (2 * PAGE - 1, 2),
        (u64::MAX, 1),
        (0, 2 * PAGE + 1),
    ] {
        let expected = Err(FileAccessError::Outside {
            offset,
            len,
            bytes: 2 * PAGE,
        });
        let mut bytes = vec![0; to_usize(len)];
        assert_eq!(view.write(offset, &bytes), expected);
        assert_eq!(view.read(offset, &mut bytes), expected);
    }
    assert_eq!(view.write(2 * PAGE, &[]), Ok(()));
}

#[test]
fn a_file_that_cannot_be_mapped_is_refused() {
    let map = |file: OwnedFd, bytes| FileView::map(file, 0, bytes, PageSize::Size4K).unwrap_err();
    let file = memfd(4 * PAGE);
    let outside = MemoryFileError::OutsideFile {
        offset: 0,
        bytes: 5 * PAGE,
        file_bytes: 4 * PAGE,
    };
    let error = map(file.try_clone().unwrap(), 5 * PAGE);
    assert_eq!(error, FileViewError::File(outside));
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let error = map(OwnedFd::from(File::open(path).unwrap()), PAGE);
    assert!(matches!(error, FileViewError::Map { .. }), "{error}");
}

/// One page with content, and 511 that would read as zeroes in place of the content that comes later.
#[test]
fn a_write_creates_no_huge_page() {
    const HUGE: u64 = 2 << 20;
    let Some(file) = pagetide_test_support::huge_memory_file(2 * HUGE) else {
        return;
    };
    let view = view(&file, 0, 2 * HUGE);
    view.write(HUGE, b"text").unwrap();
    let blocks = fstat(&file).unwrap().st_blocks;
    assert_eq!(blocks, 8, "one page");
}

/// A minimal SIGBUS handler that supports guarded copies.
#[cfg(target_arch = "x86_64")]
extern "C" fn leave_copy(
    _signal: libc::c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    let number = |register: libc::c_int| register.unsigned_abs() as usize;
    // SAFETY: the kernel has put a ucontext_t there, which the handler may change.
    let context = unsafe { &mut *context.cast::<libc::ucontext_t>() };
    let registers = &mut context.uc_mcontext.gregs;
    let instruction = registers[number(libc::REG_RIP)].cast_unsigned();
    let Some(escape) = crate::guard::escape_from_copy(to_usize(instruction)) else {
        std::process::abort();
    };
    // SAFETY: installed with SA_SIGINFO, so that `info` is valid.
    let info = unsafe { &*info };
    // SAFETY: the kernel has set the address, as for every SIGBUS caused by an access.
    let at = unsafe { info.si_addr() };
    registers[number(libc::REG_RAX)] = to_u64(at.addr()).cast_signed();
    registers[number(libc::REG_RDX)] = 0;
    registers[number(libc::REG_RIP)] = to_u64(escape.instruction).cast_signed();
}

#[test]
#[cfg(target_arch = "x86_64")]
fn a_truncated_file_is_an_error_and_the_process_survives() {
    // SAFETY: all zeroes is a valid sigaction; only the fields below matter.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = leave_copy as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO;
    // SAFETY: the handler accesses only its arguments, and no other test of this process causes SIGBUS.
    let result = unsafe { libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut()) };
    assert_eq!(result, 0);

    let file = memfd(4 * PAGE);
    let view = view(&file, PAGE, 3 * PAGE);
    view.write(0, &[7; 3 * 4096]).unwrap();
    ftruncate(&file, 2 * PAGE).unwrap();
    let cut = Err(FileAccessError::Truncated { at: PAGE });
    let mut bytes = vec![0; 3 * 4096];
    assert_eq!(view.read(0, &mut bytes), cut);
    assert_eq!(
        &bytes[..4096],
        &[7; 4096],
        "the part before the end has been read"
    );
    assert_eq!(view.write(0, &bytes), cut);
    assert_eq!(view.read(0, &mut bytes[..4096]), Ok(()));
    // After the file grows again, the same addresses are memory again.
    ftruncate(&file, 4 * PAGE).unwrap();
    assert_eq!(view.read(0, &mut bytes), Ok(()));
}

#[test]
fn a_child_does_not_inherit_the_view() {
    let view = view(&memfd(4 * PAGE), PAGE, 2 * PAGE);
    let start = format!("{:x}-", view.mapping.range().start().0);
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut lines = maps.lines().skip_while(|line| !line.starts_with(&start));
    let flags = lines
        .find_map(|line| line.strip_prefix("VmFlags:"))
        .unwrap();
    // "dc": do not copy on fork.
    assert!(flags.split_whitespace().any(|flag| flag == "dc"), "{flags}");
}
