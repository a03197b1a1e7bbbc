//! One run of a machine: the pool, the watchdog, the result.

use std::sync::Arc;
use std::time::{Duration, Instant};

use pagetide_kvm::Vcpu;
use pagetide_memory::GuestAddress;
use pagetide_vmm::{PoolEnd, VcpuHooks, VcpuPool};

use crate::arch;
use crate::config;
use crate::error::{GuestError, MachineError};
use crate::layout::TABLES;
use crate::machine::Machine;
use crate::outcome::{LatencyLog, RunFailure, RunOutcome, VcpuOutcome, VcpuState};
use crate::pattern;
use crate::payload::{Mode, Word};
use crate::walk::{Walk, Walked};
use crate::workload::{Touch, Workload};

/// The page that a vCPU touches when it is entered again, after an exit of a [`Touch::Step`] walk; None
/// if its registers cannot be read.
#[must_use]
pub fn next_touch(vcpu: &Vcpu) -> Option<GuestAddress> {
    arch::position(vcpu).map(|(_, gpa)| GuestAddress(gpa))
}

impl Machine {
    /// Runs a workload on every vCPU, each on a thread of its own (`vcpuN`), and waits for the end. vCPUs
    /// start from the beginning, whatever an earlier run has left; the content of the data region and its
    /// mappings stay as they are. `hooks` get all exits but the guest's reports.
    ///
    /// # Errors
    /// [`RunFailure`] has the first failure, which stopped all vCPUs. The call does not hang: a run without
    /// progress ends after the configured time.
    pub fn run(
        &mut self,
        workload: &Workload,
        hooks: Arc<dyn VcpuHooks>,
    ) -> Result<RunOutcome, RunFailure> {
        self.reset(workload).map_err(RunFailure::before_start)?;
        let count = if workload.alone { 1 } else { self.vcpus.len() };
        let pages = self.walk(0, workload).pages.get();
        let walk = Arc::new(Walk::new(hooks, Arc::clone(&self.bare.low), count, pages));
        let vcpus = self.vcpus.iter_mut().take(count);
        let vcpus = vcpus.filter_map(Option::take).collect();
        let hooks: Arc<dyn VcpuHooks> = Arc::<Walk>::clone(&walk);
        let pool = VcpuPool::start(vcpus, hooks, &self.bare.stopper, &self.pool)
            .map_err(RunFailure::before_start)?;
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
            if let Some(place) = self.vcpus.get_mut(vcpu.id() as usize) {
                *place = Some(vcpu);
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
            touched: self.bare.low.word(vcpu.id(), Word::Steps).unwrap_or(0),
            pages,
            done,
        }
    }

    /// Sets vCPUs and parameter pages to the start.
    fn reset(&self, workload: &Workload) -> Result<(), MachineError> {
        if workload.alone && !self.config.alone {
            return Err(MachineError::NoRoomAlone);
        }
        for (id, vcpu) in (0..).zip(&self.vcpus) {
            let vcpu = vcpu.as_ref().ok_or(MachineError::LostVcpu { vcpu: id })?;
            arch::reset(vcpu, &self.bare.low.layout, arch::WORKLOAD)?;
            self.set_parameters(id, workload)?;
        }
        Ok(())
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
        let layout = &self.bare.low.layout;
        let base = workload.elsewhere.map_or(walk.base, |gpa| gpa.0);
        let words = [
            (Word::Base, base),
            (Word::Pages, walk.pages.get()),
            (Word::StrideBytes, walk.stride_bytes),
            (Word::Mask, permutation.mask),
            (Word::MultiplierA, permutation.multiplier_a),
            (Word::Shift, permutation.shift),
            (Word::MultiplierB, permutation.multiplier_b),
            (Word::Mode, mode as u64),
            (Word::Seed, seed),
            (Word::PatternMultiplier, multiplier),
            (Word::Tables, TABLES),
            (Word::TablesBytes, layout.tables_bytes()),
            (Word::Table, layout.table(vcpu.into())),
            (Word::TableBytes, layout.table_bytes()),
            (Word::Steps, 0),
            (Word::Wrong, 0),
        ];
        self.bare.low.set(vcpu, &words)
    }

    /// Waits until the run is over, and stops it if there is no progress.
    fn supervise(&self, pool: &VcpuPool) {
        let timeout = self.config.stall_timeout;
        let interval = (timeout / 4).clamp(Duration::from_millis(10), Duration::from_secs(1));
        // Touches and exits: faults that a userfaultfd delivers are no exits.
        let progress = || {
            let touches = self.bare.sum(Word::Steps).unwrap_or(0);
            pool.exits().wrapping_add(touches)
        };
        let (mut last, mut moved) = (progress(), Instant::now());
        while !pool.wait(interval) {
            let now = progress();
            if now != last {
                (last, moved) = (now, Instant::now());
            } else if moved.elapsed() >= timeout {
                let stalled = GuestError::Stalled {
                    vcpu: None,
                    timeout,
                };
                self.bare.stopper.stop(stalled);
            }
        }
    }

    /// The outcome of a run without a failure, if every vCPU did and read what it should.
    fn conclude(
        &self,
        states: &[VcpuState],
        walked: Vec<Option<Walked>>,
    ) -> Result<RunOutcome, GuestError> {
        let mut vcpus = Vec::new();
        for (state, walked) in states.iter().zip(walked) {
            let (vcpu, touched, pages) = (state.vcpu, state.touched, state.pages);
            self.bare.check_words(vcpu)?;
            let walked = walked.filter(|_| touched == pages);
            let walked = walked.ok_or(GuestError::Incomplete {
                vcpu,
                touched,
                pages,
            })?;
            let latencies = LatencyLog {
                cycles: self.bare.low.log(vcpu, touched)?,
                tsc_khz: self.tsc_khz,
            };
            vcpus.push(VcpuOutcome {
                elapsed: walked.elapsed,
                touches: touched,
                counts: walked.counts,
                faulted: walked.faulted,
                latencies,
            });
        }
        let elapsed = vcpus.iter().map(|vcpu| vcpu.elapsed).max();
        Ok(RunOutcome {
            elapsed: elapsed.unwrap_or_default(),
            vcpus,
        })
    }
}
