use std::time::Duration;

use pagetide_memory::FailurePolicy;

use super::*;
use crate::benchmark::{Job, Rig, run};
use crate::memcycler::Mappings;
use crate::progress::{Progress, Quiet};
use crate::report::{self, Report};
use crate::rounds::RunFailure;

/// By default errors cost a fifth of the percent that they hit, and 2 MiB each; a guest does not survive
/// 100 %.
struct MadeUp;

impl Rig<Plan> for MadeUp {
    fn run(&mut self, job: &Job<'_, Plan>, _: &mut dyn Progress) -> Result<Sample, RunFailure> {
        let Series {
            policy,
            poison_percent,
            ..
        } = job.series;
        let errors = job.plan.errors(poison_percent);
        let taken = policy == FailurePolicy::KernelDefault;
        let cost = if taken { u64::from(poison_percent) } else { 0 };
        let huge = Mappings {
            mappings_2m: job.plan.pieces(),
            ..Mappings::default()
        };
        Ok(Sample {
            elapsed: Duration::from_secs(1),
            words: 500_000_000 - cost * 1_000_000,
            seconds_words_per_us: vec![500.0],
            errors,
            errors_unhandled: 0,
            errors_in_lost_memory: 0,
            before: huge,
            after: if taken { Mappings::default() } else { huge },
            unusable_bytes: if taken { errors << 21 } else { 0 },
            corrupted_bytes: errors << 12,
            died_of: (poison_percent == 100).then(|| "vCPU 0: shutdown".to_owned()),
        })
    }
}

/// The same, but for what the function changes.
struct Changed(fn(Sample) -> Sample);

impl Rig<Plan> for Changed {
    fn run(
        &mut self,
        job: &Job<'_, Plan>,
        progress: &mut dyn Progress,
    ) -> Result<Sample, RunFailure> {
        MadeUp.run(job, progress).map(self.0)
    }
}

fn measure(timing: Timing, change: impl FnOnce(&mut Plan)) -> MemcyclerReport {
    let mut plan = Plan {
        vcpus: vec![1, 2],
        runs: 3,
        ..Plan::default()
    };
    change(&mut plan);
    assert_eq!(plan.check(), Ok(()));
    let environment = Environment {
        warnings: vec!["keep was left out".to_owned()],
        ..Environment::gather(timing)
    };
    run(&plan, &mut MadeUp, environment, &mut Quiet).unwrap()
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
    assert_eq!((report.points.len(), report.ratios.len()), (2 * 6, 2 * 4));
    let near = |found: f64, wanted: f64| (found - wanted).abs() < 1e-9;
    let default = series(FailurePolicy::KernelDefault, 25);
    let point = report.point(2, default).unwrap();
    assert!(near(point.rate_words_per_us.unwrap().median, 475.0));
    assert!(near(point.hit_percent, 25.0));
    // 32 of 128 pieces.
    assert!(near(point.lost_bytes.median, f64::from(32 << 21)));
    assert!(near(report.ratio(2, default).unwrap().loss_percent(), 5.0));
    let keep = series(FailurePolicy::Keep, 25);
    let point = report.point(1, keep).unwrap();
    assert!(near(point.lost_bytes.median, f64::from(32 << 12)));
    assert!(near(report.ratio(1, keep).unwrap().loss_percent(), 0.0));
    assert!(report.ratio(1, keep.baseline()).is_none());
    assert!(report.notes.iter().any(|note| note == "keep was left out"));
}

#[test]
fn a_guest_that_dies_has_no_rate() {
    let report = measure(Timing::Native, |plan| plan.poison_percent = vec![100]);
    let point = report.point(1, series(FailurePolicy::Keep, 100)).unwrap();
    assert!(point.rate_words_per_us.is_none());
    assert!(report.ratios.is_empty());
    let table = report.table(None);
    assert!(table.contains("died in 3 of 3"), "{table}");
    assert!(report.html().unwrap().contains("vCPU 0: shutdown"));
}

#[test]
fn errors_that_the_kernel_could_not_handle_are_told() {
    let mut unhandled = Changed(|sample| Sample {
        errors_unhandled: u64::from(sample.errors > 0),
        ..sample
    });
    let plan = Plan {
        runs: 1,
        ..Plan::default()
    };
    let environment = Environment::gather(Timing::Native);
    let report = run(&plan, &mut unhandled, environment, &mut Quiet).unwrap();
    let hit = report.points.iter().filter(|p| p.series.poison_percent > 0);
    let told = format!("{} of the errors", hit.count());
    assert!(report.table(None).contains(&told), "{told}");
    let handled = measure(Timing::Native, |_| {});
    assert!(!handled.table(None).contains("of the errors the kernel"));
}

#[test]
fn a_guest_that_lost_all_of_its_memory_is_told() {
    let mut taken = Changed(|sample| Sample {
        words: if sample.errors > 0 { 0 } else { sample.words },
        ..sample
    });
    let environment = Environment::gather(Timing::Native);
    let report = run(&Plan::default(), &mut taken, environment, &mut Quiet).unwrap();
    let table = report.table(None);
    assert!(
        table.contains("has no memory left") && table.contains("-100.00 %"),
        "{table}"
    );
}

#[test]
fn every_form_has_the_figures() {
    let report = measure(Timing::Instructions, |_| {});
    let table = report.table(None);
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
    let json = report::json(&report).unwrap();
    let back: MemcyclerReport = serde_json::from_str(&json).unwrap();
    assert!(back == report);
    for field in ["\"memory_bytes\": 268435456", "\"policy\": \"default\""] {
        assert!(json.contains(field), "{field} in {json}");
    }
    let page = report.html().unwrap();
    assert!(page.contains("</html>") && page.matches("<svg").count() == 2 * 2);
    assert!(!page.contains("src=\"http") && !page.contains("href=\"http"));
    assert!(report.svg().unwrap().starts_with("<svg"));
}
