//! The SIGBUS handler.
//!
//! | signal | thread | effect |
//! |---|---|---|
//! | `BUS_MCEERR_AR`, guest memory | in a guarded copy | the copy returns an error |
//! | the same | in an ioctl of a vCPU ([`catching`]) | the ioctl's caller receives a report |
//! | the same | anywhere else | not handled: the instruction would fail again |
//! | `BUS_ADRERR`, guest memory | in a guarded copy | the copy returns an error: another owner has truncated the file |
//! | `BUS_MCEERR_AO`, guest memory | anywhere | an [`ErrorWatch`](super::ErrorWatch) receives a report |
//! | another address or another code | anywhere | not handled |
//!
//! Signals that are not handled here go to [`super::previous`]. All code that runs in the handler is
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

/// Why the SIGBUS handler could not be installed.
#[derive(Debug, thiserror::Error)]
#[error("cannot install the SIGBUS handler, which reports uncorrected memory errors")]
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

/// Errors in memory that was not accessed, for the watch.
pub(super) static FOUND: Reports<64> = Reports::new();
/// The descriptor that wakes the watch.
static WAKE: AtomicI32 = AtomicI32::new(-1);

/// The value of [`CALL`] while the thread is in an ioctl that accesses guest memory on its behalf.
pub(super) const INSIDE: usize = 1;

thread_local! {
    /// 0, [`INSIDE`], or the handler's report. Without a destructor, so that an access in a signal
    /// handler is a plain memory access.
    static CALL: AtomicUsize = const { AtomicUsize::new(0) };
}

/// Makes an ioctl in which KVM accesses guest memory on behalf of this thread. Also returns the report
/// of an uncorrected error, if the ioctl met one (it then fails with EINTR).
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

/// Installs this crate's SIGBUS handler, once per process; the previous handler runs for signals that
/// this one does not handle. [`Signals::install_sigbus`](crate::Signals::install_sigbus) does the same
/// for a VM.
///
/// It is useful without a VM too: accesses by the methods of [`Region`](pagetide_memory::Region) then
/// fail where they would end the process.
///
/// # Errors
/// The operating system's error.
pub fn install_sigbus_handler() -> Result<(), SigbusError> {
    static INSTALLED: OnceLock<Result<(), i32>> = OnceLock::new();
    let installed = INSTALLED.get_or_init(|| {
        let errno = |error: &io::Error| error.raw_os_error().unwrap_or(libc::EIO);
        previous::replace(on_sigbus).map_err(|error| errno(&error))
    });
    installed.map_err(|errno| SigbusError(io::Error::from_raw_os_error(errno)))
}

/// Opens the descriptor that becomes readable when [`FOUND`] has a report. Call this once per process.
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
    // SAFETY: this is a SIGBUS handler with SA_SIGINFO, and these are its arguments.
    if !unsafe { handle_sigbus(info, context) } {
        // SAFETY: as above.
        let SigbusInfo { code, .. } = unsafe { info.cast::<SigbusInfo>().read() };
        // SAFETY: as above.
        unsafe { previous::run(signal, code, info, context) };
    }
    // SAFETY: as for reading it.
    unsafe { errno.write(before) };
}

/// For a program's own SIGBUS handler: handles a signal that reports an error in guest memory as this
/// crate's handler would, and returns true; the program's handler then returns. Returns false for any
/// other signal. Async-signal-safe, except that it may change errno.
///
/// [`Signals::use_sigbus`](crate::Signals::use_sigbus) declares such a handler for a VM.
///
/// # Safety
///
/// Only for use by a SIGBUS handler that was installed with SA_SIGINFO, with its own arguments.
pub unsafe fn handle_sigbus(info: *mut siginfo_t, context: *mut c_void) -> bool {
    // SAFETY: `info` is valid and of SIGBUS by this function's requirement; the fields are integers.
    let SigbusInfo {
        code,
        addr,
        addr_lsb,
        ..
    } = unsafe { info.cast::<SigbusInfo>().read() };
    // SAFETY: `context` is that of a running handler by this function's requirement.
    unsafe { handle(code, HostAddress(addr), addr_lsb, context) }
}

/// Whether the signal was handled.
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
        // Without room the report is dropped: a later access to the memory reports the error.
        FOUND.put(report);
        wake(WAKE.load(Ordering::Acquire));
        return true;
    }
    // SAFETY: by this function's requirement.
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
    // SAFETY: write reads the 8 bytes. It fails if there is no watch yet, or if its counter is at the
    // maximum.
    unsafe { libc::write(descriptor, one.as_ptr().cast(), one.len()) };
}

/// The registers with which the interrupted thread continues.
struct Machine<'a>(&'a mut libc::ucontext_t);

impl Machine<'_> {
    /// # Safety
    ///
    /// `context` is the third argument of a signal handler that is running.
    unsafe fn of(context: *mut c_void) -> Self {
        // SAFETY: the kernel has put a ucontext_t there, which the handler may change.
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

/// Both are 64 bits wide on every supported host.
#[allow(clippy::cast_possible_truncation, reason = "both are 64 bits wide")]
const fn to_usize(value: u64) -> usize {
    value as usize
}
