//! Whole population benchmarks on this machine's KVM, tiny ones.

#![cfg(target_arch = "x86_64")]

mod common;

use pagetide_bench::benchmark::Benchmark;
use pagetide_bench::model::Run;
use pagetide_bench::one_line;
use pagetide_bench::populate::view::{
    EXITS, MAPPINGS_2M, MAPPINGS_AFTER, PAGER_FAULTS, POPULATION, POPULATION_EXITS, PREFETCHED,
    mappings,
};
use pagetide_bench::populate::{Method, Plan};
use pagetide_bench::prepare::PrepareError;
use pagetide_bench::report::{Report, View};
use pagetide_bench::units::ByteSize;
use pagetide_memory::Backing;

/// Runs a plan with what this machine has of it. `None`, and a word why, if that is nothing.
fn measure(change: impl FnOnce(&mut Plan)) -> Option<Report<Plan>> {
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
fn runs<'v>(view: &'v View<'_, Plan>) -> impl Iterator<Item = (Method, u32, &'v Run)> {
    let cells = view.cells.iter();
    cells.map(|cell| (cell.series.method, cell.vcpus, &cell.runs[0]))
}

/// Whether this KVM counts stage-2 mappings, as it does not on a processor without them. Prints the reason if not.
fn counts_mappings(view: &View<'_, Plan>) -> bool {
    let counts = runs(view).any(|(_, _, run)| run.count(MAPPINGS_AFTER) > 0);
    if !counts {
        println!("SKIP: this KVM does not count stage-2 mappings");
    }
    counts
}

#[test]
fn what_was_populated_costs_vcpus_no_exit() {
    const PAGES: u64 = (4 << 20) / 4096;
    // A fault may also map the pages of its block of 16, see docs/decisions/0036-fault-around-in-stage-2.md.
    const BLOCKS: u64 = PAGES / 16;
    let Some(report) = measure(|_| {}) else {
        return;
    };
    let view = report.view().expect("its own records");
    if !counts_mappings(&view) {
        return;
    }
    for (method, vcpus, run) in runs(&view) {
        let of = |quantity| run.count(quantity);
        let place = format!("{method}, {vcpus} vCPUs: {run:?}");
        assert!(of(MAPPINGS_AFTER) >= PAGES, "{place}");
        match method {
            Method::None => {
                assert_eq!((of(POPULATION), mappings(run)), (0, 0.0), "{place}");
                assert!(of(EXITS) >= BLOCKS, "{place}");
            }
            Method::Populate | Method::PreFault => {
                assert!(mappings(run) >= PAGES as f64, "{place}");
                assert_eq!((of(EXITS), of(POPULATION_EXITS)), (0, 0), "{place}");
            }
            Method::OneReader => {
                assert!(of(POPULATION_EXITS) >= BLOCKS, "{place}");
                assert!(of(EXITS) < PAGES / 4, "{place}");
            }
            Method::Prefetch => assert!(of(EXITS) >= BLOCKS, "{place}"),
            Method::PrefetchPopulate => {
                // What the vCPUs were faster with, their own low memory, and what they met between
                // installation and population.
                assert!(
                    of(EXITS) <= of(PAGER_FAULTS) + of(PREFETCHED) / 4 + 128,
                    "{place}"
                );
            }
        }
    }
    // Neither none nor prefetch alone is compared with anything, at either number of vCPUs.
    for cell in &view.cells {
        let alone = matches!(cell.series.method, Method::None | Method::Prefetch);
        let mut ratios = Plan::COMPARISONS
            .iter()
            .filter_map(|comparison| comparison.of(cell, &view.cells));
        let place = format!("{}, {} vCPUs", cell.series, cell.vcpus);
        assert_eq!(ratios.next().is_none(), alone, "{place}");
    }
}

#[test]
fn huge_pages_are_mapped_as_such() {
    let report = measure(|plan| {
        plan.backings = vec![Backing::Hugetlb2M];
        plan.vcpus = vec![2];
    });
    let Some(report) = report else { return };
    let view = report.view().expect("its own records");
    if !counts_mappings(&view) {
        return;
    }
    for (method, _, run) in runs(&view) {
        if method != Method::None && !method.is_paged() {
            assert_eq!(run.count(MAPPINGS_2M), 2, "{method}: {run:?}");
        }
    }
}

#[test]
fn a_method_that_is_asked_for_must_be_there() {
    let mut plan = Plan::default();
    match plan.prepare(true, common::timing()) {
        Err(error @ PrepareError::Lacks { .. }) => {
            let message = error.to_string();
            assert!(message.contains("this kernel lacks KVM_CAP_"), "{message}");
        }
        Err(error) => println!("SKIP: {}", one_line(&error)),
        Ok(_) => println!("SKIP: this kernel has every method"),
    }
}
