use std::time::Duration;

use super::*;
use crate::benchmark::{Job, Rig, run};
use crate::memslots::{Guest, Method};
use crate::progress::{Progress, Quiet};
use crate::report::{self, Report};
use crate::rounds::RunFailure;
use crate::timing::Timing;

/// Quiesce keeps vCPUs four times as long as the list, and the guest gets half of its work done.
struct MadeUp;

impl Rig<Plan> for MadeUp {
    fn run(&mut self, job: &Job<'_, Plan>, _: &mut dyn Progress) -> Result<Sample, RunFailure> {
        let commits_made = u64::from(job.plan.commits_of(job.series));
        let (kept, steps) = match job.series.method() {
            None => (1_000, 2_000_000),
            Some(Method::List) => (2_000, 2_000_000),
            Some(Method::Quiesce) => (8_000, 1_000_000),
            Some(Method::Plain) => (8_000, 500_000),
        };
        let mut log = LatencyLog::new().unwrap();
        log.record(kept);
        // The first vCPU, which all plans have, is kept that long, and all others half of it.
        let mut kept_each = LatencyLog::new().unwrap();
        for vcpu in 0..u64::from(job.vcpus) {
            kept_each.record(if vcpu == 0 { kept } else { kept / 2 });
        }
        let none = LatencyLog::new().unwrap();
        let commits = job.series.method().is_some();
        Ok(Sample {
            elapsed: Duration::from_millis(10),
            steps,
            commit: if commits { log.clone() } else { none.clone() },
            commit_total: Duration::from_nanos(kept * commits_made),
            inside: if commits { log.clone() } else { none },
            kept: log,
            kept_each,
            holes: match job.series.method() {
                Some(Method::Plain) => 3 * commits_made,
                _ => 0,
            },
            knows_stolen_time: job.vcpus < 4,
        })
    }
}

fn measure(timing: Timing, change: impl FnOnce(&mut Plan)) -> Result<MemslotsReport, BenchError> {
    let mut plan = Plan {
        vcpus: vec![1, 2],
        ops: vec![Op::Split, Op::Boot],
        runs: 3,
        ..Plan::default()
    };
    change(&mut plan);
    let environment = Environment {
        warnings: vec!["list was left out".to_owned()],
        ..Environment::gather(timing)
    };
    run(&plan, &mut MadeUp, environment, &mut Quiet)
}

#[test]
fn runs_are_summed_up_and_compared() {
    let report = measure(Timing::Native, |_| {}).unwrap();
    assert_eq!(report.points.len(), 2 * (1 + 2 * 3));
    let point = |method| {
        let op = Op::Split;
        report.point(2, Series::Commits { op, method }).unwrap()
    };
    let quiesce = point(Method::Quiesce);
    assert_eq!(quiesce.runs.len(), 3);
    assert!((quiesce.lost_percent.unwrap().median - 50.0).abs() < 1e-9);
    assert_eq!(point(Method::Plain).holes_per_commit.unwrap().median, 3.0);
    assert_eq!(report.ratios.len(), 2 * 2);
    let near = |ratio: f64| (ratio - 4.0).abs() < 0.02;
    assert!(
        report
            .ratios
            .iter()
            .all(|ratio| near(ratio.kept_p50.paired.median))
    );
    // Each series with 2 vCPUs, over itself with 1.
    assert_eq!(report.growth.len(), 1 + 2 * 3);
    for growth in &report.growth {
        assert_eq!((growth.vcpus, growth.over_vcpus), (2, 1));
        assert!((growth.kept_p50.paired.median - 1.0).abs() < 1e-9);
        assert!((growth.kept_each_p50.paired.median - 0.5).abs() < 1e-2);
    }
    let idle = report.point(1, Series::Idle).unwrap();
    assert!(idle.commit.is_none() && idle.lost_percent.is_none() && idle.boot_ms.is_none());
    assert!(report.notes.iter().any(|note| note == "list was left out"));
    assert!(report.knows_stolen_time);
}

#[test]
fn a_boot_is_86_updates() {
    let report = measure(Timing::Native, |plan| plan.commits = 87).unwrap();
    let series = Series::Commits {
        op: Op::Boot,
        method: Method::List,
    };
    let boot = report.point(1, series).unwrap();
    assert_eq!(boot.runs[0].commits, 172);
    assert!((boot.boot_ms.unwrap().median - 86.0 * 2_000.0 / 1e6).abs() < 1e-9);
    let published = report.published.as_ref().unwrap();
    assert_eq!(published.at(16, Method::Quiesce), Some(12.0));
    assert_eq!(published.at(16, Method::Plain), None);
}

#[test]
fn every_form_has_the_figures() {
    let report = measure(Timing::Instructions, |plan| {
        plan.vcpus = vec![1, 2, 8];
        plan.guest = Guest::Spin;
    })
    .unwrap();
    assert!(!report.knows_stolen_time);
    let table = report.table(None);
    for wanted in [
        "split by quiesce",
        "4.0",
        "published ms",
        "3.40",
        "no steal time",
        "over fewer vCPUs",
        "each p50",
    ] {
        assert!(table.contains(wanted), "{wanted} in\n{table}");
    }
    let json = report::json(&report).unwrap();
    let back: MemslotsReport = serde_json::from_str(&json).unwrap();
    assert!(back == report);
    let page = report.html().unwrap();
    assert!(page.contains("</html>") && page.matches("<svg").count() == 4);
    assert!(!page.contains("src=\"http") && !page.contains("href=\"http"));
    assert!(report.svg().unwrap().starts_with("<svg"));
}
