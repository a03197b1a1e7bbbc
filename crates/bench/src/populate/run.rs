//! Runs a plan and sums up what came out.

use super::notes::notes;
use super::plan::{Plan, Series};
use super::published::Published;
use super::report::{PlanRecord, Point, PopulateReport, RunRecord, SCHEMA, compare};
use super::rig::{Job, Rig, Sample};
use crate::progress::Progress;
use crate::rounds::{self, BenchError, Environment, Measured, Origin, Rounds, Turn};
use crate::stats::Spread;
use crate::units::float;

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
) -> Result<PopulateReport, BenchError> {
    let rounds = Rounds {
        vcpus: &plan.vcpus,
        series: &plan.series(),
        runs: plan.runs,
        timing: environment.timing,
    };
    let run = |turn: &Turn<Series>| {
        rig.run(&Job {
            vcpus: turn.vcpus,
            series: turn.series,
            memory: plan.memory,
            seed: turn.number,
        })
    };
    let measured = rounds::measure(&rounds, progress, run, || Ok(Vec::new()), collect)?;
    let points: Vec<_> = measured.iter().filter_map(point).collect();
    let mut report = PopulateReport {
        schema: SCHEMA.to_owned(),
        origin: Origin::of(&environment, &measured),
        plan: PlanRecord::from(plan),
        ratios: compare(&points),
        published: Published::result(),
        points,
        notes: Vec::new(),
    };
    report.notes = notes(&report);
    report.notes.extend(environment.warnings);
    Ok(report)
}

fn collect(
    runs: &mut Vec<RunRecord>,
    turn: &Turn<Series>,
    sample: &Sample,
) -> Result<(), BenchError> {
    let ns = |time: std::time::Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    let run = RunRecord {
        round: turn.round,
        guest_ns: ns(sample.guest),
        population_ns: ns(sample.population),
        threads: sample.threads,
        populated_bytes: sample.populated_bytes,
        mappings_4k: sample.mappings_4k,
        mappings_2m: sample.mappings_2m,
        mappings_1g: sample.mappings_1g,
        mappings_after: sample.mappings_after,
        population_exits: sample.population_exits,
        exits: sample.exits,
    };
    if run.guest_ns == 0 {
        return Err(BenchError::NoRate {
            place: turn.place(),
            pages: run.mappings_after,
            elapsed_ns: run.guest_ns,
        });
    }
    if turn.measured() {
        runs.push(run);
    }
    Ok(())
}

fn point(measured: &Measured<Series, Vec<RunRecord>>) -> Option<Point> {
    let runs = &measured.sum;
    let spread = |value: &dyn Fn(&RunRecord) -> Option<f64>| {
        Spread::of(&runs.iter().filter_map(value).collect::<Vec<_>>())
    };
    let per_second = |run: &RunRecord, amount: f64| {
        (run.population_ns > 0).then(|| amount / float(run.population_ns) * 1e9)
    };
    let gib = |run: &RunRecord| float(run.populated_bytes) / float(1 << 30);
    Some(Point {
        vcpus: measured.vcpus,
        series: measured.series,
        total_ns: spread(&|run| Some(float(run.total_ns())))?,
        guest_ns: spread(&|run| Some(float(run.guest_ns)))?,
        population_ns: spread(&|run| per_second(run, 1.0).map(|_| float(run.population_ns))),
        rate_gib_per_s: spread(&|run| per_second(run, gib(run))),
        rate_kmappings_per_s: spread(&|run| per_second(run, float(run.mappings()) / 1e3)),
        ns_per_mapping: spread(&RunRecord::ns_per_mapping),
        exits: spread(&|run| Some(float(run.exits)))?,
        lost_runs: measured.lost_runs,
        runs: runs.clone(),
    })
}

#[cfg(test)]
#[path = "run_tests.rs"]
mod tests;
