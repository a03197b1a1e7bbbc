//! Errors that nobody has touched: told by the kernel to a thread that asked for it.

use std::io;
use std::os::fd::BorrowedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::read;

use super::previous::survive_what_is_found;
use super::sigbus::{FOUND, open_wake_descriptor};
use super::{MemoryError, Severity};
use crate::vm::{Inner, Vm};

/// Why errors cannot be watched for.
#[derive(Debug, thiserror::Error)]
pub enum WatchError {
    /// The VM was made without a handler of SIGBUS ([`Signals`](crate::Signals)).
    #[error("memory errors cannot be watched for: the VM was made without a handler of SIGBUS")]
    NoHandler,
    /// There is no thread to be had, or the kernel does not tell it early (`PR_MCE_KILL`).
    #[error("cannot start the thread that is told of memory errors")]
    Thread(#[source] io::Error),
}

/// Tells of errors in a VM's memory that nobody has touched yet, for as long as it lives.
///
/// The kernel tells one thread of a process early: the first watch starts it (`PR_MCE_KILL_EARLY`),
/// and it stays for the life of the process. Without one, a guest finds out about an error when it
/// touches it. That may happen anyhow: of several errors in the same moment, one is told, so what
/// counts is what the touch says.
///
/// The kernel tells of errors in all of the process's memory. One that is in no slot does not end
/// the process, however SIGBUS was handled before; the handler that was there is called. Whoever
/// touches such memory dies of it, as without a watch.
#[derive(Debug)]
pub struct ErrorWatch {
    id: u64,
}

struct Subscriber {
    id: u64,
    vm: Weak<Inner>,
    tell: Box<dyn FnMut(MemoryError) + Send>,
}

static SUBSCRIBERS: Mutex<Vec<Subscriber>> = Mutex::new(Vec::new());

fn subscribers() -> MutexGuard<'static, Vec<Subscriber>> {
    SUBSCRIBERS.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ErrorWatch {
    /// Has `tell` called, on a thread of the watch's own, with each error in the VM's slots that the
    /// kernel tells of early. The same page may be told of more than once. `tell` must not start or
    /// end a watch.
    ///
    /// # Errors
    /// [`WatchError`].
    pub fn start(
        vm: &Vm,
        tell: impl FnMut(MemoryError) + Send + 'static,
    ) -> Result<Self, WatchError> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        static THREAD: OnceLock<Result<(), i32>> = OnceLock::new();
        if !vm.signals().sigbus() {
            return Err(WatchError::NoHandler);
        }
        // Before the kernel may tell.
        survive_what_is_found();
        THREAD
            .get_or_init(|| {
                start_thread().map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))
            })
            .map_err(|errno| WatchError::Thread(io::Error::from_raw_os_error(errno)))?;
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        subscribers().push(Subscriber {
            id,
            vm: vm.downgrade(),
            tell: Box::new(tell),
        });
        Ok(Self { id })
    }
}

impl Drop for ErrorWatch {
    /// Waits for a call that is going on.
    fn drop(&mut self) {
        subscribers().retain(|subscriber| subscriber.id != self.id);
    }
}

/// Starts the thread; returns when the kernel tells it.
fn start_thread() -> io::Result<()> {
    let wake = open_wake_descriptor()?;
    let (sender, receiver) = std::sync::mpsc::channel();
    thread::Builder::new()
        .name("pt-memory-error".to_owned())
        .spawn(move || {
            let told = be_told_early();
            let is_told = told.is_ok();
            let _ = sender.send(told);
            if is_told {
                watch(wake);
            }
        })?;
    receiver
        .recv()
        .unwrap_or_else(|_| Err(io::Error::from(io::ErrorKind::Other)))
}

fn be_told_early() -> io::Result<()> {
    let unused = 0;
    // SAFETY: this prctl takes numbers and changes the calling thread's policy only.
    let status = unsafe {
        libc::prctl(
            libc::PR_MCE_KILL,
            libc::PR_MCE_KILL_SET,
            libc::PR_MCE_KILL_EARLY,
            unused,
            unused,
        )
    };
    if status == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

fn watch(wake: BorrowedFd<'_>) {
    loop {
        // An error here would be one of memory or of the descriptor, neither of which there is; then
        // it looks without having been woken.
        let _ = poll(&mut [PollFd::new(&wake, PollFlags::IN)], None);
        let _ = read(wake, &mut [0; 8]);
        for report in FOUND.take() {
            for subscriber in subscribers().iter_mut() {
                let Some(vm) = subscriber.vm.upgrade() else {
                    continue;
                };
                if let Some(error) = vm.error_at(report, Severity::ActionOptional) {
                    // The panic's own message says what went wrong; the others are told.
                    let _ = catch_unwind(AssertUnwindSafe(|| (subscriber.tell)(error)));
                }
            }
        }
    }
}
