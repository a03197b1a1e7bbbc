use std::time::Duration;

use super::*;
use crate::benchmark::{Job, Rig, run};
use crate::populate::Method;
use crate::progress::{Progress, Quiet};
use crate::report::{self, Report};
use crate::rounds::RunFailure;
use crate::timing::Timing;

/// Population takes a tenth of what faults take, half of that with two threads.
struct MadeUp;

impl Rig<Plan> for MadeUp {
    fn run(&mut self, job: &Job<'_, Plan>, _: &mut dyn Progress) -> Result<Sample, RunFailure> {
        let pages = job.plan.memory.0 / 4096;
        let us = Duration::from_micros;
        let threads = job.series.threads.unwrap_or(0);
        let (guest, population) = match job.series.method {
            Method::None => (us(pages * 10), Duration::ZERO),
            Method::PreFault => (us(pages), us(pages * 2)),
            Method::Populate => (us(pages), us(pages / u64::from(threads))),
            Method::OneReader => (us(pages), us(pages * 8)),
            Method::Prefetch => (us(pages * 20), Duration::ZERO),
            Method::PrefetchPopulate => (us(pages * 15), Duration::ZERO),
        };
        let populated = !job.series.method.is_paged() && job.series.method != Method::None;
        Ok(Sample {
            guest,
            population,
            threads,
            populated_bytes: if populated { job.plan.memory.0 } else { 0 },
            mappings_4k: if populated { pages } else { 0 },
            mappings_after: pages,
            exits: if populated { 0 } else { pages },
            ..Sample::default()
        })
    }
}

fn measure(timing: Timing, change: impl FnOnce(&mut Plan)) -> PopulateReport {
    let mut plan = Plan {
        vcpus: vec![1, 2],
        runs: 3,
        ..Plan::default()
    };
    change(&mut plan);
    let environment = Environment {
        warnings: vec!["populate was left out".to_owned()],
        ..Environment::gather(timing)
    };
    run(&plan, &mut MadeUp, environment, &mut Quiet).unwrap()
}

fn series(method: Method, threads: Option<u32>) -> Series {
    Series {
        backing: Backing::Shmem,
        method,
        threads,
    }
}

#[test]
fn runs_are_summed_up_and_compared() {
    let report = measure(Timing::Native, |_| {});
    assert_eq!(report.points.len(), 2 * 8);
    let near = |found: f64, wanted: f64| (found / wanted - 1.0).abs() < 1e-9;
    let point = report.point(2, series(Method::Populate, Some(2))).unwrap();
    // 256 MiB in 65536 / 2 microseconds.
    let seconds = 65536.0 / 2.0 / 1e6;
    assert!(near(point.rate_gib_per_s.unwrap().median, 0.25 / seconds));
    assert!(near(
        point.rate_kmappings_per_s.unwrap().median,
        65.536 / seconds
    ));
    assert!(near(point.total_ns.median, 65536.0 * 1500.0));
    assert_eq!(point.exits.median, 0.0);
    let ratio = report.ratio(2, point.series).unwrap();
    assert!(near(ratio.total.unwrap().paired.median, 0.15));
    assert!(near(ratio.guest.unwrap().paired.median, 0.1));
    assert!(near(ratio.over_faults.unwrap().paired.median, 20.0));
    assert!(near(ratio.over_pre_fault.unwrap().paired.median, 4.0));
    assert!(near(ratio.over_one_thread.unwrap().paired.median, 2.0));
    let one = report.ratio(1, series(Method::Populate, Some(1))).unwrap();
    assert!(one.over_one_thread.is_none() && one.over_pre_fault.is_some());
    let reader = report.ratio(1, series(Method::OneReader, None)).unwrap();
    assert!(reader.over_pre_fault.is_none() && reader.over_one_thread.is_none());
    let ahead = series(Method::PrefetchPopulate, None);
    let ahead = report.ratio(2, ahead).unwrap();
    assert!(near(ahead.of_prefetch.unwrap().paired.median, 0.75));
    assert!(ahead.total.is_none() && ahead.over_faults.is_none());
    assert!(report.ratio(2, series(Method::Prefetch, None)).is_none());
    let none = report.point(1, series(Method::None, None)).unwrap();
    assert!(none.population_ns.is_none() && none.rate_gib_per_s.is_none());
    assert!(near(none.ns_per_mapping.unwrap().median, 10_000.0));
    assert!(report.notes.iter().any(|note| note.contains("left out")));
}

#[test]
fn without_none_there_is_nothing_to_compare_with() {
    let report = measure(Timing::Native, |plan| {
        plan.methods = vec![Method::Populate];
        plan.threads = vec![2];
    });
    assert!(report.ratios.is_empty());
    assert!(!report.table(None).contains("over faults"));
    let report = measure(Timing::Native, |plan| plan.methods = vec![Method::Populate]);
    let two = report.ratio(2, series(Method::Populate, Some(2))).unwrap();
    assert!(two.over_one_thread.is_some() && two.total.is_none());
}

#[test]
fn a_kvm_that_counts_no_mappings_is_told() {
    struct Uncounted;
    impl Rig<Plan> for Uncounted {
        fn run(&mut self, job: &Job<'_, Plan>, _: &mut dyn Progress) -> Result<Sample, RunFailure> {
            let sample = MadeUp.run(job, &mut Quiet)?;
            Ok(Sample {
                mappings_4k: 0,
                mappings_after: 0,
                ..sample
            })
        }
    }
    let report = run(
        &Plan::default(),
        &mut Uncounted,
        Environment::gather(Timing::Native),
        &mut Quiet,
    )
    .unwrap();
    assert!(
        report
            .ratios
            .iter()
            .all(|ratio| ratio.over_faults.is_none())
    );
    assert!(
        report
            .points
            .iter()
            .all(|point| point.ns_per_mapping.is_none())
    );
    let told = |note: &String| note.contains("does not count");
    assert!(report.notes.iter().any(told));
}

#[test]
fn a_run_that_takes_no_time_is_no_run() {
    struct Nothing;
    impl Rig<Plan> for Nothing {
        fn run(&mut self, _: &Job<'_, Plan>, _: &mut dyn Progress) -> Result<Sample, RunFailure> {
            Ok(Sample::default())
        }
    }
    let error = run(
        &Plan::default(),
        &mut Nothing,
        Environment::gather(Timing::Native),
        &mut Quiet,
    )
    .unwrap_err();
    assert!(matches!(error, BenchError::NoRate { .. }), "{error}");
}

#[test]
fn every_form_has_the_figures() {
    let report = measure(Timing::Instructions, |plan| {
        plan.backings.push(Backing::Thp);
    });
    let table = report.table(None);
    for wanted in [
        "shmem, populate, 2 threads",
        "thp, one-reader",
        "instructions/mapping",
        "published: 64G, 2M/1G pages",
        "about 50 % faster",
        "0.150",
    ] {
        assert!(table.contains(wanted), "{wanted} in\n{table}");
    }
    let json = report::json(&report).unwrap();
    let back: PopulateReport = serde_json::from_str(&json).unwrap();
    assert!(back == report);
    assert!(json.contains("\"timing\": \"instructions\""), "{json}");
    let page = report.html().unwrap();
    assert!(page.contains("</html>") && page.matches("<svg").count() == 6);
    assert!(!page.contains("src=\"http") && !page.contains("href=\"http"));
    assert!(report.svg().unwrap().starts_with("<svg"));
}
