//! What the kernel's own unit tests (KUnit) say on its console when it boots.

use super::tally::Verdict;

/// The options that make a debug kernel run a suite, and only that.
pub(crate) fn append(suite: &str) -> [String; 2] {
    [
        "kunit.enable=1".to_owned(),
        format!("kunit.filter_glob={suite}"),
    ]
}

/// What a suite's line of totals says, unless the whole suite ran and passed.
pub(crate) fn failure(console: &str, suite: &str) -> Option<String> {
    match verdict(console, suite) {
        Verdict::Passed => None,
        Verdict::Failed(what) | Verdict::Skipped(what) => Some(what),
    }
}

/// What became of a suite, by its line of totals: `# suite: pass:8 fail:0 skip:0 total:8`.
pub(super) fn verdict(console: &str, suite: &str) -> Verdict {
    let start = format!("# {suite}: pass:");
    let totals = console.lines().find_map(|line| {
        let at = line.find(&start)?;
        Some(line[at..].trim_end())
    });
    match totals {
        Some(line) if line.contains(" fail:0 skip:0 ") && !line.contains("pass:0 ") => {
            Verdict::Passed
        }
        Some(line) if line.contains(" fail:0 ") => Verdict::Skipped(line.to_owned()),
        Some(line) => Verdict::Failed(line.to_owned()),
        None => Verdict::Failed(format!("the console has no \"{start}\": it did not run")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_suite_passes_if_it_ran_and_nothing_failed() {
        let console = "[    1.5] # mem: pass:8 fail:0 skip:0 total:8\r\n# bad: pass:7 fail:1 skip:0 total:8\n";
        assert_eq!(verdict(console, "mem"), Verdict::Passed);
        assert!(
            matches!(verdict(console, "bad"), Verdict::Failed(line) if line.contains("fail:1"))
        );
        assert!(matches!(verdict(console, "none"), Verdict::Failed(_)));
        for part in [
            "pass:0 fail:0 skip:3 total:3",
            "pass:2 fail:0 skip:1 total:3",
        ] {
            let said = verdict(&format!("# mem: {part}\n"), "mem");
            assert!(matches!(said, Verdict::Skipped(_)), "{said:?}");
        }
    }
}
