//! The SIGBUS handler and the previous one: which signals this crate handles, and that all others have
//! the effect that they would have without it. Each case is a separate process, because some cases end
//! it.

#![allow(clippy::panic, reason = "a failed helper fails its test")]

mod fake_sigbus;

use std::ffi::c_void;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus, Stdio};
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use fake_sigbus::send_sigbus;
use libc::{c_int, siginfo_t};
use pagetide_kvm::poison::{ErrorWatch, MemoryError, install_sigbus_handler};
use pagetide_kvm::{Kvm, SlotFlags, Vm};
use pagetide_memory::{Backing, GuestAddress, Region};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous};

const CASE: &str = "PAGETIDE_TEST_SIGBUS";

/// The previous handler's exit status.
const PLAIN: i32 = 41;
const WITH_INFO: i32 = 42;
/// The process continued.
const WENT_ON: i32 = 43;
/// The case is impossible on this machine.
const SKIPPED: i32 = 44;
/// The process continued after calls of the previous handler; plus their number.
const COUNTED: i32 = 50;

/// The action for SIGBUS before this crate's handler.
#[derive(Clone, Copy, Debug)]
enum Before {
    Default,
    Ignore,
    Plain,
    WithInfo,
    Once,
    /// Counts its calls and returns.
    Counting,
    /// Rust's own handler, which detects stack overflows: for any other signal, it restores SIG_DFL.
    Std,
}

