//! The vCPUs while they run: started together, told to end together.

use std::sync::Arc;
use std::time::Duration;

use pagetide_kvm::Exit;
use pagetide_vmm::{HookError, Next, PoolConfig, PoolFailure, PoolVcpu, VcpuHooks, VcpuPool};

use super::{Control, Endless, EndlessError, Word};
use crate::guest::{Field, PORT, Report};
use crate::walk::lock;

/// How long the threads have to come back.
const GRACE: Duration = Duration::from_secs(10);

/// What vCPUs run. Its hooks leave reports to [`Endless::report`].
pub(crate) trait Payload: VcpuHooks + 'static {
    /// Its vCPUs.
    fn endless(&self) -> &Endless;
}

/// vCPUs that run. Dropping it stops them.
#[derive(Debug)]
pub(crate) struct Running<P: Payload> {
    payload: Arc<P>,
    pool: VcpuPool,
}

impl<P: Payload> Running<P> {
    /// Starts a thread for each vCPU, and waits until all have been round. A second time there are
    /// no vCPUs left.
    ///
    /// # Errors
    /// A thread cannot be started, or a vCPU does not get round.
    pub(crate) fn start(payload: &Arc<P>) -> Result<Self, EndlessError> {
        let endless = payload.endless();
        let vcpus = std::mem::take(&mut *lock(&endless.vcpus));
        let hooks: Arc<dyn VcpuHooks> = Arc::<P>::clone(payload);
        let pool = VcpuPool::start(vcpus, hooks, &endless.stopper, &PoolConfig::default())?;
        let running = Self {
            payload: Arc::clone(payload),
            pool,
        };
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
    pub(crate) fn stop(self) -> Result<Arc<P>, EndlessError> {
        let control = Control::Stop as u64;
        self.payload.endless().control(control, 1)?;
        match self.pool.join(GRACE).failure {
            None => Ok(self.payload),
            Some(failure) => Err(failure.into_own()),
        }
    }
}

impl Endless {
    /// What a report of the guest's means; no other exit is known.
    pub(crate) fn report(&self, vcpu: &PoolVcpu<'_>, exit: Exit) -> Result<Next, HookError> {
        let Exit::IoOut { port: PORT, data } = exit else {
            return Ok(Next::Unexpected);
        };
        match Report::decode(data) {
            Some(Report::Done) => Ok(Next::Leave),
            Some(Report::Exception) => Err(self.exception(vcpu.id())?.into()),
            _ => Ok(Next::Unexpected),
        }
    }

    /// The first failure of a vCPU, once.
    pub(crate) fn check(&self) -> Result<(), EndlessError> {
        let failure = self.stopper.take_failure();
        failure.map_or(Ok(()), |failure| Err(PoolFailure::into_own(failure)))
    }

    fn exception(&self, vcpu: u32) -> Result<EndlessError, EndlessError> {
        let field = |field| self.low.field(vcpu, field);
        Ok(EndlessError::Exception {
            vcpu,
            vector: field(Field::ExceptionVector)?,
            error_code: field(Field::ExceptionErrorCode)?,
            cr2: field(Field::ExceptionCr2)?,
            rip: field(Field::ExceptionRip)?,
        })
    }
}
