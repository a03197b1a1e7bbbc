//! The plan as a benchmark, and what is made of its runs.

use pagetide_memory::Backing;

use super::machines::Machines;
use super::notes::notes;
use super::plan::{MAX_THREADS, MAX_VCPUS, Plan, PlanError, Series};
use super::published::Published;
use super::report::{Point, PopulateReport, RunRecord, SCHEMA, compare};
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
    type Report = PopulateReport;

    fn vcpus(&self) -> &[u32] {
        &self.vcpus
    }

    fn series(&self) -> Vec<Series> {
        let mut all = Vec::new();
        for &backing in &self.backings {
            for &method in &self.methods {
                let threads: Vec<_> = if method.has_threads() {
                    self.threads.iter().copied().map(Some).collect()
                } else {
                    vec![None]
                };
                all.extend(threads.into_iter().map(|threads| Series {
                    backing,
                    method,
                    threads,
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
            "pagetide bench populate --vcpus {} --memory {} --backing {} --method {} --threads {} \
             --runs {}",
            list(&self.vcpus),
            self.memory,
            list(&self.backings),
            list(&self.methods),
            list(&self.threads),
            self.runs
        )
    }

    fn check(&self) -> Result<(), PlanError> {
        check_vcpus(&self.vcpus, MAX_VCPUS)?;
        check_list("--backing", "shmem,thp", &self.backings)?;
        check_list("--method", "none,populate", &self.methods)?;
        check_list("--threads", "1,2", &self.threads)?;
        let mut threads = self.threads.iter();
        if let Some(&bad) = threads.find(|threads| !(1..=MAX_THREADS).contains(*threads)) {
            return Err(PlanError::BadThreads(bad));
        }
        if self.memory.0 == 0 {
            return Err(PlanError::NoMemory);
        }
        if self.backings.contains(&Backing::Anonymous) {
            return Err(PlanError::Anonymous);
        }
        for &backing in &self.backings {
            let page = backing.page_size().bytes();
            for &vcpus in &self.vcpus {
                // 1 GiB times 256 at most: no overflow is near.
                if !self.memory.0.is_multiple_of(page * u64::from(vcpus)) {
                    return Err(PlanError::NotWholePages {
                        memory: self.memory,
                        vcpus,
                        page,
                        backing,
                    });
                }
            }
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
        let run = record(turn.round, sample);
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

    fn sum_up(
        &self,
        measured: Vec<Measured<Series, Vec<RunRecord>>>,
        environment: Environment,
    ) -> PopulateReport {
        let points: Vec<_> = measured.iter().filter_map(point).collect();
        let mut report = PopulateReport {
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
    let ns = |time: std::time::Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    RunRecord {
        round,
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
        prefetched_pages: sample.prefetched_pages,
        pager_faults: sample.pager_faults,
    }
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
