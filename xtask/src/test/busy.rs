//! The step `busy`: the crates' tests where a slow machine would fail them.
//!
//! All test programs run four times: as they are, for reference; under load; on one processor; in random order. A
//! failure in any of them counts, under a group that begins with the part's name. What took much longer than alone is
//! told at the end, and is no failure.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::thread::{CpuSet, sched_getaffinity};

use super::host::{self, How, TestProgram};
use super::log_file;
use super::seed::{self, Shuffle};
use super::tally::{Tally, Verdict};
use crate::load::{self, Load};
use crate::paths::Paths;

/// For the whole step, once the tests are compiled. What has not run then is skipped.
const LIMIT: Duration = Duration::from_secs(45 * 60);

/// After which a program that hangs is killed: under load each takes several times as long.
const TIMEOUT: Duration = Duration::from_secs(3 * host::TIMEOUT.as_secs());

/// Busy loops beside the tests.
const LOOPS: usize = 4;

/// How many times as long as alone a test has to take to be told of, ...
const TIMES: u32 = 10;

/// ... and how long at least.
const AT_LEAST: Duration = Duration::from_secs(1);

/// The parts, as the names of groups begin.
const ALONE: &str = "busy alone";
const LOADED: &str = "busy load";
const ONE_CPU: &str = "busy one-cpu";
const SHUFFLED: &str = "busy shuffled";

/// Runs the tests of all programs, or of those whose names begin with `program`.
pub(super) fn run(program: Option<&str>, paths: &Paths, tally: &mut Tally) -> Result<()> {
    host::install_moto("busy", paths, tally);
    let programs = host::chosen(program, host::programs(paths)?)?;
    let log = log_file(paths, "busy")?;
    tally.leaves("busy", "output.log", &log);
    let busy = Busy {
        programs,
        filter: None,
        held: load::holdable()?,
        log,
        deadline: Instant::now() + LIMIT,
    };
    busy.run(tally)
}

/// How long tests took, by group and name.
type Times = BTreeMap<(String, String), Duration>;

struct Busy {
    programs: Vec<TestProgram>,
    /// Only tests whose names contain this.
    filter: Option<&'static str>,
    /// How many bytes are held beside the tests under load.
    held: Option<u64>,
    log: PathBuf,
    deadline: Instant,
}

impl Busy {
    fn run(&self, tally: &mut Tally) -> Result<()> {
        let programs: Vec<&TestProgram> = self.programs.iter().collect();
        let as_usual = How {
            filter: self.filter,
            timeout: TIMEOUT,
            deadline: Some(self.deadline),
            ..How::default()
        };
        let part = |name| How {
            part: Some(name),
            ..as_usual
        };
        let alone = take(&programs, &part(ALONE), &self.log, tally)?;

        let loaded = self.under_load(&programs, &part(LOADED), tally)?;

        let starter = on_one_cpu()?;
        // By default libtest runs one test at a time on one processor: two get into each other's way, and a test
        // that prints does not stand in the middle of another one's line.
        let threads = ["--test-threads=2".to_owned()];
        let one_cpu = How {
            starter: &starter,
            arguments: &threads,
            ..part(ONE_CPU)
        };
        let one_cpu = take(&programs, &one_cpu, &self.log, tally)?;

        println!("{SHUFFLED}: {}", seed::assignment());
        let order = [format!("--shuffle-seed={}", seed::current())];
        let shuffled = How {
            arguments: &order,
            ..part(SHUFFLED)
        };
        let mut programs = programs;
        Shuffle::new(seed::current()).shuffle(&mut programs);
        let shuffled = take(&programs, &shuffled, &self.log, tally)?;

        let parts = [(LOADED, loaded), (ONE_CPU, one_cpu), (SHUFFLED, shuffled)];
        for line in told(&parts, &alone) {
            tally.note(line);
        }
        Ok(())
    }

    /// The tests beside busy loops and a process that holds most of the memory.
    fn under_load(
        &self,
        programs: &[&TestProgram],
        how: &How<'_>,
        tally: &mut Tally,
    ) -> Result<Times> {
        let mut load = Load::start(LOOPS, self.held.map(load::holder))?;
        let times = take(programs, how, &self.log, tally)?;
        let name = "the load lasted to the end";
        let verdict = match (load.ended()?.join("; "), self.held) {
            (ended, _) if !ended.is_empty() => Verdict::Skipped(format!("it ended early: {ended}")),
            (_, None) => Verdict::Skipped("there was too little memory to hold any of it".into()),
            (_, Some(held)) => {
                println!("{LOADED}: {LOOPS} busy loops, {} MiB held", held >> 20);
                Verdict::Passed
            }
        };
        tally.add(LOADED, name, verdict);
        Ok(times)
    }
}

/// Runs each program in one way, and returns how long each test took.
fn take(programs: &[&TestProgram], how: &How<'_>, log: &Path, tally: &mut Tally) -> Result<Times> {
    let mut all = Times::new();
    for program in programs {
        let times = host::run_program(program, how, log, tally)?;
        let group = &program.group;
        all.extend(
            times
                .into_iter()
                .map(|(name, time)| ((group.clone(), name), time)),
        );
    }
    Ok(all)
}

