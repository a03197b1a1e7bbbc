//! The vCPUs' threads: they enter the guest again and again.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use pagetide_kvm::{BoundVcpu, Exit, Vcpu};

use super::{Control, Endless, EndlessError, Word};
use crate::guest::{Field, PORT, Report};

/// How long the threads have to come back.
const GRACE: Duration = Duration::from_secs(10);

/// What vCPUs run, and what it does about exits of its own.
pub(crate) trait Payload: Send + Sync + 'static {
    /// Its vCPUs.
    fn endless(&self) -> &Endless;

    /// An exit other than a report or an interruption. The vCPU is entered again, unless this is an
    /// error.
    fn exit(&self, vcpu: &mut BoundVcpu<'_>, exit: Exit) -> Result<(), EndlessError>;
}

/// The first failure of a thread.
#[derive(Debug, Default)]
pub(super) struct Failure {
    first: Mutex<Option<EndlessError>>,
    failed: AtomicBool,
}

impl Failure {
    fn note(&self, error: EndlessError) {
        lock(&self.first).get_or_insert(error);
        self.failed.store(true, Ordering::Release);
    }

    pub(super) fn check(&self) -> Result<(), EndlessError> {
        if !self.failed.load(Ordering::Acquire) {
            return Ok(());
        }
        lock(&self.first).take().map_or(Ok(()), Err)
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// vCPUs that run. Dropping it stops them.
#[derive(Debug)]
pub(crate) struct Running<P: Payload> {
    payload: Arc<P>,
    ended: mpsc::Receiver<u32>,
}

impl<P: Payload> Running<P> {
    /// Starts a thread for each vCPU, and waits until all have been round.
    ///
    /// # Errors
    /// A thread cannot be started, or a vCPU does not get round.
    pub(crate) fn start(payload: &Arc<P>) -> Result<Self, EndlessError> {
        let endless = payload.endless();
        let vcpus = std::mem::take(&mut *lock(&endless.vcpus));
        let (sender, ended) = mpsc::channel();
        let running = Self {
            payload: Arc::clone(payload),
            ended,
        };
        for vcpu in vcpus {
            let id = vcpu.id();
            let (payload, sender) = (Arc::clone(payload), sender.clone());
            thread::Builder::new()
                .name(format!("vcpu {id}"))
                .spawn(move || {
                    if let Err(error) = enter_until_done(&*payload, vcpu) {
                        payload.endless().failure.note(error);
                    }
                    let _ = sender.send(id);
                })
                .map_err(|source| EndlessError::Spawn { vcpu: id, source })?;
        }
        endless.await_each(Word::Rounds as u64, 1)?;
        Ok(running)
    }

    pub(crate) fn payload(&self) -> &P {
        &self.payload
    }

    /// Tells the vCPUs to end, and waits until they have.
    ///
    /// # Errors
    /// One does not, or one has failed.
    pub(crate) fn stop(&self) -> Result<(), EndlessError> {
        let endless = self.payload.endless();
        endless.control(Control::Stop as u64, 1)?;
        let start = Instant::now();
        let mut missing: Vec<u32> = (0..endless.count).collect();
        while let Some(&vcpu) = missing.first() {
            match self
                .ended
                .recv_timeout(GRACE.saturating_sub(start.elapsed()))
            {
                Ok(ended) => missing.retain(|id| *id != ended),
                Err(RecvTimeoutError::Timeout) => {
                    return Err(EndlessError::Lost { vcpu, limit: GRACE });
                }
                // Every sender is gone, and this one sent nothing.
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(EndlessError::Panicked { vcpu });
                }
            }
        }
        endless.check()
    }
}

impl<P: Payload> Drop for Running<P> {
    fn drop(&mut self) {
        let endless = self.payload.endless();
        endless.stopped.store(true, Ordering::Release);
        for kick in &endless.kicks {
            kick.kick();
        }
    }
}

fn enter_until_done(payload: &impl Payload, mut vcpu: Vcpu) -> Result<(), EndlessError> {
    let endless = payload.endless();
    let id = vcpu.id();
    let mut here = vcpu
        .bind()
        .map_err(|source| EndlessError::Bind { vcpu: id, source })?;
    loop {
        match here.run()? {
            Exit::Interrupted if endless.stopped.load(Ordering::Acquire) => return Ok(()),
            Exit::Interrupted => {}
            exit @ Exit::IoOut { port: PORT, data } => {
                return match Report::decode(data) {
                    Some(Report::Done) => Ok(()),
                    Some(Report::Exception) => Err(exception(endless, id)?),
                    _ => Err(unexpected(&here, exit)),
                };
            }
            exit => payload.exit(&mut here, exit)?,
        }
    }
}

/// An exit that a payload has no use for.
pub(crate) fn unexpected(vcpu: &BoundVcpu<'_>, exit: Exit) -> EndlessError {
    EndlessError::UnexpectedExit {
        vcpu: vcpu.id(),
        exit,
        rip: vcpu.rip(),
    }
}

fn exception(endless: &Endless, vcpu: u32) -> Result<EndlessError, EndlessError> {
    let field = |field| endless.low.field(vcpu, field);
    Ok(EndlessError::Exception {
        vcpu,
        vector: field(Field::ExceptionVector)?,
        error_code: field(Field::ExceptionErrorCode)?,
        cr2: field(Field::ExceptionCr2)?,
        rip: field(Field::ExceptionRip)?,
    })
}
