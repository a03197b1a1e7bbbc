use std::fs::File;
use std::os::unix::fs::FileExt;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

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

    let blocks = || fstat(&file).unwrap().st_blocks;
    assert_eq!(blocks(), 16, "two pages of 8 blocks");
    view.punch(PAGE, PAGE).unwrap();
    assert_eq!(blocks(), 8);
    view.zero(1, 2 * PAGE - 1).unwrap();
    assert_eq!(blocks(), 16);
    view.read(0, &mut seen).unwrap();
    assert_eq!(&seen, b"p\0\0\0\0\0");
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
        assert_eq!(view.zero(offset, len), expected);
        assert_eq!(view.punch(offset, len), expected);
    }
    assert_eq!(view.zero(2 * PAGE, 0), Ok(()));
}

#[test]
fn a_file_that_differs_from_its_description_is_refused() {
    let map = |file: &OwnedFd, offset, bytes, page_size| {
        FileView::map(file.try_clone().unwrap(), offset, bytes, page_size).unwrap_err()
    };
    let file = memfd(4 * PAGE);
    for (offset, bytes) in [(0, 0), (0, 1), (1, PAGE), (u64::MAX, PAGE)] {
        let error = map(&file, offset, bytes, PageSize::Size4K);
        assert!(
            matches!(error, FileViewError::NotPageMultiple { .. }),
            "{error}"
        );
    }
    for (offset, bytes) in [
        (0, 5 * PAGE),
        (4 * PAGE, PAGE),
        (0u64.wrapping_sub(PAGE), PAGE),
    ] {
        let expected = FileViewError::OutsideFile {
            offset,
            bytes,
            file_bytes: 4 * PAGE,
        };
        assert_eq!(map(&file, offset, bytes, PageSize::Size4K), expected);
    }
    let expected = FileViewError::OtherPages {
        page_size: PageSize::Size2M,
        file_bytes: PAGE,
    };
    assert_eq!(map(&file, 0, PAGE, PageSize::Size2M), expected);

    for path in ["/proc/self/status", "/dev/null", "/dev/zero", "/"] {
        let file = OwnedFd::from(File::open(path).unwrap());
        let error = map(&file, 0, PAGE, PageSize::Size4K);
        assert_eq!(error, FileViewError::NotMemory, "{path}");
    }
    let readable =
        OwnedFd::from(File::open(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap());
    let error = map(&readable, 0, PAGE, PageSize::Size4K);
    assert!(matches!(error, FileViewError::Map { .. }), "{error}");
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
    assert_eq!(view.zero(8, 2 * PAGE), cut);
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

#[test]
fn finding_content_leaves_the_file_position_unchanged() {
    let file = memfd(8 * PAGE);
    let view = view(&file, 2 * PAGE, 4 * PAGE);
    let at = |position| seek(&file, SeekFrom::Start(position)).unwrap();
    let position = || seek(&file, SeekFrom::Current(0)).unwrap();
    let put = |page: u64| {
        let other = File::from(file.try_clone().unwrap());
        other.write_all_at(b"text", page * PAGE + 100).unwrap();
    };
    let first = || {
        let before = position();
        let first = view.find_content();
        assert_eq!(position(), before, "other owners share the position");
        first
    };
    at(4711);
    assert_eq!(first(), Ok(None));
    // Before the view, and after it.
    put(1);
    assert_eq!(first(), Ok(None));
    put(6);
    assert_eq!(first(), Ok(None));
    at(0);
    put(5);
    assert_eq!(first(), Ok(Some(3 * PAGE)));
    put(2);
    assert_eq!(first(), Ok(Some(0)));
    view.punch(0, PAGE).unwrap();
    at(8 * PAGE);
    assert_eq!(first(), Ok(Some(3 * PAGE)));
    // The file's owner has truncated it since.
    ftruncate(&file, PAGE).unwrap();
    assert_eq!(first(), Ok(None));
}

#[test]
fn reserved_pages_are_found_in_a_whole_file() {
    let file = memfd(8 * PAGE);
    let (whole, part) = (view(&file, 0, 8 * PAGE), view(&file, 2 * PAGE, 4 * PAGE));
    assert_eq!(whole.find_content(), Ok(None));
    fallocate(&file, FallocateFlags::empty(), 4 * PAGE, PAGE).unwrap();
    assert_eq!(whole.find_content(), Ok(Some(0)));
    // In a view of a part, the reserved pages may lie outside the view.
    assert_eq!(part.find_content(), Ok(None));
    whole.punch(4 * PAGE, PAGE).unwrap();
    assert_eq!(whole.find_content(), Ok(None));
}
