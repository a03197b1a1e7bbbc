//! One run of a machine: threads, watch-dog, result.

use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use pagetide_kvm::Vcpu;
use pagetide_memory::GuestAddress;

use crate::arch;
use crate::config::Walk;
use crate::control::Control;
use crate::error::MachineError;
use crate::guest::{Field, Mode};
use crate::handler::FaultHandler;
use crate::layout::TABLES;
use crate::machine::Machine;
use crate::outcome::{FailureCause, LatencyLog, RunFailure, RunOutcome, VcpuOutcome, VcpuState};
use crate::pattern;
use crate::vcpu_thread::{self, Counts, Ended, Job};
use crate::workload::{Touch, Workload};

/// How often the threads of a failed run are kicked until they have come back.
const KICK_INTERVAL: Duration = Duration::from_millis(50);

type Thread = (u32, JoinHandle<Ended>);

impl Machine {
    /// Runs a workload on every vCPU, each on a thread of its own (`vcpuN`), and waits for the
    /// end. vCPUs start from the beginning whatever an earlier run left behind; the content of the
    /// data region and what is mapped of it stay as they are.
    ///
    /// # Errors
    /// [`RunFailure`] has the first cause; all other vCPUs were stopped because of it. Does not
    /// hang: a run without progress is ended after the configured time.
    pub fn run(
        &mut self,
        workload: &Workload,
        handler: Arc<dyn FaultHandler>,
    ) -> Result<RunOutcome, RunFailure> {
        let not_ready = |error| RunFailure::before_start(FailureCause::Machine(error));
        self.reset(workload).map_err(not_ready)?;
        let walkers = if workload.alone { 1 } else { self.vcpus.len() };
        let vcpus = self.vcpus.iter().take(walkers).flatten();
        let kicks = vcpus.map(Vcpu::kick_handle).collect();
        let control = Arc::new(Control::new(handler, kicks));
        self.stopper
            .begin(&control)
            .map_err(|cause| RunFailure::before_start(FailureCause::Stopped(cause)))?;
        let threads = self.start(&control, workload, walkers);
        let all_ended = self.supervise(&control, threads.len());
        self.stopper.end();
        let (mut ended, lost) = collect(threads, all_ended);
        let result = match first_cause(control.take_failure(), &lost) {
            None => self.conclude(&mut ended),
            Some(cause) => Err(cause),
        };
        let states = ended.iter().map(|end| end.state).collect();
        for end in ended.drain(..) {
            let id = end.vcpu.id() as usize;
            if let Some(seat) = self.vcpus.get_mut(id) {
                *seat = Some(end.vcpu);
            }
        }
        result.map_err(|cause| RunFailure {
            cause: Box::new(cause),
            vcpus: states,
            lost,
        })
    }

    /// Puts vCPUs and parameter pages back to the start.
    fn reset(&mut self, workload: &Workload) -> Result<(), MachineError> {
        for (id, vcpu) in (0..).zip(&mut self.vcpus) {
            let vcpu = vcpu.as_mut().ok_or(MachineError::LostVcpu { vcpu: id })?;
            vcpu.forget_kicks();
            arch::reset(vcpu, self.low.layout())?;
        }
        if workload.alone && !self.config.alone {
            return Err(MachineError::NoRoomAlone);
        }
        (0..self.config.vcpus).try_for_each(|vcpu| self.set_parameters(vcpu, workload))
    }

    fn walk(&self, vcpu: u32, workload: &Workload) -> Walk {
        if workload.alone {
            self.config.walk_alone()
        } else {
            self.config.walk(vcpu)
        }
    }

