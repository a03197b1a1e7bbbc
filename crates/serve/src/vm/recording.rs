//! What a VM records of its working set, and when it is written.
//!
//! A recording ends with its VM: a guest may rest before its workload begins. Meanwhile nothing comes ahead,
//! since a page that comes ahead is not recorded. What was recorded so far is written in quiet moments, so that
//! other VMs of the image can replay it, and `kill -9` of the server loses the rest only.

use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use super::Vm;
use crate::log_limit::log_vm;

/// How long a guest must not touch a missing page before its recording is written.
const QUIET: Duration = Duration::from_secs(1);

/// How long the end of a VM waits until its recording is written; and, after its drains, that of a server.
const PATIENCE: Duration = Duration::from_secs(10);
const PATIENCE_OF_STOP: Duration = Duration::from_millis(500);

/// The longest wait without a look at the end of the server.
const SLICE: Duration = Duration::from_millis(100);

/// When a recording is written next.
#[derive(Debug)]
pub(super) struct Checkpoint {
    begun: Instant,
    next: Instant,
    /// The touches that were written.
    saved: usize,
    thread: Option<JoinHandle<()>>,
}

impl Checkpoint {
    pub(super) fn new() -> Self {
        let now = Instant::now();
        Self {
            begun: now,
            next: now,
            saved: 0,
            thread: None,
        }
    }
}

impl Vm<'_> {
    /// Writes what was recorded since the last time, if the guest is quiet: on a thread of its own, which may
    /// wait for a disk.
    pub(super) fn save_when_quiet(&mut self) {
        if self.recorder.is_some() && !self.image.keeps_recordings() {
            // Nobody gets what it records: it is served as if it did not.
            drop(self.stop_recording());
        }
        let Some(recorder) = &self.recorder else {
            return;
        };
        let checkpoint = &mut self.checkpoint;
        let is_writing = |thread: &JoinHandle<()>| !thread.is_finished();
        let now = Instant::now();
        if now < checkpoint.next
            || recorder.quiet() < QUIET
            || recorder.count() == checkpoint.saved
            || checkpoint.thread.as_ref().is_some_and(is_writing)
        {
            return;
        }
        checkpoint.saved = recorder.count();
        // The file is written as a whole: seldom, however long the VM lives.
        checkpoint.next = now + (now - checkpoint.begun);
        let (image, recorder) = (Arc::clone(self.image), Arc::clone(recorder));
        let write = move || {
            image.save(&recorder);
        };
        // Without a thread it is written at the end.
        checkpoint.thread = Builder::new()
            .name("pt-working-set".to_owned())
            .spawn(write)
            .ok();
    }

    /// Writes the recording at the VM's end: on a thread of its own, for which the end does not wait long.
    pub(super) fn save_recording(&mut self) {
        let Some(recorder) = self.recorder.take() else {
            return;
        };
        let (image, metrics) = (Arc::clone(self.image), self.common.metrics.clone());
        let (end, has_ended) = mpsc::channel::<()>();
        let save = move || {
            if let Some(pages) = image.save(&recorder) {
                metrics.count(|totals| totals.recorded_pages = pages as u64);
            }
            drop(end);
        };
        let thread = Builder::new().name("pt-working-set".to_owned());
        let is_saved = thread.spawn(save).is_ok() && self.wait_for(&has_ended);
        if !is_saved {
            log_vm!(
                warn,
                self.charge,
                image = self.image.image.name(),
                "the VM has ended before its recording was saved: the disk does not answer, or no thread was started"
            );
        }
    }

    /// Waits until the sender is dropped. False, if that takes too long.
    fn wait_for(&self, end: &Receiver<()>) -> bool {
        let since = Instant::now();
        while end.recv_timeout(SLICE) == Err(RecvTimeoutError::Timeout) {
            let stopper = &self.common.stopper;
            let is_over = stopper.is_stopping()
                && since.elapsed() >= PATIENCE_OF_STOP
                && Instant::now() >= stopper.deadline();
            if is_over || since.elapsed() >= PATIENCE {
                return false;
            }
        }
        true
    }
}
