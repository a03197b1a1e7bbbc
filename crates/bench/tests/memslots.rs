//! Whole memslot benchmarks on this machine's KVM, tiny ones.

#![cfg(target_arch = "x86_64")]

mod common;

use pagetide_bench::benchmark::Benchmark;
use pagetide_bench::memslots::view::{
    COMMIT, COMMITS, ELAPSED, HOLES, KEPT, KEPT_EACH, KEPT_MAX, STEPS,
};
use pagetide_bench::memslots::{Guest, Method, Op, Plan, Series};
use pagetide_bench::one_line;
use pagetide_bench::prepare::PrepareError;
use pagetide_bench::report::Report;

/// Runs a plan with what this machine has of it. `None`, and a word why, if that is nothing.
fn measure(change: impl FnOnce(&mut Plan)) -> Option<Report<Plan>> {
    let mut plan = Plan {
        vcpus: vec![2],
        ops: vec![Op::Split],
        commits: 2,
        runs: 1,
        ..Plan::default()
    };
    change(&mut plan);
    common::measure(plan, |_| true)
}

fn check(report: &Report<Plan>) {
    let view = report.view().expect("its own records");
    for cell in &view.cells {
        let place = format!("{} vCPUs, {}", cell.vcpus, cell.series);
        let run = &cell.runs[0];
        let commits = run.count(COMMITS);
        assert!(
            run.count(STEPS) > 0 && run.count(ELAPSED) > 0,
            "{place}: {run:?}"
        );
        let stall = cell.latency(KEPT).expect("each commit has a stall");
        let each = cell.latency(KEPT_EACH).expect("each vCPU has a stall");
        assert_eq!(stall.count, commits, "{place}");
        assert_eq!(each.count, commits * u64::from(cell.vcpus), "{place}");
        assert_eq!(each.max_ns, stall.max_ns, "{place}");
        assert!(run.get(KEPT_MAX).is_some(), "{place}: {run:?}");
        match cell.series {
            Series::Idle => assert!(cell.latency(COMMIT).is_none(), "{place}"),
            Series::Commits { method, .. } => {
                let commit = cell.latency(COMMIT).expect("commits have times");
                assert_eq!(commit.count, commits, "{place}");
                if method != Method::DeleteCreate {
                    assert_eq!(run.count(HOLES), 0, "{place}");
                }
            }
        }
    }
}

fn holes(report: &Report<Plan>) -> u64 {
    let view = report.view().expect("its own records");
    let delete_create = view
        .cells
        .iter()
        .filter(|cell| cell.series.method() == Some(Method::DeleteCreate));
    delete_create.map(|cell| cell.runs[0].count(HOLES)).sum()
}

#[test]
fn only_delete_create_shows_a_hole() {
    // `check` refuses a hole of the other methods.
    let Some(report) = measure(|_| {}) else {
        return;
    };
    check(&report);
    let mut seen = holes(&report);
    // Where vCPUs and the committing thread share a processor, few vCPUs run while there is a hole.
    for _ in 1..20 {
        if seen > 0 {
            break;
        }
        let again = measure(|plan| plan.methods = vec![Method::DeleteCreate]);
        let again = again.expect("it ran before");
        check(&again);
        seen = holes(&again);
    }
    assert!(seen > 0, "no vCPU saw a hole");
}

#[test]
fn a_boot_and_a_guest_that_spins() {
    let report = measure(|plan| {
        plan.ops = vec![Op::Boot];
        plan.commits = 1;
        // Falling into holes takes a software CPU long, and is the other test's matter.
        plan.methods
            .retain(|method| *method != Method::DeleteCreate);
    });
    let Some(report) = report else {
        return;
    };
    check(&report);
    assert!(
        report
            .table(None)
            .expect("a table")
            .contains("published ms")
    );
    assert!(report.html().expect("a page").contains("</html>"));
    let report = measure(|plan| {
        plan.guest = Guest::Spin;
        plan.ops = vec![Op::Merge, Op::Resize, Op::Flags];
        plan.methods
            .retain(|method| *method != Method::DeleteCreate);
    });
    check(&report.expect("it ran before"));
}

#[test]
fn a_list_that_is_asked_for_must_be_there() {
    let mut plan = Plan::default();
    match plan.prepare(true, common::timing()) {
        Err(error @ PrepareError::Lacks { .. }) => {
            let message = error.to_string();
            assert!(
                message.contains("KVM_CAP_SET_USER_MEMORY_REGION_LIST"),
                "{message}"
            );
        }
        Err(error) => println!("SKIP: {}", one_line(&error)),
        Ok(_) => println!("SKIP: this kernel has KVM_CAP_SET_USER_MEMORY_REGION_LIST"),
    }
}
