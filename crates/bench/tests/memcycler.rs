//! Whole benchmarks of memory errors on this machine's KVM, tiny ones.

#![cfg(target_arch = "x86_64")]

mod common;

use std::sync::{Mutex, PoisonError};

use pagetide_bench::benchmark::Benchmark;
use pagetide_bench::memcycler::view::{
    AFTER, BEFORE, CORRUPTED, DIED_OF, EACH_SECOND, ERRORS, LOST, RATE, UNHANDLED, WORDS,
};
use pagetide_bench::memcycler::{Plan, Series};
use pagetide_bench::model::{Quantity, Run};
use pagetide_bench::prepare::PrepareError;
use pagetide_bench::report::Report;
use pagetide_bench::units::ByteSize;
use pagetide_memory::{Backing, FailurePolicy};

const PAGE: u64 = 4096;
/// The kernel counts corrupted bytes for all of the machine: one test at a time.
static ALONE: Mutex<()> = Mutex::new(());

/// Runs a plan with what this machine has of it. `None`, and a word why, if that is nothing. Errors, which
/// the machine keeps, are made in the lab's VMs only.
fn measure(change: impl FnOnce(&mut Plan)) -> Option<Report<Plan>> {
    let mut plan = Plan {
        memory: ByteSize(4 << 20),
        poison_percent: vec![25],
        seconds: 1,
        runs: 1,
        ..Plan::default()
    };
    change(&mut plan);
    if !common::timing().is_lab() && plan.poison_percent != [0] {
        println!("SKIP: memory errors are made in the lab's VMs only: cargo xtask vm");
        return None;
    }
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    common::measure(plan, |error| {
        matches!(
            error,
            PrepareError::Kvm(_)
                | PrepareError::Hugepages { .. }
                | PrepareError::NoHugepagePool { .. }
                | PrepareError::NoSimulation { .. }
        )
    })
}

fn lost_bytes(run: &Run) -> Option<f64> {
    (LOST.value)(run)
}

/// Stage-2 mappings of 4K, 2M and 1G.
fn mappings(run: &Run, sizes: [Quantity; 3]) -> [u64; 3] {
    sizes.map(|size| run.count(size))
}

/// What must hold of any kernel: each error costs at least its page, and a guest that loses memory goes on
/// in the rest of it.
fn check(report: &Report<Plan>, backing: Backing) {
    let view = report.view().expect("its own records");
    let run = |series: Series| {
        let cell = view.cell(2, series).expect("it was measured");
        cell.runs.first().expect("a run")
    };
    for &policy in &report.plan.policies {
        let hit = Series {
            backing,
            policy,
            poison_percent: 25,
        };
        let free = run(hit.baseline());
        assert_eq!(
            (free.count(ERRORS), lost_bytes(free)),
            (0, Some(0.0)),
            "{free:?}"
        );
        assert!(free.count(WORDS) > 0, "{free:?}");
        assert_eq!(mappings(free, BEFORE), mappings(free, AFTER), "{free:?}");
        let run = run(hit);
        assert_eq!(
            (run.count(ERRORS), run.text(DIED_OF)),
            (1, None),
            "{policy}: {run:?}"
        );
        assert_eq!(run.count(CORRUPTED), PAGE, "{policy}: {run:?}");
        assert!(run.count(WORDS) > 0, "{policy}: {run:?}");
        let page = match policy {
            FailurePolicy::Keep => PAGE,
            FailurePolicy::KernelDefault => backing.page_size().bytes(),
        };
        assert_eq!(lost_bytes(run), Some(page as f64), "{policy}: {run:?}");
        let (before, after) = (mappings(run, BEFORE), mappings(run, AFTER));
        if policy == FailurePolicy::Keep {
            // By 4K around the error, and everything else as before.
            assert_eq!([before[1] - 1, before[2]], after[1..], "{run:?}");
            assert!(
                after[0] > before[0] && after[0] < before[0] + 512,
                "{run:?}"
            );
        } else if before != [0; 3] && run.count(UNHANDLED) == 0 {
            assert!(after[1] < before[1], "{run:?}");
        }
    }
}

#[test]
fn a_transparent_huge_page_loses_a_page_and_its_mapping() {
    let Some(report) = measure(|_| {}) else {
        return;
    };
    let view = report.view().expect("its own records");
    let [of_4k, of_2m, of_1g] = mappings(&view.cells[0].runs[0], BEFORE);
    if of_2m < 2 {
        let counted = format!("{of_4k}/{of_2m}/{of_1g} of 4K/2M/1G");
        return println!("SKIP: memory is not mapped huge here, by KVM's count: {counted}");
    }
    check(&report, Backing::Thp);
}

#[test]
fn a_page_of_a_pool_is_lost_as_a_whole_by_default() {
    if let Some(report) = measure(|plan| plan.backings = vec![Backing::Hugetlb2M]) {
        check(&report, Backing::Hugetlb2M);
    }
}

#[test]
fn without_errors_anybody_may_measure() {
    let report = measure(|plan| {
        plan.poison_percent = vec![0];
        plan.memory = ByteSize(2 << 20);
        plan.vcpus = vec![1];
    });
    let Some(report) = report else { return };
    let view = report.view().expect("its own records");
    for cell in &view.cells {
        assert!(cell.spread(RATE).is_some() && lost_bytes(&cell.runs[0]) == Some(0.0));
        assert_eq!(cell.runs[0].all(EACH_SECOND).len(), 1);
    }
}

#[test]
fn the_policy_that_is_asked_for_must_be_there() {
    let mut plan = Plan {
        memory: ByteSize(4 << 20),
        poison_percent: vec![0],
        ..Plan::default()
    };
    match plan.prepare(true, common::timing()) {
        Err(error @ PrepareError::Lacks { .. }) => {
            let message = error.to_string();
            let wanted = "--policy keep: this kernel lacks MFD_MF_KEEP_UE_MAPPED";
            assert!(message.starts_with(wanted), "{message}");
        }
        Err(error) => println!("SKIP: {error}"),
        Ok(_) => println!("SKIP: this kernel has MFD_MF_KEEP_UE_MAPPED"),
    }
}
