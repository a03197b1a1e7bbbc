//! The runtime that all objects of the process share.

use std::io;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread;

use tokio::runtime::{Builder, Handle, Runtime};

/// Threads that drive requests. They only move bytes; a fault never waits for a lock of theirs.
const WORKERS: usize = 2;
/// Threads that resolve host names, at most. A host whose name servers are silent takes as many as its image has readers, and
/// leaves some for other hosts.
const RESOLVERS: usize = 64;

static RUNTIME: OnceLock<Runtime> = OnceLock::new();
static STARTING: Mutex<()> = Mutex::new(());

/// The handle of the shared runtime, which starts at the first use and ends with the process.
///
/// # Errors
/// The kernel's error if no thread could be started. The next call tries again.
pub(super) fn handle() -> io::Result<Handle> {
    if let Some(runtime) = RUNTIME.get() {
        return Ok(runtime.handle().clone());
    }
    let _one_starts = STARTING.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(runtime) = RUNTIME.get() {
        return Ok(runtime.handle().clone());
    }
    // Tokio panics if it cannot start its first thread: on a thread that ends with it.
    let start = thread::Builder::new().name("pagetide-start".into());
    let build = || {
        Builder::new_multi_thread()
            .worker_threads(WORKERS)
            .max_blocking_threads(RESOLVERS)
            .thread_name("pagetide-object")
            .enable_all()
            .build()
    };
    let runtime = start.spawn(build)?.join();
    let runtime = runtime.map_err(|_| io::Error::other("no thread for requests was started"))??;
    Ok(RUNTIME.get_or_init(|| runtime).handle().clone())
}

/// Chooses the process' provider of cryptography, which every client needs. If the program has chosen one
/// before, that one stays.
pub(super) fn provide_tls() {
    let _ = rustls::crypto::ring::default_provider().install_default();
}

#[cfg(test)]
mod tests {
    use pagetide_test_support::{NoOtherThread, in_a_process_of_its_own};

    use super::*;

    #[test]
    fn without_a_thread_there_is_an_error_and_the_next_call_starts_it() {
        let this = "object::runtime::tests::without_a_thread_there_is_an_error_and_the_next_call_starts_it";
        in_a_process_of_its_own(this, || {
            // Not seen: that Tokio panics on a thread that could be started.
            let none = NoOtherThread::begin(&[]);
            let refused = handle();
            drop(none);
            assert!(refused.is_err());
            assert!(handle().is_ok());
        });
    }
}
