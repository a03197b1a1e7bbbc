//! Kicks: making a vCPU leave KVM_RUN from another thread.
//!
//! A signal alone can arrive just before KVM_RUN starts and is then lost; `immediate_exit` alone
//! does not reach a vCPU that is already inside. A kick sets the flag and then sends the signal, so
//! that one of the two always works: either KVM_RUN has not started and sees the flag, or it has
//! and the signal ends it, also while KVM waits for a userfaultfd on the vCPU's behalf.

use std::ffi::c_void;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use libc::{c_int, siginfo_t};
use rustix::thread::Pid;
use vmm_sys_util::signal::{SIGRTMIN, register_signal_handler};

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
        .get_or_init(|| {
            register_signal_handler(kick_signal(), ignore)
                .map_err(vmm_sys_util::errno::Error::errno)
        })
        .map_err(std::io::Error::from_raw_os_error)
}

/// What a vCPU and the kicks for it share.
#[derive(Debug)]
pub(crate) struct KickTarget {
    pub(crate) page: RunPage,
    /// The thread that runs the vCPU now. Held while the signal is sent, so that the thread cannot
    /// end, and its number go to another one, between the look and the signal.
    thread: Mutex<Option<Pid>>,
}

impl KickTarget {
    pub(crate) fn new(page: RunPage) -> Self {
        Self {
            page,
            thread: Mutex::new(None),
        }
    }

    pub(crate) fn set_thread(&self, thread: Option<Pid>) {
        *self.thread.lock().unwrap_or_else(PoisonError::into_inner) = thread;
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
        self.target.page.set_immediate_exit(true);
        let thread = self
            .target
            .thread
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
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
