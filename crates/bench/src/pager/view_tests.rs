use std::time::Duration;

use super::*;
use crate::benchmark::Job;
use crate::benchmark::tests::report_of;
use crate::latency::LatencyLog;
use crate::model::Sample;
use crate::report::Report;
use crate::timing::Timing;

/// The engine takes 2 % longer than the loop, and the server 10 %; a replay leaves 1 % of the faults.
fn sample(job: &Job<'_, Plan>) -> Sample {
    let percent = match job.series.way {
        Way::Raw | Way::Map => 100,
        Way::Engine => 102,
        Way::Server => 110,
        Way::Replay => 20,
        Way::Clone => 10,
    };
    let pages = 1000;
    let faults = match job.series.way {
        Way::Replay | Way::Clone => pages / 100,
        _ => pages,
    };
    let mut log = LatencyLog::new().unwrap();
    let sample = Sample::default()
        .time(ELAPSED, Duration::from_micros(pages * percent))
        .count(PAGES, pages)
        .count(FAULTS, faults);
    match job.series.part {
        Part::Random | Part::Image => {
            log.record(percent * 100);
            sample.count(P50, percent * 100).log(LATENCY, log)
        }
        _ => sample.log(LATENCY, log),
    }
}

fn measure(change: impl FnOnce(&mut Plan)) -> Report<Plan> {
    let mut plan = Plan {
        runs: 3,
        ..Plan::default()
    };
    change(&mut plan);
    report_of(&plan, Timing::Native, "cold was left out", sample)
}

fn assert_near(found: Option<f64>, wanted: f64) {
    let near = found.is_some_and(|found| (found / wanted - 1.0).abs() < 1e-2);
    assert!(near, "{found:?} is not {wanted}");
}

#[test]
fn each_way_is_compared_with_the_one_below_it() {
    let report = measure(|_| {});
    let view = report.view().unwrap();
    assert_eq!(view.cells.len(), 27 + 3);
    let ratio = |threads, series: Series, comparison: &Comparison<Series>| {
        let cell = view.cell(threads, series).expect("it was measured");
        Some(comparison.of(cell, &view.cells)?.paired.median)
    };
    assert_near(ratio(8, RANDOM, &LATENCY_OF_RAW), 1.02);
    assert_near(ratio(1, RANDOM, &RATE_OVER_RAW), 1.0 / 1.02);
    let server = Series {
        way: Way::Server,
        readers: None,
        ..RANDOM
    };
    assert_near(ratio(8, server, &LATENCY_OF_RAW), 1.1);
    assert_near(
        ratio(1, around_64(Via::Continue), &RATE_OVER_RAW),
        1.0 / 1.02,
    );
    assert_near(ratio(1, of(Part::Fill, Way::Server), &TIME_OF_RAW), 1.1);
    let cold = replay(Cache::Cold, Way::Replay);
    assert_near(ratio(1, cold, &FAULTS_OF_NO_REPLAY), 0.01);
    assert_near(ratio(1, cold, &SPEED_OVER_NO_REPLAY), 5.5);
    assert_near(ratio(1, cold, &TIME_OF_MAP), 0.2);
    for (series, comparison) in [
        (cold, &TIME_OF_RAW),
        (of(Part::Fill, Way::Raw), &TIME_OF_RAW),
        (of(Part::Fill, Way::Engine), &RATE_OVER_RAW),
        (of(Part::Fill, Way::Engine), &TIME_OF_MAP),
    ] {
        assert_eq!(ratio(1, series, comparison), None, "{series}");
    }
}

#[test]
fn every_form_has_the_figures_and_the_targets() {
    let report = measure(|_| {});
    let table = report.table(None).unwrap();
    for wanted in [
        "random \u{2013} engine: median touch, of raw",
        "at most 1.05",
        "cold was left out",
        "replay cold \u{2013} map",
    ] {
        assert!(table.contains(wanted), "{wanted} in\n{table}");
    }
    let view = report.view().unwrap();
    let met: Vec<_> = targets(&view)
        .unwrap()
        .rows
        .into_iter()
        .map(|row| row[4].clone())
        .collect();
    assert_eq!(met.len(), TARGETS.len());
    assert!(met.iter().all(|met| met == "yes"), "{met:?}\n{table}");
    let json = report.json().unwrap();
    assert!(Report::<Plan>::from_json(&json).unwrap() == report);
    let page = report.html().unwrap();
    assert!(page.contains("</html>") && page.matches("<svg").count() == 3);
    assert!(report.svg().unwrap().starts_with("<svg"));
}

#[test]
fn a_part_alone_has_what_belongs_to_it() {
    let report = measure(|plan| {
        plan.parts = vec![Part::Fill];
        plan.memory.0 = 64 << 20;
    });
    let view = report.view().unwrap();
    // Threads are those of another part.
    assert_eq!(view.cells.len(), 3);
    assert_eq!(targets(&view).unwrap().rows.len(), 2);
    assert!(report.svg().unwrap().starts_with("<svg"));
    assert_eq!(report.html().unwrap().matches("<svg").count(), 1);
}
