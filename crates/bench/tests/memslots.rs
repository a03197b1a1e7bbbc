//! Whole memslot benchmarks on this machine's KVM, tiny ones.

#![cfg(target_arch = "x86_64")]

mod common;

use pagetide_bench::benchmark::Benchmark;
use pagetide_bench::memslots::{Guest, MemslotsReport, Method, Op, Plan, Series};
use pagetide_bench::prepare::PrepareError;
use pagetide_bench::report::Report;
use pagetide_bench::told;

/// Runs a plan with what this machine has of it. `None`, and a word why, if that is nothing.
fn measure(change: impl FnOnce(&mut Plan)) -> Option<MemslotsReport> {
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

fn check(report: &MemslotsReport) {
    for point in &report.points {
        let place = format!("{} vCPUs, {}", point.vcpus, point.series);
        let run = point.runs[0];
        assert!(run.steps > 0 && run.elapsed_ns > 0, "{place}: {run:?}");
        assert_eq!(point.kept.count, u64::from(run.commits), "{place}");
        let each = point.kept.count * u64::from(point.vcpus);
        assert_eq!(point.kept_each.count, each, "{place}");
        assert_eq!(point.kept_each.max_ns, point.kept.max_ns, "{place}");
        match point.series {
            Series::Idle => assert!(point.commit.is_none(), "{place}"),
            Series::Commits { method, .. } => {
                let commit = point.commit.expect("commits have times");
                assert_eq!(commit.count, u64::from(run.commits), "{place}");
                if method != Method::Plain {
                    assert_eq!(run.holes, 0, "{place}");
                }
            }
        }
    }
}

#[test]
fn no_change_shows_anything_but_a_plain_one() {
    // Where vCPUs and the committing thread share a processor, a hole takes some luck.
    for _ in 0..20 {
        let Some(report) = measure(|_| {}) else {
            return;
        };
        check(&report);
        let plain = report
            .points
            .iter()
            .filter(|point| point.series.method() == Some(Method::Plain));
        let holes: u64 = plain.map(|point| point.runs[0].holes).sum();
        if holes > 0 {
            return;
        }
    }
    unreachable!("no vCPU saw a hole");
}

#[test]
fn a_boot_and_a_guest_that_spins() {
    let report = measure(|plan| {
        plan.ops = vec![Op::Boot];
        plan.commits = 1;
        // Falling into holes takes a software CPU long, and is the other test's matter.
        plan.methods.retain(|method| *method != Method::Plain);
    });
    let Some(report) = report else {
        return;
    };
    check(&report);
    assert!(report.published.is_some());
    assert!(report.html().expect("a page").contains("</html>"));
    let report = measure(|plan| {
        plan.guest = Guest::Spin;
        plan.ops = vec![Op::Merge, Op::Resize, Op::Flags];
        plan.methods.retain(|method| *method != Method::Plain);
    });
    check(&report.expect("it ran before"));
}

#[test]
fn a_list_that_is_asked_for_must_be_there() {
    let mut plan = Plan::default();
    match plan.prepare(true, common::timing()) {
        Err(error @ PrepareError::Lacks { .. }) => {
            let told = error.to_string();
            assert!(
                told.contains("KVM_CAP_SET_USER_MEMORY_REGION_LIST"),
                "{told}"
            );
        }
        Err(error) => println!("SKIP: {}", told(&error)),
        Ok(_) => println!("SKIP: this kernel has KVM_CAP_SET_USER_MEMORY_REGION_LIST"),
    }
}
