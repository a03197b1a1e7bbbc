//! Runs a plan and sums up what came out.

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt;

use super::notes::notes;
use super::plan::{BOOT_UPDATES, Op, Plan, Series};
use super::published::Published;
use super::report::{MemslotsReport, PlanRecord, Point, RunRecord, SCHEMA, compare};
use super::rig::{Job, Rig, RunFailure, Sample};
use crate::latency::{LatencyLog, LatencyLogError};
use crate::paging::{ATTEMPTS, Environment, schedule};
use crate::progress::Progress;
use crate::stats::Spread;
use crate::timing::Timing;
use crate::told;
use crate::units::float;

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

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plural = if self.vcpus == 1 { "" } else { "s" };
        match self.round {
            0 => write!(f, "warm-up")?,
            round => write!(f, "round {round}")?,
        }
        write!(f, ", {} vCPU{plural}, {}", self.vcpus, self.series)
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
    /// The times could not be recorded.
    #[error(transparent)]
    Latency(#[from] LatencyLogError),
}

/// Runs of one series at one number of vCPUs, as they come in.
struct Collected {
    runs: Vec<RunRecord>,
    commit: LatencyLog,
    inside: LatencyLog,
    kept: LatencyLog,
    lost_runs: u32,
    knows_stolen_time: bool,
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
) -> Result<MemslotsReport, BenchError> {
    let series = plan.series();
    progress.begin(schedule::length(&plan.vcpus, series.len(), plan.runs));
    let mut collected: BTreeMap<(u32, usize), Collected> = BTreeMap::new();
    for step in schedule::schedule(&plan.vcpus, series.len(), plan.runs) {
        let place = Place {
            round: step.round,
            vcpus: step.vcpus,
            series: series[step.series],
        };
        progress.step(&place.to_string());
        let job = Job {
            vcpus: step.vcpus,
            series: place.series,
            guest: plan.guest,
            commits: plan.commits_of(place.series),
        };
        let (sample, lost) = attempt(rig, &job, place, environment.timing, progress)?;
        let entry = match collected.entry((step.vcpus, step.series)) {
            std::collections::btree_map::Entry::Occupied(entry) => entry.into_mut(),
            std::collections::btree_map::Entry::Vacant(entry) => entry.insert(Collected {
                runs: Vec::new(),
                commit: LatencyLog::new()?,
                inside: LatencyLog::new()?,
                kept: LatencyLog::new()?,
                lost_runs: 0,
                knows_stolen_time: true,
            }),
        };
        entry.lost_runs += lost;
        entry.knows_stolen_time &= sample.knows_stolen_time;
        if step.measured() {
            entry.runs.push(record(step.round, &job, &sample));
            entry.commit.merge(&sample.commit);
            entry.inside.merge(&sample.inside);
            entry.kept.merge(&sample.kept);
        }
        progress.done();
    }
    progress.end();
    Ok(sum_up(plan, &series, &collected, environment))
}

/// Does one run, again if it is lost where that may happen. Returns how often it was lost.
fn attempt(
    rig: &mut dyn Rig,
    job: &Job,
    place: Place,
    timing: Timing,
    progress: &mut dyn Progress,
) -> Result<(Sample, u32), BenchError> {
    let mut lost = 0;
    loop {
        let source = match rig.run(job) {
            Ok(sample) => return Ok((sample, lost)),
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
        progress.message(&format!("{place}: lost, trying again ({})", told(&*source)));
    }
}

fn record(round: u32, job: &Job, sample: &Sample) -> RunRecord {
    let ns = |duration: std::time::Duration| u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
    let kept = sample.kept.summary();
    RunRecord {
        round,
        commits: job.commits,
        elapsed_ns: ns(sample.elapsed),
        steps: sample.steps,
        commit_total_ns: ns(sample.commit_total),
        commit_p50_ns: sample.commit.summary().map_or(0, |times| times.p50_ns),
        kept_p50_ns: kept.map_or(0, |times| times.p50_ns),
        kept_max_ns: kept.map_or(0, |times| times.max_ns),
        holes: sample.holes,
    }
}

fn sum_up(
    plan: &Plan,
    series: &[Series],
    collected: &BTreeMap<(u32, usize), Collected>,
    environment: Environment,
) -> MemslotsReport {
    let Environment {
        timing,
        facts,
        lost_runs_outside,
        warnings,
    } = environment;
    let mut points = Vec::new();
    for &vcpus in &plan.vcpus {
        // Without commits is the first series.
        let idle = collected.get(&(vcpus, 0));
        for (index, &series) in series.iter().enumerate() {
            let found = collected.get(&(vcpus, index)).zip(idle);
            points.extend(found.and_then(|(found, idle)| point(vcpus, series, found, idle)));
        }
    }
    let mut report = MemslotsReport {
        schema: SCHEMA.to_owned(),
        timing,
        facts,
        plan: PlanRecord::from(plan),
        ratios: compare(&points),
        knows_stolen_time: collected.values().all(|found| found.knows_stolen_time),
        lost_runs: points.iter().map(|point| point.lost_runs).sum(),
        lost_runs_outside,
        published: plan.ops.contains(&Op::Boot).then(Published::table),
        points,
        notes: Vec::new(),
    };
    report.notes = notes(&report);
    report.notes.extend(warnings);
    report
}

fn point(vcpus: u32, series: Series, found: &Collected, idle: &Collected) -> Option<Point> {
    let runs = &found.runs;
    let spread =
        |value: &dyn Fn(&RunRecord) -> f64| Spread::of(&runs.iter().map(value).collect::<Vec<_>>());
    let commits = |value: &dyn Fn(&RunRecord) -> f64| series.op().and_then(|_| spread(value));
    let lost: Vec<f64> = runs
        .iter()
        .filter_map(|run| {
            let free = idle.runs.iter().find(|idle| idle.round == run.round)?;
            Some((1.0 - run.rate() / free.rate()) * 100.0)
        })
        .collect();
    let boot_ms = |run: &RunRecord| {
        float(run.commit_total_ns) / f64::from(run.commits.max(1)) * f64::from(BOOT_UPDATES) / 1e6
    };
    Some(Point {
        vcpus,
        series,
        commit: found.commit.summary(),
        inside: found.inside.summary(),
        kept: found.kept.summary()?,
        commit_p50_ns: commits(&|run| float(run.commit_p50_ns)),
        kept_p50_ns: spread(&|run| float(run.kept_p50_ns))?,
        kept_max_ns: spread(&|run| float(run.kept_max_ns))?,
        boot_ms: (series.op() == Some(Op::Boot))
            .then(|| spread(&boot_ms))
            .flatten(),
        lost_percent: series.op().and_then(|_| Spread::of(&lost)),
        holes_per_commit: commits(&|run| float(run.holes) / f64::from(run.commits.max(1))),
        lost_runs: found.lost_runs,
        runs: found.runs.clone(),
    })
}

#[cfg(test)]
#[path = "run_tests.rs"]
mod tests;