/// What starts a program on the first processor that this process may use.
fn on_one_cpu() -> Result<Vec<String>> {
    let allowed = sched_getaffinity(None).context("ask for the allowed processors")?;
    let first = (0..CpuSet::MAX_CPU).find(|cpu| allowed.is_set(*cpu));
    let first = first.context("no processor is allowed")?;
    Ok(["taskset", "-c", &first.to_string()]
        .map(str::to_owned)
        .into())
}

/// What is said at the end of the run.
fn told(parts: &[(&str, Times)], alone: &Times) -> Vec<String> {
    let slow = parts
        .iter()
        .flat_map(|(part, times)| slow(part, times, alone));
    let lines: Vec<_> = slow.collect();
    if !lines.is_empty() {
        return lines;
    }
    let (count, least) = (alone.len(), AT_LEAST.as_secs());
    vec![format!(
        "busy: of {count} tests, none took {TIMES} times as long as alone, and {least} s or more"
    )]
}

/// A line for each test that took much longer than alone, the slowest first.
fn slow(part: &str, times: &Times, alone: &Times) -> Vec<String> {
    let both = times
        .iter()
        .filter_map(|(test, time)| Some((test, *time, *alone.get(test)?)));
    let mut slow: Vec<_> = both
        .filter(|(_, time, alone)| *time >= AT_LEAST && *time >= *alone * TIMES)
        .collect();
    slow.sort_by_key(|(_, time, _)| std::cmp::Reverse(*time));
    let line = |((group, name), time, alone): (&(String, String), Duration, Duration)| {
        let (time, alone) = (time.as_secs_f64(), alone.as_secs_f64());
        format!("SLOW {part} {group}: {name}: {time:.1} s, alone {alone:.3} s")
    };
    slow.into_iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::Run;

    fn times(list: &[(&str, u64)]) -> Times {
        let of = |&(name, millis): &(&str, u64)| {
            let test = ("a/b".to_owned(), name.to_owned());
            (test, Duration::from_millis(millis))
        };
        list.iter().map(of).collect()
    }

    #[test]
    fn a_test_is_slow_from_ten_times_as_long_and_from_a_second() {
        let alone = times(&[("x", 100), ("y", 101), ("z", 1), ("quick", 5)]);
        let list = [
            ("x", 1000),
            ("y", 1009),
            ("z", 2500),
            ("quick", 999),
            ("new", 9000),
        ];
        let lines = told(&[(LOADED, times(&list)), (SHUFFLED, times(&[]))], &alone);
        assert_eq!(
            lines,
            [
                "SLOW busy load a/b: z: 2.5 s, alone 0.001 s",
                "SLOW busy load a/b: x: 1.0 s, alone 0.100 s",
            ]
        );
        let lines = told(&[(LOADED, alone.clone())], &alone);
        assert!(lines[0].starts_with("busy: of 4 tests, none"), "{lines:?}");
    }

    #[test]
    fn one_processor_is_one() {
        let starter = on_one_cpu().unwrap();
        let (program, arguments) = starter.split_first().unwrap();
        let count = Run::new(program).args(arguments).arg("nproc").text();
        assert_eq!(count.unwrap(), "1");
    }

    /// A test that takes no time.
    const QUICK: &str = "a_test_is_slow_from_ten_times_as_long_and_from_a_second";

    /// This test program, of which one test runs.
    fn itself(directory: &Path) -> Busy {
        let log = directory.join("log");
        std::fs::write(&log, "").unwrap();
        let program = TestProgram {
            group: "xtask (bin)".into(),
            package: "xtask".into(),
            executable: std::env::current_exe().unwrap(),
            directory: directory.to_owned(),
            integration: false,
        };
        Busy {
            programs: vec![program],
            filter: Some(QUICK),
            held: None,
            log,
            deadline: Instant::now() + LIMIT,
        }
    }

    #[test]
    fn each_test_counts_in_each_part() {
        let directory = tempfile::tempdir().unwrap();
        let busy = itself(directory.path());
        let mut tally = Tally::default();
        busy.run(&mut tally).unwrap();
        // The load is the one that is skipped, since it holds no memory here.
        assert_eq!(tally.closing_line(), "4 passed, 0 failed, 1 skipped");
        let groups: std::collections::BTreeSet<_> =
            tally.times().map(|(group, ..)| group).collect();
        let parts = [ALONE, LOADED, ONE_CPU, SHUFFLED];
        assert_eq!(
            groups,
            parts
                .map(|part| format!("{part} xtask (bin)"))
                .iter()
                .map(String::as_str)
                .collect()
        );
        let log = std::fs::read_to_string(&busy.log).unwrap();
        let order = format!("(shuffle seed: {})", seed::current());
        assert_eq!(log.matches(&order).count(), 1, "{log}");
    }

    #[test]
    fn what_has_not_run_when_the_time_is_over_is_skipped() {
        let directory = tempfile::tempdir().unwrap();
        let busy = Busy {
            deadline: Instant::now(),
            ..itself(directory.path())
        };
        let mut tally = Tally::default();
        busy.run(&mut tally).unwrap();
        assert_eq!(tally.closing_line(), "0 passed, 0 failed, 5 skipped");
    }
}
