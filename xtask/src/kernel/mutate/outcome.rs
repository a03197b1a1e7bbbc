//! What a test's end says of a mutation.

use serde::{Deserialize, Serialize};

use crate::vm::Ended;

/// What became of a test on a kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Verdict {
    /// It failed, with the first things that failed: on a mutated kernel what is hoped for.
    Red(String),
    /// It passed.
    Green,
    /// It says nothing: the test was skipped, or the VM was lost without a word of the kernel.
    Nothing(String),
}

/// How many failures are told.
const TOLD: usize = 2;

impl Verdict {
    /// Of a test that ended in this way and printed this.
    pub(crate) fn of(ended: Ended, text: &str) -> Self {
        match ended {
            Ended::Exit(0) => Self::Green,
            // A part of it was skipped, or all.
            Ended::Exit(super::KSFT_SKIP) if text.lines().any(is_passed) => Self::Green,
            Ended::Exit(super::KSFT_SKIP) => Self::Nothing(format!("skipped: {}", last_line(text))),
            _ => Self::Red(failures(ended, text)),
        }
    }

    /// Of what the kernel said while all tests passed.
    pub(crate) fn of_complaints(self, complaints: &[String]) -> Self {
        match (&self, complaints.first()) {
            (Self::Red(_), _) | (_, None) => self,
            (Self::Green | Self::Nothing(_), Some(first)) => {
                Self::Red(format!("the kernel: {}", first.trim()))
            }
        }
    }

    pub(crate) fn is_red(&self) -> bool {
        matches!(self, Self::Red(_))
    }
}

/// The names of subtests that failed, or the assertion, or the last line.
fn failures(ended: Ended, text: &str) -> String {
    let end = match ended {
        Ended::Timeout => Some("did not end".to_owned()),
        Ended::Signal(_) => Some(ended.to_string()),
        Ended::Exit(_) => None,
    };
    let mut found: Vec<String> = text.lines().filter_map(subtest).collect();
    let place = place(text);
    if found.is_empty() {
        // The test ended there, without a name.
        found.extend(assertion(text).map(|what| format!("{what}{place}")));
    }
    let more = found.len().saturating_sub(TOLD);
    found.truncate(TOLD);
    let mut told = found.join("; ");
    if more > 0 {
        told += &format!("; {more} more");
    }
    match (end, told.is_empty()) {
        (None, true) => last_line(text),
        (None, false) => told,
        (Some(end), true) => format!("{end}{place}"),
        (Some(end), false) => format!("{told}; {end}"),
    }
}

/// "not ok 3 the name # comment": the name.
fn subtest(line: &str) -> Option<String> {
    numbered(line.trim().strip_prefix("not ok ")?)
}

fn passed(line: &str) -> Option<String> {
    numbered(line.trim().strip_prefix("ok ")?)
}

fn is_passed(line: &str) -> bool {
    line.trim().starts_with("ok ") && !line.contains("# SKIP")
}

fn numbered(rest: &str) -> Option<String> {
    let rest = rest.trim_start_matches(|c: char| c.is_ascii_digit());
    let name = rest.split(" # ").next()?.trim();
    let name = name.strip_prefix("- ").unwrap_or(name);
    (!name.is_empty()).then(|| name.to_owned())
}

/// Where a test was: in the subtest that it announced last ("# name"), or after the one that passed last.
fn place(text: &str) -> String {
    let announced = |line: &str| {
        let name = line.strip_prefix("# ")?.trim();
        (!name.starts_with("Totals")).then(|| format!(", in {name:?}"))
    };
    let after = || {
        let last = text.lines().rev().find_map(passed)?;
        Some(format!(", after {last:?}"))
    };
    let last = text.lines().rev().find_map(announced).or_else(after);
    last.unwrap_or_default()
}

/// What stands below the head of KVM's assertions: "  file.c:12: expression".
fn assertion(text: &str) -> Option<String> {
    let mut lines = text.lines();
    lines.find(|line| line.contains("Test Assertion Failure"))?;
    Some(lines.next()?.trim().to_owned())
}

fn last_line(text: &str) -> String {
    let mut lines = text.lines().rev().map(str::trim);
    lines
        .find(|line| !line.is_empty())
        .unwrap_or("it printed nothing")
        .to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn red(ended: Ended, text: &str) -> String {
        match Verdict::of(ended, text) {
            Verdict::Red(what) => what,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn subtests_that_fail_are_named() {
        let text = "ok 1 a\nnot ok 2 KVM.zero page\n# x\nnot ok 3 - c # TODO\nnot ok 4 d\n";
        assert_eq!(red(Ended::Exit(1), text), "KVM.zero page; c; 1 more");
        let text = "ok 1 a\n==== Test Assertion Failure ====\n  x.c:7: a == b\n  pid=1\n";
        assert_eq!(red(Ended::Exit(254), text), "x.c:7: a == b, after \"a\"");
        let text = "# a\nok 1 a\n# b\n==== Test Assertion Failure ====\n  x.c:7: no\n# Totals: 1\n";
        assert_eq!(red(Ended::Exit(254), text), "x.c:7: no, in \"b\"");
        assert_eq!(red(Ended::Exit(1), "a\nbad: 3\n\n"), "bad: 3");
        assert_eq!(red(Ended::Exit(1), ""), "it printed nothing");
    }

    #[test]
    fn a_test_that_hangs_names_where() {
        let text = "ok 1 first part\n";
        assert_eq!(
            red(Ended::Timeout, text),
            "did not end, after \"first part\""
        );
        assert_eq!(red(Ended::Timeout, ""), "did not end");
        assert_eq!(red(Ended::Signal(6), "not ok 1 a"), "a; killed by signal 6");
    }

    #[test]
    fn a_skipped_test_says_nothing_and_a_complaint_counts() {
        assert_eq!(Verdict::of(Ended::Exit(0), "ok 1 a"), Verdict::Green);
        let skipped = Verdict::of(Ended::Exit(4), "1..0 # SKIP - no KVM\n");
        assert_eq!(
            skipped,
            Verdict::Nothing("skipped: 1..0 # SKIP - no KVM".into())
        );
        let partly = "ok 1 a\nok 2 b # SKIP no huge page\n";
        assert_eq!(Verdict::of(Ended::Exit(4), partly), Verdict::Green);
        let complaint = ["[ 1.0] WARNING: CPU: 0".to_owned()];
        let red = Verdict::Green.of_complaints(&complaint);
        assert_eq!(
            red,
            Verdict::Red("the kernel: [ 1.0] WARNING: CPU: 0".into())
        );
        assert_eq!(Verdict::Green.of_complaints(&[]), Verdict::Green);
        let failed = Verdict::Red("a".into());
        assert_eq!(failed.clone().of_complaints(&complaint), failed);
    }
}
