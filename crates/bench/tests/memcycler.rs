//! Whole benchmarks of memory errors on this machine's KVM, tiny ones.

#![cfg(target_arch = "x86_64")]

mod common;

use std::sync::{Mutex, PoisonError};

use pagetide_bench::benchmark::Benchmark;
use pagetide_bench::memcycler::{Mappings, MemcyclerReport, Plan, RunRecord, Series};
use pagetide_bench::prepare::PrepareError;
use pagetide_bench::units::ByteSize;
use pagetide_memory::{Backing, FailurePolicy};

const PAGE: u64 = 4096;
/// The kernel counts corrupted bytes for all of the machine: one test at a time.
static ALONE: Mutex<()> = Mutex::new(());

/// Runs a plan with what this machine has of it. `None`, and a word why, if that is nothing. Errors, which
/// the machine keeps, are made in the lab's VMs only.
fn measure(change: impl FnOnce(&mut Plan)) -> Option<MemcyclerReport> {
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

fn run(report: &MemcyclerReport, series: Series) -> Option<&RunRecord> {
    report.point(2, series)?.runs.first()
}

/// What must hold of any kernel: each error costs at least its page, and a guest that loses memory goes on
/// in the rest of it.
fn check(report: &MemcyclerReport, backing: Backing) {
    for &policy in &report.plan.policies {
        let hit = Series {
            backing,
            policy,
            poison_percent: 25,
        };
        let free = run(report, hit.baseline()).expect("a baseline");
        assert_eq!((free.errors, free.lost_bytes()), (0, 0), "{free:?}");
        assert!(free.words > 0 && free.before == free.after, "{free:?}");
        let run = run(report, hit).expect("a run");
        assert_eq!((run.errors, &run.died_of), (1, &None), "{policy}: {run:?}");
        assert_eq!(run.corrupted_bytes, PAGE, "{policy}: {run:?}");
        assert!(run.words > 0, "{policy}: {run:?}");
        let page = match policy {
            FailurePolicy::Keep => PAGE,
            FailurePolicy::KernelDefault => backing.page_size().bytes(),
        };
        assert_eq!(run.lost_bytes(), page, "{policy}: {run:?}");
        if policy == FailurePolicy::Keep {
            assert_eq!(run.before, run.after, "mapped as before: {run:?}");
        } else if run.before != Mappings::default() && run.errors_unhandled == 0 {
            assert!(run.after.mappings_2m < run.before.mappings_2m, "{run:?}");
        }
    }
}

#[test]
fn a_transparent_huge_page_loses_a_page_and_its_mapping() {
    let Some(report) = measure(|_| {}) else {
        return;
    };
    let free = report.points[0].runs[0].before;
    if free.mappings_2m < 2 {
        return println!("SKIP: memory is not mapped huge here, by KVM's count: {free:?}");
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
    for point in &report.points {
        assert!(point.rate_words_per_us.is_some() && point.runs[0].lost_bytes() == 0);
        assert_eq!(point.runs[0].seconds_words_per_us.len(), 1);
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
            let told = error.to_string();
            let wanted = "--policy keep: this kernel lacks MFD_MF_KEEP_UE_MAPPED";
            assert!(told.starts_with(wanted), "{told}");
        }
        Err(error) => println!("SKIP: {error}"),
        Ok(_) => println!("SKIP: this kernel has MFD_MF_KEEP_UE_MAPPED"),
    }
}
