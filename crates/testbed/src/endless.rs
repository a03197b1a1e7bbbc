//! vCPUs that run a payload until the host stops them: what the walkers and the cycler share.
//!
//! The payload is code at [`PAYLOAD`]. It looks at the control page after each step, and reports its end.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use pagetide_kvm::{Exit, Vcpu};
use pagetide_memory::Region;
use pagetide_vmm::{HookError, Next, PoolConfig, PoolVcpu, VcpuHooks, VcpuPool};

use crate::arch;
use crate::bare::{Bare, exception};
use crate::config;
use crate::error::{GuestError, MachineError};
use crate::layout::PAYLOAD;
use crate::payload::{Control, PORT, Report, Word};

/// How long the threads have to end.
const GRACE: Duration = Duration::from_secs(10);

/// A machine for such vCPUs.
#[derive(Debug)]
pub(crate) struct Endless {
    pub(crate) bare: Bare,
    stall_timeout: Duration,
    /// Empty once they run.
    vcpus: Mutex<Vec<Vcpu>>,
}

impl Endless {
    /// Creates the VM over the data memory. Each vCPU has a table of `table_bytes` bytes, and may take no
    /// longer than `stall_timeout` for a step. `prepare` sets up each vCPU, before any runs.
    pub(crate) fn new(
        vcpus: u32,
        data: Arc<Region>,
        payload: &[u8],
        table_bytes: u64,
        stall_timeout: Duration,
        mut prepare: impl FnMut(&Bare, &Vcpu) -> Result<(), MachineError>,
    ) -> Result<Self, MachineError> {
        let entries = table_bytes.div_ceil(4);
        let bytes = data.bytes();
        let layout = |max, limit| config::layout(vcpus, bytes, entries, max, limit);
        let (bare, vcpus) = Bare::new(vcpus, layout, |_| Ok(data), payload)?;
        for vcpu in &vcpus {
            arch::reset(vcpu, &bare.low.layout, PAYLOAD)?;
            prepare(&bare, vcpu)?;
        }
        Ok(Self {
            bare,
            stall_timeout,
            vcpus: Mutex::new(vcpus),
        })
    }

    /// Starts a thread for each vCPU, and waits until each has completed a round. `hooks` leave reports to
    /// [`Endless::report`]. Fails the second time, because there are no vCPUs left.
    pub(crate) fn start(&self, hooks: Arc<dyn VcpuHooks>) -> Result<VcpuPool, GuestError> {
        let vcpus = &mut *self.vcpus.lock().unwrap_or_else(PoisonError::into_inner);
        let (vcpus, config) = (std::mem::take(vcpus), PoolConfig::default());
        let pool = VcpuPool::start(vcpus, hooks, &self.bare.stopper, &config)?;
        self.await_each(Word::Rounds, 1)?;
        Ok(pool)
    }

    /// Stops the vCPUs, and waits until their threads have ended.
    pub(crate) fn stop(&self, pool: VcpuPool) -> Result<(), GuestError> {
        self.bare.low.set_control(Control::Stop, 1)?;
        let failure = pool.join(GRACE).failure;
        failure.map_or(Ok(()), |failure| Err(failure.into_own()))
    }

    /// Waits until a word of each vCPU has grown by `more`.
    pub(crate) fn await_each(&self, word: Word, more: u64) -> Result<(), GuestError> {
        let read = |vcpu, word| self.bare.low.word(vcpu, word);
        let targets: Vec<u64> = (0..self.bare.count)
            .map(|vcpu| Ok(read(vcpu, word)? + more))
            .collect::<Result<_, MachineError>>()?;
        let mut pause = Duration::from_micros(20);
        for (vcpu, target) in (0..).zip(targets) {
            let (mut last_steps, mut moved) = (0, Instant::now());
            while read(vcpu, word)? < target {
                self.check()?;
                let steps = read(vcpu, Word::Steps)?;
                if steps != last_steps {
                    (last_steps, moved) = (steps, Instant::now());
                }
                let timeout = self.stall_timeout;
                if moved.elapsed() > timeout {
                    let vcpu = Some(vcpu);
                    return Err(GuestError::Stalled { vcpu, timeout });
                }
                thread::sleep(pause);
                pause = (pause * 2).min(Duration::from_millis(1));
            }
        }
        Ok(())
    }

    /// Returns the first failure of a vCPU, once.
    pub(crate) fn check(&self) -> Result<(), GuestError> {
        let failure = self.bare.stopper.take_failure();
        failure.map_or(Ok(()), |failure| Err(failure.into_own()))
    }

    /// Handles a report of the guest; no other exit is expected.
    pub(crate) fn report(&self, vcpu: &PoolVcpu<'_>, exit: Exit) -> Result<Next, HookError> {
        let Exit::IoOut { port: PORT, data } = exit else {
            return Ok(Next::Unexpected);
        };
        match Report::decode(data) {
            Some(Report::Done) => Ok(Next::Leave),
            Some(Report::Exception) => Err(exception(&self.bare.low, vcpu.id()).into()),
            _ => Ok(Next::Unexpected),
        }
    }
}
