//! One run of a machine: the pool, the watch-dog, the result.

use std::sync::Arc;
use std::time::{Duration, Instant};

use pagetide_kvm::Vcpu;
use pagetide_memory::GuestAddress;
use pagetide_vmm::{PoolEnd, VcpuHooks, VcpuPool};

use crate::arch;
use crate::config;
use crate::error::MachineError;
use crate::guest::{Field, Mode};
use crate::layout::TABLES;
use crate::machine::Machine;
use crate::outcome::{FailureCause, LatencyLog, RunFailure, RunOutcome, VcpuOutcome, VcpuState};
use crate::pattern;
use crate::walk::{Walk, Walked};
use crate::workload::{Touch, Workload};

/// The page that a vCPU touches when it is entered again, after an exit of a [`Touch::Step`] walk; None
/// if its registers cannot be read.
#[must_use]
pub fn next_touch(vcpu: &Vcpu) -> Option<GuestAddress> {
    arch::position(vcpu).map(|(_, gpa)| GuestAddress(gpa))
}

impl Machine {
    /// Runs a workload on every vCPU, each on a thread of its own (`vcpuN`), and waits for the
    /// end. vCPUs start from the beginning whatever an earlier run left behind; the content of the
    /// data region and what is mapped of it stay as they are. `hooks` get all exits but the guest's
    /// reports.
    ///
    /// # Errors
    /// [`RunFailure`] has the first cause; all other vCPUs were stopped because of it. Does not
    /// hang: a run without progress is ended after the configured time.
    pub fn run(
        &mut self,
        workload: &Workload,
        hooks: Arc<dyn VcpuHooks>,
    ) -> Result<RunOutcome, RunFailure> {
        self.reset(workload)
            .map_err(|error| RunFailure::before_start(error.into()))?;
        let walkers = if workload.alone { 1 } else { self.vcpus.len() };
        let pages = self.walk(0, workload).pages.get();
        let walk = Arc::new(Walk::new(hooks, Arc::clone(&self.low), walkers, pages));
        let seats = self.vcpus.iter_mut().take(walkers);
        let vcpus = seats.filter_map(Option::take).collect();
        let hooks: Arc<dyn VcpuHooks> = Arc::<Walk>::clone(&walk);
        let pool = VcpuPool::start(vcpus, hooks, &self.stopper, &self.pool)
            .map_err(|failure| RunFailure::before_start(failure.into()))?;
        self.supervise(&pool);
        let PoolEnd {
            vcpus,
            lost,
            failure,
        } = pool.join(self.config.stop_grace);

        let walked: Vec<_> = vcpus.iter().map(|vcpu| walk.take(vcpu.id())).collect();
        let states: Vec<_> = vcpus
            .iter()
            .zip(&walked)
            .map(|(vcpu, walked)| self.state_of(vcpu, pages, walked.is_some()))
            .collect();
        for vcpu in vcpus {
            if let Some(seat) = self.vcpus.get_mut(vcpu.id() as usize) {
                *seat = Some(vcpu);
            }
        }
        let result = match failure {
            None => self.conclude(&states, walked),
            Some(failure) => Err(failure.into_own()),
        };
        result.map_err(|cause| RunFailure {
            cause: Box::new(cause),
            vcpus: states,
            lost,
        })
    }

    fn state_of(&self, vcpu: &Vcpu, pages: u64, done: bool) -> VcpuState {
        let position = arch::position(vcpu);
        VcpuState {
            vcpu: vcpu.id(),
            rip: position.map(|(rip, _)| rip),
            gpa: position.map(|(_, gpa)| GuestAddress(gpa)),
            touched: self.low.field(vcpu.id(), Field::Touched).unwrap_or(0),
            pages,
            done,
        }
    }

    /// Puts vCPUs and parameter pages back to the start.
    fn reset(&self, workload: &Workload) -> Result<(), MachineError> {
        for (id, vcpu) in (0..).zip(&self.vcpus) {
            let vcpu = vcpu.as_ref().ok_or(MachineError::LostVcpu { vcpu: id })?;
            arch::reset(vcpu, self.low.layout())?;
        }
        if workload.alone && !self.config.alone {
            return Err(MachineError::NoRoomAlone);
        }
        (0..self.config.vcpus).try_for_each(|vcpu| self.set_parameters(vcpu, workload))
    }

    fn walk(&self, vcpu: u32, workload: &Workload) -> config::Walk {
        if workload.alone {
            self.config.walk_alone()
        } else {
            self.config.walk(vcpu)
        }
    }

