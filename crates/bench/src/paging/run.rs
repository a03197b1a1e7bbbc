//! Runs a plan and sums up what came out.

use super::notes::notes;
use super::plan::{Plan, Series};
use super::published::Published;
use super::report::{PagingReport, PlanRecord, Point, RunRecord, SCHEMA, compare};
use super::rig::{Job, Rig, Sample};
use crate::latency::LatencyLog;
use crate::progress::Progress;
use crate::rounds::{self, BenchError, Environment, Measured, Origin, Rounds, Turn};
use crate::stats::Spread;
use crate::timing::Timing;

/// Runs of one series at one number of vCPUs, as they come in.
struct Collected {
    runs: Vec<RunRecord>,
    latency: LatencyLog,
}

/// Runs everything that `plan` names on `rig`.
///
/// # Errors
/// The first run that fails ends the benchmark; so does one that is lost, except in the lab's
/// parallel mode, where it is tried up to [`rounds::ATTEMPTS`] times.
pub fn run(
    plan: &Plan,
    rig: &mut dyn Rig,
    environment: Environment,
    progress: &mut dyn Progress,
) -> Result<PagingReport, BenchError> {
    let rounds = Rounds {
        vcpus: &plan.vcpus,
        series: &plan.series(),
        runs: plan.runs,
        timing: environment.timing,
    };
    let run = |turn: &Turn<Series>| {
        rig.run(&Job {
            plan,
            vcpus: turn.vcpus,
            series: turn.series,
            seed: turn.number,
        })
    };
    let empty = || {
        Ok(Collected {
            runs: Vec::new(),
            latency: LatencyLog::new()?,
        })
    };
    let measured = rounds::measure(&rounds, progress, run, empty, collect)?;
    Ok(sum_up(plan, measured, environment))
}

fn collect(
    collected: &mut Collected,
    turn: &Turn<Series>,
    sample: &Sample,
) -> Result<(), BenchError> {
    let run = RunRecord {
        round: turn.round,
        elapsed_ns: u64::try_from(sample.elapsed.as_nanos()).unwrap_or(u64::MAX),
        pages: sample.pages,
        exits: sample.exits,
        messages: sample.messages,
    };
    if run.pages == 0 || run.elapsed_ns == 0 {
        return Err(BenchError::NoRate {
            place: turn.place(),
            pages: run.pages,
            elapsed_ns: run.elapsed_ns,
        });
    }
    if turn.measured() {
        collected.runs.push(run);
        collected.latency.merge(&sample.latency);
    }
    Ok(())
}

fn sum_up(
    plan: &Plan,
    measured: Vec<Measured<Series, Collected>>,
    environment: Environment,
) -> PagingReport {
    let origin = Origin::of(&environment, &measured);
    let timing = origin.timing;
    let points: Vec<_> = measured
        .into_iter()
        .filter_map(|measured| point(measured, timing))
        .collect();
    let mut report = PagingReport {
        schema: SCHEMA.to_owned(),
        origin,
        plan: PlanRecord::from(plan),
        ratios: compare(&points, timing),
        published: Published::beside(plan),
        points,
        notes: Vec::new(),
    };
    report.notes = notes(plan, &report);
    report.notes.extend(environment.warnings);
    report
}

fn point(measured: Measured<Series, Collected>, timing: Timing) -> Option<Point> {
    let Measured {
        vcpus,
        series,
        lost_runs,
        sum: Collected { runs, latency },
    } = measured;
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
