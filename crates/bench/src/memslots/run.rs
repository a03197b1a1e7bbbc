//! The plan as a benchmark, and what is made of its runs.

use super::machines::Machines;
use super::notes::notes;
use super::plan::{BOOT_UPDATES, MAX_COMMITS, MAX_VCPUS, Op, Plan, PlanError, Series};
use super::published::Published;
use super::report::{MemslotsReport, Point, RunRecord, SCHEMA, compare, grow};
use super::sample::Sample;
use crate::benchmark::Benchmark;
use crate::latency::LatencyLog;
use crate::prepare::PrepareError;
use crate::rounds::{
    BenchError, Environment, Measured, Origin, Turn, check_list, check_runs, check_vcpus, list,
};
use crate::stats::Spread;
use crate::timing::Timing;
use crate::units::float;

/// Runs of one series at one number of vCPUs, as they come in.
#[derive(Debug)]
pub struct Collected {
    runs: Vec<RunRecord>,
    commit: LatencyLog,
    inside: LatencyLog,
    kept: LatencyLog,
    kept_each: LatencyLog,
    knows_stolen_time: bool,
}

impl Benchmark for Plan {
    type Series = Series;
    type PlanError = PlanError;
    type Machines = Machines;
    type Sample = Sample;
    type Sum = Collected;
    type Report = MemslotsReport;

    fn vcpus(&self) -> &[u32] {
        &self.vcpus
    }

    /// Without commits first, then change by change.
    fn series(&self) -> Vec<Series> {
        let commits = self.ops.iter().flat_map(|&op| {
            let methods = self.methods.iter();
            methods.map(move |&method| Series::Commits { op, method })
        });
        std::iter::once(Series::Idle).chain(commits).collect()
    }

    fn runs(&self) -> u32 {
        self.runs
    }

    fn command(&self) -> String {
        format!(
            "pagetide bench memslots --vcpus {} --ops {} --method {} --guest {} --commits {} \
             --runs {}",
            list(&self.vcpus),
            list(&self.ops),
            list(&self.methods),
            self.guest,
            self.commits,
            self.runs
        )
    }

    fn check(&self) -> Result<(), PlanError> {
        check_vcpus(&self.vcpus, MAX_VCPUS)?;
        check_list("--ops", "split,boot", &self.ops)?;
        check_list("--method", "quiesce,plain", &self.methods)?;
        if !(1..=MAX_COMMITS).contains(&self.commits) {
            return Err(PlanError::BadCommits(self.commits));
        }
        check_runs(self.runs)?;
        Ok(())
    }

    fn prepare(
        &mut self,
        methods_asked: bool,
        timing: Timing,
    ) -> Result<(Machines, Vec<String>), PrepareError> {
        Machines::prepare(self, methods_asked, timing)
    }

    fn empty() -> Result<Collected, BenchError> {
        Ok(Collected {
            runs: Vec::new(),
            commit: LatencyLog::new()?,
            inside: LatencyLog::new()?,
            kept: LatencyLog::new()?,
            kept_each: LatencyLog::new()?,
            knows_stolen_time: true,
        })
    }

    fn collect(
        &self,
        collected: &mut Collected,
        turn: &Turn<Series>,
        sample: &Sample,
    ) -> Result<(), BenchError> {
        collected.knows_stolen_time &= sample.knows_stolen_time;
        if turn.measured() {
            let commits = self.commits_of(turn.series);
            collected.runs.push(record(turn.round, commits, sample));
            collected.commit.merge(&sample.commit);
            collected.inside.merge(&sample.inside);
            collected.kept.merge(&sample.kept);
            collected.kept_each.merge(&sample.kept_each);
        }
        Ok(())
    }

    fn sum_up(
        &self,
        measured: Vec<Measured<Series, Collected>>,
        environment: Environment,
    ) -> MemslotsReport {
        sum_up(self, &measured, environment)
    }
}

fn record(round: u32, commits: u32, sample: &Sample) -> RunRecord {
    let ns = |duration: std::time::Duration| u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
    let kept = sample.kept.summary();
    RunRecord {
        round,
        commits,
        elapsed_ns: ns(sample.elapsed),
        steps: sample.steps,
        commit_total_ns: ns(sample.commit_total),
        commit_p50_ns: sample.commit.summary().map_or(0, |times| times.p50_ns),
        kept_p50_ns: kept.map_or(0, |times| times.p50_ns),
        kept_each_p50_ns: sample.kept_each.summary().map_or(0, |times| times.p50_ns),
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
        plan: plan.clone(),
        ratios: compare(&points),
        growth: grow(&points),
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
        kept_each: found.kept_each.summary()?,
        commit_p50_ns: commits(&|run| float(run.commit_p50_ns)),
        kept_p50_ns: spread(&|run| float(run.kept_p50_ns))?,
        kept_each_p50_ns: spread(&|run| float(run.kept_each_p50_ns))?,
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
