//! What every benchmark is to those who run it: a plan that is checked, prepared and run, and a
//! description of what its runs measure.

use std::error::Error;
use std::fmt;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::latency::LatencyLogError;
use crate::model::{Collected, Column, Comparison, Quantity, Record, Sample};
use crate::noise;
use crate::one_line;
use crate::options::PlanError;
use crate::prepare::PrepareError;
use crate::progress::Progress;
use crate::report::{Environment, Report, Shown};
use crate::schedule;
use crate::timing::Timing;

/// How often one run is tried before the benchmark gives up on it.
pub const ATTEMPTS: u32 = 5;

/// A benchmark, as a plan of what to measure. As JSON it is the report's `plan`.
pub trait Benchmark: Serialize + DeserializeOwned + Clone + PartialEq + fmt::Debug + Sized {
    /// What is compared: a line of the result at each number of vCPUs. Its fields are axes of the
    /// data, by their names in JSON.
    type Series: Copy
        + PartialEq
        + fmt::Display
        + fmt::Debug
        + Serialize
        + DeserializeOwned
        + 'static;
    /// What does the runs.
    type Machines: Rig<Self>;

    /// Its name on the command line; what its files are called.
    const NAME: &'static str;
    /// What runs measure, in the order of a table of all runs.
    const QUANTITIES: &'static [Quantity];
    /// What follows from the quantities of a run.
    const COLUMNS: &'static [Column];
    /// What cells are compared with.
    const COMPARISONS: &'static [Comparison<Self::Series>];
    /// The time that rates are of, which may not be 0.
    const TIME: Option<Quantity> = None;

    /// The numbers of vCPUs to measure with.
    fn vcpus(&self) -> &[u32];

    /// The lines of the result, in their order.
    fn series(&self) -> Vec<Self::Series>;

    /// Whether a series is measured at a number of vCPUs.
    fn is_measured(&self, vcpus: u32, series: Self::Series) -> bool {
        let _ = (vcpus, series);
        true
    }

    /// Measured rounds, after one that warms up.
    fn runs(&self) -> u32;

    /// The command that measures the same.
    fn command(&self) -> String;

    /// Whether the plan makes sense in itself; whether this machine can do it is another question
    /// ([`Benchmark::prepare`]).
    ///
    /// # Errors
    /// The first thing that does not.
    fn check(&self) -> Result<(), PlanError>;

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
    fn run(&mut self, job: &Job<'_, B>, progress: &mut dyn Progress) -> Result<Sample, RunFailure>;
}

/// What a run belongs to, for error messages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The round; 0 warms up.
    pub round: u32,
    /// Number of vCPUs.
    pub vcpus: u32,
    /// The name of the series.
    pub series: String,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.round {
            0 => f.write_str("warm-up")?,
            round => write!(f, "round {round}")?,
        }
        let plural = if self.vcpus == 1 { "" } else { "s" };
        write!(f, ", {} vCPU{plural}, {}", self.vcpus, self.series)
    }
}

/// Why a run gave nothing.
#[derive(Debug, thiserror::Error)]
pub enum RunFailure {
    /// It stopped for a reason that the lab's parallel mode is known for: nothing moved any more,
    /// or the guest shut down. There it is the software CPU's doing, and the run is repeated;
    /// anywhere else it is a failure.
    #[error(transparent)]
    Lost(Box<dyn Error + Send + Sync>),
    /// It failed, and would again.
    #[error(transparent)]
    Failed(Box<dyn Error + Send + Sync>),
}

impl RunFailure {
    /// One that is lost if `lost`, and failed otherwise.
    pub(crate) fn of(error: impl Error + Send + Sync + 'static, lost: bool) -> Self {
        if lost {
            Self::Lost(Box::new(error))
        } else {
            Self::failed(error)
        }
    }

    /// A failure that would come again.
    pub(crate) fn failed(error: impl Error + Send + Sync + 'static) -> Self {
        Self::Failed(Box::new(error))
    }
}

