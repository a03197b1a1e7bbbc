//! The threads of a population and what they have to do.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, Scope, ScopedJoinHandle};
use std::time::Duration;

use pagetide_memory::GuestRange;

use super::methods::{Means, Orders};
use super::numa::Nodes;
use super::pieces::Piece;
use super::populator::WorkerError;
use super::{Caller, PopulateFlags, Populated};
use crate::kick::Kickable;
use crate::vcpu::Vcpu;

/// What a worker is given; it makes its [`Means`] of it on its own thread.
pub(super) enum Tool<'scope> {
    Ioctl(&'scope Caller<'scope>),
    PreFault(&'scope mut Vcpu),
    Host,
}

/// A failure, and the piece where it came.
pub(super) type Failure = (GuestRange, WorkerError);

/// The pieces that are left, and where they are.
#[derive(Debug)]
pub(super) struct Work {
    left: Mutex<VecDeque<(Option<u32>, Piece)>>,
    count: usize,
    pub(super) total_bytes: u64,
    flags: PopulateFlags,
    nodes: Nodes,
    /// Nothing more is to be begun.
    over: AtomicBool,
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
            over: AtomicBool::new(false),
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

    pub(super) fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    /// A piece on `node`, or else the next one.
    fn take(&self, node: Option<u32>) -> Option<(Option<u32>, Piece)> {
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        let near = node.and_then(|_| left.iter().position(|(at, _)| *at == node));
        left.remove(near.unwrap_or(0))
    }

    /// One worker's life.
    fn work(&self, index: usize, tool: Tool<'_>, done: &Sender<Populated>) -> Result<(), Failure> {
        let mut near = self.nodes.home(index);
        let mut means = None;
        let mut tool = Some(tool);
        while !self.is_over() {
            let Some((node, piece)) = self.take(near) else {
                break;
            };
            let failed = |error: WorkerError| {
                self.over.store(true, Ordering::Relaxed);
                (piece.range, error)
            };
            if let Some(node) = node {
                if near != Some(node) || means.is_none() {
                    self.nodes.stay_on(node);
                }
                near = Some(node);
            }
            if let Some(tool) = tool.take() {
                means = Some(match tool {
                    Tool::Ioctl(caller) => Means::Ioctl(caller.bind()),
                    Tool::PreFault(vcpu) => {
                        Means::PreFault(vcpu.bind().map_err(|error| failed(error.into()))?)
                    }
                    Tool::Host => Means::Host,
                });
            }
            let orders = Orders {
                flags: self.flags,
                stop: &|| self.is_over(),
                report: &|populated| {
                    // Nobody listens any more when the caller's `watch` has panicked.
                    let _ = done.send(populated);
                },
            };
            if let Some(means) = &mut means {
                means.populate(&piece, &orders).map_err(failed)?;
            }
        }
        Ok(())
    }
}

/// How long workers have to end before they are sent the signal again.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(50);

/// The workers. Dropping it stops them and waits until they have ended, also when the caller's
/// `watch` panics.
pub(super) struct Crew<'scope, 'work> {
    work: &'work Work,
    workers: Vec<ScopedJoinHandle<'scope, Result<(), Failure>>>,
    seats: Vec<Arc<dyn Kickable>>,
}

impl<'scope, 'work: 'scope> Crew<'scope, 'work> {
    pub(super) fn new(work: &'work Work) -> Self {
        Self {
            work,
            workers: Vec::new(),
            seats: Vec::new(),
        }
    }

    pub(super) fn start<'env>(
        &mut self,
        scope: &'scope Scope<'scope, 'env>,
        index: usize,
        tool: Tool<'scope>,
        done: Sender<Populated>,
    ) -> io::Result<()> {
        match &tool {
            Tool::Ioctl(caller) => self.seats.push(caller.seat()),
            Tool::PreFault(vcpu) => self.seats.push(vcpu.kickable()),
            Tool::Host => {}
        }
        let work = self.work;
        let worker = thread::Builder::new()
            .name(format!("populate{index}"))
            .spawn_scoped(scope, move || work.work(index, tool, &done))?;
        self.workers.push(worker);
        Ok(())
    }

    /// Has workers end, also those that wait in the kernel. To be called until they have: a signal
    /// that comes just before a worker's ioctl interrupts nothing.
    pub(super) fn halt(&self) {
        self.work.over.store(true, Ordering::Relaxed);
        for seat in &self.seats {
            seat.signal();
        }
    }

    /// Waits for all; the first failure, if there is one.
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

impl Drop for Crew<'_, '_> {
    fn drop(&mut self) {
        let mut pause = FIRST_PAUSE;
        while self.workers.iter().any(|worker| !worker.is_finished()) {
            self.halt();
            thread::sleep(pause);
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }
}

#[cfg(test)]
#[path = "crew_tests.rs"]
mod tests;
