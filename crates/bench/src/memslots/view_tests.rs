use std::time::Duration;

use super::*;
use crate::benchmark::Job;
use crate::benchmark::tests::report_of;
use crate::latency::LatencyLog;
use crate::model::Sample;
use crate::report::Report;

/// Quiesce stalls vCPUs four times as long as the list, and the guest gets half of its work done.
fn sample(job: &Job<'_, Plan>) -> Sample {
    let commits = job.plan.commits_of(job.series);
    let method = job.series.method();
    let (stall, steps) = match method {
        None => (1_000, 2_000_000),
        Some(Method::List) => (2_000, 2_000_000),
        Some(Method::Quiesce) => (8_000, 1_000_000),
        Some(Method::DeleteCreate) => (8_000, 500_000),
    };
    let log = |stalls: &mut dyn Iterator<Item = u64>| {
        let mut log = LatencyLog::new().unwrap();
        stalls.for_each(|ns| log.record(ns));
        log
    };
    // The first vCPU, which all plans have, is stalled that long, and all others half of it.
    let each = |vcpu: u32| if vcpu == 0 { stall } else { stall / 2 };
    let all = log(&mut std::iter::once(stall));
    let each = log(&mut (0..job.vcpus).map(each));
    let each_p50 = each.summary().unwrap().p50_ns;
    let has_commits = u64::from(method.is_some());
    let holes = match method {
        Some(Method::DeleteCreate) => 3 * u64::from(commits),
        _ => 0,
    };
    let sample = Sample::default()
        .time(ELAPSED, Duration::from_millis(10))
        .count(COMMITS, commits.into())
        .count(STEPS, steps)
        .count(COMMIT_TOTAL, stall * u64::from(commits) * has_commits)
        .count(COMMIT_P50, stall * has_commits)
        .count(KEPT_P50, stall)
        .count(KEPT_EACH_P50, each_p50)
        .count(KEPT_MAX, stall)
        .count(HOLES, holes)
        .count(KNOWS_STOLEN_TIME, u64::from(job.vcpus < 4))
        .log(KEPT, all.clone())
        .log(KEPT_EACH, each);
    match method {
        None => sample,
        Some(_) => sample.log(COMMIT, all.clone()).log(INSIDE, all),
    }
}

fn measure(timing: Timing, change: impl FnOnce(&mut Plan)) -> Report<Plan> {
    let mut plan = Plan {
        vcpus: vec![1, 2],
        ops: vec![Op::Split, Op::Boot],
        runs: 3,
        ..Plan::default()
    };
    change(&mut plan);
    report_of(&plan, timing, "list was left out", sample)
}

fn commits(op: Op, method: Method) -> Series {
    Series::Commits { op, method }
}

#[test]
fn runs_are_summed_up_and_compared() {
    let report = measure(Timing::Native, |_| {});
    let view = report.view().unwrap();
    assert_eq!(view.cells.len(), 2 * (1 + 2 * 3));
    let cell = |method| view.cell(2, commits(Op::Split, method)).unwrap();
    let quiesce = cell(Method::Quiesce);
    assert_eq!(quiesce.runs.len(), 3);
    let work = WORK_OVER_IDLE.of(quiesce, &view.cells).unwrap();
    assert!((work.paired.median - 0.5).abs() < 1e-9);
    let holes = cell(Method::DeleteCreate).spread(HOLES_PER_COMMIT);
    assert_eq!(holes.unwrap().median, 3.0);

    // Each list, of either change and number of vCPUs, under quiesce.
    for comparison in [
        &STALL_OVER_LIST,
        &STALL_EACH_OVER_LIST,
        &STALL_MAX_OVER_LIST,
        &COMMIT_OVER_LIST,
    ] {
        let lists = compared(&view, comparison);
        assert_eq!(lists.len(), 2 * 2, "{}", comparison.name);
        for list in lists {
            assert_eq!(list.series.method(), Some(Method::List));
            let ratio = comparison.of(list, &view.cells).unwrap();
            let median = ratio.paired.median;
            assert!((median - 4.0).abs() < 0.02, "{}: {median}", comparison.name);
        }
    }
    // Each series with 2 vCPUs, over itself with 1.
    let grown = compared(&view, &STALL_GROWTH);
    assert_eq!(grown.len(), 1 + 2 * 3);
    for cell in grown {
        let under = fewer(cell, &view.cells).unwrap();
        assert_eq!((cell.vcpus, under.vcpus), (2, 1));
        let growth = |of: &Comparison<Series>| of.of(cell, &view.cells).unwrap().paired.median;
        assert!((growth(&STALL_GROWTH) - 1.0).abs() < 1e-9);
        assert!((growth(&STALL_EACH_GROWTH) - 0.5).abs() < 1e-2);
    }
    let idle = view.cell(1, Series::Idle).unwrap();
    assert!(idle.latency(COMMIT).is_none() && idle.spread(COMMIT_MEDIAN).is_none());
    assert!(WORK_OVER_IDLE.of(idle, &view.cells).is_none() && boot_spread(idle).is_none());
    assert!(report.notes.iter().any(|note| note == "list was left out"));
    let known = |note: &String| note.contains("is taken off (KVM's steal time)");
    assert!(report.notes.iter().any(known), "{:?}", report.notes);
}

#[test]
fn a_boot_is_86_updates() {
    let report = measure(Timing::Native, |plan| plan.commits = 87);
    let view = report.view().unwrap();
    let boot = view.cell(1, commits(Op::Boot, Method::List)).unwrap();
    assert_eq!(boot.runs[0].count(COMMITS), 172);
    let ms = boot_spread(boot).unwrap().median;
    assert!((ms - 86.0 * 2_000.0 / 1e6).abs() < 1e-9, "{ms}");
    let split = view.cell(1, commits(Op::Split, Method::List)).unwrap();
    assert!(boot_spread(split).is_none());
    let published = Published::table();
    assert_eq!(published.at(16, Method::Quiesce), Some(12.0));
    assert_eq!(published.at(16, Method::DeleteCreate), None);
}

#[test]
fn without_a_list_there_is_no_ratio_over_it() {
    let report = measure(Timing::Native, |plan| {
        plan.vcpus = vec![2];
        plan.methods = vec![Method::Quiesce, Method::DeleteCreate];
    });
    let view = report.view().unwrap();
    assert!(compared(&view, &STALL_OVER_LIST).is_empty());
    assert!(compared(&view, &STALL_GROWTH).is_empty());
    let table = report.table(None).unwrap();
    for absent in ["quiesce over list", "over fewer vCPUs"] {
        assert!(!table.contains(absent), "{absent} in\n{table}");
    }
}

#[test]
fn every_form_has_the_figures() {
    let report = measure(Timing::Instructions, |plan| {
        plan.vcpus = vec![1, 2, 8];
        plan.guest = Guest::Spin;
    });
    let table = report.table(None).unwrap();
    for wanted in [
        "split by quiesce",
        "boot by delete-create",
        "4.0",
        "published ms",
        "3.40",
        "no steal time",
        "over fewer vCPUs",
        "each p50",
    ] {
        assert!(table.contains(wanted), "{wanted} in\n{table}");
    }
    let json = report.json().unwrap();
    assert!(Report::<Plan>::from_json(&json).unwrap() == report);
    let page = report.html().unwrap();
    assert!(page.contains("</html>") && page.matches("<svg").count() == 4);
    assert!(!page.contains("src=\"http") && !page.contains("href=\"http"));
    assert!(report.svg().unwrap().starts_with("<svg"));
}