/// Why a benchmark ended without a result.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// A run failed.
    #[error("{place}")]
    Run {
        /// Which run.
        place: Place,
        /// Why.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// A run was lost every time it was tried.
    #[error("{place}: lost {attempts} times")]
    LostTooOften {
        /// Which run.
        place: Place,
        /// How often it was tried.
        attempts: u32,
        /// What was seen the last time.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// A run claims to have taken no time, so there is no rate.
    #[error("{place}: {quantity} is 0, which makes no rate")]
    NoTime {
        /// Which run.
        place: Place,
        /// The time.
        quantity: &'static str,
    },
    /// Times could not be recorded.
    #[error(transparent)]
    Latency(#[from] LatencyLogError),
    /// The data could not be put together.
    #[error("cannot put the result together")]
    Data(#[from] serde_json::Error),
}

/// Runs everything that `plan` names on `rig`, interleaved.
///
/// # Errors
/// The first run that fails ends the benchmark; so does one that is lost, except in the lab's
/// parallel mode, where it is tried up to [`ATTEMPTS`] times.
pub fn run<B: Shown>(
    plan: &B,
    rig: &mut dyn Rig<B>,
    environment: Environment,
    progress: &mut dyn Progress,
) -> Result<Report<B>, BenchError> {
    let (vcpus, series) = (plan.vcpus(), plan.series());
    let steps = || {
        let all = schedule::schedule(vcpus.len(), series.len(), plan.runs());
        all.filter(|step| plan.is_measured(vcpus[step.vcpus], series[step.series]))
    };
    progress.begin(steps().map(|_| 1).sum());
    let mut collected = vec![Collected::default(); vcpus.len() * series.len()];
    for (seed, step) in (1u64..).zip(steps()) {
        let job = Job {
            plan,
            vcpus: vcpus[step.vcpus],
            series: series[step.series],
            seed,
        };
        let place = Place {
            round: step.round,
            vcpus: job.vcpus,
            series: job.series.to_string(),
        };
        progress.step(&place.to_string());
        let (sample, lost) = attempt(&job, &place, rig, &environment, progress)?;
        check_time::<B>(&sample, place)?;
        let cell = &mut collected[step.vcpus * series.len() + step.series];
        cell.lost_runs += lost;
        // The first round warms up.
        if step.round > 0 {
            cell.runs.push((step.round, sample));
        }
        progress.done();
    }
    progress.end();
    let mut records = Vec::new();
    let cells = vcpus
        .iter()
        .flat_map(|&vcpus| series.iter().map(move |one| (vcpus, one)));
    for ((vcpus, one), cell) in cells.zip(&collected) {
        if !plan.is_measured(vcpus, *one) {
            continue;
        }
        records.extend(cell.records(&one.to_string(), &axes(vcpus, one)?));
    }
    let lost = collected.iter().map(|cell| cell.lost_runs).sum();
    Ok(Report::new(plan.clone(), records, lost, environment)?)
}

/// A cell's place in the data.
fn axes(vcpus: u32, series: &impl Serialize) -> Result<Map<String, Value>, serde_json::Error> {
    let mut axes = Map::from_iter([("vcpus".to_owned(), vcpus.into())]);
    if let Value::Object(fields) = serde_json::to_value(series)? {
        axes.extend(fields);
    }
    Ok(axes)
}

fn check_time<B: Benchmark>(sample: &Sample, place: Place) -> Result<(), BenchError> {
    match B::TIME {
        Some(time) if sample.get(time).is_none_or(|ns| ns <= 0.0) => {
            let quantity = time.name;
            Err(BenchError::NoTime { place, quantity })
        }
        _ => Ok(()),
    }
}

/// Does one run, again if it is lost where that may happen. Returns how often it was lost.
fn attempt<B: Benchmark>(
    job: &Job<'_, B>,
    place: &Place,
    rig: &mut dyn Rig<B>,
    environment: &Environment,
    progress: &mut dyn Progress,
) -> Result<(Sample, u32), BenchError> {
    let timing = environment.timing;
    let mut lost = 0;
    loop {
        let watch = environment
            .watches_cpus
            .then(|| noise::Watch::start(timing));
        let place = place.clone();
        let source = match rig.run(job, progress) {
            Ok(sample) => {
                let sample = match watch {
                    Some(watch) => watch.end(sample),
                    None => sample,
                };
                return Ok((sample, lost));
            }
            Err(RunFailure::Lost(source)) if timing.may_lose_runs() => source,
            Err(RunFailure::Failed(source) | RunFailure::Lost(source)) => {
                return Err(BenchError::Run { place, source });
            }
        };
        lost += 1;
        if lost >= ATTEMPTS {
            return Err(BenchError::LostTooOften {
                place,
                attempts: lost,
                source,
            });
        }
        progress.message(&format!(
            "{place}: lost, trying again ({})",
            one_line(&*source)
        ));
    }
}

/// Records that sum up columns and comparisons, for readers of the data who do not compute them.
pub(crate) fn summaries<B: Benchmark>(
    records: &[Record],
    timing: Timing,
) -> Result<Vec<Record>, serde_json::Error> {
    let cells = crate::model::cells::<B::Series>(records)?;
    let mut summaries = Vec::new();
    for cell in &cells {
        let axes = axes(cell.vcpus, &cell.series)?;
        let mut push = |quantity: &str, unit: &str, figures: &[(&str, f64)]| {
            summaries.extend(figures.iter().map(|&(over, value)| Record {
                run: None,
                over_runs: Some(over.to_owned()),
                series: cell.series.to_string(),
                axes: axes.clone(),
                quantity: quantity.to_owned(),
                unit: unit.to_owned(),
                value,
                text: None,
            }));
        };
        for column in B::COLUMNS.iter().filter(|column| column.is_of(timing)) {
            if let Some(spread) = cell.spread(*column) {
                push(column.name, column.unit, &spread.figures());
            }
        }
        for comparison in B::COMPARISONS.iter().filter(|one| one.column.is_of(timing)) {
            if let Some(ratio) = comparison.of(cell, &cells) {
                push(comparison.name, "ratio", &ratio.paired.figures());
                let of_medians = [("of_medians", ratio.of_medians)];
                push(comparison.name, "ratio", &of_medians);
            }
        }
    }
    Ok(summaries)
}

#[cfg(test)]
#[path = "benchmark_tests.rs"]
pub(crate) mod tests;
