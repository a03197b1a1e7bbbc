//! What every benchmark is to those who run it: a plan that is checked, prepared and run, and that
//! says the rest of what is its own.

use std::error::Error;
use std::fmt;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::prepare::PrepareError;
use crate::progress::Progress;
use crate::report::Report;
use crate::rounds::{self, BenchError, Environment, Measured, Rounds, RunFailure, Turn};
use crate::timing::Timing;

/// A benchmark, as a plan of what to measure. As JSON it is the report's `plan`.
pub trait Benchmark: Serialize + DeserializeOwned + Sized {
    /// What is compared: a line of the result at each number of vCPUs.
    type Series: Copy + fmt::Display;
    /// Why a plan makes no sense.
    type PlanError: Error + 'static;
    /// What runs are done on.
    type Machines: Rig<Self>;
    /// What one run gives.
    type Sample;
    /// What the runs of one series at one number of vCPUs give, as they come in.
    type Sum;
    /// What all runs give.
    type Report: Report;

    /// The numbers of vCPUs to measure with.
    fn vcpus(&self) -> &[u32];

    /// The lines of the result, in their order.
    fn series(&self) -> Vec<Self::Series>;

    /// Measured rounds, after one that warms up.
    fn runs(&self) -> u32;

    /// The command that measures the same.
    fn command(&self) -> String;

    /// Whether the plan makes sense in itself; whether this machine can do it is another question
    /// ([`Benchmark::prepare`]).
    ///
    /// # Errors
    /// The first thing that does not.
    fn check(&self) -> Result<(), Self::PlanError>;

    /// Finds out whether the plan can be run here, and returns warnings about what is doubtful. If
    /// the kernel lacks what a method needs, that is an error if `methods_asked`; otherwise the
    /// method may be taken out of the plan, and a warning says so. Nothing of what is tried stays.
    ///
    /// # Errors
    /// Says what is missing and how to get it.
    fn prepare(
        &mut self,
        methods_asked: bool,
        timing: Timing,
    ) -> Result<(Self::Machines, Vec<String>), PrepareError>;

    /// Nothing collected yet.
    ///
    /// # Errors
    /// Times cannot be recorded.
    fn empty() -> Result<Self::Sum, BenchError>;

    /// Takes what a run gave. Runs that warm up come as well.
    ///
    /// # Errors
    /// The sample makes no sense, which ends the benchmark.
    fn collect(
        &self,
        sum: &mut Self::Sum,
        turn: &Turn<Self::Series>,
        sample: &Self::Sample,
    ) -> Result<(), BenchError>;

    /// Makes the report of what was collected.
    fn sum_up(
        &self,
        measured: Vec<Measured<Self::Series, Self::Sum>>,
        environment: Environment,
    ) -> Self::Report;

    /// The largest number of vCPUs in the plan.
    #[must_use]
    fn most_vcpus(&self) -> u32 {
        self.vcpus().iter().copied().max().unwrap_or(0)
    }
}

/// One run to do.
#[derive(Debug)]
pub struct Job<'plan, B: Benchmark> {
    /// Everything that is the same in all runs.
    pub plan: &'plan B,
    /// Number of vCPUs.
    pub vcpus: u32,
    /// What to measure.
    pub series: B::Series,
    /// Selects the content of memory, so that no run can be satisfied by an earlier one's.
    pub seed: u64,
}

/// Does runs.
pub trait Rig<B: Benchmark> {
    /// Does one run and verifies afterwards that memory holds what it should. What is worth a line on
    /// the way goes to `progress`.
    ///
    /// # Errors
    /// The run hung or failed, or memory does not hold what it should.
    fn run(
        &mut self,
        job: &Job<'_, B>,
        progress: &mut dyn Progress,
    ) -> Result<B::Sample, RunFailure>;
}

/// Runs everything that `plan` names on `rig`.
///
/// # Errors
/// The first run that fails ends the benchmark; so does one that is lost, except in the lab's
/// parallel mode, where it is tried up to [`rounds::ATTEMPTS`] times.
pub fn run<B: Benchmark>(
    plan: &B,
    rig: &mut dyn Rig<B>,
    environment: Environment,
    progress: &mut dyn Progress,
) -> Result<B::Report, BenchError> {
    let rounds = Rounds {
        vcpus: plan.vcpus(),
        series: &plan.series(),
        runs: plan.runs(),
        timing: environment.timing,
    };
    let run = |turn: &Turn<B::Series>, progress: &mut dyn Progress| {
        let job = Job {
            plan,
            vcpus: turn.vcpus,
            series: turn.series,
            seed: turn.number,
        };
        rig.run(&job, progress)
    };
    let collect = |sum: &mut B::Sum, turn: &Turn<B::Series>, sample: &B::Sample| {
        plan.collect(sum, turn, sample)
    };
    let measured = rounds::measure(&rounds, progress, run, B::empty, collect)?;
    Ok(plan.sum_up(measured, environment))
}
