use std::error::Error as _;
use std::io::IoSliceMut;
use std::ptr;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use pagetide_test_support::Task;
use rustix::io::ReadWriteFlags;
use rustix::mm::{self, MapFlags, ProtFlags};

use super::*;

const PAGE: usize = 4096;

/// Opens a userfaultfd; on a machine without one, prints the reason and returns `None`.
fn userfaultfd(features: Features) -> Option<Userfaultfd> {
    match Userfaultfd::open(features) {
        Ok(fd) => Some(fd),
        Err(
            error @ (OpenError::NotSupported
            | OpenError::NoPermission { .. }
            | OpenError::MissingFeatures { .. }),
        ) => {
            println!("SKIP: {error}");
            None
        }
        Err(error) => panic!("{error}: {:?}", error.source()),
    }
}

/// Pages of anonymous memory that tests register and touch.
struct Memory {
    start: *mut u8,
    pages: usize,
}

// SAFETY: the field is an address; only atomic loads touch the memory there.
unsafe impl Sync for Memory {}

impl Memory {
    fn new(pages: usize) -> Self {
        // SAFETY: a null hint without MAP_FIXED replaces no mapping.
        let start = unsafe {
            mm::mmap_anonymous(
                ptr::null_mut(),
                pages * PAGE,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        };
        Self {
            start: start.unwrap().cast(),
            pages,
        }
    }

    fn range(&self, first: usize, pages: usize) -> UserRange {
        assert!(first + pages <= self.pages);
        UserRange {
            start: (self.start.addr() + first * PAGE) as u64,
            bytes: (pages * PAGE) as u64,
        }
    }

    fn touch(&self, page: usize) -> u8 {
        assert!(page < self.pages);
        let at = self.start.wrapping_add(page * PAGE);
        // SAFETY: from_ptr requires valid memory: a page of the mapping, which lives as long as self.
        unsafe { AtomicU8::from_ptr(at) }.load(Ordering::Relaxed)
    }

    fn discard(&self, page: usize) {
        assert!(page < self.pages);
        let at = self.start.wrapping_add(page * PAGE).cast();
        // SAFETY: there is no reference into the mapping, and the test discards its content on purpose.
        unsafe { mm::madvise(at, PAGE, mm::Advice::LinuxDontNeed) }.unwrap();
    }

    fn register(&self, fd: &Userfaultfd) {
        // SAFETY: register requires that the memory is the caller's and that no code relies on its
        // zeroes: the mapping is this value's own, and the tests do not rely on its zeroes.
        unsafe { fd.register(self.range(0, self.pages), Mode::Missing) }.unwrap();
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: there is no reference into the mapping.
        unsafe { mm::munmap(self.start.cast(), self.pages * PAGE) }.unwrap();
    }
}

/// A userfaultfd, and memory that is registered with it.
fn registered(features: Features, pages: usize) -> Option<(Userfaultfd, Memory)> {
    let fd = userfaultfd(features)?;
    let memory = Memory::new(pages);
    memory.register(&fd);
    Some((fd, memory))
}

fn next_event(fd: &Userfaultfd) -> Event {
    let mut buffer = EventBuffer::new(4);
    loop {
        match fd.read_events(&mut buffer).unwrap().next() {
            Some(event) => return event,
            None => thread::sleep(Duration::from_millis(1)),
        }
    }
}

fn next_fault(fd: &Userfaultfd) -> PageFault {
    match next_event(fd) {
        Event::PageFault(fault) => fault,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_fault_is_reported_and_resolved() {
    let Some((fd, memory)) = registered(Features::NONE, 4) else {
        return;
    };
    thread::scope(|scope| {
        let toucher = scope.spawn(|| memory.touch(2));
        let fault = next_fault(&fd);
        assert_eq!(fault.address, memory.range(2, 1).start);
        assert!(!fault.write && !fault.minor);
        fd.copy_pages(fault.address, &[0x5a; PAGE], Wake::Wake)
            .unwrap();
        assert_eq!(toucher.join().unwrap(), 0x5a);
    });
    assert_eq!(fd.read_events(&mut EventBuffer::new(1)).unwrap().len(), 0);
}

#[test]
fn installing_without_waking_wakes_no_thread() {
    let Some((fd, memory)) = registered(Features::NONE, 1) else {
        return;
    };
    thread::scope(|scope| {
        let (send, begun) = mpsc::channel();
        let touched = &memory;
        let toucher = scope.spawn(move || {
            send.send(Task::this()).unwrap();
            touched.touch(0)
        });
        let fault = next_fault(&fd);
        let task = begun.recv().unwrap();
        let sleeps = task.asleep("the toucher");
        fd.zero_pages(memory.range(0, 1), Wake::DontWake).unwrap();
        // A thread that is woken can run from then on.
        assert!(task.has_slept_since(sleeps));
        fd.wake(memory.range(0, 1)).unwrap();
        assert_eq!(toucher.join().unwrap(), 0);
        assert_eq!(fault.address, memory.range(0, 1).start);
    });
}

#[test]
fn installing_over_a_mapped_page_reports_it() {
    let Some((fd, memory)) = registered(Features::NONE, 4) else {
        return;
    };
    let content = [1; 4 * PAGE];
    fd.copy_pages(memory.range(2, 1).start, &content[..PAGE], Wake::DontWake)
        .unwrap();
    // The kernel installs the pages before it and returns EAGAIN; the call for the rest returns EEXIST.
    assert_eq!(
        fd.copy_pages(memory.range(0, 1).start, &content, Wake::DontWake),
        Err(InstallError::Again {
            installed_bytes: 2 * PAGE as u64
        })
    );
    assert_eq!(
        fd.zero_pages(memory.range(2, 2), Wake::DontWake),
        Err(InstallError::Exists { installed_bytes: 0 })
    );
    assert_eq!(memory.touch(1), 1);
}

#[test]
fn installing_outside_a_registration_changes_nothing() {
    let Some(fd) = userfaultfd(Features::NONE) else {
        return;
    };
    let memory = Memory::new(2);
    let result = fd.copy_pages(memory.range(0, 1).start, &[1; PAGE], Wake::DontWake);
    assert_eq!(result, Err(InstallError::NoMapping));
    let result = fd.continue_pages(memory.range(0, 1), Wake::DontWake);
    assert!(result.is_err());
    assert_eq!(memory.touch(0), 0);
}

#[test]
fn registering_unsuitable_memory_is_refused() {
    let Some(fd) = userfaultfd(Features::NONE) else {
        return;
    };
    let memory = Memory::new(2);
    let range = memory.range(0, 2);
    // SAFETY: as in Memory::register.
    let result = unsafe { fd.register(range, Mode::Minor) };
    assert_eq!(
        result,
        Err(RegisterError::NotServable {
            range,
            mode: Mode::Minor
        })
    );
    let unaligned = UserRange {
        start: range.start + 1,
        bytes: PAGE as u64,
    };
    // SAFETY: as above.
    let result = unsafe { fd.register(unaligned, Mode::Missing) };
    assert_eq!(
        result,
        Err(RegisterError::NotServable {
            range: unaligned,
            mode: Mode::Missing
        })
    );

    memory.register(&fd);
    let Some(other) = userfaultfd(Features::NONE) else {
        return;
    };
    // SAFETY: as above.
    let result = unsafe { other.register(range, Mode::Missing) };
    assert_eq!(result, Err(RegisterError::Busy { range }));
    fd.unregister(range).unwrap();
    // SAFETY: as above.
    unsafe { other.register(range, Mode::Missing) }.unwrap();
}

#[test]
fn the_error_names_features_that_no_kernel_has() {
    if userfaultfd(Features::NONE).is_none() {
        return;
    }
    let unknown = Features::from_bits(1 << 60);
    match Userfaultfd::open(unknown) {
        Err(OpenError::MissingFeatures { missing }) => assert_eq!(missing, unknown),
        other => panic!("{other:?}"),
    }
}

#[test]
fn poison_is_installed_where_the_kernel_supports_it() {
    let Some((fd, memory)) = registered(Features::POISON, 2) else {
        return;
    };
    fd.poison_pages(memory.range(0, 1), Wake::DontWake).unwrap();
    assert_eq!(
        fd.poison_pages(memory.range(0, 1), Wake::DontWake),
        Err(InstallError::Exists { installed_bytes: 0 })
    );
    // To the kernel a poisoned page is an absent page with a marker: new content replaces the marker.
    fd.copy_pages(memory.range(0, 1).start, &[1; PAGE], Wake::DontWake)
        .unwrap();
    assert_eq!(memory.touch(0), 1);
}

/// Kind: a question costs what is asked of. A process may have mapped and registered the addresses that are asked about, and any
/// number of pages behind them.
#[test]
fn a_question_changes_no_page() {
    let Some(fd) = userfaultfd(Features::POISON) else {
        return;
    };
    const LOW: usize = 1 << 20;
    let pages = 1024;
    let at = ptr::with_exposed_provenance_mut(LOW);
    let access = ProtFlags::READ | ProtFlags::WRITE;
    let flags = MapFlags::PRIVATE | MapFlags::FIXED_NOREPLACE;
    // SAFETY: a new mapping, which replaces none. It stays for the life of the process.
    if let Err(error) = unsafe { mm::mmap_anonymous(at, pages * PAGE, access, flags) } {
        println!("SKIP: something is mapped at 1 MiB: {error}");
        return;
    }
    let range = |first: usize, count: usize| UserRange {
        start: (LOW + first * PAGE) as u64,
        bytes: (count * PAGE) as u64,
    };
    // SAFETY: as above; no code relies on its zeroes.
    unsafe { fd.register(range(0, pages), Mode::Missing) }.unwrap();
    assert!(fd.can_poison() && !fd.is_gone());
    // Nothing is there yet, neither a page nor a mark.
    for page in 0..pages {
        let marked = fd.poison_pages(range(page, 1), Wake::DontWake);
        assert_eq!(marked, Ok(()), "page {page}");
    }
}

#[test]
fn errors_chain_their_causes() {
    let device = std::io::Error::from(std::io::ErrorKind::PermissionDenied);
    let error = OpenError::NoPermission { device };
    assert_eq!(error.source().unwrap().to_string(), "permission denied");
    let error = InstallError::Io(Errno::NOMEM);
    assert_eq!(
        error.source().unwrap().to_string(),
        Errno::NOMEM.to_string()
    );
}

/// Whether the kernel supports a non-blocking read of it; prints the reason if not.
fn can_read_now(fd: &Userfaultfd) -> bool {
    let mut byte = [0];
    let mut bytes = [IoSliceMut::new(&mut byte)];
    // The buffer is too small for a message, so the kernel reads nothing.
    let read = rustix::io::preadv2(fd, &mut bytes, u64::MAX, ReadWriteFlags::NOWAIT);
    let can = read != Err(Errno::OPNOTSUPP);
    if !can {
        println!("SKIP: this kernel's userfaultfd lacks RWF_NOWAIT (Linux 6.10)");
    }
    can
}

/// The flags belong to the open file, which the previous owner shares.
#[test]
fn an_adopted_userfaultfd_never_blocks_even_if_its_previous_owner_clears_nonblock() {
    let Some(owners) = userfaultfd(Features::EVENT_REMOVE) else {
        return;
    };
    if !can_read_now(&owners) {
        return;
    }
    let handed = owners.as_fd().try_clone_to_owned().unwrap();
    let fd = Userfaultfd::adopt(handed, Features::EVENT_REMOVE).unwrap();
    let flags = rustix::fs::fcntl_getfl(&owners).unwrap();
    assert!(flags.contains(OFlags::NONBLOCK));
    rustix::fs::fcntl_setfl(&owners, flags - OFlags::NONBLOCK).unwrap();

    let (send, receive) = mpsc::channel();
    let reading = thread::spawn(move || {
        assert_eq!(fd.read_events(&mut EventBuffer::new(4)).unwrap().len(), 0);
        // All pending messages are returned.
        let memory = Memory::new(4);
        memory.register(&fd);
        thread::scope(|scope| {
            let toucher = scope.spawn(|| memory.touch(2));
            let fault = next_fault(&fd);
            assert_eq!(fault.address, memory.range(2, 1).start);
            fd.copy_pages(fault.address, &[0x5a; PAGE], Wake::Wake)
                .unwrap();
            assert_eq!(toucher.join().unwrap(), 0x5a);
            let discarding = scope.spawn(|| memory.discard(2));
            let range = memory.range(2, 1);
            let (start, end) = (range.start, range.start + range.bytes);
            assert_eq!(next_event(&fd), Event::Remove { start, end });
            discarding.join().unwrap();
        });
        assert_eq!(fd.read_events(&mut EventBuffer::new(4)).unwrap().len(), 0);
        send.send(()).unwrap();
    });
    match receive.recv_timeout(Duration::from_secs(30)) {
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("a read waits"),
        _ => reading.join().unwrap(),
    }
    let flags = rustix::fs::fcntl_getfl(&owners).unwrap();
    assert!(!flags.contains(OFlags::NONBLOCK));
}

/// It needs no privilege, because it holds up no system call.
#[test]
fn a_userfaultfd_for_user_mode_serves_accesses_and_no_system_calls() {
    let fd = match Userfaultfd::open_for_user_mode(Features::NONE) {
        Ok(fd) => fd,
        Err(error) => {
            println!("SKIP: {error}");
            return;
        }
    };
    let memory = Memory::new(2);
    memory.register(&fd);
    let (_reader, writer) = std::io::pipe().unwrap();
    let missing = memory.start.wrapping_add(PAGE);
    // SAFETY: from_raw_parts requires readable memory that nobody writes to: a page of the mapping, which only the
    // kernel is to read.
    let missing = unsafe { std::slice::from_raw_parts(missing, 1) };
    let written = rustix::io::write(&writer, missing);
    assert_eq!(written, Err(Errno::FAULT));
    thread::scope(|scope| {
        let touched = scope.spawn(|| memory.touch(0));
        let fault = next_fault(&fd);
        let page = memory.range(0, 1);
        assert_eq!(fault.address & !0xfff, page.start);
        fd.copy_pages(page.start, &[9; PAGE], Wake::Wake).unwrap();
        assert_eq!(touched.join().unwrap(), 9);
    });
}
