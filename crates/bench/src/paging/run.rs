//! The plan as a benchmark, and what is made of its runs.

use super::machines::Machines;
use super::notes::notes;
use super::plan::{Delivery, MAX_READERS, MAX_VCPUS, Plan, PlanError, Series, Uffds};
use super::published::Published;
use super::report::{PagingReport, Point, RunRecord, SCHEMA, compare};
use super::sample::Sample;
use crate::benchmark::Benchmark;
use crate::latency::LatencyLog;
use crate::prepare::PrepareError;
use crate::rounds::{
    BenchError, Environment, Measured, Origin, Turn, check_runs, check_vcpus, list,
};
use crate::stats::Spread;
use crate::timing::Timing;

/// Runs of one series at one number of vCPUs, as they come in.
#[derive(Debug)]
pub struct Collected {
    runs: Vec<RunRecord>,
    latency: LatencyLog,
}

impl Benchmark for Plan {
    type Series = Series;
    type PlanError = PlanError;
    type Machines = Machines;
    type Sample = Sample;
    type Sum = Collected;
    type Report = PagingReport;

    fn vcpus(&self) -> &[u32] {
        &self.vcpus
    }

    fn series(&self) -> Vec<Series> {
        let mut all = Vec::new();
        for &delivery in &self.deliveries {
            if delivery == Delivery::Exit {
                for &fault_around in &self.fault_around {
                    let alone = Series {
                        delivery,
                        fault_around,
                        populate: false,
                    };
                    all.push(alone);
                    // Side by side: each is measured with and without.
                    all.extend((self.populate && fault_around > 1).then_some(Series {
                        populate: true,
                        ..alone
                    }));
                }
            } else {
                all.push(Series {
                    delivery,
                    fault_around: 1,
                    populate: false,
                });
            }
        }
        all
    }

    fn runs(&self) -> u32 {
        self.runs
    }

    fn command(&self) -> String {
        let mut words = vec![
            "pagetide bench paging".to_owned(),
            format!("--vcpus {}", list(&self.vcpus)),
            format!("--per-vcpu {}", self.per_vcpu),
            format!("--delivery {}", list(&self.deliveries)),
            format!("--fault-around {}", list(&self.fault_around)),
            format!("--backing {}", self.backing),
            format!("--mode {}", self.mode),
            format!("--uffds {}", self.uffds),
            format!("--order {}", self.order),
            format!("--access {}", self.access),
            format!("--runs {}", self.runs),
        ];
        words.extend(self.readers.map(|readers| format!("--readers {readers}")));
        let switches = [
            (self.overlap, "--overlap"),
            (self.pre_fault, "--pre-fault"),
            (self.populate, "--populate"),
            (self.pin, "--pin"),
        ];
        let switches = switches.into_iter().filter(|(on, _)| *on);
        words.extend(switches.map(|(_, name)| name.to_owned()));
        words.join(" ")
    }

    fn check(&self) -> Result<(), PlanError> {
        check_vcpus(&self.vcpus, MAX_VCPUS)?;
        self.check_memory()?;
        self.check_series()?;
        match self.readers {
            Some(0) => return Err(PlanError::ZeroReaders),
            Some(readers) if readers > MAX_READERS => {
                return Err(PlanError::TooManyReaders(readers));
            }
            _ => {}
        }
        check_runs(self.runs)?;
        if self.uffds == Uffds::PerVcpu && self.overlap {
            return Err(PlanError::PerVcpuOverlap);
        }
        Ok(())
    }

    /// A delivery that the kernel lacks is an error, whoever asked for it.
    fn prepare(
        &mut self,
        _methods_asked: bool,
        timing: Timing,
    ) -> Result<(Machines, Vec<String>), PrepareError> {
        Machines::prepare(self, timing)
    }

    fn empty() -> Result<Collected, BenchError> {
        Ok(Collected {
            runs: Vec::new(),
            latency: LatencyLog::new()?,
        })
    }

    fn collect(
        &self,
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
        &self,
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
            plan: self.clone(),
            ratios: compare(&points, timing),
            published: Published::beside(self),
            points,
            notes: Vec::new(),
        };
        report.notes = notes(self, &report);
        report.notes.extend(environment.warnings);
        report
    }
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
