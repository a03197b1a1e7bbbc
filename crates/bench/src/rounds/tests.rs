use super::*;
use crate::progress::Quiet;

type Outcome = Result<Vec<Measured<&'static str, Vec<u64>>>, BenchError>;

/// Runs that do as `each` says; how many there were, and what the benchmark said.
fn runs(
    timing: Timing,
    mut each: impl FnMut(&Turn<&'static str>, u64) -> Result<u64, RunFailure>,
) -> (u64, Outcome) {
    let rounds = Rounds {
        vcpus: &[1, 2],
        series: &["uffd", "exit"],
        runs: 3,
        timing,
    };
    let mut tried = 0;
    let run = |turn: &Turn<&'static str>, _: &mut dyn Progress| {
        tried += 1;
        each(turn, tried)
    };
    let collect = |all: &mut Vec<u64>, turn: &Turn<&'static str>, sample: &u64| {
        if turn.measured() {
            all.push(*sample);
        }
        Ok(())
    };
    let result = measure(&rounds, &mut Quiet, run, || Ok(Vec::new()), collect);
    (tried, result)
}

fn lost() -> RunFailure {
    RunFailure::Lost("vCPU 1 made no progress".into())
}

#[test]
fn samples_go_to_their_series() {
    let (tried, result) = runs(Timing::Native, |turn, _| {
        let exit = u64::from(turn.series == "exit");
        Ok(u64::from(turn.round) * 100 + u64::from(turn.vcpus) * 10 + exit)
    });
    assert_eq!(tried, 2 * 2 * 4);
    let found: Vec<_> = result
        .unwrap()
        .into_iter()
        .map(|point| (point.vcpus, point.series, point.sum))
        .collect();
    let wanted = [
        (1, "uffd", vec![110, 210, 310]),
        (1, "exit", vec![111, 211, 311]),
        (2, "uffd", vec![120, 220, 320]),
        (2, "exit", vec![121, 221, 321]),
    ];
    assert_eq!(found, wanted);
}

#[test]
fn every_run_has_a_number_of_its_own() {
    let mut seen = std::collections::HashSet::new();
    let (_, result) = runs(Timing::Native, |turn, _| {
        assert!(seen.insert(turn.number), "{turn:?}");
        Ok(0)
    });
    assert!(result.is_ok());
}

#[test]
fn a_lost_run_is_repeated_and_counted_in_parallel_mode() {
    let (tried, result) = runs(Timing::Parallel, |_, tried| {
        if [2, 7, 8].contains(&tried) {
            Err(lost())
        } else {
            Ok(0)
        }
    });
    assert_eq!(tried, 16 + 3);
    let points = result.unwrap();
    assert_eq!(points.iter().map(|point| point.lost_runs).sum::<u32>(), 3);
    assert!(points.iter().all(|point| point.sum.len() == 3));
}

#[test]
fn a_hang_elsewhere_is_a_failure() {
    for timing in [Timing::Native, Timing::Function, Timing::Instructions] {
        let (tried, result) = runs(
            timing,
            |_, tried| if tried == 6 { Err(lost()) } else { Ok(0) },
        );
        assert_eq!(tried, 6, "it is not tried again");
        assert_eq!(
            told(&result.err().unwrap()),
            "round 1, 1 vCPU, uffd: vCPU 1 made no progress"
        );
    }
}

#[test]
fn a_run_that_always_hangs_ends_the_benchmark() {
    let (tried, result) = runs(Timing::Parallel, |_, _| Err(lost()));
    assert_eq!(tried, u64::from(ATTEMPTS));
    assert_eq!(
        told(&result.err().unwrap()),
        "warm-up, 1 vCPU, uffd: lost 5 times: vCPU 1 made no progress"
    );
}

#[test]
fn a_failed_run_ends_the_benchmark_with_its_cause() {
    let (_, result) = runs(Timing::Parallel, |turn, _| match turn.vcpus {
        2 => Err(RunFailure::Failed("page 7 holds zeroes".into())),
        _ => Ok(0),
    });
    assert_eq!(
        told(&result.err().unwrap()),
        "warm-up, 2 vCPUs, uffd: page 7 holds zeroes"
    );
}
