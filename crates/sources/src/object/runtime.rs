//! The runtime that all objects of the process share.

use std::io;
use std::sync::{Mutex, OnceLock, PoisonError};

use tokio::runtime::{Builder, Handle, Runtime};

/// Threads that drive requests. They only move bytes; a fault never waits for a lock of theirs.
const WORKERS: usize = 2;
/// Threads that resolve host names.
const RESOLVERS: usize = 4;

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
    let runtime = Builder::new_multi_thread()
        .worker_threads(WORKERS)
        .max_blocking_threads(RESOLVERS)
        .thread_name("pagetide-object")
        .enable_all()
        .build()?;
    Ok(RUNTIME.get_or_init(|| runtime).handle().clone())
}

/// Chooses the process' provider of cryptography, which every client needs. If the program has chosen one
/// before, that one stays.
pub(super) fn provide_tls() {
    let _ = rustls::crypto::ring::default_provider().install_default();
}
