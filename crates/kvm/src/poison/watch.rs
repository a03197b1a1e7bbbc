//! Early reports of errors in memory that was not accessed.

use std::io;
use std::os::fd::BorrowedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::read;

use super::previous::survive_early_reports;
use super::sigbus::{FOUND, open_wake_descriptor};
use super::{MemoryError, Severity};
use crate::vm::{Inner, Vm};

/// Why errors cannot be watched.
#[derive(Debug, thiserror::Error)]
pub enum WatchError {
    /// The VM was created without a SIGBUS handler ([`Signals`](crate::Signals)).
    #[error("memory errors cannot be watched: the VM was created without a SIGBUS handler")]
    NoHandler,
    /// The thread could not be started, or the kernel does not report early (`PR_MCE_KILL`).
    #[error("cannot start the thread that receives reports of memory errors")]
    Thread(#[source] io::Error),
}

/// Reports errors in a VM's memory before they are accessed, for as long as it lives.
///
/// The kernel reports early to one thread of a process: the first watch starts that thread
/// (`PR_MCE_KILL_EARLY`), which stays for the life of the process. Without a watch, a guest learns of
/// an error at its access. This can happen with a watch too: of several simultaneous errors the kernel
/// reports only one, so the report at the access is authoritative.
///
/// The kernel reports errors in all of the process's memory. One outside all slots does not end the
/// process, whatever the previous action of SIGBUS; a previous handler is called. An access to such
/// memory ends the process, as without a watch.
#[derive(Debug)]
pub struct ErrorWatch {
    id: u64,
}

struct Subscriber {
    id: u64,
    vm: Weak<Inner>,
    notify: Box<dyn FnMut(MemoryError) + Send>,
}

static SUBSCRIBERS: Mutex<Vec<Subscriber>> = Mutex::new(Vec::new());

fn subscribers() -> MutexGuard<'static, Vec<Subscriber>> {
    SUBSCRIBERS.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ErrorWatch {
    /// Calls `notify`, on the watch's own thread, with each error in the VM's slots that the kernel
    /// reports early. The same page may be reported more than once. `notify` must not start or drop a
    /// watch.
    ///
    /// # Errors
    /// [`WatchError`].
    pub fn start(
        vm: &Vm,
        notify: impl FnMut(MemoryError) + Send + 'static,
    ) -> Result<Self, WatchError> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        static THREAD: OnceLock<Result<(), i32>> = OnceLock::new();
        if !vm.signals().sigbus() {
            return Err(WatchError::NoHandler);
        }
        // Before the kernel may report an error.
        survive_early_reports();
        THREAD
            .get_or_init(|| {
                start_thread().map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))
            })
            .map_err(|errno| WatchError::Thread(io::Error::from_raw_os_error(errno)))?;
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        subscribers().push(Subscriber {
            id,
            vm: vm.downgrade(),
            notify: Box::new(notify),
        });
        Ok(Self { id })
    }
}

impl Drop for ErrorWatch {
    /// Waits for a call in progress.
    fn drop(&mut self) {
        subscribers().retain(|subscriber| subscriber.id != self.id);
    }
}

/// Starts the thread; returns after the kernel has accepted it as the receiver of early reports.
fn start_thread() -> io::Result<()> {
    let wake = open_wake_descriptor()?;
    let (sender, receiver) = std::sync::mpsc::channel();
    thread::Builder::new()
        .name("pt-memory-error".to_owned())
        .spawn(move || {
            let requested = request_early_reports();
            let is_accepted = requested.is_ok();
            let _ = sender.send(requested);
            if is_accepted {
                watch(wake);
            }
        })?;
    receiver
        .recv()
        .unwrap_or_else(|_| Err(io::Error::from(io::ErrorKind::Other)))
}

fn request_early_reports() -> io::Result<()> {
    let unused = 0;
    // SAFETY: this prctl takes numbers and changes only the calling thread's policy.
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
        // The only possible errors are invalid memory or an invalid descriptor, which do not occur
        // here; after an error the loop reads without a wake-up.
        let _ = poll(&mut [PollFd::new(&wake, PollFlags::IN)], None);
        let _ = read(wake, &mut [0; 8]);
        for report in FOUND.take() {
            for subscriber in subscribers().iter_mut() {
                let Some(vm) = subscriber.vm.upgrade() else {
                    continue;
                };
                if let Some(error) = vm.error_at(report, Severity::ActionOptional) {
                    // The panic's own message describes the failure; other subscribers are still
                    // notified.
                    let _ = catch_unwind(AssertUnwindSafe(|| (subscriber.notify)(error)));
                }
            }
        }
    }
}
