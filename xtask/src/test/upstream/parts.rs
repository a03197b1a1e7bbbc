//! What a test says of its parts.

use std::collections::BTreeMap;

/// What became of a part of a test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    Passed,
    /// Skipped, or expected to fail.
    Skipped,
    Failed,
}

/// The parts that a test's output names, in the ways in which the kernel's tests do that:
///
/// - `ok 1 NAME` (most of them),
/// - `# [RUN] NAME` and then `ok 1 RESULT` (`cow`, `gup_longterm`),
/// - `Testing NAME... done` (`uffd-unit-tests`),
/// - `Run test: NAME`, and then one or more steps, of which those that failed end with a red `Fail` (`khugepaged`).
///
/// Names lose addresses, which change from run to run. A name that comes again gets a number.
pub(super) fn parts(text: &str) -> BTreeMap<String, Part> {
    let mut parts = BTreeMap::new();
    let mut running = None;
    let mut steps = None;
    for line in text.lines().map(str::trim) {
        if let Some(name) = line.strip_prefix("# [RUN] ") {
            running = Some(name);
        }
        if let Some(name) = line.strip_prefix("Run test: ") {
            steps = Some(add(&mut parts, name, Part::Passed));
        }
        if let Some(name) = steps.as_ref().filter(|_| line.contains(FAIL)) {
            parts.insert(name.clone(), Part::Failed);
        }
        if let Some((name, part)) = part(line) {
            add(&mut parts, running.unwrap_or(name), part);
        }
    }
    parts
}

/// What khugepaged prints in red.
const FAIL: &str = "\x1b[31mFail";

/// Adds a part. Returns the name that it got.
fn add(parts: &mut BTreeMap<String, Part>, name: &str, part: Part) -> String {
    let name = plain(name);
    let mut unique = name.clone();
    let mut count = 1;
    while parts.contains_key(&unique) {
        count += 1;
        unique = format!("{name}, {count}");
    }
    parts.insert(unique.clone(), part);
    unique
}

fn part(line: &str) -> Option<(&str, Part)> {
    if let Some(rest) = line.strip_prefix("Testing ") {
        let (name, result) = rest.split_once("... ")?;
        let part = match result.split(' ').next()? {
            "done" => Part::Passed,
            "skipped" => Part::Skipped,
            _ => Part::Failed,
        };
        return Some((name, part));
    }
    let (rest, part) = match line.strip_prefix("not ok ") {
        Some(rest) => (rest, Part::Failed),
        None => (line.strip_prefix("ok ")?, Part::Passed),
    };
    let rest = rest.trim_start_matches(|c: char| c.is_ascii_digit());
    for mark in ["# SKIP", "# XFAIL", "# TODO"] {
        if let Some((name, _)) = rest.split_once(mark) {
            return Some((name, Part::Skipped));
        }
    }
    Some((rest, part))
}

fn plain(name: &str) -> String {
    let words = name.split_whitespace();
    let words = words.map(|word| if word.contains("0x") { "ADDRESS" } else { word });
    words.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_is_found() {
        let text = "# ok 9 no\nok 1 fork of 12 pages\nnot ok 2 fork of 12 pages\n\
                    ok 3 d at 0x7fab # XFAIL\nok 4\nok 5 # SKIP\n\
                    Testing move on anon... done\nTesting poison on shmem... skipped [reason: no]\n\
                    Testing minor on hugetlb... failed [reason: bad]\n\
                    # [RUN] COW of a page\nok 1 No leak\n# [RUN] COW of two\nok 2 # SKIP no swap\n\
                    Run test: collapse (madvise:shmem)\nCollapse... \x1b[32mOK\x1b[0m\n\
                    Run test: swap (madvise:shmem)\nSwap... \x1b[31mFail\x1b[0m\nCheck... \x1b[32mOK\x1b[0m\n";
        let found: Vec<_> = parts(text).into_iter().collect();
        let found: Vec<_> = found
            .iter()
            .map(|(name, part)| (name.as_str(), *part))
            .collect();
        assert_eq!(
            found,
            [
                ("", Part::Passed),
                (", 2", Part::Skipped),
                ("COW of a page", Part::Passed),
                ("COW of two", Part::Skipped),
                ("collapse (madvise:shmem)", Part::Passed),
                ("d at ADDRESS", Part::Skipped),
                ("fork of 12 pages", Part::Passed),
                ("fork of 12 pages, 2", Part::Failed),
                ("minor on hugetlb", Part::Failed),
                ("move on anon", Part::Passed),
                ("poison on shmem", Part::Skipped),
                ("swap (madvise:shmem)", Part::Failed),
            ]
        );
    }
}
