//! The handler of SIGBUS.
//!
//! | the signal says | and the thread is | then |
//! |---|---|---|
//! | `BUS_MCEERR_AR`, guest memory | in a guarded copy | the copy returns an error |
//! | the same | in an ioctl of a vCPU ([`catching`]) | the ioctl's caller is told |
//! | the same | anywhere else | not ours: the instruction could only fail again |
//! | `BUS_ADRERR`, guest memory | in a guarded copy | the copy returns an error: whoever shares the file has truncated it |
//! | `BUS_MCEERR_AO`, guest memory | anywhere | an [`ErrorWatch`](super::ErrorWatch) is told |
//! | another address or another code | anywhere | not ours |
//!
//! What is not ours goes to [`super::previous`]. Everything that runs in the handler is
//! async-signal-safe.

use std::ffi::c_void;
use std::io;
use std::os::fd::{BorrowedFd, IntoRawFd, RawFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering, compiler_fence};

use libc::{c_int, c_short, siginfo_t};
use pagetide_memory::HostAddress;
use pagetide_memory::guard::{Escape, escape_from_copy, is_guest_memory};
use rustix::event::{EventfdFlags, eventfd};

use super::previous;
use super::reports::{Report, Reports};

/// Why there is no handler of SIGBUS.
#[derive(Debug, thiserror::Error)]
#[error("cannot install the handler of SIGBUS, which tells of uncorrected memory errors")]
pub struct SigbusError(#[source] pub io::Error);

/// The part of `siginfo_t` that the kernel fills for SIGBUS.
#[repr(C)]
struct SigbusInfo {
    signo: c_int,
    errno: c_int,
    code: c_int,
    _pad: c_int,
    addr: usize,
    addr_lsb: c_short,
}

const _: () = assert!(size_of::<SigbusInfo>() <= size_of::<siginfo_t>());

/// Errors that nobody has touched, for the watch.
pub(super) static FOUND: Reports<64> = Reports::new();
/// What wakes the watch.
static WAKE: AtomicI32 = AtomicI32::new(-1);

/// What a thread has in [`CALL`] while it is in an ioctl that touches guest memory for it.
pub(super) const INSIDE: usize = 1;

thread_local! {
    /// 0, [`INSIDE`], or what the handler has reported there. Without a destructor, so that using
    /// it in a signal handler is no more than a memory access.
    static CALL: AtomicUsize = const { AtomicUsize::new(0) };
}

/// Makes an ioctl in which KVM touches guest memory on behalf of this thread; and what has an
/// uncorrected error, if it met one (the ioctl then fails with EINTR).
#[inline]
pub(crate) fn catching<T>(call: impl FnOnce() -> T) -> (T, Option<Report>) {
    CALL.with(|word| word.store(INSIDE, Ordering::Relaxed));
    compiler_fence(Ordering::SeqCst);
    let result = call();
    compiler_fence(Ordering::SeqCst);
    let reported = CALL.with(|word| word.swap(0, Ordering::Relaxed));
    let reported = (reported > INSIDE).then(|| Report::unpack(reported));
    (result, reported)
}

/// Installs the handler of SIGBUS, once a process; what was there before runs when a signal is none
/// of ours. [`Signals::install_sigbus`](crate::Signals::install_sigbus) does the same for a VM.
///
/// Without a VM it is worth a call: accesses by the methods of
/// [`Region`](pagetide_memory::Region) then fail where they would have ended the process.
///
/// # Errors
/// The system's answer.
pub fn install_sigbus_handler() -> Result<(), SigbusError> {
    static INSTALLED: OnceLock<Result<(), i32>> = OnceLock::new();
    let installed = INSTALLED.get_or_init(|| {
        let errno = |error: &io::Error| error.raw_os_error().unwrap_or(libc::EIO);
        previous::replace(on_sigbus).map_err(|error| errno(&error))
    });
    installed.map_err(|errno| SigbusError(io::Error::from_raw_os_error(errno)))
}

/// What becomes readable when there is something in [`FOUND`]. To be called once a process.
pub(super) fn open_wake_descriptor() -> io::Result<BorrowedFd<'static>> {
    let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
    let wake = eventfd(0, flags)?.into_raw_fd();
    // Never closed: a handler may be about to write to it at any time.
    WAKE.store(wake, Ordering::Release);
    // SAFETY: the descriptor was opened above and is never closed.
    Ok(unsafe { BorrowedFd::borrow_raw(wake) })
}

extern "C" fn on_sigbus(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the location of this thread's errno.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: valid for this thread's life.
    let before = unsafe { errno.read() };
    // SAFETY: this is a handler of SIGBUS with SA_SIGINFO, and these are its arguments.
    if !unsafe { handle_sigbus(info, context) } {
        // SAFETY: as above.
        let SigbusInfo { code, .. } = unsafe { info.cast::<SigbusInfo>().read() };
        // SAFETY: as above.
        unsafe { previous::run(signal, code, info, context) };
    }
    // SAFETY: as for reading it.
    unsafe { errno.write(before) };
}

