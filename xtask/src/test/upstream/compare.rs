//! What became of a test on two kernels.

use std::collections::BTreeMap;

use super::super::tally::Verdict;
use super::parts::{Part, parts};
use crate::vm::Ended;

/// The exit status with which a kernel selftest says that it could not run.
const KSFT_SKIP: u8 = 4;

/// How a test ended on a kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
enum End {
    Passed,
    /// With the reason.
    Skipped(String),
    /// With how.
    Failed(String),
    /// After its time, or with the VM; with how.
    Lost(String),
}

/// What became of a test on a kernel: how it ended, and what it says of its parts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Ran {
    end: End,
    parts: BTreeMap<String, Part>,
}

impl Ran {
    /// Of a test that ended in this way and printed this.
    pub(super) fn of(ended: Ended, text: &str) -> Self {
        let parts = parts(text);
        let failed = parts.values().any(|part| *part == Part::Failed);
        let passed = parts.values().any(|part| *part == Part::Passed);
        let end = match ended {
            // Some tests pass if the kernel lacks what all of their parts need.
            Ended::Exit(0) if !failed && (passed || parts.is_empty()) => End::Passed,
            Ended::Exit(KSFT_SKIP) if passed && !failed => End::Passed,
            Ended::Exit(0 | KSFT_SKIP) if !failed => {
                let lower = |line: &&str| line.to_lowercase().contains("skip");
                let line = text.lines().rev().find(lower);
                End::Skipped(line.unwrap_or_else(|| last_line(text)).trim().to_owned())
            }
            Ended::Timeout => End::Lost(ended.to_string()),
            _ => End::Failed(format!("{ended}: {}", last_line(text))),
        };
        Self { end, parts }
    }

    /// Of a test that did not end.
    pub(super) fn lost(how: String) -> Self {
        Self {
            end: End::Lost(how),
            parts: BTreeMap::new(),
        }
    }

    /// How many of its parts passed.
    pub(super) fn passed_parts(&self) -> usize {
        let parts = self.parts.values();
        parts.filter(|part| **part == Part::Passed).count()
    }

    /// Whether it passed.
    pub(super) fn passed(&self) -> bool {
        self.end == End::Passed
    }

    /// Whether it did not end by itself.
    pub(super) fn is_lost(&self) -> bool {
        matches!(self.end, End::Lost(_))
    }

    /// In a few words.
    pub(super) fn told(&self) -> String {
        match &self.end {
            End::Passed => "passes".into(),
            End::Skipped(reason) => format!("skipped: {reason}"),
            End::Lost(how) => how.clone(),
            End::Failed(how) => {
                let failed = self.parts.iter().filter(|(_, part)| **part == Part::Failed);
                let names: Vec<_> = failed.map(|(name, _)| name.as_str()).collect();
                match names.as_slice() {
                    [] => format!("fails: {how}"),
                    names => format!("fails: {how}: {}", names.join("; ")),
                }
            }
        }
    }
}

/// The verdict on the series.
pub(super) fn compare(stock: &Ran, series: &Ran) -> Verdict {
    if let End::Lost(how) = &stock.end {
        return Verdict::Skipped(format!("not compared: on the stock kernel {how}"));
    }
    let both = || format!("stock {}; series {}", stock.told(), series.told());
    let lost = stock.parts.iter().filter_map(|(name, old)| {
        let new = series.parts.get(name).copied();
        (*old == Part::Passed && new != Some(Part::Passed)).then_some(name.as_str())
    });
    let broken = series.parts.iter().filter_map(|(name, new)| {
        let old = stock.parts.get(name).copied();
        (*new == Part::Failed && old != Some(Part::Failed)).then_some(name.as_str())
    });
    let mut worse: Vec<_> = lost.chain(broken).collect();
    worse.sort_unstable();
    worse.dedup();
    if !worse.is_empty() {
        return Verdict::Failed(format!("{}; in particular: {}", both(), worse.join("; ")));
    }
    match (&stock.end, &series.end) {
        (_, End::Passed) => Verdict::Passed,
        (End::Passed, _) | (_, End::Lost(_)) | (End::Skipped(_), End::Failed(_)) => {
            Verdict::Failed(both())
        }
        _ => Verdict::Skipped(format!(
            "not passed on either kernel, {} parts pass on both: {}",
            series.passed_parts(),
            both()
        )),
    }
}

fn last_line(text: &str) -> &str {
    let mut lines = text.lines().rev().map(str::trim);
    lines.find(|line| !line.is_empty()).unwrap_or("no output")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ran(status: u8, text: &str) -> Ran {
        Ran::of(Ended::Exit(status), text)
    }

    #[test]
    fn a_test_passes_fails_or_is_skipped() {
        assert_eq!(ran(0, "ok 1 a\nok 2 b # SKIP c\n").end, End::Passed);
        assert_eq!(ran(0, "").end, End::Passed);
        assert_eq!(
            ran(0, "ok 1 # SKIP no GUP_TEST\n# Totals: pass:0\n").end,
            End::Skipped("ok 1 # SKIP no GUP_TEST".into())
        );
        assert_eq!(ran(4, "ok 1 a\nok 2 b # SKIP c\n").end, End::Passed);
        assert_eq!(
            ran(4, "1..0 # SKIP - c\n").end,
            End::Skipped("1..0 # SKIP - c".into())
        );
        assert_eq!(
            ran(1, "x\nbad\n\n").end,
            End::Failed("exit status 1: bad".into())
        );
        // The exit status is not all: the test must not say that a part failed.
        assert!(matches!(ran(0, "not ok 2 b\n").end, End::Failed(_)));
        assert!(matches!(ran(4, "not ok 2 b\n").end, End::Failed(_)));
        assert!(matches!(Ran::of(Ended::Timeout, "").end, End::Lost(_)));
    }

    #[test]
    fn what_passes_on_the_stock_kernel_has_to_pass() {
        let failed = ran(1, "bad");
        let passed = ran(0, "");
        let skipped = ran(4, "1..0 # SKIP - no");
        let partly = ran(1, "ok 1 a\nnot ok 2 b\n");
        let less = ran(1, "not ok 1 a\nnot ok 2 b\n");
        let more = ran(1, "ok 1 a\nok 2 b\n");
        let whole = ran(0, "ok 1 a\nok 2 b\n");
        let fewer = ran(0, "ok 1 a\nok 2 b # SKIP\n");
        let lost = Ran::of(Ended::Timeout, "");
        for (stock, series) in [
            (&passed, &failed),
            (&passed, &skipped),
            (&passed, &lost),
            (&failed, &lost),
            (&skipped, &failed),
            (&partly, &less),
            (&partly, &failed),
            (&fewer, &partly),
            // A part that is not run any more.
            (&whole, &fewer),
            (&whole, &passed),
        ] {
            let verdict = compare(stock, series);
            assert!(
                matches!(verdict, Verdict::Failed(_)),
                "{stock:?} {series:?}"
            );
        }
        for (stock, series) in [
            (&failed, &failed),
            (&partly, &partly),
            (&less, &partly),
            (&less, &more),
            (&skipped, &skipped),
            (&failed, &skipped),
            (&lost, &failed),
            (&lost, &passed),
        ] {
            let verdict = compare(stock, series);
            assert!(
                matches!(verdict, Verdict::Skipped(_)),
                "{stock:?} {series:?}"
            );
        }
        for (stock, series) in [(&failed, &passed), (&fewer, &whole), (&passed, &passed)] {
            assert_eq!(compare(stock, series), Verdict::Passed, "{stock:?}");
        }
    }
}
