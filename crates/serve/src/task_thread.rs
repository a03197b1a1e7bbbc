//! A thread that drives asynchronous tasks.

use std::future::Future;
use std::io;
use std::thread::{Builder, JoinHandle};

use tokio::runtime;
use tokio::sync::oneshot;

/// Drives a task, and those that it spawns, until it is dropped. A runtime of Tokio with threads of its own panics if the
/// first of these cannot be started. Nothing here may use `spawn_blocking`, which panics without a thread, too, and for whose
/// end the drop would wait.
#[derive(Debug)]
pub(crate) struct TaskThread {
    /// Dropped to end the thread.
    end: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl TaskThread {
    /// Drives the task that `make` returns. Both may use Tokio's sockets and clocks.
    ///
    /// # Errors
    /// The error of `make`, or the kernel's if the thread cannot be started. The task is then dropped.
    pub(crate) fn start<T>(name: &str, make: impl FnOnce() -> io::Result<T>) -> io::Result<Self>
    where
        T: Future<Output = ()> + Send + 'static,
    {
        let runtime = runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build()?;
        {
            let _inside = runtime.enter();
            runtime.spawn(make()?);
        }
        let (end, ended) = oneshot::channel();
        let thread = Builder::new().name(name.to_owned()).spawn(move || {
            // It is an error that the sender was dropped.
            let _: Result<(), _> = runtime.block_on(ended);
        })?;
        Ok(Self {
            end: Some(end),
            thread: Some(thread),
        })
    }
}

impl Drop for TaskThread {
    fn drop(&mut self) {
        drop(self.end.take());
        if let Some(thread) = self.thread.take() {
            // Tasks wait for nothing but their connections, and are dropped with the runtime.
            let _ = thread.join();
        }
    }
}
