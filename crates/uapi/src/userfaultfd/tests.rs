use std::error::Error as _;
use std::io::IoSliceMut;
use std::ptr;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use rustix::io::ReadWriteFlags;
use rustix::mm::{self, MapFlags, ProtFlags};

use super::*;

const PAGE: usize = 4096;

/// A userfaultfd, or `None` after saying why there is none on this machine.
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

// SAFETY: an address; what is there is only touched by atomic loads.
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
        // SAFETY: from_ptr requires valid memory: a page of the mapping, which lives as long as
        // self.
        unsafe { AtomicU8::from_ptr(at) }.load(Ordering::Relaxed)
    }

    fn give_up(&self, page: usize) {
        assert!(page < self.pages);
        let at = self.start.wrapping_add(page * PAGE).cast();
        // SAFETY: nobody has a reference into the mapping, and its content is given up on purpose.
        unsafe { mm::madvise(at, PAGE, mm::Advice::LinuxDontNeed) }.unwrap();
    }

    fn register(&self, fd: &Userfaultfd) {
        // SAFETY: register requires that the memory is the caller's and that nobody relies on its
        // zeroes: it is, and the tests do not.
        unsafe { fd.register(self.range(0, self.pages), Mode::Missing) }.unwrap();
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: nobody has a reference into the mapping.
        unsafe { mm::munmap(self.start.cast(), self.pages * PAGE) }.unwrap();
    }
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
fn a_fault_is_told_and_resolved() {
    let Some(fd) = userfaultfd(Features::NONE) else {
        return;
    };
    let memory = Memory::new(4);
    memory.register(&fd);
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
fn without_a_wake_nobody_wakes() {
    let Some(fd) = userfaultfd(Features::NONE) else {
        return;
    };
    let memory = Memory::new(1);
    memory.register(&fd);
    thread::scope(|scope| {
        let toucher = scope.spawn(|| memory.touch(0));
        let fault = next_fault(&fd);
        fd.zero_pages(memory.range(0, 1), Wake::DontWake).unwrap();
        thread::sleep(Duration::from_millis(50));
        assert!(!toucher.is_finished());
        fd.wake(memory.range(0, 1)).unwrap();
        assert_eq!(toucher.join().unwrap(), 0);
        assert_eq!(fault.address, memory.range(0, 1).start);
    });
}

#[test]
fn pages_that_are_there_are_named() {
    let Some(fd) = userfaultfd(Features::NONE) else {
        return;
    };
    let memory = Memory::new(4);
    memory.register(&fd);
    let content = [1; 4 * PAGE];
    fd.copy_pages(memory.range(2, 1).start, &content[..PAGE], Wake::DontWake)
        .unwrap();
    // The kernel installs what comes before, says EAGAIN, and EEXIST to the call for the rest.
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
fn memory_that_is_not_registered_is_left_alone() {
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
fn memory_that_cannot_be_served_is_refused() {
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
fn features_that_no_kernel_has_are_named() {
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
fn poison_is_installed_where_the_kernel_can() {
    let Some(fd) = userfaultfd(Features::POISON) else {
        return;
    };
    let memory = Memory::new(2);
    memory.register(&fd);
    fd.poison_pages(memory.range(0, 1), Wake::DontWake).unwrap();
    assert_eq!(
        fd.poison_pages(memory.range(0, 1), Wake::DontWake),
        Err(InstallError::Exists { installed_bytes: 0 })
    );
    // To the kernel a poisoned page is an absent one with a mark: new content heals it.
    fd.copy_pages(memory.range(0, 1).start, &[1; PAGE], Wake::DontWake)
        .unwrap();
    assert_eq!(memory.touch(0), 1);
}

#[test]
fn causes_are_chained() {
    let device = std::io::Error::from(std::io::ErrorKind::PermissionDenied);
    let error = OpenError::NoPermission { device };
    assert_eq!(error.source().unwrap().to_string(), "permission denied");
    let error = InstallError::Io(Errno::NOMEM);
    assert_eq!(
        error.source().unwrap().to_string(),
        Errno::NOMEM.to_string()
    );
}

/// Whether a read of it can say that it does not wait; says why not.
fn can_read_now(fd: &Userfaultfd) -> bool {
    let mut byte = [0];
    let mut bytes = [IoSliceMut::new(&mut byte)];
    // Too small for a message: nothing is read.
    let read = rustix::io::preadv2(fd, &mut bytes, u64::MAX, ReadWriteFlags::NOWAIT);
    let can = read != Err(Errno::OPNOTSUPP);
    if !can {
        println!("SKIP: this kernel's userfaultfd does not know RWF_NOWAIT (Linux 6.10)");
    }
    can
}

/// The flags belong to the descriptor, which its former owner has as well.
#[test]
fn an_adopted_userfaultfd_is_read_without_waiting_whatever_its_former_owner_does() {
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
        // What there is to tell is told.
        let memory = Memory::new(4);
        memory.register(&fd);
        thread::scope(|scope| {
            let toucher = scope.spawn(|| memory.touch(2));
            let fault = next_fault(&fd);
            assert_eq!(fault.address, memory.range(2, 1).start);
            fd.copy_pages(fault.address, &[0x5a; PAGE], Wake::Wake)
                .unwrap();
            assert_eq!(toucher.join().unwrap(), 0x5a);
            let discarding = scope.spawn(|| memory.give_up(2));
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
