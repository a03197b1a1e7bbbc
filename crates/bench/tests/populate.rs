//! Whole population benchmarks on this machine's KVM, tiny ones.

#![cfg(target_arch = "x86_64")]

mod common;

use pagetide_bench::benchmark::Benchmark;
use pagetide_bench::populate::{Method, Plan, Point, PopulateReport, RunRecord};
use pagetide_bench::prepare::PrepareError;
use pagetide_bench::told;
use pagetide_bench::units::ByteSize;
use pagetide_memory::Backing;

/// Runs a plan with what this machine has of it. `None`, and a word why, if that is nothing.
fn measure(change: impl FnOnce(&mut Plan)) -> Option<PopulateReport> {
    let mut plan = Plan {
        vcpus: vec![1, 2],
        memory: ByteSize(4 << 20),
        runs: 1,
        ..Plan::default()
    };
    change(&mut plan);
    common::measure(plan, |_| true)
}

/// Each run by its method, with what there is to know of it.
fn runs(report: &PopulateReport) -> impl Iterator<Item = (Method, u32, RunRecord)> {
    report
        .points
        .iter()
        .map(|point| (point.series.method, point.vcpus, point.runs[0]))
}

#[test]
fn what_was_populated_costs_vcpus_no_exit() {
    const PAGES: u64 = (4 << 20) / 4096;
    let Some(report) = measure(|_| {}) else {
        return;
    };
    if report.points[0].runs[0].mappings_after == 0 {
        return println!("SKIP: this KVM does not count second-stage mappings");
    }
    for (method, vcpus, run) in runs(&report) {
        let place = format!("{method}, {vcpus} vCPUs: {run:?}");
        assert!(run.mappings_after >= PAGES, "{place}");
        match method {
            Method::None => {
                assert_eq!((run.population_ns, run.mappings()), (0, 0), "{place}");
                assert!(run.exits >= PAGES, "{place}");
            }
            Method::Populate | Method::PreFault => {
                assert!(run.mappings() >= PAGES, "{place}");
                assert_eq!((run.exits, run.population_exits), (0, 0), "{place}");
            }
            Method::OneReader => {
                assert!(run.population_exits >= PAGES, "{place}");
                assert!(run.exits < PAGES / 4, "{place}");
            }
            Method::Prefetch => assert!(run.exits >= PAGES, "{place}"),
            Method::PrefetchPopulate => {
                // What the vCPUs were faster with, their own low memory, and what they met between
                // installation and population.
                assert!(
                    run.exits <= run.pager_faults + run.prefetched_pages / 4 + 128,
                    "{place}"
                );
            }
        }
    }
    // Neither none nor prefetch alone is compared with anything, at either number of vCPUs.
    let alone = |point: &&Point| matches!(point.series.method, Method::None | Method::Prefetch);
    let alone = report.points.iter().filter(alone).count();
    assert_eq!(report.ratios.len(), report.points.len() - alone);
}

#[test]
fn huge_pages_are_mapped_as_such() {
    let report = measure(|plan| {
        plan.backings = vec![Backing::Hugetlb2M];
        plan.vcpus = vec![2];
    });
    let Some(report) = report else { return };
    for (method, _, run) in runs(&report) {
        if method != Method::None && !method.is_paged() {
            assert_eq!(run.mappings_2m, 2, "{method}: {run:?}");
        }
    }
}

#[test]
fn a_method_that_is_asked_for_must_be_there() {
    let mut plan = Plan::default();
    match plan.prepare(true, common::timing()) {
        Err(error @ PrepareError::Lacks { .. }) => {
            let told = error.to_string();
            assert!(told.contains("this kernel lacks KVM_CAP_"), "{told}");
        }
        Err(error) => println!("SKIP: {}", told(&error)),
        Ok(_) => println!("SKIP: this kernel has every method"),
    }
}
