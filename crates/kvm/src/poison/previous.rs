//! What was there before our handler of SIGBUS, and runs when a signal is none of ours.
//!
//! Everything here is async-signal-safe: sigaction is.

use std::ffi::c_void;
use std::io;
use std::mem::{MaybeUninit, transmute};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};

use libc::{SIGBUS, c_int, sigaction, siginfo_t};

pub(super) type Handler = extern "C" fn(c_int, *mut siginfo_t, *mut c_void);

/// SIG_DFL, SIG_IGN, or a function's address.
static ACTION: AtomicUsize = AtomicUsize::new(libc::SIG_DFL);
static FLAGS: AtomicI32 = AtomicI32::new(0);
/// Our own handler's address; 0 before there is one.
static OURS: AtomicUsize = AtomicUsize::new(0);

/// An [`ErrorWatch`](super::ErrorWatch) has had the kernel tell this process of errors that nobody has
/// touched.
static WATCHING: AtomicBool = AtomicBool::new(false);

/// From now on, errors that nobody has touched do not end the process: without a watch the kernel
/// would not have told of them. What was there before is still called, each time.
///
/// It stays so when the watch ends, as does the thread that is told.
pub(super) fn survive_what_is_found() {
    WATCHING.store(true, Ordering::Release);
}

/// Puts `handler` in the place of whatever handles SIGBUS now.
pub(super) fn replace(handler: Handler) -> io::Result<()> {
    // Asked for first, so that a signal that comes as soon as the handler is there finds it.
    let before = exchange(None)?;
    remember(&before);
    OURS.store(handler as *const () as usize, Ordering::Release);
    put_ours(&before)
}

fn put_ours(before: &sigaction) -> io::Result<()> {
    remember(&install_ours(before)?);
    Ok(())
}

/// Installs our handler; what was there instead.
fn install_ours(before: &sigaction) -> io::Result<sigaction> {
    // SAFETY: a sigaction is plain data, for which zeroes are valid.
    let mut ours: sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
    ours.sa_sigaction = OURS.load(Ordering::Acquire);
    // On the alternate stack, since what runs afterwards may be Rust's own handler of stack
    // overflows; no system call of another thread is to fail because of it.
    ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
    ours.sa_mask = before.sa_mask;
    exchange(Some(&ours))
}

/// A previous handler may have put another one in our place, as Rust's own does, which goes back to
/// SIG_DFL when a signal is no stack overflow. Whatever it put there is what comes before us now; the
/// guest's errors still have to come here. With `keep`, a handler that only went back to SIG_DFL is
/// still what comes before us.
fn stay(keep: bool) {
    if let Ok(now) = exchange(None)
        && now.sa_sigaction != OURS.load(Ordering::Acquire)
    {
        // Where it fails, the next signal finds what the other handler wanted.
        let _ = if keep && now.sa_sigaction == libc::SIG_DFL {
            install_ours(&now).map(drop)
        } else {
            put_ours(&now)
        };
    }
}

fn remember(before: &sigaction) {
    FLAGS.store(before.sa_flags, Ordering::Relaxed);
    ACTION.store(before.sa_sigaction, Ordering::Release);
}

fn exchange(new: Option<&sigaction>) -> io::Result<sigaction> {
    let new = new.map_or(ptr::null(), ptr::from_ref);
    let mut old = MaybeUninit::<sigaction>::zeroed();
    // SAFETY: sigaction reads a structure or nothing through the first pointer and writes one
    // through the second. The handler that it may install is `replace`'s, whose caller vouches for
    // it, or SIG_DFL.
    if unsafe { sigaction(SIGBUS, new, old.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: zeroed, for which plain data is valid, and then written to by the kernel.
    Ok(unsafe { old.assume_init() })
}

/// Does what would have been done without our handler.
///
/// # Safety
///
/// To be called by a handler of SIGBUS, with its own arguments; `code` is `info.si_code`.
pub(super) unsafe fn run(signal: c_int, code: c_int, info: *mut siginfo_t, context: *mut c_void) {
    let action = ACTION.load(Ordering::Acquire);
    let flags = FLAGS.load(Ordering::Relaxed);
    // A signal that somebody sent, or an error that nobody has touched, is over when the handler
    // returns. Anything else comes back, because the instruction is repeated.
    let is_found = code == libc::BUS_MCEERR_AO;
    let is_over = code <= 0 || is_found;
    let is_expected = is_found && WATCHING.load(Ordering::Acquire);
    match action {
        libc::SIG_DFL if is_expected => {}
        // The kernel does not let anybody ignore what an instruction has done either.
        libc::SIG_IGN if is_over => {}
        libc::SIG_DFL | libc::SIG_IGN => die(is_over),
        function => {
            if flags & libc::SA_RESETHAND != 0 {
                ACTION.store(libc::SIG_DFL, Ordering::Release);
            }
            if flags & libc::SA_SIGINFO != 0 {
                // SAFETY: the kernel was told that this is a function of this type.
                let function = unsafe { transmute::<usize, Handler>(function) };
                function(signal, info, context);
            } else {
                // SAFETY: as above.
                let function = unsafe { transmute::<usize, extern "C" fn(c_int)>(function) };
                function(signal);
            }
            // What is not over is to end the process, if that is what was put there.
            if is_over {
                stay(is_expected);
            }
        }
    }
}

/// Has the process end by SIGBUS, as it would have: by the instruction that is repeated when the
/// handler returns, or else by the same signal once more.
fn die(send_again: bool) {
    // SAFETY: a sigaction is plain data, for which zeroes are valid: SIG_DFL, no flags.
    let default: sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
    let _ = exchange(Some(&default));
    if send_again {
        // SAFETY: raise takes a number. The signal is blocked until the handler returns.
        unsafe { libc::raise(SIGBUS) };
    }
}
