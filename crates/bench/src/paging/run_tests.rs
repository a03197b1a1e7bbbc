use std::time::Duration;

use super::*;
use crate::benchmark::{Job, Rig, run};
use crate::paging::plan::Delivery;
use crate::progress::{Progress, Quiet};
use crate::rounds::RunFailure;
use crate::told;
use crate::units::ByteSize;

/// A rig whose runs take as long as a function says, and that notes what it was asked to do.
struct FakeRig<F> {
    jobs: Vec<(u32, Series, u64)>,
    each: F,
}

impl<F: FnMut(&Job<'_, Plan>, usize) -> Result<u64, RunFailure>> Rig<Plan> for FakeRig<F> {
    fn run(&mut self, job: &Job<'_, Plan>, _: &mut dyn Progress) -> Result<Sample, RunFailure> {
        let number = self.jobs.len();
        self.jobs.push((job.vcpus, job.series, job.seed));
        let elapsed_ns = (self.each)(job, number)?;
        let mut latency = LatencyLog::new().unwrap();
        latency.record(elapsed_ns / 1000);
        let pages = job.plan.total_pages(job.vcpus);
        let exits = pages / u64::from(job.series.fault_around);
        Ok(Sample {
            elapsed: Duration::from_nanos(elapsed_ns),
            pages,
            exits,
            messages: 0,
            latency,
        })
    }
}

fn rig<F: FnMut(&Job<'_, Plan>, usize) -> Result<u64, RunFailure>>(each: F) -> FakeRig<F> {
    FakeRig {
        jobs: Vec::new(),
        each,
    }
}

/// 1 MiB per vCPU: 256 pages.
fn plan() -> Plan {
    Plan {
        vcpus: vec![1, 2],
        per_vcpu: ByteSize(1 << 20),
        runs: 3,
        ..Plan::default()
    }
}

fn lost() -> RunFailure {
    RunFailure::Lost("vCPU 1 made no progress".into())
}

#[test]
fn medians_rates_and_ratios_come_out() {
    let plan = plan();
    // uffd takes 256 µs a run, exit half of it; the warm-up takes a second and must not count.
    let mut rig = rig(|job, number| {
        Ok(match (number, job.series.delivery) {
            (0..4, _) => 1_000_000_000,
            (_, Delivery::Uffd) => 256_000 * u64::from(job.vcpus),
            _ => 128_000 * u64::from(job.vcpus),
        })
    });
    let report = run(
        &plan,
        &mut rig,
        Environment::gather(Timing::Native),
        &mut Quiet,
    )
    .unwrap();
    assert_eq!(rig.jobs.len(), 2 * 2 * 4);
    let seeds: std::collections::HashSet<_> = rig.jobs.iter().map(|job| job.2).collect();
    assert_eq!(
        seeds.len(),
        rig.jobs.len(),
        "every run has content of its own"
    );

    let [uffd, exit] = plan.series()[..] else {
        unreachable!()
    };
    let point = report.point(2, uffd).unwrap();
    // 512 pages in 512 µs: a thousand thousands per second.
    assert_eq!(point.rate_kpages_per_s.median, 1000.0);
    assert_eq!(point.rate_per_vcpu_kpages_per_s.median, 500.0);
    assert_eq!(point.rate_kpages_per_s.count, 3);
    assert_eq!(point.instructions_per_page, None);
    assert_eq!(point.latency.unwrap().count, 3);
    let rounds: Vec<_> = point.runs.iter().map(|run| run.round).collect();
    assert_eq!(rounds, [1, 2, 3]);
    assert_eq!(report.ratios.len(), 2);
    let ratio = report.ratio(1, exit).unwrap();
    assert_eq!(
        (ratio.rate.paired.median, ratio.rate.of_medians),
        (2.0, 2.0)
    );
    assert_eq!(ratio.instructions, None);
    assert_eq!(report.origin.lost_runs, 0);
}

#[test]
fn ratios_pair_runs_of_one_round() {
    let plan = Plan {
        vcpus: vec![1],
        ..plan()
    };
    // Each round is slower than the one before; exit always takes half of uffd's time.
    let mut rig = rig(|job, number| {
        let slower = 1 << (number / 2);
        Ok(if job.series.delivery == Delivery::Uffd {
            100_000 * slower
        } else {
            50_000 * slower
        })
    });
    let report = run(
        &plan,
        &mut rig,
        Environment::gather(Timing::Native),
        &mut Quiet,
    )
    .unwrap();
    let ratio = report.ratios[0].rate.paired;
    assert_eq!((ratio.min, ratio.median, ratio.max), (2.0, 2.0, 2.0));
}

#[test]
fn instructions_are_told_where_a_nanosecond_is_one() {
    let plan = Plan {
        vcpus: vec![1],
        ..plan()
    };
    let mut rig = rig(|job, _| {
        Ok(if job.series.delivery == Delivery::Uffd {
            256 * 20_000
        } else {
            256 * 10_000
        })
    });
    let report = run(
        &plan,
        &mut rig,
        Environment::gather(Timing::Instructions),
        &mut Quiet,
    )
    .unwrap();
    let costs: Vec<_> = report
        .points
        .iter()
        .map(|point| point.instructions_per_page.unwrap().median)
        .collect();
    assert_eq!(costs, [20_000.0, 10_000.0]);
    let ratio = report.ratios[0].instructions.unwrap();
    assert!((ratio.paired.median - 0.5).abs() < 1e-9, "{ratio:?}");
    assert!(
        report.notes[0].contains("one executed instruction"),
        "{:?}",
        report.notes
    );
}

#[test]
fn a_lost_run_is_repeated_and_counted_in_parallel_mode() {
    let plan = plan();
    let mut rig = rig(|_, number| {
        if [1, 6, 7].contains(&number) {
            Err(lost())
        } else {
            Ok(1000)
        }
    });
    let environment = Environment {
        lost_runs_outside: 2,
        ..Environment::gather(Timing::Parallel)
    };
    let report = run(&plan, &mut rig, environment, &mut Quiet).unwrap();
    assert_eq!(rig.jobs.len(), 16 + 3);
    assert_eq!(
        (report.origin.lost_runs, report.origin.lost_runs_outside),
        (3, 2)
    );
    assert!(report.points.iter().all(|point| point.runs.len() == 3));
    assert!(
        report.notes[1].starts_with("3 runs were lost and repeated."),
        "{:?}",
        report.notes
    );
}

#[test]
fn a_run_without_time_makes_no_rate() {
    let mut rig = rig(|_, _| Ok(0));
    let error = run(
        &plan(),
        &mut rig,
        Environment::gather(Timing::Native),
        &mut Quiet,
    )
    .unwrap_err();
    assert_eq!(
        told(&error),
        "warm-up, 1 vCPU, uffd: 256 pages in 0 ns make no rate"
    );
}
