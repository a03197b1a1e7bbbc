//! The SIGBUS handler that was installed before this crate's. It runs for signals that this crate does
//! not handle.
//!
//! All functions here are async-signal-safe, as sigaction is.

use std::ffi::c_void;
use std::io;
use std::mem::{MaybeUninit, transmute};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};

use libc::{SIGBUS, c_int, sigaction, siginfo_t};

use crate::signals::exchange;

pub(super) type Handler = extern "C" fn(c_int, *mut siginfo_t, *mut c_void);

/// SIG_DFL, SIG_IGN, or a function's address.
static ACTION: AtomicUsize = AtomicUsize::new(libc::SIG_DFL);
static FLAGS: AtomicI32 = AtomicI32::new(0);
/// The address of this crate's handler; 0 before it is installed.
static OURS: AtomicUsize = AtomicUsize::new(0);

/// An [`ErrorWatch`](super::ErrorWatch) has requested early reports of errors (`PR_MCE_KILL_EARLY`).
static WATCHING: AtomicBool = AtomicBool::new(false);

/// From now on, errors in memory that was not accessed do not end the process: without a watch the
/// kernel would not report them. The previous handler is still called each time.
///
/// This remains so after the watch ends, as does the thread that receives the reports.
pub(super) fn survive_early_reports() {
    WATCHING.store(true, Ordering::Release);
}

/// Replaces the current SIGBUS handler by `handler`.
pub(super) fn replace(handler: Handler) -> io::Result<()> {
    // Read first, so that a signal that arrives as soon as the handler is installed finds it.
    let before = exchange(SIGBUS, None)?;
    remember(&before);
    OURS.store(handler as *const () as usize, Ordering::Release);
    put_ours(&before)
}

fn put_ours(before: &sigaction) -> io::Result<()> {
    remember(&install_ours(before)?);
    Ok(())
}

/// Installs this crate's handler; returns the one that it replaced.
fn install_ours(before: &sigaction) -> io::Result<sigaction> {
    // SAFETY: a sigaction is plain data, for which zeroes are valid.
    let mut ours: sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
    ours.sa_sigaction = OURS.load(Ordering::Acquire);
    // On the alternate stack, because the handler that runs afterwards may be Rust's handler of stack
    // overflows. SA_RESTART: the signal must not make another thread's system call fail.
    ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
    ours.sa_mask = before.sa_mask;
    exchange(SIGBUS, Some(&ours))
}

/// Reinstalls this crate's handler if the previous handler has replaced it. Rust's handler does so: it
/// restores SIG_DFL for a signal that is not a stack overflow. The new handler becomes the previous
/// one. With `keep`, a handler that was only reset to SIG_DFL remains the previous one.
fn stay(keep: bool) {
    if let Ok(now) = exchange(SIGBUS, None)
        && now.sa_sigaction != OURS.load(Ordering::Acquire)
    {
        // If this fails, the next signal goes to the other handler.
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

/// Runs the previous handler, or its default action.
///
/// # Safety
///
/// Only for use by a SIGBUS handler, with its own arguments; `code` is `info.si_code`.
pub(super) unsafe fn run(signal: c_int, code: c_int, info: *mut siginfo_t, context: *mut c_void) {
    let action = ACTION.load(Ordering::Acquire);
    let flags = FLAGS.load(Ordering::Relaxed);
    // A signal that a process sent, and an error in memory that was not accessed, are over when the
    // handler returns. Any other SIGBUS recurs, because the instruction is repeated.
    let is_found = code == libc::BUS_MCEERR_AO;
    let is_over = code <= 0 || is_found;
    let is_expected = is_found && WATCHING.load(Ordering::Acquire);
    match action {
        libc::SIG_DFL if is_expected => {}
        // The kernel does not let a process ignore a fault of an instruction either.
        libc::SIG_IGN if is_over => {}
        libc::SIG_DFL | libc::SIG_IGN => die(is_over),
        function => {
            if flags & libc::SA_RESETHAND != 0 {
                ACTION.store(libc::SIG_DFL, Ordering::Release);
            }
            if flags & libc::SA_SIGINFO != 0 {
                // SAFETY: the kernel has this address as a function of this type.
                let function = unsafe { transmute::<usize, Handler>(function) };
                function(signal, info, context);
            } else {
                // SAFETY: as above.
                let function = unsafe { transmute::<usize, extern "C" fn(c_int)>(function) };
                function(signal);
            }
            // A recurring signal is to end the process, if the previous handler decided so.
            if is_over {
                stay(is_expected);
            }
        }
    }
}

/// Ends the process by SIGBUS, as without this crate's handler: by the repeated instruction after the
/// handler returns, or else by sending the signal again.
fn die(send_again: bool) {
    // SAFETY: a sigaction is plain data, for which zeroes are valid: SIG_DFL, no flags.
    let default: sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
    let _ = exchange(SIGBUS, Some(&default));
    if send_again {
        // SAFETY: raise takes a number. The signal is blocked until the handler returns.
        unsafe { libc::raise(SIGBUS) };
    }
}