    fn set_parameters(&self, vcpu: u32, workload: &Workload) -> Result<(), MachineError> {
        let (mode, seed, multiplier) = match workload.touch {
            Touch::ReadPattern(seed) => (Mode::Read, seed.get(), pattern::MULTIPLIER),
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

    /// Starts a thread for each of the first `walkers` vCPUs. If that fails, the run has failed and the rest, which would
    /// only wait for each other, is not started.
    fn start(
        &mut self,
        control: &Arc<Control>,
        workload: &Workload,
        walkers: usize,
    ) -> Vec<Thread> {
        let mut threads = Vec::new();
        for (id, place) in (0..).zip(0..walkers) {
            let pages = self.walk(id, workload).pages.get();
            let Some(vcpu) = self.vcpus.get_mut(place).and_then(Option::take) else {
                continue;
            };
            let job = Job {
                control: Arc::clone(control),
                low: Arc::clone(&self.low),
                pages,
                cpu: self.cpus.get(id as usize % self.cpus.len().max(1)).copied(),
            };
            let body = move || vcpu_thread::run(vcpu, &job);
            match thread::Builder::new().name(format!("vcpu{id}")).spawn(body) {
                Ok(thread) => threads.push((id, thread)),
                Err(source) => {
                    control.fail(FailureCause::Spawn { vcpu: id, source });
                    break;
                }
            }
        }
        threads
    }

    /// Waits until the threads have ended, and ends the run if nothing moves any more. Returns
    /// whether all threads ended.
    fn supervise(&self, control: &Control, threads: usize) -> bool {
        let timeout = self.config.stall_timeout;
        let interval = (timeout / 4).clamp(Duration::from_millis(10), Duration::from_secs(1));
        let mut progress = self.progress(control);
        let mut moved = Instant::now();
        while !control.is_stopped() {
            if control.wait_for_ends(threads, interval) {
                return true;
            }
            let now = self.progress(control);
            if now != progress {
                (progress, moved) = (now, Instant::now());
            } else if moved.elapsed() >= timeout {
                control.fail(FailureCause::Stalled { timeout });
            }
        }
        let stopped = Instant::now();
        while stopped.elapsed() < self.config.stop_grace {
            if control.wait_for_ends(threads, KICK_INTERVAL) {
                return true;
            }
            // A signal that a handler's own waiting swallowed does not come twice by itself.
            control.kick_all();
        }
        false
    }

    /// A number that changes whenever a vCPU exits or touches a page. Exits alone would not do:
    /// faults that a userfaultfd serves are none.
    fn progress(&self, control: &Control) -> u64 {
        (0..self.config.vcpus)
            .filter_map(|vcpu| self.low.field(vcpu, Field::Touched).ok())
            .fold(control.exits(), u64::wrapping_add)
    }

    /// The outcome of a run that nobody stopped, if every vCPU did and read what it should.
    fn conclude(&self, ended: &mut [Ended]) -> Result<RunOutcome, FailureCause> {
        let mut vcpus = Vec::new();
        for Ended { state, counts, .. } in ended {
            self.check(state)?;
            let counts = counts.take().unwrap_or_default();
            vcpus.push(
                self.vcpu_outcome(state, counts)
                    .map_err(FailureCause::Machine)?,
            );
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
        let field = |field| self.low.field(vcpu, field).map_err(FailureCause::Machine);
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

    fn vcpu_outcome(&self, state: &VcpuState, counts: Counts) -> Result<VcpuOutcome, MachineError> {
        let cycles = self.low.log(state.vcpu, state.touched)?;
        Ok(VcpuOutcome {
            elapsed: counts.elapsed,
            touches: state.touched,
            exits: counts.exits,
            faults: counts.faults,
            faulted: counts.faulted,
            interruptions: counts.interruptions,
            pre_faulted_bytes: counts.pre_faulted_bytes,
            pre_fault_failures: counts.pre_fault_failures,
            latencies: LatencyLog {
                cycles,
                tsc_khz: self.tsc_khz,
            },
        })
    }
}

/// Why the run failed, if it did. A thread that gave nothing back has failed also if nobody said so.
fn first_cause(told: Option<FailureCause>, lost: &[u32]) -> Option<FailureCause> {
    told.or_else(|| lost.first().map(|&vcpu| FailureCause::NoResult { vcpu }))
}

/// Joins the threads that have ended, and names those that have not.
fn collect(threads: Vec<Thread>, all_ended: bool) -> (Vec<Ended>, Vec<u32>) {
    let mut ended = Vec::new();
    let mut lost = Vec::new();
    for (id, thread) in threads {
        // Where all have said that they end, joining waits for an instant at most.
        if !all_ended && !thread.is_finished() {
            lost.push(id);
            continue;
        }
        match thread.join() {
            Ok(end) => ended.push(end),
            // Only a panic outside the guarded part; the vCPU went with it.
            Err(_) => lost.push(id),
        }
    }
    (ended, lost)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_gives_nothing_back_is_a_failure() {
        let thread = thread::spawn(|| -> Ended { std::panic::resume_unwind(Box::new("gone")) });
        let (ended, lost) = collect(vec![(3, thread)], true);
        assert!(ended.is_empty());
        assert!(matches!(
            first_cause(None, &lost),
            Some(FailureCause::NoResult { vcpu: 3 })
        ));
        let told = first_cause(Some(FailureCause::NoResult { vcpu: 1 }), &lost);
        assert!(matches!(told, Some(FailureCause::NoResult { vcpu: 1 })));
        assert!(first_cause(None, &[]).is_none());
    }
}
