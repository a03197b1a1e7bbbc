//! Reading what a Rust test binary prints (docs/decisions/0013-libtests-text.md).

use std::collections::BTreeMap;
use std::time::Duration;

use super::tally::{Tally, Verdict};

/// What a binary that ran with `--show-output` told.
#[derive(Debug, Default)]
pub(super) struct Report {
    /// Name and verdict.
    tests: Vec<(String, Verdict)>,
    /// Name and time, if the binary told times.
    times: Vec<(String, Duration)>,
    /// How many tests the `test result:` lines speak of; `None` if the binary did not get there.
    total: Option<usize>,
}

impl Report {
    /// Reads a binary's whole output.
    pub(super) fn parse(output: &str) -> Self {
        let mut report = Self::default();
        let mut printed: BTreeMap<&str, String> = BTreeMap::new();
        let mut section = None;
        for line in output.lines() {
            if let Some((name, verdict, time)) = result_line(line) {
                report.times.extend(time.map(|time| (name.clone(), time)));
                report.tests.push((name, verdict));
                section = None;
            } else if let Some(totals) = line.strip_prefix("test result: ") {
                report.total = Some(report.total.unwrap_or(0) + total(totals));
                section = None;
            } else if matches!(line, "successes:" | "failures:") {
                section = None;
            } else if let Some(name) = section_line(line) {
                section = Some(name);
            } else if let Some(name) = section {
                let text = printed.entry(name).or_default();
                text.extend([line, "\n"]);
            }
        }
        for (name, verdict) in &mut report.tests {
            let text = printed.get(name.as_str()).map_or("", String::as_str);
            match verdict {
                // A test that left a part of itself out did not pass as a whole.
                Verdict::Passed => {
                    if let Some(reason) = skip_reason(text) {
                        *verdict = Verdict::Skipped(reason);
                    }
                }
                Verdict::Failed(cause) => *cause = last_lines(text),
                Verdict::Skipped(_) => {}
            }
        }
        report
    }

    /// Whether no test ran at all.
    pub(super) fn is_empty(&self) -> bool {
        self.tests.is_empty()
    }

    /// How long each test took, if the binary told.
    pub(super) fn times(&self) -> &[(String, Duration)] {
        &self.times
    }

    /// Counts the tests that came to a result under a group's name, with their times.
    pub(super) fn count_results(self, group: &str, tally: &mut Tally) {
        for (name, time) in self.times {
            tally.time(group, &name, time);
        }
        for (name, verdict) in self.tests {
            tally.add(group, &name, verdict);
        }
    }

    /// Counts the tests under a group's name. `ended` is why the binary did not end well, if it
    /// did not; a binary that died before its end is a failure of its own.
    pub(super) fn count(self, group: &str, ended: Option<&str>, tally: &mut Tally) {
        let is_failed = |(_, verdict): &(String, Verdict)| matches!(verdict, Verdict::Failed(_));
        let (read, explained) = (self.tests.len(), self.tests.iter().any(is_failed));
        let total = self.total;
        self.count_results(group, tally);
        let cause = match (total, ended) {
            (None, ended) => ended.unwrap_or("it told no result").to_owned(),
            (Some(_), Some(ended)) if !explained => ended.to_owned(),
            // Something else in its output hid a line.
            (Some(total), _) if total != read => {
                format!("it ran {total} tests, and {read} results could be read")
            }
            (Some(_), _) => return,
        };
        tally.add(group, "the test program", Verdict::Failed(cause));
    }
}

/// Arguments with which a test binary shows what its tests print, and tells their times. The latter is unstable, and
/// takes [`UNSTABLE`].
pub(super) const ARGUMENTS: [&str; 4] =
    ["--show-output", "-Z", "unstable-options", "--report-time"];

/// The variable with which a stable toolchain's test binaries take unstable options.
pub(super) const UNSTABLE: (&str, &str) = ("RUSTC_BOOTSTRAP", "1");

/// `test NAME ... ok` and its like, with the time if there is one: `ok <0.012s>`. Another thread's output may stand
/// between name and result.
fn result_line(line: &str) -> Option<(String, Verdict, Option<Duration>)> {
    let (name, result) = line.strip_prefix("test ")?.rsplit_once(" ... ")?;
    let (result, time) = match timed(result) {
        Some((result, time)) => (result, Some(time)),
        None => (result, None),
    };
    let name = name
        .strip_suffix(" - should panic")
        .unwrap_or(name)
        .to_owned();
    let verdict = match result
        .split_once(',')
        .map_or(result, |(word, _)| word)
        .trim()
    {
        "ok" => Verdict::Passed,
        "FAILED" => Verdict::Failed(String::new()),
        "ignored" => {
            let reason = result
                .split_once(", ")
                .map_or("ignored", |(_, reason)| reason);
            Verdict::Skipped(reason.to_owned())
        }
        _ => return None,
    };
    Some((name, verdict, time))
}

/// A result and its time. A reason of an ignored test may look like a time, but such a test has none.
fn timed(result: &str) -> Option<(&str, Duration)> {
    let (result, time) = result.strip_suffix("s>")?.rsplit_once(" <")?;
    let time = Duration::try_from_secs_f64(time.parse().ok()?).ok()?;
    (result == "ok" || result == "FAILED").then_some((result, time))
}

