//! What a VM records of its working set, and when it is written.
//!
//! A recording ends with its VM: a guest may rest before its workload begins. Meanwhile nothing comes ahead,
//! since a page that comes ahead is not recorded. What was recorded so far is written in quiet moments, so that
//! other VMs of the image can replay it, and `kill -9` of the server loses the rest only.

use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use super::Vm;

/// How long a guest must not touch a missing page before its recording is written.
const QUIET: Duration = Duration::from_secs(1);

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

    /// Writes the recording at the VM's end.
    pub(super) fn save_recording(&mut self) {
        if let Some(thread) = self.checkpoint.thread.take() {
            let _ = thread.join();
        }
        let Some(recorder) = self.recorder.take() else {
            return;
        };
        if let Some(pages) = self.image.save(&recorder) {
            self.common
                .metrics
                .count(|totals| totals.recorded_pages = pages as u64);
        }
    }
}