/// For a program's own handler of SIGBUS: does what this crate's would do with a signal that tells of
/// an error in a guest's memory, and returns true; the handler is then to return. Any other signal is
/// left to the handler. Async-signal-safe, but for errno, which it may change.
///
/// A VM is told that there is such a handler by [`Signals::use_sigbus`](crate::Signals::use_sigbus).
///
/// # Safety
///
/// To be called by a handler of SIGBUS that was installed with SA_SIGINFO, with its own arguments.
pub unsafe fn handle_sigbus(info: *mut siginfo_t, context: *mut c_void) -> bool {
    // SAFETY: `info` is valid, as the caller says, and of SIGBUS; the fields are plain numbers.
    let SigbusInfo {
        code,
        addr,
        addr_lsb,
        ..
    } = unsafe { info.cast::<SigbusInfo>().read() };
    // SAFETY: `context` is a running handler's, as the caller says.
    unsafe { handle(code, HostAddress(addr), addr_lsb, context) }
}

/// Whether the signal was ours.
///
/// # Safety
///
/// `context` is the third argument of a signal handler that is running.
unsafe fn handle(code: c_int, at: HostAddress, lsb: c_short, context: *mut c_void) -> bool {
    let (required, is_error) = match code {
        libc::BUS_MCEERR_AR => (true, true),
        libc::BUS_MCEERR_AO => (false, true),
        libc::BUS_ADRERR => (true, false),
        _ => return false,
    };
    if !is_guest_memory(at) {
        return false;
    }
    let lsb = u32::try_from(lsb).unwrap_or(0);
    let report = Report::pack(at, lsb);
    if !required {
        // Without room it is forgotten: whoever touches the memory will be told.
        FOUND.put(report);
        wake(WAKE.load(Ordering::Acquire));
        return true;
    }
    // SAFETY: as this function's caller says.
    let machine = unsafe { Machine::of(context) };
    if let Some(escape) = escape_from_copy(machine.instruction()) {
        machine.escape(escape, at, lsb);
        return true;
    }
    if !is_error {
        return false;
    }
    CALL.with(|word| {
        let is_inside = word.load(Ordering::Relaxed) != 0;
        if is_inside {
            word.store(report, Ordering::Relaxed);
        }
        is_inside
    })
}

fn wake(descriptor: RawFd) {
    let one = 1u64.to_ne_bytes();
    // SAFETY: write reads the 8 bytes. It fails if nobody watches yet, or it has been woken
    // often enough.
    unsafe { libc::write(descriptor, one.as_ptr().cast(), one.len()) };
}

/// The registers that the interrupted thread goes on with.
struct Machine<'a>(&'a mut libc::ucontext_t);

impl Machine<'_> {
    /// # Safety
    ///
    /// `context` is the third argument of a signal handler that is running.
    unsafe fn of(context: *mut c_void) -> Self {
        // SAFETY: the kernel has put a ucontext_t there, which is the handler's to change.
        Self(unsafe { &mut *context.cast() })
    }
}

#[cfg(target_arch = "x86_64")]
impl Machine<'_> {
    const RAX: usize = libc::REG_RAX.unsigned_abs() as usize;
    const RDX: usize = libc::REG_RDX.unsigned_abs() as usize;
    const RIP: usize = libc::REG_RIP.unsigned_abs() as usize;

    fn instruction(&self) -> usize {
        to_usize(self.0.uc_mcontext.gregs[Self::RIP].cast_unsigned())
    }

    fn escape(self, escape: Escape, at: HostAddress, lsb: u32) {
        let registers = &mut self.0.uc_mcontext.gregs;
        registers[Self::RAX] = at.as_u64().cast_signed();
        registers[Self::RDX] = i64::from(lsb);
        registers[Self::RIP] = HostAddress(escape.instruction).as_u64().cast_signed();
    }
}

#[cfg(target_arch = "aarch64")]
impl Machine<'_> {
    fn instruction(&self) -> usize {
        to_usize(self.0.uc_mcontext.pc)
    }

    fn escape(self, escape: Escape, at: HostAddress, lsb: u32) {
        let machine = &mut self.0.uc_mcontext;
        machine.regs[0] = at.as_u64();
        machine.regs[1] = u64::from(lsb);
        machine.pc = HostAddress(escape.instruction).as_u64();
    }
}

/// Both are 64 bits on every host of this project.
#[allow(clippy::cast_possible_truncation, reason = "as said")]
const fn to_usize(value: u64) -> usize {
    value as usize
}
