use std::time::Duration;

use super::*;
use crate::benchmark::Job;
use crate::benchmark::tests::report_of;
use crate::model::Sample;
use crate::report::Report;
use crate::timing::Timing;

/// What a run gave, before it is put as a sample.
struct Given {
    words: u64,
    errors: u64,
    unhandled: u64,
    after_2m: u64,
    unusable: u64,
    died_of: Option<&'static str>,
}

/// By default errors cost a fifth of the percent that they hit, and 2 MiB each; a guest does not survive
/// 100 %.
fn given(job: &Job<'_, Plan>) -> Given {
    let Series {
        policy,
        poison_percent,
        ..
    } = job.series;
    let errors = job.plan.errors(poison_percent);
    let taken = policy == FailurePolicy::KernelDefault;
    let cost = if taken { u64::from(poison_percent) } else { 0 };
    Given {
        words: 500_000_000 - cost * 1_000_000,
        errors,
        unhandled: 0,
        after_2m: if taken { 0 } else { job.plan.pieces() },
        unusable: if taken { errors << 21 } else { 0 },
        died_of: (poison_percent == 100).then_some("vCPU 0: shutdown"),
    }
}

fn sample(job: &Job<'_, Plan>, given: &Given) -> Sample {
    let sample = Sample::default()
        .count(ERRORS, given.errors)
        .count(UNHANDLED, given.unhandled)
        .count(IN_LOST_MEMORY, 0)
        .time(ELAPSED, Duration::from_secs(1))
        .count(WORDS, given.words)
        .value(EACH_SECOND, 500.0)
        .count(BEFORE[0], 0)
        .count(BEFORE[1], job.plan.pieces())
        .count(BEFORE[2], 0)
        .count(AFTER[0], 0)
        .count(AFTER[1], given.after_2m)
        .count(AFTER[2], 0)
        .count(UNUSABLE, given.unusable)
        .count(CORRUPTED, given.errors << 12);
    match given.died_of {
        None => sample,
        Some(words) => sample.event(DIED_OF, words),
    }
}

/// The report of a plan, with what `run` changes of each run.
fn measure_with(
    timing: Timing,
    plan: impl FnOnce(&mut Plan),
    run: impl Fn(&mut Given),
) -> Report<Plan> {
    let mut changed = Plan {
        vcpus: vec![1, 2],
        runs: 3,
        ..Plan::default()
    };
    plan(&mut changed);
    report_of(&changed, timing, "keep was left out", |job| {
        let mut given = given(job);
        run(&mut given);
        sample(job, &given)
    })
}

fn measure(timing: Timing, plan: impl FnOnce(&mut Plan)) -> Report<Plan> {
    measure_with(timing, plan, |_| {})
}

fn series(policy: FailurePolicy, poison_percent: u32) -> Series {
    Series {
        backing: Backing::Thp,
        policy,
        poison_percent,
    }
}

#[test]
fn runs_are_summed_up_and_compared_with_their_baseline() {
    let report = measure(Timing::Native, |_| {});
    let view = report.view().unwrap();
    let ratio = |cell: &Cell<Series>| RATE_OVER_BASELINE.of(cell, &view.cells);
    let compared = view.cells.iter().filter(|cell| ratio(cell).is_some());
    assert_eq!((view.cells.len(), compared.count()), (2 * 6, 2 * 4));
    let near = |found: f64, wanted: f64| (found - wanted).abs() < 1e-9;
    let loss = |cell| (1.0 - ratio(cell).unwrap().paired.median) * 100.0;

    let default = series(FailurePolicy::KernelDefault, 25);
    let cell = view.cell(2, default).unwrap();
    assert!(near(cell.spread(RATE).unwrap().median, 475.0));
    // 32 of 128 pieces.
    assert_eq!(cell.runs[0].count(ERRORS), 32);
    let lost = cell.spread(LOST).unwrap().median;
    assert!(near(lost, f64::from(32 << 21)), "{lost}");
    assert!(near(loss(cell), 5.0), "{}", loss(cell));

    let keep = series(FailurePolicy::Keep, 25);
    let cell = view.cell(1, keep).unwrap();
    let lost = cell.spread(LOST).unwrap().median;
    assert!(near(lost, f64::from(32 << 12)), "{lost}");
    assert!(near(loss(cell), 0.0), "{}", loss(cell));
    let baseline = view.cell(1, keep.baseline()).unwrap();
    assert!(ratio(baseline).is_none());
    assert!(report.notes.iter().any(|note| note == "keep was left out"));
}

#[test]
fn a_guest_that_dies_has_no_rate() {
    let report = measure(Timing::Native, |plan| plan.poison_percent = vec![100]);
    let view = report.view().unwrap();
    let cell = view.cell(1, series(FailurePolicy::Keep, 100)).unwrap();
    assert!(cell.spread(RATE).is_none());
    let mut cells = view.cells.iter();
    assert!(cells.all(|cell| RATE_OVER_BASELINE.of(cell, &view.cells).is_none()));
    let table = report.table(None).unwrap();
    assert!(table.contains("died in 3 of 3"), "{table}");
    assert!(report.html().unwrap().contains("vCPU 0: shutdown"));
}

#[test]
fn errors_that_the_kernel_could_not_handle_are_reported() {
    let change = |run: &mut Given| run.unhandled = u64::from(run.errors > 0);
    let report = measure_with(Timing::Native, |plan| plan.runs = 1, change);
    let view = report.view().unwrap();
    let hit = view
        .cells
        .iter()
        .filter(|cell| cell.series.poison_percent > 0);
    let wanted = format!("{} of the errors", hit.count());
    let table = report.table(None).unwrap();
    assert!(table.contains(&wanted), "{wanted} in\n{table}");
    let handled = measure(Timing::Native, |_| {}).table(None).unwrap();
    assert!(!handled.contains("of the errors the kernel"), "{handled}");
}

#[test]
fn a_guest_that_lost_all_of_its_memory_is_reported() {
    let change = |run: &mut Given| {
        if run.errors > 0 {
            run.words = 0;
        }
    };
    let report = measure_with(Timing::Native, |_| {}, change);
    let table = report.table(None).unwrap();
    assert!(
        table.contains("has no memory left") && table.contains("-100.00 %"),
        "{table}"
    );
}

#[test]
fn every_form_has_the_figures() {
    let report = measure(Timing::Instructions, |_| {});
    let table = report.table(None).unwrap();
    for wanted in [
        "thp, keep, 25 %",
        "-5.00 %",
        "-5.06 %",
        "-1.20 %",
        "64 MiB",
        "128 KiB",
        "survived",
        "0/128/0",
        "17\u{202f}205",
    ] {
        assert!(table.contains(wanted), "{wanted} in\n{table}");
    }
    let json = report.json().unwrap();
    assert!(Report::<Plan>::from_json(&json).unwrap() == report);
    for field in ["\"memory_bytes\": 268435456", "\"policy\":\"default\""] {
        assert!(json.contains(field), "{field} in {json}");
    }
    let page = report.html().unwrap();
    assert!(page.contains("</html>") && page.matches("<svg").count() == 2 * 2);
    assert!(!page.contains("src=\"http") && !page.contains("href=\"http"));
    assert!(report.svg().unwrap().starts_with("<svg"));
}
