use std::collections::HashSet;

use super::*;
use crate::latency::LatencyLog;
use crate::model::{LOST_RUNS, Record};
use crate::paging::{
    Delivery, ELAPSED, EXITS, INSTRUCTIONS, INSTRUCTIONS_OVER_UFFD, LATENCY, MESSAGES, PAGES, Plan,
    RATE, RATE_OVER_UFFD, RATE_PER_VCPU,
};
use crate::progress::Quiet;
use crate::units::ByteSize;

/// A rig whose runs are calls of a function.
pub(crate) struct Fake<F>(pub(crate) F);

impl<B, F> Rig<B> for Fake<F>
where
    B: Benchmark,
    F: FnMut(&Job<'_, B>) -> Result<Sample, RunFailure>,
{
    fn run(&mut self, job: &Job<'_, B>, _: &mut dyn Progress) -> Result<Sample, RunFailure> {
        (self.0)(job)
    }
}

/// The report of a plan whose runs give what a function says, and of which one thing is doubtful.
pub(crate) fn report_of<B: Shown>(
    plan: &B,
    timing: Timing,
    doubt: &str,
    mut sample: impl FnMut(&Job<'_, B>) -> Sample,
) -> Report<B> {
    assert_eq!(plan.check(), Ok(()));
    let mut rig = Fake(|job: &Job<'_, B>| Ok(sample(job)));
    let environment = Environment {
        warnings: vec![doubt.to_owned()],
        ..Environment::of_made_up(timing)
    };
    run(plan, &mut rig, environment, &mut Quiet).unwrap()
}

/// Notes what it hears.
#[derive(Default)]
struct Heard {
    runs: u64,
    steps: Vec<String>,
    done: u64,
    messages: Vec<String>,
    ended: bool,
}

impl Progress for Heard {
    fn begin(&mut self, runs: u64) {
        self.runs = runs;
    }

    fn step(&mut self, what: &str) {
        self.steps.push(what.to_owned());
    }

    fn done(&mut self) {
        self.done += 1;
    }

    fn message(&mut self, text: &str) {
        self.messages.push(text.to_owned());
    }

    fn end(&mut self) {
        self.ended = true;
    }
}

/// What came of a plan.
struct Outcome {
    /// How many runs were tried.
    tried: u64,
    heard: Heard,
    result: Result<Report<Plan>, BenchError>,
}

impl Outcome {
    fn report(self) -> Report<Plan> {
        self.result.unwrap()
    }

    fn error(self) -> BenchError {
        self.result.expect_err("it fails")
    }
}

/// 1 MiB per vCPU: 256 pages.
fn plan() -> Plan {
    Plan {
        vcpus: vec![1, 2],
        per_vcpu: ByteSize(1 << 20),
        runs: 3,
        ..Plan::default()
    }
}

fn with_1_vcpu() -> Plan {
    Plan {
        vcpus: vec![1],
        ..plan()
    }
}

/// Runs a plan, each run for as many nanoseconds as a function says of its job and its number, which
/// counts from 1 and counts lost runs as well.
fn runs(
    plan: &Plan,
    timing: Timing,
    mut each: impl FnMut(&Job<'_, Plan>, u64) -> Result<u64, RunFailure>,
) -> Outcome {
    let mut tried = 0;
    let mut rig = Fake(|job: &Job<'_, Plan>| {
        tried += 1;
        let elapsed_ns = each(job, tried)?;
        let mut latency = LatencyLog::new().unwrap();
        latency.record(elapsed_ns / 1000);
        let pages = job.plan.total_pages(job.vcpus);
        Ok(Sample::default()
            .count(ELAPSED, elapsed_ns)
            .count(PAGES, pages)
            .count(EXITS, pages)
            .count(MESSAGES, 0)
            .log(LATENCY, latency))
    });
    let environment = Environment {
        lost_runs_outside: 2,
        ..Environment::of_made_up(timing)
    };
    let mut heard = Heard::default();
    let result = run(plan, &mut rig, environment, &mut heard);
    Outcome {
        tried,
        heard,
        result,
    }
}

fn lost() -> RunFailure {
    RunFailure::Lost("vCPU 1 made no progress".into())
}

#[test]
fn samples_go_to_their_cells() {
    let outcome = runs(&plan(), Timing::Native, |job, number| {
        let round = (number - 1) / 4;
        let exit = u64::from(job.series.delivery == Delivery::Exit);
        Ok(round * 100 + u64::from(job.vcpus) * 10 + exit)
    });
    assert_eq!(outcome.tried, 2 * 2 * 4);
    let report = outcome.report();
    let view = report.view().unwrap();
    let found: Vec<_> = view
        .cells
        .iter()
        .map(|cell| {
            let runs = cell.runs.iter();
            let values = runs.map(|run| (run.round, run.count(ELAPSED)));
            (cell.vcpus, cell.series.delivery, values.collect())
        })
        .collect();
    let wanted = [
        (1, Delivery::Uffd, vec![(1, 110), (2, 210), (3, 310)]),
        (1, Delivery::Exit, vec![(1, 111), (2, 211), (3, 311)]),
        (2, Delivery::Uffd, vec![(1, 120), (2, 220), (3, 320)]),
        (2, Delivery::Exit, vec![(1, 121), (2, 221), (3, 321)]),
    ];
    assert_eq!(found, wanted);
    let latency = view.cells[3].latency(LATENCY).unwrap();
    assert_eq!(latency.count, 3, "the warm-up does not count");
}

#[test]
fn every_run_has_a_seed_of_its_own() {
    let mut seen = HashSet::new();
    let outcome = runs(&plan(), Timing::Native, |job, _| {
        assert!(seen.insert(job.seed), "{job:?}");
        Ok(1000)
    });
    assert_eq!(outcome.tried, 16);
    assert!(outcome.result.is_ok());
}

#[test]
fn progress_hears_of_every_run() {
    let outcome = runs(&plan(), Timing::Parallel, |_, number| {
        if number == 2 { Err(lost()) } else { Ok(1000) }
    });
    let Heard {
        runs,
        steps,
        done,
        messages,
        ended,
    } = outcome.heard;
    assert_eq!((runs, steps.len(), done, ended), (16, 16, 16, true));
    assert_eq!(steps[0], "warm-up, 1 vCPU, uffd");
    assert_eq!(steps[6], "round 1, 2 vCPUs, exit", "{steps:?}");
    let wanted = "warm-up, 1 vCPU, exit: lost, trying again (vCPU 1 made no progress)";
    assert_eq!(messages, [wanted]);
}

#[test]
fn a_lost_run_is_repeated_and_counted_in_parallel_mode() {
    let outcome = runs(&plan(), Timing::Parallel, |_, number| {
        if [2, 7, 8].contains(&number) {
            Err(lost())
        } else {
            Ok(1000)
        }
    });
    assert_eq!(outcome.tried, 16 + 3);
    let report = outcome.report();
    let view = report.view().unwrap();
    assert!(view.cells.iter().all(|cell| cell.runs.len() == 3));
    let lost: Vec<_> = view
        .cells
        .iter()
        .map(|cell| cell.over_runs(LOST_RUNS, "sum").unwrap())
        .collect();
    // The second run, of the round that warms up, and twice the sixth.
    assert_eq!(lost, [2.0, 1.0, 0.0, 0.0]);
    assert_eq!(
        (report.origin.lost_runs, report.origin.lost_runs_outside),
        (3, 2)
    );
    assert_eq!(
        report.notes[1],
        "3 runs were lost and repeated. The caller lost and repeated 2 more."
    );
}

#[test]
fn a_hang_elsewhere_is_a_failure() {
    for timing in [Timing::Native, Timing::Function, Timing::Instructions] {
        let outcome = runs(&plan(), timing, |_, number| {
            if number == 6 { Err(lost()) } else { Ok(1000) }
        });
        assert_eq!(outcome.tried, 6, "it is not tried again");
        assert_eq!(
            one_line(&outcome.error()),
            "round 1, 1 vCPU, uffd: vCPU 1 made no progress"
        );
    }
}

#[test]
fn a_run_that_always_hangs_ends_the_benchmark() {
    let outcome = runs(&plan(), Timing::Parallel, |_, _| Err(lost()));
    assert_eq!(outcome.tried, u64::from(ATTEMPTS));
    assert_eq!(
        one_line(&outcome.error()),
        "warm-up, 1 vCPU, uffd: lost 5 times: vCPU 1 made no progress"
    );
}

#[test]
fn a_failed_run_ends_the_benchmark_with_its_cause() {
    let outcome = runs(&plan(), Timing::Parallel, |job, _| match job.vcpus {
        2 => Err(RunFailure::Failed("page 7 holds zeroes".into())),
        _ => Ok(1000),
    });
    assert_eq!(
        one_line(&outcome.error()),
        "warm-up, 2 vCPUs, uffd: page 7 holds zeroes"
    );
}

#[test]
fn a_run_without_time_makes_no_rate() {
    let outcome = runs(&plan(), Timing::Native, |_, _| Ok(0));
    assert_eq!(outcome.tried, 1);
    let error = outcome.error();
    assert!(matches!(error, BenchError::NoTime { .. }), "{error:?}");
    assert_eq!(
        one_line(&error),
        "warm-up, 1 vCPU, uffd: elapsed_ns is 0, which makes no rate"
    );
    let mut timeless = Fake(|_: &Job<'_, Plan>| Ok(Sample::default().count(PAGES, 256)));
    let environment = Environment::of_made_up(Timing::Native);
    let error = run(&plan(), &mut timeless, environment, &mut Quiet).unwrap_err();
    assert!(matches!(error, BenchError::NoTime { .. }), "{error:?}");
}

#[test]
fn medians_rates_and_ratios_come_out() {
    let plan = plan();
    // uffd takes 256 µs for each vCPU, exit half of it; the warm-up takes a second and must not count.
    let report = runs(&plan, Timing::Native, |job, number| {
        Ok(match (number, job.series.delivery) {
            (1..=4, _) => 1_000_000_000,
            (_, Delivery::Uffd) => 256_000 * u64::from(job.vcpus),
            _ => 128_000 * u64::from(job.vcpus),
        })
    });
    let report = report.report();
    let view = report.view().unwrap();
    let [uffd, exit] = plan.series()[..] else {
        unreachable!()
    };
    let cell = view.cell(2, uffd).unwrap();
    // 512 pages in 512 µs: a thousand thousands per second.
    let rate = cell.spread(RATE).unwrap();
    assert_eq!((rate.median, rate.count), (1000.0, 3));
    assert_eq!(cell.spread(RATE_PER_VCPU).unwrap().median, 500.0);
    assert_eq!(cell.latency(LATENCY).unwrap().count, 3);
    assert!(RATE_OVER_UFFD.of(cell, &view.cells).is_none());
    let cell = view.cell(1, exit).unwrap();
    let ratio = RATE_OVER_UFFD.of(cell, &view.cells).unwrap();
    assert_eq!((ratio.paired.median, ratio.of_medians), (2.0, 2.0));
    assert_eq!(report.origin.lost_runs, 0);

    // The same for those who read the data and compute nothing.
    let summed = |quantity: &str, over: &str, vcpus: u32| {
        let is = |record: &&Record| {
            record.run.is_none()
                && record.quantity == quantity
                && record.over_runs.as_deref() == Some(over)
                && record.axes["vcpus"] == vcpus
        };
        let found = report.records.iter().filter(is);
        found
            .map(|record| (record.series.as_str(), record.value))
            .collect::<Vec<_>>()
    };
    let rates = [("uffd", 1000.0), ("exit", 2000.0)];
    assert_eq!(summed(RATE.name, "median", 2), rates);
    assert_eq!(summed(RATE_OVER_UFFD.name, "median", 2), [("exit", 2.0)]);
    let of_medians = summed(RATE_OVER_UFFD.name, "of_medians", 1);
    assert_eq!(of_medians, [("exit", 2.0)]);
    let no_instructions = [INSTRUCTIONS.name, INSTRUCTIONS_OVER_UFFD.name];
    for name in no_instructions {
        assert_eq!(summed(name, "median", 1), [], "{name}: 1 ns is 1 ns");
    }
}

#[test]
fn ratios_pair_runs_of_one_round() {
    // Each round is slower than the one before; exit always takes half of uffd's time.
    let outcome = runs(&with_1_vcpu(), Timing::Native, |job, number| {
        let slower = 1 << ((number - 1) / 2);
        Ok(if job.series.delivery == Delivery::Uffd {
            100_000 * slower
        } else {
            50_000 * slower
        })
    });
    let report = outcome.report();
    let view = report.view().unwrap();
    let ratio = RATE_OVER_UFFD.of(&view.cells[1], &view.cells).unwrap();
    let paired = ratio.paired;
    assert_eq!((paired.min, paired.median, paired.max), (2.0, 2.0, 2.0));
}

#[test]
fn instructions_are_reported_where_a_nanosecond_is_one() {
    let outcome = runs(&with_1_vcpu(), Timing::Instructions, |job, _| {
        Ok(if job.series.delivery == Delivery::Uffd {
            256 * 20_000
        } else {
            256 * 10_000
        })
    });
    let report = outcome.report();
    let view = report.view().unwrap();
    let costs: Vec<_> = view
        .cells
        .iter()
        .map(|cell| cell.spread(INSTRUCTIONS).unwrap().median)
        .collect();
    assert_eq!(costs, [20_000.0, 10_000.0]);
    let ratio = INSTRUCTIONS_OVER_UFFD.of(&view.cells[1], &view.cells);
    let median = ratio.unwrap().paired.median;
    assert!((median - 0.5).abs() < 1e-9, "{median}");
    let names = report.records.iter().map(|record| record.quantity.as_str());
    let names: HashSet<_> = names.collect();
    assert!(names.contains(INSTRUCTIONS.name) && names.contains(INSTRUCTIONS_OVER_UFFD.name));
    let table = report.table(None).unwrap();
    for wanted in ["instructions/page", "instructions, times uffd"] {
        assert!(table.contains(wanted), "{wanted} in\n{table}");
    }
    assert!(
        report.notes[0].contains("one executed instruction"),
        "{:?}",
        report.notes
    );
}
