//! What all benchmarks have in common: runs of several series, interleaved, each of them tried again
//! where the lab loses runs; and what a report says of where its figures come from.

pub(crate) mod notes;
mod options;
mod origin;
mod pairs;
mod schedule;

pub use options::{MAX_RUNS, OptionError, UnknownName};
pub(crate) use options::{by_name, check_list, check_runs, check_vcpus, list, named};
pub use origin::{Environment, Origin};
pub(crate) use pairs::{InRound, paired};

use std::error::Error;
use std::fmt;

use crate::latency::LatencyLogError;
use crate::progress::Progress;
use crate::timing::Timing;
use crate::told;

/// How often one run is tried before the benchmark gives up on it.
pub const ATTEMPTS: u32 = 5;

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
    /// A run claims to have taken no time or touched no page, so there is no rate.
    #[error("{place}: {pages} pages in {elapsed_ns} ns make no rate")]
    NoRate {
        /// Which run.
        place: Place,
        /// Pages made present.
        pages: u64,
        /// Time taken.
        elapsed_ns: u64,
    },
    /// Times could not be recorded.
    #[error(transparent)]
    Latency(#[from] LatencyLogError),
}

/// What is to be measured.
pub(crate) struct Rounds<'plan, S> {
    /// The numbers of vCPUs.
    pub(crate) vcpus: &'plan [u32],
    /// What is compared at each of them.
    pub(crate) series: &'plan [S],
    /// Measured rounds, after one that warms up.
    pub(crate) runs: u32,
    /// Whether a run may be lost.
    pub(crate) timing: Timing,
}

/// One run's turn.
#[derive(Debug, Clone, Copy)]
pub struct Turn<S> {
    /// The round; 0 warms up.
    pub round: u32,
    /// Number of vCPUs.
    pub vcpus: u32,
    /// The series.
    pub series: S,
    /// Another one for every run, from 1; the same when a lost run is repeated.
    pub number: u64,
}

impl<S: Copy + fmt::Display> Turn<S> {
    /// Whether the run counts.
    #[must_use]
    pub fn measured(&self) -> bool {
        self.round > 0
    }

    /// Where it stands, for messages.
    #[must_use]
    pub fn place(&self) -> Place {
        Place {
            round: self.round,
            vcpus: self.vcpus,
            series: self.series.to_string(),
        }
    }
}

/// What the runs of one series at one number of vCPUs gave.
#[derive(Debug)]
pub struct Measured<S, C> {
    /// Number of vCPUs.
    pub vcpus: u32,
    /// The series.
    pub series: S,
    /// Runs that were lost and repeated, also while warming up.
    pub lost_runs: u32,
    /// What the benchmark collected.
    pub sum: C,
}

/// Does all runs by `run`. What each gives goes to `collect`, with what was collected before of the
/// same series at the same number of vCPUs. The results come in the order of the plan.
///
/// The first run that fails ends the benchmark; so does one that is lost, except in the lab's
/// parallel mode, where it is tried up to [`ATTEMPTS`] times.
pub(crate) fn measure<S: Copy + fmt::Display, T, C>(
    rounds: &Rounds<'_, S>,
    progress: &mut dyn Progress,
    mut run: impl FnMut(&Turn<S>, &mut dyn Progress) -> Result<T, RunFailure>,
    empty: impl Fn() -> Result<C, BenchError>,
    mut collect: impl FnMut(&mut C, &Turn<S>, &T) -> Result<(), BenchError>,
) -> Result<Vec<Measured<S, C>>, BenchError> {
    let (vcpus, series) = (rounds.vcpus, rounds.series);
    progress.begin(schedule::length(vcpus.len(), series.len(), rounds.runs));
    let mut measured = Vec::new();
    for &vcpus in vcpus {
        for &series in series {
            let (lost_runs, sum) = (0, empty()?);
            measured.push(Measured {
                vcpus,
                series,
                lost_runs,
                sum,
            });
        }
    }
    let steps = schedule::schedule(vcpus.len(), series.len(), rounds.runs);
    for (number, step) in (1u64..).zip(steps) {
        let entry = &mut measured[step.vcpus * series.len() + step.series];
        let turn = Turn {
            round: step.round,
            vcpus: entry.vcpus,
            series: entry.series,
            number,
        };
        progress.step(&turn.place().to_string());
        let (sample, lost) = attempt(&turn, rounds.timing, progress, &mut run)?;
        entry.lost_runs += lost;
        collect(&mut entry.sum, &turn, &sample)?;
        progress.done();
    }
    progress.end();
    Ok(measured)
}

/// Does one run, again if it is lost where that may happen. Returns how often it was lost.
fn attempt<S: Copy + fmt::Display, T>(
    turn: &Turn<S>,
    timing: Timing,
    progress: &mut dyn Progress,
    run: &mut impl FnMut(&Turn<S>, &mut dyn Progress) -> Result<T, RunFailure>,
) -> Result<(T, u32), BenchError> {
    let mut lost = 0;
    loop {
        let source = match run(turn, progress) {
            Ok(sample) => return Ok((sample, lost)),
            Err(RunFailure::Lost(source)) if timing.may_lose_runs() => source,
            Err(RunFailure::Failed(source) | RunFailure::Lost(source)) => {
                let place = turn.place();
                return Err(BenchError::Run { place, source });
            }
        };
        lost += 1;
        let place = turn.place();
        if lost >= ATTEMPTS {
            return Err(BenchError::LostTooOften {
                place,
                attempts: lost,
                source,
            });
        }
        progress.message(&format!("{place}: lost, trying again ({})", told(&*source)));
    }
}

#[cfg(test)]
mod tests;
