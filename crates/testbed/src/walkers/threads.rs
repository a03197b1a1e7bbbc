//! The vCPUs' threads: they enter the guest again and again, and count what it runs into.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use pagetide_kvm::{Exit, Vcpu};
use pagetide_memory::GuestAddress;

use super::code::{Control, Word};
use super::{WalkError, Walkers};
use crate::guest::{Field, PORT, Report};

/// How long the threads have to come back.
const GRACE: Duration = Duration::from_secs(10);

/// An access to memory that left the guest, because no slot was there in that moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hole {
    /// The vCPU.
    pub vcpu: u32,
    /// Where.
    pub gpa: GuestAddress,
    /// Whether it was a write.
    pub write: bool,
}

/// What the threads have seen.
#[derive(Debug, Default)]
pub(super) struct Seen {
    holes: AtomicU64,
    first: Mutex<Option<Hole>>,
    failure: Mutex<Option<WalkError>>,
    failed: std::sync::atomic::AtomicBool,
}

impl Seen {
    pub(super) fn holes(&self) -> u64 {
        self.holes.load(Ordering::Relaxed)
    }

    fn hole(&self, hole: Hole) {
        if self.holes.fetch_add(1, Ordering::Relaxed) == 0 {
            *lock(&self.first) = Some(hole);
        }
    }

    fn fail(&self, error: WalkError) {
        lock(&self.failure).get_or_insert(error);
        self.failed.store(true, Ordering::Release);
    }

    /// The first failure of a thread, once.
    pub(super) fn check(&self) -> Result<(), WalkError> {
        if !self.failed.load(Ordering::Acquire) {
            return Ok(());
        }
        lock(&self.failure).take().map_or(Ok(()), Err)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// vCPUs that walk. Dropping it stops them.
#[derive(Debug)]
pub struct Walking {
    walkers: Arc<Walkers>,
    ended: mpsc::Receiver<u32>,
}

impl Walkers {
    /// Starts a thread for each vCPU, and waits until all walk.
    ///
    /// # Errors
    /// A thread cannot be started, or a vCPU does not walk.
    pub fn start(self: &Arc<Self>) -> Result<Walking, WalkError> {
        let vcpus = std::mem::take(&mut *lock(&self.vcpus));
        let (sender, ended) = mpsc::channel();
        let walking = Walking {
            walkers: Arc::clone(self),
            ended,
        };
        for vcpu in vcpus {
            let id = vcpu.id();
            let (walkers, sender) = (Arc::clone(self), sender.clone());
            thread::Builder::new()
                .name(format!("vcpu {id}"))
                .spawn(move || {
                    walkers.walk(vcpu);
                    let _ = sender.send(id);
                })
                .map_err(|source| WalkError::Spawn { vcpu: id, source })?;
        }
        self.await_round()?;
        Ok(walking)
    }

    fn walk(&self, mut vcpu: Vcpu) {
        if let Err(error) = self.enter_until_done(&mut vcpu) {
            self.seen.fail(error);
        }
    }

    fn enter_until_done(&self, vcpu: &mut Vcpu) -> Result<(), WalkError> {
        let id = vcpu.id();
        let mut here = vcpu
            .bind()
            .map_err(|source| WalkError::Bind { vcpu: id, source })?;
        loop {
            match here.run()? {
                Exit::Mmio { gpa, write, .. } => self.seen.hole(Hole {
                    vcpu: id,
                    gpa,
                    write,
                }),
                Exit::Interrupted if self.stopped.load(Ordering::Acquire) => return Ok(()),
                Exit::Interrupted => {}
                exit => {
                    let report = match exit {
                        Exit::IoOut { port: PORT, data } => Report::decode(data),
                        _ => None,
                    };
                    return match report {
                        Some(Report::Done) => Ok(()),
                        Some(Report::Exception) => Err(self.exception(id)?),
                        _ => Err(WalkError::UnexpectedExit {
                            vcpu: id,
                            exit,
                            rip: here.rip(),
                        }),
                    };
                }
            }
        }
    }

    fn exception(&self, vcpu: u32) -> Result<WalkError, WalkError> {
        let field = |field| self.low.field(vcpu, field);
        Ok(WalkError::Exception {
            vcpu,
            vector: field(Field::ExceptionVector)?,
            error_code: field(Field::ExceptionErrorCode)?,
            cr2: field(Field::ExceptionCr2)?,
            rip: field(Field::ExceptionRip)?,
        })
    }

    /// The first word that a guest found wrong, and how many there were.
    fn wrong_words(&self) -> Result<(u64, Option<WalkError>), WalkError> {
        let mut first = None;
        let mut count = 0;
        for vcpu in 0..self.config.vcpus {
            let wrong = self.word(vcpu, Word::Wrong)?;
            count += wrong;
            if wrong > 0 && first.is_none() {
                first = Some(vcpu);
            }
        }
        let Some(vcpu) = first else {
            return Ok((0, None));
        };
        let error = WalkError::WrongWord {
            vcpu,
            gpa: GuestAddress(self.word(vcpu, Word::WrongGpa)?),
            found: self.word(vcpu, Word::WrongFound)?,
            expected: self.word(vcpu, Word::WrongExpected)?,
            count,
        };
        Ok((count, Some(error)))
    }
}

impl Walking {
    /// Lets every vCPU walk another round without disturbance, ends them and verifies memory.
    /// Returns the first hole that was seen, if there was one: an access in a hole reads anything
    /// and writes nothing, so with holes a guest may have found as many wrong words.
    ///
    /// # Errors
    /// A vCPU failed or found wrong words, or memory does not hold what it should.
    pub fn end(self) -> Result<Option<Hole>, WalkError> {
        let walkers = &*self.walkers;
        walkers.await_round()?;
        walkers.control(Control::Stop, 1)?;
        self.join()?;
        walkers.seen.check()?;
        let (count, wrong) = walkers.wrong_words()?;
        if let Some(error) = wrong.filter(|_| count > walkers.holes()) {
            return Err(error);
        }
        walkers.verify()?;
        Ok(*lock(&walkers.seen.first))
    }

    fn join(&self) -> Result<(), WalkError> {
        let start = Instant::now();
        let mut missing: Vec<u32> = (0..self.walkers.config.vcpus).collect();
        while let Some(&vcpu) = missing.first() {
            match self
                .ended
                .recv_timeout(GRACE.saturating_sub(start.elapsed()))
            {
                Ok(ended) => missing.retain(|id| *id != ended),
                Err(RecvTimeoutError::Timeout) => {
                    return Err(WalkError::Lost { vcpu, limit: GRACE });
                }
                // Every sender is gone, and this one sent nothing.
                Err(RecvTimeoutError::Disconnected) => return Err(WalkError::Panicked { vcpu }),
            }
        }
        Ok(())
    }
}

impl Drop for Walking {
    fn drop(&mut self) {
        self.walkers.stopped.store(true, Ordering::Release);
        for kick in &self.walkers.kicks {
            kick.kick();
        }
    }
}