/// How many tests there were by the rest of a `test result:` line, but for those that were filtered out:
/// `ok. 2 passed; 0 failed; 1 ignored; 0 measured; 5 filtered out; finished in 0.1s`.
fn total(line: &str) -> usize {
    let counts = line.split(['.', ';']).filter_map(|part| {
        let (count, what) = part.trim().split_once(' ')?;
        matches!(what, "passed" | "failed" | "ignored").then_some(count)
    });
    counts.filter_map(|count| count.parse::<usize>().ok()).sum()
}

/// `---- NAME stdout ----`
fn section_line(line: &str) -> Option<&str> {
    line.strip_prefix("---- ")?.strip_suffix(" stdout ----")
}

/// The reasons of a test's `SKIP:` lines.
fn skip_reason(text: &str) -> Option<String> {
    let reasons: Vec<_> = text
        .lines()
        .filter_map(|line| line.trim().strip_prefix("SKIP: "))
        .collect();
    (!reasons.is_empty()).then(|| reasons.join("; "))
}

/// The last of what a test printed, but for where in the code that was: a backtrace would push out what
/// went wrong. The whole text is in the log.
fn last_lines(text: &str) -> String {
    let mut in_backtrace = false;
    let lines: Vec<_> = text
        .lines()
        .filter(|line| {
            in_backtrace = *line == "stack backtrace:" || in_backtrace && line.starts_with(' ');
            !in_backtrace && !line.trim().is_empty()
        })
        .collect();
    let first = lines.len().saturating_sub(20);
    lines[first..].join("\n  ")
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = "
running 4 tests
test a::passes ... ok
test b ... ok
test c ... FAILED
test d ... ignored, too slow

successes:

---- b stdout ----
SKIP: no /dev/kvm
SKIP: no pool

successes:
    a::passes
    b

failures:

---- c stdout ----
thread 'c' panicked at src/lib.rs:1:1:
boom
stack backtrace:
   0: __rustc::rust_begin_unwind
             at /rustc/library/std/src/panicking.rs:689:5
note: Some details are omitted, run with `RUST_BACKTRACE=full` for a verbose backtrace.

failures:
    c

test result: FAILED. 2 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out
";

    #[test]
    fn verdicts_and_reasons_are_read() {
        let report = Report::parse(OUTPUT);
        assert_eq!(report.total, Some(4));
        let verdict = |name: &str| {
            report
                .tests
                .iter()
                .find(|(n, _)| n == name)
                .map(|(_, v)| v.clone())
                .unwrap()
        };
        assert_eq!(verdict("a::passes"), Verdict::Passed);
        assert_eq!(
            verdict("b"),
            Verdict::Skipped("no /dev/kvm; no pool".into())
        );
        assert_eq!(verdict("d"), Verdict::Skipped("too slow".into()));
        let Verdict::Failed(cause) = verdict("c") else {
            panic!("c did not fail")
        };
        assert!(cause.contains("boom") && !cause.contains("SKIP"), "{cause}");
        assert!(!cause.contains("rust_begin_unwind"), "{cause}");
    }

    #[test]
    fn times_are_read_and_change_no_verdict() {
        let output = OUTPUT
            .replace("passes ... ok", "passes ... ok <0.012s>")
            .replace("c ... FAILED", "c ... FAILED <61.500s>")
            .replace("too slow", "too slow <9.000s>");
        let report = Report::parse(&output);
        let times = [("a::passes", 12), ("c", 61_500)];
        let times = times.map(|(name, time)| (name.to_owned(), Duration::from_millis(time)));
        assert_eq!(report.times(), times);
        let mut tally = Tally::default();
        report.count("g", Some("exit status 101"), &mut tally);
        assert_eq!(tally.closing_line(), "1 passed, 1 failed, 2 skipped");
        assert!(tally.details().contains("too slow <9.000s>"));
        assert_eq!(tally.times().count(), 2);
        assert_eq!(timed("ok <-1.0s>"), None);
        assert_eq!(timed("ok <s>"), None);
    }

    #[test]
    fn a_program_without_tests_is_seen() {
        assert!(Report::parse("running 0 tests\n\ntest result: ok. 0 passed\n").is_empty());
        assert!(!Report::parse(OUTPUT).is_empty());
    }

    #[test]
    fn a_program_that_dies_is_a_failure() {
        let mut tally = Tally::default();
        Report::parse("test a ... ok\n").count("g", Some("killed by signal 11"), &mut tally);
        assert_eq!(tally.closing_line(), "1 passed, 1 failed, 0 skipped");
    }

    #[test]
    fn a_result_that_cannot_be_read_is_a_failure() {
        let mut tally = Tally::default();
        let hidden = OUTPUT.replace("test b ...", "what a child printed: test b ...");
        Report::parse(&hidden).count("g", None, &mut tally);
        assert_eq!(tally.closing_line(), "1 passed, 2 failed, 1 skipped");
        assert!(tally.details().contains("it ran 4 tests, and 3 results"));
        let mut tally = Tally::default();
        let all = "test a ... ok\ntest result: ok. 1 passed; 0 failed; 2 filtered out\n";
        Report::parse(&all.repeat(2)).count("g", None, &mut tally);
        assert_eq!(tally.closing_line(), "1 passed, 0 failed, 0 skipped");
    }

    #[test]
    fn a_failed_test_explains_the_exit_status() {
        let mut tally = Tally::default();
        Report::parse(OUTPUT).count("g", Some("exit status 101"), &mut tally);
        assert_eq!(tally.closing_line(), "1 passed, 1 failed, 2 skipped");
    }
}
