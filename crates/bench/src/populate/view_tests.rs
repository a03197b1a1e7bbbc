use std::time::Duration;

use super::*;
use crate::benchmark::tests::{Fake, report_of};
use crate::benchmark::{BenchError, Job, run};
use crate::model::Sample;
use crate::progress::Quiet;
use crate::report::{Environment, Report};

/// Population takes a tenth of what faults take, half of that with two threads.
fn sample(job: &Job<'_, Plan>) -> Sample {
    of_memory(job, job.plan.memory.0 / 4096)
}

/// The same, where KVM counts so many of the pages as mapped.
fn of_memory(job: &Job<'_, Plan>, counted: u64) -> Sample {
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
    let if_populated = |count: u64| if populated { count } else { 0 };
    Sample::default()
        .count(THREADS, threads.into())
        .time(POPULATION, population)
        .time(GUEST, guest)
        .count(POPULATED, if_populated(job.plan.memory.0))
        .count(MAPPINGS_4K, if_populated(counted))
        .count(MAPPINGS_2M, 0)
        .count(MAPPINGS_1G, 0)
        .count(MAPPINGS_AFTER, counted)
        .count(EXITS, pages - if_populated(pages))
}

fn measure(timing: Timing, change: impl FnOnce(&mut Plan)) -> Report<Plan> {
    let mut plan = Plan {
        vcpus: vec![1, 2],
        runs: 3,
        ..Plan::default()
    };
    change(&mut plan);
    report_of(&plan, timing, "populate was left out", sample)
}

fn series(method: Method, threads: Option<u32>) -> Series {
    Series {
        backing: Backing::Shmem,
        method,
        threads,
    }
}

/// The median ratio of a comparison for a series.
fn ratio(
    view: &View<'_, Plan>,
    comparison: &Comparison<Series>,
    vcpus: u32,
    series: Series,
) -> Option<f64> {
    let cell = view.cell(vcpus, series).expect("it was measured");
    Some(comparison.of(cell, &view.cells)?.paired.median)
}

fn assert_near(found: Option<f64>, wanted: f64) {
    let near = found.is_some_and(|found| (found / wanted - 1.0).abs() < 1e-9);
    assert!(near, "{found:?} is not {wanted}");
}

#[test]
fn runs_are_summed_up_and_compared() {
    let report = measure(Timing::Native, |_| {});
    let view = report.view().unwrap();
    assert_eq!(view.cells.len(), 2 * 8);
    let populate = series(Method::Populate, Some(2));
    let cell = view.cell(2, populate).unwrap();
    let median = |column| cell.spread(column).map(|spread| spread.median);
    // 256 MiB in 65536 / 2 microseconds.
    let seconds = 65536.0 / 2.0 / 1e6;
    assert_near(median(RATE), 0.25 / seconds);
    assert_near(median(MAPPING_RATE), 65.536 / seconds);
    assert_near(median(TOTAL), 65536.0 * 1500.0);
    assert_eq!(median(FAULTS), Some(0.0));
    let of = |comparison| ratio(&view, comparison, 2, populate);
    assert_near(of(&TOTAL_OF_NONE), 0.15);
    assert_near(of(&GUEST_OF_NONE), 0.1);
    assert_near(of(&OVER_FAULTS), 20.0);
    assert_near(of(&OVER_PRE_FAULT), 4.0);
    assert_near(of(&OVER_ONE_THREAD), 2.0);

    let one = series(Method::Populate, Some(1));
    assert!(ratio(&view, &OVER_ONE_THREAD, 1, one).is_none());
    assert!(ratio(&view, &OVER_PRE_FAULT, 1, one).is_some());
    let reader = series(Method::OneReader, None);
    assert!(ratio(&view, &OVER_FAULTS, 1, reader).is_some());
    assert!(ratio(&view, &OVER_PRE_FAULT, 1, reader).is_none());
    assert!(ratio(&view, &OVER_ONE_THREAD, 1, reader).is_none());

    let ahead = series(Method::PrefetchPopulate, None);
    assert_near(ratio(&view, &OF_PREFETCH, 2, ahead), 0.75);
    for comparison in [&TOTAL_OF_NONE, &GUEST_OF_NONE, &OVER_FAULTS] {
        assert!(ratio(&view, comparison, 2, ahead).is_none());
    }
    for alone in [Method::None, Method::Prefetch] {
        let alone = view.cell(2, series(alone, None)).unwrap();
        assert!(!is_compared(&view, alone), "{}", alone.series);
    }

    let none = view.cell(1, series(Method::None, None)).unwrap();
    assert!(none.spread(POPULATION_TIME).is_none() && none.spread(RATE).is_none());
    let per_mapping = none.spread(PER_MAPPING).map(|spread| spread.median);
    assert_near(per_mapping, 10_000.0);
    assert!(report.notes.iter().any(|note| note.contains("left out")));
}

#[test]
fn without_none_there_is_nothing_to_compare_with() {
    let report = measure(Timing::Native, |plan| {
        plan.methods = vec![Method::Populate];
        plan.threads = vec![2];
    });
    let view = report.view().unwrap();
    assert!(!view.cells.iter().any(|cell| is_compared(&view, cell)));
    assert!(!report.table(None).unwrap().contains("over faults"));

    let report = measure(Timing::Native, |plan| plan.methods = vec![Method::Populate]);
    let view = report.view().unwrap();
    let two = series(Method::Populate, Some(2));
    assert!(ratio(&view, &OVER_ONE_THREAD, 2, two).is_some());
    assert!(ratio(&view, &TOTAL_OF_NONE, 2, two).is_none());
}

#[test]
fn a_kvm_that_counts_no_mappings_is_reported() {
    let uncounted = |job: &Job<'_, Plan>| of_memory(job, 0);
    let report = report_of(&Plan::default(), Timing::Native, "", uncounted);
    let view = report.view().unwrap();
    for cell in &view.cells {
        assert!(OVER_FAULTS.of(cell, &view.cells).is_none());
        assert!(cell.spread(PER_MAPPING).is_none(), "{}", cell.series);
    }
    let uncounted = |note: &String| note.contains("does not count");
    assert!(report.notes.iter().any(uncounted));
    let counted = measure(Timing::Native, |_| {});
    assert!(!counted.notes.iter().any(uncounted));
}

#[test]
fn a_run_that_takes_no_time_is_no_run() {
    let mut nothing = Fake(|_: &Job<'_, Plan>| Ok(Sample::default()));
    let environment = Environment::of_made_up(Timing::Native);
    let error = run(&Plan::default(), &mut nothing, environment, &mut Quiet).unwrap_err();
    assert!(matches!(error, BenchError::NoTime { .. }), "{error}");
    assert!(
        error
            .to_string()
            .ends_with("guest_ns is 0, which makes no rate")
    );
}

#[test]
fn every_form_has_the_figures() {
    let report = measure(Timing::Instructions, |plan| {
        plan.backings.push(Backing::Thp);
    });
    let table = report.table(None).unwrap();
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
    let json = report.json().unwrap();
    assert!(Report::<Plan>::from_json(&json).unwrap() == report);
    assert!(json.contains("\"timing\": \"instructions\""), "{json}");
    let page = report.html().unwrap();
    assert!(page.contains("</html>") && page.matches("<svg").count() == 6);
    assert!(!page.contains("src=\"http") && !page.contains("href=\"http"));
    assert!(report.svg().unwrap().starts_with("<svg"));
}