/// The action of the process.
#[derive(Clone, Copy, Debug)]
enum Act {
    /// Sends itself the signal.
    Send,
    /// Accesses a mapping beyond the end of its file.
    TouchHole,
    /// Simulates a report of an error, accessed or not, outside guest memory.
    ErrorElsewhere { touched: bool },
    /// Simulates a report of an error in guest memory that this thread accessed outside of any copy.
    ErrorInGuest,
    /// Simulates a report of an error in guest memory that was not accessed.
    FoundInGuest,
    /// Another error code at a guest's address.
    OtherCode,
    /// An error that was not accessed, first outside guest memory and then inside.
    FoundElsewhereThenInGuest,
    /// Watches for errors; then performs these actions.
    Watching(&'static [Then]),
}

/// Events in a process that watches, or has watched.
#[derive(Clone, Copy, Debug)]
enum Then {
    /// The watch is dropped.
    Unwatch,
    /// Another one is started.
    WatchAgain,
    /// The kernel reports an error outside guest memory that was not accessed.
    Found,
    /// The same in guest memory: the watch must report it.
    FoundInGuest,
    /// The process accesses one of its own pages that has an error.
    TouchPoison,
    /// It accesses a mapping beyond the end of its file.
    TouchHole,
    /// It sends itself the signal.
    Send,
}

#[derive(Debug, PartialEq)]
enum End {
    Code(i32),
    Sigbus,
}

use Act::{
    ErrorElsewhere, ErrorInGuest, FoundElsewhereThenInGuest, FoundInGuest, OtherCode, Send,
    TouchHole, Watching,
};
use Before::{Counting, Default, Ignore, Once, Plain, Std, WithInfo};

const TOUCHED: Act = ErrorElsewhere { touched: true };
const FOUND: Act = ErrorElsewhere { touched: false };

/// Previous action, event, expected end.
const CASES: [(Before, Act, End); 42] = [
    (Default, Send, End::Sigbus),
    (Default, TouchHole, End::Sigbus),
    (Default, FOUND, End::Sigbus),
    (Ignore, Send, End::Code(WENT_ON)),
    (Ignore, TouchHole, End::Sigbus),
    (Ignore, FOUND, End::Code(WENT_ON)),
    (Plain, Send, End::Code(PLAIN)),
    (Plain, TouchHole, End::Code(PLAIN)),
    (Plain, TOUCHED, End::Code(PLAIN)),
    (Plain, FOUND, End::Code(PLAIN)),
    (WithInfo, Send, End::Code(WITH_INFO)),
    (WithInfo, TouchHole, End::Code(WITH_INFO)),
    (WithInfo, TOUCHED, End::Code(WITH_INFO)),
    (WithInfo, FOUND, End::Code(WITH_INFO)),
    (Once, Send, End::Sigbus),
    (Once, FOUND, End::Sigbus),
    (WithInfo, ErrorInGuest, End::Code(WITH_INFO)),
    (WithInfo, OtherCode, End::Code(WITH_INFO)),
    (Default, FoundInGuest, End::Code(WENT_ON)),
    (Ignore, FoundInGuest, End::Code(WENT_ON)),
    (WithInfo, FoundInGuest, End::Code(WENT_ON)),
    (Plain, OtherCode, End::Code(PLAIN)),
    (Std, FoundElsewhereThenInGuest, End::Code(WENT_ON)),
    (Std, TouchHole, End::Sigbus),
    (Once, FoundElsewhereThenInGuest, End::Code(WENT_ON)),
    // A watch requests early reports, and the process survives them.
    (Default, Watching(&[Then::Found; 3]), End::Code(WENT_ON)),
    (Std, Watching(&[Then::Found; 3]), End::Code(WENT_ON)),
    (Ignore, Watching(&[Then::Found; 3]), End::Code(WENT_ON)),
    (Once, Watching(&[Then::Found; 3]), End::Code(WENT_ON)),
    (
        Counting,
        Watching(&[Then::Found; 3]),
        End::Code(COUNTED + 3),
    ),
    (WithInfo, Watching(&[Then::Found]), End::Code(WITH_INFO)),
    (Plain, Watching(&[Then::Found]), End::Code(PLAIN)),
    (Default, Watching(AGAIN), End::Code(WENT_ON)),
    (Std, Watching(AGAIN), End::Code(WENT_ON)),
    (Counting, Watching(AGAIN), End::Code(COUNTED + 3)),
    // Everything else ends as it would without this crate.
    (Default, Watching(&[Then::TouchPoison]), End::Sigbus),
    (Std, Watching(&[Then::TouchPoison]), End::Sigbus),
    (Ignore, Watching(&[Then::TouchPoison]), End::Sigbus),
    (
        Std,
        Watching(&[Then::Found, Then::Found, Then::TouchPoison]),
        End::Sigbus,
    ),
    (Std, Watching(&[Then::Found, Then::TouchHole]), End::Sigbus),
    (Default, Watching(&[Then::Found, Then::Send]), End::Sigbus),
    (Std, Watching(&[Then::Send, Then::Send]), End::Sigbus),
];

/// Errors outside and inside guest memory with a watch, without one, and with another one.
const AGAIN: &[Then] = &[
    Then::Found,
    Then::FoundInGuest,
    Then::Unwatch,
    Then::Found,
    Then::WatchAgain,
    Then::Found,
    Then::FoundInGuest,
];

#[test]
fn other_signals_go_to_the_previous_handler() {
    let mut wrong = Vec::new();
    for (index, (before, act, end)) in CASES.iter().enumerate() {
        let status = Command::new(std::env::current_exe().expect("a program"))
            .args(["--exact", "a_case", "--nocapture"])
            .env(CASE, index.to_string())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .expect("a process");
        if status.code() == Some(SKIPPED) {
            println!(
                "SKIP: case {index} needs KVM, and to poison memory, which is done in the lab's VMs only"
            );
            continue;
        }
        if end_of(status) != *end {
            wrong.push(format!("{before:?}, {act:?}: {status}, not {end:?}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

fn end_of(status: ExitStatus) -> End {
    match (status.code(), status.signal()) {
        (Some(code), _) => End::Code(code),
        (_, Some(libc::SIGBUS)) => End::Sigbus,
        _ => panic!("{status}"),
    }
}

/// The address in the simulated report.
static EXPECTED: AtomicUsize = AtomicUsize::new(0);

extern "C" fn plain(_: c_int) {
    // SAFETY: _exit may be called in a handler.
    unsafe { libc::_exit(PLAIN) };
}

extern "C" fn with_info(_: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: from the kernel, directly or through this crate's handler.
    let info = unsafe { &*info };
    // SAFETY: it is of SIGBUS, which has an address (or, if a process sent it, other data in its
    // place).
    let at = unsafe { info.si_addr() }.addr();
    let expected = EXPECTED.load(Ordering::Relaxed);
    let is_right = !context.is_null() && (expected == 0 || at == expected);
    // SAFETY: as above.
    unsafe { libc::_exit(if is_right { WITH_INFO } else { 1 }) };
}

extern "C" fn once(_: c_int) {}

/// The number of calls of the previous handler.
static CALLS: AtomicI32 = AtomicI32::new(0);

extern "C" fn count(_: c_int) {
    CALLS.fetch_add(1, Ordering::Relaxed);
}

fn handle_by(before: Before) {
    // SAFETY: plain data.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    (action.sa_sigaction, action.sa_flags) = match before {
        Default => (libc::SIG_DFL, 0),
        Ignore => (libc::SIG_IGN, 0),
        Plain => (plain as *const () as usize, 0),
        WithInfo => (with_info as *const () as usize, libc::SA_SIGINFO),
        Once => (once as *const () as usize, libc::SA_RESETHAND),
        Counting => (count as *const () as usize, 0),
        Std => return,
    };
    // SAFETY: the handlers above make only calls that a handler may make.
    let status = unsafe { libc::sigaction(libc::SIGBUS, &raw const action, null_mut()) };
    assert_eq!(status, 0);
}

/// Sends this thread a SIGBUS, whose address the previous handler checks.
fn send(code: c_int, at: usize, lsb: i16) {
    EXPECTED.store(at, Ordering::Relaxed);
    assert!(send_sigbus(code, at, lsb));
}

/// A mapped page beyond the end of its file.
fn hole() -> *mut u8 {
    let file = memfd_create("hole", MemfdFlags::CLOEXEC).expect("a file");
    ftruncate(&file, 4096).expect("a page");
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping, at an address that the kernel chooses.
    let at = unsafe { mmap(null_mut(), 4096, access, MapFlags::SHARED, &file, 0) };
    ftruncate(&file, 0).expect("none");
    at.expect("a mapping").cast()
}

/// One of [`CASES`]; as a test it does nothing.
#[test]
fn a_case() {
    let Ok(index) = std::env::var(CASE) else {
        return;
    };
    let (before, act, _) = &CASES[index.parse::<usize>().expect("a number")];
    // A process that dies as expected leaves no core dump.
    let none = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: the structure is read only.
    unsafe { libc::setrlimit(libc::RLIMIT_CORE, &raw const none) };
    handle_by(*before);
    install_sigbus_handler().expect("a handler");
    install_sigbus_handler().expect("once is enough");
    let region = Region::new(GuestAddress(0), 0x4000, Backing::Shmem).expect("4 pages");
    let guest = region.guest().start().0 + 0x1000;
    match act {
        // SAFETY: a number.
        Send => assert_eq!(unsafe { libc::raise(libc::SIGBUS) }, 0),
        TouchHole => {
            let hole = hole();
            EXPECTED.store(hole.addr(), Ordering::Relaxed);
            // SAFETY: mapped; the access's effect is the test.
            unsafe { hole.read_volatile() };
        }
        ErrorElsewhere { touched: true } => send(libc::BUS_MCEERR_AR, 0x1000, 12),
        ErrorElsewhere { touched: false } => send(libc::BUS_MCEERR_AO, 0x1000, 12),
        ErrorInGuest => send(libc::BUS_MCEERR_AR, guest, 12),
        FoundInGuest => send(libc::BUS_MCEERR_AO, guest, 12),
        OtherCode => send(libc::BUS_ADRERR, guest, 0),
        FoundElsewhereThenInGuest => {
            send(libc::BUS_MCEERR_AO, 0x1000, 12);
            send(libc::BUS_MCEERR_AO, guest, 12);
        }
        Watching(things) => watching(things, Arc::new(region)),
    }
    if matches!((before, act), (Once, Send | ErrorElsewhere { .. })) {
        // The second time it behaves as if there were no handler.
        // SAFETY: a number.
        assert_eq!(unsafe { libc::raise(libc::SIGBUS) }, 0);
    }
    let code = match before {
        Counting => COUNTED + CALLS.load(Ordering::Relaxed),
        _ => WENT_ON,
    };
    leave(code);
}

/// Ends the process without returning to the test harness.
fn leave(code: i32) -> ! {
    // SAFETY: a number.
    unsafe { libc::_exit(code) }
}

fn watching(things: &[Then], region: Arc<Region>) {
    let Ok(vm) = Kvm::open()
        .map_err(drop)
        .and_then(|kvm| kvm.create_vm_with_signals().map_err(drop))
    else {
        leave(SKIPPED);
    };
    let guest = region.guest().start().0 + 0x1000;
    vm.add_region(0, region, SlotFlags::default())
        .expect("free");
    let mut watch = Some(watch(&vm));
    for thing in things {
        match thing {
            Then::Unwatch => drop(watch.take()),
            Then::WatchAgain => watch = Some(self::watch(&vm)),
            Then::Found => send(libc::BUS_MCEERR_AO, 0x1000, 12),
            Then::FoundInGuest => {
                send(libc::BUS_MCEERR_AO, guest, 12);
                let (_, errors) = watch.as_ref().expect("a watch");
                let error = errors.recv_timeout(LIMIT).expect("a report");
                assert_eq!(error.gpa, GuestAddress(0x1000));
            }
            Then::TouchPoison => {
                let page = poison();
                // SAFETY: mapped; the access's effect is the test.
                unsafe { page.read_volatile() };
            }
            Then::TouchHole => {
                // SAFETY: as above.
                unsafe { hole().read_volatile() };
            }
            // SAFETY: a number.
            Then::Send => assert_eq!(unsafe { libc::raise(libc::SIGBUS) }, 0),
        }
    }
}

const LIMIT: Duration = Duration::from_secs(60);

fn watch(vm: &Vm) -> (ErrorWatch, mpsc::Receiver<MemoryError>) {
    let (sender, receiver) = mpsc::channel();
    let tell = move |error| {
        let _ = sender.send(error);
    };
    (ErrorWatch::start(vm, tell).expect("a watch"), receiver)
}

/// A page of this process with an error, which the kernel reports immediately. On a physical machine it
/// would cost a page until the next reboot, so only the lab's VMs qualify.
fn poison() -> *mut u8 {
    if std::env::var_os("PAGETIDE_TIMING").is_none() {
        leave(SKIPPED);
    }
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping, at an address that the kernel chooses.
    let page = unsafe { mmap_anonymous(null_mut(), 4096, access, MapFlags::PRIVATE) };
    let page = page.expect("a page").cast::<u8>();
    // SAFETY: mapped just now, for writing.
    unsafe { page.write_volatile(1) };
    // SAFETY: the page belongs to this function.
    if unsafe { madvise(page.cast(), 4096, Advice::LinuxHwPoison) }.is_err() {
        leave(SKIPPED);
    }
    page
}