    fn set_parameters(&self, vcpu: u32, workload: &Workload) -> Result<(), MachineError> {
        let (mode, seed, multiplier) = match workload.touch {
            Touch::ReadPattern(seed) => (Mode::Read, seed.get(), pattern::MULTIPLIER),
            Touch::Step(seed) => (Mode::Step, seed.get(), pattern::MULTIPLIER),
            Touch::ReadZero => (Mode::Read, 0, 0),
            Touch::Write(seed) => (Mode::Write, seed.get(), pattern::MULTIPLIER),
            Touch::Spin => (Mode::Spin, 0, 0),
        };
        let walk = self.walk(vcpu, workload);
        let permutation = workload.order.permutation(walk.pages, vcpu);
        let layout = self.low.layout();
        let fields = [
            (
                Field::Base,
                workload.elsewhere.map_or(walk.base, |gpa| gpa.0),
            ),
            (Field::Pages, walk.pages.get()),
            (Field::StrideBytes, walk.stride_bytes),
            (Field::Mask, permutation.mask),
            (Field::MultiplierA, permutation.multiplier_a),
            (Field::Shift, permutation.shift),
            (Field::MultiplierB, permutation.multiplier_b),
            (Field::Mode, mode as u64),
            (Field::Seed, seed),
            (Field::PatternMultiplier, multiplier),
            (Field::Log, layout.log(vcpu.into())),
            (Field::LogBytes, layout.log_bytes()),
            (Field::Tables, TABLES),
            (Field::TablesBytes, layout.tables_bytes()),
            (Field::Touched, 0),
            (Field::Mismatches, 0),
        ];
        fields
            .into_iter()
            .try_for_each(|(field, value)| self.low.set_field(vcpu, field, value))
    }

    /// Waits until the run is over, and ends it if nothing moves any more.
    fn supervise(&self, pool: &VcpuPool) {
        let timeout = self.config.stall_timeout;
        let interval = (timeout / 4).clamp(Duration::from_millis(10), Duration::from_secs(1));
        let mut progress = self.progress(pool);
        let mut moved = Instant::now();
        while !pool.wait(interval) {
            let now = self.progress(pool);
            if now != progress {
                (progress, moved) = (now, Instant::now());
            } else if moved.elapsed() >= timeout {
                self.stopper.stop(FailureCause::Stalled { timeout });
            }
        }
    }

    /// A number that changes whenever a vCPU exits or touches a page. Exits alone would not do:
    /// faults that a userfaultfd serves are none.
    fn progress(&self, pool: &VcpuPool) -> u64 {
        (0..self.config.vcpus)
            .filter_map(|vcpu| self.low.field(vcpu, Field::Touched).ok())
            .fold(pool.exits(), u64::wrapping_add)
    }

    /// The outcome of a run that nobody stopped, if every vCPU did and read what it should.
    fn conclude(
        &self,
        states: &[VcpuState],
        walked: Vec<Option<Walked>>,
    ) -> Result<RunOutcome, FailureCause> {
        let mut vcpus = Vec::new();
        for (state, walked) in states.iter().zip(walked) {
            self.check(state)?;
            let (vcpu, touched, pages) = (state.vcpu, state.touched, state.pages);
            let walked = walked.ok_or(FailureCause::Incomplete {
                vcpu,
                touched,
                pages,
            })?;
            vcpus.push(self.vcpu_outcome(state, walked)?);
        }
        let elapsed = vcpus
            .iter()
            .map(|vcpu| vcpu.elapsed)
            .max()
            .unwrap_or_default();
        Ok(RunOutcome { elapsed, vcpus })
    }

    fn check(&self, state: &VcpuState) -> Result<(), FailureCause> {
        let VcpuState {
            vcpu,
            touched,
            pages,
            done,
            ..
        } = *state;
        let field = |field| self.low.field(vcpu, field);
        let count = field(Field::Mismatches)?;
        if count > 0 {
            return Err(FailureCause::Mismatch {
                vcpu,
                count,
                gpa: GuestAddress(field(Field::BadGpa)?),
                found: field(Field::BadFound)?,
                expected: field(Field::BadExpected)?,
            });
        }
        if touched != pages || !done {
            return Err(FailureCause::Incomplete {
                vcpu,
                touched,
                pages,
            });
        }
        Ok(())
    }

    fn vcpu_outcome(&self, state: &VcpuState, walked: Walked) -> Result<VcpuOutcome, MachineError> {
        let cycles = self.low.log(state.vcpu, state.touched)?;
        Ok(VcpuOutcome {
            elapsed: walked.elapsed,
            touches: state.touched,
            counts: walked.counts,
            faulted: walked.faulted,
            latencies: LatencyLog {
                cycles,
                tsc_khz: self.tsc_khz,
            },
        })
    }
}
