//! Runs a plan and sums up what came out.

use super::notes::notes;
use super::plan::{BOOT_UPDATES, Op, Plan, Series};
use super::published::Published;
use super::report::{MemslotsReport, PlanRecord, Point, RunRecord, SCHEMA, compare};
use super::rig::{Job, Rig, Sample};
use crate::latency::LatencyLog;
use crate::progress::Progress;
use crate::rounds::{self, BenchError, Environment, Measured, Origin, Rounds, Turn};
use crate::stats::Spread;
use crate::units::float;

/// Runs of one series at one number of vCPUs, as they come in.
struct Collected {
    runs: Vec<RunRecord>,
    commit: LatencyLog,
    inside: LatencyLog,
    kept: LatencyLog,
    knows_stolen_time: bool,
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
) -> Result<MemslotsReport, BenchError> {
    let rounds = Rounds {
        vcpus: &plan.vcpus,
        series: &plan.series(),
        runs: plan.runs,
        timing: environment.timing,
    };
    let job = |turn: &Turn<Series>| Job {
        vcpus: turn.vcpus,
        series: turn.series,
        guest: plan.guest,
        commits: plan.commits_of(turn.series),
    };
    let empty = || {
        Ok(Collected {
            runs: Vec::new(),
            commit: LatencyLog::new()?,
            inside: LatencyLog::new()?,
            kept: LatencyLog::new()?,
            knows_stolen_time: true,
        })
    };
    let collect = |collected: &mut Collected, turn: &Turn<Series>, sample: &Sample| {
        collected.knows_stolen_time &= sample.knows_stolen_time;
        if turn.measured() {
            collected.runs.push(record(turn.round, &job(turn), sample));
            collected.commit.merge(&sample.commit);
            collected.inside.merge(&sample.inside);
            collected.kept.merge(&sample.kept);
        }
        Ok(())
    };
    let measured = rounds::measure(
        &rounds,
        progress,
        |turn| rig.run(&job(turn)),
        empty,
        collect,
    )?;
    Ok(sum_up(plan, &measured, environment))
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
    measured: &[Measured<Series, Collected>],
    environment: Environment,
) -> MemslotsReport {
    let idle_at = |vcpus| {
        measured
            .iter()
            .find(|idle| idle.vcpus == vcpus && idle.series == Series::Idle)
    };
    let points: Vec<_> = measured
        .iter()
        .filter_map(|found| point(found, &idle_at(found.vcpus)?.sum))
        .collect();
    let mut report = MemslotsReport {
        schema: SCHEMA.to_owned(),
        origin: Origin::of(&environment, measured),
        plan: PlanRecord::from(plan),
        ratios: compare(&points),
        knows_stolen_time: measured.iter().all(|found| found.sum.knows_stolen_time),
        published: plan.ops.contains(&Op::Boot).then(Published::table),
        points,
        notes: Vec::new(),
    };
    report.notes = notes(&report);
    report.notes.extend(environment.warnings);
    report
}

fn point(measured: &Measured<Series, Collected>, idle: &Collected) -> Option<Point> {
    let Measured {
        vcpus,
        series,
        lost_runs,
        sum: found,
    } = measured;
    let (vcpus, series, lost_runs) = (*vcpus, *series, *lost_runs);
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
        lost_runs,
        runs: found.runs.clone(),
    })
}

#[cfg(test)]
#[path = "run_tests.rs"]
mod tests;
