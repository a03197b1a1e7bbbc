//! The worker threads of a population and the queue of their work.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, Scope, ScopedJoinHandle};
use std::time::Duration;

use pagetide_memory::GuestRange;

use super::methods::{BoundMethod, Context};
use super::numa::Nodes;
use super::pieces::Piece;
use super::populator::WorkerError;
use super::{Caller, PopulateFlags, Populated};
use crate::kick::Kickable;
use crate::vcpu::Vcpu;

/// A population method with the resources for one worker; the worker turns it into a [`BoundMethod`] on
/// its own thread.
pub(super) enum UnboundMethod<'scope> {
    Ioctl(&'scope Caller<'scope>),
    PreFault(&'scope mut Vcpu),
    Host,
}

/// A failure, and the piece in which it occurred.
pub(super) type Failure = (GuestRange, WorkerError);

/// The remaining pieces, each with its NUMA node.
#[derive(Debug)]
pub(super) struct Work {
    left: Mutex<VecDeque<(Option<u32>, Piece)>>,
    count: usize,
    pub(super) total_bytes: u64,
    flags: PopulateFlags,
    nodes: Nodes,
    /// Workers begin no further piece.
    stopped: AtomicBool,
}

impl Work {
    pub(super) fn new(pieces: Vec<Piece>, flags: PopulateFlags) -> Self {
        let nodes = Nodes::here();
        let node_of = |piece: &Piece| {
            let offset = piece.range.start().0 - piece.slot.range.start().0;
            let start = piece.slot.region.guest().start();
            let bytes = usize::try_from(piece.slot.offset + offset).ok()?;
            nodes.of_page(start.checked_add(bytes)?)
        };
        Self {
            count: pieces.len(),
            total_bytes: pieces.iter().map(|piece| piece.range.bytes()).sum(),
            left: Mutex::new(
                pieces
                    .into_iter()
                    .map(|piece| (node_of(&piece), piece))
                    .collect(),
            ),
            flags,
            stopped: AtomicBool::new(false),
            nodes,
        }
    }

    pub(super) fn pieces(&self) -> usize {
        self.count
    }

    pub(super) fn first(&self) -> Option<GuestRange> {
        let left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        left.front().map(|(_, piece)| piece.range)
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }

    /// Takes a piece on `node`, or else the next piece.
    fn take(&self, node: Option<u32>) -> Option<(Option<u32>, Piece)> {
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        let near = node.and_then(|_| left.iter().position(|(at, _)| *at == node));
        left.remove(near.unwrap_or(0))
    }

    /// The main loop of one worker.
    fn work(
        &self,
        index: usize,
        method: UnboundMethod<'_>,
        done: &Sender<Populated>,
    ) -> Result<(), Failure> {
        let mut near = self.nodes.home(index);
        let mut bound = None;
        let mut method = Some(method);
        while !self.is_stopped() {
            let Some((node, piece)) = self.take(near) else {
                break;
            };
            let failed = |error: WorkerError| {
                self.stopped.store(true, Ordering::Relaxed);
                (piece.range, error)
            };
            if let Some(node) = node {
                if near != Some(node) || bound.is_none() {
                    self.nodes.stay_on(node);
                }
                near = Some(node);
            }
            if let Some(method) = method.take() {
                bound = Some(match method {
                    UnboundMethod::Ioctl(caller) => BoundMethod::Ioctl(caller.bind()),
                    UnboundMethod::PreFault(vcpu) => {
                        BoundMethod::PreFault(vcpu.bind().map_err(|error| failed(error.into()))?)
                    }
                    UnboundMethod::Host => BoundMethod::Host,
                });
            }
            let context = Context {
                flags: self.flags,
                stop: &|| self.is_stopped(),
                report: &|populated| {
                    // The receiver is gone if the caller's `watch` has panicked.
                    let _ = done.send(populated);
                },
            };
            if let Some(bound) = &mut bound {
                bound.populate(&piece, &context).map_err(failed)?;
            }
        }
        Ok(())
    }
}

/// The first and the longest pause before the signal is sent to workers again.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(50);

/// The workers. Dropping the value stops them and waits until they have ended, also when the caller's
/// `watch` panics.
pub(super) struct Workers<'scope, 'work> {
    work: &'work Work,
    workers: Vec<ScopedJoinHandle<'scope, Result<(), Failure>>>,
    targets: Vec<Arc<dyn Kickable>>,
}

impl<'scope, 'work: 'scope> Workers<'scope, 'work> {
    pub(super) fn new(work: &'work Work) -> Self {
        Self {
            work,
            workers: Vec::new(),
            targets: Vec::new(),
        }
    }

    pub(super) fn start<'env>(
        &mut self,
        scope: &'scope Scope<'scope, 'env>,
        index: usize,
        method: UnboundMethod<'scope>,
        done: Sender<Populated>,
    ) -> io::Result<()> {
        match &method {
            UnboundMethod::Ioctl(caller) => self.targets.push(caller.target()),
            UnboundMethod::PreFault(vcpu) => self.targets.push(vcpu.kickable()),
            UnboundMethod::Host => {}
        }
        let work = self.work;
        let worker = thread::Builder::new()
            .name(format!("populate{index}"))
            .spawn_scoped(scope, move || work.work(index, method, &done))?;
        self.workers.push(worker);
        Ok(())
    }

    /// Stops the workers, also those that wait in the kernel. Call this repeatedly until they have
    /// ended: a signal that arrives just before a worker's ioctl interrupts nothing.
    pub(super) fn stop(&self) {
        self.work.stopped.store(true, Ordering::Relaxed);
        for target in &self.targets {
            target.signal();
        }
    }

    /// Waits for all workers; returns the first failure, if any.
    pub(super) fn join(&mut self) -> Option<Failure> {
        let mut failure = None;
        for worker in self.workers.drain(..) {
            match worker.join() {
                Ok(Ok(())) => {}
                Ok(Err(found)) => failure = failure.or(Some(found)),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        failure
    }
}

impl Drop for Workers<'_, '_> {
    fn drop(&mut self) {
        let mut pause = FIRST_PAUSE;
        while self.workers.iter().any(|worker| !worker.is_finished()) {
            self.stop();
            thread::sleep(pause);
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }
}

#[cfg(test)]
#[path = "workers_tests.rs"]
mod tests;
