//! Runs a plan and sums up what came out.

use std::collections::HashMap;
use std::error::Error;

use super::notes::notes;
use super::plan::{Plan, Series};
use super::published::Published;
use super::report::{PagingReport, PlanRecord, Point, RunRecord, SCHEMA, compare};
use super::rig::{Job, Rig, RunFailure, Sample};
use super::schedule::{self, Step};
use crate::facts::Facts;
use crate::latency::{LatencyLog, LatencyLogError};
use crate::progress::Progress;
use crate::stats::Spread;
use crate::timing::Timing;
use crate::told;

/// How often one run is tried before the benchmark gives up on it.
pub const ATTEMPTS: u32 = 5;

/// What a run belongs to, for error messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The round; 0 warms up.
    pub round: u32,
    /// Number of vCPUs.
    pub vcpus: u32,
    /// The series.
    pub series: Series,
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            round,
            vcpus,
            series,
        } = self;
        let plural = if *vcpus == 1 { "" } else { "s" };
        match round {
            0 => write!(f, "warm-up, {vcpus} vCPU{plural}, {series}"),
            _ => write!(f, "round {round}, {vcpus} vCPU{plural}, {series}"),
        }
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
    /// The latencies could not be recorded.
    #[error(transparent)]
    Latency(#[from] LatencyLogError),
}

/// The environment that the caller knows of.
#[derive(Debug, Clone)]
pub struct Environment {
    /// What a nanosecond means.
    pub timing: Timing,
    /// Where the figures come from.
    pub facts: Facts,
    /// Runs of the whole benchmark that were lost before this one.
    pub lost_runs_outside: u32,
    /// What was found to be doubtful before anything ran.
    pub warnings: Vec<String>,
}

/// Runs of one series at one number of vCPUs, as they come in.
struct Collected {
    runs: Vec<RunRecord>,
    latency: LatencyLog,
    lost_runs: u32,
}

/// Runs everything that `plan` names on `rig`.
///
/// # Errors
/// The first run that fails ends the benchmark; so does one that is lost, except in the lab's
/// parallel mode, where it is tried up to [`ATTEMPTS`] times.
pub fn run(
    plan: &Plan,
    rig: &mut dyn Rig,
    environment: Environment,
    progress: &mut dyn Progress,
) -> Result<PagingReport, BenchError> {
    let series = plan.series();
    progress.begin(schedule::length(&plan.vcpus, series.len(), plan.runs));
    let mut collected: HashMap<(u32, usize), Collected> = HashMap::new();
    for (number, step) in (1u64..).zip(schedule::schedule(&plan.vcpus, series.len(), plan.runs)) {
        let place = Place {
            round: step.round,
            vcpus: step.vcpus,
            series: series[step.series],
        };
        progress.step(&place.to_string());
        let job = Job {
            plan,
            vcpus: step.vcpus,
            series: place.series,
            seed: number,
        };
        let (sample, lost) = attempt(rig, &job, place, environment.timing, progress)?;
        collect(&mut collected, step, place, &sample, lost)?;
        progress.done();
    }
    progress.end();
    Ok(sum_up(plan, &series, collected, environment))
}

/// Does one run, again if it is lost where that may happen. Returns how often it was lost.
fn attempt(
    rig: &mut dyn Rig,
    job: &Job<'_>,
    place: Place,
    timing: Timing,
    progress: &mut dyn Progress,
) -> Result<(Sample, u32), BenchError> {
    let mut lost = 0;
    loop {
        let source = match rig.run(job) {
            Ok(sample) => return Ok((sample, lost)),
            Err(RunFailure::Failed(source)) => return Err(BenchError::Run { place, source }),
            Err(RunFailure::Lost(source)) if !timing.may_lose_runs() => {
                return Err(BenchError::Run { place, source });
            }
            Err(RunFailure::Lost(source)) => source,
        };
        lost += 1;
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

fn collect(
    collected: &mut HashMap<(u32, usize), Collected>,
    step: Step,
    place: Place,
    sample: &Sample,
    lost: u32,
) -> Result<(), BenchError> {
    let run = RunRecord {
        round: step.round,
        elapsed_ns: u64::try_from(sample.elapsed.as_nanos()).unwrap_or(u64::MAX),
        pages: sample.pages,
        exits: sample.exits,
        messages: sample.messages,
    };
    if run.pages == 0 || run.elapsed_ns == 0 {
        return Err(BenchError::NoRate {
            place,
            pages: run.pages,
            elapsed_ns: run.elapsed_ns,
        });
    }
    let key = (step.vcpus, step.series);
    let entry = match collected.entry(key) {
        std::collections::hash_map::Entry::Occupied(entry) => entry.into_mut(),
        std::collections::hash_map::Entry::Vacant(entry) => entry.insert(Collected {
            runs: Vec::new(),
            latency: LatencyLog::new()?,
            lost_runs: 0,
        }),
    };
    // A run lost while warming up was lost all the same.
    entry.lost_runs += lost;
    if step.measured() {
        entry.runs.push(run);
        entry.latency.merge(&sample.latency);
    }
    Ok(())
}

fn sum_up(
    plan: &Plan,
    series: &[Series],
    mut collected: HashMap<(u32, usize), Collected>,
    environment: Environment,
) -> PagingReport {
    let Environment {
        timing,
        facts,
        lost_runs_outside,
        warnings,
    } = environment;
    let mut points = Vec::new();
    for &vcpus in &plan.vcpus {
        for (index, &series) in series.iter().enumerate() {
            let point = collected
                .remove(&(vcpus, index))
                .and_then(|collected| point(vcpus, series, collected, timing));
            points.extend(point);
        }
    }
    let mut report = PagingReport {
        schema: SCHEMA.to_owned(),
        timing,
        facts,
        plan: PlanRecord::from(plan),
        ratios: compare(&points, timing),
        lost_runs: points.iter().map(|point| point.lost_runs).sum(),
        lost_runs_outside,
        published: Published::beside(plan),
        points,
        notes: Vec::new(),
    };
    report.notes = notes(plan, &report);
    report.notes.extend(warnings);
    report
}

fn point(vcpus: u32, series: Series, collected: Collected, timing: Timing) -> Option<Point> {
    let Collected {
        runs,
        latency,
        lost_runs,
    } = collected;
    let rates: Vec<f64> = runs.iter().map(RunRecord::rate_kpages_per_s).collect();
    let costs: Vec<f64> = runs.iter().map(RunRecord::ns_per_page).collect();
    let rate = Spread::of(&rates)?;
    Some(Point {
        vcpus,
        series,
        rate_kpages_per_s: rate,
        rate_per_vcpu_kpages_per_s: rate.scaled(1.0 / f64::from(vcpus)),
        instructions_per_page: (timing == Timing::Instructions)
            .then(|| Spread::of(&costs))
            .flatten(),
        latency: latency.summary(),
        lost_runs,
        runs,
    })
}

#[cfg(test)]
#[path = "run_tests.rs"]
mod tests;
