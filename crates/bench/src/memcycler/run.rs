//! The plan as a benchmark, and what is made of its runs.

use pagetide_memory::{Backing, PageSize};

use super::machines::Machines;
use super::notes::notes;
use super::plan::{MAX_SECONDS, MAX_VCPUS, Plan, PlanError, Series};
use super::published::Published;
use super::report::{MemcyclerReport, Point, RunRecord, SCHEMA, compare};
use super::sample::Sample;
use crate::benchmark::Benchmark;
use crate::prepare::PrepareError;
use crate::rounds::{
    BenchError, Environment, Measured, Origin, Turn, check_list, check_runs, check_vcpus, list,
};
use crate::stats::Spread;
use crate::timing::Timing;
use crate::units::float;

impl Benchmark for Plan {
    type Series = Series;
    type PlanError = PlanError;
    type Machines = Machines;
    type Sample = Sample;
    type Sum = Vec<RunRecord>;
    type Report = MemcyclerReport;

    fn vcpus(&self) -> &[u32] {
        &self.vcpus
    }

    /// Of each backing and policy without errors first.
    fn series(&self) -> Vec<Series> {
        let hit = self.poison_percent.iter().filter(|percent| **percent > 0);
        let percent: Vec<u32> = std::iter::once(0).chain(hit.copied()).collect();
        let mut all = Vec::new();
        for &backing in &self.backings {
            for &policy in &self.policies {
                all.extend(percent.iter().map(|&poison_percent| Series {
                    backing,
                    policy,
                    poison_percent,
                }));
            }
        }
        all
    }

    fn runs(&self) -> u32 {
        self.runs
    }

    fn command(&self) -> String {
        format!(
            "pagetide bench memcycler --vcpus {} --memory {} --backing {} --poison {} --policy {} \
             --seconds {} --runs {}",
            list(&self.vcpus),
            self.memory,
            list(&self.backings),
            list(&self.poison_percent),
            list(&self.policies),
            self.seconds,
            self.runs
        )
    }

    fn check(&self) -> Result<(), PlanError> {
        check_vcpus(&self.vcpus, MAX_VCPUS)?;
        check_list("--backing", "thp,hugetlb-2m", &self.backings)?;
        check_list("--poison", "0,5,25", &self.poison_percent)?;
        check_list("--policy", "keep,default", &self.policies)?;
        if let Some(&percent) = self.poison_percent.iter().find(|percent| **percent > 100) {
            return Err(PlanError::BadPercent(percent));
        }
        let memory = self.memory;
        if memory.0 == 0 {
            return Err(PlanError::NoMemory);
        }
        for &backing in &self.backings {
            if !backing.is_hugetlb() && backing != Backing::Thp {
                return Err(PlanError::NotHuge(backing));
            }
            let page = backing.page_size().max(PageSize::Size2M).bytes();
            if !memory.0.is_multiple_of(page) {
                return Err(PlanError::NotWholePages {
                    memory,
                    page,
                    backing,
                });
            }
        }
        for &vcpus in &self.vcpus {
            if !self.pieces().is_multiple_of(vcpus.into()) {
                return Err(PlanError::NotWholePieces { memory, vcpus });
            }
        }
        if !(1..=MAX_SECONDS).contains(&self.seconds) {
            return Err(PlanError::BadSeconds(self.seconds));
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

    fn empty() -> Result<Vec<RunRecord>, BenchError> {
        Ok(Vec::new())
    }

    fn collect(
        &self,
        runs: &mut Vec<RunRecord>,
        turn: &Turn<Series>,
        sample: &Sample,
    ) -> Result<(), BenchError> {
        if turn.measured() {
            runs.push(record(turn.round, sample));
        }
        Ok(())
    }

    fn sum_up(
        &self,
        measured: Vec<Measured<Series, Vec<RunRecord>>>,
        environment: Environment,
    ) -> MemcyclerReport {
        let points: Vec<_> = measured
            .iter()
            .filter_map(|found| point(self, found))
            .collect();
        let mut report = MemcyclerReport {
            schema: SCHEMA.to_owned(),
            origin: Origin::of(&environment, &measured),
            plan: self.clone(),
            ratios: compare(&points),
            published: Published::result(),
            points,
            notes: Vec::new(),
        };
        report.notes = notes(&report);
        report.notes.extend(environment.warnings);
        report
    }
}

fn record(round: u32, sample: &Sample) -> RunRecord {
    RunRecord {
        round,
        errors: sample.errors,
        errors_unhandled: sample.errors_unhandled,
        errors_in_lost_memory: sample.errors_in_lost_memory,
        elapsed_ns: u64::try_from(sample.elapsed.as_nanos()).unwrap_or(u64::MAX),
        words: sample.words,
        seconds_words_per_us: sample.seconds_words_per_us.clone(),
        before: sample.before,
        after: sample.after,
        unusable_bytes: sample.unusable_bytes,
        corrupted_bytes: sample.corrupted_bytes,
        died_of: sample.died_of.clone(),
    }
}

fn point(plan: &Plan, measured: &Measured<Series, Vec<RunRecord>>) -> Option<Point> {
    let runs = &measured.sum;
    let values = |value: &dyn Fn(&RunRecord) -> Option<f64>| -> Vec<f64> {
        runs.iter().filter_map(value).collect()
    };
    let errors = plan.errors(measured.series.poison_percent);
    Some(Point {
        vcpus: measured.vcpus,
        series: measured.series,
        hit_percent: float(errors) / float(plan.pieces().max(1)) * 100.0,
        rate_words_per_us: Spread::of(&values(&RunRecord::rate_words_per_us)),
        lost_bytes: Spread::of(&values(&|run| Some(float(run.lost_bytes()))))?,
        lost_runs: measured.lost_runs,
        runs: runs.clone(),
    })
}

#[cfg(test)]
#[path = "run_tests.rs"]
mod tests;
