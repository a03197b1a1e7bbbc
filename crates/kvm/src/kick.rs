//! Kicks: making a vCPU leave KVM_RUN from another thread.
//!
//! A signal alone can arrive just before KVM_RUN starts and is then lost; `immediate_exit` alone
//! does not reach a vCPU that is already inside. A kick sets the flag and then sends the signal, so
//! that one of the two always works: either KVM_RUN has not started and sees the flag, or it has
//! and the signal ends it, also while KVM waits for a userfaultfd on the vCPU's behalf.
//!
//! There are two kinds. A caller's kick ([`VcpuKick`]) is remembered in `pending` and becomes
//! [`Exit::Interrupted`](crate::Exit::Interrupted). A slot transaction's kick is not remembered:
//! KVM_RUN returns, and [`BoundVcpu::run`](crate::BoundVcpu::run) waits at the gate and enters
//! again. A population ([`crate::populate`]) is kicked by the signal alone: it looks for nothing
//! that could be missed, and whoever waits for it sends the signal again.

use std::ffi::c_void;
use std::fmt::Debug;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use libc::{c_int, siginfo_t};
use rustix::thread::Pid;
use vmm_sys_util::signal::SIGRTMIN;

use crate::gate::{Occupant, Seat};
use crate::run_page::RunPage;

/// The signal that kicks use: the second real-time signal. Its handler does nothing; the signal's
/// only work is to interrupt KVM_RUN. A program must not use it for anything else.
#[must_use]
pub fn kick_signal() -> c_int {
    SIGRTMIN() + 1
}

extern "C" fn ignore(_signal: c_int, _info: *mut siginfo_t, _context: *mut c_void) {}

/// Installs the signal's handler, once a process.
pub(crate) fn install_handler() -> Result<(), std::io::Error> {
    static INSTALLED: OnceLock<Result<(), i32>> = OnceLock::new();
    INSTALLED
        .get_or_init(|| install_kick().map_err(|error| error.raw_os_error().unwrap_or(libc::EIO)))
        .map_err(std::io::Error::from_raw_os_error)
}

/// With SA_RESTART: KVM_RUN, KVM_PRE_FAULT_MEMORY and KVM_POPULATE_MEMORY return EINTR all the same,
/// while a read() of a page source's, on the same thread, goes on. poll(), nanosleep() and some
/// others return EINTR whatever the flags (signal(7)).
fn install_kick() -> std::io::Result<()> {
    // SAFETY: a sigaction is plain data, for which zeroes are valid.
    let mut action: libc::sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
    action.sa_sigaction = ignore as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART | libc::SA_ONSTACK;
    // SAFETY: the structure is read only, and the handler does nothing.
    match unsafe { libc::sigaction(kick_signal(), &raw const action, ptr::null_mut()) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// Who has a seat at a VM's gate, and how a slot transaction makes it leave.
pub(crate) trait Kickable: Occupant + Debug {
    /// Makes the next KVM_RUN return at once, if that is what it does.
    fn stop_early(&self) {}

    /// Whether KVM_KICK_VCPUS reaches it.
    fn is_vcpu(&self) -> bool {
        false
    }

    /// Sends the signal, if a thread is there to get it.
    fn signal(&self);
}

/// The thread that kicks are sent to. Held while the signal is sent, so that the thread cannot end,
/// and its number go to another one, between the look and the signal.
#[derive(Debug, Default)]
pub(crate) struct KickedThread(Mutex<Option<Pid>>);

impl KickedThread {
    pub(crate) fn set(&self, thread: Option<Pid>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = thread;
    }

    pub(crate) fn signal(&self) {
        let thread = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(thread) = *thread {
            let process = rustix::process::getpid().as_raw_nonzero().get();
            // A failure means that the thread is ending, which serves as well.
            // SAFETY: tgkill takes three numbers and touches no memory of ours; the handler that
            // install_handler() put in place before any thread was set does nothing.
            unsafe {
                libc::syscall(
                    libc::SYS_tgkill,
                    process,
                    thread.as_raw_nonzero().get(),
                    kick_signal(),
                );
            }
        }
    }
}

/// What a vCPU and the kicks for it share.
#[derive(Debug)]
pub(crate) struct KickTarget {
    seat: Seat,
    pub(crate) page: RunPage,
    /// A caller's kick that no KVM_RUN has returned for. Set before `immediate_exit` and read after
    /// that was cleared, so that a kick is never forgotten (at worst it counts twice).
    pending: AtomicBool,
    /// A slot transaction closed the gate while the last ioctl was going on, so its kick may come
    /// late: the next KVM_RUN may be interrupted once on its account. Only for whoever holds the
    /// vCPU, hence without any ordering.
    late_kick: AtomicBool,
    /// The thread that runs the vCPU now.
    thread: KickedThread,
}

impl Occupant for KickTarget {
    fn seat(&self) -> &Seat {
        &self.seat
    }
}

impl KickTarget {
    pub(crate) fn new(page: RunPage) -> Self {
        Self {
            seat: Seat::default(),
            page,
            pending: AtomicBool::new(false),
            late_kick: AtomicBool::new(false),
            thread: KickedThread::default(),
        }
    }

    pub(crate) fn set_thread(&self, thread: Option<Pid>) {
        self.thread.set(thread);
    }

    /// Takes note that KVM_RUN was interrupted; whether a caller had kicked. For the vCPU's thread.
    pub(crate) fn take_kick(&self) -> bool {
        self.page.set_immediate_exit(false);
        self.pending.swap(false, Ordering::SeqCst)
    }

    /// Sets whether a transaction's kick may come late; what it was.
    #[inline]
    pub(crate) fn expect_late_kick(&self, expected: bool) -> bool {
        let before = self.late_kick.load(Ordering::Relaxed);
        self.late_kick.store(expected, Ordering::Relaxed);
        before
    }

    /// Whether a caller's kick is pending.
    pub(crate) fn has_kick(&self) -> bool {
        self.pending.load(Ordering::SeqCst)
    }

    /// Puts `immediate_exit` back to what callers' kicks want. For the vCPU's thread.
    pub(crate) fn restore_immediate_exit(&self) {
        self.page.set_immediate_exit(false);
        if self.pending.load(Ordering::SeqCst) {
            self.page.set_immediate_exit(true);
        }
    }
}

impl Kickable for KickTarget {
    fn stop_early(&self) {
        self.page.set_immediate_exit(true);
    }

    fn is_vcpu(&self) -> bool {
        true
    }

    fn signal(&self) {
        self.thread.signal();
    }
}

/// Kicks one vCPU; any thread may hold and use it, also when the vCPU is long gone.
#[derive(Clone, Debug)]
pub struct VcpuKick {
    target: Arc<KickTarget>,
}

impl VcpuKick {
    pub(crate) fn new(target: Arc<KickTarget>) -> Self {
        Self { target }
    }

    /// Makes the present KVM_RUN, or if there is none the next one, return
    /// [`Exit::Interrupted`](crate::Exit::Interrupted). Several kicks before that count as one.
    pub fn kick(&self) {
        self.target.pending.store(true, Ordering::SeqCst);
        self.target.page.set_immediate_exit(true);
        self.target.thread.signal();
    }
}
